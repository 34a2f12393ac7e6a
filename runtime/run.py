"""The directory of a run: who may write into it, where a run starts from, what it leaves.

    OUT/run.json         the flags that it was started with
    OUT/metrics.jsonl    one JSON line per step and per evaluation
    OUT/scripts.jsonl    the trees of the warm-up, if they are scripted
    OUT/checkpoints/     the last steps, to continue from (checkpoint.py)
    OUT/init, warmup, best, final   models in the Hugging Face layout
    OUT/result.json      the scores, when the run has ended

Everything is written aside and renamed, so a run that is killed leaves no half file. Left
out: what is trained and how (train.py). """
import contextlib
import hashlib
import json
import os
import secrets
import shlex
import shutil
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime import checkpoint, handed_in
from runtime.files import read_json, write_json
from runtime.flags import flag
from runtime.parallel import World
from runtime.stop import Stop, Stopped
from runtime.track import tracker
from tree import Unscored

SAVE_SECONDS = 600.0  # after so long a checkpoint is due, whatever --save-every says


@dataclass(frozen=True)
class RunConfig:
    """What a run is about, where it is kept, and how often."""
    out: str = flag("runs/tiny", "directory of the run", common=True)
    seed: int = flag(0, "seed of weights, questions and sampling", common=True)
    model: str = flag("", "checkpoint to start from; empty: make a tiny one", common=True)
    data: str = flag("", "JSONL file of questions; empty: generate them", common=True)
    strict: bool = flag(
        False, "refuse a --data file with rows that cannot be used; else they are left out")
    task: str = flag(
        "", "what is asked: a file of tasks/ by its name, or path/to/file.py; empty: "
            "notes, and evidence with --data", common=True)
    reward: str = flag(
        "", "what scores in the task's place: path/to/file.py[:function], or a model: "
            "judge:model=NAME,url=URL[,tokens=N]")
    method: str = flag(
        "saved", "rlm1: children have a REPL; rlm2: theirs, too; rlm0: there are no "
                 "children; saved: as rlm.json says",
        choices=("saved", "rlm0", "rlm1", "rlm2"))
    plan: bool = flag(False, "print what the run needs in memory and stop")
    resume: bool = flag(False, "continue from the last checkpoint in --out", common=True)
    overwrite: bool = flag(False, "empty an --out that holds another run")
    heldout: int = flag(128, "held-out questions, where they are generated", 1)
    save_every: int = flag(
        25, "steps between checkpoints; one is also due ten minutes after the last", 1)
    eval_every: int = flag(
        0, "steps between held-out evaluations; the best weights stay in OUT/best; 0: none")
    track: str = flag("none", "where the metrics are sent to as well",
                      choices=("none", "tensorboard", "wandb"))
    sandbox: str = flag("auto", "namespaces around the REPLs; auto: where possible",
                        choices=("require", "auto", "off"))


# What a resumed run may change: how far it goes, how fast, and what it keeps.
MAY_CHANGE = ("out resume overwrite plan steps tokens lr warmup_lr heldout save_every "
              "eval_every sandbox strict track").split()

# The scores in result.json; None where a task has one length.
HELDOUT = ("heldout_warmup", "heldout_final", "heldout_4x", "heldout_16x")

# Flags of earlier versions, with the value that is built in now.
BUILT_IN = {
    "clip_low": 0.2, "dpo_beta": 0.1, "gap_max": 2.0, "keep": 0.5,
    "length_constant": 64.0, "lora_alpha": 32.0, "max_depth": 0, "max_norm": 0.2,
    "micro_tokens": 0, "overlap": False, "overlong": "keep", "own": 0.0, "process": 0.0,
    "resample": 0, "std_floor": 1e-2, "warmup_degenerate": "", "warmup_rows": 32,
    "warmup_score": 0.0,
}


@dataclass(frozen=True)
class Start:
    """Where a run starts from. An empty name means: there is none."""
    weights: str  # directory of the weights; empty: make a tiny model
    adapter: str  # directory of the adapters, in PEFT's layout
    optimizer: str  # directory of the optimizer's state
    checkpoint: str  # that the run continues from
    state: dict  # phase, step, and what the run has counted so far


