"""One rollout of a Recursive Language Model: a node writes code, which asks children.

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
(None) turns carry text only. No torch is imported here, except by the class RLM.

Left out: answers in prose, which the paper (Recursive Language Models, arXiv 2512.24601)
accepts. Here only a call inside the REPL answers.
"""
from __future__ import annotations

import argparse
import asyncio
import inspect
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tasks
import util
from prompts import FULL_WINDOW, NO_BLOCK, observation, opening, parse, spoken
from repl import REPL, Limits, REPLError, cut, trees_at_once
from sandbox.protocol import json_value
from tasks import Task
from tasks.in_repl import source
from tasks.text import about, as_text
from tree import (ENDS, Completion, Lost, Node, Refused, Rollout, Sampling, Turn, Unscored,
                  printable)
from util import read_json, write_json

EVERY_SECONDS = 30.0  # between lines of progress, where nobody sees a bar
SHOWN = 2000  # characters that a person is shown of what a node reads


# ------------------------------------------------------------------------------------------
# One tree

async def rollout(task: Task, policy, tokenizer, config: RLMConfig,
                  key: tuple = ()) -> Node:
    """Grow one tree for a task and return its root; the answer is root.answer.

    `key` seeds the sampling: every completion gets (*key, path, turn). The policy's
    mistakes end nodes (`Node.end` says how). An exception is the machine's failure."""
    tree = _Tree(task, policy, tokenizer, config, key)
    root, query = tree.root()
    if not root.end:
        await tree.converse(root, query, task.context)
    return root


def opened(task: Task, tokenizer, config: RLMConfig) -> Node:
    """The root of a tree as the policy reads it first."""
    return _Tree(task, None, tokenizer, config, ()).root()[0]


