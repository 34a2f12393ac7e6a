"""The states of delta nets, for the sampler: who owns which, and where they are kept.

A running request owns a slot: of each linear layer its matrix, and the last inputs of its
convolution. Each token changes it in place, so it cannot be cut back to a prefix as pages
can. A snapshot is a slot that nobody changes, and that a request may continue. A slot of
Qwen3.5-4B takes as much as the keys and values of 1,570 tokens, so snapshots are rare. One
is kept

    where a request stops: its own slot, which the first to continue it takes over
    where a waiting request agrees with a prompt that is being computed: a copy, which is
    copied again by each that continues it
    where the pages of a request agree with more than WORTH tokens beyond its best snapshot:
    a copy as well

A request uses the longest snapshot within the tokens that its pages agree with. Of many,
the least recently used is replaced. Shapes: L linear layers, S slots; more in
engine/delta.py.
"""
from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.delta import Runs, convolve, rule, taps
from engine.packing import common

WORTH = 64  # tokens; a snapshot saves at least these
SLOTS_PER_WINDOW = 3  # of the KV cache


def state_bytes(config, itemsize: int) -> int:
    """What a slot takes; `itemsize` is of the model's type."""
    if not any(config.is_linear):
        return 0
    window, matrix = shapes(config)
    each = np.prod(window) * itemsize + np.prod(matrix) * max(itemsize, 4)
    return config.is_linear.count(True) * int(each)


def shapes(config) -> tuple[tuple, tuple]:
    """Of a layer: the convolution's last inputs (W - 1, C), and its matrix (H, K, V)."""
    c = config
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    matrix = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return (c.linear_conv_kernel_dim - 1, 2 * keys + values), matrix


def zeros(shape: tuple, like: Tensor, dtype: torch.dtype) -> Tensor:
    """On the device of `like`. On a CPU only what is written takes up memory."""
    if like.is_cuda:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)  # torch would write them
    return torch.from_numpy(raw).view(dtype).view(shape)


class Slots:
    """`inputs` (L, S, W - 1, C), the last of each convolution, and `matrices`
    (L, S, H, K, V). Slot 0 is for padding."""

    def __init__(self, model, count: int):
        layers, weight = model.config.is_linear.count(True), model.lm_head.weight
        inputs, matrix = shapes(model.config)
        self.count = count
        self.inputs = zeros((layers, count + 1, *inputs), weight, weight.dtype)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.matrices = zeros((layers, count + 1, *matrix), weight, dtype)

    def copy(self, source: int, target: int) -> None:
        """From slot 0 zeros are copied: it may hold anything."""
        for states in (self.inputs, self.matrices):
            states[:, target] = states[:, source] if source else 0


class StepRows:
    """The tokens of a step of the sampler: one each of B requests that decode, whose slots
    are `decoding` (B,), then those of `prompts`, a list of (request, tokens). It has the
    methods of engine.attention.Rows. `attend` is given, and `step`, which computes the
    delta rule for one token."""

    def __init__(self, attend: Callable, step: Callable, slots: Slots | None,
                 decoding: Tensor, prompts: list):
        self.attend, self.step = attend, step
        self.slots, self.decoding, self.prompts = slots, decoding, None
        if not prompts or slots is None:
            return
        requests, counts = zip(*prompts)
        device, kept = decoding.device, slots.inputs.shape[2]
        self.prompts = torch.tensor([r.slot for r in requests], device=device)  # R
        total, starts = sum(counts), np.cumsum((0, *counts))
        before = np.arange(total) - 1
        before[starts[:-1]] = -1
        self.runs = Runs(before, device)
        # After the tokens stand the kept inputs of their slots, which they follow.
        ends = total + kept * np.arange(1, len(counts) + 1)
        before = np.append(before, np.arange(total, ends[-1]) - 1)
        before[starts[:-1]] = ends - 1
        index = taps(before, len(before), kept + 1)
        self.taps = torch.as_tensor(index[:total], device=device)  # N W
        self.last = torch.as_tensor(index[starts[1:] - 1, 1:], device=device)  # R W-1

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        x, inputs, outs = x[0], self.slots.inputs[layer], []
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
        inputs, matrices, outs = [x[0] for x in inputs], self.slots.matrices[layer], []
        B = len(self.decoding)
        if B:
            outs.append(self.step(matrices, self.decoding, *(x[:B] for x in inputs)))
        if self.prompts is not None:
            out, ends = rule(*(x[B:] for x in inputs), self.runs, matrices[self.prompts])
            matrices.index_copy_(0, self.prompts, ends[self.runs.last])
            outs.append(out)
        return torch.cat(outs)[None]  # 1 N H V


