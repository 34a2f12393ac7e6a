"""Ctrl-C and SIGTERM: a run stops where its weights and counters agree, and is saved there.

A signal is noted, and cancels the sampling that goes on. Everything else goes on until the
ranks next compare notes, which `Run.gather` does between steps. A second Ctrl-C ends the
process at once.
"""
import asyncio
import os
import signal


class Stopped(KeyboardInterrupt):
    """Raised on all ranks at the same place; `number` is the signal's."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Stop:
    """Inside `with`, the first signal is kept as `number`, 0 until then."""

    def __init__(self):
        self.number = 0
        self.sampling = None  # the task that is to be cancelled

    def __enter__(self) -> "Stop":
        self.before = {number: signal.signal(number, self._told)
                       for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _told(self, number: int, _: object) -> None:
        # Not print(): the signal may have interrupted one.
        os.write(2, b"stopping at the next whole step; Ctrl-C ends it at once\n")
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.sampling:
            self.sampling.get_loop().call_soon_threadsafe(self.sampling.cancel)

    def run(self, coroutine):
        """What it returns; None if it was cancelled because of a signal."""
        async def cancellable():
            self.sampling = asyncio.current_task()
            if self.number:  # since before the task began
                self.sampling.cancel()
            try:
                return await coroutine
            except asyncio.CancelledError:
                return None
            finally:
                self.sampling = None

        return asyncio.run(cancellable())
