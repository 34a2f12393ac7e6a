"""Isolation of the REPL workers: limits, namespaces, a file system, a user id.

The server leaves the network and sees only the system's programs and this Python. Each
worker gets its own process namespace and directory, those of root also their own user ids.
Root needs CAP_SYS_ADMIN for this, other users need user namespaces. Without them a worker
has only its limits, a session, a directory and a short environment (docs/repl.md).
Left out: other systems than Linux, control groups, system-call filters.
"""
import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

DESCRIPTORS = 1 << 16  # that the server may open; it needs two per REPL
REPLS = DESCRIPTORS // 2

# CLONE_NEW*, MS_* and PR_* of the kernel's headers
NEW_FS, NEW_UTS, NEW_IPC = 0x20000, 0x4000000, 0x8000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
PARENT, CLONE = 0x8000, 56 if os.uname().machine == "x86_64" else 220
NOSUID, NODEV, BIND, REC, PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
PDEATHSIG, DUMPABLE, SET_NAME, NO_NEW_PRIVS = 1, 4, 15, 38

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/nix")
USER = 2_000_000_000  # the first user id of root's workers; nobody else has these
LIBC = ctypes.PyDLL(None, use_errno=True)  # it keeps the GIL, which a fork needs
LIBC.capset  # looked up once, not in each worker


@dataclass(frozen=True)
class Limits:
    """What one REPL may use. Crossing one never raises in the client: see `Result`."""

    seconds: float = 60.0  # processor time per block; by the wall clock ten times that,
    # which is paused while the block waits for an answer
    cpu_seconds: int = 600  # processor time of one process, in all its blocks (RLIMIT_CPU)
    output_chars: int = 8000  # kept of a block's output; also of its traceback
    memory_mb: int = 4096  # address space of one process (RLIMIT_AS)
    file_mb: int = 64  # its largest file (RLIMIT_FSIZE)
    disk_mb: int = 256  # all files together (in memory; only with namespaces)
    open_files: int = 256  # descriptors of one process (RLIMIT_NOFILE)
    processes: int = 128  # with their threads (RLIMIT_NPROC; only with namespaces)
    frame_mb: int = 256  # the largest frame, either way: a context, a query, its answers
    answer_chars: int = 1_000_000  # the largest answer, as JSON; above it FINAL(...) raises
    queries: int = 1000  # prompts per block; a call that crosses it gets error strings
    sandbox: str = "auto"  # require: namespaces; auto: where they are possible; off