def starting_point(config, last: str | None, state: dict) -> Start:
    """`last` is the checkpoint to continue from, `state` its state; None: a new run.

    A checkpoint of a model with adapters holds the adapters alone. They belong to the
    weights that the warm-up left, and during it to those of --model."""
    if last is None:
        return Start(config.model, "", "", "", state)
    optimizer = os.path.join(last, "optimizer") if state["step"] else ""
    if config.lora_rank and (state["phase"] == "grpo" or config.model):
        base = config.model
        if state["phase"] == "grpo":
            base = os.path.join(config.out, "warmup")
        return Start(base, os.path.join(last, "adapter"), optimizer, last, state)
    return Start(last, "", optimizer, last, state)


class Run:
    """One run's directory, and its counters (`state`).

    What it saves are the model, optimizer, tokenizer and rlm (an RLMConfig) that `trainer`
    has at that moment."""

    def __init__(self, trainer, config, world: World):
        self.trainer = trainer
        self.config = config
        self.world = world
        self.out = config.out
        self.stop = Stop(loud=world.rank == 0)
        self.began = self.saved = time.monotonic()
        self.state = {"phase": "warmup", "step": 0, "seconds": 0.0, "results": {},
                      "sampled": 0, "skipped": 0, "best": None, "good": 0,
                      "id": secrets.token_hex(4)}

    # --- where it starts ------------------------------------------------------------------

    def find_start(self) -> Start:
        """On rank 0. From here on an existing directory is closed to other runs.

        Raises ValueError if the directory holds a run that this one may not touch."""
        config, out = self.config, self.out
        if config.resume and not os.path.exists(self.path("run.json")):
            raise ValueError(f"{out} holds no run to resume; without --resume a new one "
                             "starts there")
        if os.path.isdir(out) or not config.model:
            self.world.take(out)
        last = checkpoint.last_checkpoint(out) if config.resume else None
        if last is not None:
            state = self.state | read_json(os.path.join(last, "state.json"))
            print(f"resuming {out} at {state['phase']} step {state['step']}")
            self._check_flags()
            return starting_point(config, last, state)

        holds_run = checkpoint.checkpoints(out) or os.path.exists(self.path("result.json"))
        if holds_run and not config.overwrite:
            raise ValueError(f"{out} holds another run: --resume continues it, --overwrite "
                             "empties it, or give another --out")
        model = Path(config.model, "config.json").resolve()
        if config.model and Path(out).resolve() in model.parents:
            raise ValueError(
                f"--model {config.model} lies in --out, which a new run empties")
        if config.resume:
            print(f"{out}: no checkpoint yet, starting afresh")
        return starting_point(config, None, self.state)

    def _check_flags(self) -> None:
        flags, path = asdict(self.config), self.path("run.json")
        for name, before in read_json(path).items():
            now = flags.get(name, BUILT_IN.get(name, before))
            same = now == before
            if name == "reward":
                same = handed_in.scorer(now) == handed_in.scorer(before)
            if not same and name not in MAY_CHANGE:
                raise ValueError(f"{path}: {name} is {before!r}; a resumed run cannot "
                                 f"change it to {now!r}")

    def open(self, start: Start) -> None:
        """Take the directory over, now that everything was read without an error: empty
        it, or forget what came after the checkpoint."""
        self.state = start.state
        self.began = time.monotonic() - self.state["seconds"]
        if self.world.rank:
            return
        self.world.take(self.out)
        if start.checkpoint:
            checkpoint.forget_after(self.out, start.checkpoint)
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.truncate(min(file.tell(), self.state["metrics"]))
        else:
            for name in ("metrics.jsonl", "result.json", "scripts.jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(self.path(name))
            for name in (checkpoint.FOLDER, "warmup", "best", "final"):
                shutil.rmtree(self.path(name), ignore_errors=True)
        write_json(self.path("run.json"), asdict(self.config))
        self.track = tracker(
            self.config.track, self.out, self.state["id"], asdict(self.config))

    def has_learnt(self) -> bool:
        return self.state["phase"] == "grpo" or self.state["step"] > 0

    # --- what it leaves -------------------------------------------------------------------

    def log(self, metrics: dict) -> None:
        """One JSON line for programs."""
        if self.world.rank == 0:
            row = metrics | {"elapsed": round(self.elapsed(), 1)}
            with open(self.path("metrics.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.track(row)

    def metrics(self) -> list[dict]:
        if not os.path.exists(self.path("metrics.jsonl")):  # nothing was measured yet
            return []
        with open(self.path("metrics.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def ask(self, coroutine):
        """What the coroutine returns; None if a signal came. What ends it on one rank is
        raised on all, where weights and counters agree, and everything can be saved."""
        done, error = None, None
        try:
            done = self.stop.run(coroutine)
        except (Unscored, handed_in.HandedInError) as raised:
            error = raised
        for error in filter(None, self.gather(error)):
            raise error
        return done

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
        path = self.path(name)
        parts = [self._text, lambda aside: self._weights(aside, dtype)]
        if self.state["phase"] == "grpo":
            parts.append(self._adapter)
        checkpoint.write_directory(path, parts, self.world)
        return path

    def save_checkpoint(self) -> None:
        """Everything to continue from. Of a model with adapters only these are written: its
        weights stay what the warm-up left."""
        path = checkpoint.place(self.out, self.state["phase"], self.state["step"])
        if os.path.isdir(path):  # of the same phase and step, so it would be the same
            return
        weights = [] if self.trainer.model.rank else [self._weights]
        parts = [self._text, *weights, self._adapter, self._optimizer, self._state]
        checkpoint.write_directory(path, parts, self.world)
        self.saved = time.monotonic()
        if self.world.rank == 0:
            checkpoint.keep_last(self.out)

    def _text(self, aside: str) -> None:
        if self.world.rank == 0:
            self.trainer.tokenizer.save(aside)
            self.trainer.rlm.save(os.path.join(aside, "rlm.json"))

    def _weights(self, aside: str, dtype: torch.dtype | None = None) -> None:
        if self.world.rank == 0:
            self.trainer.model.save_pretrained(aside, dtype)
        else:
            # Every rank takes part in each gathering.
            deque(self.trainer.model.merged(), maxlen=0)

    def _adapter(self, aside: str) -> None:
        if self.trainer.model.rank:
            base = self.config.model
            if self.state["phase"] == "grpo":
                base = self.path("warmup")
            self.trainer.model.save_adapter(
                os.path.join(aside, "adapter"), base, self.world.rank == 0)

    def _optimizer(self, aside: str) -> None:
        if self.state["step"]:  # before the first step it has nothing to save
            checkpoint.save_optimizer(self.trainer.model, self.trainer.optimizer,
                                      os.path.join(aside, "optimizer"))

    def _state(self, aside: str) -> None:
        if self.world.rank:
            return
        metrics = self.path("metrics.jsonl")
        size = os.path.getsize(metrics) if os.path.exists(metrics) else 0
        state = self.state | {"seconds": self.elapsed(), "files": checkpoint.sizes(aside),
                              "metrics": size}
        write_json(os.path.join(aside, "state.json"), state)

    def save_result(self, more: dict) -> None:
        """OUT/result.json: the scores, and the flags that they belong to."""
        rows = self.state["results"]
        scores = {name: rows[name]["score"] if name in rows else None
                  for name in HELDOUT}
        result = {"seed": self.config.seed, "credit": self.config.credit, **scores,
                  "heldout_n": rows["heldout_final"]["n"], **more,
                  "sampled_tokens": self.state["sampled"],
                  "seconds": round(self.elapsed(), 1), "flags": asdict(self.config)}
        write_json(self.path("result.json"), result)

    def path(self, name: str) -> str:
        return os.path.join(self.out, name)

    def elapsed(self) -> float:
        """Seconds of the run, those before it was interrupted included."""
        return time.monotonic() - self.began


def facts(config) -> dict:
    """What has to be the same on all ranks."""
    here = Path(__file__).resolve().parent.parent
    folders = (here, here / "tasks", here / "runtime")
    files = sorted(path for folder in folders for path in folder.glob("*.py"))
    for spec in (config.task, config.reward, config.objective):
        path = Path(spec.partition(".py")[0] + ".py")
        if path.is_file():  # one that was handed in
            files.append(path)
    code = hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8)
    device = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{gpu.name}, {gpu.total_memory >> 30} GiB"
    return {"flags": json.dumps(asdict(config), sort_keys=True), "code": code.hexdigest(),
            "torch": torch.__version__, "device": device}


def resuming(config, world: World) -> str:
    """The command that continues the run."""
    program = "python"
    if world.size > 1:
        program = f"torchrun --nproc-per-node {world.local_size}"
    out = ""
    if config.out != RunConfig.out:
        out = f" --out {shlex.quote(config.out)}"
    return f"{program} train.py --resume{out}"


def flags_of_run(args) -> dict:
    """The flags that a resumed run was started with; flags that are given now still win."""
    path = os.path.join(args.out, "run.json")
    if not args.resume or not os.path.exists(path):
        return {}
    flags = read_json(path)
    if flags["lr"] == 0:  # in earlier versions: the usual rate
        flags["lr"] = -1.0
    return flags
