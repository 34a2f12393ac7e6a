"""The objects that travel through the program: completions, turns, nodes, rollouts.

A rollout is a tree. Each node is one conversation of the policy with its REPL (or, for a plain
LM call, with nobody), append-only, and becomes exactly one training row: `ids` are the tokens,
`mask` says which of them the policy sampled, `logprobs` what it thought of them when it did.

Trees are written as JSON lines, one rollout a line, and printed for people. What is left out:
everything that computes on tokens (model.py, sampler.py, grpo.py) and everything that makes them
(rlm.py). Standard library only.
"""
import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Iterable, Iterator


@dataclass(frozen=True)
class Completion:
    """What a policy returns for one turn."""
    text: str
    ids: tuple[int, ...] = ()  # exactly the sampled ids, the sampled end of turn included
    logprobs: tuple[float, ...] = ()  # of `ids`, under the untempered distribution
    stop: str = "stop"  # why it ended: stop (end of turn), length, window, budget
    usage: dict | None = None  # what the policy says it cost: prompt, reused, sampled tokens


@dataclass(frozen=True)
class Turn:
    """One piece of a conversation. `logprobs` is None unless the policy sampled it."""
    role: str  # system, user, assistant
    text: str
    ids: tuple[int, ...] = ()  # with the chat markup that belongs to it; empty without tokenizer
    logprobs: tuple[float, ...] | None = None


@dataclass(eq=False)  # compared by identity: two equal-looking children are two nodes
class Node:
    """One conversation in the tree; `path` is () for the root and (2, 0) for the first child of
    its third child."""
    path: tuple[int, ...] = ()
    kind: str = "rlm"  # rlm: with a REPL of its own; llm: one plain completion
    turns: list[Turn] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    answer: Any = None  # the value given to FINAL, or the text of a plain LM call
    end: str = ""  # final, text, turns, window, budget, timeout, crash, protocol
    errors: list[int] = field(default_factory=list)  # its messages (0, 1, …) without a block or
    #                                                  with one that raised
    score: float | None = None  # of a child's own answer, where the task has one; never trained on
    #                             unless asked for
    repl_seconds: float = 0.0  # wall clock inside blocks, waiting for children excluded

    @property
    def depth(self) -> int:
        return len(self.path)

    def add(self, turn: Turn) -> None:
        """The only writer of a conversation: it grows at the end, nothing is ever changed."""
        self.turns.append(turn)

    @property
    def ids(self) -> list[int]:
        return [i for turn in self.turns for i in turn.ids]

    @property
    def mask(self) -> list[int]:
        """1 exactly where the policy sampled the token."""
        return [int(turn.logprobs is not None) for turn in self.turns for _ in turn.ids]

    @property
    def logprobs(self) -> list[float]:
        """The sampler's log-probabilities; 0.0 where mask is 0."""
        return [p for turn in self.turns for p in (turn.logprobs or (0.0,) * len(turn.ids))]

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(len(turn.ids) for turn in self.turns if turn.logprobs is not None)

    def walk(self) -> Iterator["Node"]:
        """This node and all below it, parents before children."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Rollout:
    """One tree with its score. `group` names the question it shares with its siblings."""
    task: Any  # tasks.Task, or a plain dict when read back without a type
    group: str
    root: Node
    reward: float
    failed: str = ""  # not empty: the machine failed, not the policy; never scored


def write_rollouts(path: str, rollouts: Iterable[Rollout], mode: str = "w") -> None:
    """One JSON line a rollout. With mode "w" the file appears whole or not at all."""
    target = path if mode == "a" else f"{path}.tmp"
    with open(target, mode, encoding="utf-8") as file:
        for r in rollouts:  # ASCII: lone surrogates survive the file
            file.write(json.dumps(to_row(r)) + "\n")
    if target != path:
        os.replace(target, path)


def read_rollouts(path: str, task_type=dict) -> list[Rollout]:
    """The rollouts of a file; `task_type` (tasks.Task) rebuilds the questions.

    Raises ValueError naming the line that does not parse."""
    rollouts = []
    with open(path, "rb") as file:  # bytes: a line that is no UTF-8 is named as well
        for number, line in enumerate(file, 1):
            try:
                rollouts.append(from_row(json.loads(line), task_type))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path} line {number}: not a rollout ({error!r:.200})") from None
    return rollouts


def write_text(path: str, text: str) -> None:
    """Written aside and renamed: the file is there whole or not at all."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


def to_row(r: Rollout) -> dict:
    """A rollout as JSON values."""
    task = r.task if isinstance(r.task, dict) else asdict(r.task)
    return {"task": task, "group": r.group, "reward": r.reward, "failed": r.failed,
            "root": _to_dict(r.root)}


def from_row(row: dict, task_type=dict) -> Rollout:
    if not math.isfinite(row["reward"]):
        raise ValueError(f"the reward is {row['reward']}")
    return Rollout(task_type(**row["task"]), row["group"], _from_dict(row["root"]),
                   row["reward"], row["failed"])


def render(root: Node, width: int = 96, max_lines: int = 12) -> str:
    """The tree as text for a terminal: every turn indented by depth, long ones cut."""
    lines = []
    for node in root.walk():
        bar = "│  " * node.depth
        name = "root" if not node.path else f"{node.kind} " + ".".join(map(str, node.path))
        lines.append(f"{bar}┌ {name}  ({len(node.turns)} turns, {node.sampled} sampled tokens)")
        for turn in node.turns:
            if turn.role == "system":
                continue
            mark = "»" if turn.role == "assistant" else "·"
            body = printable(turn.text).splitlines() or [""]
            if len(body) > max_lines:
                body = body[:max_lines] + [f"… {len(body) - max_lines} more lines"]
            for i, line in enumerate(body):
                line = line if len(line) <= width else line[:width] + " …"
                lines.append(f"{bar}│ {mark if i == 0 else ' '} {line}")
        answer = printable(repr(node.answer))
        answer = answer if len(answer) <= width else answer[:width] + " …"
        lines.append(f"{bar}└ {printable(node.end)}: {answer}")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Without control characters: what a model wrote must not drive the reader's terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _to_dict(node: Node) -> dict:
    row = {k: v for k, v in vars(node).items() if k not in ("turns", "children")}
    row["turns"] = [asdict(turn) for turn in node.turns]
    row["children"] = [_to_dict(child) for child in node.children]
    return row


def _from_dict(row: dict) -> Node:
    turns = [Turn(t["role"], t["text"], tuple(t["ids"]),
                  None if t["logprobs"] is None else tuple(t["logprobs"])) for t in row["turns"]]
    children = [_from_dict(child) for child in row["children"]]
    return Node(**{**row, "path": tuple(row["path"]), "turns": turns, "children": children})
