"""Which method answers which questions how well, at what cost, and how sure is that?

    python eval.py --model DIR                      a checkpoint on held-out questions
    python eval.py --model DIR --methods rlm1,direct,retrieval --lengths 2000,8000,32000
    python eval.py --policy oracle --tasks niah,hop --lengths 128000     scripts, no model
    python eval.py --api http://localhost:8000/v1 --api-model NAME --html report.html

Questions are generated from a seed, others than those of training, or read from a file.
Every method gets the same ones. Scores are means with 95 % intervals, and methods are
compared question by question. Trees that the machine or a server lost are counted apart
and stay out of the means.

With --json, --html or --save, every answer and every paid reply goes to a journal beside
that file at once; --resume continues from it and pays for nothing twice.

All but the last section is a library that train.py uses as well. The command line runs
lab/compare.py, which adds other methods, servers, the journal and the report page. Left
out: several samples per question, and judge models.
"""
import argparse
import asyncio
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from runtime.threads import suited_to  # before torch: it says how torch's threads wait

import numpy as np
import torch
from tqdm import tqdm

import rlm
import tasks
from model import Qwen3
from repl import REPLError
from rlm import RLMConfig
from runtime import console, flags, metrics
from runtime.files import write_text
from runtime.handed_in import HandedInError
from sampler import SamplerError
from tasks import Task
from tokenizer import Tokenizer
from tree import Completion, Node, Rollout, Unscored


RLM_METHODS = ("rlm0", "rlm1", "rlm2", "rlm0-bare", "rlm1-bare", "rlm2-bare")
ANSWERED = ("final", "text")  # the ends of a root that has said its answer
Z = 1.959964  # of a 95 % interval
FEW = 20  # scores; see `interval`
LONGER = (0.8, 1.2)  # longer questions differ so much: no score hangs on one length


# ------------------------------------------------------------------------------------------
# Questions

def heldout_tasks(n: int, task: str = "notes", seed: int = 0,
                  times: int = 1) -> list[Task]:
    """n generated questions that training never saw, about `times` as long as usual.

    `task` is the name of a kind, or the path of somebody's own. Raises ValueError for a
    length that the kind cannot have."""
    questions = []
    for i in range(n):
        rng = random.Random(f"heldout {seed} {i}")
        tokens = None
        if times > 1:
            # A kind without TOKENS has one length: tasks.make refuses to make another.
            usual = getattr(tasks.load(task), "TOKENS", 0)
            tokens = round(times * usual * rng.uniform(*LONGER))
        questions.append(tasks.make(task, rng, tokens, heldout=True))
    return questions


def length_of(task: Task) -> int:
    """Of its context: characters / 4, so about tokens, and the same for every model. Where
    a program says "length", it means this."""
    return len(rlm.as_text(task.context)) // 4


def context_tokens(task: Task, tokenizer: Tokenizer) -> int:
    """By the tokenizer of one model."""
    return len(tokenizer.encode(rlm.as_text(task.context)))


# ------------------------------------------------------------------------------------------
# Answers

def evaluate(questions: list[Task], policy, tokenizer: Tokenizer, config: RLMConfig,
             key: tuple = ("eval",), label: str = "held-out", mine: slice = slice(None),
             gather=lambda value: [value], run: Callable = asyncio.run,
             score: Callable = tasks.reward) -> tuple[dict, list[Rollout]]:
    """One tree per question -> (a row for the table, the rollouts in the questions' order).

    With several ranks, each asks its share, `mine`, and `gather` collects all shares. `run`
    may end early, if `gather` raises then. Raises REPLError if every tree was lost."""
    method = trained_as(config)
    answers = {}

    async def one(i: int, task: Task) -> None:
        answers[i] = await ask(method, task, policy, tokenizer, config, (*key, i), score)
        bar.update()

    share = list(enumerate(questions))[mine]
    with tqdm(total=len(share), desc=label, leave=False, disable=None) as bar:
        run(side_by_side(one, share, 256))

    answers = {i: answer for part in gather(answers) for i, answer in part.items()}
    records, rollouts = zip(*(answers[i] for i in range(len(questions))))
    if all(record["failed"] for record in records):
        raise REPLError(f"every tree was lost: {records[0]['failed']}")
    return summary(list(records), questions[0].kind, None, method), list(rollouts)


