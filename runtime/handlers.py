"""The signal handlers of a REPL's code: when they may run.

Code may have handlers, for a time limit say, and they may raise or query. Python runs them
in the main thread between any two steps, so also in the worker's own (repl.py, Worker).
Between a frame and the note of it an exception would leave worker and server apart. So the
worker is `quiet` except where the code runs: a handler whose signal comes then has to wait.
Blocking the signals would not do. A thread of the code would receive them, and a process
that a handler starts would never hear of SIGTERM.
"""
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Signal(BaseException):
    """Ends a wait for the server, since a handler wants to run."""


class Handlers:
    def __init__(self):
        self.quiet = True  # the main thread runs no handler
        self.waits = False  # it waits for the server, and a signal may end that
        self.late: dict[int, Callable] = {}  # signal that came in the quiet -> handler

    def replace_signal(self) -> None:
        """From now on signal.signal installs handlers that know of the quiet."""
        install, look = signal.signal, signal.getsignal

        def installed(signalnum: int, handler: Any) -> Any:
            def ring(number: int, frame: Any) -> None:
                if not self.quiet:
                    return handler(number, frame)
                self.late[number] = handler
                if self.waits:
                    self.waits = False
                    raise Signal

            ring.handler = handler
            return inner(install(signalnum, ring if callable(handler) else handler))

        def inner(handler: Any) -> Any:
            return getattr(handler, "handler", handler)

        signal.signal = installed
        signal.getsignal = lambda signalnum: inner(look(signalnum))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a process that the code forks there is no protocol to keep quiet for."""
        self.quiet = self.waits = False
        self.late.clear()

    def end_quiet(self) -> None:
        """Handlers may run from here on. Those that had to wait run now, even if one of
        them raises."""
        self.quiet = False
        frame = sys._getframe() if self.late else None
        while self.late:
            # No call to the end of `del`, so that no other handler runs in between.
            *_, number = self.late
            handler = self.late[number]
            del self.late[number]
            try:
                handler(number, frame)
            finally:
                self.end_quiet()

    @contextlib.contextmanager
    def wait(self) -> Iterator[bool]:
        """The code's handlers wait in here. Yields whether they may interrupt a wait for
        the server: if code of the main thread called this."""
        if self.quiet or threading.current_thread() is not threading.main_thread():
            yield False
            return
        try:
            self.quiet = True
            yield True
        finally:
            self.end_quiet()

    def readable(self, sock: socket.socket, interruptible: bool) -> bool:
        """Wait until something can be read. False: a handler wants to run first."""
        try:
            self.waits = interruptible
            if interruptible and self.late:
                return False
            sock.recv(1, socket.MSG_PEEK)
            return True
        except Signal:
            return False
        finally:
            self.waits = False
