"""How many REPLs may be open at once, and who waits for one.

A REPL takes one descriptor in this process and two in the server. There are as many places
as the machine's limits of open files allow. Whoever finds none free waits, so that no tree
is lost. Standard library only.
"""
import asyncio
import contextlib
import heapq
import itertools
import resource

OTHERS = 256  # descriptors of this process that are no REPL's, at most
SERVERS = 64  # those of the server, its spare workers included


class Places:
    """`most` places. A REPL whose code may wait for REPLs that are `below` levels deeper
    leaves as many places free. So those at the bottom, which wait for none, always get one,
    and after them the ones above: nobody waits for ever."""

    def __init__(self, most: int):
        self.most = self.free = most
        self.waiting: list[tuple[int, int, asyncio.Future]] = []  # a heap, deepest first
        self.order = itertools.count()

    async def take(self, below: int) -> None:
        """Wait for a place. Raises OSError if there are too few of them for this depth."""
        if below >= self.most:
            raise OSError(f"{self.most} REPLs can be open at once, too few for children "
                          f"{below} levels deep: raise the limit of open files (ulimit -n)")
        if self.free > below:
            self.free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (below, next(self.order), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given at the same moment
                self.give()
            raise

    def give(self) -> None:
        self.free += 1
        while self.waiting and self.free > self.waiting[0][0]:
            *_, given = heapq.heappop(self.waiting)
            if not given.done():  # else its task was cancelled
                given.set_result(None)
                self.free -= 1


def allowed(servers_most: int) -> int:
    """Raise this process's limit of open files as far as it may. Returns how many REPLs it
    allows, with a server that opens at most `servers_most` files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # some systems refuse infinity
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**64  # -1 is infinity
    here = limit - min(OTHERS, limit // 2)
    server = (min(limit, servers_most) - SERVERS) // 2
    return max(1, min(here, server))
