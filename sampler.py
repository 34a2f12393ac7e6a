"""Sampling with a paged KV cache: requests come and go at any time, one batch serves them all.

`generate` is a coroutine. It queues its request and waits; a single engine task touches the model
and repeats one step until nothing is left to do. A tree of coroutines needs no other scheduler.

Pages. Keys and values live in a pool of fixed pages; a request owns a table of them, reserves
nothing ahead, and holds nothing while it waits for its children: a finished request leaves its
pages behind as a cache, and the least recently used go when a page is wanted.

The chain. A full page is found again by the hash of all tokens up to its end, so equal prefixes
are the same pages, counted by reference: a group computes its prompt once, children their system
prompt once, a node that returns with an observation only that observation. Where the chain ends,
the page that agrees furthest with what follows is copied as far as it agrees. A request whose
prefix another one is computing at the moment waits for it.

The step. Every running request feeds the one token it sampled last, and beside them up to
STEP_TOKENS tokens of prompts are computed, oldest request first, all of them in one forward pass
without padding. Whoever has fed all its tokens samples one. Out of pages, the youngest request
is put back into the queue; what it sampled is kept and computed again later. The oldest is never
put back and the queue is served in order, so everybody is served.

Attention is written twice, and `attention_for` decides: flash attention over the pages themselves
on a GPU, with decode steps as CUDA graphs; elsewhere SDPA over rows gathered from the pages.

Randomness belongs to the request: the uniforms for its tokens come from its key alone, so neither
the order of arrival nor the batch, nor a preemption, decides what is sampled.

Left out: swapping pages to the host, speculative decoding, a scheduler that weighs requests,
several devices, quantised caches. Sources: PagedAttention (arXiv 2309.06180), continuous batching
(Orca, OSDI 2022), chunked prefill (Sarathi, 2308.16369).

Shapes: P pages of S tokens, N tokens of a step, B requests, L layers, H query and K key/value
heads, G = H / K, E head_dim, T tokens of a row, V vocabulary.
"""
import asyncio
import hashlib
import os
import time
from array import array
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Qwen3, varlen_attn
from tree import Completion

STEP_TOKENS = 2048  # of prompts in a step, beside one token of every request that decodes
SLICE = 16  # rows that decode in one call of SDPA
HEAD_PART = 1024  # rows of the output matrix in one product, on a CPU
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch sizes of CUDA graphs


class SamplerError(RuntimeError):
    """One request could not be served; the others go on. A failure of the machine."""


@dataclass(eq=False)
class Page:
    index: int  # in the pool
    parent: bytes  # chain of all tokens before it
    tokens: list[int] = field(default_factory=list)  # those whose keys and values it holds
    chain: bytes = b""  # of all tokens up to its end, once it is full
    users: int = 1  # requests that have it in their table


@dataclass(eq=False)
class Request:
    ids: list[int]  # the prompt, then what was sampled
    max_tokens: int
    temperature: float
    top_p: float
    stop: frozenset[int]
    uniforms: np.ndarray  # one number in [0, 1) for each token it may sample
    done: asyncio.Future
    number: int = 0  # of arrival
    prompt: int = 0  # length of the prompt
    reused: int = -1  # tokens of it that were not computed again; -1: not yet admitted
    computed: int = 0  # so many of ids have their keys and values in its pages
    pages: list[Page] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)  # of its full pages, as far as asked for
    logprobs: list[float] = field(default_factory=list)


Step = list[tuple[Request, int]]  # who computes how many tokens


