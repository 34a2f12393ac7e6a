"""Train while the machine misbehaves, kill the run at random moments and resume it:

    python -m lab.faults --out DIR [--kills 20] [--most 60] [flags of train.py]

One REPL start in ten is refused. About once in 3,000 starts the REPL server is killed, and
all trees in flight are lost: they are run again, or left out and counted. After at most
--most seconds the run itself gets SIGKILL, and is resumed. After --kills kills it may
finish, and no step may be missing or double. What it reached can be compared with
undisturbed runs. Left out: kills of one of several ranks (tests/test_parallel.py) or of
the machine.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

REFUSED, KILLED = 1 / 10, 1 / 3000  # of the starts of REPLs


def train_disturbed() -> None:
    import train
    from repl import Handle, REPLError

    request, rng = Handle.request, random.Random()

    def disturbed(*args) -> None:
        if rng.random() < REFUSED:
            raise REPLError("injected: the start was refused")
        if rng.random() < KILLED and Handle.current is not None:
            os.kill(Handle.current.process.pid, signal.SIGKILL)
        request(*args)

    Handle.request = disturbed
    train.main()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--most", type=float, default=60.0)
    args, flags = parser.parse_known_args()

    command = [sys.executable, "-m", "lab.faults", "train", "--out", args.out, *flags]
    for kill in range(args.kills + 1):
        resume = ["--resume"] * Path(args.out, "run.json").exists()
        seconds = random.uniform(1, args.most) if kill < args.kills else None
        try:
            status = subprocess.run(command + resume, timeout=seconds).returncode
            break
        except subprocess.TimeoutExpired:  # which sends SIGKILL
            print(f"kill {kill + 1} after {seconds:.0f} s", flush=True)

    rows = map(json.loads, Path(args.out, "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if row["phase"] == "grpo"]
    print(f"{kill} kills, exit status {status}, steps {steps}")
    if status or steps != list(range(1, len(steps) + 1)):
        sys.exit("the run failed, or steps are missing or double")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
        train_disturbed()
    else:
        main()
