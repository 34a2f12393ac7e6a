"""Which method answers which questions how well, at what cost, and how sure is that?

    python eval.py --model DIR                                     a checkpoint on held-out papers
    python eval.py --model DIR --methods rlm1,direct,retrieval --lengths 2000,8000,32000
    python eval.py --policy oracle --tasks niah,hop --lengths 128000      scripts, no model
    python eval.py --api http://localhost:8000/v1 --api-model NAME --json r.json --html r.html

Questions are generated from a seed (terms and papers that training never saw) or read from a
file; every method gets the same ones. Scores are means with 95 % bootstrap intervals; methods are
also compared question by question. What the machine or a server lost is counted apart.

With --json, --html or --save every answer, and every reply that was paid for, is appended to a
journal beside that file as soon as it is there; --resume continues from it and pays for nothing
twice. A run that is ended (budget, key, server, Ctrl-C) waits for the replies on their way and
writes its results so far; only what is on its way when the process is killed is lost.

Left out: sampling several answers to a question, and every judge but that of evidence.
"""
import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lab import methods
from lab import report
import rlm
import tasks
from lab.api import API, Account, APIError, Stop
from model import Qwen3, Qwen3Config
from repl import REPLError
from rlm import RLMConfig
from sampler import Sampler, SamplerError
from tokenizer import Tokenizer
from tree import (Completion, Node, Rollout, Turn, from_row, to_row, write_rollouts,
                  write_text)


PAPERS = 12  # in a generated question, in training as here
CHARACTERS = 50_000_000  # of all contexts in memory at once
ANSWERED = ("final", "text")  # ends of a root that gave an answer


def heldout_tasks(n: int, seed: int = 0, times: int = 1,
                  kind: str = "evidence") -> list[tasks.Task]:
    """n generated questions that training never saw: evidence on terms of its own, with `times`
    as many papers as usual and the same number of relevant ones; deep on other paragraphs."""
    return [tasks.make_task(kind, random.Random(f"heldout {seed} {i}"), heldout=True,
                            papers=PAPERS * times) for i in range(n)]


def evaluate(questions: list[tasks.Task], policy, tokenizer: Tokenizer, config: RLMConfig,
             key: tuple = ("eval",), label: str = "held-out", mine: slice = slice(None),
             gather=lambda value: [value]) -> tuple[dict, list[Rollout]]:
    """One tree a question -> (a row for the table, the rollouts in order). Of several ranks each
    asks its share, `mine`, and `gather` brings those of all."""
    method, done = f"rlm{config.max_depth}", {}

    async def one(i: int, task: tasks.Task) -> None:
        done[i] = await ask(method, task, lambda _: policy, tokenizer, config, (*key, i))
        bar.update()

    share = list(enumerate(questions))[mine]
    with tqdm(total=len(share), desc=label, leave=False, disable=None) as bar:
        asyncio.run(side_by_side(one, share, 256))
    done = {i: tree for part in gather(done) for i, tree in part.items()}
    records, rollouts = zip(*(done[i] for i in range(len(questions))))
    if all(r["failed"] for r in records):
        raise REPLError(f"every tree was lost: {records[0]['failed']}")
    length = np.mean([context_tokens(q, tokenizer) for q in questions[:16]])
    return summary(list(records), questions[0].kind, method, round(float(length))), list(rollouts)


# ---------------------------------------------------------------------------------------------
# One question

class Meter:
    """A policy that counts what it cost."""

    def __init__(self, policy):
        self.policy, self.calls, self.used = policy, 0, Counter()
        self.prices: list[float | None] = []

    @property
    def dollars(self) -> float | None:
        return sum(self.prices) if self.prices and None not in self.prices else None

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        done = await self.policy(node, max_tokens, key)
        self.calls += 1
        if "dollars" in done.usage:  # others cost electricity
            self.prices.append(done.usage["dollars"])
        self.used.update({name: done.usage[name] for name in ("prompt", "reused", "sampled")})
        return done