class Meter:
    """A policy that counts what another one costs, and notes when it served a request:
    not from when that was asked for, but from when it had left the queue."""

    def __init__(self, policy):
        self.policy = policy
        self.calls = 0
        self.used = Counter()  # tokens: prompt, reused, sampled
        self.prices: list[float | None] = []  # dollars per call, of policies that say so
        self.served: list[tuple[float, float]] = []  # from when to when, per call

    @property
    def dollars(self) -> float | None:
        if not self.prices or None in self.prices:
            return None
        return sum(self.prices)

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        asked = time.monotonic()
        done = await self.policy(node, max_tokens, key)
        self.served.append((asked + done.usage.get("waited", 0.0), time.monotonic()))
        self.calls += 1
        for name in ("prompt", "reused", "sampled"):
            self.used[name] += done.usage[name]
        if "dollars" in done.usage:
            self.prices.append(done.usage["dollars"])
        return done


async def ask(method: str, task: Task, policy, tokenizer, config: RLMConfig, key: tuple,
              score: Callable = tasks.reward, tries: int = 2) -> tuple[dict, Rollout]:
    """One question, answered by one method -> (its record, its tree).

    A tree that the machine lost is run again; after `tries` it has failed and scores 0. A
    policy's exception can say otherwise: `final = True` means that another try is no use,
    `ends_run = True` that it is raised. Raised is also an error in a handed-in file."""
    for _ in range(tries):
        meter = Meter(policy)
        root, seen, failed = Node(end="failed"), None, ""
        try:
            root, seen = await answer(method, task, meter, tokenizer, config, key)
            break
        except HandedInError:
            raise
        except Exception as error:
            if getattr(error, "ends_run", False):
                raise
            failed = repr(error)
            if getattr(error, "final", False):
                break
    reward = 0.0
    if not failed:
        try:
            reward = await rlm.scored(score, task, root.answer)
        except Unscored as error:
            failed = repr(error)

    nodes = list(root.walk())
    seconds = covered(meter.served) + sum(node.repl_seconds for node in nodes)
    answered = root.end in ANSWERED or root.answer is not None
    record = {
        "id": task.id, "context": length_of(task), "score": reward,
        "failed": failed, "end": root.end, "answered": answered, "seen": seen,
        "seconds": round(seconds, 3),
        "in": meter.used["prompt"], "reused": meter.used["reused"],
        "out": meter.used["sampled"], "calls": meter.calls, "nodes": len(nodes),
        "depth": max(node.depth for node in nodes), "root": tokens(root),
        "critical_path": metrics.critical_path(root),
        "errors": sum(len(node.errors) for node in nodes), "dollars": meter.dollars}
    return record, Rollout(task, task.id, root, reward, failed)


async def answer(method: str, task: Task, policy, tokenizer, config: RLMConfig,
                 key: tuple) -> tuple[Node, float | None]:
    """The tree of a method for a task, and the share of the context that it showed the
    model: None for rlm, where the model itself chooses what to read."""
    if method.startswith("rlm"):
        config = rlm_config(method, config)
        return await rlm.rollout(task, policy, tokenizer, config, key), None
    from lab import methods
    return await methods.answer(method, task, policy, tokenizer, config, key)


def trained_as(config: RLMConfig) -> str:
    """The method of a checkpoint's own configuration."""
    return f"rlm{config.max_depth if config.max_nodes > 1 else 0}"


def rlm_config(method: str, config: RLMConfig) -> RLMConfig:
    """The configuration of rlm0 to rlm2-bare, from that of the checkpoint.

    The number is the depth down to which nodes have a REPL; rlm0 may not call itself.
    "-bare" leaves the task's strategy out of the prompt. Raises ValueError for what the
    configuration rules out."""
    depth = int(method[3])
    if depth and config.max_nodes == 1:
        raise ValueError(f"{method}: rlm.json says max_nodes 1, so there are no children")
    config = replace(config, max_depth=depth)
    if depth == 0:
        config = replace(config, max_nodes=1)
    if not method.endswith("-bare"):
        return config
    if config.style == "brief":
        raise ValueError(
            f"{method}: this model's brief prompt has no strategy text to leave out")
    return replace(config, style="bare")


