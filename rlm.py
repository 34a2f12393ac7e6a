"""One rollout of a Recursive Language Model: prompts, parsing, and the recursion.

The context never enters the model's window. It is the variable `context` in a Python
REPL. The model writes ```repl blocks, sees what they print, and ends by calling
FINAL(value) in one. Its code may call the model again: rlm_query starts a child with a
REPL of its own, llm_query asks for one plain completion. Parent and child are the same
policy, and the result is a tree of nodes.

Rules:
- All blocks of a message run in order. The first error or FINAL stops the rest.
- A message without a complete block gets a note that says so, and costs a turn.
- A node that ends without FINAL answers with what its code has put into answer["content"].
- Conversations are append-only. An observation ends with turn counter and question.
- rlm_query at a depth <= max_depth makes a node with a REPL. Below, it is a plain
  completion over prompt and context.
- Budgets belong to the tree. Nodes and sampled tokens are reserved before use, the clock is
  checked before each completion. It counts the time that the tree's own code runs, so no
  score hangs on how busy the machine's sampler is. A batched query returns one value per
  prompt; for a call that is refused, here or by the policy, it is an error string.
- What a message has in thoughts (<think>) is neither code nor answer.

The policy is any awaitable policy(node, max_tokens, key) -> Completion. Without a tokenizer
(None) turns carry text only. No torch is imported here: the command line and the class RLM
load a model when they need it.

Source: Recursive Language Models (arXiv 2512.24601). There an answer may also be given in
prose, as FINAL(...). Here only a call inside the REPL counts.
"""
import bisect
import contextlib
import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import tasks
from repl import REPL, Limits, first_of
from runtime import console
from runtime.files import read_json, write_json
from runtime.flags import from_dict
from runtime.handed_in import HandedInError
from tasks import Task
from tasks.in_repl import can_travel, check_names, help_of, travelling
from tree import Completion, Node, Refused, Rollout, Turn, Unscored


@dataclass(frozen=True)
class RLMConfig:
    """How a tree may grow. Saved beside the weights as rlm.json, so that eval.py and rlm.py
    use what was trained."""
    max_depth: int = 1  # nodes down to this depth have a REPL; the root is at depth 0
    max_turns: int = 6  # messages that the policy may write in one node
    turn_tokens: int = 1024  # sampled tokens of one message, at most
    window: int = 32_768  # tokens of one node, prompts and observations included
    max_nodes: int = 32  # nodes of a tree, the root included
    tree_tokens: int = 200_000  # sampled tokens of a tree
    seconds: float = 900.0  # of a tree's code; waiting for the model costs nothing
    style: str = "full"  # full: for pretrained models; bare: without the task's strategy;
    #                      brief: for models trained from scratch
    scratch: bool = False  # made from nothing: train.py takes other learning rates
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def load(cls, path: str) -> "RLMConfig":
        """From rlm.json. Raises OSError, or ValueError that names file and field."""
        try:
            config = from_dict(cls, read_json(path), may_be_zero=("max_depth",))
        except ValueError as error:
            raise ValueError(f"{path}: not an RLM configuration ({error})") from None
        if config.style not in PROMPTS:
            raise ValueError(
                f"{path}: style {config.style!r} is none of {', '.join(PROMPTS)}")
        return config

    def save(self, path: str) -> None:
        write_json(path, asdict(self))


# ------------------------------------------------------------------------------------------
# One tree, and many

async def rollout(task: Task, policy, tokenizer, config: RLMConfig, key: tuple = (),
                  tools: Iterable[Callable] = ()) -> Node:
    """Run one tree for a task and return its root; the answer is root.answer.

    `key` seeds the sampling: every completion gets (*key, path, turn). `tools` are
    callables for the code, beside those of the task's kind. Plain functions travel to the
    REPL, others are called here (runtime/host_tools.py). Raises ValueError for a name that
    cannot be a tool's.

    The policy's mistakes end nodes (`Node.end` says how). Other exceptions come from the
    machine: a REPL that could not be started, a sampler error. The tree is then lost."""
    tree = _Tree(task, policy, tokenizer, config, key, tuple(tools))
    root = Node()
    if tree.open(root, task.query, task.context):
        root.end = "window"
        return root
    try:
        await tree.run(root, task.query, task.context)
    except ExceptionGroup as error:  # children run in groups
        raise first_of(error)
    return root


