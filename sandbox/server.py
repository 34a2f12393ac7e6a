"""The server: a small process that forks the REPL workers, and the client's way to it.

The client starts the server when a REPL first needs it, and hands over one socket per REPL
(`Handle`). The server has a worker forked per REPL and relays its frames and the client's
without reading their JSON. It ends a REPL that overruns its time or breaks the protocol.
"""
from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from sandbox.isolation import (DESCRIPTORS, PARENT, REPLS, SET_NAME, Limits, Sandbox,
                               call, choose)
from sandbox.protocol import HEADER, frame, take_frame

# What model code often imports. Each library slows down every fork, so asyncio and hashlib
# (which loads OpenSSL) are not here, nor the module random: all workers would draw alike.
PRELOAD = (
    "bisect collections copy csv datetime difflib functools heapq math operator pprint "
    "re string textwrap unicodedata"
).split()
WALL = 10  # ten seconds of wall clock count as much as one of a processor
CORES = os.cpu_count() or 1
START_SECONDS = 60.0  # in which a REPL has to start
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class REPLError(RuntimeError):
    """The machine failed, not the code: no REPL was started, or the server was lost."""


class Handle:
    """The client's end of the server: one per process, started when first needed."""

    current: Handle | None = None

    def __init__(self, sandbox: str, program: str):
        import tempfile  # here, as the server and its forks do without it

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard % 2**64), hard))
        self.sandbox, self.owner = sandbox, os.getpid()
        self.base = tempfile.mkdtemp(prefix="repl-")  # see `stop`
        # Sequenced packets keep requests apart. The server ends when this socket is closed.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        arguments = json.dumps([theirs.fileno(), sandbox, self.base])
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8",
                       "HOME": self.base, "TMPDIR": self.base,
                       "PYTHONHASHSEED": "0"}  # sets print alike in each run
        # -s: without the user's packages
        command = [sys.executable, "-s", "-c", program, arguments]
        with theirs:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )

    @classmethod
    def request(cls, sock: socket.socket, limits: Limits, program: str) -> None:
        """Give `sock` a worker of the server, which runs `program`. Raises OSError."""
        request = json.dumps(asdict(limits)).encode()
        if cls.current and cls.current.sandbox == limits.sandbox:
            with contextlib.suppress(OSError):
                socket.send_fds(cls.current.control, [request], [sock.fileno()])
                return
        cls.stop()
        cls.current = cls(limits.sandbox, program)
        socket.send_fds(cls.current.control, [request], [sock.fileno()])

    @classmethod
    def stop(cls) -> None:
        handle, cls.current = cls.current, None
        if handle is not None and handle.owner == os.getpid():  # not in a forked child
            handle.control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                handle.process.wait(timeout=5)
            handle.process.kill()  # does nothing if it has ended
            handle.process.wait()
            subprocess.run(["rm", "-rf", handle.base])


atexit.register(Handle.stop)


class Channel:
    """A non-blocking socket of the server, and what it could not send yet."""

    def __init__(self, selector, sock: socket.socket, handler: Callable, slot: Slot):
        sock.setblocking(False)
        self.selector, self.sock, self.handler, self.slot = selector, sock, handler, slot
        self.outbox = bytearray()
        self.open, self.waits = True, 0
        selector.register(sock, selectors.EVENT_READ, self.ready)

    def ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.write(b"")
        if events & selectors.EVENT_READ and self.open:
            self.handler(self.slot)

    def read(self) -> bytes:
        """What one recv gets. b"" when the socket ended."""
        with contextlib.suppress(OSError):
            return self.sock.recv(1 << 18)
        return b""

    def write(self, data: bytes) -> None:
        """Send what the socket takes now. The rest is sent when the selector says so."""
        self.outbox += data
        try:
            while self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the other side is gone: the next read will tell
            self.outbox.clear()
        writing = selectors.EVENT_WRITE if self.outbox else 0
        if self.open and writing != self.waits:
            self.selector.modify(self.sock, selectors.EVENT_READ | writing, self.ready)
            self.waits = writing

    def close(self) -> None:
        if self.open:
            self.open = False
            self.selector.unregister(self.sock)
            self.sock.close()