async def side_by_side(one: Callable, items, at_once: int) -> None:
    """`await one(*item)` for all items, up to `at_once` at a time.

    An item is drawn when there is room. The first exception ends all and is raised."""
    items = iter(items)

    async def work() -> None:
        for item in items:
            await one(*item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in any of the spans."""
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def tokens(node: Node) -> int:
    """Tokens of a conversation; four characters count as one where there are no ids."""
    return len(node.ids) or sum(len(turn.text) for turn in node.turns) // 4


# ------------------------------------------------------------------------------------------
# Statistics

def summary(records: list[dict], task: str, length: int | None, method: str) -> dict:
    """One row of the table: means per question, over the questions that did not fail."""
    scored = [r for r in records if not r["failed"]]

    def mean(name: str) -> float | None:
        # A journal of an earlier version lacks what was not counted then.
        values = [r[name] for r in scored if r.get(name) is not None]
        return float(np.mean(values)) if values else None

    low, high, p50, p95 = None, None, None, None
    if scored:
        low, high = interval([r["score"] for r in scored])
        p50, p95 = np.percentile([r["seconds"] for r in scored], [50, 95]).tolist()
        length = length or round(mean("context"))
    dollars = mean("dollars")
    if any(r["dollars"] is None for r in scored):
        dollars = None  # a sum of the known prices would be too low
    means = ("seen", "in", "reused", "out", "calls", "nodes", "depth", "critical_path",
             "root", "errors")
    return {
        "task": task, "method": method, "length": length, "n": len(scored),
        "failed": len(records) - len(scored),
        "score": mean("score"), "low": low, "high": high,
        "unanswered": sum(not r["answered"] for r in scored),
        **{name: mean(name) for name in means}, "p50": p50, "p95": p95, "dollars": dollars,
        "ends": dict(Counter(r["end"] for r in scored).most_common())}


def interval(scores: list[float], least: float = 0.0) -> tuple[float, float]:
    """The 95 % interval of the mean of scores that can be `least` to 1.

    Of a share (all scores are 0 or 1) Wilson's (1927). Of others the percentiles of 2,000
    bootstrap resamples (Efron, 1979), from a fixed seed. Fewer than FEW scores, or equal
    ones, show too little for that. Then the interval is widened: as many as z²/(n + z²) of
    all questions may score `least` or 1, and none of them be among these n. (For equal
    scores of 1 that is Wilson's interval, too.)"""
    values = np.asarray(scores, dtype=float)
    n, mean, z2 = len(values), float(values.mean()), Z ** 2
    if least == 0.0 and np.isin(values, (0.0, 1.0)).all():
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = Z * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)
    picks = np.random.default_rng(0).integers(n, size=(2000, n))
    low, high = np.percentile(values[picks].mean(1), [2.5, 97.5]).tolist()
    if n < FEW or np.ptp(values) < 1e-9:
        unseen = z2 / (n + z2)
        low += unseen * (min(least, values.min()) - low)
        high += unseen * (max(1.0, values.max()) - high)
    return float(low), float(high)


def differences(cells: dict[tuple, dict[int, dict]]) -> list[dict]:
    """Each pair of methods on the questions that both were scored on: the mean difference
    with its 95 % interval. `cells`: (task, length, method) -> {question: record}."""
    rows = []
    for (one, a), (two, b) in itertools.combinations(cells.items(), 2):
        if one[:2] != two[:2]:
            continue
        both = [i for i in sorted(a.keys() & b.keys())
                if not a[i]["failed"] and not b[i]["failed"]]
        if not both:
            continue
        gaps = [a[i]["score"] - b[i]["score"] for i in both]
        low, high = interval(gaps, least=-1.0)
        rows.append({"task": one[0], "length": one[1], "a": one[2], "b": two[2],
                     "n": len(gaps), "difference": float(np.mean(gaps)), "low": low,
                     "high": high})
    return rows


def gaps(model: Qwen3, rollouts: list[Rollout]) -> dict[Node, list[float]]:
    """For the first 500 nodes: the log-probabilities of their sampled tokens as the trainer
    computes them, minus the sampler's."""
    nodes = [node for r in rollouts for node in r.root.walk()][:500]
    parameters = sum(weight.numel() for weight in model.parameters())
    found = {}
    for node in nodes:
        if not node.sampled:
            continue
        ids_BT, mask_BT = (torch.tensor([row], device=model.device)
                           for row in (node.ids, node.mask))
        with torch.no_grad(), suited_to(parameters):
            exact = model.logprobs(ids_BT, mask_BT)[0].tolist()
        sampled = [p for p, m in zip(node.logprobs, node.mask) if m]
        found[node] = [a - b for a, b in zip(exact, sampled)]
    return found


def write_report(path: str, title: str, settings: dict, rows: list[dict], **parts) -> None:
    """Write a run or an evaluation as one HTML page; lab.report.page tells the `parts`."""
    from lab import report
    write_text(path, report.page(title, settings, rows, **parts))


# ------------------------------------------------------------------------------------------
# The command line

def read_flags() -> argparse.Namespace:
    from lab import api

    parser = flags.parser("Score methods on questions.",
                          epilog="The key of --api is read from OPENAI_API_KEY.")
    add = parser.add_argument_group("who answers").add_argument
    add("--model", help="checkpoint directory; with another --policy only its tokenizer "
        "and rlm.json are used")
    add("--policy", help="model, api, oracle (a script that knows how the questions are "
        "made) or keyword (one that looks for a word) (default: model, or api with --api)")
    add("--children", help="who answers below the root: the same names, or api:NAME for "
        "another model of the server (default: as --policy)")
    add("--methods", help="direct, compaction, retrieval, rlm0, rlm1, rlm2, rlm1-bare, ... "
        "(default: the rlm that the checkpoint was trained as, else rlm1)")
    add("--window", type=int, help="most tokens of a conversation (default: rlm.json's)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    add("--top-p", type=float, default=1.0, help="of --model: sample from the most likely "
        "tokens that together have this probability (default 1.0: from all)")
    add("--sandbox", default="auto", choices=("require", "auto", "off"),
        help="namespaces around the REPL (default auto: where possible)")

    add = parser.add_argument_group("questions").add_argument
    add("--tasks", help="kinds of questions, as a,b; each is a name or path/to/my_task.py "
        "(default: notes, and evidence with --data)")
    add("--lengths", help="of contexts, as 8000,128k,1m: characters / 4, so "
        "about tokens (default: the kind's usual length)")
    add("--data", help="JSONL file of questions of the one kind in --tasks")
    add("--split", default="heldout", choices=("heldout", "train", "all"),
        help="questions kept from training, those of training, or all rows of --data "
        "(default: heldout)")
    add("--strict", action="store_true", help="refuse a --data file with rows that cannot "
        "be used (default: they are left out)")
    add("--n", type=int, help="questions per kind and length (default 128, or the file's)")
    add("--seed", type=int, default=0, help="of questions and sampling (default 0)")
    add("--reward", help="file.py or file.py:function that scores in place of the task, or "
        "a model: judge:model=NAME,url=URL[,tokens=N]")

    api.add_flags(parser.add_argument_group("a server").add_argument)

    add = parser.add_argument_group("results").add_argument
    add("--json", help="write rows, differences and records to this file")
    add("--html", help="write the report, one page, to this file")
    add("--save", help="write the trees to this JSONL file")
    add("--resume", action="store_true", help="continue from the journal of these files")
    args = parser.parse_args()
    args.defaults = vars(parser.parse_args([]))  # the report tells what differs from them
    return args


def main() -> None:
    from lab.compare import Comparison

    sys.stdout.reconfigure(line_buffering=True)  # a file shows each line at once, too
    try:
        Comparison(read_flags()).run()
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted")
    except BrokenPipeError:  # nobody reads the output: see runtime/console.py
        raise
    except (OSError, ValueError, SamplerError, REPLError) as error:
        sys.exit(f"eval.py: {console.line(error)}")


if __name__ == "__main__":
    console.start(main)
