"""The run behind `python eval.py`. Tasks, lengths and methods are crossed. Each cell of
this table is answered, and the results go to the terminal and to files.

Everything is checked before anything is loaded, and loaded before anything is written. Left
out: the flags, and how one question is answered and scored (eval.py).
"""
import argparse
import asyncio
import itertools
import os
import random
import re
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

import eval as evaluation  # the program that runs is __main__, so this is a second copy
import rlm
import tasks
from lab import api, report
from lab.journal import Journal, digest, digest_of_weights
from lab.methods import BASELINES
from model import Qwen3, Qwen3Config
from repl import REPLError
from rlm import RLMConfig
from runtime import handed_in
from runtime.device import DEVICE, compute_dtype
from runtime.files import write_json
from sampler import Sampler, SamplerError
from tasks import Task
from tree import Completion, Node, write_rollouts
from tokenizer import Tokenizer


SCRIPTS = {"oracle": tasks.oracle, "keyword": tasks.keyword}
CHARACTERS = 50_000_000  # of all contexts in memory at once


class Comparison:
    """One run. Raises ValueError or OSError for flags that cannot be meant."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.root = args.policy or ("api" if args.api else "model")
        self.below = args.children or self.root
        self.speakers = {self.root, self.below}
        self.uses_api = "api" in self.root + self.below
        self.check()
        self.account = api.Account(
            args.budget_tokens, args.budget_dollars, args.concurrency)

        self.tokenizer, self.config = None, RLMConfig()
        window = args.window or self.config.window
        if args.model:
            shape = Qwen3Config.read(os.path.join(args.model, "config.json"))
            self.config = rlm.load_config(args.model, shape.max_position_embeddings)
            self.tokenizer = Tokenizer.from_pretrained(args.model)
            window = min(args.window or self.config.window, self.config.window)
            rlm.warn_of_thoughts(self.tokenizer, self.config)
        limits = replace(self.config.limits, sandbox=args.sandbox)
        self.config = replace(self.config, window=window, limits=limits)

        self.score = tasks.reward
        if args.reward:
            self.score = handed_in.load_reward(args.reward)
        kinds = [self.load_kind(spec) for spec in self.kinds()]
        self.questions = self.read_data(kinds[0]) if args.data else None
        self.numbers = range(len(self.questions) if args.data else args.n or 128)
        self.methods = self.choose_methods()
        lengths = [int(text.replace("k", "000").replace("m", "000000"))
                   for text in split(args.lengths)] or [None]
        self.cells = list(itertools.product(kinds, lengths, self.methods))

        self.model, self.sampler = None, None
        self.policies = {}  # a script is another policy for each question
        for spec in self.speakers - SCRIPTS.keys() - {"model"}:
            self.policies[spec] = api.from_flags(args, spec[4:], self.account)
        if "model" in self.speakers:
            dtype = compute_dtype(args.model)
            self.model = Qwen3.from_pretrained(args.model, dtype, DEVICE)
            self.sampler = Sampler(self.model, window=window)
            self.policies["model"] = rlm.local_policy(
                self.sampler, self.tokenizer, args.temperature, args.top_p)

    def kinds(self) -> list[str]:
        return split(self.args.tasks) or [tasks.usual(self.args.data)]

    def check(self) -> None:
        """Raises ValueError for flags that are wrong alone or do not fit together."""
        a = self.args
        for name in "n window concurrency timeout budget_tokens budget_dollars".split():
            value = getattr(a, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")

        for spec in self.speakers:
            if not re.fullmatch("model|api|oracle|keyword|api:.+", spec):
                raise ValueError(
                    f"no policy {spec!r}; there are model, api, oracle, keyword")

        outputs = list(filter(None, (a.json, a.html, a.save)))
        lengths = split(a.lengths)
        for wrong, why in (
                ("model" in self.speakers and not a.model,
                 "--model DIR is needed, or --api URL, or --policy oracle"),
                (self.uses_api and not (a.api and a.api_model),
                 "a server needs --api URL and --api-model NAME"),
                (a.api and not self.uses_api,
                 "--api is given, but neither root nor children use it"),
                (a.budget_dollars and not a.price, "--budget-dollars needs --price"),
                (not all(re.fullmatch("[1-9][0-9]*[km]?", text) for text in lengths),
                 f"--lengths {a.lengths}: it is whole numbers, as 8000,128k,1m"),
                (a.data and lengths,
                 "--lengths is for generated questions, not for those of --data"),
                (a.data and "oracle" in self.speakers,
                 "the oracle knows how questions are generated; it has no --data"),
                (a.split == "all" and not a.data,
                 "--split all is for --data; questions are generated for one side"),
                (a.data and len(self.kinds()) != 1,
                 "--data holds questions of one kind; --tasks names it"),
                (a.resume and not outputs,
                 "--resume needs the --json, --html or --save of the run to resume")):
            if wrong:
                raise ValueError(why)

        for path in outputs:
            folder = os.path.dirname(path) or "."
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"{path}: no such directory")
            if os.path.isdir(path) or not os.access(folder, os.W_OK):
                raise PermissionError(f"{path}: cannot be written")

    def load_kind(self, spec: str) -> str:
        """The name of a kind of questions; the file of somebody's own kind is loaded."""
        module = tasks.load(spec)
        for name in self.speakers & SCRIPTS.keys():
            if not hasattr(module, name):
                raise ValueError(f"{spec}: this task has no function {name}")
        return Path(module.__file__).stem

    def read_data(self, kind: str) -> list[Task]:
        a = self.args
        questions = every = tasks.read(a.data, kind, a.strict)
        if a.split != "all":
            if len(every) < 2:
                raise ValueError(f"{a.data} has one row, which cannot be split into "
                                 "training and held-out ones; --split all takes it")
            questions = tasks.split(every)[a.split == "heldout"]
            which = "held-out" if a.split == "heldout" else "training"
            print(f"{a.data}: the {len(questions)} {which} rows of {len(every)}, as "
                  "train.py splits them; --split all takes all")
        if a.n and a.n > len(questions):
            raise ValueError(f"--n {a.n}: {a.data} holds only {len(questions)} questions")
        return questions[:a.n]

    def choose_methods(self) -> list[str]:
        depth = min(int(evaluation.trained_as(self.config)[3:]), 2)
        chosen = split(self.args.methods) or [f"rlm{depth}"]
        known = (*BASELINES, *evaluation.RLM_METHODS)
        for name in chosen:
            if name not in known:
                raise ValueError(f"no method {name!r}; there are {', '.join(known)}")
            if name in evaluation.RLM_METHODS:
                evaluation.rlm_config(name, self.config)
            elif self.speakers & SCRIPTS.keys():
                raise ValueError(
                    f"{name}: a script writes code for a REPL; it can be rlm0 to rlm2")
        return chosen

    def settings(self) -> dict:
        """What must not change between the parts of a resumed run: all but how many
        questions, which cells, and where things are written."""
        a, config = self.args, asdict(self.config)
        del config["limits"]["sandbox"]  # it belongs to the machine
        scorer = handed_in.scorer(a.reward or "")
        handed = [spec for spec in (*split(a.tasks), scorer) if handed_in.is_path(spec)]
        paths = {spec: re.sub(r"\.py:.*", ".py", spec) for spec in handed}
        files = {spec: digest(Path(path).read_bytes()) for spec, path in paths.items()}
        if scorer.startswith("judge:"):
            files[scorer] = ""
        names = "model api api_model split seed temperature top_p".split()
        return {**{name: getattr(a, name) for name in names},
                "policy": self.root, "children": self.below, "config": config,
                "weights": self.model and digest_of_weights(a.model),
                "data": a.data and digest(Path(a.data).read_bytes()),
                "files": files or None}

    # --- the run --------------------------------------------------------------------------

    def run(self) -> None:
        """Answer what is missing and write the results. Exits with a message if it was
        stopped, or if no question could be scored."""
        a, stopped = self.args, ""
        target = a.json or a.html or a.save
        self.journal = Journal(target and target + ".journal", self.settings(), a.resume,
                               self.account)
        print(report.HEAD)
        try:
            asyncio.run(self.answer_all())
        except KeyboardInterrupt:
            stopped = "interrupted"
        except BrokenPipeError:  # nobody reads the table: see runtime/console.py
            raise
        except (api.Stop, OSError, ValueError, SamplerError, REPLError) as error:
            stopped = str(error) or repr(error)
        cells = {cell: self.journal.records(cell, self.numbers) for cell in self.cells}
        self.write({cell: records for cell, records in cells.items() if records}, stopped)

        scored = [r for records in cells.values() for r in records.values()]
        if stopped:
            more = "; go on with --resume" if target else ""
            total = len(self.cells) * len(self.numbers)
            sys.exit(f"eval.py: {stopped} ({len(scored)} of {total} questions are "
                     f"answered{more})")
        if all(r["failed"] for r in scored):
            sys.exit("eval.py: no question could be scored")

    async def answer_all(self) -> None:
        try:
            for cell in self.cells:
                await self.answer_cell(cell)
                records = self.journal.records(cell, self.numbers)
                row = evaluation.summary(list(records.values()), *cell)
                print(report.table_line(row), flush=True)
        finally:
            await self.account.drain()

    async def answer_cell(self, cell: tuple[str, int | None, str]) -> None:
        """Answer the questions of a cell that have no answer or whose tree was lost."""
        a, (kind, length, method) = self.args, cell
        before = self.journal.records(cell, self.numbers)
        todo = [(i,) for i in self.numbers if i not in before or before[i]["failed"]]

        async def one(i: int) -> None:
            task = self.question(kind, length, i)
            record, rollout = await evaluation.ask(
                method, task, self.policy_for(task), self.tokenizer, self.config,
                (a.seed, *cell, i), self.score)
            self.journal.add((*cell, i), record, rollout)
            bar.update()

        at_once = 64 if self.model and not self.uses_api else a.concurrency
        at_once = min(at_once, CHARACTERS // (4 * (length or 8000)), len(todo))
        with tqdm(total=len(todo), desc=label(*cell), leave=False, disable=None) as bar:
            await evaluation.side_by_side(one, todo, max(1, at_once))

    def question(self, kind: str, length: int | None, i: int) -> Task:
        if self.questions:
            return self.questions[i]
        heldout = self.args.split != "train"
        source = f"{'heldout' if heldout else 'teacher'} {self.args.seed}"
        if length:
            source += f" {kind} {length}"
        return tasks.make(kind, random.Random(f"{source} {i}"), length, heldout)

    def policy_for(self, task: Task):
        """The policy for one question's tree: one at the root, maybe another one below."""
        async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
            spec = self.below if node.path else self.root
            speaker = self.policies.get(spec)
            if spec in SCRIPTS:
                speaker = tasks.scripted(SCRIPTS[spec], task, self.tokenizer)
            return await speaker(node, max_tokens, key)
        return policy

    # --- the results ----------------------------------------------------------------------

    def write(self, cells: dict[tuple, dict[int, dict]], stopped: str) -> None:
        """Print what the table does not say, and write the files that were asked for."""
        a = self.args
        rows, remarks = [], []
        for cell, records in cells.items():
            rows.append(evaluation.summary(list(records.values()), *cell))
            remarks += [f"{label(*cell)}: {note}" for note in notes(rows[-1], records)]
        if stopped:
            remarks.append(f"not finished: {stopped}")
        pairs = evaluation.differences(cells)
        for d in pairs:
            if d["a"] == self.methods[0]:  # the other pairs are in --json and --html
                which = label(d["task"], d["length"], f"{d['a']} - {d['b']}")
                print(f"{which} = {d['difference']:+.3f}  [{d['low']:+.3f}, "
                      f"{d['high']:+.3f}]  n {d['n']}")
        for remark in remarks:
            print(remark)
        if self.uses_api:
            money = f", {self.account.dollars:.4f} dollars" if a.price else ""
            print(f"server: {self.account.tokens:,} tokens in and out{money}, "
                  f"{self.account.retries} retries")

        if a.json:
            questions = [
                dict(zip(("task", "length", "method"), cell), i=i, **record)
                for cell, records in cells.items() for i, record in records.items()]
            write_json(a.json, {"settings": self.settings(), "rows": rows,
                                "differences": pairs, "notes": remarks,
                                "questions": questions})
        finished = [(*cell, i) for cell, records in cells.items() for i in records]
        if a.save:
            write_rollouts(a.save, [self.journal.done[name][1] for name in finished])
        if a.html:
            # Ordered by question, so that a page that is full shows some of every cell.
            finished.sort(key=lambda name: name[3])
            trees = [(f"{label(*name[:3])} #{name[3]}", self.journal.done[name][1])
                     for name in finished]
            gaps = {}
            if self.model and self.root == self.below:
                gaps = evaluation.gaps(self.model, [rollout for _, rollout in trees])
            settings = self.settings()
            usual = a.defaults | {"children": self.root, "weights": settings["weights"]}
            evaluation.write_report(
                a.html, "Evaluation", settings, rows, trees=trees,
                tokenizer=self.tokenizer, gaps=gaps, differences=pairs, notes=remarks,
                defaults=usual)


def notes(row: dict, records: dict[int, dict]) -> list[str]:
    """What a reader of a row must know besides."""
    lines = []
    if row["seen"] is not None and row["seen"] < 0.9995:
        lines.append(f"saw {row['seen']:.1%} of the context, then the window was full")
    if row["unanswered"]:
        silent = Counter(r["end"] for r in records.values()
                         if not r["failed"] and not r["answered"])
        ends = ", ".join(f"{end} {n}" for end, n in silent.most_common())
        lines.append(f"{row['unanswered']} of {row['n']} gave no answer ({ends})")
    for why, n in Counter(r["failed"] for r in records.values() if r["failed"]).items():
        lines.append(f"{n} failed: {why:.200}")
    return lines


def label(kind: str, length: int | None, method: str) -> str:
    return f"{kind} {length} {method}" if length else f"{kind} {method}"


def split(text: str | None) -> list[str]:
    """The parts between commas, each once."""
    parts = [part.strip() for part in (text or "").split(",")]
    return list(dict.fromkeys(filter(None, parts)))
