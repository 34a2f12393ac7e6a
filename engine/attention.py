"""How the tokens of a forward pass see each other: equal rows, or the packed sequences of
an update, where a common prefix is computed once. engine/pages.py has it for the sampler.

Shapes: H query and K key/value heads, E head_dim, T tokens of all rows, C that are
computed, S that are seen. Linear layers have others: engine/delta.py.
"""
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.delta import Runs, convolve, rule, taps
from engine.device import upcast
from engine.packing import by_prefix

torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new shape


class Layout:
    """B rows of T tokens. Attention calls `attend`, a delta net `convolve` and `recur`."""

    def __init__(self, ids_BT: Tensor):
        B, T = ids_BT.shape
        self.device = ids_BT.device
        self.before = np.arange(B * T) - 1  # the token that each follows, or -1
        self.before[::T] = -1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q and the result (B, H, T, E), k and v (B, K, T, E)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @cached_property
    def runs(self) -> Runs:
        return Runs(self.before, self.device)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x and the result (B, T, channels), weight (channels, 1, width)."""
        count = len(self.before)
        flat = F.pad(x.flatten(0, 1), (0, 0, 0, 1))  # the last row precedes first tokens
        before = np.append(np.where(self.before < 0, count, self.before), count)
        index = torch.as_tensor(taps(before, count, weight.shape[2]), device=x.device)
        return recomputed(convolve, flat, index, weight).view(x.shape)

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        """q, k, v (B, T, heads, dimension) and decay, strength (B, T, heads): as v."""
        flat = [x.flatten(0, 1) for x in inputs]
        return recomputed(rule, *flat, self.runs)[0].view(inputs[2].shape)


def recomputed(function, *inputs):
    """Call it, and keep only its inputs: the backward pass calls it once more. For what
    keeps much more than it is given (activation checkpointing)."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class PackedLayout(Layout):
    """Sequences of these lengths, one after another in `ids`. Each sees only itself.

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
        computed, positions, keys, before = [], [], [], []
        counts = []  # (tokens to compute, all tokens) for each row that computes any
        row = np.zeros(0, np.int64)  # states of the row before
        for i, shared in zip(*by_prefix(rows)):
            begin, end = ends[i] - lengths[i], ends[i]
            new = np.arange(begin + shared, end)
            row = np.append(row[:shared], np.arange(len(new)) + len(computed))
            before += [-1, *row][shared:len(row)]
            states[begin:end] = row
            computed += new.tolist()
            positions += (new - begin).tolist()
            if len(new):
                counts.append((len(new), len(row)))
                keys.append(row)

        self.device, self.before = device, np.array(before)
        self.computed, self.positions, self.states, self.keys = (
            torch.as_tensor(values, device=device)
            for values in (computed, positions, states, np.concatenate(keys)))
        if len(computed) == len(ids):
            self.keys = None  # nothing is shared: they are those that are computed
        self.new, self.all = zip(*counts)
        # SDPA's own causal mask begins at the first key. Sequences that share need another.
        self.masks = [None if n == all else lower_right(n, all, device)
                      for n, all in counts]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the model calls in every layer: q and the result (1, H, C, E), k and v
        (1, K, C, E). One row after another."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # C H E, C K E, C K E
        if self.keys is not None:
            k, v = gather(k, self.keys), gather(v, self.keys)  # S K E
        parts = zip(q.split(self.new), k.split(self.all), v.split(self.all), self.masks)
        return torch.cat([causal(*part) for part in parts], 2)  # 1 H C E


class StepLayout:
    """The tokens of a step of the sampler: one each of B requests that decode, whose states
    are `decoding` (B,), then those of `prompts`, a list of (request, tokens). It has the
    methods of Layout. `attend` is given, and `rule_step`, which computes
    the delta rule for one token."""

    def __init__(self, attend: Callable, rule_step: Callable, states,
                 decoding: Tensor, prompts: list):
        self.attend, self.rule_step = attend, rule_step
        self.states, self.decoding, self.prompts = states, decoding, None
        if not prompts or states is None:
            return
        requests, counts = zip(*prompts)
        device, kept = decoding.device, states.inputs.shape[2]
        self.prompts = torch.tensor([r.state for r in requests], device=device)  # R
        total, starts = sum(counts), np.cumsum((0, *counts))
        before = np.arange(total) - 1
        before[starts[:-1]] = -1
        self.runs = Runs(before, device)
        # After the tokens stand the kept inputs of their states, which they follow.
        ends = total + kept * np.arange(1, len(counts) + 1)
        before = np.append(before, np.arange(total, ends[-1]) - 1)
        before[starts[:-1]] = ends - 1
        index = taps(before, len(before), kept + 1)
        self.taps = torch.as_tensor(index[:total], device=device)  # N W
        self.last = torch.as_tensor(index[starts[1:] - 1, 1:], device=device)  # R W-1

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        x, inputs, outs = x[0], self.states.inputs[layer], []
        B = len(self.decoding)
        if B:
            seen = torch.cat((inputs[self.decoding], x[:B, None]), 1)  # B W C
            inputs.index_copy_(0, self.decoding, seen[:, 1:])
            index = torch.arange(seen.shape[0] * seen.shape[1], device=x.device)
            outs.append(convolve(seen.flatten(0, 1), index.view(seen.shape[:2]), weight))
        if self.prompts is not None:
            seen = torch.cat((x[B:], inputs[self.prompts].flatten(0, 1)))
            outs.append(convolve(seen, self.taps, weight))
            inputs.index_copy_(0, self.prompts, seen[self.last])
        return torch.cat(outs)[None]  # 1 N C

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        inputs, matrices, outs = [x[0] for x in inputs], self.states.matrices[layer], []
        B = len(self.decoding)
        if B:
            outs.append(self.rule_step(matrices, self.decoding, *(x[:B] for x in inputs)))
        if self.prompts is not None:
            out, ends = rule(*(x[B:] for x in inputs), self.runs, matrices[self.prompts])
            matrices.index_copy_(0, self.prompts, ends[self.runs.last])
            outs.append(out)
        return torch.cat(outs)[None]  # 1 N H V


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
    return upcast(x).index_select(0, index).to(x.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A row's last n tokens (n, H, E) attend to all T (T, K, E): (1, H, n, E)."""
    dtype = q.dtype
    if not q.is_cuda:  # there 16 bits take up to five times as long (measured)
        q, k, v = upcast(q), upcast(k), upcast(v)
        mask = None if mask is None else mask.to(q.dtype)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True).to(dtype)
