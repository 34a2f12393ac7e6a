"""Several processes, one run: `torchrun --nproc-per-node N train.py ...`. One process is a world
of one and goes through the same code.

Trained weights, gradients and optimizer are sharded by FSDP2, layer by layer; on a GPU they are
float32 and layers compute in bfloat16, with gradients summed in float32. Nothing else is sharded:
each rank samples its own questions from a whole copy of the weights, without any communication.
What ranks tell each other (trees, sums of statistics, whether something failed) goes as objects
through `gather`, over gloo.

A failure that all ranks see at once is told by rank 0; of one that a single rank sees, that rank
tells, and torchrun ends the others. Ranks end when torchrun does.

Left out: tensor and pipeline parallelism, a checkpoint directory that is not shared by all hosts.
Source: PyTorch FSDP (2304.11277), FSDP2 (`torch.distributed.fsdp.fully_shard`).
"""
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (MixedPrecisionPolicy, fully_shard,
                                    register_fsdp_forward_method)

PATIENCE = timedelta(hours=1)  # how long a rank waits for the others
PDEATHSIG = 1  # PR_SET_PDEATHSIG


class Agreed(ValueError):
    """Raised on all ranks at once; rank 0 tells what it is."""


class World:
    """The processes of a run. `waited` counts the seconds spent in `gather`."""

    def __init__(self):
        self.launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.waited, self.lock = 0.0, None
        gpu = torch.cuda.is_available()
        if self.launched:
            ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)  # workers have sessions of their own
            signal.signal(signal.SIGTERM, self.told_to_end)
            if self.rank:
                sys.stdout = open(os.devnull, "w", encoding="utf-8")
            if os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's, who cannot know better
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local_size))
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if (self.launched or gpu) and not dist.is_initialized():
            alone = {} if self.launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=PATIENCE,
                                    **alone)

    def told_to_end(self, *_) -> None:
        print(f"train.py: rank {self.rank} was told to end; continue with --resume",
              file=sys.stderr, flush=True)
        os._exit(143)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, value) -> list:
        """The value of every rank, in their order."""
        if self.size == 1:
            return [value]
        begin, values = time.monotonic(), [None] * self.size
        dist.all_gather_object(values, value)
        self.waited += time.monotonic() - begin
        return values

    def take(self, directory: str) -> None:
        """Make the directory and keep other runs out of it until `release`, or the end of this
        process, however it comes about. Raises OSError."""
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "lock")
        if self.lock is None:
            self.lock = open(path, "w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise OSError(f"{path}: another run is writing into this directory") from None

    def release(self) -> None:
        if self.lock:
            self.lock.close()
        self.lock = None

    @contextlib.contextmanager
    def together(self):
        """What only some ranks do, or what can fail on some of them: if it does on any (OSError,
        ValueError), all ranks raise Agreed. No collective may be inside."""
        problem = None
        try:
            yield
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = self.gather(problem)
        if any(problems):
            ranks = [i for i, text in enumerate(problems) if text]
            where = "" if len(ranks) == self.size else f"rank {', '.join(map(str, ranks))}: "
            raise Agreed(where + problems[ranks[0]])

    def agree(self, facts: dict) -> None:
        """Raise Agreed, naming the first fact that is not the same on all ranks."""
        everyone = self.gather(facts)
        for name, mine in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[name] != mine:
                    raise Agreed(f"ranks differ in {name}: rank 0 has {mine}, rank {rank} "
                                 f"{other[name]}")

    def message(self, error: BaseException) -> str | int:
        """What to leave with: the error's line, or only a status where rank 0 tells it."""
        if self.rank == 0:
            return f"train.py: {error}"
        shared = isinstance(error, (Agreed, FloatingPointError))
        return 1 if shared else f"train.py: rank {self.rank}: {error}"


def shard(model) -> None:
    """Split weights over the ranks, layer by layer; nothing without a process group. On one GPU it
    is what keeps float32 weights beside bfloat16 layers; with adapters there is no need for that.
    Gradients are means over the ranks, so a rank's loss has to be multiplied by their number."""
    if not dist.is_initialized() or (dist.get_world_size() == 1 and model.rank):
        return
    compute = torch.bfloat16 if torch.cuda.is_available() else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.model["layers"]:
        fully_shard(block, mp_policy=policy)
    # The rest too is given up after a forward pass: one without a backward pass must leave nothing
    # whole behind, or what is read next is not the weights.
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    register_fsdp_forward_method(model, "logprobs")


class LeanAdamW(torch.optim.AdamW):
    """AdamW that keeps its moments in bfloat16. While a weight is updated, its own are float32. A
    beta of 0.95 forgets 5 % a step, more than the 0.4 % that bfloat16 resolves; 0.999 would not."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        groups = self.param_groups
        for group in groups:
            for weight in group["params"]:
                state = self.state[weight]
                self.cast(state, torch.float32)
                self.param_groups = [group | {"params": [weight]}]
                super().step()
                self.cast(state, torch.bfloat16)
        self.param_groups = groups

    @staticmethod
    def cast(state: dict, dtype: torch.dtype) -> None:
        for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
            state[name] = state[name].to(dtype)
