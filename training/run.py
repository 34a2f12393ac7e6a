"""The directory of a run: where a run starts from, and what it leaves.

docs/training.md lists its files. They are written aside and renamed, so a run that is
killed leaves no half file; only metrics.jsonl is appended to. Left out: two runs at the
same time in one directory.
"""
import contextlib
import ctypes
import json
import os
import shlex
import statistics
import sys
import time
import zlib
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from engine import hf
from engine.parallel import World
from training import checkpoint, metrics, report, scores
from training.settings import Config
from tree import Node, Tree, printable, render, write_trees
from util import read_json, reading, write_json, write_text

SAVE_EVERY = 25  # steps of GRPO between checkpoints
SAVE_SECONDS = 600.0  # after so long a checkpoint is due all the same
SHOW_EVERY = 25  # steps between printed trees, after the first
TRIM_SECONDS = 2.0  # between two returns of freed memory, of 10 ms and more each
REPORT_SECONDS = 60.0  # between report pages
KEPT_STEPS = 100  # whose trees are kept; docs/training.md says how large they are

# What a resumed run may change: how far it goes, how fast, and what it keeps.
MAY_CHANGE = "out resume steps tokens lr warmup_lr heldout tracker sandbox".split()


@dataclass
class State:
    """What a run remembers beside its weights."""
    phase: str = "warmup"  # then grpo
    step: int = 0  # steps of this phase that were made
    sampled: int = 0  # tokens that GRPO has sampled
    silent: int = 0  # steps in a row, up to now, in which no node had an advantage
    best: float = -1e9  # reward on the questions for validation
    results: dict = field(default_factory=dict)  # by name: a summary, and all scores
    elapsed: float = 0.0  # seconds
    logged: int = 0  # bytes of metrics.jsonl
    checkpoint: str = ""  # the directory that the run continues from, if there is one


def starting_state(config: Config, world: World) -> State:
    """What the run continues from, or begins with, on all ranks. Raises ValueError if --out
    holds a run and --resume is not given, or the other way round; if it holds anything
    else; or if a flag cannot change."""
    state = read_state(config) if world.rank == 0 else None
    return world.gather(state)[0]


def read_state(config: Config) -> State:
    out, earlier = config.out, os.path.join(config.out, "run.json")
    holds_run = os.path.exists(earlier)
    if os.path.isdir(out) and os.listdir(out) and not holds_run:
        raise ValueError(f"{out} is not empty and holds no run: give another --out")
    if config.resume and not holds_run:
        raise ValueError(f"{out} holds no run to resume")
    if holds_run and not config.resume:
        raise ValueError(f"{out} holds a run: --resume continues it; or give another "
                         "--out, or remove it")
    begin = State(phase="warmup" if config.warmup_steps else "grpo")
    if not config.resume:
        return begin

    flags = flags_of(config)
    for name, before in read_json(earlier).items():
        if name not in flags:
            raise ValueError(f"{earlier}: {name} is no flag of this version; a run is "
                             "resumed by the commit that began it")
        now = flags[name]
        if now != before and name not in MAY_CHANGE:
            raise ValueError(f"{out}: {name} is {before!r}; a resumed run cannot change it "
                             f"to {now!r}")
    saved = checkpoint.checkpoints(out)
    if not saved:
        return begin
    last = saved[-1]
    state_file = os.path.join(last, "state.json")
    with reading(state_file):
        state = State(**read_json(state_file) | {"checkpoint": last})
    print(f"resuming {out} at {state.phase} step {state.step}")
    if state.step and not os.path.isdir(os.path.join(last, "optimizer")):
        raise ValueError(f"{last} lacks its optimizer: remove this checkpoint")
    return state


def weights_of(config: Config, state: State) -> str:
    """The directory of the weights that the model begins with. A checkpoint of adapters has
    none: beside them are those that they were trained on."""
    last = state.checkpoint
    if last and not os.path.isdir(os.path.join(last, "adapter")):
        return last
    return frozen(config, state)


def frozen(config: Config, state: State) -> str:
    """The weights that adapters are trained on: those that the warm-up left; during it, or
    without one, those that the run began with."""
    if state.phase == "grpo" and config.warmup_steps:
        return os.path.join(config.out, "warmup")
    return config.model or os.path.join(config.out, "init")


def flags_of(config: Config) -> dict:
    """What run.json keeps: all flags, and a checksum of --data."""
    flags = asdict(config)
    if config.data:
        flags["data_checksum"] = zlib.crc32(Path(config.data).read_bytes())
    return flags


def claim(config: Config) -> None:
    """Make the directory that of a run."""
    os.makedirs(config.out, exist_ok=True)
    write_json(os.path.join(config.out, "run.json"), flags_of(config))


