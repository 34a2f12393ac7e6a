"""The Python REPL that a model's code runs in: one process a REPL, forked from a small warm one.

    async with REPL(context, tools="", limits=Limits(seconds=60)) as repl:
        result = await repl.execute("print(len(context)); FINAL(context[:5])", on_query=None)
        result.stdout, result.error, result.final, result.done, result.died

Three kinds of process. The trainer holds `REPL` objects. It starts one server, a process with no
torch in it, because forking a process that holds a model costs 40 ms and forking a small one 1 ms.
The server forks one worker a REPL, relays frames between the two, and keeps the clock: the
trainer's event loop can be blocked by a forward pass, and the worker is not to be trusted.

A frame is a 4-byte length, a 1-byte kind and JSON. The trainer sends S (start), X (execute a
block) and R (answers to a query); the worker sends Q (a query) and D (done). S and X start the
clock, Q pauses it, R resumes it, D stops it. Anything else, or anything out of turn, ends the REPL.

The server leaves the network and the file system for ones that hold nothing but the system's
programs and this Python, and gives each worker a process namespace and a small writable directory
of its own; as root also a user id of its own (see `Sandbox`). Root needs CAP_SYS_ADMIN for that,
others need user namespaces. Where the kernel refuses, or with `sandbox="off"`, a block can use the
network, read what the user can read (root's workers still drop to another id), signal the user's
processes, and fill the disk; without root, also fork without end.

It is isolation for accidents and for a policy that explores, not for an attacker: one kernel serves
all, system calls are not filtered, REPLs can find each other through abstract sockets, and memory
and processor time are limited a process, so that all processes of a REPL together may use more.
"""

from __future__ import annotations

import atexit
import builtins as python_builtins
import collections
import contextlib
import gc
import io
import itertools
import json
import linecache
import os
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Awaitable, Callable

from runtime.sandbox import DESCRIPTORS, SET_NAME, Limits, Sandbox, call, choose

BUILTINS = ("context", "answer", "FINAL", "FINAL_VAR", "SHOW_VARS", "llm_query",
            "llm_query_batched", "rlm_query", "rlm_query_batched")
# What model code likes to import is imported once, before the forks. Each library mapped makes
# every fork dearer, so asyncio and hashlib (with OpenSSL behind them) are not here.
PRELOAD = (
    "bisect collections copy csv datetime difflib functools heapq math operator pprint random re "
    "statistics string textwrap unicodedata"
).split()
HEADER = struct.Struct("!Ic")  # length of the payload, kind
START_SECONDS = 60.0  # for the context and the tools to load, whatever a block may take
DEPTH = 100  # nesting at which a value becomes its str
OnQuery = Callable[[str, "list[str]", "list | None"], Awaitable[list]]


@dataclass(frozen=True)
class Result:
    """What came of one block."""

    stdout: str = ""  # stdout and stderr together, the head kept
    error: str = ""  # a short traceback, or why the process died; "" if all went well
    final: Any = None  # the answer as a JSON value
    done: bool = False  # FINAL was called (its value may be None)
    died: str = ""  # "timeout", "crash" or "protocol": the process is gone


class REPLError(RuntimeError):
    """The machine failed, not the code: no REPL could be started, or the server was lost."""


# --- the trainer's side ---------------------------------------------------------------------------


