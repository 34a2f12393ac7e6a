"""The ways to answer a question that a comparison needs, all with one policy and one window.

    direct      the context in the prompt, cut to the window; the prompt says so
    compaction  read in parts that fill the window; notes are carried from one to the next
    retrieval   the passages that BM25 finds for the question, as many as the window holds
    rlm0        a recursive language model that may not call itself: a REPL and nothing else
    rlm1, rlm2  children down to this depth have a REPL of their own
    rlm1-bare   (and 0, 2) without the strategy text in the prompt

Each is a coroutine like rlm.rollout and returns the tree of its calls, so that everything after
it (scores, costs, the report) treats them alike. A baseline's answer is a text. For evidence its
lines are taken as the sentences, since a text of several would be found nowhere.

Left out: embeddings, rerankers, agents with other tools. Standard library and the text side only.
"""
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import rlm
from rlm import RLMConfig
from tasks import Task
from tree import Node, Turn


RLM_METHODS = tuple(f"rlm{depth}{bare}" for depth in (0, 1, 2) for bare in ("", "-bare"))
METHODS = ("direct", "compaction", "retrieval", *RLM_METHODS)

READER = ("Answer the question from the text, with nothing but the answer itself. Several answers: "
          "one a line, word for word as in the text.")
NOTES = ("You read a long text part by part and carry notes. Write the new notes: all that helps "
         "to answer the question, word for word where it matters. At most {tokens} tokens.")


async def answer(name: str, task: Task, policy, tokenizer, config: RLMConfig,
                 key: tuple) -> tuple[Node, float | None]:
    """The root of the tree that a method makes for a task, and the share of the context's
    characters that it put before the model (None where the model itself chose: rlm)."""
    if name in RLM_METHODS:
        return await rlm.rollout(task, policy, tokenizer, rlm_config(name, config), key), None
    baseline = {"direct": direct, "compaction": compaction, "retrieval": retrieval}[name]
    root, seen = await baseline(task, _Caller(policy, tokenizer, config, key))
    if task.kind == "evidence" and isinstance(root.answer, str):
        root.answer = sentences(root.answer)
    return root, seen


def rlm_config(name: str, config: RLMConfig) -> RLMConfig:
    """The configuration of rlm0 ... rlm2-bare, from that of the checkpoint."""
    depth = int(name[3])
    config = replace(config, max_depth=depth, max_nodes=config.max_nodes if depth else 1)
    if not name.endswith("-bare"):
        return config
    if config.style == "brief":
        raise ValueError(f"{name}: this model's brief prompt has no strategy text to leave out")
    return replace(config, style="bare")


