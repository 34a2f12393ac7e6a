"""The directory of a run: where a run starts from, and what it leaves.

    OUT/run.json         the flags that it was started with
    OUT/metrics.jsonl    one JSON line per step and per evaluation
    OUT/checkpoints/     the last steps, to continue from (checkpoint.py)
    OUT/init, warmup, final   models in the Hugging Face layout
    OUT/result.json      the scores, when the run has ended

Everything is written aside and renamed, so a run that is killed leaves no half file. Left
out: two runs at the same time in one directory.
"""
import json
import os
import shlex
import time
from collections import deque
from dataclasses import asdict, dataclass

import torch

from runtime import checkpoint
from runtime.files import read_json, write_json
from runtime.flags import flag
from runtime.parallel import World
from runtime.stop import Stop, Stopped

SAVE_SECONDS = 600.0  # after so long a checkpoint is due, whatever --save-every says


@dataclass(frozen=True)
class RunConfig:
    """What a run is about, where it is kept, and how often."""
    out: str = flag("runs/tiny", "directory of the run", common=True)
    seed: int = flag(0, "seed of weights, questions and sampling", common=True)
    model: str = flag("", "checkpoint to start from; empty: make a tiny one", common=True)
    data: str = flag("", "JSONL file of questions; empty: generate them", common=True)
    task: str = flag(
        "", "what is asked: a file of tasks/ by its name, or path/to/file.py; empty: "
            "notes, and evidence with --data", common=True)
    reward: str = flag(
        "", "what scores in the task's place: path/to/file.py[:function]")
    method: str = flag(
        "saved", "rlm1: children have a REPL; rlm2: theirs, too; rlm0: there are no "
                 "children; saved: as rlm.json says",
        choices=("saved", "rlm0", "rlm1", "rlm2"))
    plan: bool = flag(False, "print what the run needs in memory and stop")
    resume: bool = flag(False, "continue from the last checkpoint in --out", common=True)
    heldout: int = flag(128, "held-out questions, where they are generated", 1)
    save_every: int = flag(
        25, "steps between checkpoints; one is also due ten minutes after the last", 1)
    eval_every: int = flag(
        0, "steps between held-out evaluations; 0: only before and after GRPO")
    sandbox: str = flag("auto", "namespaces around the REPLs; auto: where possible",
                        choices=("require", "auto", "off"))


# What a resumed run may change: how far it goes, how fast, and what it keeps.
MAY_CHANGE = ("out resume plan steps tokens lr warmup_lr heldout save_every "
              "eval_every sandbox").split()

# The scores in result.json; None where a task has one length.
HELDOUT = ("heldout_warmup", "heldout_final", "heldout_4x", "heldout_16x")


@dataclass(frozen=True)
class Start:
    """Where a run starts from. An empty name means: there is none."""
    weights: str  # directory of the weights; empty: make a tiny model
    state: dict  # phase, step, and what the run has counted so far
    checkpoint: str = ""  # that the run continues from
    adapter: str = ""  # directory of the adapters, in PEFT's layout
    optimizer: str = ""  # directory of the optimizer's state