class REPL:
    """One Python namespace in a process of its own; an async context manager.

    `context` is any JSON value. `tools` is Python source that runs first: what it defines belongs
    to the builtins. Raises REPLError if it cannot be started (which includes a failing `tools` and
    a context larger than the limits). A process uses one `limits.sandbox` at a time: another one
    ends the REPLs that are open.
    """

    def __init__(self, context: Any, tools: str = "", limits: Limits = Limits()):
        if limits.sandbox not in ("require", "auto", "off"):
            raise ValueError(f"sandbox is {limits.sandbox!r}, not require, auto or off")
        self.limits = limits
        self._first = {"context": context, "tools": tools}
        self._sock: socket.socket | None = None
        self._busy = False
        self._inbox = bytearray()
        self._over: Result | None = None  # the result after which there is no process any more

    async def __aenter__(self) -> REPL:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        with theirs:
            try:
                Handle.request(theirs, self.limits)
            except BaseException:
                self._close()
                raise
        result = await self._exchange(b"S", self._first, None)
        self._first = {}  # the context lives in the worker now
        if result.error:
            self._close()
            raise REPLError(f"the REPL did not start: {result.error}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the process. Does not wait for its death, may be called twice."""
        if self._sock and self._busy:  # another task waits on it: wake that one, which closes
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        else:
            self._close()

    async def execute(self, code: str, on_query: OnQuery | None = None) -> Result:
        """Run one block. Never raises for what the code did.

        `await on_query(kind, prompts, contexts)` answers the code's queries: `kind` is "llm" or
        "rlm", `contexts` a list of JSON values or None, and the result one JSON value a prompt.
        What it raises ends the REPL and is raised here. After a block that called FINAL or died
        there is no process: that block's result is returned again. Raises REPLError if the server
        was lost or the REPL is closed.
        """
        if self._over is not None:
            return self._over
        if self._busy:
            raise RuntimeError("a REPL runs one block at a time")
        result = await self._exchange(b"X", {"code": code}, on_query)
        if result.done or result.died:
            self._over = result
            self._close()  # so that code that swallowed FINAL's exception does not run on
        return result

    async def _exchange(self, kind: bytes, message: dict, on_query: OnQuery | None) -> Result:
        """Send one frame and answer queries until the D frame."""
        self._busy = True
        try:
            await self._send(kind, message)
            asked = 0
            while True:
                kind, payload = await self._receive()
                try:
                    if kind == b"D":
                        return read_result(payload, self.limits)
                    query, prompts, contexts = read_query(payload)
                except (ValueError, TypeError, RecursionError) as error:  # a forged frame
                    return Result(error=f"ProtocolError: {error}", died="protocol")
                n, most = len(prompts), self.limits.queries
                if asked + n > most:
                    error = f"a block may ask {most} queries, this call would make it {asked + n}"
                    answers = [f"Error: {error}"] * n
                elif on_query is None:
                    answers = ["Error: no model answers queries here"] * n
                else:
                    answers = list(await on_query(query, prompts, contexts))
                    asked += n
                    if len(answers) != n:
                        raise ValueError(f"on_query gave {len(answers)} answers to {n} prompts")
                await self._send(b"R", answers)
        except BaseException:  # cancelled too: half an exchange cannot be taken up again
            self._close()
            raise
        finally:
            self._busy = False

    async def _send(self, kind: bytes, message: Any) -> None:
        if self._sock is None:
            raise REPLError("the REPL is not open")
        try:
            data = frame(kind, message, self.limits.frame_mb)
            await running_loop().sock_sendall(self._sock, data)
        except FrameTooLarge as error:
            raise REPLError(str(error)) from None
        except OSError as error:
            raise REPLError(f"the REPL server was lost: {error}") from error

    async def _receive(self) -> tuple[bytes, bytes]:
        while not (frames := take_frames(self._inbox, self.limits.frame_mb, most=1)):
            try:
                data = await running_loop().sock_recv(self._sock, 1 << 18)
            except OSError as error:
                raise REPLError(f"the REPL server was lost: {error}") from error
            if not data:  # a worker's death is a D frame, so this is the server's (or aclose)
                raise REPLError("the REPL server was lost, or the REPL closed, during a block")
            self._inbox += data
        kind, data = frames[0]
        return kind, data[HEADER.size :]

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()  # the server sees the end, kills the group, removes the directory
            self._sock = None


def running_loop() -> Any:
    import asyncio  # here, so that the server and its forks do without it

    return asyncio.get_running_loop()


def read_result(payload: bytes, limits: Limits) -> Result:
    """A D frame as a Result. Raises ValueError or TypeError for what no honest worker sends."""
    # JSON takes up to 12 bytes for a character; 1,000 for the rest: keys and "characters cut".
    if len(payload) > limits.answer_chars + 12 * 2 * limits.output_chars + 1000:
        raise ValueError(f"a result of {len(payload)} bytes")
    result = Result(**json.loads(payload))
    strings = (result.stdout, result.error, result.died)
    if not all(isinstance(s, str) for s in strings) or not isinstance(result.done, bool):
        raise TypeError("a result with fields of the wrong type")
    if result.died not in ("", "timeout", "crash", "protocol") or too_deep(result.final):
        raise ValueError("a result that no worker sends")
    return result


def read_query(payload: bytes) -> tuple[str, list[str], list | None]:
    """A Q frame as (kind, prompts, contexts). Raises like `read_result`."""
    kind, prompts, contexts = json.loads(payload)
    if kind not in ("llm", "rlm") or not isinstance(prompts, list):
        raise TypeError("a query with fields of the wrong type")
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise TypeError("a query without prompts, or with some that are no strings")
    if contexts is not None and not (isinstance(contexts, list) and len(contexts) == len(prompts)):
        raise TypeError("a query whose contexts do not match its prompts")
    if too_deep(contexts, DEPTH + 1):
        raise ValueError("a query with contexts that no worker sends")
    return kind, prompts, contexts


def too_deep(value: Any, room: int = DEPTH) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not room or any(too_deep(v, room - 1) for v in value))


