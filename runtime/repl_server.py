"""The process that forks REPL workers, and the client's way to it.

`Handle` is the client's end: it starts this file as a program when a REPL is first asked
for, and hands over one socket per REPL. `Server` is that program's loop. It forks a worker
per REPL (`Slot`), relays frames between worker and client (`Channel`), their JSON unread,
keeps each REPL's clock, and ends a REPL that overruns it or sends something out of turn.
Left out: the frames (frames.py), and what a worker is kept from (sandbox.py).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.frames import HEADER, frame, take_frame
from runtime.sandbox import DESCRIPTORS, SET_NAME, Limits, Sandbox, call, choose

if TYPE_CHECKING:
    from runtime.places import Places

# What model code likes to import is imported once, before the forks. Each library makes
# every fork dearer, so asyncio and hashlib (which loads OpenSSL) are not here.
PRELOAD = (
    "bisect collections copy csv datetime difflib functools heapq math operator pprint "
    "random re statistics string textwrap unicodedata"
).split()
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPARES = 8  # workers that wait for a REPL to be asked for
INTERRUPT = b"interrupt"  # in place of the limits of a REPL to start
START_SECONDS = 60.0  # for the context and the tools to load, whatever a block may take


class REPLError(RuntimeError):
    """The machine failed, not the code: no REPL was started, or the server was lost."""


# --- the client's end ---------------------------------------------------------------------


class Handle:
    """The client's end of the server: one per process, started when first needed."""

    current: Handle | None = None
    places: Places | None = None  # of the REPLs of this process; made when first needed
    quiet = False  # a first server has said what its sandbox lacks

    def __init__(self, sandbox: str):
        import subprocess  # here and below, as the server and its forks do without them
        import tempfile

        self.sandbox = sandbox
        self.base = tempfile.mkdtemp(prefix="repl-")  # see `stop`
        # Sequenced packets keep requests apart. The server ends when this socket is closed.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        hidden = [os.getcwd(), REPOSITORY, os.path.expanduser("~")]
        arguments = json.dumps([theirs.fileno(), sandbox, self.base, Handle.quiet, hidden])
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8",
                       "HOME": self.base, "TMPDIR": self.base}
        # -E and -s: nothing of the user's settings and packages.
        command = [sys.executable, "-E", "-s", "-m", "runtime.repl_server", arguments]
        with theirs:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )

    @classmethod
    def open_places(cls) -> Places:
        from runtime.places import Places, allowed

        cls.places = cls.places or Places(allowed(DESCRIPTORS))
        return cls.places

    @classmethod
    def request(cls, sock: socket.socket, limits: Limits) -> None:
        """Hand `sock` to the server, which gives it a worker. A dead server is replaced.

        Raises REPLError.
        """
        request = json.dumps(asdict(limits)).encode()
        if cls.current is not None and cls.current.sandbox != limits.sandbox:
            cls.stop()
        for attempt in (1, 2):
            try:
                cls.current = cls.current or cls(limits.sandbox)
                cls.quiet = True
                socket.send_fds(cls.current.control, [request], [sock.fileno()])
                return
            except OSError as error:
                cls.stop()
                problem = f"the REPL server cannot be reached: {error}"
        raise REPLError(problem)

    @classmethod
    def interrupt(cls) -> None:
        """Ctrl-C for the blocks that run: each gets SIGINT, and may or may not heed it."""
        if cls.current is not None:
            cls.current.control.send(INTERRUPT)

    @classmethod
    def stop(cls) -> None:
        import shutil
        import subprocess

        handle, cls.current = cls.current, None
        if handle is not None:
            handle.control.close()
            try:
                handle.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                handle.process.kill()
                handle.process.wait()
            shutil.rmtree(handle.base, ignore_errors=True)

    @classmethod
    def forget(cls) -> None:
        """In a fork of the client: the server stays the parent's."""
        handle, cls.current, cls.places = cls.current, None, None
        if handle is not None:
            handle.control.close()
            handle.process.returncode = 0  # not our child: there is nothing to wait for


atexit.register(Handle.stop)
os.register_at_fork(after_in_child=Handle.forget)


# --- the server ---------------------------------------------------------------------------


