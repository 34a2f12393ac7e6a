"""What a run computes on, and in which type."""
import contextlib
import ctypes
import os

import torch

from runtime import hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def give_back_memory() -> None:
    """Let glibc return what was freed. It keeps free blocks that lie between used ones: a
    run of an hour grew to twice its plan."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def compute_dtype(path: str = "") -> torch.dtype:
    """What layers compute in, and the type of weights that are not trained. Trained weights
    are float32 all the same.

    bfloat16 on a GPU. On a CPU it is that as well if the processor multiplies in it and the
    checkpoint at `path` has weights of 16 bits; otherwise float32. Raises FileNotFoundError
    or ValueError, one line, for what is no checkpoint."""
    stored = "float32"
    if path:
        raw = hf.read_config(os.path.join(path, hf.CONFIG))
        stored = raw.get("dtype", raw.get("torch_dtype", stored))
    if DEVICE == "cuda":
        return torch.bfloat16
    fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast and stored in ("bfloat16", "float16") else torch.float32
