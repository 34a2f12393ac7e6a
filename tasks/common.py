"""What tasks share: made-up words, contexts and answers as text, fields of a row, and what
they need of the REPL.

The prompt gets the signatures of TOOLS and their docstrings (up to the first empty line).
The REPL gets their source. So a tool imports in its own body what it uses.
"""
import functools
import inspect
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ONSETS, VOWELS, CODAS = "bdfgklmnprst", "aeiou", "nrlx"
SYLLABLES = [onset + vowel + CODAS[(i + j) % 4]  # 60
             for i, onset in enumerate(ONSETS) for j, vowel in enumerate(VOWELS)]
ADJECTIVES = "early broad stable narrow hidden simple second common local recent".split()
NOUNS = "sample layer method signal model record survey result effect pattern".split()
VERBS = "improved reduced followed explained limited confirmed shifted matched".split()
TAILS = ("in every trial", "at low cost", "without a control", "over two years",
         "for small groups", "under new rules", "after the change", "with less noise")


ALONE = " Your context is one of them: give the answer for it alone."


@dataclass(frozen=True)
class Example:
    """A question with a tree that answers it. Full prompts show it before the real one."""
    query: str
    context: Any
    code: str  # the root's block: it asks children `question + ALONE`, and answers
    part: str  # the context of one child
    answer: str | list[str]  # what that child answers


LETTERS = {
    "Oslo 1": "Dear Tom, the boat leaves on Monday. Bring the blue paint with you. Ann",
    "Rome 2": "Dear Ann, we arrived on Friday and found the house as you left it. It has "
              "rained for nine days. The roads are under water, and I am sick of it. Give "
              "my love to all. Tom",
    "Rome 3": "Dear Eva, the rain has stopped. Your sister has a son, and is well. Max"}


def how_many(rng: random.Random, least: int, most: int, tokens: int | None,
             size: float) -> int:
    """A number of documents: those that make up `tokens`, at `size` tokens each, else one
    with a uniform logarithm, so that small and large ones occur."""
    drawn = round(least * (most / least) ** rng.random())
    return round(tokens / size) if tokens else drawn


def pick(scripts: dict[str, tuple[float, str]], rng: random.Random) -> str:
    """The name of one of the scripts {name: (share, code)}, drawn by their shares."""
    return rng.choices(list(scripts), [share for share, _ in scripts.values()])[0]


def make_term(rng: random.Random, heldout: bool = False) -> str:
    """Two made-up syllables. A fifth of the pairs is held out: never seen in training."""
    while True:
        i, j = rng.randrange(len(SYLLABLES)), rng.randrange(len(SYLLABLES))
        if i != j and ((i + 3 * j) % 5 == 0) == bool(heldout):
            return f"{SYLLABLES[i]}-{SYLLABLES[j]}"


def make_sentence(rng: random.Random, term: str) -> str:
    head = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    tail = f"{rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(TAILS)}."
    return rng.choice((f"{head} of {term} {tail}", f"{head} with {term} {tail}"))


def estimated_tokens(text: str) -> int:
    """Roughly the tokens of a text: one per four bytes of UTF-8."""
    return len(text.encode("utf-8", "replace")) // 4


def share_right(answer: Any, gold: dict) -> float:
    """The share of right values among all keys that an answer or the gold has."""
    if not isinstance(answer, dict) or not answer:
        return 0.0
    right = sum(answer.get(key) == value for key, value in gold.items())
    return right / len(answer.keys() | gold.keys())


def strings_in(answer) -> list[str]:
    """The strings of an answer: itself, or those in nested lists. Ignores all else."""
    found, stack = [], [answer]
    while stack:
        item = stack.pop()
        if isinstance(item, str) and item.strip():
            found.append(item.strip())
        elif isinstance(item, list):
            stack.extend(item)
    return found


LOOK = 160  # characters of a context that a full prompt shows


