"""Kill a training run at random moments and resume it, again and again:

    python -m lab.kills --kills 20 --out DIR [--ranks 2] [flags of train.py]

After a random time of 1 to --most seconds one process of the run gets SIGKILL: the trainer,
or with several ranks torchrun or a rank. All others have to be gone within 60 s. Then the
run is resumed. After --kills kills it may finish. Printed are how long the others lived,
which step is resumed, and at last what the run reached, to compare with undisturbed runs.
Left out: kills of the machine, which could also lose what the disk had not written.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime import console

SECONDS_TO_DIE = 60
REACHED = ("seed", "heldout_warmup", "heldout_final", "heldout_4x")


def fields(pid: int) -> list[str]:
    """What /proc/PID/stat holds after the name: state, parent, ...; [] if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """The process and all below it."""
    children = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        if stat := fields(int(process)):
            children.setdefault(int(stat[1]), []).append(int(process))
    members = [pid]
    for member in members:  # the list grows while it is read
        members += children.get(member, [])
    return members


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if fields(pid)[:1] not in ([], ["Z"], ["X"])]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def kill_one(run: subprocess.Popen, rng: random.Random) -> str:
    """Kill a process of the run and wait for the others; returns a line about it."""
    members = family(run.pid)
    victim = rng.choice([pid for pid in members if "train.py" in command_line(pid)])
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    while left := alive(members):
        if time.monotonic() - began > SECONDS_TO_DIE:
            sys.exit(f"kills.py: processes {left} outlived {victim} by {SECONDS_TO_DIE} s")
        time.sleep(0.1)
    seconds = time.monotonic() - began

    lines = run.communicate()[0].splitlines()
    words = ("resuming", "afresh", "damaged", "Error")
    told = [line for line in lines if any(word in line for word in words)]
    gone = f"all {len(members)} processes were gone after {seconds:.1f} s"
    return " | ".join([gone, *told])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the run's directory, as in train.py")
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--most", type=float, default=60,
                        help="seconds from a start to a kill, at most (default 60)")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--kill-seed", type=int, default=0, help="of the times and victims")
    args, flags = parser.parse_known_args()

    rng = random.Random(args.kill_seed)
    command = [sys.executable]
    if args.ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["train.py", "--out", args.out, *flags]
    result = Path(args.out, "result.json")
    result.unlink(missing_ok=True)

    for kill in range(args.kills + 1):
        resume = ["--resume"] * Path(args.out, "run.json").exists()
        run = subprocess.Popen(
            command + resume, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        last = kill == args.kills
        try:
            output, _ = run.communicate(timeout=None if last else rng.uniform(1, args.most))
        except subprocess.TimeoutExpired:
            print(f"kill {kill + 1}: {kill_one(run, rng)}", flush=True)
            continue
        print(output[-3000:], flush=True)
        if run.returncode or not last:
            sys.exit(f"kills.py: it ended by itself after {kill} kills, with status "
                     f"{run.returncode}")

    rows = map(json.loads, Path(args.out, "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if row["phase"] == "grpo"]
    if steps != list(range(1, len(steps) + 1)):
        sys.exit(f"kills.py: steps in metrics.jsonl are missing or double: {steps}")
    reached = json.loads(result.read_text())
    print(json.dumps({name: reached[name] for name in REACHED}))


if __name__ == "__main__":
    console.start(main)