class Run:
    """One run's directory, and its counters (`state`).

    What it saves are the model, optimizer, tokenizer and rlm (an RLMConfig) that `trainer`
    has at that moment."""

    def __init__(self, trainer, config, world: World):
        self.trainer = trainer
        self.config = config
        self.world = world
        self.out = config.out
        self.stop = Stop()
        self.began = self.saved = time.monotonic()
        self.state = {"phase": "warmup", "step": 0, "seconds": 0.0, "results": {},
                      "sampled": 0, "skipped": 0, "metrics": 0}

    # --- where it starts ------------------------------------------------------------------

    def find_start(self) -> Start:
        """Raises ValueError if --out holds a run and --resume is not given, or the other
        way round, or if a flag cannot change."""
        config, out = self.config, self.out
        holds_run = os.path.exists(self.path("run.json"))
        if config.resume and not holds_run:
            raise ValueError(f"{out} holds no run to resume")
        if holds_run and not config.resume:
            raise ValueError(f"{out} holds a run: --resume continues it; or give another "
                             "--out, or remove it")
        if config.resume:
            for name, before in read_json(self.path("run.json")).items():
                now = getattr(config, name, before)
                if now != before and name not in MAY_CHANGE:
                    raise ValueError(f"{out}: {name} is {before!r}; a resumed run cannot "
                                     f"change it to {now!r}")
        found = checkpoint.checkpoints(out) if config.resume else []
        if not found:
            return Start(config.model, self.state)

        last = found[-1]
        state = self.state | read_json(os.path.join(last, "state.json"))
        print(f"resuming {out} at {state['phase']} step {state['step']}")
        weights, parts = last, {}
        for name in ("adapter", "optimizer"):
            path = os.path.join(last, name)
            parts[name] = path if os.path.isdir(path) else ""
        if parts["adapter"]:
            weights = self.frozen(state)
        return Start(weights, state, last, **parts)

    def frozen(self, state: dict) -> str:
        """The weights beside the adapters: those that the warm-up left, and during it those
        of --model."""
        return self.path("warmup") if state["phase"] == "grpo" else self.config.model

    def open(self, start: Start) -> None:
        """Begin to write, now that everything was read without an error. What was measured
        after the checkpoint is forgotten."""
        self.state = start.state
        self.began = time.monotonic() - self.state["seconds"]
        if self.world.rank == 0:
            os.makedirs(self.out, exist_ok=True)
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.truncate(self.state["metrics"])
            write_json(self.path("run.json"), asdict(self.config))

    # --- what it leaves -------------------------------------------------------------------

    def log(self, metrics: dict) -> None:
        """One JSON line for programs."""
        if self.world.rank == 0:
            row = metrics | {"elapsed": round(self.elapsed(), 1)}
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def metrics(self) -> list[dict]:
        with open(self.path("metrics.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def gather(self, value) -> list:
        """The value of every rank. Raises Stopped on all of them if one was told to stop,
        so it is called where weights and counters agree, and everything can be saved."""
        values, told = zip(*self.world.gather((value, self.stop.number)))
        if any(told):
            raise Stopped(max(told))
        return list(values)

    def maybe_save(self, every: int) -> None:
        """After a step: a checkpoint each `every` steps, and if the last one is old. Raises
        Stopped."""
        due = (self.state["step"] % every == 0
               or time.monotonic() - self.saved > SAVE_SECONDS)
        if self.gather(due)[0]:  # rank 0's clock decides
            self.save_checkpoint()

    def save_model(self, name: str, dtype: torch.dtype | None = None) -> str:
        """Write OUT/`name`: the weights, adapters merged. After the warm-up, whose result
        they belong to, the adapters are beside them."""
        with checkpoint.writing(self.path(name), self.world) as aside:
            self._save(aside, True, self.state["phase"] == "grpo", dtype)
        return self.path(name)

    def save_checkpoint(self) -> None:
        """Everything to continue from. Of a model with adapters only these are written: its
        weights stay what the warm-up left."""
        trainer = self.trainer
        path = checkpoint.place(self.out, self.state["phase"], self.state["step"])
        if os.path.isdir(path):  # of the same phase and step, so it would be the same
            return
        with checkpoint.writing(path, self.world) as aside:
            self._save(aside, not trainer.model.rank, True)
            if self.state["step"]:  # before the first step it has nothing to save
                checkpoint.save_optimizer(trainer.model, trainer.optimizer,
                                          os.path.join(aside, "optimizer"))
            if self.world.rank == 0:
                size = os.path.getsize(self.path("metrics.jsonl"))
                state = self.state | {"seconds": self.elapsed(), "metrics": size}
                write_json(os.path.join(aside, "state.json"), state)
        self.saved = time.monotonic()
        if self.world.rank == 0:
            checkpoint.keep_last(self.out)

    def _save(self, aside: str, weights: bool, adapter: bool,
              dtype: torch.dtype | None = None) -> None:
        """Rank 0 writes; all ranks take part in gathering each tensor."""
        model, first = self.trainer.model, self.world.rank == 0
        if first:
            self.trainer.tokenizer.save(aside)
            self.trainer.rlm.save(os.path.join(aside, "rlm.json"))
        if weights and first:
            model.save_pretrained(aside, dtype)
        elif weights:
            deque(model.merged(), maxlen=0)
        if adapter and model.rank:
            base = self.frozen(self.state)
            model.save_adapter(os.path.join(aside, "adapter"), base, first)

    def save_result(self) -> None:
        """OUT/result.json: the scores, and the flags that they belong to."""
        rows = self.state["results"]
        scores = {name: rows[name]["score"] if name in rows else None
                  for name in HELDOUT}
        result = {"seed": self.config.seed, "credit": self.config.credit, **scores,
                  "heldout_n": rows["heldout_final"]["n"],
                  "sampled_tokens": self.state["sampled"],
                  "seconds": round(self.elapsed(), 1), "flags": asdict(self.config)}
        write_json(self.path("result.json"), result)

    def path(self, name: str) -> str:
        return os.path.join(self.out, name)

    def elapsed(self) -> float:
        """Seconds of the run, those before it was interrupted included."""
        return time.monotonic() - self.began


def resuming(config, world: World) -> str:
    """The command that continues the run."""
    program = "python"
    if world.size > 1:
        program = f"torchrun --nproc-per-node {world.local_size}"
    return f"{program} train.py --resume --out {shlex.quote(config.out)}"


def flags_of_run(args) -> dict:
    """The flags that a resumed run was started with; flags that are given now still win."""
    path = os.path.join(args.out, "run.json")
    return read_json(path) if args.resume and os.path.exists(path) else {}
