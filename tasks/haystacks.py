"""Long-context questions made from a seed, and the scripts that are their ceiling and their floor.

Seven kinds, each in the manner of a public benchmark, at any length: 10 million tokens (40 MB) in
a few seconds; and deep, in one size, which needs two levels of children. Text is drawn from small
pools of sentences, lines or functions, so length costs next to nothing; what the question is about
is made once and occurs nowhere else.

A function a kind returns (name, query, context, gold); tasks.py says what gold is and scores it.
`oracle_code` and `keyword_code` return the code of a node's next message: the oracle may
use how its questions are made and shows what a perfect policy scores and costs; the other searches
for a word of the question and answers with what it finds.

Left out: real text. The labels of `aggregate` and `pairs` follow from how a question begins, so
that a script can know them; a model has to read. Standard library only.
"""
import bisect
import inspect
import itertools
import json
import random
import re
from collections import Counter

ONSETS, VOWELS, CODAS = "bdfgklmnprst", "aeiou", "nrlx"
SYLLABLES = [o + v + CODAS[(i + j) % 4]  # 60
             for i, o in enumerate(ONSETS) for j, v in enumerate(VOWELS)]
ADJECTIVES = "early broad stable narrow hidden simple second common local recent".split()
NOUNS = "sample layer method signal model record survey result effect pattern".split()
VERBS = "improved reduced followed explained limited confirmed shifted matched".split()
TAILS = ("in every trial", "at low cost", "without a control", "over two years",
         "for small groups", "under new rules", "after the change", "with less noise")
POOL = 400  # different sentences, lines or functions that fill a context


# ---------------------------------------------------------------------------------------------
# Words and filler

def make_term(rng: random.Random, heldout: bool = False) -> str:
    """Two made-up syllables. A fifth of the pairs is held out: never seen in training."""
    while True:
        i, j = rng.randrange(len(SYLLABLES)), rng.randrange(len(SYLLABLES))
        if i != j and ((i + 3 * j) % 5 == 0) == heldout:
            return f"{SYLLABLES[i]}-{SYLLABLES[j]}"


def make_sentence(rng: random.Random, term: str) -> str:
    head = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    tail = f"{rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(TAILS)}."
    return rng.choice((f"{head} of {term} {tail}", f"{head} with {term} {tail}"))


def filler(rng: random.Random, without: str = "") -> list[str]:
    """POOL sentences, none about the term `without`."""
    terms = [t for t in (make_term(rng) for _ in range(40)) if t != without]
    return [make_sentence(rng, rng.choice(terms)) for _ in range(POOL)]


def fill(rng: random.Random, pool: list[str], chars: int) -> list[str]:
    """Draws from the pool: as many as fit, with a joint of one character, into `chars`."""
    mean = sum(map(len, pool)) / len(pool) + 1
    drawn = rng.choices(pool, k=int(1.1 * chars / mean) + 20)
    ends = list(itertools.accumulate(len(d) + 1 for d in drawn))
    return drawn[:bisect.bisect_right(ends, chars)]


