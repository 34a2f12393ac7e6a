"""The data of the program: a question, and the tree of conversations that answers it.

The root gets the question. Code that the root writes can call the policy again, and each
such call is a child, which can have children of its own:

    Tree                 one question, one tree, one reward: that of the root's answer
    └─ Node ()           the root
       ├─ Node (0,)      its first child
       └─ Node (1,)      its second child
          └─ Node (1, 0)

A node is one conversation, a list of messages. The policy writes the assistant's. The
user's are the question, then what the REPL printed. A conversation only grows at its
end, so it is exactly one training sequence. `ids` are its tokens, `mask` says which of them
the policy sampled, and `logprobs` how likely each of those was.

Trees are stored as JSON lines and shown to people as indented text. Left out: how trees
grow (rlm.py), and what is computed with their tokens (model.py, sampler.py, grpo.py).
"""
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from util import MISREAD, write_text


class Refused(Exception):
    """A policy raises it for one request that it will not serve: because it is too long, or
    filtered. The node ends, and its tree goes on. If it is the root's first, the tree
    failed."""


class Lost(RuntimeError):
    """A policy raises it if the machine failed, and not the policy: the tree is grown once
    more, or left out and counted. Any other exception but OSError is a bug, and ends the
    program."""


class Unscored(Exception):
    """A score raises it where it cannot tell: because its judge does not answer. That is a
    failure of the machine, so the tree is left out and counted."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from the softmax of logits / temperature (0 is greedy), of the
    fewest most likely tokens whose probabilities reach top_p."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """What a policy returns when asked for one message. An API gives text without ids."""
    text: str
    ids: tuple[int, ...] = ()  # exactly as sampled, with the token that ended the message
    logprobs: tuple[float, ...] = ()  # one per id, at temperature 1
    usage: dict | None = None  # tokens: {"prompt": 90, "sampled": 12}


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""
    role: str  # system, user or assistant
    text: str
    # The assistant's are exactly what was sampled, a user's include the chat markup. The
    # system message has none: its ids are the first of the user message that follows.
    ids: tuple[int, ...] = ()
    # One per id. None for a message that nobody sampled; () where a server gave none.
    logprobs: tuple[float, ...] | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled this message."""
        return self.logprobs is not None


# Why a node ended, and what its parent's code is told if there is no answer.
ENDS = {
    "final": "",  # its code called FINAL
    "text": "",  # a plain completion, which is the answer
    "turns": "out of turns",
    "window": "its window is full",
    "budget": "the tree's budget of tokens or time is used up",
    "refused": "the model's server refuses the request",
    "timeout": "its code ran too long",
    "crash": "its REPL died",
    "memory": "its context does not fit into its REPL's memory",
    "protocol": "its REPL broke the protocol",
    "failed": "the machine lost the tree",  # only roots end so
}


