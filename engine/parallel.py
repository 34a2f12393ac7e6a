"""Several processes, one run: `torchrun --nproc-per-node N train.py ...`. A single process
goes through the same code.

FSDP2 shards the weights, their gradients and the optimizer, layer by layer. On a GPU what
is trained is float32, layers compute in bfloat16, and gradients are summed over packs and
ranks in float32. The frozen reference of a KL term is sharded, too. Nothing else is: each
rank samples its own trees from a full copy of the weights, without any communication. What
the ranks exchange (trees, sums of statistics) are Python objects. They go through `gather`,
over gloo.

A rank that fails prints why and ends; then torchrun ends the others. Ranks end when
torchrun ends.

Left out: tensor and pipeline parallelism, and hosts that share no checkpoint directory.
Source: PyTorch FSDP (2304.11277), FSDP2 (`torch.distributed.fsdp.fully_shard`).
"""
import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=1)  # how long a rank waits for the others
PDEATHSIG = 1  # PR_SET_PDEATHSIG


class World:
    """The processes of a run."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if "RANK" not in os.environ:  # torchrun did not start it
            return
        # Workers have sessions of their own, so nothing else ends them with torchrun.
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
        if self.rank:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        # torchrun sets one thread per process, whatever the machine has.
        if os.environ.get("OMP_NUM_THREADS") == "1":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self.local_size))
        join()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, value) -> list:
        """The value of every rank, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def join(**how) -> None:
    """Make the process group, once; by default of what torchrun started."""
    if not dist.is_initialized():
        gpu = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE, **how)


def shard(model, compute: torch.dtype = torch.float32) -> None:
    """Split the weights over the ranks, layer by layer.

    On one device FSDP only keeps float32 weights beside layers that compute in another
    type. Frozen weights, as beside adapters, do not need that: they have that type.
    Gradients become means over the ranks: a rank multiplies its loss by their number."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    trained = torch.promote_types(compute, torch.float32)  # the type of such weights
    frozen = not model.lm_head.weight.requires_grad
    if alone and (frozen or compute == trained):
        return
    if alone:
        join(store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import (  # here, as it takes a second to load
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=trained)
    for block in model.model["layers"]:
        fully_shard(block, mp_policy=policy)
    # Embedding, norm and head are freed after a forward pass, too. Else they stay gathered
    # after one without a backward pass, and would then be read as the weights.
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
