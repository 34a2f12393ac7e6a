"""Attention where plain causal attention over a padded batch is not enough: over rows that are
packed one after another (for training) and over the pages of a KV cache (for sampling).

Each way is an `attend(layer, q, k, v) -> out` that the model calls in every layer with q of shape
(1, H, N, E), k and v of shape (1, K, N, E), and that returns (1, H, N, E).

Shapes: N tokens, H query and K key/value heads, E head_dim.
"""
import inspect
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
    if "block_table" not in inspect.signature(varlen_attn).parameters:  # before torch 2.12
        varlen_attn = None
except ImportError:
    varlen_attn = None


def packed_rows(lengths: list[int], device: torch.device):
    """`attend` for rows of these lengths packed into one: each row sees only itself, causally.

    No N x N mask is made: flash attention computes all rows in one call where there is a kernel
    for it, otherwise SDPA computes one row after another."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if varlen_attn and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # N H E, N K E, N K E
            out = varlen_attn(q, k, v, starts, starts, longest, longest,
                              window_size=(-1, 0), enable_gqa=True)
            return out.transpose(0, 1)[None]  # 1 H N E
        rows = zip(*(x.split(lengths, 2) for x in (q, k, v)))
        out = [F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
               for row in rows]
        return torch.cat(out, 2)  # 1 H N E

    return attend