class Run:
    """One run that goes on: its directory, what it remembers (`state`), and what people see
    of it. `setup` is what never changes."""

    def __init__(self, setup, state: State):
        """Begin to write. What was measured after the checkpoint is forgotten."""
        self.setup, self.state = setup, state
        self.config, self.world, self.out = setup.config, setup.world, setup.config.out
        self.began = setup.began - state.elapsed
        self.saved = self.reported = self.trimmed = time.monotonic()
        self.shown: dict[int, str] = {}  # the trees of the last steps, for the report
        if self.world.rank == 0:
            claim(self.config)
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.truncate(min(file.tell(), state.logged))
            steps = state.step if state.phase == "grpo" else 0
            for path in self.kept_trees():
                if int(path.stem) > steps:
                    path.unlink()

    # --- what people and programs see -----------------------------------------------------

    def log(self, row: dict) -> None:
        """One JSON line for programs."""
        if self.world.rank == 0:
            row = row | {"elapsed": round(self.elapsed(), 1)}
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if self.setup.tracker:
                self.setup.tracker(row)

    def log_step(self, trees: list[Tree], credits: dict, sequences: list,
                 measured: dict) -> None:
        """A step of GRPO: its JSON line, its line for people, and now and then a tree and
        the report page. `credits` are the Credits of the nodes, `sequences` those trained
        on."""
        row = {"phase": "grpo", "step": self.state.step, **measured,
               "sequences": len(sequences),
               "sequence_tokens": sum(len(sequence.ids) for sequence in sequences),
               **metrics.describe(trees, credits)}
        self.log(row)
        self.keep_trees(trees, credits)
        print(metrics.line(row, self.config.steps))
        if self.state.step == 1 < self.config.steps:
            seconds = sum(row[name] for name in ("sample_s", "repl_s", "update_s"))
            print(f"at {seconds:.0f} s each, {self.config.steps} steps take "
                  f"{seconds * self.config.steps / 3600:.1f} h")
        if self.state.step == 1 or self.state.step % SHOW_EVERY == 0:
            best = max(trees, key=lambda tree: (tree.reward, len(tree.root.children)))
            asked = printable(best.question.query)
            print(f"{asked}  reward {best.reward:.2f}\n{render(best.root)}")
        if time.monotonic() - self.reported > REPORT_SECONDS:
            self.report()

    def keep_trees(self, trees: list[Tree], credits: dict) -> None:
        """OUT/trees/STEP.jsonl, which --warmup can imitate, and the same for the report,
        with advantages. Those of the oldest step go."""
        if self.world.rank:
            return
        advantages = {node: statistics.fmean(given.advantages)
                      for node, given in credits.items() if given.advantages}
        labelled = [(f"#{i}", tree) for i, tree in enumerate(trees)]
        step = self.state.step
        os.makedirs(self.path("trees"), exist_ok=True)
        write_trees(self.path(f"trees/{step:06}.jsonl"), map(thinned, trees))
        self.shown[step] = report.of_trees(
            labelled, self.setup.tokenizer, advantages)
        self.shown.pop(step - KEPT_STEPS, None)
        for path in self.kept_trees():
            if int(path.stem) <= step - KEPT_STEPS:
                path.unlink()

    def kept_trees(self) -> list[Path]:
        """The files of OUT/trees, the earliest step first."""
        found = Path(self.path("trees")).glob("*.jsonl")
        return sorted(path for path in found if path.stem.isdigit())

    def log_scores(self, name: str, trees: list[Tree]) -> float:
        """The scores of one tree per question, kept as results[name]. Returns the mean
        reward."""
        records = [scores.record_of(tree) for tree in trees]
        row = scores.summary(records, trees[0].question.task, None,
                             scores.method_of(self.setup.rlm_config))
        self.state.results[name] = row | {"by_question": scores.by_question(records)}
        self.log({"phase": "eval", "name": name, "step": self.state.step,
                  "sampled": self.state.sampled, **row})
        print(f"{report.HEAD}\n{report.table_lines(row | {'task': name})}")
        return row["reward"]

    def report(self) -> None:
        """OUT/report.html: the scores, the curves, and the trees since the run began, or
        was resumed."""
        if self.world.rank:
            return
        rows = [row | {"task": name} for name, row in self.state.results.items()]
        table = [report.HEAD, *map(report.table_lines, rows),
                 *map(report.difference_line, self.gains())]
        with open(self.path("metrics.jsonl"), encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("}\n")]  # not cut by a crash
            measured = [json.loads(line) for line in lines]
        write_text(self.path("report.html"), report.page(
            f"Training run, step {self.state.step} of {self.config.steps}",
            asdict(self.config), "\n".join(table), self.shown, measured))
        self.reported = time.monotonic()

    def gains(self) -> list[dict]:
        """The difference that GRPO made on the held-out questions, once it is measured."""
        rows = self.state.results
        return scores.differences({
            (rows[name]["task"], None, name): rows[name]["by_question"]
            for name in ("heldout_final", "heldout_warmup") if name in rows})

    # --- what it leaves -------------------------------------------------------------------

    def maybe_save(self, model, optimizer, every: int = 0) -> None:
        """After a step: a checkpoint each `every` steps (0: SAVE_EVERY), and if the last
        one is old."""
        due = (self.state.step % (every or SAVE_EVERY) == 0
               or time.monotonic() - self.saved > SAVE_SECONDS)
        if self.world.gather(due)[0]:  # rank 0's clock decides
            self.save_checkpoint(model, optimizer)
        if time.monotonic() - self.trimmed > TRIM_SECONDS:
            give_back_memory()
            self.trimmed = time.monotonic()

    def save_model(self, model, name: str, dtype: torch.dtype | None = None) -> None:
        """Write OUT/`name`: the weights, adapters merged. In GRPO the adapters are saved
        too, beside the merged weights. They belong to the weights that GRPO began with."""
        with checkpoint.writing(self.path(name), self.world) as aside:
            self._save(model, aside, True, self.state.phase == "grpo", dtype)

    def end_warm_up(self, model) -> None:
        """Keep the weights as OUT/warmup. GRPO starts there, with a fresh optimizer."""
        # Weights beside adapters stay as they are.
        dtype = self.setup.plan.dtype if self.config.lora_rank else None
        self.save_model(model, "warmup", dtype)
        self.state.phase, self.state.step, self.state.checkpoint = "grpo", 0, ""

    def save_checkpoint(self, model, optimizer) -> None:
        """Everything to continue from. With --lora-rank only the adapters are written: the
        weights beside them stay what the warm-up left."""
        state = self.state
        name = f"{state.phase}-{state.step:06}"
        path = os.path.join(self.out, checkpoint.FOLDER, name)
        with checkpoint.writing(path, self.world) as aside:
            self._save(model, aside, not model.lora_rank, True)
            if state.step:  # before the first step it has nothing to save
                checkpoint.save_optimizer(
                    model, optimizer, os.path.join(aside, "optimizer"))
            if self.world.rank == 0:
                state.elapsed = self.elapsed()
                state.logged = os.path.getsize(self.path("metrics.jsonl"))
                write_json(os.path.join(aside, "state.json"), asdict(state))
        self.saved = time.monotonic()
        if self.world.rank == 0:
            checkpoint.keep_last(self.out)

    def _save(self, model, aside: str, weights: bool, adapter: bool,
              dtype: torch.dtype | None = None) -> None:
        """Rank 0 writes; all ranks take part in gathering each tensor."""
        first = self.world.rank == 0
        if first:
            self.setup.tokenizer.save(aside)
            self.setup.rlm_config.save(os.path.join(aside, "rlm.json"))
        if weights and first:
            model.save_pretrained(aside, dtype)
        elif weights:
            deque(model.merged(), maxlen=0)
        if adapter and model.lora_rank:
            folder = os.path.join(aside, "adapter")
            base = os.path.abspath(frozen(self.config, self.state))
            if Path(base).is_relative_to(os.path.abspath(self.out)):
                base = os.path.relpath(base, folder)  # so that a run may be renamed
            hf.save_adapter(model, folder, base, first)

    def finish(self) -> None:
        """The last report, and OUT/result.json: the scores, and their flags."""
        self.report()
        if self.world.rank == 0:
            rows = self.state.results
            means = {name: row["score"] for name, row in rows.items()}
            write_json(self.path("result.json"), {
                "seed": self.config.seed, "trained": self.config.trained, **means,
                "heldout_n": rows["heldout_final"]["n"], "differences": self.gains(),
                "sampled_tokens": self.state.sampled,
                "seconds": round(self.elapsed(), 1), "flags": asdict(self.config)})
            for gain in self.gains():
                print(report.difference_line(gain))
            print(f"held out {means['heldout_final']:.3f}, after {self.elapsed():.0f} s; "
                  f"the model is in {self.path('final')}")
        self.world.gather(None)  # rank 0 has written all

    def path(self, name: str) -> str:
        return os.path.join(self.out, name)

    def elapsed(self) -> float:
        """Seconds of the run, those before it was interrupted included."""
        return time.monotonic() - self.began


