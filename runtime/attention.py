"""Attention where it is not simply causal over each row of a batch: over rows packed one
after another (training) and over the pages of a KV cache (sampling).

The model calls `attend(layer, q, k, v) -> out` in every layer: q and out have the shape
(1, H, N, E), k and v (1, K, N, E). `PackedRows.attend` is such a function.

For sampling there are two classes: `FlashPages` reads the pages in place and needs CUDA and
Triton, `GatheredRows` works everywhere, and `attention_for` chooses. Both have

    forward(step)   write the step's keys and values into the pages; return the requests
                    that sample, and their logits
    reset()         after a failure: forget everything that is not in the pages

A step is a list of (request, n): the request computes its next n tokens. Of a request they
read `ids` (its tokens), `computed` (how many of these are in its pages) and `pages` (its
page table). Which request computes what, and who owns which page, is for sampler.py.

Shapes: L layers, P pages of S tokens, N tokens of a step, B requests, H query and K
key/value heads, G = H / K, E head_dim, T tokens of a row, V vocabulary. Of packed rows: T
tokens, C that are computed, S tokens that are seen.
"""
import contextlib
import inspect
import os
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.prefixes import by_prefix

varlen_attn = decode = None
if torch.cuda.is_available():  # elsewhere they are of no use, and take a second to load
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn
        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
            varlen_attn = None  # before torch 2.12: SDPA, row by row
    with contextlib.suppress(ImportError):  # Triton comes with torch for CUDA, on Linux
        from runtime.decode import decode

FEW_SCORES = 1 << 18  # of a row; below, a CPU is faster in float32 (measured)
SLICE = 16  # decoding rows in one call of SDPA
HEAD_PART = 1024  # rows of the output matrix in one product
# Numbers of requests for which a CUDA graph is made.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


# --- training: packed rows ----------------------------------------------------------------

class PackedRows:
    """Rows of these lengths, one after another in `ids`. Each sees only itself.

    A token has the same hidden state in all rows that are equal up to it. So it is computed
    in one of them, and the others read its keys and values:

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
        self.starts = [starts_of(tensor(list(n))) for n in (self.new, self.all)]
        self.flash = varlen_attn is not None and torch.device(device).type == "cuda"
        # SDPA takes its last query for the n-th key. So rows that share need a mask.
        self.masks = [None] * len(counts)
        if not self.flash:
            self.masks = [None if n == all else lower_right(n, all, device)
                          for n, all in counts]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each row. Flash attention computes all rows in one call
        where there is a kernel for it, otherwise SDPA computes one row after another."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # C H E, C K E, C K E
        if self.keys is not None:
            k, v = Gather.apply(k, self.keys), Gather.apply(v, self.keys)  # S K E
        if self.flash and q.dtype in (torch.bfloat16, torch.float16):
            out = varlen_attn(q, k, v, *self.starts, max(self.new), max(self.all),
                              window_size=(-1, 0), enable_gqa=True)  # C H E
            return out.transpose(0, 1)[None]  # 1 H C E
        parts = zip(q.split(self.new), k.split(self.all), v.split(self.all), self.masks)
        return torch.cat([causal(*part) for part in parts], 2)  # 1 H C E


def lower_right(n: int, all: int, device) -> Tensor:
    """The mask of a row's last n tokens, each of which sees those up to itself of all. On a
    GPU it is only a mark for flash attention. On a CPU it is (n, all) float32, made once
    for all layers."""
    if torch.device(device).type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # takes a second to load

        return causal_lower_right(n, all)
    seen = torch.ones(n, all, dtype=torch.bool).tril(all - n)
    return torch.zeros(n, all).masked_fill_(~seen, -torch.inf)


class Gather(torch.autograd.Function):
    """Rows of x (C, K, E) by index. What many rows give back is summed in float32."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.count, ctx.dtype = len(x), x.dtype
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        index, = ctx.saved_tensors
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=torch.float32)
        return total.index_add_(0, index, grad.float()).to(ctx.dtype), None


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A row's last n tokens (n, H, E) attend to all T (T, K, E): (1, H, n, E)."""
    dtype = q.dtype
    if not q.is_cuda and len(q) * len(k) < FEW_SCORES:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True).to(dtype)


# --- sampling: pages ----------------------------------------------------------------------

def attention_for(model):
    """The class that computes attention over pages for this model on its device."""
    weight, head_dim = model.lm_head.weight, model.config.head_dim
    flash = (decode is not None and weight.is_cuda
             and torch.cuda.get_device_capability(weight.device) >= (8, 0)
             and weight.dtype in (torch.bfloat16, torch.float16)
             and head_dim <= 256)
    return FlashPages if flash else GatheredRows


