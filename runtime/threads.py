"""A blocking call beside the event loop, in a thread that nobody has to wait for."""
import asyncio
import threading
from collections.abc import Callable
from typing import Any


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
