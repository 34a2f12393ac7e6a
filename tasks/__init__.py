"""What is asked and how an answer is scored: Task, and the kinds of task, one file each.

    kind         what is asked                           the score, in [0, 1]
    requests     what a person's requests are about      share of right subjects
    evidence     the sentences about a term, in papers   F1 over their characters
    deep         one meaning per paragraph, two levels   F1 over the meanings
                 of children are needed to find all
    qa           a person's question about texts         SQuAD's F1 over words
    oolong       label every line, then count (OOLONG)   exact; a number 0.75 ** |error|

A kind is a module with two functions:

    make(rng, tokens=None, heldout=False) -> (query, context, gold)
    score(task, answer) -> float                in [0, 1]; `answer` is any JSON value

and, if it likes, with what the table in docs/extending.md names: a prompt, scripts to
imitate, tools, a reader of files.

A user's own path/to/my_task.py is used like one of ours. Where a public scoring rule
guesses what an answer meant, ours does not: on oolong a list of all labels scores 0.
"""
import asyncio
import importlib
import inspect
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import util
from tasks import in_repl

NAMES = ("requests", "evidence", "deep", "qa", "oolong")


@dataclass(frozen=True)
class Task:
    id: str
    kind: str  # one of NAMES, the stem of a user's file, or "question"
    query: str
    context: Any  # str, list[str] or dict[str, str]; deep has nested lists
    answer: Any = None  # the gold


# The users' kinds, by the stems of their files; and the kind of a question that a user asks
# about files: it has tools, but no score.
_files: dict[str, ModuleType] = {"question": in_repl}


def load(spec: str, data: str | None = None) -> ModuleType:
    """The kind of task: one of NAMES, or path/to/my_task.py. The empty name means the kind
    whose fields the rows of a file `data` have, else requests. Raises ValueError for an
    unknown name, and where two kinds have one name."""
    spec = spec or (name_by_fields(data) if data else "requests")
    if spec in NAMES:
        return importlib.import_module(f"tasks.{spec}")
    if not util.is_path(spec):
        raise ValueError(f"there is no task {spec!r}; there are: {', '.join(NAMES)}, "
                         "or path/to/my_task.py")
    kind = util.load_file(spec)
    tools = getattr(kind, "TOOLS", ())
    if not isinstance(tools, (tuple, list)) or not all(map(callable, tools)):
        raise ValueError(f"{spec}: TOOLS is {tools!r}, no tuple of functions")
    name = name_of(kind)
    if name in NAMES or _files.setdefault(name, kind) is not kind:
        raise ValueError(f"{spec}: another task is called {name}; rename the file")
    return kind


def name_by_fields(path: str) -> str:
    """The kind whose FIELDS most rows of a JSON lines file have."""
    kinds = {name: kind.FIELDS for name in NAMES if hasattr(kind := load(name), "FIELDS")}
    found = Counter()
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            found.update(name for name, fields in kinds.items()
                         if isinstance(row, dict) and row.keys() >= set(fields))
    if not found:
        schemas = "; ".join(f"{name}: {', '.join(kinds[name])}" for name in kinds)
        raise ValueError(f"{path}: no row has the fields of a task. They are: {schemas}")
    (name, count), = found.most_common(1)
    print(f"{path}: {count} rows have the fields {', '.join(kinds[name])}, so the task is "
          f"{name}; --task takes another")
    return name


def kind_of(spec: str) -> str:
    """The kind that a user's own questions have: that of a task, else "question"."""
    return name_of(load(spec)) if spec else "question"


def of(task: Task) -> ModuleType:
    """The kind of a question, which was loaded before."""
    return _files.get(task.kind) or load(task.kind)


def name_of(kind: ModuleType) -> str:
    return Path(kind.__file__).stem


def make(kind: ModuleType, rng: random.Random, tokens: int | None = None,
         heldout: bool | str = False) -> Task:
    """A generated question. `rng` decides everything, so a seed names a question. A token
    is four characters of the context. `heldout` asks for what is never in training; it is
    "validation" for questions that choose a checkpoint."""
    name = name_of(kind)
    generate = util.function_of(kind, "make")
    if tokens is not None and not hasattr(kind, "TOKENS"):
        raise ValueError(f"{name} tasks have one size, no number of tokens")
    try:
        made = generate(rng, tokens=tokens, heldout=heldout)
    except ValueError as error:
        raise ValueError(f"{name}: no question of {tokens} tokens ({error})") from error
    return question(f"{name}-{rng.randrange(1 << 32):08x}", name, made)


def question(id: str, kind: str, made: Any) -> Task:
    """A Task from what a kind's `make` or `read` returned. Raises ValueError if that is not
    (query, context, gold)."""
    match made:
        case (str() as query, str() | list() | dict() as context, gold):
            with suppress(TypeError):
                json.dumps(gold)
                return Task(id, kind, query, context, gold)
    parts = made if isinstance(made, tuple) else [made]
    types = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(f"{kind}: ({types}) in place of (query, context, gold); a query is a "
                     "str, a context a str, a list or a dict, a gold any JSON value")


def reward(task: Task, answer: Any) -> float:
    """The score of an answer, in [0, 1]."""
    return asyncio.run(scored(of(task).score, task, answer))


async def scored(score: Callable, *arguments) -> float:
    """What a task's or a user's score gives, plain or async. Raises ValueError if that is
    no finite number."""
    value = score(*arguments)
    if inspect.isawaitable(value):
        value = await value
    right = isinstance(value, (int, float)) and math.isfinite(value)
    util.expect(right, score, value, "a finite number")
    return float(value)
