"""One tree of a Recursive Language Model: a node writes code, which asks children.

The context never enters the model's window. It is the variable `context` in a Python
REPL, beside `question`. The model writes ```repl blocks, sees what they print, and ends by
calling FINAL(value) in one. Its code may call the model again: rlm_query starts a child
with its own REPL, llm_query asks for one plain completion. Parent and child are the same
policy, and the result is a tree of nodes.

- A message ends with its first complete block. Sampling stops there.
- A node that ends without FINAL answers with what its code has put into answer["content"].
- Conversations are append-only. An observation repeats the question.
- Full prompts begin with an example conversation, which nobody sampled.
- Budgets belong to the tree. Nodes and sampled tokens are reserved before use. The clock
  counts only the time of the tree's code, so a busy machine changes no score.

The policy is any awaitable policy(node, max_tokens, key) -> Completion. Without a tokenizer
(None) messages carry text only. Many trees: training/trees.py. A trained model to ask:
ask.py.

Left out: answers in prose, which the paper (Recursive Language Models, arXiv 2512.24601)
accepts. Here only a call inside the REPL answers.
"""
from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import tasks
from config import RLMConfig
from prompts import FULL_WINDOW, NO_BLOCK, observation, opening, parse, spoken
from repl import REPL, cut
from tasks import Question
from tasks.common import estimated_tokens, source
from tree import ENDS, Completion, Message, Node, Refused, Sampling
from util import expect


# ------------------------------------------------------------------------------------------
# One tree

async def grow(question: Question, policy, tokenizer, config: RLMConfig,
               key: tuple = ()) -> Node:
    """Grow one tree for a question and return its root; the answer is root.answer.

    `key` seeds the sampling: every completion gets (*key, path, turn). The policy's
    mistakes end nodes (`Node.end` says how). An exception is the machine's failure."""
    tree = Growth(question, policy, tokenizer, config, key)
    if not tree.root.end:
        await tree.converse(tree.root, tree.query, question.context)
    return tree.root


