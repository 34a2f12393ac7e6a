"""The baselines to compare a recursive language model with, all within the same window.

    direct      the context in the prompt, cut to the window; the prompt says so
    compaction  read in parts that fill the window; notes are carried from one to the next
    retrieval   the passages that BM25 finds for the question, as many as the window holds

Each returns the tree of its calls, like rlm.rollout, so that everything after it (scores,
costs, the report) treats all methods alike. A baseline's answer is a text. For evidence
its lines are taken as the sentences, since a text of several would be found nowhere. For
notes it is read as JSON or as lines like "Kelso 3: foods", and the question says so.

Left out: embeddings, rerankers, agents with other tools. Standard library and the text side
only.
"""
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import rlm
from rlm import RLMConfig
from tasks import Task, notes
from tree import Node, Refused, Turn


READER = ("Answer the question from the text, with nothing but the answer itself. Several "
          "answers: one a line, word for word as in the text.")
NOTES = ("You read a long text part by part and carry notes. Write the new notes: all that "
         "helps to answer the question, word for word where it matters. At most {tokens} "
         "tokens.")


async def answer(name: str, task: Task, policy, tokenizer, config: RLMConfig,
                 key: tuple) -> tuple[Node, float]:
    """The root of a baseline's tree, and the share of the context's characters that it
    showed the model."""
    if task.kind == "notes":  # the strategy names the kinds, the question does not
        kinds = ", ".join(notes.WORDS)
        form = f"One a line, as Kelso 3: foods. Of: {kinds}."
        task = replace(task, query=f"{task.query} {form}")
    root, seen = await BASELINES[name](task, _Caller(policy, tokenizer, config, key))
    if task.kind == "evidence" and isinstance(root.answer, str):
        root.answer = sentences(root.answer)
    if task.kind == "notes" and isinstance(root.answer, str):
        kinds = "|".join(notes.WORDS)
        root.answer = dict(re.findall(rf"(\w+ \d+)\W+({kinds})\b", root.answer))
    return root, seen


def sentences(text: str) -> list[str]:
    """The strings of an answer: a JSON list, or its lines without bullets and quotes."""
    try:
        value = json.loads(text)
        if isinstance(value, list):
            return value
    except (ValueError, RecursionError):
        pass
    bare = [re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", line).strip()
            for line in text.splitlines()]
    return [re.sub('^"(.+)"$', r"\1", line) for line in bare if line.strip('"')]


# ------------------------------------------------------------------------------------------
# The baselines: async (task, caller) -> (root, share of the context shown)

async def direct(task: Task, call: "_Caller") -> tuple[Node, float]:
    text = flat(task.context)

    def prompt(n: int) -> str:
        note = ""
        if n < len(text):
            note = (f"\n[The text is cut here: these are the first {n:,} of its "
                    f"{len(text):,} characters.]")
        return f"{task.query}\n\n{text[:n]}{note}"

    n = call.fit(call.reader, prompt, len(text))
    root = await call(Node(kind="llm"), call.reader, prompt(n))
    return root, n / len(text)


async def compaction(task: Task, call: "_Caller") -> tuple[Node, float]:
    """The calls that read are the root's children, one after another. The root answers from
    the last notes."""
    text, root = flat(task.context), Node(kind="llm")
    notes, start = "", 0

    def prompt(n: int) -> str:
        return f"{task.query}\nNotes: {notes}\nText:\n{text[start:start + n]}"

    while start < len(text):
        n = call.fit(call.notes, prompt, len(text) - start)
        if n == 0:
            break
        number = len(root.children)
        child = Node(path=(number,), kind="llm", asked=(0, number))
        root.children.append(child)
        await call(child, call.notes, prompt(n))
        notes = child.answer or notes
        start += n
    await call(root, call.reader, f"{task.query}\n\n{notes}")
    return root, start / len(text)


