"""Threads: how many torch computes with, and what runs beside an event loop.

Programs import this file before torch, which reads the setting below when it is loaded."""
import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# A thread that waits for the others spins a little, then sleeps. torch's default is to spin
# long: 1.3 times faster on two idle cores, ten times slower on two busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

SMALL_MODEL = 10_000_000


@contextlib.contextmanager
def suited_to(parameters: int) -> Iterator[None]:
    """Within it, torch has as many CPU threads as suit a model with so many parameters: one
    below SMALL_MODEL, otherwise all. With matrices this small, threads mostly wait for each
    other (measured), and one thread leaves the other cores to the REPLs."""
    import torch  # here, as a question to a server needs none of it

    before = torch.get_num_threads()
    if parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(made: Coroutine) -> Any:
    """asyncio.run, also where an event loop runs already, as in a notebook: then in a
    thread, and that loop stands still. Ctrl-C cancels what runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(made)
    begun: Future = Future()

    async def told() -> Any:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await made

    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # a thread that is still starting would not be joined
        try:
            return thread.submit(asyncio.run, told()).result()
        except KeyboardInterrupt:
            if not begun.cancel():  # it runs
                loop, task = begun.result()
                loop.call_soon_threadsafe(task.cancel)
            raise


async def in_thread(function: Callable[[], Any],
                    at_end: Callable[[], None] = lambda: None) -> Any:
    """What function() returns or raises, called in a thread of its own.

    Python does not wait for such threads when it ends, unlike for those of asyncio and of
    concurrent.futures. `at_end` runs in the event loop once the function has ended, also if
    the caller was cancelled before."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        at_end()
        if done.cancelled():  # too late
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(value)

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as raised:
            error = RuntimeError(repr(raised))  # these mean something else to a future
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(finish, value, error)
        except RuntimeError:  # the loop has ended
            pass

    threading.Thread(target=run, daemon=True).start()
    return await done