class Handle:
    """The trainer's end of the server: one a process, started when first needed."""

    current: Handle | None = None
    started = False  # what the sandbox lacks has been said

    def __init__(self, sandbox: str, quiet: bool) -> None:
        import subprocess  # here and below, so that the server and its forks do without them
        import tempfile

        self.sandbox = sandbox
        self.base = tempfile.mkdtemp(prefix="repl-")  # made here: it can be removed here as well
        # Sequenced packets keep requests apart; the server ends when this socket does.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        hidden = [os.getcwd(), os.path.dirname(os.path.abspath(__file__)), os.path.expanduser("~")]
        here = os.path.dirname(os.path.abspath(__file__))  # -I leaves it out of the path
        code = (f"import sys; sys.path[:0] = [{here!r}]; import repl; del sys.path[0]; "
                "del sys.modules['repl'], sys.modules['runtime.sandbox'], sys.modules['runtime']; repl.serve()")
        command = [sys.executable, "-I", "-c", code,
                   json.dumps([theirs.fileno(), sandbox, quiet, hidden])]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], cwd=self.base, start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": self.base,
                     "TMPDIR": self.base, "LANG": os.environ.get("LANG", "C.UTF-8")},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    @classmethod
    def request(cls, sock: socket.socket, limits: Limits) -> None:
        """Hand `sock` to the server, which forks a worker for it. A dead server is replaced."""
        for attempt in (1, 2):
            try:
                handle = cls.current
                if (handle is None or handle.process.poll() is not None
                        or handle.sandbox != limits.sandbox):
                    cls.stop()
                    handle = cls.current = cls(limits.sandbox, cls.started)
                    cls.started = True
                request = json.dumps(asdict(limits)).encode()
                socket.send_fds(handle.control, [request], [sock.fileno()])
                return
            except OSError as error:
                cls.stop()
                if attempt == 2:
                    raise REPLError(f"the REPL server cannot be reached: {error}") from error

    @classmethod
    def stop(cls) -> None:
        import shutil
        from subprocess import TimeoutExpired

        handle, cls.current = cls.current, None
        if handle is not None:
            handle.control.close()
            try:
                handle.process.wait(timeout=5)
            except TimeoutExpired:
                handle.process.kill()
                handle.process.wait()
            shutil.rmtree(handle.base, ignore_errors=True)

    @classmethod
    def forget(cls) -> None:
        """In a fork of the trainer: the server stays the parent's, this process starts its own."""
        handle, cls.current = cls.current, None
        if handle is not None:
            handle.control.close()
            handle.process.returncode = 0  # not our child: nothing to wait for, nothing to warn of


atexit.register(Handle.stop)
os.register_at_fork(after_in_child=Handle.forget)


# --- frames ---------------------------------------------------------------------------------------


class FrameTooLarge(ValueError):
    pass


def frame(kind: bytes, message: Any, largest_mb: int) -> bytes:
    payload = json.dumps(message).encode()  # ASCII, so that lone surrogates travel
    if len(payload) > largest_mb << 20:
        raise FrameTooLarge(f"{len(payload) >> 20} MB in one message, the limit is {largest_mb}")
    return HEADER.pack(len(payload), kind) + payload


def take_header(inbox: bytearray, largest_mb: int) -> tuple[int, bytes]:
    """The length of the frame that `inbox` begins with, header included, and its kind."""
    if len(inbox) < HEADER.size:
        return 0, b""
    length, kind = HEADER.unpack_from(inbox)
    if length > largest_mb << 20:
        raise FrameTooLarge(f"a frame of {length} bytes")
    return HEADER.size + length, kind


def take_frames(inbox: bytearray, largest_mb: int, most: int = 1 << 30) -> list:
    """Cut whole frames off the front of `inbox`: [(kind, header + payload)]."""
    frames = []
    while len(frames) < most:
        length, kind = take_header(inbox, largest_mb)
        if not 0 < length <= len(inbox):
            break
        with memoryview(inbox) as view:  # a slice of `inbox` would be one more copy
            frames.append((kind, bytes(view[:length])))
        del inbox[:length]
    return frames


# --- the server -----------------------------------------------------------------------------------


