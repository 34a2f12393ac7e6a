"""A set of configurations over seeds: `python -m lab.ablation core|deep|more --out DIR`.

All configurations of a seed start from one warm-up, see the same questions and sample the
same number of tokens, unless nothing is left to learn from; only the flags of their row
differ. One without children has a warm-up of its own, whose scripts call nobody. Each is a
run of train.py in its own directory under DIR. What was interrupted is continued, and what
is finished is not run again. After every run the results are written to DIR/SET.json and
SET.md, and drawn as SET.svg; those of the documentation are in lab/results/.

The interval of a mean over seeds is Student's at 95 %. So is that of a difference to the
set's first configuration, which is paired by seed. Left out: a search for the best value.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import chart
from runtime import console
from runtime.files import read_json, write_text
from runtime.run import HELDOUT

TRAIN = str(Path(__file__).resolve().parent.parent / "train.py")
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4)  # of the rows that carry a claim
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile for this many seeds


@dataclass(frozen=True)
class Set:
    """Configurations that are compared: {name: flags}."""
    rows: dict[str, str]
    claims: tuple[str, ...] = ()  # names of those that are run with MORE_SEEDS as well
    flags: str = ""  # of all runs
    warm_up: str = ""  # of the warm-up alone
    tokens: int = 200_000  # sampled in GRPO by each run


ALONE = "--method rlm0"
SETS = {
    "core": Set({
        "default": "",
        "roots only": "--credit root",
        "without children": ALONE,
        "children only": "--credit children",
        "children summed": "--children sum",
        "all tokens alike": "--length batch",
        "1/|y|": "--length sequence",
        "no std": "--std off",
        "rejection sampling": "--objective filter",
        "warm-up only": "--steps 0",
    }, claims=("default", "roots only", "without children", "warm-up only")),
    "deep": Set({
        "two levels": "",
        "one level": "--method rlm1",
        "roots only": "--credit root",
        "without children": ALONE,
        "warm-up only": "--steps 0",
    }, flags="--task deep", warm_up="--warmup-steps 1500", tokens=300_000),
    "more": Set({
        "default": "",
        "half own score": "--objective half_own",
        "own score alone": "--objective own",
        "LoRA 1": "--lora-rank 1 --lr 5e-3",
        "LoRA 16": "--lora-rank 16 --lr 5e-3",
        "DPO": "--objective dpo",
        "unbiased: summed, no std": "--children sum --std off",
        "1/|y|, no std": "--length sequence --std off",
        "one child drawn": "--objective one_child",
        "process reward 0.2": "--objective process",
        "KL 0.01": "--kl 0.01",
        "two updates, clip 0.28": "--updates 2 --clip-high 0.28",
    }),
}


def run(name: str, out: str) -> None:
    """Run what is missing of a set, seed by seed, and print its table.

    Raises ValueError if a finished run had other flags, and RuntimeError if a run fails."""
    kind = SETS[name]
    for seed in (*SEEDS, *MORE_SEEDS):
        for label, flags in kind.rows.items():
            if seed in MORE_SEEDS and label not in kind.claims:
                continue
            warmup = run_path(out, name, "warmup", seed)
            first = f"--seed {seed} --steps 0 --heldout 8 {kind.flags} {kind.warm_up}"
            if ALONE in flags:
                warmup = run_path(out, name, "warmup alone", seed)
                first += f" {ALONE}"
            if not os.path.exists(os.path.join(warmup, "warmup", "rlm.json")):
                train(warmup, first)

            path = run_path(out, name, label, seed)
            if is_finished(path):
                check_flags(path, f"--tokens {kind.tokens} {kind.flags} {flags}")
            else:
                train(path, f"--seed {seed} --model {warmup}/warmup --warmup-steps 0 "
                            f"--steps 1000 --tokens {kind.tokens} {kind.flags} {flags}")
            report(name, out)
    print(table(json_rows(name, out)))


def run_path(out: str, name: str, label: str, seed: int) -> str:
    if SETS[name].flags:  # of another task than the other sets
        label = f"{name} {label}"
    plain = "".join(c if c.isalnum() else "-" for c in label).strip("-").lower()
    return os.path.join(out, f"{plain}-{seed}")


def is_finished(path: str) -> bool:
    return os.path.exists(os.path.join(path, "result.json"))


def check_flags(path: str, flags: str) -> None:
    """Raises ValueError if the finished run had other values of these flags."""
    had = read_json(os.path.join(path, "result.json"))["flags"]
    words = flags.split()
    for name, value in zip(words[::2], words[1::2]):
        name = name.strip("-").replace("-", "_")
        if had.get(name) is None or had[name] != type(had[name])(value):
            raise ValueError(f"{path} was run with {name} {had.get(name)}, not {value}: "
                             "remove it")


def train(path: str, flags: str) -> None:
    print(f"{path}: {flags}", flush=True)
    command = [sys.executable, TRAIN, "--out", path, *flags.split()]
    if os.path.exists(os.path.join(path, "run.json")):
        command.append("--resume")
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "train.log"), "a", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status and not is_finished(path):  # one without a gradient ends with 1, and counts
        raise RuntimeError(f"{path}: exit status {status}, see its train.log")


def report(name: str, out: str) -> None:
    """Write DIR/SET.json, SET.md and SET.svg from the runs that are finished."""
    rows = json_rows(name, out)
    path, command = os.path.join(out, name), f"python -m lab.ablation {name}"
    scores = {row["name"]: [r["heldout_final"] for r in row["runs"]] for row in rows}
    tokens = SETS[name].tokens
    title = f"Held-out score after {tokens:,} sampled tokens, one dot per seed"

    results = {"command": command, "tokens": tokens, "rows": rows}
    write_text(f"{path}.json", json.dumps(results))
    write_text(f"{path}.md", f"`{command}`\n\n{table(rows)}\n")
    write_text(f"{path}.svg", chart.dots(scores, title))


def json_rows(name: str, out: str) -> list[dict]:
    """One row per configuration with all its finished runs, in the order of the set."""
    rows = []
    for label, flags in SETS[name].rows.items():
        paths = [run_path(out, name, label, seed) for seed in (*SEEDS, *MORE_SEEDS)]
        runs = [read(path) for path in paths if is_finished(path)]
        if runs:
            scores = [r["heldout_final"] for r in runs]
            rows.append({"name": label, "flags": flags, "runs": runs, "mean": mean(scores)})

    first = {r["seed"]: r["heldout_final"] for r in rows[0]["runs"]} if rows else {}
    for row in rows:
        row["difference"] = mean([r["heldout_final"] - first[r["seed"]] for r in row["runs"]
                                  if r["seed"] in first])
    return rows


def read(path: str) -> dict:
    """What the results keep of a run: its scores, and some metrics of each step."""
    result = read_json(os.path.join(path, "result.json"))
    with open(os.path.join(path, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = {line["step"]: line for line in lines if line["phase"] == "grpo"}
    steps = [steps[number] for number in sorted(steps)]

    kept = {key: result.get(key) for key in ("seed", *HELDOUT, "sampled_tokens", "seconds")}
    for key in ("reward", "entropy", "tokens_worse", "tokens_better", "own_correlation"):
        kept[key] = [step[key] and round(step[key], 3) for step in steps]
    return kept


def mean(values: list[float]) -> list[float] | None:
    """[mean, low, high]; the ends are None for a single value."""
    if not values:
        return None
    n, middle = len(values), statistics.fmean(values)
    if n == 1:
        return [round(middle, 4), None, None]
    error = STUDENT[n] * statistics.stdev(values) / n ** 0.5
    return [round(value, 4) for value in (middle, middle - error, middle + error)]


def table(rows: list[dict]) -> str:
    def interval(value):
        middle, low, high = value or (None, None, None)
        ends = f" [{low:+.3f}, {high:+.3f}]" if low is not None else ""
        return "" if middle is None else f"{middle:+.3f}{ends}"

    def longer(row, score):
        values = [r.get(score) for r in row["runs"]]
        return "" if None in values else f"{statistics.fmean(values):.3f}"

    lines = ["| configuration | flags | seeds | mean | difference | 4 times as long | "
             "16 times |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        name = row["name"].replace("|", "\\|")
        flags = f"`{row['flags']}`" if row["flags"] else ""
        seeds = " ".join(f"{r['heldout_final']:.3f}" for r in row["runs"])
        lines.append(f"| {name} | {flags} | {seeds} | {row['mean'][0]:.3f} | "
                     f"{interval(row['difference'])} | {longer(row, 'heldout_4x')} | "
                     f"{longer(row, 'heldout_16x')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare configurations of train.py.")
    parser.add_argument("set", choices=list(SETS), help="which configurations")
    parser.add_argument("--out", required=True, help="the directory of all runs")
    args = parser.parse_args()
    try:
        run(args.set, args.out)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"lab.ablation: {error}")
    except KeyboardInterrupt:
        sys.exit("lab.ablation: interrupted; the same command continues")


if __name__ == "__main__":
    console.start(main)
