"""Which questions a run asks: to train on, held out, and longer ones.

Generated questions are drawn from (seed, phase, number). Those of a file are shuffled anew
in each epoch, and a part of them is held out.
"""
import json
import math
import random
import re
from pathlib import Path
from types import ModuleType

import tasks
from tasks import Task

LONGER = (0.8, 1.2)  # longer questions vary: no score depends on one length


def heldout_tasks(n: int, kind: ModuleType, seed: int = 0, times: int = 1,
                  length: int | None = None, heldout: bool = True) -> list[Task]:
    """n generated questions that training never saw (or, without `heldout`, may see), of
    this length, or about `times` as long as usual. Raises ValueError for a length that the
    kind cannot have."""
    questions = []
    of_length = f" {tasks.name_of(kind)} {length}" if length else ""
    for i in range(n):
        side = "heldout" if heldout else "teacher"
        rng = random.Random(f"{side} {seed}{of_length} {i}")
        tokens = length
        if times > 1:
            tokens = round(times * kind.TOKENS * rng.uniform(*LONGER))
        questions.append(tasks.make(kind, rng, tokens, heldout))
    return questions


class Questions:
    """The questions of a training run. `heldout` is a list, and `longer` has lists by the
    names of their scores, where the task has lengths."""

    def __init__(self, kind: ModuleType, data: str = "", seed: int = 0,
                 heldout: int = 128):
        self.kind, self.name, self.seed = kind, tasks.name_of(kind), seed
        self.rows: list[Task] = []  # of the file; without one, questions are generated
        self.longer: dict[str, list[Task]] = {}
        if data:
            self.rows, self.heldout = split(read(data, kind))
            return
        self.heldout = heldout_tasks(heldout, kind)
        most = getattr(kind, "MOST", math.inf)
        for times in (4, 16) if hasattr(kind, "TOKENS") else ():
            if times * LONGER[1] * kind.TOKENS <= most:
                self.longer[f"heldout_{times}x"] = heldout_tasks(heldout, kind, times=times)

    @property
    def playable(self) -> list[Task]:
        """The rows that scripts can play. An oracle plays generated questions only."""
        return self.rows if hasattr(self.kind, "demonstrate") else []

    def draw(self, phase: str, i: int) -> Task:
        """The i-th question of a phase."""
        rows = self.playable if phase == "warmup" else self.rows
        if not rows:
            return tasks.make(self.kind, random.Random(f"{self.seed} {phase} {i}"))
        epoch, at = divmod(i, len(rows))
        order = list(range(len(rows)))
        random.Random(f"{self.seed} {phase} {epoch}").shuffle(order)
        return rows[order[at]]

    def batch(self, step: int, n: int) -> list[Task]:
        """The n questions of a step of GRPO."""
        return [self.draw("grpo", i) for i in range(step * n, (step + 1) * n)]


def read(path: str, kind: ModuleType) -> list[Task]:
    """The questions of a JSON lines file. Rows for which the kind's `read` raises
    ValueError are left out, and counted by reason. Raises ValueError if no row is left."""
    name = tasks.name_of(kind)
    if not hasattr(kind, "read"):
        raise ValueError(f"the task {name} reads no files")

    questions: list[Task] = []
    problems: dict[str, list[str]] = {}  # by reason
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            questions.append(tasks.question(f"row-{number}", name, kind.read(row)))
        except ValueError as error:  # also raised by json for what is not JSON
            reason = re.sub(r"\d+", "#", str(error))  # names and places differ by row
            problems.setdefault(reason, []).append(f"line {number}: {error}")

    if problems:
        print(f"{path}: {len(lines) - len(questions)} of {len(lines)} rows left out")
        for rows in problems.values():
            print(f"  {len(rows)} rows, the first in {rows[0]}")
    if not questions:
        raise ValueError(f"{path}: no row can be used")
    return questions


def split(questions: list[Task]) -> tuple[list[Task], list[Task]]:
    """(training, held out): shuffled with seed 42, a fifth, at most 128, is held out.
    Questions that share a text, directly or through others, are on one side. Raises
    ValueError where that is impossible."""
    shuffled = random.Random(42).sample(questions, len(questions))
    groups = _sharing(shuffled)
    if len(groups) < 2:
        raise ValueError("nothing can be held out: that needs questions of two texts")
    wanted = min(128, max(1, len(questions) // 5))
    held: set[int] = set()
    for group in groups:
        if len(held) + len(group) <= wanted:
            held |= group
    held = held or min(groups, key=len)
    return ([task for i, task in enumerate(shuffled) if i not in held],
            [task for i, task in enumerate(shuffled) if i in held])


def _sharing(questions: list[Task]) -> list[set[int]]:
    """The places of the questions, in groups that have no text in common: no document of a
    dict, else no whole context. Line breaks make no difference."""
    groups: list[tuple[set[int], set[int]]] = []  # places, hashes of texts
    for i, task in enumerate(questions):
        parts = task.context
        parts = parts.values() if isinstance(parts, dict) else [parts]
        places, texts = {i}, {hash(" ".join(str(part).split())) for part in parts}
        for group in [group for group in groups if group[1] & texts]:
            groups.remove(group)
            places, texts = places | group[0], texts | group[1]
        groups.append((places, texts))
    return sorted((places for places, _ in groups), key=min)