def thinned(tree: Tree) -> Tree:
    """What is kept of a tree: no context, no ids but the sampled ones, and four digits of
    their log-probabilities. All else comes from the question and the texts."""
    def thin(node: Node) -> Node:
        messages = []
        for message in node.messages:
            logprobs = message.logprobs and tuple(round(p, 4) for p in message.logprobs)
            ids = message.ids if message.is_sampled else ()
            messages.append(replace(message, ids=ids, logprobs=logprobs))
        return replace(node, messages=messages, children=[thin(c) for c in node.children])

    question = replace(tree.question, context=None)
    return replace(tree, question=question, root=thin(tree.root))


def resuming(config: Config, world: World) -> str:
    """The command that continues the run."""
    start = f"cd {shlex.quote(os.getcwd())} && "  # flags may name files from here
    start += f"torchrun --nproc-per-node {world.local_size}" if world.size > 1 else "python"
    return f"{start} {shlex.quote(sys.argv[0])} --resume --out {shlex.quote(config.out)}"


def flags_of_run(args) -> dict:
    """The flags that a resumed run was started with; flags that are given now still win."""
    path = os.path.join(args.out, "run.json")
    return read_json(path) if args.resume and os.path.exists(path) else {}


def give_back_memory() -> None:
    """Let glibc return what was freed. It keeps free blocks that lie between used ones: a
    run of an hour grew to twice its plan."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
