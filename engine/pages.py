"""Attention over the pages of a KV cache, for the sampler.

`FlashPages` reads the pages in place, on CUDA; `GatheredPages` works everywhere. In both,
`forward` writes the keys and values of a step into the pages and returns the requests that
sample and their logits; `reset` forgets everything that is not in the pages, and has to
be called when weights have changed.

A step is a list of (request, n): the request computes its next n tokens. A request has
`ids` (its tokens), `computed` (how many of these are in its pages), `page_table` (these
pages) and, of a hybrid, `state`. Which request computes what is for sampler.py; who owns
which page, for engine/prefix.py.

Shapes: L layers with attention, P pages of S tokens, N tokens of a step, B requests, H
query and K key/value heads, G = H / K, E head_dim, T tokens of a row, V vocabulary.
"""
import contextlib
import os
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import delta
from engine.attention import StepLayout, causal, lower_right
from engine.device import free_bytes
from engine.linear import head_for, linear_float32
from engine.states import STATES_PER_WINDOW, States, state_bytes, zeros

decode, rule_step = None, delta.rule_step
if torch.cuda.is_available():  # Triton comes with torch for CUDA, on Linux
    with contextlib.suppress(ImportError):
        from engine.decode import decode
        from engine.decode import rule_step

MOST_GAP = 0.1  # of log-probabilities; rounding to bfloat16 makes about 0.01
# Numbers of requests for which a CUDA graph is made, up to the largest batch.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)


