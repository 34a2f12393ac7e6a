"""Attention over the packed rows of an update. Each row sees only itself, and a common
prefix is computed once. engine/pages.py has the attention of the sampler.

Shapes: H query and K key/value heads, E head_dim, T tokens of all rows, C that are
computed, S that are seen.
"""
import contextlib
import inspect
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.packing import by_prefix

varlen_attn = None
if torch.cuda.is_available():  # only there is it used, and it takes a second to load
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new shape
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn
        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
            varlen_attn = None  # before torch 2.12: SDPA, row by row
# Where flash attention splits the keys of a call over pages, it writes the results of all
# requests to one place (pytorch/pytorch#194167). torch 2.12 never does, nor can be told.
UNSPLIT = {"num_splits": 1} if torch.__version__ >= "2.13" else {}


class PackedRows:
    """Rows of these lengths, one after another in `ids`. Each sees only itself.

    A token has the same hidden state in all rows that are equal up to it. It is computed in
    one of them, and the others read its keys and values:

        computed   (C,) which of the T tokens are computed
        positions  (C,) their positions in their rows
        states     (T,) where the state of each token is among the C
    """

    def __init__(self, ids: list[int], lengths: list[int], device: torch.device):
        ends = list(accumulate(lengths))
        rows = [ids[end - length:end] for length, end in zip(lengths, ends)]
        states = np.zeros(len(ids), np.int64)
        computed, positions, keys = [], [], []
        counts = []  # of each row with tokens to compute: how many, and how many in all
        row = np.zeros(0, np.int64)  # states of the row before
        for i, shared in zip(*by_prefix(rows)):
            begin, end = ends[i] - lengths[i], ends[i]
            new = np.arange(begin + shared, end)
            row = np.append(row[:shared], np.arange(len(new)) + len(computed))
            states[begin:end] = row
            computed += new.tolist()
            positions += (new - begin).tolist()
            if len(new):
                counts.append((len(new), len(row)))
                keys.append(row)

        def tensor(values) -> Tensor:
            return torch.as_tensor(values, device=device)

        self.computed, self.positions = tensor(computed), tensor(positions)
        self.states = tensor(states)
        # If nothing is shared, the keys of the rows are those that are computed.
        self.keys = tensor(np.concatenate(keys)) if len(computed) < len(ids) else None
        self.new, self.all = zip(*counts)
        # Where each row begins, and where the last ends: (B + 1,).
        self.starts = [tensor(np.cumsum((0, *n))).int() for n in (self.new, self.all)]
        # SDPA's own causal mask begins at the first key. Rows that share need another.
        self.masks = [None if n == all else lower_right(n, all, device)
                      for n, all in counts]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the model calls in every layer: q and the result (1, H, C, E), k and v
        (1, K, C, E). All rows in one call where there is a kernel for it, else each."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # C H E, C K E, C K E
        if self.keys is not None:
            k, v = gather(k, self.keys), gather(v, self.keys)  # S K E
        if varlen_attn and q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] % 8 == 0:
            out = varlen_attn(q, k, v, *self.starts, max(self.new), max(self.all),
                              window_size=(-1, 0), enable_gqa=True)  # C H E
            return out.transpose(0, 1)[None]  # 1 H C E
        parts = zip(q.split(self.new), k.split(self.all), v.split(self.all), self.masks)
        return torch.cat([causal(*part) for part in parts], 2)  # 1 H C E


def lower_right(n: int, all: int, device) -> Tensor:
    """The causal mask of a row's last n tokens over all its tokens. On a CPU it is float32
    (n, all), on a GPU only a mark for flash attention."""
    if torch.device(device).type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # takes a second to load

        return causal_lower_right(n, all)
    seen = torch.ones(n, all, dtype=torch.bool).tril(all - n)
    return torch.zeros(n, all).masked_fill_(~seen, -torch.inf)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (C, ...) by index. In float32, so that their gradients are summed in it."""
    return x.float().index_select(0, index).to(x.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A row's last n tokens (n, H, E) attend to all T (T, K, E): (1, H, n, E)."""
    dtype = q.dtype
    if not q.is_cuda:  # there 16 bits take up to five times as long (measured)
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True).to(dtype)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, of a matrix x of any type. Logits of about 20 would be rounded to
    0.06 in bfloat16."""
    if x.dtype != torch.float32 and x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
