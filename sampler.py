"""Sampling with a paged KV cache and continuous batching: one engine serves all requests.

`generate` is a coroutine: it queues a request and waits. A single task, the engine, touches
the model. It repeats one step until no request is left:

    admit      waiting requests start in order of arrival, while their pages fit
    schedule   how many tokens each computes: one, or a part of its prompt
    forward    all of them in one forward pass, without padding
    sample     a request whose tokens are all computed samples one
    retire     finished requests leave

Keys and values lie in pages. A request gets a page only when it has tokens for it. When it
ends, its pages stay cached until they are evicted (engine/prefix.py). So a node that waits
for its children holds nothing, and finds its conversation again. Requests with a common
prefix share its full pages, and copy what they need of the next one. A request waits while
another one computes the same prefix. So a group computes its prompt once. When no page is
left, the youngest running request goes back to the queue. It keeps its sampled tokens, and
computes their keys and values again later.

The random numbers of a request depend on its key alone. The order of arrival, the batch and
preemptions do not change what it samples.

Left out: swapping pages to the host, speculative decoding, priorities, several devices, two
event loops that sample at the same time.
Adapters beside the weights sample at 60 to 88 % of the speed of merged ones (on a CPU).
Tried and failed: gathering pages in each step, which took longer than attention.
Sources: PagedAttention (arXiv 2309.06180), continuous batching (Orca, OSDI 2022), chunked
prefill (2308.16369), prefix caching (SGLang, 2312.07104). Shapes: B requests, V vocabulary;
more in engine/pages.py.
"""
import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from engine.linear import put
from engine.pages import attention_for, spare_bytes
from engine.parallel import is_sharded
from engine.prefix import PrefixCache, Snapshots, prefix_hash
from model import Decoder
from tree import Completion, Lost, Sampling

STEP_TOKENS = 2048  # of prompts in one step, beside one token per request that decodes
CHUNK = 128  # tokens of the vocabulary
SMALL_MODEL = 10_000_000  # parameters


@dataclass(eq=False)
class Request:
    ids: list[int]  # the prompt, then what was sampled
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    is_over: Callable[[list[int]], bool]
    uniforms: np.ndarray  # one number in [0, 1) for each token it may sample
    done: asyncio.Future
    computed: int = 0  # how many of ids have their keys and values in its pages
    hashes: list[int] = field(default_factory=lambda: [0])  # of its prefixes
    page_table: list[int] = field(default_factory=list)  # its pages, in order
    state: int = 0  # of a hybrid: which of the recurrent states is its own
    marks: set[int] = field(default_factory=set)  # after so many tokens a snapshot is kept
    logprobs: list[float] = field(default_factory=list)