@dataclass(eq=False)  # compared by identity: two nodes that look the same are two nodes
class Node:
    """One conversation of the tree, and the conversations that its code started."""
    path: tuple[int, ...] = ()  # () is the root, (2, 0) the first child of its third child
    kind: str = "rlm"  # rlm: a conversation with a REPL; llm: one plain completion
    messages: list[Message] = field(default_factory=list)
    # A conversation that was shown before the question: texts of user and assistant in
    # turn. Nobody sampled it. Its ids are kept with the first of the user.
    example: list[str] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)
    asked_in: int = 0  # which of the messages that its parent wrote asked it, from 0
    # What FINAL got, or the text of a plain completion. A node that ended without either
    # has what its code put into answer["content"].
    answer: Any = None
    end: str = ""  # why it ended: one of ENDS; "" while it grows
    reason: str = ""  # if its REPL died, what the server said
    errors: list[int] = field(default_factory=list)  # numbers of turns without working code
    # The task's score of a root's answer; and of a child's, if the task has one for it,
    # which only some objectives read.
    score: float | None = None
    counted: int = 0  # sampled tokens of messages without ids, where a server counted them
    code_seconds: float = 0.0  # of its code, as Result.seconds

    def add(self, message: Message) -> None:
        """Append a message. No tree edits an earlier one."""
        self.messages.append(message)

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def name(self) -> str:
        """For people: root, rlm 2 or llm 2.0."""
        return f"{self.kind} {'.'.join(map(str, self.path))}" if self.path else "root"

    @property
    def ids(self) -> list[int]:
        return [token for message in self.messages for token in message.ids]

    @property
    def mask(self) -> list[int]:
        """1 for each token that the policy sampled, otherwise 0; as long as `ids`."""
        return [int(message.is_sampled) for message in self.messages for _ in message.ids]

    @property
    def logprobs(self) -> list[float]:
        """The sampler's log-probabilities, 0.0 where `mask` is 0; as long as `ids`."""
        return [p for message in self.messages
                for p in message.logprobs or [0.0] * len(message.ids)]

    @property
    def written(self) -> int:
        """The number of turns that the policy wrote: what max_turns limits."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled in this node."""
        return sum(len(message.ids) for message in self.messages if message.is_sampled)

    @property
    def conversation(self) -> list[Message]:
        """All messages; those of the example conversation are behind the system's."""
        shown = map(Message, ("user", "assistant") * len(self.example), self.example)
        return [*self.messages[:1], *shown, *self.messages[1:]]

    def walk(self) -> Iterator["Node"]:
        """This node and all below it, parents before their children."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Tree:
    """One tree with its question and its reward."""
    question: Any  # a tasks.Question, or the same fields as a dict
    group: str  # the trees of one question; rewards are compared within a group
    root: Node
    reward: float
    failed: str = ""  # why it has no score, if it has none; then it is not used


def write_trees(path: str, trees: Iterable[Tree]) -> None:
    """One line of JSON per tree, in ASCII, so that even broken Unicode from a model
    survives. The file appears complete or not at all."""
    lines = [json.dumps(tree, default=vars) + "\n" for tree in trees]
    write_text(path, "".join(lines))


def read_trees(path: str, question_type=dict) -> list[Tree]:
    """The trees of a file; `question_type`, usually tasks.Question, takes a question's
    fields. Raises ValueError that names the first line which is not a tree."""
    trees = []
    with open(path, "rb") as file:  # bytes, so that a line that is not UTF-8 is named too
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                question, root = question_type(**row["question"]), _node(row["root"])
                trees.append(Tree(**row | {"question": question, "root": root}))
            except MISREAD as error:
                where = f"{path} line {number}"
                raise ValueError(f"{where}: not a tree of this version, so it has to be "
                                 f"sampled again ({error!r:.200})") from None
    return trees


def _node(row: dict) -> Node:
    messages = []
    for message in row["messages"]:
        logprobs = None if message["logprobs"] is None else tuple(message["logprobs"])
        ids = tuple(message["ids"])
        messages.append(Message(message["role"], message["text"], ids, logprobs))
    children = [_node(child) for child in row["children"]]
    return Node(**row | {"path": tuple(row["path"]), "messages": messages,
                         "children": children})


def render(root: Node, width: int = 96, max_lines: int = 12) -> str:
    """The tree as text for a terminal, each node indented by its depth. Lines longer than
    `width` and messages longer than `max_lines` are cut; system prompts are left out."""
    lines = []
    for node in root.walk():
        bar = "│  " * node.depth
        turns = f"{node.written} turn{'s' * (node.written != 1)}"
        tokens = f"{node.sampled + node.counted} sampled tokens"
        lines.append(f"{bar}┌ {node.name}  ({turns}, {tokens})")

        for message in node.messages:
            if message.role == "system":
                continue
            body = printable(message.text).splitlines() or [""]
            if len(body) > max_lines:
                body = body[:max_lines] + [f"… {len(body) - max_lines} more lines"]
            mark = "»" if message.role == "assistant" else "·"
            for line in body:
                lines.append(f"{bar}│ {mark} {_cut(line, width)}")
                mark = " "

        answer = _cut(printable(repr(node.answer)), width)
        reason = f" ({_cut(printable(node.reason), width)})" if node.reason else ""
        lines.append(f"{bar}└ {printable(node.end)}{reason}: {answer}")
    return "\n".join(lines)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[:width] + " …"


def printable(text: str) -> str:
    """The text with control characters spelled out: a model must not steer a terminal.
    Spaces of any width stay, and what joins emoji."""
    def harmless(c: str) -> bool:
        return c.isprintable() or c in "\n\t\u200d" or unicodedata.category(c) == "Zs"

    return "".join(c if harmless(c) else f"\\x{ord(c):02x}" for c in text)