class Channel:
    """One non-blocking socket of the server, with what is not read or written whole yet."""

    def __init__(self, selector: Any, sock: socket.socket, handler: Callable, slot: Slot):
        sock.setblocking(False)
        self.selector, self.sock, self.handler, self.slot = selector, sock, handler, slot
        self.inbox, self.outbox, self.open = bytearray(), bytearray(), True
        self.events = selectors.EVENT_READ
        selector.register(sock, self.events, self.ready)

    def ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.write(b"")
        if events & selectors.EVENT_READ and self.open:
            self.handler(self.slot)

    def read(self) -> None:
        """One recv, into the inbox. Raises OSError; EOFError at the end."""
        data = self.sock.recv(1 << 18)
        if not data:
            raise EOFError
        self.inbox += data

    def write(self, data: bytes) -> None:
        """Send what the socket takes; the selector tells when it takes the rest."""
        self.outbox += data
        try:
            while self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the other side is gone: reading will find out
            self.outbox.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
        if self.open and events != self.events:
            self.events = events
            self.selector.modify(self.sock, events, self.ready)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.selector.unregister(self.sock)
            self.sock.close()
            self.inbox, self.outbox = bytearray(), bytearray()


class Slot:
    """One REPL in the server: its two channels, its worker, its clock."""

    trainer: Channel | None = None  # None: a spare, which nobody has asked for yet
    worker: Channel | None = None
    pid = 0  # 0: no process, or none any more
    number = 0  # of its user id, nobody else's while it lives
    directory = ""
    state = "new"  # new, running, asking, idle or dead
    left = deadline = 0.0  # seconds left on the clock; when they end, if running
    passing = 0  # bytes of the trainer's frame that the worker has not been sent yet

    def __init__(self, limits: Limits):
        self.limits = limits


