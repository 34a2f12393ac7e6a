"""Ctrl-C and SIGTERM: a run stops where its weights and counters agree, and is saved there.

A signal is noted, and cancels the sampling that goes on. Everything else goes on until the
ranks next compare notes, which `Run.gather` does between steps. A second Ctrl-C ends the
process at once. Left out: SIGKILL. After it a run continues from its last checkpoint.
"""
import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any


class Stopped(KeyboardInterrupt):
    """Raised on all ranks at the same place; `number` is the signal's."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Stop:
    """Inside `with`, the first signal is kept as `number`, 0 until then. If `loud`, it is
    answered with a line."""

    def __init__(self, loud: bool):
        self.loud = loud
        self.number = 0
        self.sampling: asyncio.Task | None = None

    def __enter__(self) -> "Stop":
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as Ctrl-C in a background job
                self.before[number] = signal.signal(number, self._told)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _told(self, number: int, _: object) -> None:
        # Not print(): the signal may have interrupted one.
        first = not self.number
        self.number = self.number or number
        if first and self.loud:
            os.write(1, b"stopping at the next whole step; Ctrl-C ends it at once\n")
        if not first and number == signal.SIGINT:
            os.write(2, b"train.py: ended at once\n")
            os._exit(128 + number)
        if self.sampling:
            self.sampling.get_loop().call_soon_threadsafe(self.sampling.cancel)

    def run(self, coroutine: Coroutine) -> Any:
        """What it returns; None if it was cancelled because of a signal."""
        async def cancellable() -> Any:
            self.sampling = asyncio.current_task()
            if self.number:  # since before the task began
                self.sampling.cancel()
            try:
                return await coroutine
            finally:
                self.sampling = None

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            if not self.number:
                raise
            return None
