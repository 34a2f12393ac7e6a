"""A set of configurations over seeds: `python -m experiments.ablation SET --out DIR`.

All configurations of a seed start from one warm-up, see the same questions and sample the
same number of tokens, unless nothing is left to learn from. Only the flags of their row
differ. Each run of train.py has its own directory under DIR. The same command continues
what was interrupted. DIR/SET.json gets all results, and the rows of docs/board.md are
printed. With --objective FILE.py that objective is run alone, as one row.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from training.run import HELDOUT
from util import read_json, write_json

TRAIN = str(Path(__file__).resolve().parent.parent / "train.py")
SEEDS = (0, 1, 2)
TOKENS = 400_000  # sampled in GRPO by each run
REACHED = 0.9  # of the held-out score


@dataclass(frozen=True)
class Set:
    """Configurations that are compared: {name: flags}."""
    rows: dict[str, str]
    flags: str  # of all runs
    warm_up: str = ""  # of the warm-up alone


BOARD = {
    "GRPO, children inherit": "",
    "roots only": "--credit root",
    "node mean": "--objective node_mean --length sequence",
    "RAO": "--objective rao",
    "own score": "--objective own",
    "rejection sampling": "--objective filter",
    "DPO": "--objective dpo",
    "leave one out": "--objective leave_one_out",
    "MaxRL": "--objective max_rl",
    "prime-rl's rule": "--length batch --std off",
}
SETS = {
    "board": Set(BOARD, "--eval-every 5"),
    "board-deep": Set(BOARD, "--task deep --eval-every 5", "--warmup-steps 1500"),
}


def run(name: str, out: str, objective: str = "") -> None:
    """Run what is missing of a set, write DIR/SET.json, and print the table."""
    kind, own = SETS[name], {objective: f"--objective {objective}"}
    rows = [{"name": label, "flags": flags, "runs": []}
            for label, flags in (own if objective else kind.rows).items()]
    for seed in SEEDS:
        warmup = run_path(out, name, "warmup", seed)
        train(warmup, f"--seed {seed} --steps 0 --heldout 8 {kind.flags} {kind.warm_up}")
        for row in rows:
            path = run_path(out, name, row["name"], seed)
            train(path, f"--seed {seed} --model {warmup}/warmup --warmup-steps 0 "
                        f"--steps 1000 --tokens {TOKENS} {kind.flags} {row['flags']}")
            row["runs"].append(read(path))
    write_json(os.path.join(out, f"{name}.json"), {
        "command": f"python -m experiments.ablation {name}", "flags": kind.flags,
        "tokens": TOKENS, "rows": rows})
    print(table(rows))


def run_path(out: str, name: str, label: str, seed: int) -> str:
    plain = re.sub(r"\W+", "-", f"{name} {label}").strip("-").lower()
    return os.path.join(out, f"{plain}-{seed}")


def train(path: str, flags: str) -> None:
    """Run train.py, or continue its run, unless it is finished."""
    result = os.path.join(path, "result.json")
    if os.path.exists(result):
        return
    print(f"{path}: {flags}", flush=True)
    command = [sys.executable, TRAIN, "--out", path, *flags.split()]
    if os.path.exists(os.path.join(path, "run.json")):
        command.append("--resume")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.log", "a", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    # A run without a gradient ends with status 1, but with a result.
    if status and not os.path.exists(result):
        sys.exit(f"{path}: exit status {status}, see {path}.log")


def read(path: str) -> dict:
    """What the results keep of a run: its scores, and means of its last held-out trees."""
    result = read_json(os.path.join(path, "result.json"))
    with open(os.path.join(path, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    last = [line for line in lines if line.get("name") == "heldout_final"][-1]
    kept = {key: result.get(key) for key in ("seed", *HELDOUT, "sampled_tokens", "seconds")}
    curve = [(line["sampled"], line["score"]) for line in lines
             if line.get("name") == "heldout_now"]
    return kept | {"tokens": last["out"], "nodes": last["nodes"], "curve": curve}


def table(rows: list[dict]) -> str:
    lines = [f"| objective | flags | tokens to {REACHED} | of each seed | final score | "
             "mean |", "|---" * 6 + "|"]
    for row in rows:
        scores = [run["heldout_final"] for run in row["runs"]]
        cells = [row["name"], row["flags"] and f"`{row['flags']}`", reached(row["runs"]),
                 ", ".join(reached([run]) for run in row["runs"]),
                 " ".join(f"{score:.3f}" for score in scores),
                 f"{statistics.fmean(scores):.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached(runs: list[dict]) -> str:
    """Sampled tokens, on average, when the mean held-out score of the runs was REACHED."""
    for points in zip(*(run["curve"] for run in runs)):
        tokens, scores = zip(*points)
        if statistics.fmean(scores) >= REACHED:
            return f"{statistics.fmean(tokens) / 1000:.0f}k"
    return "–"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare configurations of train.py.")
    parser.add_argument("set", choices=SETS, help="which configurations")
    parser.add_argument("--out", required=True, help="the directory of all runs")
    parser.add_argument("--objective", default="", metavar="FILE.py",
                        help="run this objective alone")
    args = parser.parse_args()
    run(args.set, args.out, args.objective)


if __name__ == "__main__":
    main()
