"""What a comparison has answered and paid for, kept on disk while it runs.

The journal is a file of JSON lines: first the settings of the run, then each reply that
was paid for and each answer, in the order in which they came. Every line is flushed, so a
killed process loses at most the one that it was writing. The context of a question is not
kept: its seed makes it again. Left out: everything that asks (lab/compare.py).
"""
import hashlib
import json
from dataclasses import replace
from pathlib import Path

from lab.api import Account
from tasks import Task
from tree import Completion, Rollout, from_row, to_row


class Journal:
    """The answers of a run; without a path they are kept in memory only.

    `done`: (task, length, method, number of the question) -> (record, rollout). Replies
    that were paid for go to `account.paid`. Raises ValueError, and leaves the file as it
    is, if it cannot be resumed, or if it holds answers and `resume` is False."""

    def __init__(self, path: str, settings: dict, resume: bool, account: Account):
        self.account, self.file = account, None
        self.done: dict[tuple, tuple[dict, Rollout]] = {}
        if not path:
            return
        if resume and not Path(path).exists():
            raise FileNotFoundError(f"{path}: there is nothing to resume")
        self.file = open(path, "a+b")
        self.file.seek(0)
        # A last line without its end is what a killed run was writing.
        lines = [line for line in self.file if line.endswith(b"\n")]
        if len(lines) > 1 and not resume:
            raise ValueError(f"{path} holds {len(lines) - 1} lines of an earlier run: go "
                             "on with --resume, or remove it")
        if not resume:
            lines = []
        for number, line in enumerate(lines, 1):
            try:
                self.restore(json.loads(line), settings)
            except (ValueError, KeyError, TypeError) as error:
                where = f"{path} line {number}"
                raise ValueError(f"{where}: cannot be resumed: {error}") from None
        self.file.truncate(sum(map(len, lines)))
        if not lines:
            self.write({"settings": settings})
        account.on_paid = lambda name, done: self.write(
            {"paid": name, "text": done.text, "stop": done.stop, "usage": done.usage})

    def restore(self, row: dict, settings: dict) -> None:
        if "settings" in row:
            before = row["settings"]
            for name in sorted(before.keys() | settings.keys()):
                if before.get(name) != settings.get(name):
                    raise ValueError(
                        f"it was made with {name} {before.get(name)!r:.300}, this run has "
                        f"{settings.get(name)!r:.300}")
        elif "paid" in row:
            done = Completion(row["text"], stop=row["stop"], usage=row["usage"])
            self.account.paid[row["paid"]] = done
            self.account.spend(done)
        else:
            tree = from_row(row["tree"], Task)
            self.done[tuple(row["done"])] = (row["record"], tree)

    def add(self, name: tuple, record: dict, rollout: Rollout) -> None:
        rollout = replace(rollout, task=replace(rollout.task, context=None))
        self.done[name] = (record, rollout)
        self.write({"done": name, "record": record, "tree": to_row(rollout)})

    def records(self, cell: tuple, numbers: range) -> dict[int, dict]:
        """The records of a cell (task, length, method), by the number of the question."""
        return {i: self.done[*cell, i][0] for i in numbers if (*cell, i) in self.done}

    def write(self, row: dict) -> None:
        if self.file:
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest_of_weights(model_dir: str) -> str:
    """Of the first and the last mebibyte of each file of weights; more would take long."""
    parts = []
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        with open(path, "rb") as file:
            parts.append(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            parts.append(file.read())
    return digest(b"".join(parts))