class Growth:
    """One tree while it grows: its budgets, and what its nodes share. The root is opened at
    once, so it is what the policy reads first. It has ended if it does not fit."""

    def __init__(self, question: Question, policy, tokenizer, config: RLMConfig,
                 key: tuple = ()):
        self.question, self.task = question, tasks.task_of(question)
        self.policy, self.tokenizer = policy, tokenizer
        self.config, self.key = config, key
        self.nodes_left = config.max_nodes
        self.tokens_left = config.tree_tokens  # neither used nor reserved
        self.speaking = 0  # messages that are sampled now
        self.given_back = asyncio.Event()
        self.seconds_left = config.tree_seconds
        self.root, self.query = Node(), question.query
        generated = question.answer is not None  # a user's own question has no gold
        if generated and config.style != "brief" and hasattr(self.task, "in_words"):
            in_words = self.task.in_words
            self.query = in_words(question.query)
            expect(isinstance(self.query, str), in_words, self.query, "a question")
        if self.open(self.root, self.query, question.context):
            self.root.end = "window"

    def open(self, node: Node, query: str, context: Any) -> str:
        """Give a node its opening messages and count it. Returns what is wrong: that there
        is no node left, or no room for an answer; else ""."""
        if self.nodes_left < 1:
            return f"Error: the tree's budget of {self.config.max_nodes} nodes is used up"
        system, example, user = opening(node, query, context, self.task, self.config)
        self.nodes_left -= 1  # what does not fit costs a node, too
        ids, size = (), sum(map(estimated_tokens, (system, *example, user)))
        if self.tokenizer and size < 4 * self.config.window:  # else it hardly fits
            ids = self.tokenizer.open(system, user, example)
            size = len(ids)
        if size >= self.config.window:
            return (f"Error: prompt and context have {size} tokens, the window holds "
                    f"{self.config.window}")
        # The ids of the whole opening, the system's included, are kept with the user's.
        node.add(Message("system", system))
        node.example = example
        node.add(Message("user", user, tuple(ids)))
        return ""

    async def converse(self, node: Node, query: str, context: Any) -> None:
        """Let an opened node speak until it ends; fills answer, end and children."""
        if node.kind == "llm":
            await self.sample(node)
            if not node.end:
                node.answer, node.end = spoken(node.messages[-1].text), "text"
            return

        tools = source(tuple(getattr(self.task, "TOOLS", ())))
        printed = notes = ""
        async with REPL(context, tools, self.config.limits, query) as repl:
            for turn in range(self.config.max_turns):
                if turn > 0:
                    self.observe(node, query, printed, notes)
                if not node.end:
                    await self.sample(node)
                if not node.end:
                    printed, notes = await self.act(node, repl, context)
                if node.end:
                    return
        node.end = "turns"

    def room(self, node: Node) -> int:
        """Tokens left in the node's window, estimated where there is no tokenizer."""
        used = len(node.ids)
        if not used:
            used = sum(estimated_tokens(message.text) for message in node.conversation)
        return self.config.window - used

    async def sample(self, node: Node) -> None:
        """Add one completion, whose tokens are reserved from the tree's budget first. What
        others reserve may come back, so it waits for them if too little is left: no message
        is shorter because others are sampled beside it. Sets the node's end if nothing is
        left, or if the policy refuses."""
        room = self.room(node)
        wanted = min(self.config.turn_tokens, room)
        while self.tokens_left < wanted and self.speaking:
            await self.given_back.wait()
        reserved = min(wanted, self.tokens_left)
        if reserved < 1 or self.seconds_left <= 0:
            node.end = "window" if room < 1 else "budget"
            return

        used = 0
        self.tokens_left -= reserved
        self.speaking += 1
        try:
            completion = await self.policy(
                node, reserved, (*self.key, node.path, node.written))
            used = len(completion.ids) or (completion.usage or {}).get("sampled", 0)
        except Refused:
            if not node.path and not node.written:  # the question itself
                raise
            node.end = "refused"
            return
        finally:
            self.tokens_left += reserved - used
            self.speaking -= 1
            self.given_back.set()  # all who wait look again,
            self.given_back.clear()  # and may have to wait for the next
        if not completion.ids:
            node.counted += used
        text = completion.text
        if node.kind == "rlm" and not completion.ids:  # a server samples on
            text, _ = parse(text)
        node.add(Message("assistant", text, completion.ids, completion.logprobs))

    async def act(self, node: Node, repl: REPL, context: Any) -> tuple[str, str]:
        """Execute the block of the last message. Returns what the model sees next: what was
        printed, and an error. Or sets the node's end."""
        turn = node.written - 1
        _, code = parse(node.messages[-1].text)
        if code is None:
            node.errors.append(turn)
            return "", NO_BLOCK[self.config.style]
        result = await repl.execute(code, on_query=partial(self.ask, node, context))
        if result.died == "memory" and not node.path:  # nobody's mistake but the user's
            raise Refused(result.error)
        self.seconds_left -= result.seconds
        node.code_seconds += result.seconds
        if result.error:
            node.errors.append(turn)
        if not result.died:
            node.answer = result.draft  # stands, unless FINAL comes
        if result.done:
            node.answer, node.end = result.final, "final"
        elif result.died:
            node.end, node.reason = result.died, result.error
        return result.stdout.rstrip("\n"), result.error.rstrip("\n")

    def observe(self, node: Node, query: str, printed: str, notes: str) -> None:
        """Add what the model sees next. If it leaves no room for a message, the output is
        cut to half its length, again and again, then the error. Sets the node's end if
        nothing fits."""
        room = self.room(node)
        most = room - min(self.config.turn_tokens, room // 2)
        shown, told = len(printed), len(notes)
        while True:
            parts = [cut(printed, shown, FULL_WINDOW), cut(notes, told, FULL_WINDOW)]
            text = observation("\n".join(filter(None, parts)), node, query, self.config)
            ids = ()
            if self.tokenizer:
                closed = node.messages[-1].ids[-1:] == (self.tokenizer.end_of_turn,)
                ids = self.tokenizer.observe(text, closed)
            size = len(ids) or estimated_tokens(text)
            if size < most or not shown + told:
                break
            shown, told = (shown // 2, told) if shown else (0, told // 2)
        if size < room:
            node.add(Message("user", text, tuple(ids)))
        else:
            node.end = "window"

    async def ask(self, parent: Node, context: Any, kind: str, prompts: list[str],
                  contexts: list | None) -> list:
        """Answer llm_query* and rlm_query* from the parent's code: one value per prompt, in
        order. The children of one batch run side by side."""
        if kind == "llm":
            contexts = [None] * len(prompts)
        elif contexts is None:
            contexts = [context] * len(prompts)  # a child without one gets its parent's
        if parent.depth >= self.config.max_depth:
            kind = "llm"  # below max_depth no node has a REPL
        values: list[Any] = [None] * len(prompts)

        async def answer(i: int, child: Node, prompt: str, part: Any) -> None:
            await self.converse(child, prompt, part)
            values[i] = child.answer
            if child.answer is None and ENDS[child.end]:
                values[i] = f"Error: the call ended without an answer ({ENDS[child.end]})"
            if self.question.answer is not None and hasattr(self.task, "part_score"):
                child.score = self.task.part_score(self.question, part, child.answer)

        try:  # a child that the machine loses ends its siblings: the tree is lost
            async with asyncio.TaskGroup() as group:
                for i, (prompt, part) in enumerate(zip(prompts, contexts, strict=True)):
                    path = *parent.path, len(parent.children)
                    child = Node(path, kind, asked_in=parent.written - 1)
                    problem = self.open(child, prompt, part)
                    if problem:
                        values[i] = problem
                        continue
                    parent.children.append(child)
                    group.create_task(answer(i, child, prompt, part))
        except ExceptionGroup as errors:
            raise errors.exceptions[0]
        return values


# ------------------------------------------------------------------------------------------
# A policy from a sampler

def local_policy(sampler, tokenizer, sampling: Sampling = Sampling()):
    """The policy that samples after node.ids; `sampler` is a sampler.Sampler."""
    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        prompt = node.ids

        def is_over(ids: list[int]) -> bool:
            if node.kind == "llm" or ids[-1] not in tokenizer.backticks:
                return False
            return parse(tokenizer.decode(ids[len(prompt):]))[1] is not None

        done = await sampler.generate(prompt, max_tokens, sampling=sampling,
                                      stop=tokenizer.stop_ids, is_over=is_over, key=key)
        ids = done.ids[:-1] if done.ids[-1] in tokenizer.stop_ids else done.ids
        return replace(done, text=tokenizer.decode(ids))
    return policy
