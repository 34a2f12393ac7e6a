"""hop: each document leads to the next, as in BrowseComp-Plus (arXiv 2508.06600).

Gold is a short string. The score is exact after HotpotQA's normalisation; BrowseComp-Plus
itself asks a judge model.

A person, known by trade and birthplace -> the teacher -> the institute that the teacher
directed -> its city. Others share the trade or the birthplace, but not both.
"""
import re
import string

from tasks.in_repl import TOOLS, asked, first_hit, script
from tasks.text import as_line, characters, field, fill, filler, names

STRATEGY = """\
The context is a dict {id: document}. No document holds the whole answer: search for the \
first clue, let children read the documents found and return the name that leads on, \
search for that, and so on. Return the final name alone."""
TOKENS = 8_000
QUERY = """\
Someone who was a {job} born in {town} studied with a person who later directed an \
institute. In which city does that institute stand? Answer with the name of the city \
alone."""
JOBS = "composer weaver printer surveyor physician baker mason chemist".split()


def make(rng, tokens=None, heldout=False):
    chars = characters(tokens, TOKENS)
    size = max(500, min(4000, chars // 40))  # characters of a document
    n = chars // size // 2  # people, and as many institutes
    people = [f"{first} {last}" for first, last in zip(names(rng, n, 3), names(rng, n, 3))]
    institutes, pool = names(rng, n, 4), filler(rng)
    places = names(rng, 120, 2)
    towns, cities = places[:60], places[60:]

    lives = [(rng.choice(JOBS), rng.choice(towns), rng.randrange(n - 1)) for _ in people]
    who = rng.randrange(n)
    job, town, _ = lives[who]
    stands = [rng.choice(cities) for _ in institutes]
    teachers, documents = [], []
    for i, (trade, born, other) in enumerate(lives):
        if i != who and (trade, born) == (job, town):
            trade = JOBS[JOBS.index(job) - 1]
        teachers.append(other + (other >= i))  # anyone else
        documents.append((
            f"{people[i]} was a {trade} born in {born} in {rng.randrange(1700, 1900)}.",
            f"{people[i]} studied with {people[teachers[i]]}.",
            f"{people[i]} later directed the {institutes[i]} Institute."))
        documents.append((
            f"The {institutes[i]} Institute was founded in {rng.randrange(1700, 1900)}.",
            f"The {institutes[i]} Institute stands in {stands[i]}."))
    rng.shuffle(documents)

    context = {}
    for i, (first, *facts) in enumerate(documents):
        text = fill(rng, pool, size - len(first) - sum(map(len, facts)))
        for fact in facts:
            text.insert(rng.randrange(len(text) + 1), fact)
        context[str(i)] = " ".join([first, *text])
    return QUERY.format(job=job, town=town), context, stands[teachers[who]]


def score(task, answer):
    return float(normalized(as_line(answer)) == normalized(task.answer) != "")


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous blanks."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def read(row):
    """`query`, `answer`, `gold_docs`, `evidence_docs`, `negative_docs` = [{docid, text}]:
    Tevatron/browsecomp-plus, decrypted."""
    context = {}
    for name in ("gold_docs", "evidence_docs", "negative_docs"):
        for i, document in enumerate(field(row, name, list)):
            where = f"{name}[{i}]: "
            key = field(document, "docid", str, where)
            context[key] = field(document, "text", str, where, blank=False)
    if not context:
        raise ValueError("field 'gold_docs' and the others are empty: no context")
    context = dict(sorted(context.items()))  # the gold does not come first
    return field(row, "query", str), context, field(row, "answer", str, blank=False)


# Runs in the REPL: children read one document each.
def chain(context, person):
    def read(question, start):
        return rlm_query(question, next(t for t in context.values() if start in t))

    teacher = read("Who was the teacher?", f"was a {person}")
    institute = read("Which institute did the person direct?", f"{teacher} was a ")
    start = f"The {institute} Institute was founded"
    return read("In which city does the institute stand?", start)


# Runs in a child's REPL.
def fact(context, pattern):
    return re.search(pattern, context)[1]


def oracle(task, node):
    if not node.depth:
        return script(chain, re.search(r"was a (\w+ born in \w+) ", task.query)[1])
    patterns = {"teacher": r"studied with (\w+ \w+)\.",
                "direct": r"directed the (\w+) Institute",
                "city": r"stands in (\w+)\."}
    return script(fact, next(p for word, p in patterns.items() if word in asked(node)))


keyword = first_hit