def names(rng: random.Random, n: int, syllables: int) -> list[str]:
    """n different names of so many syllables."""
    return ["".join(SYLLABLES[i // 60 ** s % 60] for s in range(syllables)).capitalize()
            for i in rng.sample(range(60 ** syllables), n)]


# ---------------------------------------------------------------------------------------------
# evidence: the sentences about one term, in papers

MANY = 2_000  # papers


def paper_chars(sentences: int) -> float:
    """Characters of a generated paper, on average."""
    return 66 * sentences + 122.6


def evidence(rng: random.Random, heldout: bool, papers: int, relevant: tuple[int, int],
             sentences: int):
    """Each paper has a title, an abstract and `sentences` sentences, each about a made-up term. The
    question asks for those about one term, which occurs in one or two sentences of relevant[0]
    to relevant[1] of the papers and nowhere else. Above MANY papers sentences repeat."""
    term = make_term(rng, heldout)
    others = [t for t in (make_term(rng, heldout) for _ in range(2 * papers)) if t != term]
    while len(others) < 2:  # a term drawn twice, for a single paper
        others += {make_term(rng, heldout)} - {term}
    chosen = set(rng.sample(range(papers), min(papers, rng.randint(*relevant))))
    context, gold, tell = {}, {}, make_sentence
    if papers > MANY:  # 65,000 papers of new sentences would take many seconds
        pool = [make_sentence(rng, rng.choice(others)) for _ in range(10 * POOL)]
        tell = lambda rng, term: rng.choice(pool)  # noqa: E731
    for p in range(papers):
        own = rng.sample(others, 2)
        body = [tell(rng, rng.choice(own)) for _ in range(sentences)]
        if p in chosen:
            for at in rng.sample(range(sentences), min(sentences, rng.randint(1, 2))):
                body[at] = make_sentence(rng, term)
                gold.setdefault(f"p{p}", []).append(body[at])
        title = f"{rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS)}s of {own[0]}"
        context[f"p{p}"] = paper_text(title, tell(rng, own[1]), " ".join(body))
    return term, f'Quote all on "{term}".', context, gold


def paper_text(title: str, abstract: str, text: str) -> str:
    return f"### PAPER: {title}\n<abstract>{abstract}</abstract>\n{text}"


# ---------------------------------------------------------------------------------------------
# deep: two levels of delegation

WORDS = random.Random(0).sample([o + v + c for o in ONSETS for v in VOWELS for c in CODAS], 240)
DICTIONARY = dict(zip(WORDS, random.Random(1).sample([v + o for v in VOWELS for o in ONSETS], 60)))


def deep(rng: random.Random):
    """Two papers of two sections of two paragraphs, as nested lists. One word of each paragraph
    is in DICTIONARY, and the question asks for the eight meanings. The dictionary is nowhere in
    the context and too long to be written as code, all words look alike and none occurs twice: to
    find the one that counts somebody has to read the paragraph."""
    known, others = rng.sample(list(DICTIONARY), 8), iter(rng.sample(WORDS[60:], 19 * 8))
    parts = []
    for word in known:
        words = [next(others) for _ in range(19)]
        words.insert(rng.randrange(20), word)
        parts.append(" ".join(words))
    while len(parts) > 2:
        parts = [parts[i:i + 2] for i in range(0, len(parts), 2)]
    return known[0], "Translate all.", parts, [DICTIONARY[word] for word in known]


# ---------------------------------------------------------------------------------------------
# niah: one needle in filler (RULER, arXiv 2404.06654)

def niah(rng: random.Random, chars: int):
    key, value = make_term(rng), str(rng.randrange(10 ** 6, 10 ** 7))
    needle = f"One of the special magic numbers for {key} is: {value}."
    text = fill(rng, filler(rng, key), chars - len(needle))
    text.insert(rng.randrange(len(text) // 10 + 1, len(text)), needle)  # not in the first tenth
    query = f"What is the special magic number for {key} mentioned in the provided text?"
    return key, query, " ".join(text), [value]


# ---------------------------------------------------------------------------------------------
# aggregate, pairs: label every line, then count (OOLONG, arXiv 2511.02817; pairs: 2512.24601)

OPENERS = {  # how a question of each label begins
    "numeric value": ("How many people saw", "How far away is", "How old is", "What year saw",
                      "How much did they pay for"),
    "entity": ("What animal is named after", "What instrument measures", "Which colour marks",
               "What metal is used in", "Which language describes"),
    "location": ("Where is", "Which city keeps", "What country is known for", "Which river crosses",
                 "On what island lies"),
    "description and abstract concept": ("Why is there", "How do you make", "What caused",
                                         "What is the meaning of", "How does one explain"),
    "abbreviation": ("What is the acronym for", "What does one abbreviate as BTR in",
                     "What do the letters KPS mean in", "What is the short form of",
                     "What is the full name of the GDF in"),
    "human being": ("Who discovered", "Who was the first to see", "Which inventor made",
                    "What painter is known for", "Whose assistant wrote down")}
LABELS = list(OPENERS)
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
DAYS = [f"{month} {day:02}, {year}" for year in (2023, 2024) for month in MONTHS
        for day in range(1, 29)]
HEAD = """\
The following lines contain general-knowledge questions, one per line. Each line has a date, a \
user ID, which may occur on several lines, and a question whose answer is one of these 6 labels: \
{labels}. The data does not give the labels: work them out from the questions. Calculate exactly, \
do not estimate.

"""


def records(rng: random.Random, chars: int, users: int, own_labels: bool):
    """(context, rows): rows are (date as YYYY-MM-DD, user, label), one a line.

    With `own_labels` a user asks mostly about two labels and seldom about a third, so that users
    differ; otherwise all users draw alike from labels of different frequency."""
    terms = [make_term(rng) for _ in range(40)]
    pool = {label: [f"{opener} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} of "
                    f"{rng.choice(terms)}?" for opener in openers for _ in range(POOL // 30)]
            for label, openers in OPENERS.items()}
    head = HEAD.format(labels=", ".join(rng.sample(LABELS, 6)))
    ids = rng.sample(range(10_000, 100_000), users)
    n = (chars - len(head)) // 80 + 20  # more than fit
    who = rng.choices(ids, [1 / (3 + i) for i in range(users)], k=n)
    if own_labels:
        own = {user: rng.sample(LABELS, 3) for user in ids}
        labels = [rng.choices(own[user], (8, 3, 0.4))[0] for user in who]
    else:
        labels = rng.choices(LABELS, [rng.uniform(1, 3) for _ in LABELS], k=n)
    days = rng.choices(DAYS, k=n)
    which = rng.choices(range(len(pool[LABELS[0]])), k=n)
    lines = [f"Date: {day} || User: {user} || Instance: {pool[label][q]}"
             for day, user, label, q in zip(days, who, labels, which)]
    ends = list(itertools.accumulate(len(line) + 1 for line in lines))
    n = bisect.bisect_right(ends, chars - len(head))
    iso = {day: date(day) for day in DAYS}
    rows = [(iso[day], str(user), label) for day, user, label in zip(days[:n], who, labels)]
    return head + "\n".join(lines[:n]), rows


def date(day: str) -> str:
    """'Jan 06, 2023' as '2023-01-06'."""
    months = "JanFebMarAprMayJunJulAugSepOctNovDec"
    return f"{day[8:]}-{months.index(day[:3]) // 3 + 1:02}-{day[4:6]}"


FORMS = {  # form: type of the answer, question; the parts before { tell the forms apart
    "most": ("LABEL", "which of the labels is the most common? Give your final answer in the form "
             "'Label: answer', where answer is one of the labels."),
    "least": ("LABEL", "which of the labels is the least common? Give your final answer in the "
              "form 'Label: answer', where answer is one of the labels."),
    "count": ("NUMERIC", "how many data points should be classified as label '{a}'? Give your "
              "final answer in the form 'Answer: number'."),
    "compare": ("COMPARISON", "is label '{a}' more common, less common, or the same frequency as "
                "label '{b}'? Give your final answer in the form 'Answer: {a} is [X] {b}', where "
                "[X] is 'more common than', 'less common than', or 'same frequency as'."),
    "user": ("USER", "which user has the most instances with the label '{a}'? Give your final "
             "answer in the form 'User: [X]', where [X] is the user ID."),
    "month": ("MONTH_YEAR", "in which month do instances with the label '{a}' occur most often? "
              "Give your final answer in the form 'Answer: [X]', where [X] is the month and the "
              "year, for example 'January 2023'.")}


def aggregate(rng: random.Random, chars: int):
    context, rows = records(rng, chars, max(8, min(300, chars // 4000)), False)
    while True:  # until the question has one answer
        form = rng.choice(list(FORMS))
        a, b = rng.sample(LABELS, 2)
        scope, asked = rng.choice(("all", "users", "dates")), "In the above data"
        if scope == "users":
            users = [user for user, _ in Counter(row[1] for row in rows).most_common(8)]
            chosen = rng.sample(users, 3)
            asked = ("For the following question, only consider the instances of the user IDs "
                     + ", ".join(chosen) + ". Among them")
        elif scope == "dates":
            first, last = sorted(rng.sample(range(len(DAYS)), 2))
            asked = ("For the following question, only consider the instances between "
                     f"{DAYS[first]} and {DAYS[last]}, both included. Among them")
        query = f"{asked}, {FORMS[form][1].format(a=a, b=b)}"
        gold = tally(rows, *question_of(query))
        if gold is not None:
            return form, query, context, {"type": FORMS[form][0], "value": gold}


def question_of(query: str) -> tuple:
    """(form, labels, users, dates) of a question of `aggregate`; empty where it does not say."""
    form = next(f for f, (_, text) in FORMS.items() if text.partition("{")[0] in query)
    users = re.search(r"user IDs ([\d, ]+)\.", query)
    days = re.findall(r"(?:between|and) (\w{3} \d\d, \d{4})", query)
    return (form, re.findall(r"label '([^']+)'", query),
            users[1].split(", ") if users else [], [date(day) for day in days])


def tally(rows, form, labels, users, dates):
    """The answer to a question over rows (date, user, label); None if two answers tie."""
    rows = [r for r in rows if (not users or r[1] in users)
            and (not dates or dates[0] <= r[0] <= dates[1])]
    counts = Counter(r[2] for r in rows)
    if form == "count":
        return str(counts[labels[0]])
    if form == "compare":
        a, b = (counts[label] for label in labels)
        return ("more common than" if a > b else "less common than" if a < b
                else "same frequency as")
    if form in ("user", "month"):
        key = (lambda r: r[1]) if form == "user" else (lambda r: r[0][:7])
        counts = Counter(key(r) for r in rows if r[2] == labels[0])
    ranked = (counts.most_common() + [("", 0)])[:2]
    if form == "least":
        ranked = counts.most_common()[::-1][:2] if len(counts) == 6 else []
    if len(ranked) < 2 or ranked[0][1] == ranked[1][1]:
        return None
    if form != "month":
        return ranked[0][0]
    year, month = ranked[0][0].split("-")
    return ("January February March April May June July August September October November "
            "December").split()[int(month) - 1] + " " + year


PAIRS = ("In the above data, list all pairs of user IDs (no duplicate pairs, list lower ID first) "
         "{rule}. Each question has one of these labels (the data does not give them: work them "
         "out from the questions): {labels}. In your answer, list all pairs in the format "
         "(user_id_1, user_id_2), separated by newlines.")


def pairs(rng: random.Random, chars: int):
    """The three shapes of the paper's twenty queries: both users alike, the same with a date, and
    two users who differ. The rule holds for some pairs, at most for half of them."""
    context, rows = records(rng, chars, max(8, min(150, chars // 1000)), True)
    ids = len({row[1] for row in rows})
    while True:
        a, b, c, d = rng.sample(LABELS, 4)
        kind = rng.choice(("both", "dated", "unlike"))
        rule = f"where both users have at least one instance with {a} or {b}"
        if kind == "dated":
            rule += (f", and all instances that are {a} for both users must be "
                     f"{rng.choice(('after', 'before'))} {rng.choice(DAYS)}")
        if kind == "unlike":
            many = ("at least one instance", "at least two instances", "exactly one instance",
                    "exactly two instances")
            rule = (f"such that one user has {rng.choice(many)} with {a} and {rng.choice(many)} "
                    f"with {b}, and the other user has {rng.choice(many)} with {c}"
                    + rng.choice(("", f" and {rng.choice(many)} with {d}")))
        query = PAIRS.format(rule=rule, labels=", ".join(LABELS))
        gold = matching(rows, *rule_of(query))
        if 0 < len(gold) <= ids * (ids - 1) // 4:
            return kind, query, context, gold


def rule_of(query: str) -> tuple:
    """(clauses of one user, clauses of the other, [label, "after" or "before", date] or [])."""
    rule = query.split("list lower ID first) ")[1].split(". Each question")[0]
    label = "|".join(LABELS)
    clause = rf"(at least|exactly) (one|two) instances? with ((?:{label})(?: or (?:{label}))?)"
    first, second = ([[how, ("one", "two").index(n) + 1, which.split(" or ")]
                      for how, n, which in re.findall(clause, part)]
                     for part in (rule.split("and the other user") * 2)[:2])
    dated = re.search(rf"that are ({label}) for both users must be (\w+) (\w+ \d\d, \d+)", rule)
    return first, second, [dated[1], dated[2], date(dated[3])] if dated else []


def matching(rows, first, second, dated):
    """The pairs [lower ID, higher ID] of users that fit the clauses, over rows (date, user,
    label)."""
    of = {}
    for day, user, label in rows:
        of.setdefault(user, []).append((day, label))

    def fits(own, clauses):
        for how, number, labels in clauses:
            n = sum(label in labels for _, label in own)
            if n != number if how == "exactly" else n < number:
                return False
        return not dated or all((day > dated[2]) == (dated[1] == "after") and day != dated[2]
                                for day, label in own if label == dated[0])

    one, other = ([u for u in of if fits(of[u], clauses)] for clauses in (first, second))
    found = {tuple(sorted((u, v), key=int)) for u in one for v in other if u != v}
    return [list(pair) for pair in sorted(found)]


# ---------------------------------------------------------------------------------------------
# copy: a text to return character by character (the verbatim_copy environment of verifiers)

COPY = "Copy the text that is the context exactly, character by character, and nothing else."


def copy(rng: random.Random, chars: int):
    form = rng.choice(("json", "csv", "code", "prose"))
    rows = [(i, make_term(rng), rng.choice(NOUNS), rng.randrange(10 ** 6), rng.choice(DAYS),
             f"{rng.choice(ADJECTIVES)} {rng.choice(TAILS)}") for i in range(chars // 40)]
    if form == "json":
        keys = ("id", "name", "kind", "amount", "date", "note")
        text = [json.dumps(dict(zip(keys, row))) for row in rows]
    elif form == "csv":
        text = ["id,name,kind,amount,date,note"]
        text += [f'{i},{name},{kind},{n},"{day}",{note}' for i, name, kind, n, day, note in rows]
    elif form == "code":
        text = [function(rng, f"{kind}_{i}", n, i) for i, _, kind, n, _, _ in rows]
    else:
        text = [make_sentence(rng, term) for _, term, *_ in rows]
    ends = list(itertools.accumulate(len(part) + 1 for part in text))
    text = "\n".join(text[:bisect.bisect_right(ends, chars)]).strip()
    return form, COPY, text, text


# ---------------------------------------------------------------------------------------------
# code: what a call returns, across files; multiple choice (CodeQA of LongBench v2, 2412.15204)

def function(rng: random.Random, name: str, add: int, times: int, calls: str = "") -> str:
    inner = f"{calls}(y)" if calls else "y"
    return (f"def {name}(x):\n    # {make_sentence(rng, make_term(rng))}\n"
            f"    y = x + {add}\n    return {inner} * {times}\n\n")


def code(rng: random.Random, chars: int):
    """f calls g in another file, which calls h in a third. Two more files hold a g and an h with
    other numbers: only the imports tell which is meant, and the wrong choices are what the wrong
    ones give."""
    size = max(600, min(4000, chars // 40))
    words = [(verb, noun) for verb in VERBS for noun in NOUNS]
    pool = [function(rng, f"{verb}_{noun}_{i}", rng.randrange(40), rng.randrange(1, 10))
            for i in range(POOL // 80) for verb, noun in words]
    paths = [f"src/{rng.choice(NOUNS)}_{i}.py" for i in range(max(8, chars // size))]
    files = {path: fill(rng, pool, size) for path in paths}
    f, g, h = ("_".join(pair) for pair in rng.sample(words, 3))
    start, *middles, end, other = rng.sample(paths, 5)
    while True:
        numbers = [(rng.randrange(2, 40), rng.randrange(2, 10)) for _ in range(5)]
        x, (one, g1, g2, h1, h2) = rng.randrange(2, 100), numbers
        values = [(x + one[0] + g[0] + h[0]) * h[1] * g[1] * one[1]
                  for g in (g1, g2) for h in (h1, h2)]
        if len(set(values)) == 4:
            break
    for path, name, n, calls, source in (
            (start, f, one, g, middles[0]), (middles[0], g, g1, h, end),
            (middles[1], g, g2, h, other), (end, h, h1, "", ""), (other, h, h2, "", "")):
        files[path].insert(rng.randrange(len(files[path]) + 1), function(rng, name, *n, calls))
        if calls:
            module = source[:-3].replace("/", ".")
            files[path].insert(0, f"from {module} import {calls}\n\n")
    shown = rng.sample(values, 4)
    query = (f"What does `{f}({x})` in {start} return?\n"
             + "\n".join(f"({letter}) {value}" for letter, value in zip("ABCD", shown))
             + "\nAnswer with the letter.")
    return f, query, {p: "".join(parts) for p, parts in files.items()}, (
        "ABCD"[shown.index(values[0])])


# ---------------------------------------------------------------------------------------------
# hop: each document leads to the next (in the manner of BrowseComp-Plus, arXiv 2508.06600)

JOBS = "composer weaver printer surveyor physician baker mason chemist".split()


def hop(rng: random.Random, chars: int):
    """A person by trade and birthplace -> the teacher -> the institute the teacher directed -> its
    city. As many others share the trade or the birthplace, but not both."""
    size = max(500, min(4000, chars // 40))
    n = chars // size // 2  # people, and as many institutes
    people = [f"{a} {b}" for a, b in zip(names(rng, n, 3), names(rng, n, 3))]
    institutes, pool = names(rng, n, 4), filler(rng)
    places = names(rng, 120, 2)
    towns, cities = places[:60], places[60:]
    lives = [(rng.choice(JOBS), rng.choice(towns), rng.randrange(n - 1)) for _ in people]
    who = rng.randrange(n)
    job, town, _ = lives[who]
    documents, stands = [], [rng.choice(cities) for _ in institutes]
    for i, (trade, born, k) in enumerate(lives):
        if i != who and (trade, born) == (job, town):
            trade = JOBS[JOBS.index(job) - 1]
        teacher = k + (k >= i)  # anyone else
        documents.append((
            f"{people[i]} was a {trade} born in {born} in {rng.randrange(1700, 1900)}.",
            f"{people[i]} studied with {people[teacher]}.",
            f"{people[i]} later directed the {institutes[i]} Institute."))
        documents.append((f"The {institutes[i]} Institute was founded in "
                          f"{rng.randrange(1700, 1900)}.",
                          f"The {institutes[i]} Institute stands in {stands[i]}."))
    rng.shuffle(documents)
    context = {}
    for i, (first, *facts) in enumerate(documents):
        text = fill(rng, pool, size - len(first) - sum(map(len, facts)))
        for fact in facts:
            text.insert(rng.randrange(len(text) + 1), fact)
        context[str(i)] = " ".join([first, *text])
    k = lives[who][2]
    query = (f"Someone who was a {job} born in {town} studied with a person who later directed an "
             "institute. In which city does that institute stand? Answer with the name of the "
             "city alone.")
    return f"{job}-{town}", query, context, stands[k + (k >= who)]


MAKE = {"niah": niah, "aggregate": aggregate, "pairs": pairs, "copy": copy, "code": code,
        "hop": hop}  # (rng, characters) -> (name, query, context, gold)


# ---------------------------------------------------------------------------------------------
# The oracle: code that knows how the questions are made, and hands pieces to children

PIECES = 24  # children of one batch


def oracle_code(kind: str, query: str, asked: str, depth: int) -> str:
    """The code of the next message of a node at `depth` that was asked `asked`, in a tree for
    `query`. What the children do: evidence, niah: find it in a piece; aggregate, pairs: label
    their lines; code, hop: read one file. copy needs none."""
    if depth:
        return CHILD[kind](query, asked)
    return {"evidence": _evidence, "niah": _niah, "aggregate": _aggregate, "pairs": _pairs,
            "copy": lambda query: "FINAL(context)", "code": _code, "hop": _hop}[kind](query)


def _evidence(query: str) -> str:
    term = query.split('"')[1]
    return (f'hits = [p for p in context.values() if "{term}" in p]\n'
            f"FINAL(rlm_query_batched('Quote \"{term}\".', hits))")


def _niah(query: str) -> str:
    return (f"n, overlap = -(-len(context) // {PIECES}), 200\n"
            "parts = [context[i:i + n + overlap] for i in range(0, len(context), n)]\n"
            f"found = rlm_query_batched({query!r}, parts)\n"
            "FINAL(next(value for value in found if value))")


def _lines(query: str) -> str:
    """Rows (date, user, label): the children label, one digit a line."""
    return (f"labels = {LABELS}\n"
            "lines = [l for l in context.split('\\n') if l.startswith('Date: ')]\n"
            f"n = -(-len(lines) // {PIECES})\n"
            "parts = ['\\n'.join(lines[i:i + n]) for i in range(0, len(lines), n)]\n"
            "ask = 'For each line the number of its label, one digit a line, no spaces: '\n"
            "ask += ', '.join(f'{i} {label}' for i, label in enumerate(labels))\n"
            "digits = ''.join(rlm_query_batched(ask, parts))\n"
            "assert len(digits) == len(lines)\n"
            f"{inspect.getsource(date)}\n"
            "days = {day: date(day) for day in {l[6:18] for l in lines}}\n"
            "rows = [(days[l[6:18]], l[28:33], labels[int(d)]) for l, d in zip(lines, digits)]\n")


def _aggregate(query: str) -> str:
    return (f"from collections import Counter\n{_lines(query)}{inspect.getsource(tally)}\n"
            f"FINAL(tally(rows, *{question_of(query)!r}))")


def _pairs(query: str) -> str:
    return (f"{_lines(query)}{inspect.getsource(matching)}\n"
            f"FINAL(matching(rows, *{rule_of(query)!r}))")


def _code(query: str) -> str:
    name, x, path = re.search(r"`(\w+)\((\d+)\)` in (\S+)", query).groups()
    choices = {value: letter for letter, value in re.findall(r"\(([A-D])\) (\d+)", query)}
    return (f"name, path, x, times = {name!r}, {path!r}, {x}, 1\n"
            "while path:\n"
            "    found = rlm_query(f'What does {name} add, multiply by and call, and in which file "
            "is that?', context[path])\n"
            "    x, times, name, path = x + found[0], times * found[1], found[2], found[3]\n"
            f"FINAL({choices}[str(x * times)])")


def _hop(query: str) -> str:
    first = re.search(r"was a (\w+ born in \w+) ", query)[1]
    return ("def read(question, start):\n"
            "    return rlm_query(question, next(t for t in context.values() if start in t))\n"
            f"teacher = read('Who was the teacher?', 'was a {first}')\n"
            "institute = read('Which institute did the person direct?', f'{teacher} was a ')\n"
            "FINAL(read('In which city does the institute stand?', f'The {institute} Institute "
            "was founded'))")


def _label_child(query: str, asked: str) -> str:
    starts = "|".join("(" + "|".join(openers) + ")" for openers in OPENERS.values())
    return (f"import re\nFINAL(''.join(str(m.lastindex - 1) for m in re.finditer(\n"
            f"    r'\\|\\| Instance: (?:{starts})', context)))")


def _code_child(query: str, asked: str) -> str:
    name = asked.split()[2]
    return (f"import re\nbody = context.split('def {name}(')[1].split('def ')[0]\n"
            "found = re.search(r'y = x \\+ (\\d+)\\s+return (\\w+).* \\* (\\d+)', body)\n"
            "add, calls, times = found.groups()\n"
            "source = re.search(rf'from (\\S+) import {calls}\\b', context)\n"
            "FINAL([int(add), int(times), calls, source[1].replace('.', '/') + '.py' if source "
            "else ''])")


def _hop_child(query: str, asked: str) -> str:
    pattern = (r"studied with (\w+ \w+)\." if "teacher" in asked else
               r"directed the (\w+) Institute" if "direct" in asked else r"stands in (\w+)\.")
    return f"import re\nFINAL(re.search(r'{pattern}', context)[1])"


def _niah_child(query: str, asked: str) -> str:
    key = re.search(r"for (\S+) mentioned", query)[1]
    return (f"import re\nfound = re.search(r'for {key} is: (\\d+)\\.', context)\n"
            "FINAL(found[1] if found else None)")


def _evidence_child(query: str, asked: str) -> str:
    term = query.split('"')[1]
    return f'FINAL(search(context, "{term}", 0))'


CHILD = {"evidence": _evidence_child, "niah": _niah_child, "aggregate": _label_child,
         "pairs": _label_child, "code": _code_child, "hop": _hop_child}


# ---------------------------------------------------------------------------------------------
# The keyword script: no recursion, no knowledge of the task

KEYWORD = {
    "evidence": "FINAL(hits)",
    "pairs": "users = sorted({u for h in hits for u in re.findall(r'User: (\\d+)', h)}, key=int)\n"
             "FINAL([[a, b] for i, a in enumerate(users[:100]) for b in users[i + 1:100]])",
    "code": "FINAL(next((k for k, value in choices if any(value in h for h in hits)), 'A'))"}


def keyword_code(kind: str, query: str, word: str) -> str:
    """Search for one word of the question; answer with the sentences, or the line, it is in."""
    choices = re.findall(r"\(([A-D])\) (.+)", query)
    return ("import re\n"
            "texts = [context] if isinstance(context, str) else list(context.values())\n"
            f"hits = [h for t in texts if {word!r} in t for h in search(t, {word!r}, 0)]\n"
            + (f"choices = {choices!r}\n" if kind == "code" else "")
            + KEYWORD.get(kind, "FINAL(hits[0] if hits else '')"))
