"""Several processes, one run: `torchrun --nproc-per-node N train.py ...`. One process is a
world of one and goes through the same code.

FSDP2 shards the trained weights, their gradients and the optimizer, layer by layer. On a
GPU they are float32, layers compute in bfloat16, and gradients are summed in float32.
Nothing else is sharded: each rank samples its own questions from a full copy of the
weights, without any communication. What the ranks exchange (trees, sums of statistics,
failures) are Python objects. They go through `gather`, over gloo.

If all ranks fail at once, rank 0 prints why. If one rank fails, that rank prints why, and
torchrun ends the others. Ranks end when torchrun ends.

Left out: tensor and pipeline parallelism, and hosts that share no checkpoint directory.
Source: PyTorch FSDP (2304.11277), FSDP2 (`torch.distributed.fsdp.fully_shard`).
"""
import contextlib
import ctypes
import fcntl
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=1)  # how long a rank waits for the others
PDEATHSIG = 1  # PR_SET_PDEATHSIG


class Agreed(ValueError):
    """Raised on all ranks at once; rank 0 prints it."""


class World:
    """The processes of a run. `waited` counts the seconds spent in `gather`."""

    def __init__(self):
        self.launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.waited = 0.0
        self.lock = None
        if self.launched:
            self._join_torchrun()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if self.launched:
            join()

    def _join_torchrun(self) -> None:
        # Workers have sessions of their own, so nothing else ends them with torchrun.
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, self._terminated)
        if self.rank:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        # torchrun sets one thread per process, whatever the machine has.
        if os.environ.get("OMP_NUM_THREADS") == "1":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self.local_size))

    def _terminated(self, *_) -> None:
        print(f"train.py: rank {self.rank} was terminated; continue with --resume",
              file=sys.stderr, flush=True)
        os._exit(143)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, value) -> list:
        """The value of every rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        begin = time.monotonic()
        values = [None] * self.size
        dist.all_gather_object(values, value)
        self.waited += time.monotonic() - begin
        return values

    def take(self, directory: str) -> None:
        """Make the directory and keep other runs out of it until `release`, or until this
        process ends in whatever way. Raises OSError."""
        os.makedirs(directory, exist_ok=True)
        if self.lock is not None:
            return
        path = os.path.join(directory, "lock")
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
        """If what is inside raises OSError or ValueError on any rank, all ranks raise
        Agreed. No collective may be inside: a rank that failed would not take part."""
        problem = None
        try:
            yield
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        problems = self.gather(problem)
        failed = [rank for rank, text in enumerate(problems) if text]
        if failed:
            where = ""
            if len(failed) < self.size:
                where = f"rank {', '.join(map(str, failed))}: "
            raise Agreed(where + problems[failed[0]])

    def agree(self, facts: dict) -> None:
        """Raise Agreed, with the name of the first fact that differs between ranks."""
        everyone = self.gather(facts)
        for name, mine in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[name] != mine:
                    raise Agreed(f"ranks differ in {name}: rank 0 has {mine}, rank {rank} "
                                 f"{other[name]}")

    def message(self, error: BaseException) -> str | int:
        """What to exit with: the line to print, or only a status if rank 0 prints it."""
        if self.rank == 0:
            return f"train.py: {error}"
        shared = isinstance(error, (Agreed, FloatingPointError))
        return 1 if shared else f"train.py: rank {self.rank}: {error}"


# What gloo and NCCL say of a rank that is gone. gloo has no exception of its own.
GONE = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|"
                  r"[Tt]imed out|remote process exited|ncclRemoteError", re.DOTALL)


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an exchange between ranks failed because another one has ended."""
    of_exchange = isinstance(error, dist.DistError) or "gloo" in str(error)
    return of_exchange and GONE.search(str(error)) is not None


def join(**how) -> None:
    """Make the process group, once; by default of what torchrun started."""
    if not dist.is_initialized():
        gpu = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE, **how)


def shard(model, compute: torch.dtype = torch.float32) -> None:
    """Split the weights over the ranks, layer by layer.

    A world of one has nothing to split. But this is also what keeps float32 weights beside
    layers that compute in another type. Frozen weights have that type anyway, so there a
    model with adapters is left alone. Gradients become means over the ranks, so a rank has
    to multiply its loss by the number of ranks."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone and (model.rank or compute == torch.float32):
        return
    if alone:
        join(store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import (  # here, as it takes a second to load
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.model["layers"]:
        fully_shard(block, mp_policy=policy)
    # Embedding, norm and head are freed after a forward pass, too. Otherwise a forward pass
    # without a backward pass would leave them gathered, and they would be read as weights.
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    register_fsdp_forward_method(model, "logprobs")


def is_sharded(model) -> bool:
    return hasattr(model.lm_head.weight, "full_tensor")  # only a DTensor has it


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor; every rank has to call it. Any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_share(tensor: Tensor, place: Tensor) -> Tensor:
    """This rank's share of `tensor`, in memory of its own, if `place` is sharded."""
    if not hasattr(place, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    share = distribute_tensor(
        tensor, place.device_mesh, place.placements, src_data_rank=None)
    return share.clone()


class LeanAdamW(torch.optim.AdamW):
    """AdamW that keeps its two moments in bfloat16: 4 bytes per weight less.

    While a weight is updated, its moments are float32. The second moment forgets 5 % per
    step (beta 0.95), which is more than the 0.4 % that bfloat16 resolves. With beta 0.999
    it would be less, and the moment would stand still."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        groups = self.param_groups
        for group in groups:
            for weight in group["params"]:
                state = self.state[weight]
                self._cast(state, torch.float32)
                self.param_groups = [group | {"params": [weight]}]
                super().step()
                self._cast(state, torch.bfloat16)
        self.param_groups = groups

    @staticmethod
    def _cast(state: dict, dtype: torch.dtype) -> None:
        for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
            state[name] = state[name].to(dtype)
