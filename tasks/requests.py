"""requests: what each request from one person is about. People wrote the requests.

`Sort the requests from "Anna".` Code can find Anna's requests by their names. What they are
about no code can tell: a model has to read them. A message prints at most one request, so
the good scripts use children. There are ways without children, which no script shows.

The texts are those of CLINC150 (Larson et al., EMNLP 2019; data/README.md): what people
would ask an assistant. Questions to train on, to choose a checkpoint with and to score it
use the texts of its three splits.

Gold is {name: subject}. The score is the share of right subjects among all requests that
the answer or the gold names. So an echo scores 0, and a guess about an eighth.
"""
import gzip
import re
from pathlib import Path

from tasks.common import block, how_many, pick, share_right

STRATEGY = """\
The context is a dict {name of a request: its text}. Find the requests from the person \
with code: it is in their names. Let a child read each of them. Join names and answers."""

# Our subjects, and the domains of CLINC150 that they stand for.
SUBJECTS = {
    "money": ("banking", "credit_cards"),
    "travel": ("travel",),
    "cars": ("auto_and_commute",),
    "food": ("kitchen_and_dining",),
    "home": ("home",),
    "work": ("work",),
    "phone": ("utility",),
    "chat": ("small_talk", "meta"),
}
PEOPLE = ("Anna Boris Carlos Dalia Elena Farid Greta Hugo Ivan Julia Karim Lena Maria Nils "
          "Olga Pedro Rosa Samir Tara Viktor").split()

TOKENS = 593  # 45 requests
REQUEST_TOKENS = 52.7 / 4  # on average
HERE = (2, 4)  # requests from the person: at least and at most

# The longest request can be printed whole; then one message is left, to answer.
TINY = {"max_turns": 2, "limits": {"output_chars": 60}}
# A pretrained model that scripts have shown the task needs no explanation.
AFTER_SCRIPTS = {
    "style": "brief", "max_turns": 2, "turn_tokens": 96, "window": 1024, "max_nodes": 8,
    "tree_tokens": 8000, "limits": {"output_chars": 60}}


def read_texts() -> dict[str, dict[str, list[str]]]:
    """{"train", "val" or "test": {subject: texts}}"""
    subject_of = {domain: subject for subject, domains in SUBJECTS.items()
                  for domain in domains}
    texts = {split: {subject: [] for subject in SUBJECTS}
             for split in ("train", "val", "test")}
    path = Path(__file__).parent / "data" / "clinc150.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            split, domain, text = line.rstrip("\n").split("\t")
            texts[split][subject_of[domain]].append(text)
    return texts


TEXTS = read_texts()
SUBJECT = {text: subject for split in TEXTS.values()
           for subject, texts in split.items() for text in texts}


def texts_of(heldout: bool | str) -> dict[str, list[str]]:
    """{subject: texts} to train on, to choose a checkpoint with, or held out."""
    return TEXTS[{False: "train", "validation": "val", True: "test"}[heldout]]


def make(rng, tokens=None, heldout=False):
    number = how_many(rng, 6, 150, tokens, REQUEST_TOKENS)
    person = rng.choice(PEOPLE)
    here = rng.sample(range(number), rng.randint(*HERE))
    texts = texts_of(heldout)

    context, gold = {}, {}
    for i in range(number):
        subject = rng.choice(list(SUBJECTS))
        who = person
        if i in here:
            gold[f"{person} {i}"] = subject
        else:
            who = rng.choice([other for other in PEOPLE if other != person])
        context[f"{who} {i}"] = rng.choice(texts[subject])
    return f'Sort the requests from "{person}".', context, gold


def in_words(query):
    person = re.search('"(.*)"', query)[1]
    *some, last = SUBJECTS
    return (f'What are the requests from "{person}" about: {", ".join(some)} or {last}? '
            "Answer with a dict {name of the request: one of these eight}.")


def score(question, answer):
    return share_right(answer, question.answer)


def part_score(question, part, answer):
    """For a child that was given one request: whether it says what it is about."""
    if part not in question.context.values():
        return None
    return float(answer == SUBJECT[part])


FIND = "ids = [i for i in context if i.split()[0] in question]\n"
ASK = "subjects = rlm_query_batched('Subject?', [context[i] for i in ids])\n"
JOIN = "FINAL(dict(zip(ids, subjects)))"

# Good and bad scripts with their shares. Only "filter" with "read" is right.
ROOT_SCRIPTS = {  # children read the person's requests, or all, or one, or none
    "filter": (0.45, FIND + ASK + JOIN),
    "all": (0.15, "ids = list(context)\n" + ASK + JOIN),
    "one": (0.2, FIND + "ids = ids[:1]\n" + ASK + JOIN),
    "read": (0.12, FIND + 'print("\\n".join(context[i] for i in ids))'),
    "forget": (0.08, FIND + "print(len(ids))"),
}
CHILD_SCRIPTS = {  # it reads, it guesses, it reads and does not answer
    "read": (0.5, "print(context)"),
    "guess": (0.4, 'FINAL("GUESS")'),
    "look": (0.1, "print(context)"),
}


def demonstrate(question, node, rng):
    name = pick(CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS, rng)
    return strategy_code(node, name, rng.choice(list(SUBJECTS)))


def strategy_code(node, name: str, guess: str = "") -> str:
    if name == "read" and node.written:
        lines = node.messages[-1].text.split("\n")
        subjects = [SUBJECT[line] for line in lines if line in SUBJECT]
        if node.depth:
            return block(f'FINAL("{subjects[0]}")')
        return block(f"subjects = {subjects}\n{JOIN}")
    _, code = (CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS)[name]
    return block(code.replace("GUESS", guess))


def oracle(question, node):
    return strategy_code(node, "read" if node.depth else "filter")