def call(name: str, *args: Any) -> int:
    """A function of libc. Raises OSError."""
    if (result := getattr(LIBC, name)(*args)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    source, target, kind, options = map(str.encode, (source, target, kind, options))
    call("mount", source, target, kind, flags, options)


@dataclass
class Sandbox:
    """One kind of isolation. The methods stand in the order of use."""

    namespaces: bool
    user: int = 0  # for root: the first user id of its workers; else they share one

    def enter(self) -> None:
        """In the server. With a user namespace it goes on as a child: `fork` must return to
        a process namespace, and can only if this user namespace owns it."""
        if self.user or not self.namespaces:
            return
        uid, gid = os.getuid(), os.getgid()
        call("unshare", NEW_USER | NEW_PID)
        texts = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1",
                 "gid_map": f"{gid} {gid} 1"}
        for name, text in texts.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        if child := os.fork():
            os.closerange(3, DESCRIPTORS)
            os.waitpid(child, 0)
            os._exit(0)
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def build(self, base: str) -> None:
        """In the server: change to a new root. Workers will see its `/jail`."""
        self.processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
        call("unshare", NEW_FS | NEW_NET | NEW_UTS)
        socket.sethostname("repl")
        os.environ["HOME"] = os.environ["TMPDIR"] = "/repl"
        mount("", "/", "", REC | PRIVATE)
        mount("tmpfs", base, "tmpfs", 0, "mode=755,size=4m")
        os.umask(0o022)

        jail = f"{base}/jail"
        for path in ("/dev", "/proc", "/repl"):
            os.makedirs(jail + path)
        for name in ("null", "zero", "full", "random", "urandom"):
            os.close(os.open(f"{jail}/dev/{name}", os.O_CREAT))
            mount(f"/dev/{name}", f"{jail}/dev/{name}", "", BIND)

        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
        show(jail, {*SYSTEM, *prefixes, *map(os.path.realpath, prefixes)})
        if not os.path.lexists(jail + "/tmp"):
            os.symlink("/repl", jail + "/tmp")

        # The kernel lets workers mount /proc only if there is one here.
        os.mkdir(f"{base}/proc")
        mount("proc", f"{base}/proc", "proc")
        read_only = struct.pack("4Q", 1 | 2, 0, 0, 0)  # read-only, and nosuid
        call("syscall", 442, -100, base.encode(), 0x8000, read_only, 32)  # mount_setattr
        os.chdir(base)
        call("pivot_root", b".", b".")
        call("umount2", b".", 2)  # MNT_DETACH: the old root, now on top of the new one
        os.chdir("/")

    def fork(self, flags: int = 0) -> int:
        """In the nursery: fork a worker. Its process namespace dies with it. os.fork has no
        flags, and what it does besides is for threads: here are none."""
        if self.namespaces:
            call("unshare", NEW_PID)
        pid = -1
        try:
            pid = call("syscall", CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0)
        finally:
            if pid and self.namespaces:
                call("setns", self.processes, NEW_PID)
        return pid

    def confine(self, number: int, limits: Limits, directory: str, keep: int) -> None:
        """In the worker. It keeps the standard descriptors and `keep`."""
        os.setsid()  # a new group, which is killed as one
        os.closerange(3, keep)
        os.closerange(keep + 1, DESCRIPTORS)
        if self.namespaces:
            self.change_root(self.user + number, limits)
            directory = "/repl"
        else:
            os.mkdir(directory, 0o700)
            os.environ["HOME"] = os.environ["TMPDIR"] = directory
        # No capabilities (version 3 of the structure), and none from programs either.
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", DUMPABLE, 1, 0, 0, 0)  # otherwise its /proc/self is closed to it
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        call("prctl", SET_NAME, b"repl", 0, 0, 0)  # what ps and top show
        os.chdir(directory)
        self.set_limits(limits)
        os.dup2(1, 2)  # 0 and 1 are /dev/null already, 2 is the client's

    def change_root(self, user: int, limits: Limits) -> None:
        call("unshare", NEW_FS | NEW_IPC)
        options = f"mode=700,size={limits.disk_mb}m,nr_inodes={limits.disk_mb << 8}"
        if self.user:
            options += f",uid={user},gid={user}"
        mount("tmpfs", "/jail/repl", "tmpfs", NOSUID | NODEV, options)
        mount("proc", "/jail/proc", "proc", NOSUID | NODEV)
        if not self.user:
            call("unshare", NEW_USER)  # the kernel counts processes for each of these
        os.chroot("/jail")  # from in here no user namespace can be started
        if self.user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)

    def set_limits(self, limits: Limits) -> None:
        most = {"AS": limits.memory_mb << 20, "FSIZE": limits.file_mb << 20,
                "CPU": limits.cpu_seconds, "NOFILE": limits.open_files,
                "CORE": 0, "MSGQUEUE": 0}
        if self.namespaces:  # otherwise all processes of the user would count
            most["NPROC"] = limits.processes
        for name, value in most.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            value = min(value, resource.getrlimit(kind)[1] % 2**64)  # -1 is infinity
            resource.setrlimit(kind, (value, value))

    def fails(self, base: str) -> str:
        """Try it in child processes. Returns what went wrong, or ""."""
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                self.enter()
                self.build(base)
                if self.fork():
                    os.wait()
                else:
                    self.confine(0, Limits(), "", theirs)
                    open(os.__file__).close()
                    os.write(theirs, b"well")
            except OSError as error:
                os.write(theirs, str(error).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours) as file:
            report = file.read()
        os.waitpid(pid, 0)
        return "" if report == "well" else report or "it was killed"


def show(jail: str, paths: set[str]) -> None:
    """Make these links and directories visible in the jail."""
    for path in sorted(paths):  # parents first
        if os.path.islink(path):
            os.makedirs(os.path.dirname(jail + path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.symlink(os.readlink(path), jail + path)
        elif os.path.isdir(path) and not os.path.isdir(jail + path):
            os.makedirs(jail + path)
            if os.stat(path).st_mode & 0o005 == 0o005:
                mount(path, jail + path, "", BIND | REC)
            else:  # others may not enter (a virtual environment made by mktemp -d)
                show(jail, {entry.path for entry in os.scandir(path)})


def choose(sandbox: str, base: str) -> tuple[Sandbox, str]:
    """The first sandbox that works here, and the problems of those before it."""
    kinds = [Sandbox(True)]
    if os.getuid() == 0:  # each server has its own range of user ids
        kinds.insert(0, Sandbox(True, user=USER + os.getpid() % 4000 * REPLS))
    problems = []
    for kind in kinds if sandbox != "off" else []:
        if not (problem := kind.fails(base)):
            return kind, ""
        problems.append(problem)
    return Sandbox(False), "; ".join(problems)