class Server:
    """Forks workers, relays frames, ends what overruns. Never blocks on one REPL.

    In idle moments it forks a few spare workers, for the limits last asked for: a start then costs
    the trainer no fork.
    """

    SPARES = 8

    FROM_TRAINER = {b"S": "new", b"X": "idle", b"R": "asking"}  # the state it must find
    FROM_WORKER = {b"Q": "asking", b"D": "idle"}  # the state it leads to, from running

    def __init__(self, control: socket.socket, sandbox: Sandbox, base: str, refusal: str):
        self.control, self.sandbox, self.base, self.refusal = control, sandbox, base, refusal
        self.parent = os.open(os.path.dirname(base), os.O_RDONLY)
        self.count, self.numbers = itertools.count(), collections.deque(range(DESCRIPTORS))
        self.erasing: set[int] = set()  # the children that are no workers
        self.workers: dict[int, Slot] = {}  # by process id, until that process is reaped
        self.spares: collections.deque[Slot] = collections.deque()
        self.limits: Limits | None = None  # those of the spares; None: make none
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self.accept)
        self.wake, wakeup = socket.socketpair()  # becomes readable when a child dies
        wakeup.setblocking(False)
        self.selector.register(self.wake, selectors.EVENT_READ, self.reap)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)

    def loop(self) -> None:
        while True:
            running = [s.deadline for s in self.workers.values() if s.state == "running"]
            wait = max(0.0, min(running) - time.monotonic()) if running else None
            short = self.limits is not None and len(self.spares) < self.SPARES
            events = self.selector.select(0 if short else wait)
            for key, mask in events:
                key.data(mask)
            if short and not events:
                self.prepare()
            now = time.monotonic()
            for slot in self.workers.values():
                if slot.state == "running" and slot.deadline <= now:
                    limit = f"{slot.limits.seconds:g} s"
                    error = f"the block ran for more than {limit} and the REPL was ended"
                    self.end(slot, "timeout", f"TimeoutError: {error}")

    def accept(self, _: int) -> None:
        """The trainer asks for a REPL: one descriptor and the limits."""
        request, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
        if not request:  # the trainer is gone
            for slot in self.workers.values():
                self.kill(slot)
            while self.workers or self.strays():
                self.reap(0)
            os.chdir("/")
            with contextlib.suppress(OSError):
                os.rmdir(os.path.basename(self.base), dir_fd=self.parent)
                os._exit(0)
            erase(self.base)
        if not descriptors:  # out of descriptors: the kernel closed it, the trainer sees the end
            return
        limits = Limits(**json.loads(request))
        if limits != self.limits:
            for spare in self.spares:
                spare.state = "dead"
                self.kill(spare)
            self.spares.clear()
            self.limits = limits
        problem = ""
        try:
            slot = self.spares.popleft() if self.spares else self.fork(limits)
        except OSError as error:
            slot, problem = Slot(limits), f"no process could be started: {error}"
        trainer = socket.socket(fileno=descriptors[0])
        slot.trainer = Channel(self.selector, trainer, self.from_trainer, slot)
        if problem:
            self.end(slot, "crash", problem)

    def prepare(self) -> None:
        try:
            self.spares.append(self.fork(self.limits))
        except OSError:  # who asks next is told
            self.limits = None

    def fork(self, limits: Limits) -> Slot:
        """A worker that waits for its first frame. Raises OSError."""
        if self.refusal:
            raise OSError(self.refusal)
        slot, number = Slot(limits), self.numbers[0]
        if not self.sandbox.namespaces:
            os.mkdir(directory := f"{self.base}/{next(self.count)}", 0o700)
            slot.directory = directory
        try:
            if slot.directory and (user := self.sandbox.user):
                os.chown(slot.directory, user + number, user + number)
            ours, theirs = socket.socketpair()
            with theirs:
                slot.number, slot.pid = number, self.sandbox.fork()
                if slot.pid == 0:
                    self.work(slot, theirs)
        except OSError:
            if slot.directory:
                os.rmdir(slot.directory)
            raise
        self.numbers.popleft()
        self.workers[slot.pid] = slot
        slot.worker = Channel(self.selector, ours, self.from_worker, slot)
        return slot

    def work(self, slot: Slot, sock: socket.socket) -> None:
        """The life of a worker. It never returns into the server's loop."""
        try:
            for other in self.workers.values():  # frames that are not for this worker's eyes
                for channel in filter(None, (other.trainer, other.worker)):
                    channel.inbox = channel.outbox = b""
            call("prctl", SET_NAME, b"repl-spare", 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            problem = ""
            try:
                self.sandbox.confine(slot.number, slot.limits, slot.directory, sock.fileno())
            except OSError as error:
                problem = f"cannot isolate it: {error}"
            Worker(sock, slot.limits).loop(problem)
        finally:
            os._exit(1)

    def from_trainer(self, slot: Slot) -> None:
        """Read once. A frame is passed on as it comes: a large context takes one pass."""
        inbox = slot.trainer.inbox
        try:
            slot.trainer.read()
            while inbox and slot.state != "dead":
                if not slot.passing:  # the beginning of a frame
                    slot.passing, kind = take_header(inbox, slot.limits.frame_mb)
                    if not slot.passing:
                        return
                    if self.FROM_TRAINER.get(kind) != slot.state:
                        self.end(slot, "protocol", f"ProtocolError: {kind!r} while {slot.state}")
                        return
                    if kind != b"R":
                        slot.left = START_SECONDS if kind == b"S" else slot.limits.seconds
                    slot.state, slot.deadline = "running", time.monotonic() + slot.left
                part = inbox[: slot.passing]
                del inbox[: slot.passing]
                slot.passing -= len(part)
                slot.worker.write(part)
            inbox.clear()  # what a dead one is still sent
        except (EOFError, OSError, FrameTooLarge):  # closed: nobody is left to tell
            slot.state = "dead"
            self.kill(slot)
            slot.trainer.close()

    def from_worker(self, slot: Slot) -> bool:
        """Read once; True if there was something. A forged frame can at most end its own REPL."""
        try:
            slot.worker.read()
            frames = take_frames(slot.worker.inbox, slot.limits.frame_mb)
        except (EOFError, OSError):  # `reap` tells how it died, and makes sure that it did
            self.kill(slot)
            return False
        except FrameTooLarge as error:
            self.end(slot, "protocol", f"ProtocolError: {error}")
            return False
        for kind, data in frames:
            if slot.state != "running" or kind not in self.FROM_WORKER:
                self.end(slot, "protocol", f"ProtocolError: {kind!r} while {slot.state}")
                return False
            slot.left = slot.deadline - time.monotonic()
            slot.state = self.FROM_WORKER[kind]
            slot.trainer.write(data)
        return True

    def end(self, slot: Slot, died: str, error: str) -> None:
        """Kill the worker and tell the trainer why; its socket stays open until it hangs up."""
        if slot.state != "dead":
            slot.state = "dead"
            self.kill(slot)
            message = asdict(Result(error=error, died=died))
            if slot.trainer is None:  # a spare that nobody has asked for
                self.spares.remove(slot)
                return
            slot.trainer.write(frame(b"D", message, slot.limits.frame_mb))

    def kill(self, slot: Slot) -> None:
        if slot.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)  # it may not have reached setsid yet
                os.killpg(slot.pid, signal.SIGKILL)
        if slot.worker:
            slot.worker.close()

    def reap(self, _: int) -> None:
        """Some children died: tell whose worker it was, end what it left, leave no zombie."""
        self.wake.recv(4096)
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT  # a zombie keeps its id from being reused
        with contextlib.suppress(ChildProcessError):
            while child := os.waitid(os.P_ALL, 0, look):
                slot = self.workers.pop(child.si_pid, None)
                if slot is not None:
                    while slot.worker.open and self.from_worker(slot):
                        pass  # its last frame may still wait here
                    self.kill(slot)
                usage = os.wait4(child.si_pid, 0)[2]
                self.erasing.discard(child.si_pid)
                if slot is not None:
                    code, limit = child.si_status, slot.limits.cpu_seconds
                    how = f"with exit code {code}"
                    if child.si_code != os.CLD_EXITED:
                        how = f"by signal {code} ({signal.strsignal(code)})"
                    if usage.ru_utime + usage.ru_stime > limit - 0.1:
                        how = f"after {limit} s of processor time"
                    self.end(slot, "crash", f"ProcessError: the REPL's process was ended {how}")
                    self.forget(slot)
                for pid in self.strays():
                    os.kill(pid, signal.SIGKILL)

    def strays(self) -> list[int]:
        """Without a process namespace: what the code started and a dead worker left to us."""
        if self.sandbox.namespaces:
            return []
        found: list[str] = []
        with contextlib.suppress(OSError):  # a kernel that does not tell
            found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [pid for pid in map(int, found) if pid not in {*self.workers, *self.erasing}]

    def forget(self, slot: Slot) -> None:
        """Its process is gone: so go what else ran as its user, and its directory."""
        slot.pid, user = 0, self.sandbox.user + slot.number
        if self.sandbox.user and self.strays():
            with contextlib.suppress(OSError):
                if (pid := os.fork()) == 0:
                    try:
                        os.setuid(user)
                        os.kill(-1, signal.SIGKILL)  # at once: nothing forks faster
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
        self.numbers.append(slot.number)
        if slot.directory:
            try:
                os.rmdir(slot.directory)
            except OSError:  # not empty: a child takes the time that it takes
                with contextlib.suppress(OSError):
                    if (pid := os.fork()) == 0:
                        erase(slot.directory)
                    self.erasing.add(pid)


