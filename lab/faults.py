"""Train while the machine misbehaves: `python tests/faults.py [flags of train.py]`.

One REPL start in ten is refused, the fork server is killed about once in 3,000 starts (a dozen
steps; all trees in flight are lost each time), and for 20 starts in 5,000 the temporary directory
is a full disk. Training has to end all the same, with the
lost trees run again or excluded, and counted; what it reaches is compared with undisturbed runs.
The full disk needs root (a small tmpfs is mounted); without it that fault is left out, and said.
"""
import os
import random
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import repl  # noqa: E402
import train  # noqa: E402

faults = {"refused": 0, "killed": 0, "full disk": 0}


def inject(rng: random.Random, disk: str) -> None:
    request, starts = repl.Handle.request, 0

    def faulty(*args):
        nonlocal starts
        starts += 1
        if disk and starts % 5000 == 500:
            fill(disk)
            faults["full disk"] += 1
            kill()  # or the server would need no room: it has its directory already
        if disk and starts % 5000 == 520:
            for name in os.listdir(disk):
                if name.startswith("fill"):
                    os.remove(os.path.join(disk, name))
        if rng.random() < 0.1:
            faults["refused"] += 1
            raise repl.REPLError("injected: the start was refused")
        if rng.random() < 1 / 3000:
            kill()
        return request(*args)

    def kill():
        if repl.Handle.current is not None:
            faults["killed"] += 1
            os.kill(repl.Handle.current.process.pid, signal.SIGKILL)

    repl.Handle.request = faulty


def fill(disk: str) -> None:
    """Take every byte and every inode."""
    try:
        with open(os.path.join(disk, "fill"), "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass
    try:
        for i in range(100_000):
            open(os.path.join(disk, f"fill{i}"), "wb").close()
    except OSError:
        pass


def main() -> None:
    disk = tempfile.mkdtemp(prefix="small-disk-")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=4096", "tmpfs", disk]
    mounted = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    if mounted:
        tempfile.tempdir = disk
    else:
        print("faults.py: no right to mount a small disk: that fault is left out")
    inject(random.Random(0), disk if mounted else "")
    try:
        train.main()
    finally:
        print(f"faults injected: {faults}")
        repl.Handle.stop()
        if mounted:
            subprocess.run(["umount", "-l", disk])
        os.rmdir(disk)


if __name__ == "__main__":
    main()
