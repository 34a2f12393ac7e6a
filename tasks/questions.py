"""Which questions a run asks: to train on, held out, and longer ones.

Generated questions are drawn from (seed, phase, number). Those of a file are shuffled anew
in each epoch, and a part of them is held out.
"""
import math
import random
from types import ModuleType

import tasks
from tasks import Task

LONGER = (0.8, 1.2)  # longer questions differ so much: no score hangs on one length


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
            # A kind without TOKENS has one length: tasks.make refuses to make another.
            usual = getattr(kind, "TOKENS", 0)
            tokens = round(times * usual * rng.uniform(*LONGER))
        questions.append(tasks.make(kind, rng, tokens, heldout))
    return questions


class Questions:
    """The questions of a training run.

    `heldout` is a list, and `longer` has lists by the names of their scores, where the task
    has lengths. Raises ValueError for a file of which nothing can be held out."""

    def __init__(self, kind: ModuleType, data: str = "", seed: int = 0,
                 heldout: int = 128):
        self.kind, self.seed = kind, seed
        self.rows: list[Task] = []  # of the file; without one, questions are generated
        self.longer: dict[str, list[Task]] = {}
        if data:
            self.rows, self.heldout = tasks.split(tasks.read(data, kind))
            return
        self.heldout = heldout_tasks(heldout, kind)
        most = getattr(kind, "MOST", math.inf)
        for times in (4, 16) if hasattr(kind, "TOKENS") else ():
            if times * LONGER[1] * kind.TOKENS <= most:
                self.longer[f"heldout_{times}x"] = heldout_tasks(heldout, kind, times=times)

    def draw(self, phase: str, i: int) -> Task:
        """The i-th question of a phase."""
        if not self.rows:
            return tasks.make(self.kind, random.Random(f"{self.seed} {phase} {i}"))
        epoch, at = divmod(i, len(self.rows))
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed} {phase} {epoch}").shuffle(order)
        return self.rows[order[at]]

    def batch(self, step: int, n: int) -> list[Task]:
        """The n questions of a step of GRPO."""
        return [self.draw("grpo", i) for i in range(step * n, (step + 1) * n)]
