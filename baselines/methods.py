"""The baselines that a recursive language model is compared with, in the same window.

    direct      the context in the prompt, cut to the window; the prompt says so
    compaction  read in parts that fill the window; notes are carried from one to the next
    retrieval   the passages that BM25 finds for the question, as many as the window holds

Each returns the tree of its completions, like rlm.grow. An answer is a text. For
evidence its lines are the sentences. For requests they are like "Anna 3: food", and the
question says so. Left out: embeddings, rerankers, agents with other tools.
"""
import bisect
import math
import re
from collections import Counter
from collections.abc import Callable

import prompts
from config import RLMConfig
from tasks import Question, requests
from tasks.common import as_text, estimated_tokens
from tree import Message, Node

READER = ("Answer the question from the text, with nothing but the answer itself. Several "
          "answers: one a line, word for word as in the text.")
NOTES = ("You read a long text part by part and carry notes. Write the new notes: all that "
         "helps to answer the question, word for word where it matters. At most {tokens} "
         "tokens.")


async def answer(name: str, question: Question, policy, tokenizer, config: RLMConfig,
                 key: tuple) -> Node:
    """The root of a baseline's tree."""
    query, reader = question.query, Reader(policy, tokenizer, config, key)
    if question.task == "requests":  # its question does not name the subjects
        query += f" One per line, as Anna 3: food. Of: {', '.join(requests.SUBJECTS)}."
    root = await BASELINES[name](query, flat(question.context), reader)
    if question.task == "requests":
        subjects = "|".join(requests.SUBJECTS)
        root.answer = dict(re.findall(rf"(\w+ \d+)\W+({subjects})\b", root.answer))
    if question.task == "evidence":  # lines without bullets and quotes
        lines = re.sub(r"(?m)^\s*(?:[-*•]|\d+[.)])\s+", "", root.answer).split("\n")
        root.answer = [line.strip(' "') for line in lines if line.strip(' "')]
    return root


def flat(context: str | list | dict) -> str:
    """A context as one text: documents under their names."""
    if isinstance(context, dict):
        context = [f"[{name}]\n{as_text(part)}" for name, part in context.items()]
    parts = context if isinstance(context, list) else [context]
    return "\n\n".join(map(as_text, parts))


async def direct(query: str, text: str, reader: "Reader") -> Node:
    def prompt(n: int) -> str:
        note = f"[These are the first {n:,} of {len(text):,} characters.]"
        return f"{query}\n\n{text[:n]}\n{note}"

    return await reader.read(prompt, len(text))


async def compaction(query: str, text: str, reader: "Reader") -> Node:
    """The children read one part each, one after another. The root answers from the last
    notes."""
    children, carried, start = [], "", 0

    def prompt(n: int) -> str:
        return f"{query}\nNotes: {carried}\nText:\n{text[start:start + n]}"

    while n := reader.fit(reader.notes, prompt, len(text) - start):
        path = (len(children),)
        children.append(await reader.complete(reader.notes, prompt(n), path))
        carried = children[-1].answer or carried
        start += n
    root = await reader.complete(reader.answer, f"{query}\n\n{carried}")
    root.children = children
    return root


async def retrieval(query: str, text: str, reader: "Reader") -> Node:
    size = min(2000, max(200, reader.config.window // 2))
    # As long as possible, to the end of a line or a sentence if there is one.
    chunks = re.findall(rf"(?s).{{1,{size}}}(?:\n|\. |\Z)|.{{1,{size}}}", text)
    scores = bm25(query, chunks)
    found = [i for i in range(len(chunks)) if scores[i] > 0]
    found.sort(key=lambda i: -scores[i])

    def prompt(n: int) -> str:
        best = sorted(found[:n])  # in the order of the text
        return query + "\n\n" + "\n...\n".join(chunks[i] for i in best)

    return await reader.read(prompt, len(found))


BASELINES = {"direct": direct, "compaction": compaction, "retrieval": retrieval}


def bm25(query: str, chunks: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """A score per chunk (Robertson and Zaragoza, 2009), summed over the query's words."""
    counts = [Counter(re.findall(r"\w+", chunk.lower())) for chunk in chunks]
    mean = sum(count.total() for count in counts) / max(1, len(counts)) or 1.0
    scores = [0.0] * len(chunks)
    for word in sorted(set(re.findall(r"\w+", query.lower()))):
        n = sum(word in count for count in counts)  # chunks that hold it
        idf = math.log(1 + (len(chunks) - n + 0.5) / (n + 0.5))
        for i, count in enumerate(counts):
            norm = k1 * (1 - b + b * count.total() / mean)
            scores[i] += idf * count[word] * (k1 + 1) / (count[word] + norm)
    return scores


class Reader:
    """Plain completions, each within the window."""

    def __init__(self, policy, tokenizer, config: RLMConfig, key: tuple):
        self.policy, self.tokenizer, self.config, self.key = policy, tokenizer, config, key
        brief = config.style == "brief"  # a small window has no room for instructions
        self.answer = prompts.LEAF if brief else READER
        self.notes = "Notes." if brief else NOTES.format(tokens=config.turn_tokens)

    def fit(self, system: str, prompt: Callable[[int], str], most: int) -> int:
        """The largest n up to `most`, and up to 8 characters per token, for which prompt(n)
        fits. The prompt must not become shorter as n grows."""
        room = self.config.window - self.config.turn_tokens  # tokens

        def size(n: int) -> int:
            if self.tokenizer is None:
                return estimated_tokens(system + prompt(n))
            return len(self.tokenizer.open(system, prompt(n)))

        return bisect.bisect(range(1, min(most, 8 * room) + 1), room, key=size)

    async def read(self, prompt: Callable[[int], str], most: int) -> Node:
        """The root that answers from as much as fits."""
        n = self.fit(self.answer, prompt, most)
        return await self.complete(self.answer, prompt(n))

    async def complete(self, system: str, user: str, path: tuple = ()) -> Node:
        """A node of one completion."""
        node = Node(path, kind="llm", end="text")
        ids = self.tokenizer.open(system, user) if self.tokenizer else ()
        node.add(Message("system", system))
        node.add(Message("user", user, tuple(ids)))
        done = await self.policy(node, self.config.turn_tokens, (*self.key, path, 0))
        node.add(Message("assistant", done.text, done.ids, done.logprobs))
        node.answer = prompts.spoken(done.text)
        return node
