"""A set of configurations over seeds: `python -m lab.ablation SET --out DIR`.

All configurations of a seed start from one warm-up, see the same questions and sample the
same number of tokens, unless nothing is left to learn from. Only the flags of their row
differ. A configuration without children starts from another warm-up, whose scripts call
nobody. Each run of train.py has its own directory under DIR. The same command continues
what was interrupted. DIR/SET.json gets all results, and a table is printed.

The difference to the set's first configuration is paired by seed, with Student's interval
at 95 %. `board` and `board-deep` also say how many tokens were sampled when the mean score
of the seeds first was 0.90. With --objective FILE.py they run that objective alone, as a
row for docs/board.md.
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

from runtime.files import read_json, write_json
from runtime.run import HELDOUT

TRAIN = str(Path(__file__).resolve().parent.parent / "train.py")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile for this many seeds


@dataclass(frozen=True)
class Set:
    """Configurations that are compared: {name: flags}."""
    rows: dict[str, str]
    flags: str = ""  # of all runs
    warm_up: str = ""  # of the warm-up alone
    tokens: int = 200_000  # sampled in GRPO by each run
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


ALONE = "--method rlm0"
CREDIT = {  # who answers for a reward, see docs/objective.md
    "inherit": "",
    "the blog's formula": "--length sequence",
    "all tokens alike": "--length batch",
    "leave one out": "--objective leave_one_out",
    "MaxRL": "--objective max_rl",
    "node mean (WideSeek-R1)": "--objective node_mean --length sequence",
    "RAO": "--objective rao",
    "RAO without depth weights": "--objective rao --children sum",
    "own score": "--objective own",
    "warm-up only": "--steps 0",
}
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
}
REACHED = 0.9  # of the held-out score, on the board
SETS = {
    "board": Set(BOARD, "--eval-every 5", tokens=400_000, seeds=(0, 1, 2)),
    "board-deep": Set(BOARD, "--task deep --eval-every 5", "--warmup-steps 1500",
                      tokens=400_000, seeds=(0, 1, 2)),
    "core": Set({
        "default": "",
        "roots only": "--credit root",
        "without children": ALONE,
        "children only": "--credit children",
        "children summed": "--children sum",
        "all tokens alike": "--length batch",
        "per node mean": "--length sequence",
        "no std": "--std off",
        "rejection sampling": "--objective filter",
        "warm-up only": "--steps 0",
    }),
    "credit-deep": Set(CREDIT, "--task deep --lr 3e-4", "--warmup-steps 1500", 300_000),
    "credit-definitions": Set(
        CREDIT | {"roots only": "--credit root"},
        "--task definitions --lora-rank 16 --lr 3e-4 --questions 4 --heldout 64",
        "--model smollm2 --warmup scripts --warmup-lr 1e-3 --warmup-steps 180",
        tokens=100_000, seeds=(0, 1)),
}


def run(name: str, out: str, objective: str = "") -> None:
    """Run what is missing of a set, write DIR/SET.json, and print the table."""
    kind, own = SETS[name], {objective: f"--objective {objective}"}
    rows = [{"name": label, "flags": flags, "runs": []}
            for label, flags in (own if objective else kind.rows).items()]
    for seed in kind.seeds:
        for row in rows:
            alone = ALONE if ALONE in row["flags"] else ""
            warmup = run_path(out, name, f"warmup {alone}", seed)
            train(warmup, f"--seed {seed} --steps 0 --heldout 8 {kind.flags} "
                          f"{kind.warm_up} {alone}")
            path = run_path(out, name, row["name"], seed)
            train(path, f"--seed {seed} --model {warmup}/warmup --warmup-steps 0 "
                        f"--steps 1000 --tokens {kind.tokens} {kind.flags} {row['flags']}")
            row["runs"].append(read(path))
    write_json(os.path.join(out, f"{name}.json"), {
        "command": f"python -m lab.ablation {name}", "flags": kind.flags,
        "tokens": kind.tokens, "rows": rows})
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
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "train.log"), "a", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    # A run without a gradient ends with status 1, but with a result.
    if status and not os.path.exists(result):
        sys.exit(f"{path}: exit status {status}, see its train.log")


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
    lines = ["| configuration | flags | seeds | mean | difference | tokens to "
             f"{REACHED} |", "|---" * 6 + "|"]
    first = [run["heldout_final"] for run in rows[0]["runs"]]
    for row in rows:
        scores = [run["heldout_final"] for run in row["runs"]]
        paired = [score - other for score, other in zip(scores, first)]
        cells = [row["name"], row["flags"] and f"`{row['flags']}`",
                 " ".join(f"{score:.3f}" for score in scores),
                 f"{statistics.fmean(scores):.3f}", interval(paired), reached(row["runs"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached(runs: list[dict]) -> str:
    """Sampled tokens, on average, when the mean held-out score of the runs was REACHED."""
    for points in zip(*(run["curve"] for run in runs)):
        tokens, scores = zip(*points)
        if statistics.fmean(scores) >= REACHED:
            return f"{statistics.fmean(tokens):,.0f}"
    return "–"


def interval(values: list[float]) -> str:
    """The mean of a value per seed, and Student's interval at 95 %."""
    n, middle = len(values), statistics.fmean(values)
    error = STUDENT[n] * statistics.stdev(values) / n ** 0.5
    return f"{middle:+.3f} [{middle - error:+.3f}, {middle + error:+.3f}]"


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