async def collect(questions: list[Task], policy, tokenizer, config: RLMConfig,
                  key: tuple = (), groups: list[str] | None = None, at_once: int = 256,
                  tries: int = 2, on_done=lambda rollout: None,
                  numbers: Iterable[int] | None = None,
                  score: Callable = tasks.reward) -> list[Rollout]:
    """Run and score one tree for each question, up to `at_once` side by side.

    Returns the rollouts in order. A tree's key ends with its place in the list, or with its
    number in `numbers`, where this process has only a share of the trees. `score(task,
    answer) -> float` may be async. `on_done` sees each rollout as it ends.

    A tree that the machine lost is run again. After `tries`, or if its score could not be
    had, it comes back with `failed` set and reward 0: keep it out of means and baselines.
    If all are lost, the last error is raised."""
    import asyncio  # where it is used: it takes as long to import as all the rest

    gate = asyncio.Semaphore(at_once)
    lost: Exception | None = None

    async def one(i: int, number: int, task: Task) -> Rollout:
        nonlocal lost
        root, reward, failed = Node(end="failed"), 0.0, ""
        async with gate:
            for _ in range(tries):
                try:
                    root = await rollout(task, policy, tokenizer, config, (*key, number))
                    failed = ""
                    break
                except HandedInError:  # a bug in the user's file: no second try
                    raise
                except Exception as error:
                    lost, failed = error, repr(error)
        if not failed:
            try:
                reward = await scored(score, task, root.answer)
            except Unscored as error:
                lost, failed = error, repr(error)
        done = Rollout(task, groups[i] if groups else task.id, root, reward, failed)
        on_done(done)
        return done

    if numbers is None:
        numbers = range(len(questions))
    results = await asyncio.gather(*(
        one(i, number, task) for i, (number, task) in enumerate(zip(numbers, questions))))
    if results and all(r.failed for r in results):
        raise lost
    return list(results)


async def scored(score: Callable, task: Task, answer: Any) -> float:
    """What score(task, answer) returns, whether it is async or not."""
    reward = score(task, answer)
    return await reward if inspect.isawaitable(reward) else reward


# ------------------------------------------------------------------------------------------
# The recursion

