"""What a run computes on, and in which types."""
import os

import torch

from runtime.files import read_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# What layers compute in. Trained weights are float32 all the same.
COMPUTE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def frozen_dtype(path: str) -> torch.dtype:
    """Of weights that are not trained: bfloat16, but on a CPU what the checkpoint at `path`
    has. Without a checkpoint it is float32 there."""
    stored = "float32"
    if path:
        raw = read_json(os.path.join(path, "config.json"))
        stored = raw.get("dtype", raw.get("torch_dtype"))
    if DEVICE == "cuda" or stored == "bfloat16":
        return torch.bfloat16
    return torch.float32
