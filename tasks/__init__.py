"""What is asked and how an answer is scored: Task, and the kinds of task, one file each.

    kind         what is asked                           the score, in [0, 1]
    notes        what each note from a place is about    share of right labels
    evidence     the sentences about a term, in papers   F1 over their characters
    deep         one meaning per paragraph, two levels   F1 over the meanings
                 of children are needed to find all
    definitions  words of a class, in a dictionary       F1 over the words
    niah         a number hidden in filler (RULER)       share of the references contained
    oolong       label every line, then count (OOLONG)   exact; a number 0.75 ** |error|
    pairs        label, then pair users (OOLONG-Pairs)   F1 over unordered pairs

A kind is a module with two functions:

    make(rng, tokens=None, heldout=False) -> (query, context, gold)
    score(task, answer) -> float                in [0, 1]; `answer` is any JSON value

and, if it likes, with some of these:

    STRATEGY        text for the full prompt: how to go about it
    TOOLS           functions that travel into the REPL as source text
    TOKENS          the usual length of its context, if `make` heeds `tokens`
    TINY            fields of RLMConfig for the tiny model that is made for it
    read(row) -> (query, context, gold)         for questions from a JSON lines file
    oracle(task, node) -> str                   the next message of a perfect script
    demonstrate(task, node, rng) -> str         that of a script, good or bad, to learn from
    part_score(task, part, answer) -> float     a child's own score; None where it has none

A user's own path/to/my_task.py is used like one of ours. Where a public scoring rule
guesses what an answer meant, ours does not: a list of all labels or a refusal scores 0.
Standard library only.
"""
import importlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime import handed_in
from tasks import in_repl
from tree import Completion, Node

NAMES = ("notes", "evidence", "deep", "definitions", "niah", "oolong", "pairs")


@dataclass(frozen=True)
class Task:
    id: str
    kind: str  # one of NAMES, or the stem of a user's file
    query: str
    context: Any  # str, list[str] or dict[str, str]; deep has nested lists
    answer: Any = None  # the gold


_files: dict[str, ModuleType] = {  # the users' kinds, by the stems of their files
    "question": in_repl}  # what a user asks about own files: there are tools, but no score


def load(spec: str, data: str | None = None) -> ModuleType:
    """The kind of task: one of NAMES, or path/to/my_task.py. The empty name means evidence
    for questions of a file `data`, else notes. Raises ValueError for an unknown name, and
    where two kinds have one name."""
    spec = spec or ("evidence" if data else "notes")
    if spec in NAMES:
        return importlib.import_module(f"tasks.{spec}")
    if not handed_in.is_path(spec):
        raise ValueError(f"there is no task {spec!r}; there are: {', '.join(NAMES)}, "
                         "or path/to/my_task.py")
    kind = handed_in.load_file(spec)
    name = name_of(kind)
    if name in NAMES or _files.setdefault(name, kind) is not kind:
        raise ValueError(f"{spec}: another task is called {name}; rename the file")
    return kind


def of(task: Task) -> ModuleType:
    """The kind of a question, which was loaded before."""
    return _files.get(task.kind) or load(task.kind)


def name_of(kind: ModuleType) -> str:
    return Path(kind.__file__).stem


def make(kind: ModuleType, rng: random.Random, tokens: int | None = None,
         heldout: bool = False) -> Task:
    """A generated question. `rng` decides everything, so a seed names a question. A token
    is four characters of the context. `heldout` asks for what is never in training."""
    name = name_of(kind)
    if tokens is not None and not hasattr(kind, "TOKENS"):
        raise ValueError(f"{name} tasks have one size, no number of tokens")
    made = kind.make(rng, tokens=tokens, heldout=heldout)
    return Task(f"{name}-{rng.randrange(1 << 32):08x}", name, *made)


def reward(task: Task, answer: Any) -> float:
    """The score of an answer, in [0, 1]."""
    return of(task).score(task, answer)


