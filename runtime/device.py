"""What a run computes on, and in which type."""
import os

import torch

from runtime.files import read_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(name: str = "auto", path: str = "") -> torch.dtype:
    """What layers compute in, and the type of weights that are not trained. Trained weights
    are float32 all the same.

    "auto" is bfloat16 on a GPU. On a CPU it is that as well if the processor multiplies in
    it and the checkpoint at `path` has weights of 16 bits; otherwise float32."""
    if name != "auto":
        return TYPES[name]
    if DEVICE == "cuda":
        return torch.bfloat16
    stored = "float32"
    if path:
        raw = read_json(os.path.join(path, "config.json"))
        stored = raw.get("dtype", raw.get("torch_dtype", stored))
    fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast and stored in ("bfloat16", "float16") else torch.float32
