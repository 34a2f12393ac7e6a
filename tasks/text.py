"""What the kinds of task share: made-up words and filler, texts and answers, rows of a file, and
scripts as source text.

Filler is drawn from small pools of sentences, so that a context of 10 million tokens (40 MB)
takes a few seconds. What a question is about is made once and occurs nowhere else.

Left out: real text. Standard library only.
"""
import ast
import bisect
import functools
import inspect
import itertools
import random
import re
import sys
from collections.abc import Callable
from typing import Any

ONSETS, VOWELS, CODAS = "bdfgklmnprst", "aeiou", "nrlx"
SYLLABLES = [onset + vowel + CODAS[(i + j) % 4]  # 60
             for i, onset in enumerate(ONSETS) for j, vowel in enumerate(VOWELS)]
ADJECTIVES = "early broad stable narrow hidden simple second common local recent".split()
NOUNS = "sample layer method signal model record survey result effect pattern".split()
VERBS = "improved reduced followed explained limited confirmed shifted matched".split()
TAILS = ("in every trial", "at low cost", "without a control", "over two years",
         "for small groups", "under new rules", "after the change", "with less noise")
POOL = 400  # different sentences, lines or functions that fill a context

LEAST, MOST = 2_000, 10_000_000  # tokens of a context


# ---------------------------------------------------------------------------------------------
# Words and filler

def characters(tokens: int | None, usual: int, most: int = MOST) -> int:
    """The length of a context, at four characters per token; `usual` tokens if None are given.

    Raises ValueError for a length out of range."""
    if tokens is None:
        return 4 * usual
    if not LEAST <= tokens <= most:
        raise ValueError(f"a context has {LEAST:,} to {most:,} tokens here, not {tokens:,}")
    return 4 * tokens


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
    return drawn[:how_many_fit(drawn, chars)]


def how_many_fit(parts: list[str], chars: int) -> int:
    """How many parts fit into `chars`, with a joint of one character after each."""
    ends = list(itertools.accumulate(len(part) + 1 for part in parts))
    return bisect.bisect_right(ends, chars)


def names(rng: random.Random, n: int, syllables: int) -> list[str]:
    """n different names of so many syllables."""
    made = []
    for number in rng.sample(range(60 ** syllables), n):
        parts = [SYLLABLES[number // 60 ** s % 60] for s in range(syllables)]
        made.append("".join(parts).capitalize())
    return made


# ---------------------------------------------------------------------------------------------
# Answers

def strings_in(answer: Any) -> list[str]:
    """The strings of an answer: itself, or those in nested lists; anything else is ignored."""
    found, stack = [], [answer]
    while stack:  # a loop: an answer may be nested deeper than Python's recursion limit
        item = stack.pop()
        if isinstance(item, str) and item.strip():
            found.append(item.strip())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def as_line(answer: Any) -> str:
    """A string or number as text, a flat list of them joined by commas; anything else as ""."""
    if isinstance(answer, list):
        parts = [as_line(item) for item in answer if not isinstance(item, list)]
        return ", ".join(filter(None, parts))
    if isinstance(answer, str):
        return answer
    if type(answer) is int and answer.bit_length() < 200:  # Python will not write very long ones
        return str(answer)
    return str(answer) if type(answer) is float else ""


# ---------------------------------------------------------------------------------------------
# Rows of a file

def field(row: Any, name: str, kind: type, where: str = "") -> Any:
    """row[name]. Raises ValueError that names the field if it is not there or not a `kind`;
    `where` says which part of the row, such as "papers[0]"."""
    at = f"{where}: " if where else ""
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"{at}lacks field {name!r}")
    if not isinstance(row[name], kind):
        raise ValueError(f"{at}field {name!r} is not a {kind.__name__}")
    return row[name]


def text_field(row: Any, name: str, where: str = "") -> str:
    """The same for a text that may not be blank."""
    text = field(row, name, str, where)
    if not text.strip():
        raise ValueError(f"{where}: " * bool(where) + f"field {name!r} is empty")
    return text


# ---------------------------------------------------------------------------------------------
# Scripts: functions that run in a REPL
#
# What an oracle does is written as plain functions, which travel into the REPL as source text.
# There they find the REPL's builtins (rlm_query, rlm_query_batched, search) as free names; here
# these are undefined, and nobody calls the functions here.

PIECES = 24  # children of one batch


@functools.cache
def source(functions: tuple[Callable, ...]) -> str:
    """The source text of some functions, after those imports of their files that they use."""
    imports, bodies = [], []
    for function in functions:
        used = _names_in(function.__code__)
        whole_file = inspect.getsource(sys.modules[function.__module__])
        for statement in ast.parse(whole_file).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                statement.names = [a for a in statement.names if _bound(a) in used]
                if statement.names and ast.unparse(statement) not in imports:
                    imports.append(ast.unparse(statement))
        bodies.append(inspect.getsource(function))
    return "\n".join([*imports, *bodies])


def _bound(alias: ast.alias) -> str:
    """The name that a part of an import statement defines."""
    return alias.asname or alias.name.split(".")[0]


def _names_in(code) -> set[str]:
    """The names that a code object and those inside it use."""
    inner = [c for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*map(_names_in, inner))


def block(code: str) -> str:
    """Code as the message of a model."""
    return f"```repl\n{code}\n```"


def script(*functions: Callable, call: str) -> str:
    """A message that defines the functions and answers with what `call` returns."""
    return block(f"{source(functions)}\nFINAL({call})")


def asked(node) -> str:
    """What a node was asked: its first user message."""
    return next((turn.text for turn in node.turns if turn.role == "user"), "")


def word_of(task) -> str:
    """The word in quotes in the question; else its longest word that occurs in the context."""
    quoted = re.search(r'"([^"\n]+)"', task.query)
    if quoted:
        return quoted[1]
    text = task.context if isinstance(task.context, str) else " ".join(task.context.values())
    words = sorted(re.findall(r"\w+", task.query), key=len, reverse=True)
    return next((w for w in words if w in text), words[0] if words else "the")


def sentences_with(context, word):
    texts = [context] if isinstance(context, str) else list(context.values())
    return [hit for text in texts if word in text for hit in search(text, word, 0)]  # noqa: F821


def first_hit(task, node) -> str:
    """The message of a keyword script: the first sentence with a word of the question."""
    hits = f"sentences_with(context, {word_of(task)!r})"
    return script(sentences_with, call=f"next(iter({hits}), '')")