def erase(directory: str) -> None:
    """Become a process that removes it, however deep it is and whatever its modes are."""
    try:
        os.execvp("sh", ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", directory])
    finally:
        os._exit(1)


def serve() -> None:
    """The main function of the server's process."""
    control, sandbox, quiet, hidden = json.loads(sys.argv[1])
    call("prctl", SET_NAME, b"repl-server", 0, 0, 0)  # what ps and top show
    for name in PRELOAD:
        __import__(name)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    base = os.getcwd()
    chosen, lacks = choose(sandbox, base, hidden)
    if lacks and sandbox == "auto" and not quiet:
        print(f"repl.py: the sandbox has {lacks}", file=sys.stderr)
    chosen.enter()
    refusal = f"the sandbox has {lacks}" if lacks and sandbox == "require" else ""
    server = Server(socket.socket(fileno=control), chosen, base, refusal)
    chosen.build(base, hidden)
    gc.collect()
    gc.freeze()  # later collections leave alone the pages that the workers share
    server.loop()


# --- the worker -----------------------------------------------------------------------------------


class Final(BaseException):
    """Unwinds the code after FINAL; whether it arrives does not matter, the answer is sent."""


class Capture(io.TextIOBase):
    """stdout and stderr of a block: keeps the head, counts the rest."""

    encoding = "utf-8"

    def __init__(self, limit: int):
        self.limit, self.parts, self.room, self.cut = limit, [], limit, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if head := text[: self.room]:
            self.parts.append(head)
            self.room -= len(head)
        self.cut += len(text) - len(head)
        return len(text)

    def text(self) -> str:
        return "".join(self.parts) + (f"\n... [{self.cut} characters cut]" if self.cut else "")


class Worker:
    """The process that runs the code. Its last methods are the builtins of the code."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self.sock, self.limits, self.pid = sock, limits, os.getpid()
        self.sock.setblocking(True)
        self.file = sock.makefile("rb")
        self.lock = threading.Lock()  # one exchange at a time, whatever threads the code starts
        self.open = False  # a block runs and has not been answered
        self.blocks = 0
        self.module = types.ModuleType("__main__")  # dataclasses and pickle look for it
        sys.modules["__main__"] = self.module
        self.namespace = self.module.__dict__
        self.reserved: dict[str, Any] = {}
        self.python = dict(vars(python_builtins))
        self.answer = {"content": "", "ready": False}

    def loop(self, problem: str) -> None:
        """Run blocks; answer each with `problem` if there is one."""
        while True:
            kind, message = self.receive()
            self.capture = sys.stdout = sys.stderr = Capture(self.limits.output_chars)
            self.open = True
            run = self.start if kind == b"S" else self.block
            error = problem or run(**message)
            self.restore()
            self.done(Result(self.capture.text(), error))

    def start(self, context: Any, tools: str) -> str:
        call("prctl", SET_NAME, b"repl", 0, 0, 0)
        offered = {name: getattr(self, name, context) for name in BUILTINS if name != "answer"}
        self.reserved = {"__builtins__": python_builtins, "__name__": "__main__", **offered}
        self.namespace.update(self.reserved)
        before = set(self.namespace)
        error = self.attempt(lambda: exec(compile(tools, "<repl tools>", "exec"), self.namespace))
        new = {k: v for k, v in self.namespace.items() if k not in before}
        self.reserved = {**new, **self.reserved}
        self.namespace["answer"] = self.answer
        return error

    def block(self, code: str) -> str:
        self.blocks += 1
        name = f"<repl {self.blocks}>"  # a name a block: a traceback finds the right source
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        run = lambda: exec(compile(code, name, "exec", dont_inherit=True), self.namespace)  # noqa
        error = self.attempt(run)
        if os.getpid() != self.pid:  # the code forked, and this is the child
            os._exit(0)
        return self.attempt(self.look_at_answer) or error

    def attempt(self, run: Callable[[], Any]) -> str:
        """Run it; the short traceback of whatever it raised, SystemExit included."""
        try:
            run()
        except Final:
            return ""
        except BaseException as error:
            text, limit = short_traceback(error), self.limits.output_chars
            more = len(text) - limit
            return text if more <= 0 else f"{text[:limit]}\n... [{more} characters cut]"
        return ""

    def look_at_answer(self) -> None:
        answer = self.namespace.get("answer")
        if isinstance(answer, dict) and answer.get("ready"):
            self.FINAL(answer.get("content"))

    def restore(self) -> None:
        """Put back the builtins, Python's own included. `answer` belongs to the code."""
        vars(python_builtins).update(self.python)
        self.namespace.update(self.reserved)
        sys.setrecursionlimit(1000)

    def receive(self) -> tuple[bytes, Any]:
        header = self.file.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)
        length, kind = HEADER.unpack(header)
        return kind, json.loads(self.file.read(length))

    def done(self, result: Result) -> None:
        """Answer the block, once."""
        with self.lock:
            if self.open:
                # No asdict: it copies deeply, and the answer may be deep.
                self.sock.sendall(frame(b"D", vars(result), self.limits.frame_mb))
                self.open = False

    def ask(self, kind: str, prompts: list[str], contexts: list | None) -> list:
        if not prompts:
            return []
        self.only_here()
        contexts = None if contexts is None else [json_value(c) for c in contexts]
        data = frame(b"Q", (kind, [str(p) for p in prompts], contexts), self.limits.frame_mb)
        with self.lock:
            if not self.open:  # after FINAL, or in a thread that outlived its block
                raise Final
            self.sock.sendall(data)
            return self.receive()[1]

    def only_here(self) -> None:
        if os.getpid() != self.pid:
            raise RuntimeError("a forked process can neither query nor answer")

    # What the code sees. Docstrings are for `help`.

    def FINAL(self, value: Any) -> None:
        """End with `value` as the answer. What JSON cannot say becomes its str."""
        self.only_here()
        value = json_value(value)
        size = len(json.dumps(value))
        if size > self.limits.answer_chars:
            limit = f"the limit is {self.limits.answer_chars}"
            raise ValueError(f"FINAL: the answer has {size} characters as JSON, {limit}")
        self.done(Result(self.capture.text(), "", value, True))
        raise Final

    def FINAL_VAR(self, name: str) -> None:
        """End with the value of the variable called `name` as the answer."""
        if not isinstance(name, str):
            raise TypeError("FINAL_VAR takes the name of a variable; FINAL takes a value")
        if name not in self.namespace:
            known = ", ".join(itertools.islice(self.SHOW_VARS(), 50)) or "none"
            raise NameError(f"FINAL_VAR: there is no variable {name!r}; there are: {known}")
        self.FINAL(self.namespace[name])

    def SHOW_VARS(self) -> dict[str, str]:
        """The variables you have made: {name: type and size}."""
        shown = {}
        for name, value in list(self.namespace.items()):
            if name.startswith("_") or name in self.reserved or value is self.answer:
                continue
            kind = type(value).__name__
            sized = type(value) in (str, bytes, list, tuple, dict, set, frozenset)
            unit = "characters" if isinstance(value, str) else "items"
            shown[name] = f"{kind}, {len(value)} {unit}" if sized else kind
        return shown

    def llm_query(self, prompt: str) -> str:
        """Ask the model one question; it sees nothing but the prompt."""
        return self.ask("llm", [prompt], None)[0]

    def llm_query_batched(self, prompts: list[str]) -> list[str]:
        """Ask the model many questions side by side; the answers come in order."""
        return self.ask("llm", [prompts] if isinstance(prompts, str) else list(prompts), None)

    def rlm_query(self, prompt: str, context: Any = None) -> Any:
        """Start a child with a REPL of its own; without a context it gets this one's."""
        return self.ask("rlm", [prompt], None if context is None else [context])[0]

    def rlm_query_batched(self, prompts: list[str] | str, contexts: list | None = None) -> list:
        """Start many children; one string for `prompts` is used for every context."""
        if isinstance(contexts, (str, bytes, dict)):
            raise TypeError("contexts must be a list with one context a prompt")
        contexts = None if contexts is None else list(contexts)
        if isinstance(prompts, str):
            prompts = [prompts] * (1 if contexts is None else len(contexts))
        prompts = list(prompts)
        if contexts is not None and len(contexts) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(contexts)} contexts")
        return self.ask("rlm", prompts, contexts)


