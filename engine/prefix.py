"""The prefix cache of the sampler: what is kept of which tokens, so that no request
computes what another one has computed.

Keys and values lie in pages of `size` tokens. The page table of a request lists its pages,
in the order of its tokens. A page is in use, or it is free, or it is unused: then it stays
cached until it is evicted. Each prefix of a request has a hash, and the cache finds by this
hash the pages that hold the last token of the prefix. So a look-up takes the same time,
however many requests begin alike.

`Snapshots` does the same for the recurrent states of a hybrid.

This file knows no model. A request has `ids` (its tokens), `hashes` (of its prefixes),
`computed` (how many tokens are computed), `page_table` and, of a hybrid, `state`.
"""
from bisect import bisect_left


def prefix_hash(request, n: int) -> int:
    """The hash of a request's first n tokens: of the hash of one token less, and the last.
    It has 61 bits. Of a million cached prefixes one look-up in 10^12 finds a wrong one."""
    chain = request.hashes  # of its first 0, 1, 2, ... tokens
    for token in request.ids[len(chain) - 1:n]:
        chain.append(hash((chain[-1], token)))
    return chain[n]


def common(a, b) -> int:
    """How many first tokens two requests have in common, without the last of each."""
    most = min(len(a.ids), len(b.ids)) - 1
    prefix_hash(a, most)
    prefix_hash(b, most)
    return bisect_left(range(most), True, key=lambda n: a.hashes[n + 1] != b.hashes[n + 1])


class PrefixCache:
    """Which of `count` pages of `size` tokens holds what. Page 0 of the pool is padding."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.users = [0] * (count + 1)  # of each page: how many page tables have it
        self.hashes = [[] for _ in self.users]  # of each page: the prefixes that end in it
        self.holders: dict[int, dict[int, None]] = {}  # by hash: the pages with this prefix
        self.free = list(range(count, 0, -1))
        self.unused: dict[int, None] = {}  # the least recently used page first

    def available(self) -> int:
        return len(self.free) + len(self.unused)

    def match(self, request) -> tuple[list[int], int]:
        """The longest cached prefix of a request: its pages, and how many tokens it has.
        The last page may hold other tokens after these. The request's last token is never
        in the prefix, because its logits are needed. These pages are then the most recently
        used."""
        last, n = len(request.ids) - 1, 0
        prefix_hash(request, last)
        while n + self.size <= last and request.hashes[n + self.size] in self.holders:
            n += self.size
        while n < last and request.hashes[n + 1] in self.holders:
            n += 1

        ends = [min(end, n) for end in range(self.size, n + self.size, self.size)]
        pages = [next(iter(self.holders[request.hashes[end]])) for end in ends]
        for page in reversed(pages):
            if page in self.unused:
                self.unused[page] = self.unused.pop(page)
        return pages, n

    def acquire(self, request, pages: list[int]) -> None:
        """The request's page table begins with these pages."""
        request.page_table = pages
        for page in pages:
            self.unused.pop(page, None)
            self.users[page] += 1

    def new(self, request) -> int:
        """One more page for the request; one must be available."""
        if not self.free:
            self._evict(next(iter(self.unused)))
        page = self.free.pop()
        self.users[page] = 1
        request.page_table.append(page)
        return page

    def advance(self, request, n: int) -> None:
        """The request's next n tokens are in its pages now."""
        end = request.computed + n
        prefix_hash(request, end)
        for i in range(request.computed, end):
            page, hashed = request.page_table[i // self.size], request.hashes[i + 1]
            self.hashes[page].append(hashed)
            self.holders.setdefault(hashed, {})[page] = None
        request.computed = end

    def release(self, request) -> None:
        """The request needs its pages no longer. They stay cached, but for a page that is
        empty, or that holds no more than another one. The end of a prefix is evicted
        first."""
        for page in reversed(request.page_table):
            self.users[page] -= 1
            if self.users[page] == 0:
                self.unused[page] = None
                hashes = self.hashes[page]
                if not hashes or len(self.holders[hashes[-1]]) > 1:
                    self._evict(page)
        request.page_table = []

    def _evict(self, page: int) -> None:
        del self.unused[page]
        self.free.append(page)
        for hashed in self.hashes[page]:
            del self.holders[hashed][page]
            if not self.holders[hashed]:
                del self.holders[hashed]
        self.hashes[page] = []


class Snapshots:
    """Which of the `states` (engine/states.py) belongs to which prefix.

    Each token changes the state of its request in place. So a state can't be cut back to a
    prefix, as pages can. A snapshot is a state that is left as it was after a prefix, and
    that a request may continue. Snapshots are few: a state of Qwen3.5-4B takes as much
    memory as the keys and values of 1,570 tokens. There is one

        where a request stopped. The first request that continues it takes it over.
        in a prompt, where the longest prefix ends that a waiting request begins with too,
        and where the cached pages end. Each request that continues it gets a copy.

    So a prefix is computed once if its requests wait together, and twice if they come one
    after another: the second one computes again what is in the pages, for the snapshot. The
    least recently used snapshot is replaced."""

    def __init__(self, states):
        self.states = states
        self.free = list(range(states.count, 0, -1))
        self.kept: dict[int, int] = {}  # by hash: a state; the least recently used first
        self.stopped: set[int] = set()  # hashes of those where a request stopped

    def match(self, request, cached: int) -> int:
        """The length of its longest prefix with a snapshot, of at most `cached` tokens."""
        n = next((n for n in range(cached, 0, -1) if request.hashes[n] in self.kept), 0)
        if n:
            self.kept[request.hashes[n]] = self.kept.pop(request.hashes[n])
        return n

    def start(self, request, n: int, cached: int, waiting: list) -> None:
        """Give the request a state that continues the snapshot of its first n tokens, and
        its `marks`: after so many tokens of its prompt a snapshot is kept."""
        hashed = request.hashes[n]
        if hashed in self.stopped:
            self.stopped.remove(hashed)
            request.state = self.kept.pop(hashed)
        else:
            source = self.kept.get(hashed, 0)
            request.state = self._new()  # the source itself, if no other is left
            self.states.copy(source, request.state)
        shared = max((common(request, other) for other in waiting), default=0)
        request.marks = {cached, shared}

    def keep(self, request) -> None:
        """Copy the request's state, unless there is such a snapshot."""
        hashed = prefix_hash(request, request.computed)
        if hashed not in self.kept:
            state = self._new()
            self.states.copy(request.state, state)
            self.kept[hashed] = state

    def stop(self, request) -> None:
        """The request's state becomes a snapshot, unless there is such a one."""
        hashed = prefix_hash(request, request.computed)
        if request.computed and hashed not in self.kept:
            self.kept[hashed] = request.state
            self.stopped.add(hashed)
        else:
            self.free.append(request.state)

    def _new(self) -> int:
        if not self.free:
            oldest = next(iter(self.kept))
            self.stopped.discard(oldest)
            self.free.append(self.kept.pop(oldest))
        return self.free.pop()