def demonstrate(task: Task, node: Node, rng: random.Random, alone: bool = False) -> str:
    """The next message of a script to learn from, or of the oracle where there is none. An
    equal rng in every turn lets a node keep its strategy.

    `alone` asks for a script without calls. Raises ValueError if there is none."""
    kind = of(task)
    for _ in range(100):
        if hasattr(kind, "demonstrate"):
            message = kind.demonstrate(task, node, rng)
        else:
            message = kind.oracle(task, node)
        if not (alone and re.search(r"\b(rlm|llm)_query", message)):
            return message
    raise ValueError(f"the task {task.kind} has no script that calls nobody")


def playable(task: Task, rng: random.Random) -> Task:
    """The question, if its kind has demonstrations. An oracle alone plays only generated
    questions, so for such a kind it is a generated one."""
    kind = of(task)
    return task if hasattr(kind, "demonstrate") else make(kind, rng)


def scripted(script: Callable, task: Task, tokenizer):
    """The policy that writes what script(task, node) returns, cut like a model's message.
    Without a tokenizer four characters count as a token."""
    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        text = script(task, node)
        ids = (*tokenizer.encode(text), tokenizer.end_of_turn) if tokenizer else ()
        stop, sampled = "stop", len(ids) or len(text) // 4
        if sampled > max_tokens:
            stop, sampled, ids = "length", max_tokens, ids[:max_tokens]
            text = tokenizer.decode(ids) if tokenizer else text[:4 * max_tokens]
        size = sum(len(turn.ids) or len(turn.text) // 4 for turn in node.turns)
        usage = {"prompt": size, "reused": 0, "sampled": sampled}
        return Completion(text, ids, (0.0,) * len(ids), stop, usage)
    return policy


def read(path: str, kind: ModuleType) -> list[Task]:
    """The questions of a JSON lines file. Rows for which the kind's `read` raises
    ValueError are left out and counted, and the first three are named. Raises ValueError
    if no row is left."""
    name = name_of(kind)
    if not hasattr(kind, "read"):
        raise ValueError(f"the task {name} reads no files")

    questions, problems = [], []
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            questions.append(Task(f"row-{number}", name, *kind.read(json.loads(line))))
        except ValueError as error:  # also raised by json for what is not JSON
            problems.append(f"line {number}: {error}")

    if problems:
        print(f"{path}: {len(problems)} of {len(lines)} rows left out", *problems[:3],
              sep="\n  ")
    if not questions:
        raise ValueError(f"{path}: no row can be used")
    return questions


def split(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    """(training, held out): shuffled with seed 42, a fifth, at most 128, is held out.
    Questions that share a text, directly or through others, are on one side. Raises
    ValueError where that is impossible."""
    shuffled = random.Random(42).sample(tasks, len(tasks))
    groups = _sharing(shuffled)
    if len(groups) < 2:
        raise ValueError("nothing can be held out: that needs questions of two texts")
    wanted = min(128, max(1, len(tasks) // 5))
    held: set[int] = set()
    for group in groups:
        if len(held) + len(group) <= wanted:
            held |= group
    held = held or min(groups, key=len)
    return ([task for i, task in enumerate(shuffled) if i not in held],
            [task for i, task in enumerate(shuffled) if i in held])


def _sharing(tasks: list[Task]) -> list[set[int]]:
    """The places of the tasks, in groups that have no text in common: no document of a
    dict, else no whole context. They are compared without regard to line breaks."""
    groups: list[tuple[set[int], set[int]]] = []  # places, hashes of texts
    for i, task in enumerate(tasks):
        parts = task.context
        parts = parts.values() if isinstance(parts, dict) else [parts]
        places, texts = {i}, {hash(" ".join(str(part).split())) for part in parts}
        for group in [group for group in groups if group[1] & texts]:
            groups.remove(group)
            places, texts = places | group[0], texts | group[1]
        groups.append((places, texts))
    return sorted((places for places, _ in groups), key=min)
