"""What a run computes on, and in which type."""
import os
from pathlib import Path

import torch

from engine import hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Bytes of float32 logits at a time; those of 32k tokens of Qwen3 would take 20 GB.
LARGEST_LOGITS = {"cuda": 1 << 30, "cpu": 1 << 27}


def free_bytes() -> int:
    """Bytes that this GPU has free, or that a CPU has for new programs."""
    if DEVICE == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(free.split()[1]) << 10


def compute_dtype(path: str = "") -> torch.dtype:
    """What layers compute in, and the type of weights that are not trained. Trained weights
    are float32 all the same.

    bfloat16 on a GPU. On a CPU as well, if the processor multiplies in it and the
    checkpoint at `path` has weights of 16 bits; otherwise float32. Raises
    FileNotFoundError or ValueError, one line, for what is no checkpoint."""
    stored = "float32"
    if path:
        raw = hf.read_config(os.path.join(path, hf.CONFIG))
        stored = raw.get("dtype", raw.get("torch_dtype", stored))
    if DEVICE == "cuda":
        return torch.bfloat16
    fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast and stored in ("bfloat16", "float16") else torch.float32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 if it is of that type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
