"""Train while the machine misbehaves: `python -m lab.faults [flags of train.py]`.

One REPL start in ten is refused. The REPL server is killed about once in 3,000 starts (a
dozen steps), and all trees in flight are lost. For 20 starts in 5,000 the temporary
directory is a full disk: a small tmpfs without a free inode, which needs root and is left
out without. Training has to end all the same, and the lost trees have to be run again, or
excluded and counted. The result can be compared with undisturbed runs.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime import console
import train
from repl import Handle, REPLError

REFUSED = 1 / 10  # of the starts
KILLED = 1 / 3000  # of the starts
ROUND, FULL, EMPTY = 5000, 500, 520  # of 5,000 starts, the disk is full from the 500th


class Faults:
    """Stands between the client and the server, in place of `Handle.request`."""

    def __init__(self, disk: Path | None):
        self.request = Handle.request
        self.random = random.Random(0)
        self.disk = disk  # a small one, if there is one
        self.starts = 0
        self.counts = {"refused": 0, "killed": 0, "full disk": 0}

    def __call__(self, *args: object) -> None:
        self.starts += 1
        if self.disk and self.starts % ROUND == FULL:
            with contextlib.suppress(OSError):
                for i in range(100_000):
                    (self.disk / f"fill{i}").touch()
            self.counts["full disk"] += 1
            self.kill()  # the next server needs room for its directory
        if self.disk and self.starts % ROUND == EMPTY:
            for file in self.disk.glob("fill*"):
                file.unlink()
        if self.random.random() < REFUSED:
            self.counts["refused"] += 1
            raise REPLError("injected: the start was refused")
        if self.random.random() < KILLED:
            self.kill()
        self.request(*args)

    def kill(self) -> None:
        if Handle.current is not None:
            self.counts["killed"] += 1
            os.kill(Handle.current.process.pid, signal.SIGKILL)


def main() -> None:
    disk = tempfile.mkdtemp(prefix="small-disk-")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=4096", "tmpfs", disk]
    mounted = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    if mounted:
        tempfile.tempdir = disk
    else:
        print("faults: no right to mount, so the full disk is left out", file=sys.stderr)
    faults = Handle.request = Faults(Path(disk) if mounted else None)
    try:
        train.main()
    finally:
        Handle.stop()
        if mounted:
            subprocess.run(["umount", "-l", disk])
        os.rmdir(disk)
        print(f"faults injected: {faults.counts}")


if __name__ == "__main__":
    console.start(main)