class Channel:
    """One non-blocking socket of the server, and what is not read or written in full."""

    def __init__(self, selector: Any, sock: socket.socket, handler: Callable, slot: Slot):
        sock.setblocking(False)
        self.selector, self.sock, self.handler, self.slot = selector, sock, handler, slot
        self.inbox, self.outbox = bytearray(), bytearray()
        self.open = True
        selector.register(sock, selectors.EVENT_READ, self.ready)

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
        """Send what the socket takes now. The rest is sent when the selector says so."""
        self.outbox += data
        try:
            while self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the other side is gone: reading will find out
            self.outbox.clear()
        writing = selectors.EVENT_WRITE if self.outbox else 0
        if self.open:
            self.selector.modify(self.sock, selectors.EVENT_READ | writing, self.ready)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.selector.unregister(self.sock)
            self.sock.close()
            self.inbox, self.outbox = bytearray(), bytearray()


@dataclass(eq=False)
class Slot:
    """One REPL in the server: its two channels, its worker, its clock."""

    limits: Limits
    client: Channel | None = None  # None: a spare, which nobody has asked for yet
    worker: Channel | None = None
    pid: int = 0  # 0: no process, or none any more
    number: int = 0  # added to the first user id; nobody else has it while the worker lives
    directory: str = ""  # only without namespaces
    state: str = "new"  # new, running, asking, idle or dead
    left: float = 0.0  # seconds left on the clock while it stands still
    deadline: float = 0.0  # when the clock ends while it runs
    asked: int = 0  # queries without an answer: while there are some, the clock stands
    head: bytes = b""  # of a frame of the client, as far as it is here
    rest: int = 0  # bytes of its payload that are still to come


