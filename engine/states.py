"""The states of delta nets, for the sampler: who owns which, and where they are kept.

A running request owns a slot: of each linear layer its matrix, and the last inputs of its
convolution. Each token changes it in place, so it cannot be cut back to a prefix as pages
can. A snapshot is a slot that nobody changes, and that a request may continue. A slot of
Qwen3.5-4B takes as much as the keys and values of 1,570 tokens, so snapshots are rare. One
is kept

    where a request stops: its slot, as it is, and who continues it takes it over
    where a waiting request agrees with a prompt that is being computed: a copy, and who
    continues it copies it once more
    where the pages of a request agree with more than WORTH tokens beyond its best snapshot

A request uses the longest snapshot within the tokens that its pages agree with. Of many,
the least recently used is replaced. Shapes: L linear layers, S slots; more in
engine/delta.py.
"""
import contextlib

import numpy as np
import torch
from torch import Tensor

from engine.delta import Runs, convolve, rule, step, taps
from engine.packing import common

if torch.cuda.is_available():  # Triton comes with torch for CUDA, on Linux
    with contextlib.suppress(ImportError):
        from engine.decode import step
WORTH = 64  # tokens; a snapshot saves at least these
PER_WINDOW = 3  # slots for each window of the KV cache


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
    """`windows` (L, S, W - 1, C) and `matrices` (L, S, H, K, V). Slot 0 is for padding."""

    def __init__(self, model, count: int):
        layers, weight = model.config.is_linear.count(True), model.lm_head.weight
        window, matrix = shapes(model.config)
        self.count = count
        self.windows = zeros((layers, count + 1, *window), weight, weight.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.matrices = zeros((layers, count + 1, *matrix), weight, wide)

    def copy(self, source: int, target: int) -> None:
        for states in (self.windows, self.matrices):
            states[:, target] = states[:, source]

    def clear(self, slot: int) -> None:
        for states in (self.windows, self.matrices):
            states[:, slot] = 0


class StepRows:
    """The tokens of a step of the sampler: one each of B requests that decode, whose slots
    are `decoding` (B,), then those of `prompts`, a list of (request, tokens). It has the
    methods of engine.attention.Rows; `attend` is given."""

    def __init__(self, attend, slots: Slots | None, decoding: Tensor, prompts: list):
        self.attend, self.slots, self.decoding = attend, slots, decoding
        self.prompts = None
        if not prompts or slots is None:
            return
        requests, counts = zip(*prompts)
        device, width = decoding.device, slots.windows.shape[2]
        self.prompts = torch.tensor([r.slot for r in requests], device=device)  # R
        total, starts = sum(counts), np.cumsum((0, *counts))
        before = np.arange(total) - 1
        before[starts[:-1]] = -1
        self.runs = Runs(before, device)
        # After the tokens stand the windows of their slots, which they follow.
        ends = total + width * np.arange(1, len(counts) + 1)
        before = np.append(before, np.arange(total, ends[-1]) - 1)
        before[starts[:-1]] = ends - 1
        index = taps(before, len(before), width + 1)
        self.taps = torch.as_tensor(index[:total], device=device)  # N W
        self.last = torch.as_tensor(index[starts[1:] - 1, 1:], device=device)  # R W-1

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        x, windows, outs = x[0], self.slots.windows[layer], []
        B = len(self.decoding)
        if B:
            seen = torch.cat((windows[self.decoding], x[:B, None]), 1)  # B W C
            windows.index_copy_(0, self.decoding, seen[:, 1:])
            outs.append((seen * weight[:, 0].T).sum(1))
        if self.prompts is not None:
            seen = torch.cat((x[B:], windows[self.prompts].flatten(0, 1)))
            outs.append(convolve(seen, self.taps, weight))
            windows.index_copy_(0, self.prompts, seen[self.last])
        return torch.cat(outs)[None]  # 1 N C

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        inputs, matrices, outs = [x[0] for x in inputs], self.slots.matrices[layer], []
        B = len(self.decoding)
        if B:
            outs.append(step(matrices, self.decoding, *(x[:B] for x in inputs)))
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
        # slot -> its tokens: the hash of their full pages, and those after. The least
        # recently used first.
        self.kept: dict[int, tuple[bytes, tuple]] = {}
        self.copied: set[int] = set()  # those that several requests may continue
        self.after: dict[bytes, dict[tuple, int]] = {}  # the same, by the hash

    def match(self, request, cached: int) -> tuple[int, int]:
        """Its longest snapshot of at most `cached` tokens: how many, and in which slot."""
        if not self.slots:
            return cached, 0
        size = self.pages.size
        for full in range(cached // size, -1, -1):
            after = self.after.get(self.pages.hash(request, full), {})
            rest = tuple(request.ids[full * size:cached])
            fitting = [tail for tail in after if tail == rest[:len(tail)]]
            if fitting:
                tail = max(fitting, key=len)
                slot = after[tail]
                self.kept[slot] = self.kept.pop(slot)
                return full * size + len(tail), slot
        return 0, 0

    def start(self, request, n: int, slot: int, cached: int) -> None:
        """Give it a slot, which continues the snapshot `slot` of its first n tokens."""
        if not self.slots:
            return
        if n and slot not in self.copied:
            self._forget(slot)
            request.slot = slot
        elif n:
            request.slot = self._new()
            self.slots.copy(slot, request.slot)
        else:
            request.slot = self._new()
            self.slots.clear(request.slot)
        request.marks = {cached} if cached > n + WORTH else set()

    def is_coming(self, running, request, cached: int) -> bool:
        """Is it worth while to wait for what a running request computes of its prompt?"""
        if not self.slots:
            return True
        n = common(np.asarray(running.ids), np.asarray(request.ids[:-1]))
        worth = n == len(request.ids) - 1 or n > cached + WORTH
        if not worth or not running.computed < n < len(running.ids):
            return False
        running.marks.add(n)
        return True

    def most(self, request, n: int) -> int:
        """Of its next n tokens, those up to where a snapshot is to be kept."""
        return min([n, *(mark - request.computed for mark in request.marks
                         if mark > request.computed)])

    def advanced(self, request) -> None:
        """Keep a snapshot if it was asked for here."""
        if request.computed in request.marks:
            slot = self._new()
            self.slots.copy(request.slot, slot)
            if self._keep(slot, request):
                self.copied.add(slot)

    def stop(self, request) -> None:
        """What it owned becomes a snapshot."""
        if self.slots:
            self._keep(request.slot, request)

    def _keep(self, slot: int, request) -> bool:
        """Unless it is empty, or there is one like it."""
        full = request.computed // self.pages.size
        hashed = self.pages.hash(request, full)
        tail = tuple(request.ids[full * self.pages.size:request.computed])
        if not request.computed or tail in self.after.get(hashed, {}):
            self.free.append(slot)
            return False
        self.kept[slot] = hashed, tail
        self.after.setdefault(hashed, {})[tail] = slot
        return True

    def _new(self) -> int:
        if self.free:
            return self.free.pop()
        slot = next(iter(self.kept))
        self._forget(slot)
        return slot

    def _forget(self, slot: int) -> None:
        self.copied.discard(slot)
        hashed, tail = self.kept.pop(slot)
        del self.after[hashed][tail]
        if not self.after[hashed]:
            del self.after[hashed]
