"""Checkpoints of a run: directories that are there whole or not at all, and which to continue from.

A checkpoint is OUT/checkpoints/PHASE-STEP: weights in the Hugging Face layout (of a model with
adapters only these), tokenizer, rlm.json, the optimizer through torch's distributed checkpoint, so
that any number of ranks can read it, and state.json, written last, with the size of every file: a
file that was cut short is noticed, and the checkpoint before is taken. No random state is saved:
all that is random is drawn from (seed, phase, step). Left out: remote storage.
"""
import glob
import json
import os
import shutil
import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (get_optimizer_state_dict,
                                                     set_optimizer_state_dict)

from runtime.parallel import World

FOLDER = "checkpoints"  # in --out


def write_directory(path: str, parts, world: World) -> None:
    """Every rank calls each of `parts` with a directory aside, one after the other; then rank 0
    puts it in the place of `path`. Raises parallel.Agreed if a part fails on any rank."""
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


def keep_last(out: str, n: int) -> None:
    """Remove all but the last n, and what was left half written."""
    keep = checkpoints(out)[-n:]
    for path in glob.glob(os.path.join(out, FOLDER, "*")):
        if path not in keep:
            shutil.rmtree(path, ignore_errors=True)


def checkpoints(out: str) -> list[str]:
    """Those of a run that were written whole, the oldest first."""
    found = glob.glob(os.path.join(out, FOLDER, "*-[0-9][0-9][0-9][0-9][0-9][0-9]"))
    return sorted(found, key=lambda path: (os.path.basename(path).startswith("grpo"), path))


def forget_after(out: str, start: str) -> None:
    """Remove the checkpoints after the one that is resumed: they are damaged, and would stand in
    the way of those that the run writes at the same steps."""
    found = checkpoints(out)
    for path in found[found.index(start) + 1:]:
        shutil.rmtree(path, ignore_errors=True)


def last_checkpoint(out: str) -> str | None:
    """The last one that is whole, None if there is none at all. Raises ValueError if all are
    damaged."""
    found = checkpoints(out)
    for path in reversed(found):
        try:
            with open(os.path.join(path, "state.json"), encoding="utf-8") as file:
                files = json.load(file)["files"]
        except (OSError, ValueError, KeyError):
            files = {"state.json": 0}
        now = sizes(path)
        damaged = [name for name, size in files.items() if now.get(name) != size]
        if not damaged:
            return path
        print(f"{path}: damaged ({', '.join(damaged)}), looking for one before", file=sys.stderr)
    if found:
        raise ValueError(f"{found[-1]}: every checkpoint is damaged; with --overwrite in place "
                         "of --resume the run starts afresh")
    return None


def sizes(path: str) -> dict[str, int]:
    """Bytes of each file below a directory."""
    return {os.path.relpath(os.path.join(at, name), path): os.path.getsize(os.path.join(at, name))
            for at, _, names in os.walk(path) for name in names}


def no_room(out: str, n: int, size: int) -> str | None:
    """None if n checkpoints of that many bytes fit on the disk, else one line."""
    while not os.path.isdir(out):
        out = os.path.dirname(os.path.abspath(out))
    need, free = n * size, shutil.disk_usage(out).free
    return (f"{out}: {free / 1e9:.1f} GB are free, {n} checkpoints need {need / 1e9:.1f}"
            if need > free else None)


def save_optimizer(model, optimizer, path: str) -> None:
    """Through torch's distributed checkpoint, by name of the weight: any number of ranks can read
    it. Raises OSError."""
    try:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path,
                 no_dist=not dist.is_initialized())
    except CheckpointException as error:  # of all ranks; no Exception, by its type
        raise OSError(f"{path}: {first(error)}") from None


def load_optimizer(model, optimizer, path: str) -> None:
    """Raises ValueError if it does not fit or cannot be read."""
    try:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_optimizer_state_dict(model, optimizer, state)
    except CheckpointException as error:
        raise ValueError(f"{path}: {first(error)}") from None


def first(error: CheckpointException) -> str:
    """The first rank's failure, on one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}".splitlines()[0]
