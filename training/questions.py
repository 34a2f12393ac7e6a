"""Which questions a run asks: to train on, held out, and longer ones.

Generated questions are drawn from (seed, phase, number). Those of a file are shuffled anew
in each epoch, and a part of them is held out.
"""
import hashlib
import json
import random
import re
import statistics
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import tasks
from tasks import Question
from tasks.common import as_text, estimated_tokens
from util import MISREAD

MOST_REASONS = 10  # that are printed of rows left out
LONGER = (0.8, 1.2)  # longer questions vary: no score depends on one length


def heldout_questions(n: int, task: ModuleType, seed: int | str = 0, times: int = 1,
                      length: int | None = None,
                      heldout: bool | str = True) -> list[Question]:
    """n generated questions that training never saw (or, without `heldout`, may see; or, if
    it is "validation", that choose a checkpoint), of this length, or about `times` as long
    as usual. Raises ValueError for a length that the task cannot have."""
    questions = []
    of_length = f" {tasks.name_of(task)} {length}" if length else ""
    for i in range(n):
        side = "heldout" if heldout else "teacher"
        rng = random.Random(f"{side} {seed}{of_length} {i}")
        tokens = length
        if times > 1:
            tokens = round(times * task.TOKENS * rng.uniform(*LONGER))
        questions.append(tasks.make(task, rng, tokens, heldout))
    return questions


class Questions:
    """The questions of a training run. `heldout` and `validation` are lists, and `longer`
    has lists by the names of their scores, where the task has lengths. Questions for
    `validation` choose a checkpoint; those of a file are as many as held out, and are not
    trained on. Of either the first `heldout` are asked: the split is eval.py's, too."""

    def __init__(self, task: ModuleType, data: str = "", seed: int = 0,
                 heldout: int = 128, validation: bool = False):
        self.task, self.name, self.seed = task, tasks.name_of(task), seed
        self.rows: list[Question] = []  # from a file; without one, questions are generated
        self.longer: dict[str, list[Question]] = {}
        self.validation: list[Question] = []
        if data:
            self.rows, held = split(read(data, task))
            if validation:
                self.rows, self.validation = split(self.rows, len(held))
            self.heldout, self.validation = held[:heldout], self.validation[:heldout]
            return
        self.heldout = heldout_questions(heldout, task)
        if validation:
            self.validation = heldout_questions(
                heldout, task, "validation", heldout="validation")
        for times in (4, 16) if hasattr(task, "TOKENS") else ():
            self.longer[f"heldout_{times}x"] = heldout_questions(heldout, task, times=times)

    @property
    def playable(self) -> list[Question]:
        """The rows that scripts can play. An oracle plays generated questions only."""
        return self.rows if hasattr(self.task, "demonstrate") else []

    def draw(self, phase: str, i: int) -> Question:
        """The i-th question of a phase."""
        rows = self.playable if phase == "warmup" else self.rows
        if not rows:
            return tasks.make(self.task, random.Random(f"{self.seed} {phase} {i}"))
        epoch, at = divmod(i, len(rows))
        return rows[_shuffled(len(rows), f"{self.seed} {phase} {epoch}")[at]]

    def described(self) -> str:
        """For people: how many there are, how long, and what their gold answers score."""
        asked = self.rows or [self.draw("grpo", i) for i in range(100)]
        longest = max(estimated_tokens(as_text(question.context)) for question in asked)
        lines = [f"{len(self.rows) or 'generated'} questions to train on, "
                 f"{len(self.validation)} for validation, {len(self.heldout)} held out; "
                 f"contexts of at most about {longest:,} tokens"]
        right = getattr(self.task, "right_answer", lambda question: question.answer)
        scores = [tasks.score_of(question, right(question)) for question in asked]
        lines.append(f"gold answers score {statistics.fmean(scores):.3f}, the worst "
                     f"{min(scores):.3f}")
        return "\n".join(lines)


@lru_cache(1)
def _shuffled(n: int, seed: str) -> list[int]:
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def read(path: str, task: ModuleType) -> list[Question]:
    """The questions of a JSON lines file. Rows for which the task's `read` raises
    ValueError are left out, and counted by reason. Raises ValueError if no row is left."""
    name = tasks.name_of(task)
    if not hasattr(task, "read"):
        raise ValueError(f"the task {name} reads no files")

    questions: list[Question] = []
    problems: dict[str, list[str]] = {}  # by reason
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            made = tasks.checked("", name, task.read(row))
            if not made.query.strip():
                raise ValueError("the question is empty")
            content = json.dumps([made.query, made.context, made.answer])
            id = "row-" + hashlib.sha256(content.encode()).hexdigest()[:12]
            questions.append(replace(made, id=id))
        except MISREAD as error:
            reason = re.sub(r"\d+", "#", str(error))  # names and places differ by row
            problems.setdefault(reason, []).append(f"line {number}: {error}")

    if problems:
        left_out = sum(map(len, problems.values()))
        print(f"{path}: {left_out} of {left_out + len(questions)} rows left out")
        for rows in sorted(problems.values(), key=len, reverse=True)[:MOST_REASONS]:
            print(f"  {len(rows)} x, first in {rows[0]}")
    if not questions:
        raise ValueError(f"{path}: no row can be used")
    return questions


def split(questions: list[Question],
          wanted: int = 0) -> tuple[list[Question], list[Question]]:
    """(training, held out), shuffled with seed 42. Held out are `wanted`, but at most half;
    without `wanted` a fifth, at most 128.

    Questions that share a text, directly or through others, are on one side. If not half of
    what is wanted is held out so, single ones are added. Raises ValueError for one row."""
    n = len(questions)
    if n < 2:
        raise ValueError("nothing can be held out, or kept for --eval-every: that needs "
                         "two questions")
    shuffled = random.Random(42).sample(questions, n)
    wanted = min(wanted or 128, max(1, n // (2 if wanted else 5)))
    held: set[int] = set()
    for group in _sharing(shuffled):
        if len(held) + len(group) <= wanted:
            held |= group
    whole = len(held)
    if 2 * whole < wanted:
        held |= {*[i for i in range(n) if i not in held][:wanted - whole]}
    if whole < wanted:
        print(f"{whole} questions, not {wanted}, are set aside with all that share a text "
              f"with them, and {len(held) - whole} without")
    return ([question for i, question in enumerate(shuffled) if i not in held],
            [question for i, question in enumerate(shuffled) if i in held])


def _sharing(questions: list[Question]) -> list[set[int]]:
    """The places of the questions, in groups that have no text in common: no document of a
    dict or a list, else no whole context. Where there is no text, the question is the text.
    Line breaks make no difference."""
    earlier = list(range(len(questions)))  # a place in the same group; the first: itself
    seen: dict[int, int] = {}  # a text's hash -> the place that had it first

    def first(i: int) -> int:
        while earlier[i] != i:
            earlier[i] = earlier[earlier[i]]
            i = earlier[i]
        return i

    for i, question in enumerate(questions):
        parts = question.context
        if isinstance(parts, dict):
            parts = parts.values()
        elif not isinstance(parts, list):
            parts = [parts]
        *texts, query = (" ".join(str(part).split()) for part in (*parts, question.query))
        for text in filter(None, texts) if any(texts) else [query]:
            low, high = sorted((first(i), first(seen.setdefault(hash(text), i))))
            earlier[high] = low
    groups: dict[int, set[int]] = {}
    for i in range(len(questions)):
        groups.setdefault(first(i), set()).add(i)
    return [*groups.values()]