def json_value(value: Any, above: tuple[int, ...] = ()) -> Any:
    """`value` as JSON carries it; `above` are the ids of the containers around it."""
    if value is None or isinstance(value, (str, float, bool)):
        return value
    if isinstance(value, int) and value.bit_length() < 10_000:  # Python prints no larger ones
        return value
    if len(above) < DEPTH and id(value) not in above:  # a cycle ends at its first repetition
        if isinstance(value, (list, tuple)):
            return [json_value(v, (*above, id(value))) for v in value]
        if isinstance(value, dict):
            inner = (*above, id(value))
            return {as_text(k): json_value(v, inner) for k, v in value.items()}
    return as_text(value)


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(value)
    except Exception:
        return "<unprintable>"


def short_traceback(error: BaseException) -> str:
    """The frames of the model's own code, and the exception."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if f.filename.startswith("<repl ")]
    lines = [f'  File "<repl>", line {f.lineno}, in {f.name}\n    {f.line}' for f in frames]
    if len(lines) > 8:  # a recursion says the same a thousand times
        lines = [*lines[:4], f"  ... [{len(lines) - 8} frames cut]", *lines[-4:]]
    lines += ["".join(traceback.format_exception_only(error)).rstrip()]
    head = ["Traceback (most recent call last):"] if frames else []
    return re.sub(r'(?m)^  File "<repl \d+>"', '  File "<repl>"', "\n".join(head + lines))


# --- for people -----------------------------------------------------------------------------------


def read_block(prompt: bool) -> str | None:
    """Lines until a statement is complete (a compound one ends with an empty line); None at EOF."""
    import codeop

    lines: list[str] = []
    while True:
        try:
            lines.append(input((">>> " if not lines else "... ") if prompt else ""))
        except EOFError:
            return "\n".join(lines) if lines else None
        with contextlib.suppress(SyntaxError, ValueError, OverflowError):
            if codeop.compile_command("\n".join(lines), "<repl>", "single") is None:
                continue
        return "\n".join(lines)  # complete, or wrong: then the REPL says how


def main() -> int:
    import argparse
    import asyncio

    parser = argparse.ArgumentParser(description="Sit in the REPL that the model sits in.")
    parser.add_argument("file", nargs="*",
                        help="becomes `context`; several: {name: text} (default standard input)")
    parser.add_argument("--seconds", type=float, default=60.0,
                        help="wall clock a block (default 60)")
    parser.add_argument("--sandbox", choices=("require", "auto", "off"), default="auto",
                        help="namespaces around it (default auto: where possible)")
    args = vars(parser.parse_args())
    files = args.pop("file")
    try:
        texts = {name: Path(name).read_text("utf-8", errors="replace") for name in files}
    except OSError as error:
        print(f"repl.py: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    context = texts if len(texts) > 1 else next(iter(texts.values()), "")
    if not files and not sys.stdin.isatty():
        context = sys.stdin.read()
        with contextlib.suppress(OSError):  # the text came through the pipe, the person types
            sys.stdin = open("/dev/tty")
    sys.stdout.reconfigure(errors="backslashreplace")  # lone surrogates
    # The person is waited for outside the event loop, so that Ctrl-C interrupts at once.
    with asyncio.Runner() as runner:
        try:
            repl = runner.run(REPL(context, limits=Limits(**args)).__aenter__())
            while (code := read_block(sys.stdin.isatty())) is not None:
                result = runner.run(repl.execute(code))
                print(result.stdout, end="\n" * (result.stdout[-1:] not in "\n"), flush=True)
                if result.error:
                    print(result.error, file=sys.stderr)
                if result.done:
                    print(result.final)
                if result.done or result.died:
                    return 1 if result.died else 0
            return 0
        except REPLError as error:
            print(f"repl.py: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
