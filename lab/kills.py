"""Kill a training run at random moments and resume it, again and again: `python tests/kills.py
--kills 20 --out DIR [--ranks 2] [flags of train.py]`.

Every so many seconds, drawn anew each time between 1 and --most, one process of the run (with
torchrun: torchrun or a rank) gets SIGKILL; the others have to be gone within 60 s, and the run is
resumed. After --kills of them it may end. Prints when it was killed, at which step it resumed, and
at last what the run reached, to compare with undisturbed ones.
"""
import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def family(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    with contextlib.suppress(OSError):  # it ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                found += [p for child in children for p in family(int(child))]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""


def alive(pids: list[int]) -> list[int]:
    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
    return [pid for pid in pids if state(pid) not in ("gone", "Z", "X")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--most", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", required=True)
    parser.add_argument("--kill-seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    rng = random.Random(args.kill_seed)
    launch = [sys.executable] if args.ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command = [*launch, str(ROOT / "train.py"), "--out", args.out, "--resume", *flags]
    result, kills = Path(args.out, "result.json"), 0
    result.unlink(missing_ok=True)
    while not result.exists():
        run = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
        if kills == args.kills:
            out, _ = run.communicate()
            print(out[-3000:], flush=True)
            if run.returncode:
                sys.exit(f"kills.py: it ended with status {run.returncode}")
            break
        try:
            out, _ = run.communicate(timeout=rng.uniform(1, args.most))
            sys.exit(f"kills.py: the run ended by itself, with status {run.returncode}, after "
                     f"{kills} kills: {out[-2000:]}")
        except subprocess.TimeoutExpired:
            pass
        members = family(run.pid)
        victim = rng.choice([pid for pid in members if "train.py" in command_line(pid)])
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        while left := alive(members):
            if time.monotonic() - began > 60:
                sys.exit(f"kills.py: processes {left} outlived process {victim} by 60 s")
            time.sleep(0.1)
        out, _ = run.communicate()
        kills += 1
        where = [line for line in out.splitlines() if "resuming" in line or "afresh" in line]
        errors = [line for line in out.splitlines() if "damaged" in line or "Error" in line]
        print(f"kill {kills}: all were gone after {time.monotonic() - began:.1f} s | "
              f"{' '.join(where)} | {' '.join(errors)}", flush=True)
    final = json.loads(result.read_text())
    steps = [json.loads(line)["step"] for line in Path(args.out, "metrics.jsonl").read_text()
             .splitlines() if json.loads(line)["phase"] == "grpo"]
    assert steps == list(range(1, len(steps) + 1)), f"steps in metrics.jsonl: {steps}"
    print(json.dumps({name: final[name] for name in ("seed", "heldout_warmup", "heldout_final",
                                                     "heldout_4x")}))


if __name__ == "__main__":
    main()