class Sampler:
    """Owns a copy of the model and the KV cache; see the module's docstring.

    `memory` is the size of the pool: bytes (int) or a share of the device's memory (float).
    `batch` requests run at once, each with at most `window` tokens, prompt included. `page` is
    the tokens of a page (default: what the attention is fastest with).

    `stats`: tokens `computed`, `reused` from the cache and `sampled`; `steps` and how many of them
    had which number of requests (`batches`); `preemptions`; `seconds` in steps, which are those
    with a prompt in them (`prefill`) and the others (`decode`); and `idle`, between two steps.
    """

    def __init__(self, model: Qwen3, memory: int | float = 0.2, batch: int = 64,
                 window: int | None = None, dtype: torch.dtype | None = None,
                 page: int | None = None):
        c = model.config
        self.model = model.merged_copy(dtype)
        weight = self.model.lm_head.weight
        attention = attention_for(weight.device, weight.dtype, c.head_dim)
        size = page or attention.page
        token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * weight.itemsize
        count = pool_bytes(memory, weight.device) // (size * token)
        if count < 1:
            raise ValueError(f"a KV pool of {memory} holds no page of {size} tokens, "
                             f"{size * token:,} bytes")
        self.window = min(window or c.max_position_embeddings, c.max_position_embeddings)
        self.batch = batch
        self.pool = zeros((c.num_hidden_layers, 2, count + 1, size, c.num_key_value_heads,
                           c.head_dim), weight.dtype, weight.device)  # page 0 is for padding
        self.pages = Pages(count, size)
        self.attention = attention(self.model, self.pool, self.window)
        self.waiting: list[Request] = []  # both in order of arrival
        self.running: list[Request] = []
        self.engine: asyncio.Task | None = None
        self.arrivals = 0
        self.rested: float | None = None  # when the last step ended
        self.stats = {"computed": 0, "reused": 0, "sampled": 0, "steps": 0, "preemptions": 0,
                      "batches": Counter(), "seconds": 0.0, "prefill": 0.0, "decode": 0.0,
                      "idle": 0.0}

    def load(self, model: Qwen3) -> None:
        """Take over the weights of `model` (same shape) and forget every cached page."""
        if self.running or self.waiting:
            raise RuntimeError("weights cannot change under running requests")
        with torch.no_grad():
            for mine, (_, theirs) in zip(self.model.parameters(), model.merged(), strict=True):
                mine.copy_(theirs)
        self._empty()

    async def generate(self, ids: list[int], max_tokens: int, temperature: float = 1.0,
                       stop=(), key=(), top_p: float = 1.0) -> Completion:
        """Sample after `ids` until a stop id (included), max_tokens or the end of the window.

        temperature 0 is greedy; top_p < 1 samples from the most likely tokens that together have
        that probability, and is for evaluation: training scores what it samples. `logprobs` are
        those of the untempered, untruncated distribution. `key` seeds the sampling. Raises
        SamplerError for a request that cannot be served."""
        if not ids or max_tokens < 1:
            raise SamplerError("a request needs at least one prompt token and one to sample")
        if not 0 <= min(ids) <= max(ids) < self.model.config.vocab_size:
            raise SamplerError(f"ids outside the vocabulary of {self.model.config.vocab_size}")
        if not (temperature >= 0 and 0 < top_p <= 1):
            raise SamplerError(f"temperature {temperature} is negative, or top_p {top_p} not in "
                               "(0, 1]")
        pool = self.pages.count * self.pages.size
        room = min(self.window, pool) - len(ids)
        if room < 1:
            limit = (f"window of {self.window}" if self.window <= pool
                     else f"KV pool of {pool}")
            raise SamplerError(f"a prompt of {len(ids)} tokens leaves no room in the {limit}")
        seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest())
        n = min(max_tokens, room)
        self.arrivals += 1
        request = Request(list(ids), n, temperature, top_p, frozenset(stop),
                          np.random.Generator(np.random.Philox(key=seed)).random(n),
                          asyncio.get_running_loop().create_future(), self.arrivals, len(ids))
        self.waiting.append(request)
        if self.engine is None or self.engine.done():
            self.engine = asyncio.create_task(self._run())
        try:
            await request.done
        except asyncio.CancelledError:  # if it runs, the engine drops it before its next step
            if request in self.waiting:
                self.waiting.remove(request)
            raise
        new = request.ids[request.prompt:]
        end = "stop" if new[-1] in request.stop else "length" if max_tokens <= room else "window"
        return Completion("", tuple(new), tuple(request.logprobs), end,
                          {"prompt": request.prompt, "reused": request.reused,
                           "sampled": len(new)})

    # --- the engine: everything below runs in one task ---------------------------------------

    async def _run(self) -> None:
        try:
            while self.waiting or self.running:
                with torch.inference_mode():
                    self._step()
                await asyncio.sleep(0)  # let the rollouts run: they bring the next requests
        except BaseException as error:  # a broken engine must not leave anybody waiting
            lost = self.waiting + self.running
            self.waiting, self.running = [], []
            self._empty()
            self.attention.reset()
            for request in lost:
                if not request.done.done():
                    request.done.set_exception(SamplerError(f"the engine failed: {error!r}"))
            if not isinstance(error, Exception):
                raise

    def _empty(self) -> None:
        self.pages = Pages(self.pages.count, self.pages.size)
        self.rested = None

    def _step(self) -> None:
        """Admit, plan, one forward pass, sample, retire."""
        start = time.perf_counter()
        if self.rested is not None:
            self.stats["idle"] += start - self.rested
        self.waiting = [r for r in self.waiting if not r.done.cancelled()]
        for request in [r for r in self.running if r.done.cancelled()]:
            self._leave(request)
        self._admit()
        step = self._plan()
        if step:
            step = self.attention.arrange(step)
            logits_BV = self.attention.forward(step)  # of those that have fed all their tokens
            for request, n in step:
                self.pages.advance(request, n)
            sampling = [r for r, _ in step if r.computed == len(r.ids)]
            if sampling:
                for request, token, logprob in zip(sampling, *self._sample(logits_BV, sampling)):
                    self._append(request, int(token), float(logprob))
            self.stats["computed"] += sum(n for _, n in step)
            self.stats["steps"] += 1
            self.stats["batches"][len(step)] += 1
        self.rested = time.perf_counter()
        kind = "prefill" if any(n > 1 for _, n in step) else "decode"
        self.stats[kind] += self.rested - start
        self.stats["seconds"] += self.rested - start

    def _admit(self) -> None:
        """Start waiting requests in their order while there is room for their whole prompts, for
        those that are still being computed, and for a page more of each that runs. A request
        waits if one that runs is just computing more of its prefix than the cache has."""
        size = self.pages.size
        for request in list(self.waiting):
            if len(self.running) == self.batch:
                break
            found, partial, n = self.pages.match(request)
            have = len(found) * size + n
            wanted = request.ids[:have + 1]
            if len(wanted) < len(request.ids) and any(
                    len(r.ids) - r.computed > 1 and r.ids[have:have + 1] == wanted[have:]
                    and r.ids[:have + 1] == wanted for r in self.running):
                continue
            promised = sum(-(-len(r.ids) // size) - len(r.pages) + 1 for r in self.running)
            need = -(-len(request.ids) // size) - len(found) + promised
            for page in found:
                self.pages.take(page)
            if partial is not None:
                self.pages.take(partial)  # or its own copy might evict it
                if need > self.pages.available():
                    self.pages.give(partial)
                    partial, have = None, len(found) * size
            if need > self.pages.available():
                for page in reversed(found):
                    self.pages.give(page)
                break  # in order: whoever comes later waits, too
            request.pages, request.computed = found, len(found) * size
            if partial is not None:
                target = self.pages.new(request)
                self.pool[:, :, target.index, :n] = self.pool[:, :, partial.index, :n]
                self.pages.advance(request, n)
                self.pages.give(partial)
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.number)
            self.stats["reused"] += have
            if request.reused < 0:
                request.reused = have

    def _plan(self) -> Step:
        """Who computes how much, with pages for it; the youngest give theirs if none are left."""
        step, budget = [], STEP_TOKENS
        while len(step) < len(self.running):
            request = self.running[len(step)]
            missing = len(request.ids) - request.computed
            n = 1 if missing == 1 else min(missing, budget)
            if n == 0:
                break
            while len(request.pages) * self.pages.size < request.computed + n:
                if self.pages.available():
                    self.pages.new(request)
                    continue
                youngest = self.running[-1]
                self._leave(youngest)
                insort(self.waiting, youngest, key=lambda r: r.number)
                self.stats["preemptions"] += 1
                if youngest is request:
                    return step
            step.append((request, n))
            budget -= n if missing > 1 else 0
        return step

    def _leave(self, request: Request, forget: bool = False) -> None:
        """Take a request off the batch; its pages stay as a cache unless to be forgotten."""
        self.running.remove(request)
        for page in reversed(request.pages):  # so that a prefix is evicted after its continuation
            self.pages.give(page, forget)
            if forget and not page.users:
                self.pool[:, :, page.index] = 0  # a mask does not keep NaN from the next user
        request.pages, request.computed = [], 0

    def _append(self, request: Request, token: int, logprob: float) -> None:
        """Note what a request sampled, and end it where it ends."""
        if not np.isfinite(logprob):
            self._leave(request, forget=True)
            self.attention.reset()
            request.done.set_exception(SamplerError("the model's logits are not finite"))
            return
        self.stats["sampled"] += 1
        request.ids.append(token)
        request.logprobs.append(logprob)
        if token in request.stop or len(request.ids) - request.prompt == request.max_tokens:
            self._leave(request)
            if not request.done.done():
                request.done.set_result(None)

    def _sample(self, logits_BV: Tensor, requests: list[Request]):
        """Tokens by inverting the cumulative distribution at each request's own uniform, and
        their log-probabilities in the untempered distribution. The one host sync of a step."""
        device = logits_BV.device
        u_B, heat_B, top_p_B = torch.tensor(
            [(r.uniforms[len(r.logprobs)], r.temperature, r.top_p) for r in requests],
            dtype=torch.float64).to(device).unbind(1)
        logprobs_BV = logits_BV.log_softmax(-1)
        new_B = logits_BV.argmax(-1)
        if any(r.temperature > 0 for r in requests):
            heat_B1 = heat_B.clamp(min=1e-6)[:, None].float()
            probs_BV = (logprobs_BV / heat_B1).softmax(-1)
            if any(r.top_p < 1 for r in requests):
                probs_BV = truncate(probs_BV, top_p_B[:, None])
            total_BV = probs_BV.cumsum(-1, dtype=torch.float64)
            u_B1 = (u_B * total_BV[:, -1])[:, None]  # the sum is 1 but for rounding
            drawn_B = torch.searchsorted(total_BV, u_B1, right=True)[:, 0]
            drawn_B = drawn_B.clamp(max=logits_BV.shape[-1] - 1)
            new_B = torch.where(heat_B > 0, drawn_B, new_B)
        logprobs_B = logprobs_BV.gather(1, new_B[:, None])[:, 0]
        return torch.stack((new_B.double(), logprobs_B.double())).cpu().numpy()  # 2 B


def truncate(probs_BV: Tensor, top_p_B1: Tensor) -> Tensor:
    """Zero all but the fewest most likely tokens that have top_p together (Holtzman 2020)."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(-1, dtype=torch.float64) - sorted_BV
    return torch.zeros_like(probs_BV).scatter(
        1, order_BV, torch.where(before_BV < top_p_B1, sorted_BV, 0))


# ---------------------------------------------------------------------------------------------
# Pages

class Pages:
    """Which page holds what: numbers only, the pool's tensor is not here.

    A page is free, in use (users > 0), or idle: a cache entry that nobody uses, evicted in the
    order of `idle`. `full` finds a full page by its chain; `after` finds what continues a chain,
    full or not, to copy from."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count, 0, -1))
        self.idle: dict[int, Page] = {}  # least recently used first
        self.full: dict[bytes, Page] = {}
        self.after: dict[bytes, dict[int, Page]] = {}

    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def chain(self, request: Request, i: int) -> bytes:
        """Hash of the request's tokens up to the end of page i; nothing before the first."""
        chains, S = request.chains, self.size
        while len(chains) <= i:
            page = array("i", request.ids[len(chains) * S:(len(chains) + 1) * S]).tobytes()
            before = chains[-1] if chains else b""
            chains.append(hashlib.blake2b(before + page, digest_size=16).digest())
        return chains[i] if i >= 0 else b""

    def match(self, request: Request) -> tuple[list[Page], Page | None, int]:
        """The full pages that hold the request's beginning, and a page that holds n more tokens.
        The last token is left to compute: its logits are wanted."""
        found, S, last = [], self.size, len(request.ids) - 1
        while (len(found) + 1) * S <= last:
            page = self.full.get(self.chain(request, len(found)))
            if page is None:
                break
            found.append(page)
        rest = request.ids[len(found) * S:min((len(found) + 1) * S, last)]
        best, n = None, 0
        for page in self.after.get(self.chain(request, len(found) - 1), {}).values():
            if n < len(rest) and page.tokens[:n + 1] == rest[:n + 1]:
                best = page
                while n < min(len(rest), len(page.tokens)) and page.tokens[n] == rest[n]:
                    n += 1
        return found, best, n

    def new(self, request: Request) -> Page:
        """One more page for the request; there must be one available."""
        if self.free:
            index = self.free.pop()
        else:
            index = next(iter(self.idle))
            self._forget(self.idle.pop(index))
        page = Page(index, self.chain(request, len(request.pages) - 1))
        self.after.setdefault(page.parent, {})[index] = page
        request.pages.append(page)
        return page

    def advance(self, request: Request, n: int) -> None:
        """The request's next n tokens are in its pages now."""
        end = request.computed + n
        while request.computed < end:
            i = request.computed // self.size
            page = request.pages[i]
            upto = min(end, (i + 1) * self.size)
            page.tokens += request.ids[request.computed:upto]
            request.computed = upto
            if len(page.tokens) == self.size:
                page.chain = self.chain(request, i)
                self.full.setdefault(page.chain, page)

    def take(self, page: Page) -> None:
        self.idle.pop(page.index, None)
        page.users += 1

    def give(self, page: Page, forget: bool = False) -> None:
        """One user less. Nobody looks for an empty page, nor for the second of its kind."""
        page.users -= 1
        if page.users:
            return
        if forget or not page.tokens or page.chain and self.full.get(page.chain) is not page:
            self._forget(page)
            self.free.append(page.index)
        else:
            self.idle[page.index] = page

    def _forget(self, page: Page) -> None:
        siblings = self.after[page.parent]
        del siblings[page.index]
        if not siblings:
            del self.after[page.parent]
        if self.full.get(page.chain) is page:
            del self.full[page.chain]


# ---------------------------------------------------------------------------------------------
# Attention over pages, twice

def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int):
    """The one place that decides how attention is computed."""
    flash = (varlen_attn is not None and device.type == "cuda"
             and torch.cuda.get_device_capability(device) >= (8, 0)
             and dtype in (torch.bfloat16, torch.float16)
             and head_dim % 8 == 0 and head_dim <= 256)
    return FlashPages if flash else GatheredRows


def flatten(step: Step, pool: Tensor) -> list[Tensor]:
    """The step's N tokens, their positions, their places in the pool (page * size + offset), and
    where among them the last token of each request is that has none left."""
    size = pool.shape[3]
    ids, positions, places, last = [], [], [], []
    for request, n in step:
        end = request.computed + n
        ids += request.ids[request.computed:end]
        positions += range(request.computed, end)
        places += [request.pages[p // size].index * size + p % size
                   for p in range(request.computed, end)]
        if end == len(request.ids):
            last.append(len(ids) - 1)
    return [torch.tensor(x, dtype=torch.int64, device=pool.device)
            for x in (ids, positions, places, last)]


class GatheredRows:
    """SDPA over rows, for CPUs and older torch.

    Gathering pages for every layer of every step would cost more than the attention itself, so
    each sequence of the batch has its keys and values a second time, side by side in a row: they
    are gathered once, when it takes the row, and a step appends to row and pages alike. The pages
    are the truth, rows are free to be dropped. Requests with one token come first, so that they
    are one call over a slice; prompts follow one at a time."""
    page = 16

    def __init__(self, model: Qwen3, pool: Tensor, window: int):
        self.model, self.pool, self.window = model, pool, window
        self.reset()

    def reset(self) -> None:
        L, _, _, _, K, E = self.pool.shape
        self.rows = self.pool.new_zeros(L, 2, 0, K, 0, E)  # L 2 B K T E
        self.held: list[tuple[Request | None, int]] = []  # whose so many tokens a row has

    def arrange(self, step: Step) -> Step:
        """Rows for a step, in the order returned; whoever can stay where it was stays."""
        row_of = {request: row for row, (request, _) in enumerate(self.held)}
        ones = [pair for pair in step if pair[1] == 1]
        more = [pair for pair in step if pair[1] > 1]
        order: list[tuple[Request, int] | None] = [None] * len(step)
        for pairs, low, high in ((ones, 0, len(ones)), (more, len(ones), len(step))):
            movers = []
            for pair in pairs:
                row = row_of.get(pair[0], -1)
                if low <= row < high:
                    order[row] = pair
                else:
                    movers.append(pair)
            for row in range(low, high):
                if order[row] is None:
                    order[row] = movers.pop()
        self._grow(len(step), max(r.computed + n for r, n in step))
        for row, (request, n) in enumerate(order):
            if self.held[row] != (request, request.computed):
                self._gather(row, request)
            self.held[row] = (request, request.computed + n)
        return order

    def _grow(self, rows: int, length: int) -> None:
        B, T = self.rows.shape[2], self.rows.shape[4]
        if rows > B or length > T:
            old = self.rows
            shape = list(old.shape)
            shape[2] = B if rows <= B else max(rows, 2 * B)
            shape[4] = T if length <= T else min(max(length, T * 3 // 2, 128), self.window)
            self.rows = old.new_zeros(shape)
            self.rows[:, :, :B, :, :T] = old
            self.held += [(None, 0)] * (shape[2] - B)

    def _gather(self, row: int, request: Request) -> None:
        n, size = request.computed, self.pool.shape[3]
        pages = [page.index for page in request.pages[:-(-n // size)]]
        kv = self.pool[:, :, pages].flatten(2, 3)[:, :, :n]  # L 2 n K E
        self.rows[:, :, row, :, :n] = kv.transpose(2, 3)

    def forward(self, step: Step) -> Tensor:
        """Logits, (B, V) float32, of those requests that have fed all their tokens."""
        ids_N, pos_N, places_N, last_B = flatten(step, self.pool)
        ones = sum(n == 1 for _, n in step)
        row_1 = torch.arange(ones, device=pos_N.device)
        slices = []  # of the rows with one token, so that few are padded to the longest: its mask
        for low in range(0, ones, SLICE):
            high = min(low + SLICE, ones)
            length = max(request.computed for request, _ in step[low:high]) + 1
            slices.append((low, high, self._mask(pos_N[low:high], length)[:, None, None]))  # B11T
        chunks, at = [], ones  # rows of prompts: where in the step, where they end, their mask
        for row, (request, n) in enumerate(step[ones:], ones):
            end = request.computed + n
            mask = self._mask(pos_N[at:at + n], end) if end > n else None  # None: causal
            chunks.append((row, at, at + n, end, mask))
            at += n

        def attend(layer, q, k, v):
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # N H E, N K E
            for new, pool, rows in zip((k, v), self.pool[layer], self.rows[layer]):
                pool.view(-1, *pool.shape[2:])[places_N] = new
                if ones:
                    rows[row_1, :, pos_N[:ones]] = new[:ones]
                for row, low, high, end, _ in chunks:
                    rows[row, :, end - (high - low):end] = new[low:high].transpose(0, 1)
            keys, values = self.rows[layer]  # B K T E
            out = torch.empty_like(q)
            K, E = k.shape[1:]
            for low, high, mask in slices:  # G heads that share keys: G queries at one position
                T = mask.shape[-1]
                got = F.scaled_dot_product_attention(
                    q[low:high].view(high - low, K, -1, E), keys[low:high, :, :T],
                    values[low:high, :, :T], attn_mask=mask)  # B K G E
                out[low:high] = got.reshape(high - low, -1, E)
            for row, low, high, end, mask in chunks:
                got = F.scaled_dot_product_attention(
                    q[None, low:high].transpose(1, 2), keys[row, None, :, :end],
                    values[row, None, :, :end], attn_mask=mask, is_causal=mask is None,
                    enable_gqa=True)  # 1 H n E
                out[low:high] = got[0].transpose(0, 1)
            return out.transpose(0, 1)[None]  # 1 H N E

        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], attend)[0]
        # A few rows times a matrix that no cache holds: in parts it takes half the time.
        parts = self.model.lm_head.weight.split(HEAD_PART)
        return torch.cat([F.linear(hidden_ND[last_B], part) for part in parts], -1).float()

    def _mask(self, pos_N: Tensor, length: int) -> Tensor:
        """(N, length): what to add to the scores of queries at these positions."""
        late = torch.arange(length, device=pos_N.device) > pos_N[:, None]
        return torch.zeros_like(late, dtype=self.pool.dtype).masked_fill_(late, -torch.inf)


class FlashPages:
    """Flash attention that reads the pages in place, for CUDA.

    varlen_attn is causal only with window_size=(-1, 0), and num_splits=1 because its split-KV is
    wrong over pages (pytorch issue 194167); it also makes a sequence independent of its batch.
    A step in which everybody decodes is a CUDA graph for the next larger batch size in BUCKETS,
    captured when it is first needed; rows that pad it write into page 0, which nobody owns."""
    page = 256

    def __init__(self, model: Qwen3, pool: Tensor, window: int):
        self.model, self.pool = model, pool
        self.columns = 2 + -(-window // pool.shape[3])  # id, length, page table
        self.graphs: dict[int, tuple] = {}  # batch size -> graph, its inputs, its logits
        self.memory = None  # shared by all graphs

    def reset(self) -> None:
        pass  # graphs read the weights where they are

    def arrange(self, step: Step) -> Step:
        return step

    def forward(self, step: Step) -> Tensor:
        """Logits, (B, V) float32, of those requests that have fed all their tokens."""
        if len(step) <= BUCKETS[-1] and all(r.computed + 1 == len(r.ids) for r, _ in step):
            return self._decode(step)
        ids_N, pos_N, places_N, last_B = flatten(step, self.pool)
        device = pos_N.device
        ends = [request.computed + n for request, n in step]
        ends_B = torch.tensor(ends, dtype=torch.int32, device=device)
        width = max(len(request.pages) for request, _ in step)
        table_BP = torch.tensor([[page.index for page in r.pages] + [0] * (width - len(r.pages))
                                 for r, _ in step], dtype=torch.int32, device=device)
        starts_B = torch.tensor([0] + [n for _, n in step], device=device).cumsum(0).int()
        most = max(n for _, n in step)

        def attend(layer, q, k, v):
            self._write(layer, places_N, k, v)
            out = varlen_attn(
                q[0].transpose(0, 1), *self.pool[layer], starts_B, starts_of(ends_B), most,
                max(ends), window_size=(-1, 0), enable_gqa=True, seqused_k=ends_B,
                block_table=table_BP, num_splits=1)  # N H E
            return out.transpose(0, 1)[None]  # 1 H N E

        hidden_ND = self.model.hidden(ids_N[None], pos_N[None], attend)[0]
        return self.model.lm_head(hidden_ND[last_B]).float()

    def _write(self, layer: int, places_N: Tensor, k: Tensor, v: Tensor) -> None:
        for new, pool in zip((k, v), self.pool[layer]):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, places_N, new[0].transpose(0, 1))

    def _decode(self, step: Step) -> Tensor:
        B = next(b for b in BUCKETS if b >= len(step))
        host = np.zeros((B, self.columns), np.int32)
        host[:, 1] = 1
        for row, (request, _) in zip(host, step):
            row[0], row[1] = request.ids[-1], len(request.ids)
            row[2:2 + len(request.pages)] = [page.index for page in request.pages]
        if B not in self.graphs:
            self.graphs[B] = self._capture(torch.from_numpy(host).to(self.pool.device))
        graph, inputs, logits_BV = self.graphs[B]
        inputs.copy_(torch.from_numpy(host))
        if graph is None:
            logits_BV = self._decode_all(inputs)
        else:
            graph.replay()
        return logits_BV[:len(step)]

    def _capture(self, inputs: Tensor) -> tuple:
        if inputs.device.type != "cuda":  # where the tests run
            return None, inputs, None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazily made workspaces must not be captured
            self._decode_all(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            logits_BV = self._decode_all(inputs)
        self.memory = graph.pool()
        return graph, inputs, logits_BV

    def _decode_all(self, inputs: Tensor) -> Tensor:
        """One token of each row of `inputs`, on the device from end to end: (B, V) logits."""
        B, size = len(inputs), self.pool.shape[3]
        ids_B, length_B, table_BP = inputs[:, 0], inputs[:, 1].contiguous(), \
            inputs[:, 2:].contiguous()
        pos_B = length_B.long() - 1
        places_B = table_BP.gather(1, (pos_B // size)[:, None])[:, 0] * size + pos_B % size

        def attend(layer, q, k, v):
            self._write(layer, places_B, k, v)
            # the G heads that share keys are G queries at the same position: not causal
            K, G, E = k.shape[1], q.shape[1] // k.shape[1], k.shape[3]
            q = q[0].transpose(0, 1).view(B, K, G, E).transpose(1, 2).reshape(B * G, K, E)
            starts_B = torch.arange(B + 1, device=q.device, dtype=torch.int32) * G
            out = varlen_attn(
                q, *self.pool[layer], starts_B, starts_of(length_B), G, table_BP.shape[1] * size,
                seqused_k=length_B, block_table=table_BP, num_splits=1)  # B*G K E
            out = out.view(B, G, K, E).transpose(1, 2).reshape(B, K * G, E)
            return out.transpose(0, 1)[None]  # 1 H B E

        return self.model.lm_head(self.model.hidden(ids_B[None], pos_B[None], attend)[0]).float()


def starts_of(lengths_B: Tensor) -> Tensor:
    return F.pad(lengths_B.cumsum(0), (1, 0)).int()  # B + 1


def pool_bytes(memory: int | float, device: torch.device) -> int:
    if isinstance(memory, int):
        return memory
    if device.type == "cuda":
        return int(memory * torch.cuda.get_device_properties(device).total_memory)
    return int(memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def zeros(shape: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; on a CPU the system hands the memory out only when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
