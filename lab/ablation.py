"""Ablations: `python train.py --ablation NAME`, a named set of configurations over three seeds.

The configurations of a seed start from one warm-up, see the same questions and sample the same
number of tokens; only the flags in SETS differ. Each is a run of train.py in a directory of its own
under --out, so what was interrupted goes on where it was, and what is finished is not run again.
After every run the results are written to OUT/NAME.json and NAME.md, and drawn as NAME.svg; those
of the README are in ablations/.

The interval of a mean over seeds, and of a difference to the set's first configuration (paired, on
the same seeds), is Student's at 95 %. Left out: a search for the best value of anything.
"""
import json
import os
import statistics
import subprocess
import sys

from lab import chart
from tree import write_text

SEEDS = (0, 1, 2)
TOKENS = 170_000  # sampled in GRPO by each run, about 30 steps of the tiny setting
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile for so many seeds
SETS = {
    "core": {
        "default": "",
        "roots only": "--credit root",
        "children only": "--credit children",
        "children summed": "--children sum",
        "all tokens alike": "--length batch",
        "1/|y|": "--length sequence",
        "no std": "--std off",
        "rejection sampling": "--objective filter",
        "warm-up only": "--steps 0",
    },
    "more": {
        "default": "",
        "half own score": "--own 0.5",
        "own score alone": "--own 1",
        "LoRA 1": "--lora-rank 1 --lr 5e-3",
        "LoRA 16": "--lora-rank 16 --lr 5e-3",
        "DPO": "--objective dpo",
        "unbiased: summed, no std": "--children sum --std off",
        "1/|y|, no std": "--length sequence --std off",
        "one child drawn": "--children one",
        "process reward 0.2": "--process 0.2",
        "KL 0.01": "--kl 0.01",
        "two updates, clip 0.28": "--updates 2 --clip-high 0.28",
        "resampled": "--resample 2",
    },
}


def run(name: str, out: str) -> None:
    """Run what is missing of a set, seed by seed, and print its table.

    Raises ValueError for an unknown name, and if a finished run had other flags; RuntimeError if a
    run fails."""
    if name not in SETS:
        raise ValueError(f"--ablation is {name!r}; there are {', '.join(SETS)}")
    for seed in SEEDS:
        warmup = os.path.join(out, f"warmup-{seed}")
        if not os.path.exists(os.path.join(warmup, "warmup", "rlm.json")):
            train(warmup, f"--seed {seed} --steps 0 --heldout 8")
        for label, flags in SETS[name].items():
            path = run_path(out, label, seed)
            if os.path.exists(os.path.join(path, "result.json")):
                same(path, flags)
            else:
                train(path, f"--seed {seed} --model {warmup}/warmup --warmup-steps 0 --steps 1000 "
                            f"--tokens {TOKENS} {flags}")
            report(name, out)
    print(table(json_rows(name, out)))


def run_path(out: str, label: str, seed: int) -> str:
    plain = "".join(c if c.isalnum() else "-" for c in label).strip("-").lower()
    return os.path.join(out, f"{plain}-{seed}")


def same(path: str, flags: str) -> None:
    with open(os.path.join(path, "result.json"), encoding="utf-8") as file:
        had = json.load(file)["flags"]
    words = flags.split()
    for name, value in zip(words[::2], words[1::2]):
        name = name.strip("-").replace("-", "_")
        if had[name] != type(had[name])(value):
            raise ValueError(f"{path} was run with {name} {had[name]}, not {value}: remove it")


def train(path: str, flags: str) -> None:
    print(f"{path}: {flags}", flush=True)
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "train.py"), "--out", path,
               "--resume", *flags.split()]
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "train.log"), "a", encoding="utf-8") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        raise RuntimeError(f"{path}: the run failed with exit status {status}, see its train.log")


def report(name: str, out: str) -> None:
    """Write OUT/NAME.json, .md and .svg from the runs that are finished."""
    rows = json_rows(name, out)
    path, command = os.path.join(out, name), f"python train.py --ablation {name}"
    write_text(f"{path}.json", json.dumps({"command": command, "tokens": TOKENS, "rows": rows}))
    write_text(f"{path}.md", f"`{command}`\n\n{table(rows)}\n")
    write_text(f"{path}.svg", chart.dots(
        {row["name"]: [r["heldout_final"] for r in row["runs"]] for row in rows},
        f"Held-out F1 after {TOKENS:,} sampled tokens, one dot a seed"))


def json_rows(name: str, out: str) -> list[dict]:
    """One row a configuration with all its finished runs, in the order of the set."""
    rows = []
    for label, flags in SETS[name].items():
        runs = [read(run_path(out, label, seed)) for seed in SEEDS
                if os.path.exists(os.path.join(run_path(out, label, seed), "result.json"))]
        if runs:
            rows.append({"name": label, "flags": flags, "runs": runs,
                         "mean": mean([r["heldout_final"] for r in runs])})
    first = {r["seed"]: r["heldout_final"] for r in rows[0]["runs"]} if rows else {}
    for row in rows:
        row["difference"] = mean([r["heldout_final"] - first[r["seed"]] for r in row["runs"]
                                  if r["seed"] in first])
    return rows


def read(path: str) -> dict:
    """What the table keeps of a run."""
    with open(os.path.join(path, "result.json"), encoding="utf-8") as file:
        result = json.load(file)
    with open(os.path.join(path, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = {m["step"]: m for m in lines if m["phase"] == "grpo"}
    kept = {k: result[k] for k in ("seed", "heldout_warmup", "heldout_final", "heldout_4x",
                                   "sampled_tokens", "seconds")}
    for key in ("reward", "entropy", "tokens_worse", "tokens_better", "own_correlation"):
        kept[key] = [m[key] and round(m[key], 3) for _, m in sorted(steps.items())]
    return kept


def mean(values: list[float]) -> list[float] | None:
    """[mean, low, high]; the ends are None for a single value."""
    if not values:
        return None
    n, middle = len(values), statistics.fmean(values)
    if n == 1:
        return [round(middle, 4), None, None]
    error = STUDENT[n] * statistics.stdev(values) / n ** 0.5
    return [round(v, 4) for v in (middle, middle - error, middle + error)]


def table(rows: list[dict]) -> str:
    def interval(value):
        middle, low, high = value or (None, None, None)
        ends = f" [{low:+.3f}, {high:+.3f}]" if low is not None else ""
        return "" if middle is None else f"{middle:+.3f}{ends}"

    lines = ["| configuration | flags | seeds | mean | difference | four times the papers |",
             "|---|---|---|---|---|---|"]
    for row in rows:
        seeds = " ".join(f"{r['heldout_final']:.3f}" for r in row["runs"])
        name, flags = row["name"].replace("|", "\\|"), row["flags"] and f"`{row['flags']}`"
        larger = statistics.fmean(r["heldout_4x"] for r in row["runs"])
        lines.append(f"| {name} | {flags} | {seeds} | {row['mean'][0]:.3f} | "
                     f"{interval(row['difference'])} | {larger:.3f} |")
    return "\n".join(lines)