async def ask(method: str, task: tasks.Task, policy_for: Callable, tokenizer, config: RLMConfig,
              key: tuple, tries: int = 2) -> tuple[dict, Rollout]:
    """One question by one method -> (its record, its tree). A tree that the machine lost is run
    again; after `tries` it has failed. Raises Stop."""
    policy = policy_for(task)
    for _ in range(tries):
        meter, start = Meter(policy), time.monotonic()
        root, seen, failed = Node(end="failed"), None, ""
        try:
            root, seen = await methods.answer(method, task, meter, tokenizer, config, key)
            break
        except Stop:
            raise
        except Exception as error:
            failed = repr(error)
            if isinstance(error, APIError):
                break  # it was tried often enough
    seconds = time.monotonic() - start
    score = 0.0 if failed else tasks.reward(task, root.answer)
    nodes = list(root.walk())
    record = {"id": task.id, "context": len(methods.flat(task.context)) // 4, "score": score,
              "failed": failed, "end": root.end, "seen": seen, "seconds": round(seconds, 3),
              "in": meter.used["prompt"], "reused": meter.used["reused"],
              "out": meter.used["sampled"], "calls": meter.calls, "nodes": len(nodes),
              "depth": max(node.depth for node in nodes), "root": tokens(root),
              "errors": sum(len(node.errors) for node in nodes), "dollars": meter.dollars}
    return record, Rollout(task, task.id, root, score, failed)


async def side_by_side(one: Callable, items, at_once: int) -> None:
    """`await one(*item)` for all items, up to `at_once` at a time; items are drawn when there is
    room. The first exception ends the others and is raised."""
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


def tokens(node: Node) -> int:
    """Tokens of a conversation; four characters count as one where nobody made ids."""
    return len(node.ids) or sum(len(t.text) for t in node.turns) // 4


def context_tokens(task: tasks.Task, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(rlm.as_text(task.context)))


# ---------------------------------------------------------------------------------------------
# Statistics

def summary(records: list[dict], task: str, method: str, length: int | None) -> dict:
    """One row of the table: means a question over those that did not fail."""
    scored = [r for r in records if not r["failed"]]
    low, high = bootstrap([r["score"] for r in scored]) if scored else (None, None)

    def mean(name: str) -> float | None:
        values = [r[name] for r in scored if r.get(name) is not None]
        return float(np.mean(values)) if values else None

    length = length or (scored and round(mean("context"))) or None
    row = {"task": task, "method": method, "length": length, "n": len(scored),
           "failed": len(records) - len(scored), "score": mean("score"), "low": low, "high": high,
           "unanswered": sum(r["end"] not in ANSWERED for r in scored),
           **{name: mean(name) for name in ("seen", "in", "reused", "out", "calls", "nodes",
                                            "depth", "root", "errors")},
           **{f"p{q}": float(np.percentile([r["seconds"] for r in scored], q)) if scored else None
              for q in (50, 95)},
           "dollars": None if any(r["dollars"] is None for r in scored) else mean("dollars"),
           "ends": dict(Counter(r["end"] for r in scored).most_common())}
    if any("judge" in r for r in records):
        row["judge"] = mean("judge")
    return row