class Server:
    """Forks workers, relays frames, ends what overruns. Never waits for a single REPL.

    In idle moments it forks a few spare workers, for the limits that were last asked for: a
    start then costs the client no fork. A fork runs `worker(sock, limits).loop(problem)`.
    """

    FROM_WORKER = {"running": b"QD", "asking": b"Q"}  # what may come, by state

    def __init__(self, control: socket.socket, sandbox: Sandbox, base: str, worker: type):
        self.control, self.sandbox, self.base, self.worker = control, sandbox, base, worker
        self.refusal = ""  # why there can be no REPL
        self.parent = os.open(os.path.dirname(base), os.O_RDONLY)
        self.numbers = collections.deque(range(DESCRIPTORS))
        self.workers: dict[int, Slot] = {}  # by process id, until that process is reaped
        self.erasing: set[int] = set()  # children that remove a directory
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
            spares_lack = self.limits is not None and len(self.spares) < SPARES
            events = self.selector.select(0 if spares_lack else wait)
            for key, mask in events:
                key.data(mask)
            if spares_lack and not events:
                try:
                    self.spares.append(self.fork(self.limits))
                except OSError:  # the next request will say why
                    self.limits = None
            now = time.monotonic()
            for slot in self.workers.values():
                if slot.state == "running" and slot.deadline <= now:
                    limit = f"{slot.limits.seconds:g} s"
                    error = f"the block ran for more than {limit} and the REPL was ended"
                    self.end(slot, "timeout", f"TimeoutError: {error}")

    def accept(self, _: int) -> None:
        """The client asks for a REPL: it sends one descriptor and the limits. Or for the
        end of the blocks that run."""
        request, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
        if not request:
            self.shut_down()
        if request == INTERRUPT:
            for slot in self.workers.values():
                if slot.state in ("running", "asking"):
                    os.kill(slot.pid, signal.SIGINT)
            return
        if not descriptors:  # we have too many: the kernel closed it, the client sees that
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
        client = socket.socket(fileno=descriptors[0])
        slot.client = Channel(self.selector, client, self.from_client, slot)
        if problem:
            self.end(slot, "crash", problem)

    def shut_down(self) -> None:
        """The client is gone: end all workers, remove the directory, exit."""
        for slot in self.workers.values():
            self.kill(slot)
        while self.workers or self.strays():
            self.reap(0)
        os.chdir("/")
        with contextlib.suppress(OSError):
            os.rmdir(os.path.basename(self.base), dir_fd=self.parent)
            os._exit(0)
        erase(self.base)

    # Starting workers

    def fork(self, limits: Limits) -> Slot:
        """A worker that waits for its first frame. Raises OSError."""
        if self.refusal:
            raise OSError(self.refusal)
        slot = Slot(limits, number=self.numbers[0])
        if not self.sandbox.namespaces:
            slot.directory = f"{self.base}/{time.monotonic_ns()}"
            os.mkdir(slot.directory, 0o700)
            if self.sandbox.user:
                user = self.sandbox.user + slot.number
                os.chown(slot.directory, user, user)
        ours, theirs = socket.socketpair()
        with theirs:
            slot.pid = self.sandbox.fork()
            if slot.pid == 0:
                self.work(slot, theirs)
        self.numbers.popleft()
        self.workers[slot.pid] = slot
        slot.worker = Channel(self.selector, ours, self.from_worker, slot)
        return slot

    def work(self, slot: Slot, sock: socket.socket) -> None:
        """The life of a worker. It never returns into the server's loop."""
        try:
            for other in self.workers.values():  # this worker may not see their frames
                for channel in filter(None, (other.client, other.worker)):
                    channel.inbox = channel.outbox = b""
            call("prctl", SET_NAME, b"repl-spare", 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            problem, keep = "", sock.fileno()
            try:
                self.sandbox.confine(slot.number, slot.limits, slot.directory, keep)
            except OSError as error:
                problem = f"cannot isolate it: {error}"
            self.worker(sock, slot.limits).loop(problem)
        finally:
            os._exit(1)

    # Relaying frames

    def from_client(self, slot: Slot) -> None:
        """Read once, and pass it on as it comes: a large context is never held in full."""
        try:
            slot.client.read()
        except (EOFError, OSError):  # closed: nobody is left to hear why
            slot.state = "dead"
            self.kill(slot)
            slot.client.close()
            return
        data, slot.client.inbox = slot.client.inbox, bytearray()
        if slot.state == "dead":
            return
        for kind in beginning(slot, data):
            slot.asked -= kind == b"R"
            if not slot.asked:  # the clock runs
                new = {"new": START_SECONDS, "idle": slot.limits.seconds}
                slot.deadline = time.monotonic() + new.get(slot.state, slot.left)
                slot.state = "running"
        slot.worker.write(data)

    def from_worker(self, slot: Slot) -> bool:
        """Read once; False at the end. A forged frame ends its own REPL at most."""
        try:
            slot.worker.read()
            most = slot.limits.frame_mb
            while (found := take_frame(slot.worker.inbox, most)) is not None:
                kind, data = found
                if kind not in self.FROM_WORKER.get(slot.state, b""):
                    raise ValueError(f"{kind!r} while {slot.state}")
                if slot.asked > slot.limits.processes:  # more than it can have threads
                    raise ValueError(f"{slot.asked} queries at once")
                if slot.state == "running":
                    slot.left = slot.deadline - time.monotonic()
                slot.asked += kind == b"Q"
                slot.state = "asking" if slot.asked else "idle"
                if kind == b"D":
                    self.tell_time(slot)
                slot.client.write(data)
        except (EOFError, OSError):  # `reap` says how it died; make sure that it does
            self.kill(slot)
        except ValueError as error:
            self.end(slot, "protocol", f"ProtocolError: {error}")
        return slot.worker.open

    def tell_time(self, slot: Slot) -> None:
        """Tell the client how long the block ran. After a start nobody asks."""
        seconds = max(0.0, slot.limits.seconds - slot.left)
        slot.left = slot.limits.seconds
        slot.client.write(frame(b"T", seconds, slot.limits.frame_mb))

    # Ending workers

    def end(self, slot: Slot, died: str, error: str) -> None:
        """Kill the worker and tell the client why. The client's socket stays open."""
        if slot.state == "dead":
            return
        if slot.state == "running":
            slot.left = slot.deadline - time.monotonic()
        slot.state = "dead"
        self.kill(slot)
        if slot.client is None:  # a spare that nobody has asked for
            self.spares.remove(slot)
        else:
            self.tell_time(slot)
            result = {"error": error, "died": died}
            slot.client.write(frame(b"D", result, slot.limits.frame_mb))

    def kill(self, slot: Slot) -> None:
        if slot.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)  # it may not have reached setsid yet
                os.killpg(slot.pid, signal.SIGKILL)
        if slot.worker:
            slot.worker.close()

    def reap(self, _: int) -> None:
        """Some children died: tell the client, end what they left, keep no zombie."""
        self.wake.recv(4096)
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT  # a zombie's id is not reused
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
                    how = cause_of_death(child, usage, slot.limits)
                    error = f"ProcessError: the REPL's process was ended {how}"
                    self.end(slot, "crash", error)
                    self.forget(slot)
                for pid in self.strays():
                    os.kill(pid, signal.SIGKILL)

    def strays(self) -> list[int]:
        """Without a process namespace: what dead workers started and left to us."""
        if self.sandbox.namespaces:
            return []
        found: list[str] = []
        with contextlib.suppress(OSError):  # some kernels do not have this file
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                found = file.read().split()
        return [pid for pid in map(int, found) if pid not in {*self.workers, *self.erasing}]

    def forget(self, slot: Slot) -> None:
        """Its process is gone: end what else runs as its user, and remove its directory."""
        slot.pid = 0
        if self.sandbox.user and self.strays():
            with contextlib.suppress(OSError):
                if (pid := os.fork()) == 0:
                    try:
                        os.setuid(self.sandbox.user + slot.number)
                        os.kill(-1, signal.SIGKILL)  # all at once, however fast they fork
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
        self.numbers.append(slot.number)
        if not slot.directory:
            return
        try:
            os.rmdir(slot.directory)
        except OSError:  # not empty: another process removes it, which may take long
            with contextlib.suppress(OSError):
                if (pid := os.fork()) == 0:
                    erase(slot.directory)
                self.erasing.add(pid)