@dataclass(eq=False)
class Slot:
    """A REPL in the server: its two channels, its worker, its clock."""

    limits: Limits
    client: Channel | None = None
    worker: Channel | None = None
    inbox: bytearray = field(default_factory=bytearray)  # from the worker
    pid: int = 0  # 0: no process, or none any more
    state: str = "idle"  # running, asking, idle or dead
    started: bool = False
    limit: float = START_SECONDS  # that the start, or the running block, may use
    wall: float = 0.0  # seconds by the wall clock, until the clock last stood
    since: float = 0.0  # when it began to run again
    before: float = 0.0  # processor time before the block
    deadline: float = 0.0  # when to look at the clock again

    def run_clock(self) -> None:
        if self.state == "idle":  # what ran between two blocks is not the block's
            self.wall, self.before = 0.0, processor_seconds(self.pid)
        self.state, self.since = "running", time.monotonic()
        self.deadline = self.since + self.limit / CORES
        if self.wall:  # otherwise the block begins, and there is nothing to read
            self.look()

    def stop_clock(self, state: str) -> None:
        if self.state == "running":
            self.wall += time.monotonic() - self.since
        self.state = state

    def used(self) -> float:
        """Seconds of the block: of processors, or a tenth of the wall clock where that is
        more. So it hardly matters what else runs on the machine. 0 between blocks."""
        if self.state == "idle":
            return 0.0
        running = time.monotonic() - self.since if self.state == "running" else 0.0
        spent = processor_seconds(self.pid) - self.before
        return max(spent, (self.wall + running) / WALL)

    def look(self) -> bool:
        """Whether the block's seconds are used up. Else it is looked at again before all
        cores together can use up the rest."""
        left = self.limit - self.used()
        self.deadline = time.monotonic() + max(0.01, left / CORES)
        return left <= 0


def processor_seconds(pid: int) -> float:
    """What a process and those below it have used, with those that ended."""
    ticks, below = 0, [pid]
    while below:
        pid = below.pop()
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{pid}/stat", "rb", 0) as file:
                numbers = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, numbers[11:15]))  # its own, and what ended below it
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb", 0) as file:
                    below += map(int, file.read().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def time_of(slot: Slot) -> bytes:
    """The frame that tells how long the block ran."""
    return frame(b"T", slot.used(), slot.limits.frame_mb)


class Server:
    """Relays frames and keeps the clocks. Never waits for one REPL."""

    def __init__(self, control: socket.socket, nursery: socket.socket, base: str,
                 parent: int):
        self.control, self.nursery, self.base = control, nursery, base
        self.parent = parent  # seen from any root
        self.workers: dict[int, Slot] = {}  # by process id, until that process is reaped

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
            wait = None
            if running:  # the kernel takes no longer wait than some weeks
                wait = min(3600.0, max(0.0, min(running) - time.monotonic()))
            for key, mask in self.selector.select(wait):
                key.data(mask)
            now = time.monotonic()
            for slot in self.workers.values():
                if slot.state == "running" and slot.deadline <= now and slot.look():
                    limit = f"{slot.limits.seconds:g} s"
                    error = f"the block ran for more than {limit} and the REPL was ended"
                    self.end(slot, "timeout", f"TimeoutError: {error}")

    def accept(self, _: int) -> None:
        """The client asks for a REPL: it sends one descriptor and the limits."""
        request, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
        if not request:
            self.shut_down()
        if not descriptors:  # none was free; the client sees that its socket is closed
            return
        slot = Slot(Limits(**json.loads(request)))
        client = socket.socket(fileno=descriptors[0])
        slot.client = Channel(self.selector, client, self.from_client, slot)
        try:
            self.fork(slot, request)
        except OSError as error:
            self.end(slot, "crash", f"no process could be started: {error}")

    def shut_down(self) -> None:
        """The client is gone: end all workers, remove their directories, exit."""
        for slot in self.workers.values():
            self.kill(slot)
        while self.workers:
            self.reap(0)
        with contextlib.suppress(OSError):  # in namespaces it is empty
            os.rmdir(os.path.basename(self.base), dir_fd=self.parent)
        with contextlib.suppress(OSError):  # but there is no rm
            os.execvp("rm", ["rm", "-rf", self.base])
        os._exit(0)

    def fork(self, slot: Slot, request: bytes) -> None:
        """Give it a worker, which waits for its first frame. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.nursery, [request], [theirs.fileno()])
        pid = int(self.nursery.recv(32))
        if pid < 0:
            raise OSError("the kernel refused")
        slot.pid, self.workers[pid] = pid, slot
        slot.worker = Channel(self.selector, ours, self.from_worker, slot)

    def from_client(self, slot: Slot) -> None:
        """Read once and pass the bytes on: a large context is never held in full. The
        first bytes of a frame start the clock."""
        data = slot.client.read()
        if not data:  # the client closed it
            slot.state = "dead"
            self.kill(slot)
            slot.client.close()
        if slot.state == "dead":
            return
        if slot.state != "running":
            slot.run_clock()
        slot.worker.write(data)

    def from_worker(self, slot: Slot) -> bool:
        """Read once; False when the socket ended. A forged frame ends only its own REPL."""
        data = slot.worker.read()
        if not data:  # make sure that it dies; `reap` tells the client
            self.kill(slot)
        slot.inbox += data
        try:
            while (found := take_frame(slot.inbox, slot.limits.frame_mb)) is not None:
                kind, data = found
                if kind == b"S" and slot.state == "running" and not slot.started:
                    self.begin(slot, json.loads(data[HEADER.size:]))
                    continue
                if slot.state != "running" or kind not in (b"Q", b"D"):
                    raise ValueError(f"{kind!r} while {slot.state}")
                slot.client.write(data if kind == b"Q" else time_of(slot) + data)
                slot.stop_clock("asking" if kind == b"Q" else "idle")
        except ValueError as error:
            self.end(slot, "protocol", f"ProtocolError: {error}")
        return slot.worker.open

    def begin(self, slot: Slot, error: str) -> None:
        """The worker has started, or tells why it cannot. Its first block begins."""
        if error:
            self.end(slot, "crash", error)
            return
        slot.started, slot.limit = True, slot.limits.seconds
        slot.run_clock()

    def end(self, slot: Slot, died: str, error: str) -> None:
        """Kill the worker and tell the client why. The client's socket stays open."""
        if slot.state == "dead":
            return
        ran = time_of(slot)
        slot.stop_clock("dead")
        self.kill(slot)
        kind, result = b"D" if slot.started else b"F", {"error": error, "died": died}
        slot.client.write(ran + frame(kind, result, slot.limits.frame_mb))

    def kill(self, slot: Slot) -> None:
        if slot.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)  # it may not have reached setsid yet
                os.killpg(slot.pid, signal.SIGKILL)
        if slot.worker:
            slot.worker.close()

    def reap(self, _: int) -> None:
        """Some workers died: tell their clients, end their groups, keep no zombies."""
        self.wake.recv(4096)
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT  # a zombie's id is not reused
        with contextlib.suppress(ChildProcessError):
            while child := os.waitid(os.P_ALL, 0, look):
                if child.si_pid not in self.workers:  # the nursery: start another server
                    os._exit(1)
                slot = self.workers.pop(child.si_pid)
                while slot.worker.open and self.from_worker(slot):
                    pass  # its last frame may still wait here
                how = "with exit code" if child.si_code == os.CLD_EXITED else "by signal"
                error = f"the REPL's process was ended {how} {child.si_status}"
                self.end(slot, "crash", f"ProcessError: {error}")
                self.kill(slot)  # its group, too
                os.waitpid(child.si_pid, 0)
                slot.pid = 0