def sentences(text: str) -> list[str]:
    """The strings of an answer in prose: a JSON list, or its lines without bullets and quotes."""
    try:
        value = json.loads(text)
        if isinstance(value, list):
            return value
    except (ValueError, RecursionError):
        pass
    lines = (re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", line).strip() for line in text.splitlines())
    return [line[1:-1] if line[:1] == line[-1:] == '"' else line for line in lines if line]


# ---------------------------------------------------------------------------------------------
# The baselines: async (task, caller) -> (root, share of the context shown)

async def direct(task: Task, call: "_Caller"):
    text = flat(task.context)

    def prompt(n: int) -> str:
        cut = "" if n == len(text) else (f"\n[The text is cut here: these are the first {n:,} of "
                                         f"its {len(text):,} characters.]")
        return f"{task.query}\n\n{text[:n]}{cut}"

    n = call.fit(call.reader, prompt, len(text))
    root = await call(Node(kind="llm"), call.reader, prompt(n))
    return root, n / len(text)


async def compaction(task: Task, call: "_Caller"):
    """The calls that read are the root's children, one after another; the root answers from the
    last notes."""
    text, root = flat(task.context), Node(kind="llm")
    system, notes, at = call.notes, "", 0
    while at < len(text):
        def prompt(n: int) -> str:
            return f"{task.query}\nNotes: {notes}\nText:\n{text[at:at + n]}"  # noqa: B023

        n = call.fit(system, prompt, len(text) - at)
        if not n or call.late():
            break  # the share read is reported
        child = Node(path=(len(root.children),), kind="llm")
        root.children.append(child)
        notes = (await call(child, system, prompt(n))).answer
        at += n
    await call(root, call.reader, f"{task.query}\n\n{notes}")
    return root, at / len(text)


async def retrieval(task: Task, call: "_Caller"):
    text = flat(task.context)
    chunks = cut(text, min(2000, max(200, call.room // 2)))
    scores = bm25(task.query, chunks)
    order = sorted((i for i in range(len(chunks)) if scores[i] > 0), key=lambda i: -scores[i])

    def prompt(n: int) -> str:  # the best n, in the order of the text
        return task.query + "\n\n" + "\n...\n".join(chunks[i] for i in sorted(order[:n]))

    n = call.fit(call.reader, prompt, len(order))
    root = await call(Node(kind="llm"), call.reader, prompt(n))
    return root, sum(len(chunks[i]) for i in order[:n]) / len(text)


def bm25(query: str, chunks: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """A score a chunk: sum over the query's words of idf * tf (k1 + 1) / (tf + k1 (1 - b +
    b length / mean length)). Robertson and Zaragoza, 2009; idf = ln(1 + (N - n + .5)/(n + .5))."""
    words = set(re.findall(r"\w+", query.lower()))
    counts, lengths = [], []
    for chunk in chunks:
        found = re.findall(r"\w+", chunk.lower())
        counts.append(Counter(w for w in found if w in words))
        lengths.append(len(found))
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    n = Counter(word for count in counts for word in count)
    idf = {w: math.log(1 + (len(chunks) - n[w] + 0.5) / (n[w] + 0.5)) for w in words}
    return [sum(idf[w] * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean))
                for w, tf in count.items()) for count, length in zip(counts, lengths)]


def cut(text: str, size: int) -> list[str]:
    """Pieces of at most `size` characters that join to the text, cut behind the last line break,
    full stop or blank in their second half, where there is one."""
    pieces, at = [], 0
    while at < len(text):
        piece = text[at:at + size]
        if at + size < len(text):
            ends = (piece.rfind(mark, size // 2) + len(mark) for mark in ("\n", ". ", " ")
                    if piece.rfind(mark, size // 2) >= 0)
            piece = piece[:next(ends, size)]
        pieces.append(piece)
        at += len(piece)
    return pieces


def flat(context: Any) -> str:
    """A context as one text: documents under their names."""
    if isinstance(context, dict):
        return "\n\n".join(f"[{name}]\n{rlm.as_text(part)}" for name, part in context.items())
    if isinstance(context, list):
        return "\n\n".join(rlm.as_text(part) for part in context)
    return rlm.as_text(context)


class _Caller:
    """One plain completion after another, each within the window."""

    def __init__(self, policy, tokenizer, config: RLMConfig, key: tuple):
        self.policy, self.tokenizer, self.config, self.key = policy, tokenizer, config, key
        brief = config.style == "brief"  # a small model's window would be full of instructions
        self.reader = rlm.LEAF if brief else READER
        self.notes = "Notes." if brief else NOTES.format(tokens=config.turn_tokens)
        self.room = config.window - config.turn_tokens  # tokens of a prompt
        self.deadline = time.monotonic() + config.seconds

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def size(self, system: str, user: str) -> int:
        return (len(self.tokenizer.open(system, user)) if self.tokenizer
                else (len(system) + len(user)) // 4)

    def fit(self, system: str, prompt: Callable[[int], str], most: int) -> int:
        """The largest n up to `most`, to a few percent below, whose prompt(n) fits. The size must
        not fall as n grows."""
        low, high = 0, 1  # low fits, as far as known; doubled until high does not
        while high <= most and self.size(system, prompt(high)) <= self.room:
            low, high = high, high * 2
        if low < most < high and self.size(system, prompt(most)) <= self.room:
            return most
        high = min(high, most + 1)
        while high - low > 1 + low // 50:
            middle = (low + high) // 2
            if self.size(system, prompt(middle)) <= self.room:
                low = middle
            else:
                high = middle
        return low

    async def __call__(self, node: Node, system: str, user: str) -> Node:
        """Let an empty node say one thing. A prompt that is too long even so ends as "window"."""
        ids = self.tokenizer.open(system, user) if self.tokenizer else []
        node.add(Turn("system", system))
        node.add(Turn("user", user, tuple(ids)))
        if self.size(system, user) > self.room:
            node.end = "window"
            return node
        done = await self.policy(node, self.config.turn_tokens, (*self.key, node.path, 0))
        node.add(Turn("assistant", done.text, done.ids, done.logprobs))
        node.answer, node.end = done.text, "text"
        return node