class Sampler:
    """Owns the KV cache. It samples from `model` itself, adapters included; or from a
    merged copy, if the weights are sharded or not of type `dtype`, or with `copy`.

    `memory` is the size of the pool in bytes; by default a share of what is free, up to
    four windows per request. At most `batch` requests run at once, of at most `window`
    tokens each, prompt included; the window is no larger than the pool. `stats` counts
    tokens `computed`, `reused` and `sampled`, `steps`, the `seconds` in them, and
    `preemptions`.
    """

    def __init__(self, model: Decoder, memory: int | None = None, batch: int = 64,
                 window: int | None = None, dtype: torch.dtype | None = None,
                 copy: bool = False):
        dtype = dtype or model.lm_head.weight.dtype
        self.owns = copy or is_sharded(model) or dtype != model.lm_head.weight.dtype
        self.model = model.merged_copy(dtype).order() if self.owns else model
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        most = model.config.max_position_embeddings
        self.window = min(window or most, most)
        memory = memory or spare_bytes(self.model, self.window, batch)
        self.attention = attention_for(self.model, memory, self.window, batch)
        self.pool, self.batch = self.attention.pool, self.attention.batch
        self._forget()
        self.window = min(self.window, self.cache.count * self.cache.size)
        self.waiting: list[Request] = []  # in order of arrival
        self.running: list[Request] = []  # in the order in which they started
        self.engine: asyncio.Task | None = None
        self.stats = Counter()

    def load(self, model: Decoder) -> None:
        """Copy the new weights of `model`, unless they are shared, and empty the cache."""
        if self.owns:
            with torch.no_grad():
                for mine, (_, new) in zip(self.model.parameters(), model.merged(),
                                          strict=True):
                    put(mine, new)
        self._forget()

    def _forget(self) -> None:
        self.cache = PrefixCache(self.pool.shape[2] - 1, self.pool.shape[3])
        states = self.attention.states
        self.snapshots = Snapshots(states) if states else None
        self.attention.reset()

    async def generate(self, ids: list[int], max_tokens: int,
                       sampling: Sampling = Sampling(), stop=(),
                       is_over: Callable = lambda ids: False, key=()) -> Completion:
        """Sample after `ids` (at least one) until a stop id (included), max_tokens (at
        least one) or the window's end, or until is_over(ids) of all ids so far: it is asked
        after each token.

        `logprobs` are those at temperature 1. `key` seeds the sampling. Raises
        tree.Lost where the request cannot be served."""
        if not 0 <= min(ids) <= max(ids) < self.model.config.vocab_size:
            raise Lost("ids outside the model's vocabulary")
        room = self.window - len(ids)
        if room < 1:
            raise Lost(f"{len(ids)} tokens leave no room in a window of {self.window}")

        seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest())
        n = min(max_tokens, room)
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(n)
        done = asyncio.get_running_loop().create_future()
        request = Request(list(ids), n, sampling, frozenset(stop), is_over, uniforms, done)
        self.waiting.append(request)
        if self.engine is None or self.engine.done():
            self.engine = asyncio.create_task(self._run())
        await done  # if this is cancelled, the engine's next step removes the request

        new = request.ids[len(ids):]
        usage = {"prompt": len(ids), "sampled": len(new)}
        return Completion("", tuple(new), tuple(request.logprobs), usage)

    # --- the engine: everything below runs in one task ------------------------------------

    async def _run(self) -> None:
        try:
            while self.waiting or self.running:
                with torch.inference_mode(), suited_to(self.parameters):
                    self._step()
                if not (self.waiting or self.running):
                    return  # at once, because the next request may be of another event loop
                await asyncio.sleep(0)  # let the trees run: they bring the next requests
        except BaseException as error:  # nobody may wait for a broken engine
            lost = self.waiting + self.running
            self.waiting, self.running = [], []
            for request in lost:  # first: what follows fails as well if the device is lost
                if not request.done.done():
                    request.done.set_exception(Lost(f"engine failed: {error!r}"))
            self._forget()
            for page in [page for r in lost for page in r.page_table]:
                self.pool[:, :, page] = 0  # masks do not hide NaN from the next user
            if not isinstance(error, Exception):
                raise

    def _step(self) -> None:
        """Admit, schedule, forward, sample, retire."""
        began = time.perf_counter()
        self.waiting = [r for r in self.waiting if not r.done.cancelled()]
        for request in [r for r in self.running if r.done.cancelled()]:
            self._remove(request)
        self._admit()
        step = self._schedule()
        if step:
            sampling, logits_BV = self.attention.forward(step)
            for request, n in step:
                self.cache.advance(request, n)
                if request.computed in request.marks:
                    self.snapshots.keep(request)
            if sampling:
                sampled = sample(logits_BV, sampling)
                if not np.isfinite(sampled).all():
                    raise FloatingPointError("the model's logits are not finite")
                self._retire(sampling, sampled)
            self.stats["computed"] += sum(n for _, n in step)
            self.stats["steps"] += 1
        self.stats["seconds"] += time.perf_counter() - began

    def _admit(self) -> None:
        """Start waiting requests in order of arrival, while they fit. But if the tokens of
        running requests need more pages than there are, the youngest is preempted."""
        while sum(map(self._missing, self.running)) > self.cache.available():
            self.waiting.insert(0, self.running[-1])
            self._remove(self.running[-1])
            self.stats["preemptions"] += 1
        for request in list(self.waiting):
            if len(self.running) == self.batch:
                return
            pages, cached = self.cache.match(request)
            n = self.snapshots.match(request, cached) if self.snapshots else cached
            if self._must_wait(request, cached, n):
                continue
            if not self._start(request, pages, n):
                return  # nobody overtakes it
            self.waiting.remove(request)
            self.running.append(request)
            self.stats["reused"] += n
            if self.snapshots:
                self.snapshots.start(request, n, cached, self.waiting)

    def _must_wait(self, request: Request, cached: int, n: int) -> bool:
        """Whether a running request will soon offer more of this prefix than the cache has
        now: more than `cached` tokens of keys and values, or a snapshot after more than n
        tokens. Then waiting saves work."""
        return any(
            r.computed < end < min(len(r.ids), len(request.ids))
            and prefix_hash(r, end) == prefix_hash(request, end)
            for r in self.running
            for end in (cached + 1, *(mark for mark in r.marks if mark > n)))

    def _start(self, request: Request, pages: list[int], n: int) -> bool:
        """Take from the pages what they hold of its first n tokens. Full pages are shared.
        The tokens of a page that is not full are copied. False if there are too few pages
        for all its tokens. Running requests come first, each with one page more."""
        full, rest = divmod(n, self.cache.size)
        self.cache.acquire(request, pages[:full])
        need = self._missing(request) + sum(self._missing(r) + 1 for r in self.running)
        if need > self.cache.available():
            self.cache.release(request)
            return False
        request.computed = n - rest
        if rest:
            # `new` may evict the old page and return it: then it still has its content.
            page = self.cache.new(request)
            self.pool[:, :, page, :rest] = self.pool[:, :, pages[full], :rest]
            self.cache.advance(request, rest)
        return True

    def _missing(self, request: Request) -> int:
        """How many pages its tokens need beside those that it has."""
        return -(-len(request.ids) // self.cache.size) - len(request.page_table)

    def _schedule(self) -> list[tuple[Request, int]]:
        """(request, n): it computes its next n tokens, and has pages for them. A request
        that decodes has one token; prompts share STEP_TOKENS, the oldest first."""
        step, budget = [], STEP_TOKENS
        for request in self.running:
            n = 1
            if request.computed + 1 < len(request.ids):
                # A prompt's part ends where a snapshot of it is kept.
                ends = (len(request.ids), *request.marks)
                n = min(end - request.computed for end in ends if end > request.computed)
                n = min(n, budget)
                budget -= n
            if n == 0:
                continue
            while len(request.page_table) * self.cache.size < request.computed + n:
                self.cache.new(request)
            step.append((request, n))
        return step

    def _retire(self, requests: list[Request], sampled: np.ndarray) -> None:
        """Append the tokens; a request leaves with its last one."""
        for request, token, logprob in zip(requests, *sampled):
            request.ids.append(int(token))
            request.logprobs.append(float(logprob))
            self.stats["sampled"] += 1
            full = len(request.logprobs) == request.max_tokens
            ended = request.ids[-1] in request.stop or request.is_over(request.ids)
            if full or ended:
                self._remove(request)
                if not request.done.done():  # Ctrl-C may cancel it during a step
                    request.done.set_result(None)

    def _remove(self, request: Request) -> None:
        """The request runs no longer. What it computed stays cached."""
        self.running.remove(request)
        if self.snapshots:
            self.snapshots.stop(request)
        self.cache.release(request)
        request.computed = 0


@contextlib.contextmanager
def suited_to(parameters: int) -> Iterator[None]:
    """Within it, torch has as many CPU threads as suit a model with so many parameters: one
    below SMALL_MODEL, otherwise all. With matrices this small, threads mostly wait for each
    other (measured), and one thread leaves the other cores to the REPLs."""
    before = torch.get_num_threads()
    if parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(logits_BV: torch.Tensor, requests: list[Request]) -> np.ndarray:
    """Tokens, and their log-probabilities at temperature 1: (2, B) float64."""
    numbers = torch.tensor(
        [(r.uniforms[len(r.logprobs)], r.sampling.temperature, r.sampling.top_p)
         for r in requests], dtype=torch.float64)
    if logits_BV.is_cuda:  # pinned, so that the host does not wait for the logits here
        numbers = numbers.pin_memory()
    u_B, temperature_B, top_p_B = numbers.to(logits_BV.device, non_blocking=True).unbind(1)
    logprobs_BV = drawn_BV = logits_BV.log_softmax(-1)
    if any(r.sampling.temperature != 1 for r in requests):
        divisor_B = temperature_B.clamp(min=1e-9).float()  # 0: only the likeliest is left
        drawn_BV = (logprobs_BV / divisor_B[:, None]).log_softmax(-1)
    if any(r.sampling.top_p < 1 for r in requests):
        drawn_BV = most_likely(drawn_BV, top_p_B)
    new_B1 = draw(drawn_BV.exp(), u_B)[:, None]
    logprob_B1 = logprobs_BV.gather(1, new_B1)
    # The one copy to the host in a step.
    return torch.cat([new_B1.double(), logprob_B1.double()], 1).T.cpu().numpy()


def most_likely(logprobs_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Log-probabilities among the fewest most likely tokens that reach top_p together; -inf
    of the others: (B, V)."""
    falling_BV, order_BV = logprobs_BV.sort(-1, descending=True)
    before_BV = falling_BV.exp().cumsum(-1) - falling_BV.exp()  # of those more likely
    beyond_BV = before_BV >= top_p_B[:, None].float()
    beyond_BV[:, 0] = False  # the likeliest is kept, whatever top_p is
    falling_BV = falling_BV.masked_fill(beyond_BV, -math.inf)
    return falling_BV.scatter(1, order_BV, falling_BV).log_softmax(-1)


def draw(probs_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative sum passes the share u_B of the whole: (B,).

    First its chunk of n tokens, by the sums of the N chunks, then the token in the chunk.
    The cumulative sum of a large vocabulary takes long on a GPU."""
    B, V = probs_BV.shape
    if V % CHUNK:
        probs_BV = F.pad(probs_BV, (0, -V % CHUNK))
    chunks_BNn = probs_BV.view(B, -1, CHUNK)
    total_BN = chunks_BNn.sum(-1, dtype=torch.float64).cumsum(-1)
    goal_B1 = u_B[:, None] * total_BN[:, -1:]  # the last total is 1 but for rounding
    chunk_B1 = torch.searchsorted(total_BN, goal_B1, right=True)
    chunk_B1.clamp_(max=total_BN.shape[1] - 1)
    beyond_B1 = total_BN.gather(1, chunk_B1) - goal_B1  # of the chunk's sum

    chunk_Bn = chunks_BNn[torch.arange(B, device=u_B.device), chunk_B1[:, 0]]
    total_Bn = chunk_Bn.cumsum(-1, dtype=torch.float64)
    goal_B1 = (total_Bn[:, -1:] - beyond_B1).clamp_(min=0)  # rounding may go below
    token_B1 = torch.searchsorted(total_Bn, goal_B1, right=True).clamp_(max=CHUNK - 1)
    return (chunk_B1 * CHUNK + token_B1).clamp_(max=V - 1)[:, 0]  # the rest is padding