def attention_for(model, memory: int, window: int, batch: int):
    """What attends over pages for this model on its device, with a pool of `memory` bytes:
    an object of a class below, for `batch` requests of at most `window` tokens at once, or
    fewer if the states of a hybrid have no room for more. If FlashPages fails, or if its
    results are wrong, it is replaced by GatheredPages."""
    weight, states = model.lm_head.weight, None
    state = state_bytes(model.config, weight.itemsize)
    if state:
        whole = window_bytes(model.config, weight.itemsize, window)
        states = States(model, max(2, STATES_PER_WINDOW * memory // whole))
        memory -= states.count * state
        batch = min(batch, states.count - 1)  # one is left for a snapshot
    if can_flash(weight, model.config.head_dim):
        try:
            pool = new_pool(model, memory, FlashPages.page)
            attention = FlashPages(model, pool, states, window, batch)
            check(attention, window, batch)
            return attention
        except Exception as error:  # no kernel was compiled on this card before
            rank = os.environ.get("RANK", "0")  # all ranks wait for a slow one
            print(f"sampler of rank {rank}: pages are not read in place, which is slower: "
                  f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        pool = attention = None  # not inside `except`, where the error keeps them alive
    if weight.is_cuda:
        memory //= 2  # the other half is for its rows
    pool = new_pool(model, memory, GatheredPages.page)
    return GatheredPages(model, pool, states, batch)


def can_flash(weight: Tensor, head_dim: int) -> bool:
    kernels = decode is not None and weight.is_cuda and weight.dtype == torch.bfloat16
    return kernels and head_dim <= 256 and head_dim % 8 == 0


@torch.inference_mode()
def check(attention, window: int, batch: int) -> None:
    """Two prompts, three tokens after each, and one, beside a plain forward pass. The three
    see as many keys as a kernel may split. RuntimeError if they differ."""
    model, pool = attention.model, attention.pool
    count, size = pool.shape[2] - 1, pool.shape[3]
    half = count // 2
    length = min(264, window, half * size)
    probes, plain, got = [], [], []
    for first in (1, 1 + half)[:batch]:
        ids = [(first + i * i) % model.config.vocab_size for i in range(length)]
        pages = [first + i for i in range(-(-length // size))]
        probes.append(SimpleNamespace(all=ids, page_table=pages, state=1 + len(probes)))
        states = model.hidden(torch.tensor([ids], device=pool.device))
        plain.append(linear_float32(states[0, [-5, -2, -1]], model.lm_head.weight))
    for computed, end in pairwise((0, length - 4, length - 1, length)):
        for probe in probes:
            probe.ids, probe.computed = probe.all[:end], computed
        step = [(probe, end - computed) for probe in probes]
        got.append(attention.forward(step)[1])  # B V
    gap = torch.stack(got).log_softmax(-1) - torch.stack(plain, 1).log_softmax(-1)
    worst = gap.abs().mean(-1).max().item()  # 3 B V -> 3 B -> 1
    if not worst < MOST_GAP:
        raise RuntimeError(f"log-probabilities are wrong by {worst:.3f}")


def token_bytes(config, itemsize: int) -> int:
    """What the keys and values of a token take; `itemsize` is of the model's type."""
    layers = config.is_linear.count(False)
    return 2 * layers * config.num_key_value_heads * config.head_dim * itemsize


def window_bytes(config, itemsize: int, tokens: int) -> int:
    """What so many tokens take, with their states if the model is a hybrid."""
    states = STATES_PER_WINDOW * state_bytes(config, itemsize)
    return tokens * token_bytes(config, itemsize) + states


def spare_bytes(model, window: int, batch: int) -> int:
    """A pool for a program that has the device for itself: four windows per request, of
    which a cache hardly uses more, or a share of what is free."""
    weight = model.lm_head.weight
    share = 0.8 if weight.is_cuda else 0.2
    whole = window_bytes(model.config, weight.itemsize, window)
    return min(int(share * free_bytes()), 4 * batch * whole)


def new_pool(model, memory: int, size: int) -> Tensor:
    """The pool: (L, 2, P, S, K, E) zeros, as many pages of `size` tokens as `memory` bytes
    hold, but at least one, and page 0, which is for padding."""
    c, weight = model.config, model.lm_head.weight
    count = 1 + max(1, memory // (size * token_bytes(c, weight.itemsize)))
    layers = c.is_linear.count(False)
    shape = (layers, 2, count, size, c.num_key_value_heads, c.head_dim)
    return zeros(shape, weight, weight.dtype)


def flatten(step: list, pool: Tensor) -> tuple[list, list[Tensor]]:
    """The requests that sample after a step, as all their tokens are computed; and the step
    as four int64 tensors: its N tokens, their positions, their slots in the pool (page * S
    + offset), and the index among the N of the last token of each request that samples."""
    size = pool.shape[3]
    sampling, ids, positions, slots, last = [], [], [], [], []
    for request, n in step:
        end = request.computed + n
        ids += request.ids[request.computed:end]
        positions += range(request.computed, end)
        slots += [request.page_table[i // size] * size + i % size
                  for i in range(request.computed, end)]
        if end == len(request.ids):
            sampling.append(request)
            last.append(len(ids) - 1)
    return sampling, [torch.tensor(values, dtype=torch.int64, device=pool.device)
                      for values in (ids, positions, slots, last)]


class Prompts:
    """SDPA for requests that compute several tokens, one request after another, over keys
    and values gathered from the pages. Their tokens begin at `first` in the step."""

    def __init__(self, step: list, first: int, pool: Tensor):
        self.pool = pool
        self.parts = []  # (first token in the step, end, pages, tokens in them, mask)
        for request, n in step:
            length = request.computed + n
            pages = request.page_table[:-(-length // pool.shape[3])]
            table = torch.tensor(pages, device=pool.device)
            # A prompt from its first token on needs no mask: plain causal attention.
            mask = lower_right(n, length, pool.device) if request.computed else None
            self.parts.append((first, first + n, table, length, mask))
            first += n

    def attend(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """Write into `out` (N, H, E), where these requests are in q (N, H, E)."""
        for low, high, table, length, mask in self.parts:
            keys, values = self.pool[layer][:, table].flatten(1, 2)[:, :length]  # T K E
            out[low:high] = causal(q[low:high], keys, values, mask)[0].transpose(0, 1)
        return out


class GatheredPages:
    """SDPA over rows of keys and values, wherever FlashPages cannot be used.

    To gather the pages in every step would take longer than the attention itself. So each
    request that decodes has its keys and values a second time, side by side in a row. They
    are gathered once; each step then writes to the row and to the pages. All rows are
    equally long, and together no larger than the pool. A request that is too long for this
    has its pages gathered in every step, like prompts."""
    page = 16  # tokens of a page: small ones share more

    def __init__(self, model, pool: Tensor, states: States | None, batch: int):
        self.model, self.pool, self.states, self.batch = model, pool, states, batch
        self.room = pool.shape[2] * pool.shape[3]  # tokens of all rows
        self.reset()

    def reset(self) -> None:
        self.head = head_for(self.model.lm_head.weight, few=True)
        L, _, _, _, K, E = self.pool.shape
        self.rows = self.pool.new_zeros(L, 2, 0, K, 0, E)  # L 2 B K T E
        self.held = []  # for each row: the request, and how many of its tokens

    def forward(self, step: list) -> tuple[list, Tensor]:
        """The requests that sample, by row, and their logits, (B, V) float32."""
        decoding, others, most = self._arrange(step)
        sampling, (ids_N, pos_N, slots_N, last_B) = flatten(decoding + others, self.pool)
        count = len(decoding)
        prompts = Prompts(others, count, self.pool)
        row_B = torch.arange(count, device=pos_N.device)
        pos_B = pos_N[:count]
        later_BT = torch.arange(most, device=pos_N.device) > pos_B[:, None]
        mask_BT = torch.zeros_like(later_BT, dtype=self.pool.dtype)
        mask_B11T = mask_BT.masked_fill_(later_BT, -torch.inf)[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # N H E, N K E, N K E
            new = torch.stack((k, v))  # 2 N K E
            self.pool[layer].flatten(1, 2).index_copy_(1, slots_N, new)
            self.rows[layer][:, row_B, :, pos_B] = new[:, :count].transpose(0, 1)

            out = torch.empty_like(q)
            if count:
                keys, values = self.rows[layer][:, :count, :, :most]  # B K T E
                # Heads that share keys are queries at one position: B K G E.
                heads = q[:count].view(count, keys.shape[1], -1, q.shape[-1])
                seen = F.scaled_dot_product_attention(heads, keys, values, mask_B11T)
                out[:count] = seen.flatten(1, 2)  # B H E
            prompts.attend(layer, q, out)
            return out.transpose(0, 1)[None]  # 1 H N E

        state_B = torch.tensor([request.state for request, _ in decoding],
                               dtype=torch.int64, device=self.pool.device)
        layout = StepLayout(attend, delta.rule_step, self.states, state_B, others)
        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], layout)[0]
        return sampling, linear_float32(hidden_ND[last_B], self.head)

    def _arrange(self, step: list) -> tuple[list, list, int]:
        """The requests with one token, in the order of their rows, which hold their keys
        and values then; the others; and the most tokens that one of the rows has."""
        ones = [pair for pair in step if pair[1] == 1]
        ones.sort(key=lambda pair: pair[0].computed)
        while ones and len(ones) * (ones[-1][0].computed + 1) > self.room:
            ones.pop()  # the longest
        longest = ones[-1][0].computed + 1 if ones else 0
        # A request that has one of the first rows keeps it. The others take what is left.
        count, movers = len(ones), {request: (request, n) for request, n in ones}
        self.held += [(None, 0)] * (count - len(self.held))
        keep = [movers.pop(request, None) for request, _ in self.held[:count]]
        decoding = [pair or movers.popitem()[1] for pair in keep]

        self._make_room(count, longest)
        for row, (request, _) in enumerate(decoding):
            end = request.computed
            if self.held[row] != (request, end):
                seen = self.pool[:, :, request.page_table].flatten(2, 3)  # L 2 T K E
                self.rows[:, :, row, :, :end] = seen[:, :, :end].transpose(2, 3)
            self.held[row] = (request, end + 1)
        placed = {request for request, _ in decoding}
        return decoding, [pair for pair in step if pair[0] not in placed], longest

    def _make_room(self, count: int, length: int) -> None:
        """For `count` rows of `length` tokens, and for more of both, so that this is rare:
        all rows are gathered again."""
        L, _, B, K, T, E = self.rows.shape
        if count <= B and length <= T:
            return
        if count > B:
            B = max(count, 2 * B)
        if length > T:
            T = max(length, T * 3 // 2, 128)
        if B * T > self.room:
            B, T = count, min(T, self.room // count)
        self.rows = None  # now, so that old and new ones do not exist side by side
        self.rows = self.pool.new_zeros(L, 2, B, K, T, E)
        self.held = [(None, 0)] * len(self.held)


class FlashPages:
    """For CUDA. Requests that decode read their pages in place, with the kernel in
    engine/decode.py.

    The part of a step that decodes is replayed as a CUDA graph for the next larger batch
    size. The largest is captured first, as the others use its memory. The rows that fill a
    batch up write into page 0, which no request owns."""
    page = 256  # tokens of a page, and of a span of the kernel

    def __init__(self, model, pool: Tensor, states: States | None, window: int, batch: int):
        self.model, self.pool, self.states, self.batch = model, pool, states, batch
        self.columns = 3 + -(-window // pool.shape[3])  # token, length, state, page table
        self.graphs: dict[int, tuple] = {}  # batch size -> graph, its inputs, its logits
        self.memory = None  # shared by all graphs
        self.sizes = [size for size in GRAPH_SIZES if size < batch] + [batch]
        if pool.is_cuda:
            self.stream = torch.cuda.Stream()  # one for all: each has a workspace of cuBLAS
            with torch.inference_mode():
                for size in reversed(self.sizes):
                    self._capture(size)

    def reset(self) -> None:
        pass  # there is nothing beside the pages

    def forward(self, step: list) -> tuple[list, Tensor]:
        """The requests that sample, and their logits, (B, V) float32."""
        decoding = [pair for pair in step if pair[0].computed + 1 == len(pair[0].ids)]
        prompts = [pair for pair in step if pair[0].computed + 1 < len(pair[0].ids)]
        requests = [request for request, _ in decoding]
        logits = [self._replay(decoding)] if decoding else []
        if prompts:
            sampling, logits_BV = self._forward_prompts(prompts)
            requests += sampling
            logits.append(logits_BV)
        return requests, torch.cat(logits)

    def _forward_prompts(self, step: list) -> tuple[list, Tensor]:
        """Several tokens of each request, all in one pass: the requests that sample, and
        their logits."""
        sampling, (ids_N, pos_N, slots_N, last_B) = flatten(step, self.pool)
        prompts = Prompts(step, 0, self.pool)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = self._write(layer, slots_N, q, k, v)
            out = prompts.attend(layer, q, torch.empty_like(q))
            return out.transpose(0, 1)[None]  # 1 H N E

        layout = StepLayout(attend, rule_step, self.states, ids_N[:0], step)
        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], layout)[0]
        return sampling, linear_float32(hidden_ND[last_B], self.model.lm_head.weight)

    def _write(self, layer: int, slots_N: Tensor, q: Tensor, k: Tensor, v: Tensor):
        """Put new keys and values, each (1, K, N, E), into the pages: q as (N, H, E)."""
        for new, pool in zip((k, v), self.pool[layer]):
            new = new[0].transpose(0, 1)  # N K E
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots_N, new)
        return q[0].transpose(0, 1)

    def _inputs(self, step: list, rows: int) -> Tensor:
        """(rows, columns) int32, on the host: of each request its last token, length,
        state and page table. A row of no request has length 1, state 0 and page 0."""
        inputs = np.zeros((rows, self.columns), np.int32)
        inputs[:, 1] = 1
        for row, (request, _) in zip(inputs, step):
            row[:3] = request.ids[-1], len(request.ids), request.state
            row[3:3 + len(request.page_table)] = request.page_table
        return torch.from_numpy(inputs)

    def _replay(self, step: list) -> Tensor:
        """One token of each request: (B, V) logits."""
        B = next(size for size in self.sizes if size >= len(step))
        host = self._inputs(step, B)
        if not self.pool.is_cuda:  # in tests, without graphs
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
        """One token of each row of `inputs`, as above: (B, V) logits. The host looks at no
        value, so that a graph can be made of it."""
        size = self.pool.shape[3]
        ids_B, table_BP = inputs[:, 0], inputs[:, 3:].contiguous()
        pos_B = inputs[:, 1].long() - 1
        page_B = table_BP.gather(1, (pos_B // size)[:, None])[:, 0]
        slots_B = page_B * size + pos_B % size
        length_B = inputs[:, 1].contiguous()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = self._write(layer, slots_B, q, k, v)
            out = decode(q, *self.pool[layer], length_B, table_BP)
            return out.transpose(0, 1)[None]  # 1 H B E

        layout = StepLayout(attend, rule_step, self.states, inputs[:, 2].long(), [])
        hidden_BD = self.model.hidden(ids_B[None], pos_B[None], layout)[0]
        return linear_float32(hidden_BD, self.model.lm_head.weight)