def nurse(requests: socket.socket, sandbox: Sandbox, base: str, worker: type) -> None:
    """The nursery: a process that forks workers, which run `worker(sock, limits).loop()`,
    as children of the server. After a fork each page that is written is copied. The server
    would write four times as many."""
    forks, last = 0, b""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 4096, 1)
        if not request:
            os._exit(0)
        if request != last:  # most are the same: not again in each worker
            limits, last = Limits(**json.loads(request)), request
        forks += 1
        pid = -1
        with contextlib.suppress(OSError):
            pid = sandbox.fork(PARENT)
        if pid == 0:
            break
        os.close(descriptors[0])
        requests.send(b"%d" % pid)
    try:
        sandbox.confine(forks % REPLS, limits, f"{base}/{forks}", descriptors[0])
        worker(socket.socket(fileno=descriptors[0]), limits).loop()
    except OSError as error:  # the code itself cannot write to this stderr
        print(f"repl.py: a REPL cannot be isolated: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def main(worker: type) -> None:
    """The server's process. `Handle` starts it in the repository's directory."""
    control, sandbox, base = json.loads(sys.argv[1])
    del os.environ["PYTHONHASHSEED"]  # this Python has read it
    call("prctl", SET_NAME, b"repl-server", 0, 0, 0)  # what ps and top show

    # Model code cannot import anything of the repository.
    del sys.path[0]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("repl", "sandbox", "util"):
            del sys.modules[name]
    os.chdir(base)
    for name in PRELOAD:
        __import__(name)

    chosen, problem = choose(sandbox, base)
    if problem:
        print(f"repl.py: the sandbox has no namespaces ({problem})", file=sys.stderr)
        if sandbox != "auto":
            sys.exit(1)
    chosen.enter()
    requests, nursery = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.open(os.path.dirname(base), os.O_PATH)
    if chosen.namespaces:
        chosen.build(base)
    gc.collect()
    gc.freeze()  # later collections do not touch the pages that the workers share
    if os.fork() == 0:
        nursery.close()  # so the end of the server ends it,
        os.close(control)  # and the client sees that end at once
        nurse(requests, chosen, base, worker)
    requests.close()
    Server(socket.socket(fileno=control), nursery, base, parent).loop()
