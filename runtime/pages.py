"""Attention over the pages of a KV cache, for the sampler.

There are two classes: `FlashPages` reads the pages in place and needs CUDA and Triton,
`GatheredRows` works everywhere, and `attention_for` chooses. Both have

    forward(step)   write the step's keys and values into the pages; return the requests
                    that sample, and their logits
    reset()         after a failure: forget everything that is not in the pages

A step is a list of (request, n): the request computes its next n tokens. Of a request they
read `ids` (its tokens), `computed` (how many of these are in its pages) and `pages` (its
page table). Which request computes what, and who owns which page, is for sampler.py.

Shapes: L layers, P pages of S tokens, N tokens of a step, B requests, H query and K
key/value heads, G = H / K, E head_dim, T tokens of a row, V vocabulary.
"""
import contextlib
import os
from itertools import takewhile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention import causal, linear_float32, lower_right

decode = None
if torch.cuda.is_available():  # Triton comes with torch for CUDA, on Linux
    with contextlib.suppress(ImportError):
        from runtime.decode import decode

SLICE = 16  # decoding rows in one call of SDPA
STEM = 64  # tokens that requests share, from which on these are attended to at once
HEAD_PART = 1024  # rows of the output matrix in one product
# Numbers of requests for which a CUDA graph is made.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


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


class Stem:
    """What several requests begin with: the full pages that they share, gathered once."""

    def __init__(self, pages: list, pool: Tensor):
        self.tokens = len(pages) * pool.shape[3]
        table = [page.index for page in pages]
        seen = pool[:, :, table].flatten(2, 3)  # L 2 T K E
        self.cache = seen.transpose(2, 3).contiguous()  # L 2 K T E
        self.last = pages[-1]


