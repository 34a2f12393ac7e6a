"""Checkpoints: directories that are complete or not there at all.

A checkpoint is OUT/checkpoints/PHASE-STEP. It holds the weights in the Hugging Face
layout (of a model with adapters only these), tokenizer, rlm.json, the optimizer's state
through torch's distributed checkpoint, so that any number of ranks can read it, and
state.json. That file is written last, with the size of every other file. So a file that
was cut short is noticed, and the run continues from the checkpoint before. No random
state is saved: all random numbers are drawn from (seed, phase, step).

Left out: remote storage.
"""
import contextlib
import glob
import os
import shutil
import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from runtime.files import read_json, readable
from runtime.parallel import World

FOLDER = "checkpoints"  # in --out
KEPT = 2  # checkpoints; the last one may turn out to be damaged


def write_directory(path: str, parts, world: World) -> None:
    """Write a directory aside, then rename it to `path`. Every rank calls each of `parts`
    with the directory aside. Raises parallel.Agreed if a part fails on any rank."""
    aside, old = path + ".tmp", path + ".old"
    with world.together():
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            os.makedirs(aside)
    for part in parts:
        with world.together():
            part(aside)
    with world.together():
        if world.rank == 0:
            shutil.rmtree(old, ignore_errors=True)
            if os.path.isdir(path):
                os.rename(path, old)
            os.rename(aside, path)
            shutil.rmtree(old, ignore_errors=True)


def place(out: str, phase: str, step: int) -> str:
    return os.path.join(out, FOLDER, f"{phase}-{step:06}")


def checkpoints(out: str) -> list[str]:
    """Those that were written to the end, the oldest first."""
    found = glob.glob(os.path.join(out, FOLDER, "*-[0-9][0-9][0-9][0-9][0-9][0-9]"))
    return sorted(found, key=lambda path: (os.path.basename(path).startswith("grpo"), path))


def keep_last(out: str) -> None:
    """Remove all but the last ones, and what was left half written."""
    kept = checkpoints(out)[-KEPT:]
    for path in glob.glob(os.path.join(out, FOLDER, "*")):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def forget_after(out: str, path: str) -> None:
    """Remove the checkpoints after the one that a run continues from. They are damaged,
    and the run will write new ones at the same steps."""
    found = checkpoints(out)
    for later in found[found.index(path) + 1:]:
        shutil.rmtree(later, ignore_errors=True)


def last_checkpoint(out: str) -> str | None:
    """The last undamaged one, None if there is none. ValueError if all are damaged."""
    found = checkpoints(out)
    for path in reversed(found):
        try:
            files = read_json(os.path.join(path, "state.json"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            files = {"state.json": 0}
        now = sizes(path)
        damaged = [name for name, size in files.items() if now.get(name) != size]
        if not damaged:
            return path
        print(f"{path}: damaged ({', '.join(damaged)}), looking for one before it",
              file=sys.stderr)
    if found:
        raise ValueError(f"{found[-1]}: every checkpoint is damaged; with --overwrite in "
                         "place of --resume the run starts afresh")
    return None


def sizes(path: str) -> dict[str, int]:
    """Bytes of each file below a directory, by its path from there."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            found[os.path.relpath(file, path)] = os.path.getsize(file)
    return found


def no_room(out: str, need: int) -> str | None:
    """None if `need` bytes of checkpoints and models fit into OUT, else one line. What it
    holds of them by now is replaced, so it counts as free."""
    free = 0
    for name in (FOLDER, "warmup", "best", "final"):
        free += sum(sizes(os.path.join(out, name)).values())
    while not os.path.isdir(out):
        out = os.path.dirname(os.path.abspath(out))
    free += shutil.disk_usage(out).free
    if need <= free:
        return None
    return (f"{out}: {readable(free)} are free, checkpoints and models need "
            f"{readable(need)}")


def save_optimizer(model, optimizer, path: str) -> None:
    """By name of the weight, so that any number of ranks can read it. Raises OSError."""
    try:
        with one_process_is_fine():
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path,
                     no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException of its own kind
        raise OSError(f"{path}: {_first_failure(error)}") from None


def load_optimizer(model, optimizer, path: str) -> None:
    """Raises ValueError if it does not fit or cannot be read."""
    try:
        state = get_optimizer_state_dict(model, optimizer)
        with one_process_is_fine():
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_optimizer_state_dict(model, optimizer, state)
    except CheckpointException as error:
        raise ValueError(f"{path}: {_first_failure(error)}") from None


@contextlib.contextmanager
def one_process_is_fine():
    """Without torch's guess that a run of one process has forgotten to start the others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}".splitlines()[0]