async def retrieval(task: Task, call: "_Caller") -> tuple[Node, float]:
    text = flat(task.context)
    chunks = cut(text, min(2000, max(200, call.room // 2)))
    scores = bm25(task.query, chunks)
    found = [i for i in range(len(chunks)) if scores[i] > 0]
    found.sort(key=lambda i: -scores[i])

    def prompt(n: int) -> str:
        best = sorted(found[:n])  # in the order of the text
        return task.query + "\n\n" + "\n...\n".join(chunks[i] for i in best)

    n = call.fit(call.reader, prompt, len(found))
    root = await call(Node(kind="llm"), call.reader, prompt(n))
    return root, sum(len(chunks[i]) for i in found[:n]) / len(text)


BASELINES = {"direct": direct, "compaction": compaction, "retrieval": retrieval}


def bm25(query: str, chunks: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """A score per chunk (Robertson and Zaragoza, 2009): the sum over the query's words of

        idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))

    with idf = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word that n of N chunks hold."""
    words = set(re.findall(r"\w+", query.lower()))
    counts = [Counter(re.findall(r"\w+", chunk.lower())) for chunk in chunks]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / max(1, len(lengths)) or 1.0

    scores = [0.0] * len(chunks)
    for word in sorted(words):
        n = sum(word in count for count in counts)
        idf = math.log(1 + (len(chunks) - n + 0.5) / (n + 0.5))
        for i, (count, length) in enumerate(zip(counts, lengths)):
            norm = k1 * (1 - b + b * length / mean)
            scores[i] += idf * count[word] * (k1 + 1) / (count[word] + norm)
    return scores


def cut(text: str, size: int) -> list[str]:
    """Pieces of at most `size` characters that join to the text. A piece ends behind the
    last line break, full stop or blank of its second half, where there is one."""
    pieces, start = [], 0
    while start < len(text):
        piece = text[start:start + size]
        if start + size < len(text):
            for mark in ("\n", ". ", " "):
                at = piece.rfind(mark, size // 2)
                if at >= 0:
                    piece = piece[:at + len(mark)]
                    break
        pieces.append(piece)
        start += len(piece)
    return pieces


def flat(context: Any) -> str:
    """A context as one text: documents under their names."""
    if isinstance(context, dict):
        context = [f"[{name}]\n{rlm.as_text(part)}" for name, part in context.items()]
    if not isinstance(context, list):
        context = [context]
    return "\n\n".join(map(rlm.as_text, context))


class _Caller:
    """Makes plain completions, each within the window."""

    def __init__(self, policy, tokenizer, config: RLMConfig, key: tuple):
        self.policy, self.tokenizer, self.config, self.key = policy, tokenizer, config, key
        self.room = config.window - config.turn_tokens  # tokens of a prompt
        self.reader, self.notes = READER, NOTES.format(tokens=config.turn_tokens)
        if config.style == "brief":  # a small model's window would be full of instructions
            self.reader, self.notes = rlm.LEAF, "Notes."

    def fits(self, system: str, user: str) -> bool:
        if self.tokenizer is None:
            return rlm.about(system) + rlm.about(user) <= self.room
        return len(self.tokenizer.open(system, user)) <= self.room

    def fit(self, system: str, prompt: Callable[[int], str], most: int) -> int:
        """The largest n up to `most`, less a few per cent, for which prompt(n) fits. The
        prompt must not become shorter as n grows."""
        low, high = 0, 1  # low fits; high is doubled until it does not
        while high <= most and self.fits(system, prompt(high)):
            low, high = high, high * 2
        if high > most and self.fits(system, prompt(most)):
            return most
        high = min(high, most + 1)
        while high - low > 1 + low // 50:
            middle = (low + high) // 2
            if self.fits(system, prompt(middle)):
                low = middle
            else:
                high = middle
        return low

    async def __call__(self, node: Node, system: str, user: str) -> Node:
        """Let an empty node say one thing. If the prompt is too long, it ends as window."""
        ids = self.tokenizer.open(system, user) if self.tokenizer else ()
        node.add(Turn("system", system))
        node.add(Turn("user", user, tuple(ids)))
        if not self.fits(system, user):
            node.end = "window"
            return node
        try:
            done = await self.policy(
                node, self.config.turn_tokens, (*self.key, node.path, 0))
        except Refused:
            node.end = "refused"
            return node
        node.add(Turn("assistant", done.text, done.ids, done.logprobs))
        in_thought = getattr(self.tokenizer, "opens_thought", False)
        node.answer, node.end = rlm.spoken(done.text, in_thought), "text"
        return node