class GatheredRows:
    """SDPA over rows of keys and values, for CPUs and where Triton is not.

    To gather the pages in every step would take longer than the attention itself. So each
    request that decodes has its keys and values a second time, side by side in a row. They
    are gathered once, when it gets the row; each step then writes to the row and to the
    pages. What several requests begin with is not in their rows but in a stem. There all
    their queries are computed at once, because reading the keys is what takes the time. A
    softmax over two parts is the mean of the parts', weighted by the sums of their
    exponentials. One call of SDPA serves a slice of the rows, and one each stem.

    All rows are as long as the longest. With the stems they are no larger than the pool. A
    request that would need longer ones is gathered in every step, and so are prompts. Rows
    and stems are only copies, and may be dropped at any time."""
    page = 16  # tokens of a page: small ones share more

    def __init__(self, model, pool: Tensor, window: int, batch: int):
        self.model, self.pool, self.window = model, pool, window
        self.reset()

    def reset(self) -> None:
        L, _, _, _, K, E = self.pool.shape
        self.rows = self.pool.new_zeros(L, 2, 0, K, 0, E)  # L 2 B K T E
        # For each row: the request, the last page of its stem, how far it is computed.
        self.held = []
        self.stems = {}  # request -> its stem, or None

    def forward(self, step: list) -> tuple[list, Tensor]:
        """The requests that sample, by row, and their logits, (B, V) float32."""
        decoding, others = self._arrange(step)
        step = decoding + others
        ids_N, pos_N, slots_N, last_B = flatten(step, self.pool)
        ones = len(decoding)
        row_1 = torch.arange(ones, device=pos_N.device)
        place_1 = [self._own(request) - 1 for request, _ in decoding]  # in their rows
        place_1 = torch.tensor(place_1, dtype=torch.int64, device=pos_N.device)

        # Rows in slices: a row is padded only to the longest of its slice.
        slices = []  # (first row, end, mask)
        for low in range(0, ones, SLICE):
            high = min(low + SLICE, ones)
            mask_BT = self._mask(place_1[low:high])
            slices.append((low, high, mask_BT[:, None, None]))  # B 1 1 T

        stems = {}  # stem -> its rows
        for row, (request, _) in enumerate(decoding):
            if self.stems[request]:
                stems.setdefault(self.stems[request], []).append(row)
        prompts = Prompts(others, ones, self.pool)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # N H E, N K E, N K E
            for new, pool, rows in zip((k, v), self.pool[layer], self.rows[layer]):
                pool.view(-1, *pool.shape[2:])[slots_N] = new
                if ones:
                    rows[row_1, :, place_1] = new[:ones]

            out = torch.empty_like(q)
            sums = {}
            for low, high, mask in slices:
                own = self.rows[layer][:, low:high, :, :mask.shape[-1]]  # 2 B K T E
                out[low:high], sums[low] = attend_rows(q[low:high], *own, mask)
            if stems:
                sums_BH = torch.cat(list(sums.values()))
            for stem, rows in stems.items():
                got, sum_BH = attend_stem(q[rows], *stem.cache[layer])  # B H E
                share = (sum_BH - sums_BH[rows]).sigmoid()[..., None]  # of the stem
                out[rows] = out[rows].lerp(got, share.to(got.dtype))
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
        self._find_stems([request for request, _ in ones])
        room = self.pool.shape[2] * self.pool.shape[3]  # tokens of all rows and stems
        room -= sum(stem.tokens for stem in {*self.stems.values()} if stem)
        ones.sort(key=lambda pair: self._own(pair[0]))  # as many as fit, the shortest first
        decoding = self._place([pair for count, pair in enumerate(ones, 1)
                                if count * self._own(pair[0]) <= room])
        longest = max((self._own(request) for request, _ in decoding), default=0)
        self._make_room(len(decoding), longest, room)
        for row, (request, _) in enumerate(decoding):
            stem = self.stems[request]
            last = stem and stem.last
            if self.held[row] != (request, last, request.computed):
                self._gather(row, request)
            self.held[row] = (request, last, request.computed + 1)
        return decoding, [pair for pair in step if pair not in decoding]

    def _find_stems(self, requests: list) -> None:
        """A request keeps its stem as long as it decodes. One without looks for the pages
        that it shares with others just now. Stems take half of the room at most: if they
        begin alike, each has the beginning."""
        size = self.pool.shape[3]
        known = {request: self.stems.get(request) for request in requests}
        by_page = {stem.last: stem for stem in known.values() if stem}
        half = self.pool.shape[2] * size // 2
        room = half - sum(stem.tokens for stem in by_page.values())
        for request in requests:
            if known[request] or self.pool.is_cuda:
                continue
            shared = list(takewhile(lambda page: page.users > 1,
                                    request.pages[:request.computed // size]))
            tokens = len(shared) * size
            if tokens < STEM:
                continue
            if shared[-1] not in by_page and tokens <= room:
                room -= tokens
                self._make_room(0, 0, half + room)
                by_page[shared[-1]] = Stem(shared, self.pool)
            longest = (by_page[page] for page in reversed(shared) if page in by_page)
            known[request] = next(longest, None)
        self.stems = known

    def _own(self, request) -> int:
        """How many tokens its row has in this step."""
        stem = self.stems[request]
        return request.computed + 1 - (stem.tokens if stem else 0)

    def _place(self, pairs: list) -> list:
        """The pairs by row. Who has one of the first rows keeps it."""
        row_of = {request: row for row, (request, _, _) in enumerate(self.held)}
        order = [None] * len(pairs)
        movers = []
        for pair in pairs:
            row = row_of.get(pair[0], len(pairs))
            if row < len(pairs):
                order[row] = pair
            else:
                movers.append(pair)
        return [movers.pop() if pair is None else pair for pair in order]

    def _make_room(self, count: int, length: int, most: int) -> None:
        """For `count` rows of `length` tokens, and for more, to copy rarely. All rows
        have at most `most` tokens together."""
        L, _, B, K, T, E = self.rows.shape
        if count <= B and length <= T and B * T <= most:
            return
        if count > B:
            B = max(count, 2 * B)
        if length > T:
            T = min(max(length, T * 3 // 2, 128), self.window)
        if B * T > most:
            T = max(length, min(T, most // max(count, 1)))
            B = max(count, min(B, most // max(T, 1)))
        self.rows = None  # before the new ones are made; all are gathered again
        self.rows = self.pool.new_zeros(L, 2, B, K, T, E)
        self.held = [(None, None, 0)] * B

    def _gather(self, row: int, request) -> None:
        begin, end = request.computed + 1 - self._own(request), request.computed
        size = self.pool.shape[3]
        table = page_table(request, end, size)[begin // size:]  # a stem ends with a page
        seen = self.pool[:, :, table].flatten(2, 3)[:, :, :end - begin]  # L 2 n K E
        self.rows[:, :, row, :, :end - begin] = seen.transpose(2, 3)

    def _mask(self, place_B: Tensor) -> Tensor:
        """(B, T): what to add to the scores of queries at these places of their rows."""
        later = torch.arange(place_B.max() + 1, device=place_B.device) > place_B[:, None]
        mask = torch.zeros_like(later, dtype=self.pool.dtype)
        return mask.masked_fill_(later, -torch.inf)


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple:
    """One query per head and row (B, H, E), keys and values (B, K, T, E): (B, H, E), and on
    a CPU the logarithms of the sums of the exponentials, (B, H) float32. It is what SDPA
    calls there; but SDPA does not say the sums."""
    B, H, E = q.shape
    q = q.view(B, keys.shape[1], -1, E)  # heads that share keys are queries at one position
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(
            B, H, E), None
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask)
    return out.reshape(B, H, E), sums.reshape(B, H)


def attend_stem(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, E) that see the same keys and values (K, T, E): as attend_rows."""
    B, H, E = q.shape
    K = len(keys)
    q = q.view(B, K, -1, E).transpose(0, 1).reshape(1, K, -1, E)  # 1 K B*G E
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys[None], values[None])
    out = out.view(K, B, -1, E).transpose(0, 1).reshape(B, H, E)
    return out, sums.view(K, B, -1).transpose(0, 1).reshape(B, H)


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
            self.stream = torch.cuda.Stream()  # one for all: each has a workspace of cuBLAS
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
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # the first call compiles and allocates more
            self._decode_batch(inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: thread_local.
        with torch.cuda.graph(graph, self.memory, self.stream, "thread_local"):
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
