"""code: what a call returns, across files; four choices (LongBench v2, arXiv 2412.15204).

Gold is a letter, "A" to "D". The score is exact.

f calls g in another file, which calls h in a third. Two more files hold a g and an h with
other numbers, which give the wrong choices: only the imports tell which is meant.
"""
import re

from tasks.in_repl import TOOLS, asked, script, sentences_with, word_of
from tasks.text import (NOUNS, POOL, VERBS, as_line, characters, field, fill, make_sentence,
                        make_term)

STRATEGY = """\
The context is a dict {path: source}. Find the function, follow its imports from file to \
file, and work the value out; a child can read a long file for you. Return the letter \
alone."""
TOKENS = 8_000
LETTERS = "ABCD"


def make(rng, tokens=None, heldout=False):
    chars = characters(tokens, TOKENS)
    size = max(600, min(4000, chars // 40))  # characters of a file
    words = [(verb, noun) for verb in VERBS for noun in NOUNS]
    pool = [_function(rng, f"{verb}_{noun}_{i}", rng.randrange(40), rng.randrange(1, 10))
            for i in range(POOL // 80) for verb, noun in words]
    paths = [f"src/{rng.choice(NOUNS)}_{i}.py" for i in range(max(8, chars // size))]
    files = {path: fill(rng, pool, size) for path in paths}

    f, g, h = ("_".join(pair) for pair in rng.sample(words, 3))
    start, middle, wrong_middle, end, wrong_end = rng.sample(paths, 5)
    while True:  # until all choices differ
        numbers = [(rng.randrange(2, 40), rng.randrange(2, 10)) for _ in range(5)]
        x, (n_f, n_g, other_g, n_h, other_h) = rng.randrange(2, 100), numbers
        values = [(x + n_f[0] + one[0] + two[0]) * two[1] * one[1] * n_f[1]
                  for one in (n_g, other_g) for two in (n_h, other_h)]
        if len(set(values)) == 4:
            break

    for path, name, (add, times), calls, source in (
            (start, f, n_f, g, middle),
            (middle, g, n_g, h, end),
            (wrong_middle, g, other_g, h, wrong_end),
            (end, h, n_h, "", ""),
            (wrong_end, h, other_h, "", "")):
        at = rng.randrange(len(files[path]) + 1)
        files[path].insert(at, _function(rng, name, add, times, calls))
        if calls:
            module = source[:-3].replace("/", ".")
            files[path].insert(0, f"from {module} import {calls}\n\n")

    shown = rng.sample(values, 4)
    query = _query(f"What does `{f}({x})` in {start} return?", shown)
    context = {path: "".join(parts) for path, parts in files.items()}
    return query, context, LETTERS[shown.index(values[0])]


def _query(question: str, choices: list) -> str:
    choices = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices)]
    return "\n".join([question, *choices, "Answer with the letter."])


def _function(rng, name: str, add: int, times: int, calls: str = "") -> str:
    inner = f"{calls}(y)" if calls else "y"
    return (f"def {name}(x):\n    # {make_sentence(rng, make_term(rng))}\n"
            f"    y = x + {add}\n    return {inner} * {times}\n\n")


def score(task, answer):
    """LongBench v2: "The correct answer is (B)", or the letter alone. Strictly: the
    sentence occurs once and ends the answer, so that naming all letters scores 0."""
    text = as_line(answer).replace("*", "").strip()
    said = re.fullmatch(r"(?s)(?:(.*)The correct answer is )?\(?([A-D])\)?\.?", text)
    if not said or "The correct answer is" in (said[1] or ""):
        return 0.0
    return float(said[2] == task.answer)


def read(row):
    """`question`, `choice_A` to `choice_D`, `answer`, `context`: THUDM/LongBench-v2."""
    letter = field(row, "answer", str)
    if letter not in tuple(LETTERS):
        raise ValueError("field 'answer' is not A, B, C or D")
    choices = [field(row, f"choice_{c}", str) for c in LETTERS]
    query = _query(field(row, "question", str), choices)
    return query, field(row, "context", str, blank=False), letter


# Runs in the REPL: children read one file each, and say where to go on.
def follow(context, name, x, path, choices):
    times = 1
    while path:
        ask = f"What does {name} add, multiply by and call, and in which file is that?"
        add, factor, name, path = rlm_query(ask, context[path])
        x, times = x + add, times * factor
    return choices[str(x * times)]


# Runs in a child's REPL.
def describe(context, name):
    body = context.split(f"def {name}(")[1].split("def ")[0]
    found = re.search(r"y = x \+ (\d+)\s+return (\w+).* \* (\d+)", body)
    add, calls, times = found.groups()
    source = re.search(rf"from (\S+) import {calls}\b", context)
    path = source[1].replace(".", "/") + ".py" if source else ""
    return [int(add), int(times), calls, path]


def oracle(task, node):
    if node.depth:
        return script(describe, asked(node).split()[2])
    name, x, path = re.search(r"`(\w+)\((\d+)\)` in (\S+)", task.query).groups()
    found = re.findall(r"\(([A-D])\) (\d+)", task.query)
    choices = {value: letter for letter, value in found}
    return script(follow, name, int(x), path, choices)


# Runs in the REPL: the letter of a choice that stands beside the word.
def choice_beside(context, word, choices):
    hits = " ".join(sentences_with(context, word))
    return next((letter for letter, value in choices if value in hits), "A")


def keyword(task, node):
    choices = re.findall(r"\(([A-D])\) (.+)", task.query)
    return script(choice_beside, word_of(task), choices, uses=(sentences_with,))