def new_pool(model, memory: int | float, size: int) -> Tensor:
    """The pool: (L, 2, P, S, K, E) zeros, as many pages of `size` tokens as `memory` holds
    (bytes, or a share of the device's), and page 0, which is for padding. ValueError if it
    holds none. On a CPU it takes up memory only where it is written."""
    c, weight = model.config, model.lm_head.weight
    token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * weight.itemsize
    total = memory
    if isinstance(memory, float):
        device_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if weight.is_cuda:
            device_bytes = torch.cuda.get_device_properties(weight.device).total_memory
        total = int(memory * device_bytes)
    count = total // (size * token)
    if count < 1:
        raise ValueError(f"a KV pool of {memory} holds no page of {size} tokens, "
                         f"{size * token:,} bytes")

    shape = (c.num_hidden_layers, 2, count + 1, size, c.num_key_value_heads, c.head_dim)
    if weight.is_cuda:
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    zeros = np.zeros((count + 1) * size * token, np.uint8)  # torch would write its zeros
    return torch.from_numpy(zeros).view(weight.dtype).view(shape)


def flatten(step: list, pool: Tensor) -> list[Tensor]:
    """A step as four int64 tensors: its N tokens, their positions, their slots in the pool
    (page * S + offset), and the index among the N of the last token of each request that
    samples."""
    size = pool.shape[3]
    ids, positions, slots, last = [], [], [], []
    for request, n in step:
        end = request.computed + n
        ids += request.ids[request.computed:end]
        positions += range(request.computed, end)
        slots += [request.pages[i // size].index * size + i % size
                  for i in range(request.computed, end)]
        if end == len(request.ids):
            last.append(len(ids) - 1)
    return [torch.tensor(values, dtype=torch.int64, device=pool.device)
            for values in (ids, positions, slots, last)]


def sampling(step: list) -> list:
    """The requests that sample after this step: all their tokens are computed then."""
    return [request for request, n in step if request.computed + n == len(request.ids)]


def page_table(request, length: int, size: int) -> list[int]:
    """The pages of `size` tokens that hold the request's first `length` tokens."""
    return [page.index for page in request.pages[:-(-length // size)]]


class Prompts:
    """Requests that compute several tokens, which begin at the token `first` of the step.
    SDPA, one after another, over keys and values gathered from the pages."""

    def __init__(self, step: list, first: int, pool: Tensor):
        self.pool = pool
        self.parts = []  # (first token in the step, end, pages, tokens in them, mask)
        for request, n in step:
            length = request.computed + n
            table = torch.tensor(page_table(request, length, pool.shape[3]),
                                 device=pool.device)
            # A prompt from its first token on needs no mask: plain causal attention.
            mask = lower_right(n, length, pool.device) if request.computed else None
            self.parts.append((first, first + n, table, length, mask))
            first += n

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write into `out` (N, H, E), where these requests are in q (N, H, E)."""
        for low, high, table, length, mask in self.parts:
            keys, values = self.pool[layer][:, table].flatten(1, 2)[:, :length]  # T K E
            out[low:high] = causal(q[low:high], keys, values, mask)[0].transpose(0, 1)


class GatheredRows:
    """SDPA over rows of keys and values, for CPUs and where Triton is not.

    To gather the pages in every step would take longer than the attention itself. So each
    request that decodes has its keys and values a second time, side by side in a row. They
    are gathered once, when it gets the row; each step then writes to the row and to the
    pages. A row is only a copy and may be dropped at any time. One call of SDPA serves a
    slice of the rows.

    All rows are as long as the longest, and together no larger than the pool. A request
    that would need longer ones is gathered in every step, and so are prompts."""
    page = 16  # tokens of a page: small ones share more

    def __init__(self, model, pool: Tensor, window: int, batch: int):
        self.model, self.pool, self.window = model, pool, window
        self.most = pool.shape[2] * pool.shape[3]  # tokens of all rows together
        self.reset()

    def reset(self) -> None:
        L, _, _, _, K, E = self.pool.shape
        self.rows = self.pool.new_zeros(L, 2, 0, K, 0, E)  # L 2 B K T E
        self.held = []  # for each row: the request, and how many of its tokens the row has

    def forward(self, step: list) -> tuple[list, Tensor]:
        """The requests that sample, by row, and their logits, (B, V) float32."""
        decoding, others = self._arrange(step)
        step = decoding + others
        ids_N, pos_N, slots_N, last_B = flatten(step, self.pool)
        ones = len(decoding)
        row_1 = torch.arange(ones, device=pos_N.device)

        # Rows in slices: a row is padded only to the longest of its slice.
        slices = []  # (first row, end, mask)
        for low in range(0, ones, SLICE):
            high = min(low + SLICE, ones)
            longest = max(request.computed for request, _ in step[low:high]) + 1
            mask_BT = self._mask(pos_N[low:high], longest)
            slices.append((low, high, mask_BT[:, None, None]))  # B 1 1 T

        prompts = Prompts(others, ones, self.pool)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # N H E, N K E, N K E
            for new, pool, rows in zip((k, v), self.pool[layer], self.rows[layer]):
                pool.view(-1, *pool.shape[2:])[slots_N] = new
                if ones:
                    rows[row_1, :, pos_N[:ones]] = new[:ones]

            keys, values = self.rows[layer]  # B K T E
            out = torch.empty_like(q)
            K, E = k.shape[1:]
            for low, high, mask in slices:
                # The G heads that share keys are G queries at the same position.
                T = mask.shape[-1]
                got = F.scaled_dot_product_attention(
                    q[low:high].view(high - low, K, -1, E), keys[low:high, :, :T],
                    values[low:high, :, :T], attn_mask=mask)  # B K G E
                out[low:high] = got.reshape(high - low, -1, E)
            prompts.attend(layer, q, out)
            return out.transpose(0, 1)[None]  # 1 H N E

        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], attend)[0]
        # The matrix is larger than a CPU's cache: in parts the product takes half the time.
        parts = self.model.lm_head.weight.split(HEAD_PART)
        logits = [linear_float32(hidden_ND[last_B], part) for part in parts]
        return sampling(step), torch.cat(logits, -1)

    def _arrange(self, step: list) -> tuple[list, list]:
        """The requests that decode, in the order of their rows, which have their keys and
        values; and the others."""
        ones = [pair for pair in step if pair[1] == 1]
        ones.sort(key=lambda pair: pair[0].computed)  # as many as fit, the shortest first
        decoding = self._place([pair for count, pair in enumerate(ones, 1)
                                if count * (pair[0].computed + 1) <= self.most])
        if decoding:
            self._grow(len(decoding), max(request.computed + 1 for request, _ in decoding))
        for row, (request, _) in enumerate(decoding):
            if self.held[row] != (request, request.computed):
                self._gather(row, request)
            self.held[row] = (request, request.computed + 1)
        return decoding, [pair for pair in step if pair not in decoding]

    def _place(self, pairs: list) -> list:
        """The pairs by row. Who has one of the first rows keeps it."""
        row_of = {request: row for row, (request, _) in enumerate(self.held)}
        order = [None] * len(pairs)
        movers = []
        for pair in pairs:
            row = row_of.get(pair[0], len(pairs))
            if row < len(pairs):
                order[row] = pair
            else:
                movers.append(pair)
        return [movers.pop() if pair is None else pair for pair in order]

    def _grow(self, count: int, length: int) -> None:
        """Make room for `count` rows of `length` tokens, and for more, to copy rarely."""
        L, _, B, K, T, E = self.rows.shape
        if count <= B and length <= T:
            return
        if count > B:
            B = max(count, 2 * B)
        if length > T:
            T = min(max(length, T * 3 // 2, 128), self.window)
        if B * T > self.most:
            T = max(length, min(T, self.most // count))
            B = max(count, min(B, self.most // T))
        self.rows = None  # before the new ones are made; all are gathered again
        self.rows = self.pool.new_zeros(L, 2, B, K, T, E)
        self.held = [(None, 0)] * B

    def _gather(self, row: int, request) -> None:
        n = request.computed
        table = page_table(request, n, self.pool.shape[3])
        seen = self.pool[:, :, table].flatten(2, 3)[:, :, :n]  # L 2 n K E
        self.rows[:, :, row, :, :n] = seen.transpose(2, 3)

    def _mask(self, pos_N: Tensor, length: int) -> Tensor:
        """(N, length): what to add to the scores of queries at these positions."""
        later = torch.arange(length, device=pos_N.device) > pos_N[:, None]
        mask = torch.zeros_like(later, dtype=self.pool.dtype)
        return mask.masked_fill_(later, -torch.inf)


class FlashPages:
    """Reads the pages in place, for CUDA: one token of a request with a kernel of our own
    (runtime/decode.py), several with SDPA.

    A step in which every request has one token is replayed as a CUDA graph for the next
    larger batch size. The graphs are captured in the beginning, the largest first, whose
    memory the others use. The rows that fill a batch up write into page 0, which no request
    owns."""
    page = 256  # tokens of a page: few, and what a span of the kernel has

    def __init__(self, model, pool: Tensor, window: int, batch: int):
        self.model, self.pool = model, pool
        self.columns = 2 + -(-window // pool.shape[3])  # token, length, page table
        self.graphs: dict[int, tuple] = {}  # batch size -> graph, its inputs, its logits
        self.memory = None  # shared by all graphs
        enough = next((size for size in GRAPH_SIZES if size >= batch), GRAPH_SIZES[-1])
        self.sizes = [size for size in GRAPH_SIZES if size <= enough]
        if pool.is_cuda:
            with torch.inference_mode():
                for size in reversed(self.sizes):
                    self._capture(size)

    def reset(self) -> None:
        pass  # there is nothing beside the pages

    def forward(self, step: list) -> tuple[list, Tensor]:
        """The requests that sample, and their logits, (B, V) float32."""
        decoding = all(request.computed + 1 == len(request.ids) for request, _ in step)
        if decoding and len(step) <= self.sizes[-1]:
            return sampling(step), self._decode(step)

        ones = [pair for pair in step if pair[1] == 1]
        others = [pair for pair in step if pair[1] > 1]
        step = ones + others
        ids_N, pos_N, slots_N, last_B = flatten(step, self.pool)
        count = len(ones)
        length_B = pos_N[:count].int() + 1
        table_BP = self._inputs(ones, count)[:, 2:].to(self.pool.device).contiguous()
        prompts = Prompts(others, count, self.pool)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, slots_N, k, v)
            q = q[0].transpose(0, 1)  # N H E
            out = torch.empty_like(q)
            if count:
                out[:count] = decode(q[:count], *self.pool[layer], length_B, table_BP)
            prompts.attend(layer, q, out)
            return out.transpose(0, 1)[None]  # 1 H N E

        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], attend)[0]
        return sampling(step), linear_float32(hidden_ND[last_B], self.model.lm_head.weight)

    def _write(self, layer: int, slots_N: Tensor, k: Tensor, v: Tensor) -> None:
        for new, pool in zip((k, v), self.pool[layer]):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots_N, new[0].transpose(0, 1))

    def _inputs(self, step: list, rows: int) -> Tensor:
        """(rows, columns) int32, on the host: of each request its last token, its length
        and its page table. A row of no request has length 1 and page 0."""
        inputs = np.zeros((rows, self.columns), np.int32)
        inputs[:, 1] = 1
        for row, (request, _) in zip(inputs, step):
            row[0], row[1] = request.ids[-1], len(request.ids)
            row[2:2 + len(request.pages)] = [page.index for page in request.pages]
        return torch.from_numpy(inputs)

    def _decode(self, step: list) -> Tensor:
        """One token of each request: (B, V) logits."""
        B = next(size for size in self.sizes if size >= len(step))
        host = self._inputs(step, B)
        if not self.pool.is_cuda:  # without graphs, so that everything else has its tests
            return self._decode_batch(host)[:len(step)]
        graph, inputs, logits_BV = self.graphs[B]
        inputs.copy_(host)
        graph.replay()
        return logits_BV[:len(step)]

    def _capture(self, B: int) -> None:
        inputs = self._inputs([], B).to(self.pool.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what the first call allocates must not be captured
            self._decode_batch(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: thread_local.
        with torch.cuda.graph(graph, self.memory, capture_error_mode="thread_local"):
            logits_BV = self._decode_batch(inputs)
        self.memory = graph.pool()
        self.graphs[B] = (graph, inputs, logits_BV)

    def _decode_batch(self, inputs: Tensor) -> Tensor:
        """One token of each row of `inputs` (token, length, page table): (B, V) logits. A
        graph can be made of it, because the host looks at no value."""
        size = self.pool.shape[3]
        ids_B, length_B = inputs[:, 0], inputs[:, 1].contiguous()
        table_BP = inputs[:, 2:].contiguous()
        pos_B = length_B.long() - 1
        page_B = table_BP.gather(1, (pos_B // size)[:, None])[:, 0]
        slots_B = page_B * size + pos_B % size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, slots_B, k, v)
            out = decode(q[0].transpose(0, 1), *self.pool[layer], length_B, table_BP)
            return out.transpose(0, 1)[None]  # 1 H B E

        hidden_BD = self.model.hidden(ids_B[None], pos_B[None], attend)[0]
        return linear_float32(hidden_BD, self.model.lm_head.weight)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, of a matrix x of any type. Logits of about 20 would be rounded to
    0.06 in bfloat16."""
    if x.dtype != torch.float32 and x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def starts_of(lengths_B: Tensor) -> Tensor:
    """Where each of the rows begins, and the end of the last: (B + 1,) int32."""
    return F.pad(lengths_B.cumsum(0), (1, 0)).int()
