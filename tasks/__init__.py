"""What is asked and how an answer is scored: the tasks, one file each, and Question.

    task         what is asked                           the score, in [0, 1]
    requests     what a person's requests are about      share of right subjects
    evidence     the sentences about a term, in papers   F1 over their characters
    deep         one meaning per paragraph, two levels   F1 over the meanings
                 of children are needed to find all
    qa           a person's question about texts         SQuAD's F1 over words
    oolong       label every line, then count (OOLONG)   share of right labels; exact; a
                                                         number 0.75 ** |error|

A task is a module with two functions:

    make(rng, tokens=None, heldout=False) -> (query, context, gold)
    score(question, answer) -> float            in [0, 1]; `answer` is any JSON value

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
from tasks import common

NAMES = ("requests", "evidence", "deep", "qa", "oolong")


@dataclass(frozen=True)
class Question:
    id: str
    task: str  # one of NAMES, the stem of a user's file, or "question"
    query: str
    context: Any  # str, list[str] or dict[str, str]; deep has nested lists
    answer: Any = None  # the gold


# The users' tasks, by the stems of their files; and that of a question which a user asks
# about files: it has tools, but no score.
_loaded: dict[str, ModuleType] = {"question": common}


def load(spec: str, data: str | None = None) -> ModuleType:
    """The task: one of NAMES, or path/to/my_task.py. The empty name means the one whose
    fields the rows of a file `data` have, else requests. Raises ValueError for an unknown
    name, and where two tasks have one name."""
    spec = spec or (name_by_fields(data) if data else "requests")
    if spec in NAMES:
        return _loaded.setdefault(spec, importlib.import_module(f"tasks.{spec}"))
    if not util.is_path(spec):
        raise ValueError(f"there is no task {spec!r}; there are: {', '.join(NAMES)}, "
                         "or path/to/my_task.py")
    task = util.load_file(spec)
    tools = getattr(task, "TOOLS", ())
    if not isinstance(tools, (tuple, list)) or not all(map(callable, tools)):
        raise ValueError(f"{spec}: TOOLS is {tools!r}, no tuple of functions")
    name = name_of(task)
    if name in NAMES or _loaded.setdefault(name, task) is not task:
        raise ValueError(f"{spec}: another task is called {name}; rename the file")
    return task


def name_by_fields(path: str) -> str:
    """The name of the task whose FIELDS most rows of a JSON lines file have."""
    fields = {name: task.FIELDS for name in NAMES if hasattr(task := load(name), "FIELDS")}
    found = Counter()
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            found.update(name for name, needed in fields.items()
                         if isinstance(row, dict) and row.keys() >= set(needed))
    if not found:
        schemas = "; ".join(f"{name}: {', '.join(fields[name])}" for name in fields)
        raise ValueError(f"{path}: no row has the fields of a task. They are: {schemas}")
    (name, count), = found.most_common(1)
    print(f"{path}: {count} rows have the fields {', '.join(fields[name])}, so the task is "
          f"{name}; --task takes another")
    return name


def asked_as(spec: str) -> str:
    """The task that a user's own questions have: the one given, else "question"."""
    return name_of(load(spec)) if spec else "question"


def task_of(question: Question) -> ModuleType:
    """The task of a question, which was loaded before."""
    return _loaded.get(question.task) or load(question.task)


def name_of(task: ModuleType) -> str:
    return Path(task.__file__).stem


def make(task: ModuleType, rng: random.Random, tokens: int | None = None,
         heldout: bool | str = False) -> Question:
    """A generated question. `rng` decides everything, so a seed names a question. A token
    is four characters of the context. `heldout` asks for what is never in training; it is
    "validation" for questions that choose a checkpoint."""
    name = name_of(task)
    generate = util.function_of(task, "make")
    if tokens is not None and not hasattr(task, "TOKENS"):
        raise ValueError(f"questions of {name} have one length")
    try:
        made = generate(rng, tokens=tokens, heldout=heldout)
    except ValueError as error:
        raise ValueError(f"{name}: no question of {tokens} tokens ({error})") from error
    return checked(f"{name}-{rng.randrange(1 << 32):08x}", name, made)


def checked(id: str, task: str, made: Any) -> Question:
    """A Question from what a task's `make` or `read` returned. Raises ValueError if that is
    not (query, context, gold)."""
    match made:
        case (str() as query, str() | list() | dict() as context, gold):
            with suppress(TypeError):
                json.dumps(gold)
                return Question(id, task, query, context, gold)
    parts = made if isinstance(made, tuple) else [made]
    types = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(f"{task}: ({types}) in place of (query, context, gold); a query is a "
                     "str, a context a str, a list or a dict, a gold any JSON value")


def score_of(question: Question, answer: Any) -> float:
    """The score of an answer, in [0, 1]."""
    return asyncio.run(scored(task_of(question).score, question, answer))


async def scored(score: Callable, *arguments) -> float:
    """What a task's or a user's score gives, plain or async. Raises ValueError if that is
    no finite number."""
    value = score(*arguments)
    if inspect.isawaitable(value):
        value = await value
    right = isinstance(value, (int, float)) and math.isfinite(value)
    util.expect(right, score, value, "a finite number")
    return float(value)