class Snapshots:
    """Which slot holds what. `slots` is None for a model without linear layers: then
    nothing has to be kept. `pages` hashes prefixes."""

    def __init__(self, slots: Slots | None, pages):
        self.slots, self.pages = slots, pages
        self.free = list(range(slots.count, 0, -1)) if slots else []
        self.kept: dict[int, int] = {}  # hash of tokens -> slot, least recently used first
        self.shared: set[int] = set()  # slots that several requests may continue

    def _hashes(self, request, full: int, end: int) -> Iterator[int]:
        """Of its first `full` pages, and of these with each token more, up to `end`."""
        tokens = request.ids[full * self.pages.size:end]
        return accumulate(tokens, lambda hashed, token: hash((hashed, token)),
                          initial=hash(self.pages.hash(request, full)))

    def match(self, request, cached: int) -> tuple[int, int]:
        """Its longest snapshot of at most `cached` tokens: how many, and their hash."""
        if not self.slots:
            return cached, 0
        size = self.pages.size
        for full in range(cached // size, -1, -1):
            hashes = self._hashes(request, full, min(cached, (full + 1) * size))
            found = [(n, hashed) for n, hashed in enumerate(hashes, full * size)
                     if hashed in self.kept]
            if found:
                n, hashed = found[-1]
                self.kept[hashed] = self.kept.pop(hashed)
                return n, hashed
        return 0, 0

    def start(self, request, n: int, hashed: int, cached: int) -> None:
        """Give it a slot, which continues the snapshot of its first n tokens."""
        if not self.slots:
            return
        slot = self.kept[hashed] if n else 0
        if n and slot not in self.shared:
            request.slot = self.kept.pop(hashed)
        else:
            request.slot = self._new()
            self.slots.copy(slot, request.slot)
        request.marks = {cached} if cached > n + WORTH else set()

    def is_coming(self, running, request, cached: int) -> bool:
        """Is it worth while to wait for what a running request computes of its prompt?"""
        if not self.slots:
            return True
        n = common(np.asarray(running.ids), np.asarray(request.ids[:-1]))
        worth = n == len(request.ids) - 1 or n > cached + WORTH
        if not worth or n <= running.computed:
            return False
        running.marks.add(n)
        return True

    def up_to_mark(self, request, n: int) -> int:
        """Of its next n tokens, those up to where a snapshot is to be kept."""
        return min([n, *(mark - request.computed for mark in request.marks
                         if mark > request.computed)])

    def keep_if_marked(self, request) -> None:
        if request.computed in request.marks and self._hash(request) not in self.kept:
            slot = self._new()
            self.slots.copy(request.slot, slot)
            self.kept[self._hash(request)] = slot
            self.shared.add(slot)

    def stop(self, request) -> None:
        """What it owned becomes a snapshot, unless it is empty or there is one like it."""
        if not self.slots:
            return
        hashed = self._hash(request)
        if request.computed and hashed not in self.kept:
            self.kept[hashed] = request.slot
        else:
            self.free.append(request.slot)

    def _hash(self, request) -> int:
        """Of the tokens that its slot has seen."""
        n = request.computed
        return [*self._hashes(request, n // self.pages.size, n)][-1]

    def _new(self) -> int:
        if not self.free:
            self.free.append(self.kept.pop(next(iter(self.kept))))
            self.shared.discard(self.free[-1])
        return self.free.pop()
