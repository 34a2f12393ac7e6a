"""What the kinds of task share: made-up words, filler, texts in an answer, fields of a row.

Filler is drawn from small pools of sentences, so that a context of 10 million tokens (40
MB) takes a few seconds. What a question is about is made once and occurs nowhere else.
"""
import bisect
import itertools
import random
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

LEAST, MOST = 1_000, 10_000_000  # tokens of a context


def characters(tokens: int | None, usual: int, most: int = MOST) -> int:
    """The length of a context, at four characters per token; None means `usual` tokens."""
    if tokens is None:
        return 4 * usual
    if not LEAST <= tokens <= most:
        raise ValueError(f"a context has {LEAST:,} to {most:,} tokens here, not {tokens:,}")
    return 4 * tokens


def how_many(rng: random.Random, least: int, most: int) -> int:
    """A number of documents, whose logarithm is uniform. So numbers of one, two and three
    digits all occur, and the prompt's line with the number is no surprise up to 999."""
    return round(least * (most / least) ** rng.random())


def pick(shares: dict[str, float], rng: random.Random) -> str:
    """One of the names, drawn by their shares."""
    return rng.choices(list(shares), shares.values())[0]


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


def strings_in(answer: Any) -> list[str]:
    """The strings of an answer: itself, or those in nested lists. Ignores all else."""
    found, stack = [], [answer]
    while stack:  # a loop: an answer may be nested deeper than Python's recursion limit
        item = stack.pop()
        if isinstance(item, str) and item.strip():
            found.append(item.strip())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def as_line(answer: Any) -> str:
    """A string or number as text, a flat list of them joined by commas; all else as ""."""
    if isinstance(answer, list):
        parts = [as_line(item) for item in answer if not isinstance(item, list)]
        return ", ".join(filter(None, parts))
    if isinstance(answer, str):
        return answer
    if type(answer) is int and answer.bit_length() < 200:  # Python refuses longer ones
        return str(answer)
    return str(answer) if type(answer) is float else ""


def field(row: Any, name: str, kind: type, where: str = "", blank: bool = True) -> Any:
    """row[name]. Raises ValueError that names the field if it is missing, is not a `kind`,
    or is a blank text that may not be. `where` is the part of the row: "papers[0]: "."""
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"{where}lacks field {name!r}")
    if not isinstance(row[name], kind):
        raise ValueError(f"{where}field {name!r} is not a {kind.__name__}")
    if not blank and not row[name].strip():
        raise ValueError(f"{where}field {name!r} is empty")
    return row[name]