class _Tree:
    """One tree while it grows: its budgets, and what its nodes share."""

    def __init__(self, task: Task, policy, tokenizer, config: RLMConfig, key: tuple):
        self.task, self.kind = task, tasks.of(task)
        self.policy, self.tokenizer = policy, tokenizer
        self.config, self.key = config, key
        self.nodes_left = config.max_nodes
        self.tokens_left = config.tree_tokens  # neither used nor reserved
        self.speaking = 0  # messages that are sampled now
        self.given_back = asyncio.Event()
        self.seconds_left = config.seconds

    def root(self) -> tuple[Node, str]:
        """The opened root, and its question: full prompts put a generated one into words.
        The root has ended if it does not fit."""
        query, root = self.task.query, Node()
        generated = self.task.answer is not None  # a user's own question has no gold
        if generated and self.config.style != "brief" and hasattr(self.kind, "in_words"):
            query = self.kind.in_words(query)
        if self.open(root, query, self.task.context):
            root.end = "window"
        return root, query

    def open(self, node: Node, query: str, context: Any) -> str:
        """Give a node its opening turns and count it. Returns what is wrong: that there is
        no node left, or no room for an answer; else ""."""
        if self.nodes_left < 1:
            return f"Error: the tree's budget of {self.config.max_nodes} nodes is used up"
        system, example, user = opening(node, query, context, self.kind, self.config)
        self.nodes_left -= 1  # what does not fit costs a node, too
        ids, size = (), sum(map(about, (system, *example, user)))
        if self.tokenizer and size < 4 * self.config.window:  # else it hardly fits
            ids = self.tokenizer.open(system, user, example)
            size = len(ids)
        if size >= self.config.window:
            return (f"Error: prompt and context have {size} tokens, the window holds "
                    f"{self.config.window}")
        # The ids of the whole opening, system turn included, are kept with the user's turn.
        node.add(Turn("system", system))
        node.example = example
        node.add(Turn("user", user, tuple(ids)))
        return ""

    async def converse(self, node: Node, query: str, context: Any) -> None:
        """Let an opened node speak until it ends; fills answer, end and children."""
        if node.kind == "llm":
            await self.sample(node)
            if not node.end:
                node.answer, node.end = spoken(node.turns[-1].text), "text"
            return

        tools = source(tuple(getattr(self.kind, "TOOLS", ())))
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
        used = len(node.ids) or sum(about(turn.text) for turn in node.said)
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
        node.add(Turn("assistant", text, completion.ids, completion.logprobs))

    async def act(self, node: Node, repl: REPL, context: Any) -> tuple[str, str]:
        """Execute the block of the last message. Returns what the model sees next: what was
        printed, and an error. Or sets the node's end."""
        turn = node.written - 1
        _, code = parse(node.turns[-1].text)
        if code is None:
            node.errors.append(turn)
            return "", NO_BLOCK[self.config.style]
        result = await repl.execute(code, partial(self.query, node, context))
        self.seconds_left -= result.seconds
        node.seconds += result.seconds
        node.tools.update(result.tools)  # adds
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
                closed = node.turns[-1].ids[-1:] == (self.tokenizer.end_of_turn,)
                ids = self.tokenizer.observe(text, closed)
            size = len(ids) or about(text)
            if size < most or not shown + told:
                break
            shown, told = (shown // 2, told) if shown else (0, told // 2)
        if size < room:
            node.add(Turn("user", text, tuple(ids)))
        else:
            node.end = "window"

    async def query(self, parent: Node, context: Any, kind: str, prompts: list[str],
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
            if self.task.answer is not None and hasattr(self.kind, "part_score"):
                child.score = self.kind.part_score(self.task, part, child.answer)

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
# Many trees

@dataclass(frozen=True)
class Job:
    """One tree that is to be grown."""
    task: Task
    key: tuple = ()  # seeds the sampling; no two trees of a run have the same
    group: str = ""  # the trees of one question


def jobs(questions: list[Task], key: tuple = (), times: int = 1) -> list[Job]:
    """`times` trees for each question. A key ends with the number of its tree."""
    return [Job(task, (*key, i * times + n), str(i))
            for i, task in enumerate(questions) for n in range(times)]


async def collect(todo: list[Job], policy, tokenizer, config: RLMConfig,
                  at_once: int = 256, label: str = "",
                  score: Callable = tasks.reward) -> list[Rollout]:
    """Each tree with its reward, in order."""
    async def one(job: Job) -> Rollout:
        return await scored_rollout(job, policy, tokenizer, config, score)

    at_once = min(at_once, trees_at_once(config.max_nodes))
    return await side_by_side(one, [(job,) for job in todo], at_once, label)


async def scored_rollout(job: Job, policy, tokenizer, config: RLMConfig,
                         score: Callable = tasks.reward,
                         grow: Callable = rollout) -> Rollout:
    """One tree, made by `grow`, with its reward.

    If the machine loses the tree, another is grown with the same key: a killed REPL server
    loses all trees. If that is lost too, if the question is refused, or if there is no
    score, `failed` says why and the reward is 0. Such trees stay out of means and
    baselines."""
    task = job.task
    for _ in range(2):
        try:
            root = await grow(task, policy, tokenizer, config, job.key)
            break
        except (REPLError, Lost, OSError) as error:
            if util.is_theirs(error):
                raise
            failed = repr(error)
        except Refused as error:  # it would be refused again
            failed = f"refused: {error!s:.200}"
            return Rollout(task, job.group, Node(end="refused"), 0.0, failed)
    else:
        return Rollout(task, job.group, Node(end="failed"), 0.0, failed)
    try:
        return Rollout(task, job.group, root, await reward_of(root, task, score))
    except Unscored as error:
        return Rollout(task, job.group, root, 0.0, repr(error))


async def reward_of(root: Node, task: Task, score: Callable) -> float:
    """score(task, answer), or score(task, answer, root) if it takes three parameters; plain
    or async. If `score` replaces that of the task, the task's own is computed first and
    kept as root.score. Raises ValueError if the reward is not finite."""
    if score is not tasks.reward and hasattr(tasks.of(task), "score"):
        root.score = await reward_of(root, task, tasks.reward)
    arguments = (task, root.answer, root)
    try:
        inspect.signature(score).bind(*arguments)
    except TypeError:  # it takes no root
        arguments = arguments[:2]
    reward = score(*arguments)
    if inspect.isawaitable(reward):
        reward = await reward
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"the score of {task.id} is {reward!r}, no finite number")
    return float(reward)


async def side_by_side(one: Callable, items: list[tuple], at_once: int, label: str) -> list:
    """`await one(*item)` for all items, in order, up to `at_once` at a time. Without a
    label there is no bar. Where stderr is no terminal, lines take its place."""
    from tqdm import tqdm  # here: one question needs no bar

    gate, done = asyncio.Semaphore(at_once), []
    said = time.monotonic()

    async def gated(item: tuple) -> Any:
        nonlocal said
        async with gate:
            result = await one(*item)
        bar.update()
        done.append(item)
        if label and bar.disable and time.monotonic() - said > EVERY_SECONDS:
            said = time.monotonic()
            print(f"{label}: {len(done)} of {len(items)}")
        return result

    hidden = None if label else True  # None: shown in a terminal
    with tqdm(total=len(items), desc=label, leave=False, disable=hidden) as bar:
        return await asyncio.gather(*map(gated, items))


# ------------------------------------------------------------------------------------------
# How a tree may grow: rlm.json

@dataclass(frozen=True)
class RLMConfig:
    """How a tree may grow. Saved beside the weights as rlm.json."""
    max_depth: int = 1  # nodes down to this depth have a REPL; the root is at depth 0
    max_turns: int = 6  # messages that the policy may write in one node
    turn_tokens: int = 1024  # sampled tokens of one message, at most
    window: int = 32_768  # tokens of one node, prompts and observations included
    max_nodes: int = 32  # nodes of a tree, the root included
    tree_tokens: int = 200_000  # sampled tokens of a tree
    seconds: float = 900.0  # processor time of its code; waiting for the model is free
    style: str = "full"  # full: for pretrained models; brief: for those made from nothing
    task: str = ""  # the task that it was trained on: a name, or a file
    limits: Limits = field(default_factory=Limits)

    def save(self, path: str) -> None:
        write_json(path, asdict(self))


def load_config(model_dir: str, positions: float = math.inf, sandbox: str = "auto",
                changes: str = "") -> RLMConfig:
    """rlm.json of a checkpoint, or the defaults, and the fields of a file `changes` in
    their place. The window is at most the model's positions. `sandbox` depends on this
    machine, so no file sets it."""
    config, saved = RLMConfig(), Path(model_dir, "rlm.json")
    if model_dir and saved.exists():
        config = changed(config, read_json(saved), saved)
    if changes:
        config = changed(config, read_json(changes), changes)
    limits = replace(config.limits, sandbox=sandbox)
    return replace(config, window=min(config.window, positions), limits=limits)


def task_of(config: RLMConfig, given: str = "") -> str:
    """The task that is given, else that of the training. Raises ValueError if that is a
    file: whoever opens a checkpoint from elsewhere must not run its code."""
    if not given and util.is_path(config.task):
        raise ValueError(f"the model's task is a program, {config.task}: name it, if it "
                         "may run (--task; eval.py: --tasks; RLM: task)")
    return given or config.task


CHOICES = {"style": ("full", "brief"), "sandbox": ("require", "auto", "off")}
MOST = 1e9  # the largest value of each number


def changed(config: RLMConfig | Limits, fields: Any, source: str) -> RLMConfig | Limits:
    """The configuration with these fields in place of its own. Raises ValueError that names
    the `source` for a field that there is not, and for a wrong value."""
    if not isinstance(fields, dict):
        raise ValueError(f"{source}: {fields!r:.40} is no JSON object")
    values = {}
    for name, value in fields.items():
        usual = getattr(config, name, None)
        if usual is None:
            raise ValueError(f"{source}: there is no field {name!r}")
        if isinstance(usual, Limits):
            value = changed(usual, value, source)
        types = (type(usual), int) if type(usual) is float else (type(usual),)
        good = type(value) in types
        if good and name in CHOICES:
            good = value in CHOICES[name]
        elif good and type(value) in (int, float):
            good = 0 < value <= MOST
        if not good:
            raise ValueError(f"{source}: {name} cannot be {value!r}")
        values[name] = value
    return replace(config, **values)


# ------------------------------------------------------------------------------------------
# A policy from a sampler, and a trained model to ask

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
        ids = done.ids[:-1] if done.stop == "stop" else done.ids
        return replace(done, text=tokenizer.decode(ids))
    return policy


def aloud(policy: Callable) -> Callable:
    """The policy, which says on stderr what a node reads and then what it wrote. Children
    run side by side."""
    async def speaking(node: Node, max_tokens: int, key: tuple) -> Completion:
        size = len(node.ids) or sum(about(turn.text) for turn in node.said)
        read = cut(printable(node.turns[-1].text), SHOWN)
        print(f"--- {node.name} reads {size:,} tokens, which end with\n{read}",
              file=sys.stderr)
        done = await policy(node, max_tokens, key)
        print(f"--- {node.name} wrote\n{printable(done.text)}", file=sys.stderr)
        return done
    return speaking


class RLM:
    """A trained model: RLM("runs/tiny/final").completion(question, context) -> answer.

    `trace` holds the root of the last tree. `changes` is a file with fields of rlm.json;
    `task` is whose prompts and tools are used, by default the model's, if it is ours."""
    trace: Node | None = None

    def __init__(self, model_dir: str, sampling: Sampling = Sampling(), seed: int = 0,
                 sandbox: str = "auto", batch: int = 8, changes: str = "", task: str = ""):
        import engine  # before torch: it says how torch's threads wait
        from model import open_checkpoint
        from sampler import Sampler
        from tokenizer import Tokenizer

        model = open_checkpoint(model_dir)
        positions = model.config.max_position_embeddings
        config = load_config(model_dir, positions, sandbox, changes)
        self.tokenizer = Tokenizer.from_pretrained(model_dir)
        self.sampler = Sampler(model, batch=batch, window=config.window)
        if self.sampler.window < config.window:
            print(f"memory for a window of {self.sampler.window} tokens, not of "
                  f"{config.window}", file=sys.stderr)
        self.config = replace(config, window=self.sampler.window)
        self.policy = local_policy(self.sampler, self.tokenizer, sampling)
        self.seed, self.task = seed, task

    def completion(self, query: str, context: Any, verbose: bool = False) -> Any:
        """The answer: any JSON value, or None. In a notebook await `acompletion`."""
        return asyncio.run(self.acompletion(query, context, verbose))

    async def acompletion(self, query: str, context: Any, verbose: bool = False) -> Any:
        kind = tasks.kind_of(task_of(self.config, self.task))
        task = Task("question", kind, query, json_value(context))
        policy = aloud(self.policy) if verbose else self.policy
        self.trace = await rollout(
            task, policy, self.tokenizer, self.config, (self.seed,))
        return self.trace.answer


# ------------------------------------------------------------------------------------------
# The command line

def main() -> None:
    parser = util.parser("Ask a recursive language model about files. Each turn "
                         "goes to stderr, the answer to stdout.")
    add = parser.add_argument
    add("--demo", action="store_true", help="ask about requests that --seed draws")
    add("--model", default=Path(__file__).parent / "assets" / "tiny",
        help="checkpoint directory (default assets/tiny)")
    add("--api", metavar="URL", help="a server in place of --model, as "
        "http://localhost:8000/v1; its key: OPENAI_API_KEY")
    add("--api-model", metavar="NAME", default="", help="the server's model")
    add("--task", default="", help="whose prompts and tools are used: a name, or "
        "path/to/my_task.py (default: that of the model's training, if it is ours)")
    add("--rlm", default="", help="file with fields of rlm.json, in place of the model's")
    add("--sandbox", default="auto", choices=CHOICES["sandbox"],
        help="namespaces around the REPL (default auto: where possible)")
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    add("--top-p", type=float, default=1.0, help="share to sample from (default 1.0: all)")
    add("question", nargs="?", help="what to ask")
    add("files", nargs="*", help="the context (default standard input)")
    args = parser.parse_args()
    if bool(args.question) == args.demo:
        parser.error("a question is needed, but --demo has one of its own")
    if args.api and not args.api_model:
        parser.error("--api needs --api-model")
    try:
        if args.demo:
            rng = random.Random(f"demo {args.seed}")
            question = tasks.make(tasks.load("requests"), rng, heldout=True)
        else:
            context = {name: Path(name).read_text("utf-8", "replace")
                       for name in args.files}
            if len(context) < 2:
                context = "".join(context.values()) if context else sys.stdin.read()
            question = Task("question", "", args.question, context)
        root = ask(args, question)
    except (OSError, ValueError, ImportError, RuntimeError, Refused, Lost) as error:
        if util.is_theirs(error):
            raise
        sys.exit(f"rlm.py: {error}")
    if root.answer is None and ENDS[root.end]:
        sys.exit(f"no answer: {ENDS[root.end]}")
    print(printable(as_text(root.answer)))
    if args.demo:
        score = tasks.reward(question, root.answer)
        print(f"gold: {as_text(question.answer)}\nscore: {score:.2f}")


def ask(args: argparse.Namespace, question: Task) -> Node:
    """The tree of a question to the model, or the server, that the flags name."""
    sampling = Sampling(args.temperature, args.top_p)
    if args.api:
        from baselines.api import API
        policy, tokenizer = API(args.api, args.api_model, sampling), None
        config = load_config("", sandbox=args.sandbox, changes=args.rlm)
    else:
        print(f"loading {args.model}", file=sys.stderr)
        model = RLM(args.model, sampling, args.seed, args.sandbox, changes=args.rlm)
        policy, tokenizer, config = model.policy, model.tokenizer, model.config
        if not config.task:
            print("it was not trained for this (its rlm.json names no task), so its answer "
                  "is a guess", file=sys.stderr)
    if not question.kind:
        kind = tasks.kind_of(task_of(config, args.task))
        question = replace(question, kind=kind)
    return asyncio.run(rollout(question, aloud(policy), tokenizer, config, (args.seed,)))


if __name__ == "__main__":
    main()
