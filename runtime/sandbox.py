"""What keeps a REPL's code from the machine: limits, namespaces, a file system, a user id.

repl.py's server uses this file: once, when it starts, it chooses the best sandbox that works here,
and then for every worker that it forks. Everything goes through libc, so that a start costs less
than a millisecond more than a bare fork. Left out: control groups and system-call filters. Linux
only; standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DESCRIPTORS = 4096  # the server holds two a REPL
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_FS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (  # CLONE_NEW*
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
NOSUID, NODEV, BIND, REC, PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18  # MS_*
PDEATHSIG, DUMPABLE, KEEPCAPS, SET_NAME = 1, 4, 8, 15  # PR_*
SUBREAPER, NO_NEW_PRIVS, AMBIENT = 36, 38, 47  # PR_*
READ_SEARCH = 2  # CAP_DAC_READ_SEARCH
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/nix")
USER = 2_000_000_000  # the first of the user ids that workers of root take; nobody else has them


@dataclass(frozen=True)
class Limits:
    """What one REPL may use. Crossing one never raises in the trainer: the `Result` says so."""

    seconds: float = 60.0  # wall clock a block, paused while it waits for a query's answer
    cpu_seconds: int = 600  # processor time of one process, all blocks together (RLIMIT_CPU)
    output_chars: int = 8000  # stdout and stderr of a block that are kept; also of its traceback
    memory_mb: int = 4096  # address space of one process (RLIMIT_AS)
    file_mb: int = 64  # its largest file (RLIMIT_FSIZE)
    disk_mb: int = 256  # all files together (in memory; only with namespaces)
    open_files: int = 256  # descriptors of one process (RLIMIT_NOFILE)
    processes: int = 128  # processes and threads (RLIMIT_NPROC; only root or with namespaces)
    frame_mb: int = 256  # the largest frame, either way: a context, a query, its answers
    answer_chars: int = 1_000_000  # the largest final answer, as JSON; above it FINAL(...) raises
    queries: int = 1000  # prompts a block may ask; a call that crosses it returns error strings
    sandbox: str = "auto"  # require: no REPL without namespaces; auto: say so once; off: none


def call(name: str, *args: Any) -> None:
    """A function of libc. Raises OSError."""
    if getattr(LIBC, name)(*args) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


@dataclass
class Sandbox:
    """What keeps the code from the machine, in the order in which it is put up.

    `mapped`: through a user namespace, as anyone may, but with one user id for all. `user`: the
    first of the ids that workers take; 0 if they keep the server's.
    """

    namespaces: bool
    mapped: bool = False
    user: int = 0

    def enter(self) -> None:
        """In the server's process, first. With a user namespace the server goes on in a child: it
        can only return (`fork`) to a process namespace that this user namespace owns."""
        if not self.mapped:
            call("prctl", SUBREAPER, 1, 0, 0, 0)  # what leaves a worker's session comes to us
            return
        uid, gid = os.getuid(), os.getgid()
        call("unshare", NEW_USER | NEW_PID)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        if child := os.fork():
            os.closerange(3, DESCRIPTORS)
            os.waitpid(child, 0)
            os._exit(0)
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def build(self, base: str, hidden: list[str]) -> None:
        """In the server: a root of its own, in which workers see `/jail`. Only what is listed here
        is in there; `hidden` are directories to cover should they lie below one of those."""
        if not self.namespaces:
            os.chmod(base, 0o711)
            return
        self.processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
        call("unshare", NEW_FS | NEW_NET | NEW_UTS)
        socket.sethostname("repl")
        mount("", "/", "", REC | PRIVATE)
        mount("tmpfs", base, "tmpfs", 0, "mode=755,size=4m")
        os.umask(0o022)
        jail = f"{base}/jail"
        for path in ("/dev", "/proc", "/repl"):
            os.makedirs(jail + path)
        for name in ("null", "zero", "full", "random", "urandom"):
            os.close(os.open(f"{jail}/dev/{name}", os.O_CREAT))
            mount(f"/dev/{name}", f"{jail}/dev/{name}", "", BIND)
        python = {p for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)
                  for p in (prefix, os.path.realpath(prefix))}
        self.show(jail, {*SYSTEM, *python})
        for path in {*hidden} - {*SYSTEM, *python, "/"}:
            if os.path.isdir(jail + path) and os.stat(jail + path).st_dev != os.stat(jail).st_dev:
                mount("tmpfs", jail + path, "tmpfs", 0, "mode=755,size=4m")
        self.show(jail, python)
        for path in ("/tmp", "/var/tmp", "/dev/shm"):
            if not os.path.lexists(jail + path):
                os.makedirs(os.path.dirname(jail + path), exist_ok=True)
                os.symlink("/repl", jail + path)
        os.mkdir(f"{base}/proc")
        mount("proc", f"{base}/proc", "proc")  # in sight, or the kernel refuses it to the workers
        attributes = struct.pack("4Q", 1 | 2, 0, 0, 0)  # read-only, nosuid
        call("syscall", 442, -100, base.encode(), 0x8000, attributes, 32)  # mount_setattr
        os.chdir(base)
        call("pivot_root", b".", b".")
        call("umount2", b".", 2)  # MNT_DETACH: the old root, now on top of the new one
        os.chdir("/")

    @staticmethod
    def show(jail: str, paths: set[str]) -> None:
        for path in sorted(paths):  # parents first
            if os.path.islink(path):
                os.makedirs(os.path.dirname(jail + path), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.symlink(os.readlink(path), jail + path)
            elif os.path.isdir(path) and not os.path.isdir(jail + path):
                os.makedirs(jail + path)
                mount(path, jail + path, "", BIND | REC)

    def fork(self) -> int:
        """In the server: a worker, the first process of a namespace that dies with it."""
        if not self.namespaces:
            return os.fork()
        call("unshare", NEW_PID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid:
                call("setns", self.processes, NEW_PID)
        return pid

    def confine(self, number: int, limits: Limits, directory: str, keep: int) -> None:
        """In the worker, with no descriptor but the standard ones and `keep`."""
        os.setsid()  # a group of its own, killed as one
        os.closerange(3, keep)
        os.closerange(keep + 1, DESCRIPTORS)
        os.dup2(1, 2)  # 0 and 1 are /dev/null already, 2 was the trainer's
        user = self.user and self.user + number
        if self.namespaces:
            call("unshare", NEW_FS | NEW_IPC)
            owner = f",uid={user},gid={user}" if user else ""
            mount("tmpfs", "/jail/repl", "tmpfs", NOSUID | NODEV,
                  f"mode=700,size={limits.disk_mb}m,nr_inodes={limits.disk_mb << 8}{owner}")
            mount("proc", "/jail/proc", "proc", NOSUID | NODEV)
            if self.mapped:
                call("unshare", NEW_USER)  # processes are counted for each of these
            os.chroot("/jail")  # and who is in there may not start a user namespace
            directory = "/repl"
        if user:
            call("prctl", KEEPCAPS, 1, 0, 0, 0)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        # Outside of the jail Python may lie where only root reads: that right is kept, if had.
        for rights in ([1 << READ_SEARCH] if user and not self.namespaces else []) + [0]:
            data = struct.pack("6I", rights, rights, rights, 0, 0, 0)
            if not LIBC.capset(struct.pack("Ii", 0x20080522, 0), data):
                break
        if rights:
            call("prctl", AMBIENT, 2, READ_SEARCH, 0, 0)  # for the programs that it starts
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", DUMPABLE, 1, 0, 0, 0)  # or its own /proc/self is closed to it
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        call("prctl", SUBREAPER, 1, 0, 0, 0)  # its orphans stay its own
        os.chdir(directory)
        os.environ["HOME"] = os.environ["TMPDIR"] = directory
        most = {"AS": limits.memory_mb << 20, "FSIZE": limits.file_mb << 20, "CORE": 0,
                "CPU": limits.cpu_seconds, "NOFILE": limits.open_files, "MSGQUEUE": 0}
        if user or self.mapped:  # else it would count all processes of the user
            most["NPROC"] = limits.processes
        for name, value in most.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            value = min(value, resource.getrlimit(kind)[1] % 2**64)  # -1 is infinity
            resource.setrlimit(kind, (value, value))

    def fails(self, base: str, hidden: list[str]) -> str:
        """Try all of it in children. Returns what went wrong, or nothing."""
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                self.enter()
                self.build(base, hidden)
                if self.fork() == 0:
                    self.confine(0, Limits(), base, theirs)
                    open(os.__file__).close()
                    os.write(theirs, b"well")
                else:
                    os.wait()
            except OSError as error:
                os.write(theirs, str(error).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours) as file:
            said = file.read()
        os.waitpid(pid, 0)
        return "" if said == "well" else said or "it was killed"


def choose(sandbox: str, base: str, hidden: list[str]) -> tuple[Sandbox, str]:
    """The best sandbox that works here, and in words what it lacks."""
    user = USER + os.getpid() % 30_000 * DESCRIPTORS  # each server has a range of its own
    kinds = [Sandbox(True, user=user), Sandbox(True, mapped=True), Sandbox(False, user=user),
             Sandbox(False)]
    problem = ""
    for kind in [k for k in kinds[2 * (sandbox == "off"):] if not (k.user and os.getuid())]:
        if not (error := kind.fails(base, hidden)):
            break
        problem = problem or error
    lacks = ["no namespaces"] * (not kind.namespaces)
    if not kind.user and not (kind.mapped and os.getuid()):  # nothing binds root
        lacks += ["no limit of processes"]
    return kind, " and ".join(lacks) + f" ({problem})" * bool(lacks)
