"""Checkpoints: directories that are complete or not there at all.

A checkpoint is OUT/checkpoints/PHASE-STEP. It holds the weights in the Hugging Face
layout (of a model with adapters only these), tokenizer, rlm.json, state.json, and the
optimizer's state through torch's distributed checkpoint, so that any number of ranks can
read it. No random state is saved: all random numbers are drawn from (seed, phase, step).
Left out: a machine that fails before the disk has all of a file. Then remove the last
checkpoint; the one before it is still there.
"""
import contextlib
import os
import re
import shutil
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from engine.parallel import World

FOLDER = "checkpoints"  # the directory in --out that has them
KEPT = 2  # checkpoints
NAME = re.compile(r"(warmup|grpo)-\d{6}")

# torch guesses that a run of one process has forgotten to start the others.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


@contextlib.contextmanager
def writing(path: str, world: World):
    """Inside `with`, all ranks write into the directory that this gives. Then it is renamed
    to `path`."""
    aside = path + ".tmp"
    if world.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside)
    world.gather(None)  # it is there

    yield aside

    world.gather(None)  # all have written
    if world.rank == 0:
        shutil.rmtree(path, ignore_errors=True)  # a resumed run writes the same again
        os.rename(aside, path)
    world.gather(None)  # it can be read


def checkpoints(out: str) -> list[str]:
    """Those that were written to the end, the oldest first."""
    folder = os.path.join(out, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = sorted(name for name in names if NAME.fullmatch(name))
    found.sort(key=lambda name: name.startswith("grpo"))  # the warm-up comes first
    return [os.path.join(folder, name) for name in found]


def keep_last(out: str) -> None:
    """Remove all but the last ones, and what was left half written."""
    kept = checkpoints(out)[-KEPT:]
    for entry in os.scandir(os.path.join(out, FOLDER)):
        ours = NAME.fullmatch(entry.name.removesuffix(".tmp"))
        if ours and entry.path not in kept:
            shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def in_one_line(path: str):
    """torch reports damaged files and a full disk with a traceback per rank."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        raise OSError(f"{path}: cannot be read or written: {lines[-1]:.300}") from None


def save_optimizer(model, optimizer, path: str) -> None:
    """By name of the weight, so that any number of ranks can read it."""
    with in_one_line(path):
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path,
                 no_dist=not dist.is_initialized())


def load_optimizer(model, optimizer, path: str) -> None:
    state = get_optimizer_state_dict(model, optimizer)
    with in_one_line(path):
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, state)