class _Tree:
    """One tree while it grows: its budgets, and what its nodes share."""

    def __init__(self, task: Task, policy, tokenizer, config: RLMConfig, key: tuple,
                 tools: tuple[Callable, ...]):
        self.source, self.more_help, self.host = tasks.tools(task.kind), "", None
        if tools:
            from runtime.host_tools import HostTools

            check_names((*tasks.tools_of(task.kind), *tools))
            plain = can_travel(tools)
            self.source += "\n" + travelling(plain)
            self.more_help = "\n" + help_of(tools)
            self.host = HostTools((tool for tool in tools if tool not in plain),
                                  config.limits.seconds, config.limits.answer_chars)
        self.task = task
        self.policy = policy
        self.tokenizer = tokenizer
        self.config = config
        self.key = key
        self.nodes_left = config.max_nodes - 1
        self.tokens_left = config.tree_tokens
        self.seconds_left = config.seconds
        # Whether the prompt opens a thought, so that a message only has its end.
        self.in_thought = getattr(tokenizer, "opens_thought", False)

    def open(self, node: Node, query: str, context: Any) -> str:
        """Give a node its opening turns. Returns "", or an error text if they leave no room
        for an answer."""
        system, user = opening(
            node, query, context, self.task.kind, self.config, self.more_help)
        ids = self.tokenizer.open(system, user) if self.tokenizer else []
        size = len(ids) if self.tokenizer else about(system) + about(user)
        if size >= self.config.window:
            return (f"Error: prompt and context have {size} tokens, the window holds "
                    f"{self.config.window}")
        # The ids of the whole opening, system turn included, are kept with the user's turn.
        node.add(Turn("system", system))
        node.add(Turn("user", user, tuple(ids)))
        return ""

    async def run(self, node: Node, query: str, context: Any) -> None:
        """Let an opened node speak until it ends; fills answer, end and children."""
        if node.kind == "llm":
            completion = await self.sample(node, 0)
            if completion is not None:
                node.answer, node.end = self.spoken(completion.text), "text"
            return

        repl = REPL(context, self.source, self.config.limits,
                    below=self.config.max_depth - node.depth,
                    host=self.host.tools if self.host else ())
        async with contextlib.aclosing(repl):  # `act` starts it, once there is code
            for turn in range(self.config.max_turns):
                completion = await self.sample(node, turn)
                if completion is None:
                    return
                printed, notes = await self.act(node, repl, turn, context)
                if node.end:
                    return
                if turn + 1 == self.config.max_turns:
                    node.end = "turns"
                elif not self.observe(node, completion, printed, notes, turn, query):
                    node.end = "window"
                    return

    async def sample(self, node: Node, turn: int) -> Completion | None:
        """One completion. Its tokens are reserved from the tree's budget first. If
        nothing is left or it is refused, returns None and sets the node's end."""
        room = self.config.window - self.size(node)
        granted = min(self.config.turn_tokens, room, self.tokens_left)
        if granted < 1 or self.seconds_left <= 0:
            node.end = "window" if room < 1 else "budget"
            return None
        self.tokens_left -= granted
        try:
            completion = await self.policy(node, granted, (*self.key, node.path, turn))
        except Refused:
            self.tokens_left += granted
            node.end = "refused"
            return None
        used = len(completion.ids) or (completion.usage or {}).get("sampled", 0)
        self.tokens_left += granted - used
        if not completion.ids:
            node.counted += used
        node.add(Turn("assistant", completion.text, completion.ids, completion.logprobs))
        return completion

    async def act(self, node: Node, repl: REPL, turn: int,
                  context: Any) -> tuple[str, str]:
        """Run the blocks of the last message. Returns what the model sees next, in two
        parts: what was printed, then errors and hints. Or sets the node's end."""
        blocks, prose = parse(self.spoken(node.turns[-1].text))
        hints = [IN_PROSE] if re.search(r"\bFINAL(_VAR)?\(", prose) else []
        if not blocks:
            node.errors.append(turn)
            return "", " ".join([NO_BLOCK, *hints])
        await repl.start()
        printed, notes = [], hints
        room = self.config.limits.output_chars  # for all blocks of a message
        for code in blocks:
            result = await repl.execute(code, partial(self.query, node, context))
            node.repl_seconds += result.seconds
            self.seconds_left -= result.seconds
            if result.stdout:
                # The first part was cut by the REPL, which says how much is missing.
                fits = not printed or len(result.stdout) <= room
                printed.append(result.stdout if fits else cut(result.stdout, room))
                room = max(0, room - len(result.stdout))
            if result.error:
                node.errors.append(turn)
                notes = [result.error, *hints]
            if not result.died:
                node.answer = result.draft  # stands, unless FINAL comes
            if result.done:
                node.answer, node.end = result.final, "final"
                break
            if result.died:
                # `died` may come from hostile code that answered in the worker's place.
                node.end = result.died if result.died in ENDS else "protocol"
                break
            if result.error:
                break
        return tuple("\n".join(part.rstrip("\n") for part in parts)
                     for parts in (printed, notes))

    def observe(self, node: Node, completion: Completion, printed: str, notes: str,
                turn: int, query: str) -> bool:
        """Append what the model sees next. If it does not fit into the window it is cut, so
        that another message fits behind it: what was printed, then the notes. False if
        nothing fits."""
        room = self.config.window - self.size(node)

        def turn_of(shown: str) -> tuple[Turn, int]:
            text = observation(
                shown, turn + 2, self.config.max_turns, query, self.config.style)
            if self.tokenizer is None:
                return Turn("user", text), about(text)
            closed = completion.ids[-1:] == (self.tokenizer.end_of_turn,)
            ids = self.tokenizer.observe(text, closed)
            return Turn("user", text, tuple(ids)), len(ids)

        def kept(n: int) -> str:
            first = max(0, n - len(notes))
            parts = [cut(printed, first, FULL_WINDOW), cut(notes, n, FULL_WINDOW)]
            return "\n".join(filter(None, parts))

        whole = len(printed) + len(notes)
        made, size = turn_of(kept(whole))
        most = room - min(self.config.turn_tokens, room // 2)  # a message has to fit, too
        if size >= most:
            fits = bisect.bisect_left(
                range(whole), True, key=lambda n: turn_of(kept(n))[1] >= most)
            if fits:
                made, size = turn_of(kept(fits - 1))
        if size < room:
            node.add(made)
        return size < room

    def spoken(self, text: str) -> str:
        """A message without its thought. Of a server's prompt nobody here knows whether it
        opens one: the end of a thought that begins a line tells."""
        ends = self.tokenizer is None and re.search("^</think>", text, re.MULTILINE)
        return spoken(text, self.in_thought or bool(ends))

    def size(self, node: Node) -> int:
        """Tokens of a conversation. Those of a text without ids (of an API, or without a
        tokenizer) are estimated."""
        total = 0
        for turn in node.turns:
            has_ids = turn.ids or (self.tokenizer and turn.role != "assistant")
            total += len(turn.ids) if has_ids else about(turn.text)
        return total

    async def query(self, parent: Node, context: Any, kind: str, prompts: list[str],
                    contexts: list | None) -> list:
        """Answer llm_query*, rlm_query* and calls of host tools from the parent's code: one
        value per prompt, in order. The children of one batch run side by side."""
        import asyncio

        if kind == "tool":
            if self.host is None:
                return [{"error": "there is no such tool"}]
            if self.seconds_left <= 0:
                return [{"error": "the tree's time is used up"}]
            begun = time.monotonic()
            value = await self.host.call(prompts[0], *contexts[0])
            self.seconds_left -= time.monotonic() - begun
            return [value]
        if kind == "llm":
            contexts = [None] * len(prompts)
        elif contexts is None:
            contexts = [context] * len(prompts)  # a child without one gets its parent's
        if parent.depth >= self.config.max_depth:
            kind = "llm"  # below max_depth nobody has a REPL
        values: list[Any] = [None] * len(prompts)
        running, limit = [], self.config.max_nodes
        said = sum(turn.role == "assistant" for turn in parent.turns)
        asked = (said - 1, len(parent.children))
        for i, (prompt, part) in enumerate(zip(prompts, contexts, strict=True)):
            if self.nodes_left < 1:
                values[i] = f"Error: the tree's budget of {limit} nodes is used up"
                continue
            path = (*parent.path, len(parent.children))
            child = Node(path=path, kind=kind, asked=asked)
            values[i] = self.open(child, prompt, part)
            if values[i]:
                continue
            self.nodes_left -= 1  # reserved before anything is dispatched
            parent.children.append(child)
            running.append((i, child, prompt, part))

        # If the machine loses one child, the group ends its siblings: the tree is lost.
        async with asyncio.TaskGroup() as group:
            for _, child, prompt, part in running:
                group.create_task(self.run(child, prompt, part))

        for i, child, _, part in running:
            values[i] = child.answer
            child.score = tasks.part_score(self.task, part, child.answer)
            if child.answer is None and child.end in ENDS:
                values[i] = f"Error: the call ended without an answer ({ENDS[child.end]})"
        return values


# ------------------------------------------------------------------------------------------
# Prompts and parsing

OPENS = re.compile(r"(?<!`)(`{3,})repl[ \t]*\r?\n$")  # the end of the line above a block
REPEATED = 200  # characters of the question that each observation repeats
FULL_WINDOW = ": the window is full"
NO_BLOCK = "No complete ```repl block in this message, so nothing ran."
IN_PROSE = "FINAL outside of a ```repl block is text, and ends nothing."
ENDS = {
    "turns": "out of turns",
    "window": "its window is full",
    "budget": "the tree's budget of tokens or time is used up",
    "refused": "the model's server refuses the request",
    "timeout": "its code ran too long",
    "crash": "its REPL died",
    "protocol": "its REPL broke the protocol",
}


def parse(text: str) -> tuple[list[str], str]:
    """The code of all complete blocks of a message, in order, and the text around them.

    A block opens with three or more backticks and "repl", anywhere in a line that ends
    there. It ends at a line that begins with as many backticks. What is in a thought is no
    code, even if the thought does not end. A message without the thought that it begins
    with is `spoken`; a later thought begins a line."""
    blocks, prose, code, fence, thinks = [], [], [], "", False
    for line in spoken(text).split("\n"):
        line += "\n"
        if not fence and (thinks or line.lstrip().startswith("<think>")):
            _, ended, line = line.partition("</think>")
            thinks = not ended
        if fence and line.startswith(fence):
            blocks.append("".join(code))
            fence = ""
        elif fence:
            code.append(line)
        elif opened := OPENS.search(line):
            code, fence = [], opened[1]
        else:
            prose.append(line)
    return blocks, "".join(prose)


def cut(text: str, size: int, why: str = "") -> str:
    """The first `size` characters, and how many are missing, if any are."""
    if len(text) <= size:
        return text
    return f"{text[:size]}\n... [{len(text) - size} characters cut{why}]"


def about(text: str) -> int:
    """Roughly the tokens of a text: one per four bytes. A letter of a script that takes
    three bytes is most of a token."""
    return len(text.encode("utf-8", "replace")) // 4


def spoken(text: str, in_thought: bool = False) -> str:
    """A message without the thought that it begins with: what follows </think>.

    `in_thought` says that the prompt has opened the thought. "" if it does not end. Further
    on, </think> is text like any other: code may contain it."""
    if in_thought or text.lstrip().startswith("<think>"):
        return text.partition("</think>")[2].lstrip()
    return text


def warn_of_thoughts(tokenizer, config: RLMConfig) -> None:
    """One line about a model whose prompt opens every message with a thought."""
    if tokenizer.opens_thought:
        print("the model's chat template opens every message with a thought: "
              f"{config.turn_tokens} tokens (turn_tokens in rlm.json) may end before it "
              "does, and then nothing runs", file=sys.stderr)


FULL = """\
You answer a question about a context that is too long to read at once. It is the variable \
`context` in a Python REPL. Write code in blocks like this one; it runs, and you see what \
it prints:

```repl
print(type(context), len(context))
```

All ```repl blocks of a message run in order; an error or FINAL stops the rest. Variables \
persist between messages. Only what is printed is shown to you, at most {output} \
characters a block, so print little. You have {turns} messages of at most {tokens} tokens.

In the REPL you have:
- context: the data. FINAL(value): gives your answer and ends at once. FINAL_VAR("name"): \
gives the value of that variable. SHOW_VARS(): names, types and sizes of your variables. \
Or build the answer in the dict `answer`: answer["content"] = value, and answer["ready"] = \
True ends as FINAL does.
{calls}{tools}
{strategy}
Give the answer only inside a block. Be quick: look, {delegate}combine, FINAL."""

CALLS = """\
- rlm_query(prompt, context=None) -> the answer of {child}. Its context is yours if you \
give none. rlm_query_batched(prompts, contexts) -> a list, all at once; one string as \
prompts is used for every context.
- llm_query(prompt) -> str, llm_query_batched(prompts) -> list: a model without a REPL, \
for short texts.
A call that fails gives a string that begins with "Error". At most {nodes} calls in the \
whole tree of calls.
"""

CHILD = "a child with a REPL of its own, working like you"
READER = "a model without a REPL that reads the whole context (keep it short)"
LEAF = "Answer the question briefly and exactly, with nothing else."
BRIEF = "Write ```repl blocks: context, search, rlm_query, FINAL."
PROMPTS = {"full": FULL, "bare": FULL, "brief": BRIEF}


def opening(node: Node, query: str, context: Any, kind: str, config: RLMConfig,
            more_help: str = "") -> tuple[str, str]:
    """The system and the user message that open a node. `more_help` is that of tools beside
    those of the task's kind."""
    if node.kind == "llm":
        return LEAF, query if context is None else f"{query}\n\n{as_text(context)}"
    system = PROMPTS[config.style]
    if config.style != "brief":
        calls, delegate = "", ""
        if config.max_nodes > 1:  # otherwise there is nobody to call
            child = CHILD if node.depth < config.max_depth else READER
            calls = CALLS.format(nodes=config.max_nodes - 1, child=child)
            delegate = "delegate, "
        system = system.format(
            output=config.limits.output_chars, turns=config.max_turns,
            tokens=config.turn_tokens, calls=calls, delegate=delegate,
            tools=tasks.tools_help(kind) + more_help,
            strategy=tasks.strategy(kind) if config.style == "full" and calls else "")
    return system, f"{query}\n{describe(context, config.style)}"


def observation(seen: str, turn: int, turns: int, query: str, style: str) -> str:
    """What follows a message: its output, the turn counter, and the question once more."""
    short = query if len(query) <= REPEATED else query[:REPEATED] + " …"
    if style == "brief":
        return f"{seen}\n{turn}/{turns} {short}"
    head = f"REPL output:\n{seen}" if seen else "The REPL printed nothing."
    last = " This is the last: call FINAL in it." if turn == turns else ""
    return f"{head}\n\nMessage {turn} of {turns}.{last} The question: {short}"


def describe(context: Any, style: str) -> str:
    """Type and size of a context, for the opening prompt."""
    kind = type(context).__name__
    if not isinstance(context, (str, dict, list)):
        return f"context: {kind}"
    if style == "brief" or isinstance(context, str):
        return f"context: {kind} of {len(context)}"
    parts = context.values() if isinstance(context, dict) else context
    size = sum(len(as_text(part)) for part in parts)
    return f"context: {kind} of {len(context)} items, {size} characters in all"


def as_text(context: Any) -> str:
    return context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)