def bootstrap(scores: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile interval of the mean (Efron), from a fixed seed."""
    values = np.asarray(scores)
    picks = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)


def differences(cells: dict[tuple, dict[int, dict]]) -> list[dict]:
    """Each pair of methods on the questions that both were scored on: the mean difference and its
    95 % bootstrap interval over questions. `cells`: (task, length, method) -> {question: record}"""
    rows = []
    for (one, a), (two, b) in itertools.combinations(cells.items(), 2):
        if one[:2] != two[:2]:
            continue
        gaps = [a[i]["score"] - b[i]["score"] for i in sorted(a.keys() & b.keys())
                if not a[i]["failed"] and not b[i]["failed"]]
        if gaps:
            low, high = bootstrap(gaps)
            rows.append({"task": one[0], "length": one[1], "a": one[2], "b": two[2],
                         "n": len(gaps), "difference": float(np.mean(gaps)), "low": low,
                         "high": high})
    return rows


# ---------------------------------------------------------------------------------------------
# For people

HEAD = (f"{'task':10} {'method':10} {'length':>9} {'n':>4} {'score':>5}  {'95 % interval':14} "
        f"{'failed':>6} {'in':>7} {'reused':>7} {'out':>6} {'calls':>6} {'depth':>5} {'p50 s':>6} "
        f"{'p95 s':>6} {'dollars':>8}")


def line(r: dict) -> str:
    def show(name: str, width: int, digits: int = 0) -> str:
        return f"{'-' if r[name] is None else format(r[name], f',.{digits}f'):>{width}}"
    interval = f"[{r['low']:.3f}, {r['high']:.3f}]" if r["n"] else "-"
    return (f"{r['task']:10} {r['method']:10} {show('length', 9)} {r['n']:4} "
            f"{show('score', 5, 3)}  {interval:14} {r['failed']:6} {show('in', 7)} "
            f"{show('reused', 7)} {show('out', 6)} {show('calls', 6, 1)} {show('depth', 5, 1)} "
            f"{show('p50', 6, 1)} {show('p95', 6, 1)} {show('dollars', 8, 4)}")


def notes(cells: dict[tuple, dict[int, dict]], rows: list[dict]) -> list[str]:
    """What a reader of the table must know besides."""
    lines = []
    for row, records in zip(rows, cells.values()):
        where = f"{row['task']} {row['method']}" + (f" {row['length']:,}" if row["length"] else "")
        if row["seen"] is not None and row["seen"] < 0.9995:
            why = "time was up" if row["method"] == "compaction" else "the window was full"
            lines.append(f"{where}: saw {row['seen']:.1%} of the context, then {why}")
        if row["unanswered"]:
            ends = ", ".join(f"{end} {n}" for end, n in row["ends"].items() if end not in ANSWERED)
            lines.append(f"{where}: {row['unanswered']} of {row['n']} gave no answer ({ends})")
        for why, n in Counter(r["failed"] for r in records.values() if r["failed"]).items():
            lines.append(f"{where}: {n} failed: {why:.200}")
        if "judge" in row:
            n = sum(r.get("judge") is not None for r in records.values())
            lines.append(f"{where}: the judge gave {row['judge'] or 0:.3f} over {n} answers")
    return lines


# ---------------------------------------------------------------------------------------------
# What has been answered, on disk

class Journal:
    """JSON lines: the settings, then what was paid for and what was answered, in the order in
    which it came. The context of a question is not kept: its seed makes it again."""

    def __init__(self, path: str, settings: dict, resume: bool, account: Account):
        self.path, self.account = path, account
        self.done: dict[tuple, tuple[dict, Rollout]] = {}
        good, lines = 0, []
        if path and os.path.exists(path):
            with open(path, "rb") as file:
                for number, raw in enumerate(file, 1):
                    if not raw.endswith(b"\n"):
                        break  # the run was killed while it wrote this line
                    try:
                        lines.append(json.loads(raw))
                    except ValueError:
                        raise ValueError(f"{path} line {number}: not JSON") from None
                    good += len(raw)
        if lines and not resume and len(lines) > 1:
            raise ValueError(f"{path} holds {len(lines) - 1} lines of an earlier run: go on with "
                             "--resume, or remove it")
        if lines and resume:
            self.read(lines, settings)
        self.file = None
        if path:
            self.file = open(path, "r+b" if lines and resume else "wb")
            self.file.truncate(self.file.seek(good if lines and resume else 0))
            if not (lines and resume):
                self.write({"settings": settings})
        account.on_paid = lambda name, c: self.write(
            {"paid": name, "text": c.text, "stop": c.stop, "usage": c.usage})

    def read(self, lines: list[dict], settings: dict) -> None:
        try:
            before = lines[0]["settings"]
            for name in sorted(before.keys() | settings.keys()):
                if before.get(name) != settings.get(name):
                    raise ValueError(f"it was made with {name} {before.get(name)!r:.300}, this "
                                     f"run has {settings.get(name)!r:.300}")
            for row in lines[1:]:
                if "paid" in row:
                    completion = Completion(row["text"], stop=row["stop"], usage=row["usage"])
                    self.account.paid[row["paid"]] = completion
                    self.account.spend(completion)
                else:
                    self.done[tuple(row["done"])] = (row["record"], from_row(row["tree"],
                                                                             tasks.Task))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: cannot be resumed: {error}") from None

    def add(self, name: tuple, record: dict, rollout: Rollout) -> None:
        rollout = replace(rollout, task=replace(rollout.task, context=None))
        self.done[name] = (record, rollout)
        self.write({"done": name, "record": record, "tree": to_row(rollout)})

    def write(self, row: dict) -> None:
        if self.file:
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()


# ---------------------------------------------------------------------------------------------
# The command line

def main() -> None:
    parser = argparse.ArgumentParser(
        description="Score methods on questions.", allow_abbrev=False,
        epilog="The key of --api is read from OPENAI_API_KEY.")
    add = parser.add_argument
    add("--model", help="checkpoint directory; with another --policy only its tokenizer and "
                        "rlm.json are used (default: none)")
    add("--policy", help="who answers: model, api, oracle (a script that knows how the questions "
                         "are made) or keyword (one that looks for words) (default: model, or api "
                         "with --api)")
    add("--children", help="who answers below the root: the same names, or api:NAME for another "
                           "model of the server (default: as --policy)")
    add("--api", metavar="URL", help="OpenAI-compatible server, as http://localhost:8000/v1")
    add("--api-model", metavar="NAME", help="its model")
    add("--price", help="dollars for a million tokens IN,OUT or IN,OUT,CACHED (default: unknown)")
    add("--child-price", help="the same for the NAME of --children (default: as --price)")
    add("--budget-tokens", type=int,
        help="end the run before the server has counted more, in and out, earlier parts of a "
             "resumed run included (default: none)")
    add("--budget-dollars", type=float, help="the same in dollars; needs --price (default: none)")
    add("--concurrency", type=int, default=8, help="requests and questions at a time with --api "
                                                   "(default 8)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default 600)")
    add("--judge", metavar="NAME", help="also let this model of the server judge the answers to "
                                        "evidence questions, at --price (default: none)")
    add("--tasks", default="evidence", help="kinds of questions, as a,b (default evidence)")
    add("--lengths", help="tokens of context, as 8000,128000; four characters count as one "
                          "(default: 8000; evidence: the papers of training)")
    add("--methods", help=f"of {', '.join(methods.METHODS)} (default: the rlm that the checkpoint "
                          "was trained as, else rlm1)")
    add("--data", help="JSONL file of questions of the kind in --tasks (default: generated ones)")
    add("--split", choices=("heldout", "train"),
        help="questions kept from training, or those of training, for --save and train.py --warmup "
             "(default: heldout; all of --data)")
    add("--n", type=int, help="questions of each kind and length (default 128, or the file's)")
    add("--times", type=int, default=1,
        help="generated evidence without --lengths: so many times the papers (default 1)")
    add("--window", type=int, help="tokens of a conversation, at most (default: rlm.json's)")
    add("--seed", type=int, default=0, help="of questions and sampling (default 0)")
    add("--temperature", type=float, default=1.0,
        help="sampling temperature, 0 is greedy (default 1.0)")
    add("--top-p", type=float, default=1.0,
        help="of --model: sample from the most likely tokens that together have this probability "
             "(default 1.0: from all)")
    add("--sandbox", default="auto", choices=("require", "auto", "off"),
        help="namespaces around the REPL (default auto: where possible)")
    add("--json", help="write rows, differences and records to this file (default: none)")
    add("--html", help="write the report, one page, to this file (default: none)")
    add("--save", help="write the trees to this JSONL file (default: none)")
    add("--resume", action="store_true", help="continue from the journal of these files")
    args = parser.parse_args()
    try:
        Evaluation(args).run()
    except (OSError, ValueError, SamplerError, REPLError, Stop) as error:
        sys.exit(f"eval.py: {error}")
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted")


class Evaluation:
    """The command line made real: checked before anything is loaded, loaded before anything is
    written, written before anything is lost."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.root = args.policy or ("api" if args.api else "model")
        self.below = args.children or self.root
        self.check()
        self.account = Account(args.budget_tokens, args.budget_dollars,
                               asyncio.Semaphore(args.concurrency))
        self.tokenizer, self.model, self.config = None, None, RLMConfig()
        self.policies: dict[str, object] = {}  # those that need no task
        if args.model:
            config = Qwen3Config.read(os.path.join(args.model, "config.json"))
            self.config = rlm.load_config(args.model, config.max_position_embeddings)
            self.tokenizer = Tokenizer.from_pretrained(args.model)
        limits = replace(self.config.limits, sandbox=args.sandbox)
        window = args.window or self.config.window
        if args.model:  # it has no more positions than that
            window = min(window, self.config.window)
        self.config = replace(self.config, window=window, limits=limits)
        self.methods = self.chosen_methods()
        self.questions = self.load_data()
        self.cells = self.chosen_cells()
        for spec in {self.root, self.below, *([f"api:{args.judge}"] if args.judge else [])}:
            self.open(spec)

    # --- what is wanted --------------------------------------------------------------------------

    def check(self) -> None:
        """Everything about the flags that can be wrong on its own."""
        a = self.args
        for flag in ("n", "times", "concurrency", "timeout", "budget_tokens", "budget_dollars",
                     "window"):
            if getattr(a, flag) is not None and not getattr(a, flag) > 0:
                raise ValueError(f"--{flag.replace('_', '-')} must be above 0")
        for spec in (self.root, self.below):
            if spec not in ("model", "api", "oracle", "keyword") and not re.match("api:.", spec):
                raise ValueError(f"no policy {spec!r}; there are model, api, oracle, keyword")
            if spec == "model" and not a.model:
                raise ValueError("--model DIR is needed, or --api URL, or --policy oracle")
            if spec.startswith("api") and not (a.api and a.api_model):
                raise ValueError(f"{spec} needs --api URL and --api-model NAME")
        if a.judge and not a.api:
            raise ValueError("--judge needs --api URL")
        if a.api and "api" not in (self.root + self.below) and not a.judge:
            raise ValueError("--api is given, but neither root nor children use it")
        if a.budget_dollars and not a.price:
            raise ValueError("--budget-dollars needs --price")
        if a.data and a.lengths:
            raise ValueError("--lengths is for generated questions, not for those of --data")
        if a.resume and not (a.json or a.html or a.save):
            raise ValueError("--resume needs the --json, --html or --save of the run to resume")
        for path in filter(None, (a.json, a.html, a.save)):  # before any work is done for nothing
            folder = os.path.dirname(path) or "."
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"{path}: no such directory")
            if os.path.isdir(path) or not os.access(folder, os.W_OK):
                raise PermissionError(f"{path}: cannot be written")

    def chosen_methods(self) -> list[str]:
        default = f"rlm{min(self.config.max_depth, 2)}" if self.args.model else "rlm1"
        chosen = split(self.args.methods) if self.args.methods else [default]
        for name in chosen:
            if name not in methods.METHODS:
                raise ValueError(f"no method {name!r}; there are {', '.join(methods.METHODS)}")
            if name in methods.RLM_METHODS:
                methods.rlm_config(name, self.config)
            elif {self.root, self.below} & {"oracle", "keyword"}:
                raise ValueError(f"{name}: a script writes code for a REPL; it can be rlm0 to rlm2")
        return chosen

    def load_data(self) -> list[tasks.Task] | None:
        kinds, a = split(self.args.tasks), self.args
        if not a.data:
            for kind in kinds:
                if kind not in tasks.GENERATED:
                    raise ValueError(f"no task {kind!r}; there are {', '.join(tasks.GENERATED)}")
            return None
        if len(kinds) != 1:
            raise ValueError("--data holds questions of one kind; --tasks names it")
        loaded = tasks.load_tasks(a.data, kinds[0])
        if a.split:
            loaded = tasks.split(loaded)[a.split == "heldout"]
        if a.n and a.n > len(loaded):
            raise ValueError(f"--n {a.n}: {a.data} holds only {len(loaded)} questions")
        if "oracle" in (self.root, self.below):
            raise ValueError("the oracle knows how questions are generated; it has no --data")
        return loaded[:a.n]

    def chosen_cells(self) -> list[tuple[str, int | None, str]]:
        """(task, length, method) of each line of the table; length None: what the task is."""
        cells = []
        for kind in split(self.args.tasks):
            lengths = [whole(v, "--lengths") for v in split(self.args.lengths or "")]
            if not lengths:
                lengths = [None if kind in tasks.TRAINED or self.questions else 8000]
            cells += [(kind, length, m) for length in lengths for m in self.methods]
        return cells

    def settings(self) -> dict:
        """What must not change between the parts of a resumed run: all but how many questions,
        which cells, and where things are written."""
        a, config = self.args, asdict(self.config)
        del config["limits"]["sandbox"]  # the machine's affair
        return {"policy": self.root, "children": self.below, "model": a.model,
                "weights": fingerprint(a.model) if self.model else None, "api": a.api,
                "api_model": a.api_model, "judge": a.judge, "split": a.split, "seed": a.seed,
                "times": a.times, "temperature": a.temperature, "top_p": a.top_p, "config": config,
                "data": a.data and digest(Path(a.data).read_bytes())}

    # --- who answers -----------------------------------------------------------------------------

    def open(self, spec: str) -> None:
        a = self.args
        if spec == "model":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            self.model = Qwen3.from_pretrained(a.model, dtype, device)
            sampler = Sampler(self.model, window=self.config.window)
            self.policies[spec] = rlm.local_policy(sampler, self.tokenizer, a.temperature,
                                                   a.top_p)
        elif spec.startswith("api"):
            price = (a.child_price if spec == self.below != self.root else None) or a.price
            self.policies[spec] = API(a.api, spec[4:] or a.api_model, self.account, a.temperature,
                                      a.timeout, price and prices(price))

    def policy_for(self, task: tasks.Task):
        """The policy for one question's tree: one at the root, maybe another below."""
        root, below = (self.policies.get(spec) or scripted(spec, task, self.args.seed,
                                                           self.tokenizer)
                       for spec in (self.root, self.below))

        async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
            return await (below if node.path else root)(node, max_tokens, key)
        return policy

    # --- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        a, stopped = self.args, ""
        target = a.json or a.html or a.save
        self.journal = Journal(target and target + ".journal", self.settings(), a.resume,
                               self.account)
        print(HEAD)
        try:
            asyncio.run(self.answer_all())
        except KeyboardInterrupt:
            stopped = "interrupted"
        except (Stop, OSError, ValueError, SamplerError, REPLError) as error:
            stopped = str(error) or repr(error)
        self.write(stopped)
        if stopped:
            total = sum(len(self.numbers(cell)) for cell in self.cells)
            more = "; go on with --resume" if target else ""
            sys.exit(f"eval.py: {stopped} ({len(self.finished())} of {total} questions are "
                     f"answered{more})")
        if not any(r["n"] for r in self.rows):
            sys.exit("eval.py: no question could be scored")

    async def answer_all(self) -> None:
        try:
            await self.answer_cells()
        finally:
            await self.account.drain()

    async def answer_cells(self) -> None:
        for cell in self.cells:
            todo = [i for i in self.numbers(cell) if self.missing((*cell, i))]
            at_once = 64 if self.policies and not self.account_used() else self.args.concurrency
            at_once = max(1, min(at_once, CHARACTERS // (4 * (cell[1] or 8000)), len(todo)))
            with tqdm(total=len(todo), desc=" ".join(map(str, filter(None, cell))), leave=False,
                      disable=None) as bar:
                async def one(i: int) -> None:
                    await self.answer_one(cell, i)  # noqa: B023
                    bar.update()  # noqa: B023
                await side_by_side(one, ((i,) for i in todo), at_once)
            print(line(self.row(cell)), flush=True)

    async def answer_one(self, cell: tuple, i: int) -> None:
        kind, length, method = cell
        task = self.questions[i] if self.questions else make_question(
            kind, length, i, self.args.seed, self.args.times, self.args.split != "train")
        key = (self.args.seed, *cell, i)
        record, rollout = await ask(method, task, self.policy_for, self.tokenizer, self.config, key)
        if self.args.judge and kind == "evidence" and not record["failed"]:
            record["judge"] = await judge(self.policies[f"api:{self.args.judge}"], task,
                                          rollout.root.answer, key)
        self.journal.add((*cell, i), record, rollout)

    def numbers(self, cell: tuple) -> range:
        return range(len(self.questions) if self.questions else self.args.n or 128)

    def missing(self, name: tuple) -> bool:
        """Not answered yet; what failed is tried again."""
        return name not in self.journal.done or bool(self.journal.done[name][0]["failed"])

    def account_used(self) -> bool:
        return any(spec.startswith("api") for spec in self.policies)

    def finished(self) -> list[tuple]:
        return [(*cell, i) for cell in self.cells for i in self.records(cell)]

    def records(self, cell: tuple) -> dict[int, dict]:
        return {i: self.journal.done[*cell, i][0] for i in self.numbers(cell)
                if (*cell, i) in self.journal.done}

    def row(self, cell: tuple) -> dict:
        return summary(list(self.records(cell).values()), cell[0], cell[2], cell[1])

    def write(self, stopped: str) -> None:
        """Tables to the terminal, and the files that were asked for."""
        a = self.args
        cells = {cell: self.records(cell) for cell in self.cells}
        cells = {cell: records for cell, records in cells.items() if records}
        self.rows = [self.row(cell) for cell in cells]
        pairs, remarks = differences(cells), notes(cells, self.rows)
        if stopped:
            remarks.append(f"not finished: {stopped}")
        for d in (d for d in pairs if d["a"] == self.methods[0]):  # the others: --json, --html
            where = f"{d['task']} {d['length']:,}" if d["length"] else d["task"]
            print(f"{where}: {d['a']} - {d['b']} = {d['difference']:+.3f}  [{d['low']:+.3f}, "
                  f"{d['high']:+.3f}]  n {d['n']}")
        for remark in remarks:
            print(remark)
        if self.account_used():
            money = f", {self.account.dollars:.4f} dollars" if a.price else ""
            print(f"server: {self.account.tokens:,} tokens in and out{money}, "
                  f"{self.account.retries} retries")
        if a.json:
            questions = [{"task": kind, "length": length, "method": method, "i": i, **record}
                         for (kind, length, method), records in cells.items()
                         for i, record in records.items()]
            write_text(a.json, json.dumps(
                {"settings": self.settings(), "rows": self.rows, "differences": pairs,
                 "notes": remarks, "questions": questions}, indent=1))
        if a.save:
            write_rollouts(a.save, (self.journal.done[name][1] for name in self.finished()))
        if a.html:
            write_text(a.html, self.page(pairs, remarks))

    def page(self, pairs: list[dict], remarks: list[str]) -> str:
        names = sorted(self.finished(), key=lambda name: name[3])  # some of every cell come first
        rollouts = [self.journal.done[name][1] for name in names]
        labels = [" ".join(str(part) for part in (kind, length, method) if part) + f" #{i}"
                  for kind, length, method, i in names]
        metrics = read_metrics(os.path.join(self.args.model or "", "..", "metrics.jsonl"))
        found = gaps(self.model, rollouts) if self.model and self.root == self.below else {}
        return report.page("Evaluation", self.settings(), self.rows, pairs, metrics,
                           report.pack(rollouts, labels, self.tokenizer, gaps=found), remarks)


def make_question(kind: str, length: int | None, i: int, seed: int, times: int,
                  heldout: bool = True) -> tasks.Task:
    """The i-th generated question of a cell; without a length it is one of heldout_tasks."""
    name = "heldout" if heldout else "teacher"
    if length is None:
        return tasks.make_task(kind, random.Random(f"{name} {seed} {i}"), heldout=heldout,
                               papers=PAPERS * times)
    return tasks.make_task(kind, random.Random(f"{name} {seed} {kind} {length} {i}"),
                           tokens=length, heldout=heldout)


def scripted(name: str, task: tasks.Task, seed: int, tokenizer):
    """A policy that writes what a script says, cut like a model's message."""
    script = {"oracle": tasks.oracle, "keyword": tasks.keyword_script}[name]

    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        text = script(task, node, seed)
        if tokenizer is None:
            stop = "stop" if len(text) <= 4 * max_tokens else "length"
            text = text[:4 * max_tokens]
            return Completion(text, stop=stop, usage={
                "prompt": tokens(node), "reused": 0, "sampled": len(text) // 4})
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn]
        if len(ids) > max_tokens:
            ids = ids[:max_tokens]
            text = tokenizer.decode(ids)
        stop = "stop" if ids[-1] == tokenizer.end_of_turn else "length"
        return Completion(text, tuple(ids), (0.0,) * len(ids), stop, {
            "prompt": tokens(node), "reused": 0, "sampled": len(ids)})
    return policy


async def judge(policy, task: tasks.Task, answer, key: tuple) -> float | None:
    """A model's score of an evidence answer; None if it gave none in two attempts."""
    node = Node(kind="llm")  # no part of the tree
    node.add(Turn("user", tasks.judge_prompt(task, answer)))
    for attempt in range(2):
        with contextlib.suppress(APIError):
            done = await policy(node, 100, (*key, "judge", attempt))
            if (score := tasks.judge_score(done.text)) is not None:
                return score
    return None


def gaps(model: Qwen3, rollouts: list[Rollout]) -> dict[Node, list[float]]:
    """For the first 500 nodes: their sampled tokens' log-probabilities as the trainer computes
    them, minus the sampler's."""
    nodes = [node for r in rollouts for node in r.root.walk()][:500]
    found = {}
    with torch.no_grad():
        for node in (node for node in nodes if node.sampled):
            ids, mask = (torch.tensor([row], device=model.device) for row in (node.ids, node.mask))
            exact = model.logprobs(ids, mask)[0].tolist()
            sampled = [p for p, m in zip(node.logprobs, node.mask) if m]
            found[node] = [a - b for a, b in zip(exact, sampled)]
    return found


def read_metrics(path: str) -> list[dict]:
    """The lines of a run's metrics.jsonl; none if there is none."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def fingerprint(model_dir: str) -> str:
    """Of a checkpoint: the sizes and both ends of its files of weights."""
    parts = []
    for name in sorted(os.listdir(model_dir)):
        if name.endswith(".safetensors"):
            with open(os.path.join(model_dir, name), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                for at in (0, max(0, size - (1 << 20))):
                    file.seek(at)
                    parts.append(file.read(1 << 20))
    return digest(b"".join(parts))


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def whole(text: str, flag: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{flag}: {text!r} is no whole number above 0")
    return int(text)


def prices(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (2, 3) or not all(0 <= v < float("inf") for v in values):
        raise ValueError(f"--price {text}: it is IN,OUT or IN,OUT,CACHED, in dollars for a million "
                         "tokens")
    return values


if __name__ == "__main__":
    main()