def beginning(slot: Slot, data: bytes) -> Iterator[bytes]:
    """The kinds of the client's frames whose header ends in `data`, the next bytes of what
    it sends. Payloads are skipped."""
    at = 0
    while at < len(data):
        if slot.rest:
            step = min(slot.rest, len(data) - at)
            slot.rest -= step
        else:
            step = min(HEADER.size - len(slot.head), len(data) - at)
            slot.head += data[at : at + step]
            if len(slot.head) == HEADER.size:
                slot.rest, kind = HEADER.unpack(slot.head)
                slot.head = b""
                yield kind
        at += step


def cause_of_death(child: Any, usage: Any, limits: Limits) -> str:
    if usage.ru_utime + usage.ru_stime > limits.cpu_seconds - 0.1:
        return f"after {limits.cpu_seconds} s of processor time"
    if child.si_code == os.CLD_EXITED:
        return f"with exit code {child.si_status}"
    return f"by signal {child.si_status} ({signal.strsignal(child.si_status)})"


def erase(directory: str) -> None:
    """Become a process that removes it, however deep it is and whatever its modes are."""
    try:
        os.execvp("sh", ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", directory])
    finally:
        os._exit(1)


def main() -> None:
    """The server's process. `Handle` starts it, in the repository's directory."""
    # Here, not above: as a library, runtime knows nothing of the top level.
    from repl import Worker

    control, sandbox, base, quiet, hidden = json.loads(sys.argv[1])
    call("prctl", SET_NAME, b"repl-server", 0, 0, 0)  # what ps and top show

    # A block finds what it finds in any Python: nothing of the repository can be imported.
    del sys.path[0]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("repl", "runtime")]:
        del sys.modules[name]
    os.chdir(base)
    for name in PRELOAD:
        __import__(name)

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = min(DESCRIPTORS, hard % 2**64)  # -1 is infinity
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    chosen, lacks = choose(sandbox, base, hidden)
    if lacks and sandbox == "auto" and not quiet:
        print(f"repl.py: the sandbox has {lacks}", file=sys.stderr)
    chosen.enter()
    server = Server(socket.socket(fileno=control), chosen, base, Worker)
    if lacks and sandbox == "require":
        server.refusal = f"the sandbox has {lacks}"
    chosen.build(base, hidden)
    gc.collect()
    gc.freeze()  # later collections do not touch the pages that the workers share
    server.loop()


if __name__ == "__main__":
    main()