# ------------------------------------------------------------------------------------------
# A policy from a sampler, and a trained model to ask

def local_policy(sampler, tokenizer, temperature: float = 1.0, top_p: float = 1.0):
    """The policy that samples after node.ids; `sampler` is a sampler.Sampler."""
    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        done = await sampler.generate(node.ids, max_tokens, temperature=temperature,
                                      stop=tokenizer.stop_ids, key=key, top_p=top_p)
        ids = done.ids[:-1] if done.stop == "stop" else done.ids
        return replace(done, text=tokenizer.decode(ids))
    return policy


class RLM:
    """A trained model: RLM("runs/tiny/final").completion(question, context) -> answer.

    `trace` holds the root of the last tree. Raises FileNotFoundError or ValueError, one
    line, for a directory that is no checkpoint."""

    def __init__(self, model_dir: str, temperature: float = 1.0, seed: int = 0,
                 sandbox: str = "auto"):
        import runtime.threads  # before torch: it says how torch's threads wait
        from model import Qwen3
        from runtime.device import DEVICE, compute_dtype
        from sampler import Sampler
        from tokenizer import Tokenizer

        model = Qwen3.from_pretrained(model_dir, compute_dtype(model_dir), DEVICE)
        self.config = load_config(model_dir, model.config.max_position_embeddings, sandbox)
        self.tokenizer = Tokenizer.from_pretrained(model_dir)
        warn_of_thoughts(self.tokenizer, self.config)
        self.sampler = Sampler(model, batch=8, window=self.config.window)
        self.policy = local_policy(self.sampler, self.tokenizer, temperature)
        self.seed = seed
        self.trace: Node | None = None

    @classmethod
    def from_api(cls, url: str, model: str, temperature: float = 1.0,
                 sandbox: str = "auto") -> "RLM":
        """One whose model is behind a server that speaks the chat-completions protocol."""
        from lab.api import API, Account

        if not model:
            raise ValueError("--api needs --api-model NAME")
        self = cls.__new__(cls)
        self.config = load_config("", sandbox=sandbox)
        self.policy = API(url, model, Account(), temperature)
        self.tokenizer = self.sampler = self.trace = None
        self.seed = 0
        return self

    def completion(self, query: str, context: Any,
                   tools: Iterable[Callable] = ()) -> Any:
        """The answer (any JSON value), or None if the model gave none. `tools` as in
        `rollout`. In a running event loop, as in a notebook, that loop waits."""
        from runtime.threads import run

        return run(self.acompletion(query, context, tools))

    async def acompletion(self, query: str, context: Any,
                          tools: Iterable[Callable] = ()) -> Any:
        """What `completion` returns, to be awaited."""
        task = Task(id="question", kind="question", query=query, context=context)
        root = await rollout(
            task, self.policy, self.tokenizer, self.config, (self.seed,), tools)
        self.trace = root
        return root.answer


def load_config(model_dir: str, positions: float = math.inf,
                sandbox: str = "auto") -> RLMConfig:
    """rlm.json of a checkpoint, or the defaults.

    The window is at most the model's positions. `sandbox` (see repl.Limits) is a matter
    of this machine, so it does not come from the checkpoint."""
    path = os.path.join(model_dir, "rlm.json")
    config = RLMConfig.load(path) if os.path.exists(path) else RLMConfig()
    return replace(config, window=min(config.window, positions),
                   limits=replace(config.limits, sandbox=sandbox))


def main() -> None:
    from lab import ask

    ask.main()


if __name__ == "__main__":
    console.start(main)