def describe(context: Any, style: str) -> str:
    """Type and size of a context and a look at its first item, for a prompt. Brief prompts
    give the type alone: a model made from nothing takes a size for a name."""
    kind = type(context).__name__
    if style == "brief" or not isinstance(context, (str, dict, list)):
        return f"context: {kind}"
    if isinstance(context, str):
        look = repr(context[:LOOK])
        begins = "It is" if len(context) <= LOOK else "It begins with"
        return f"context: {kind} of {len(context)} characters. {begins} {look}"
    parts = [*context.values()] if isinstance(context, dict) else context
    size = sum(len(as_text(part)) for part in parts)
    head = f"context: {kind} of {len(context)} items, {size} characters in all."
    if not context:
        return head
    key = next(iter(context)) if isinstance(context, dict) else 0
    item = repr(context[key])
    dots = " ..." if len(item) > LOOK else ""
    return f"{head} The first is context[{key!r}] = {item[:LOOK]}{dots}"


def as_text(context: Any) -> str:
    return context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)


def as_line(answer) -> str:
    """A string or number as text, a flat list of them joined by commas; all else as ""."""
    items = answer if isinstance(answer, list) else [answer]
    return ", ".join(str(item) for item in items if type(item) in (str, int, float))


def field(row: dict, name: str, kind=str):
    """row[name]. Raises ValueError that names the field if it is missing or no `kind`."""
    if not isinstance(row.get(name), kind):
        raise ValueError(f"field {name!r} is missing or of a wrong type")
    return row[name]


# ------------------------------------------------------------------------------------------
# The REPL: tools of model code, and code as a model's message

def search(text, keyword, window=300, bidirectional=True):
    """Passages around each occurrence of keyword (any case), widened to whole sentences,
    verbatim; window=0 gives just the sentences that contain it. Of a dict of papers: a
    dict, with the passages of those papers that have some.

    A list of papers is treated as the dict {number: text}. Passages that overlap are
    joined."""
    import bisect
    import re

    if isinstance(text, list):
        text = dict(enumerate(text))
    if isinstance(text, dict):
        found = {i: search(t, keyword, window, bidirectional) for i, t in text.items()}
        return {i: passages for i, passages in found.items() if passages}
    if not keyword:
        return []
    stops = [0, *(m.end() for m in re.finditer(r"[.!?]\s+|\n+", text)), len(text)]
    passages, end = [], -1

    for match in re.finditer(re.escape(keyword), text, re.IGNORECASE):
        left = max(0, match.start() - window) if bidirectional else match.start()
        right = min(len(text), match.end() + window)
        start = stops[bisect.bisect_right(stops, left, hi=len(stops) - 1) - 1]
        stop = stops[bisect.bisect_left(stops, right)]
        if start < end:
            passages[-1][1] = stop
        else:
            passages.append([start, stop])
        end = stop
    return [text[a:b].strip() for a, b in passages]


TOOLS = (search,)  # of a question about a user's own files


def help_of(tools: Iterable[Callable]) -> str:
    """One line per tool for the prompt: its signature and the start of its docstring."""
    lines = []
    for tool in tools:
        about = (inspect.getdoc(tool) or "").split("\n\n")[0]
        about = " ".join(about.split())
        lines.append(f"- {tool.__name__}{inspect.signature(tool)}: {about}")
    return "\n".join(lines)


@functools.cache
def source(tools: tuple[Callable, ...]) -> str:
    """The text that defines the tools."""
    return "\n".join(textwrap.dedent(inspect.getsource(tool)) for tool in tools)


def block(code: str) -> str:
    """Code as the message of a model."""
    return f"```repl\n{code}\n```"


def word_of(question) -> str:
    """The first quoted word of the question that may stand in code, else its longest word
    that the context contains."""
    for quoted in re.findall(r'"([^"\n]+)"', question.query):
        if not {"'", "\\"} & set(quoted):
            return quoted
    text = str(question.context)
    words = sorted(re.findall(r"\w+", question.query), key=len, reverse=True) or ["the"]
    return next((word for word in words if word in text), words[0])
