"""A set of configurations over seeds: `python -m lab.ablation SET --out DIR`.

SET is core, deep, more, price, or one of credit-evidence, credit-deep, credit-definitions;
`credit` is the last three. credit-definitions starts from a pretrained model: --model DIR.

All configurations of a seed start from one warm-up, see the same questions and sample the
same number of tokens, unless nothing is left to learn from; only the flags of their row
differ. One without children has a warm-up of its own, whose scripts call nobody. Each is a
run of train.py in its own directory under DIR. What was interrupted is continued, and what
is finished is not run again, whichever set it was run for. After every run the results are
written to DIR/SET.json and SET.md, and drawn as SET.svg, and as SET-tokens.svg against the
tokens of a held-out tree; those of the documentation are in lab/results/. Runs that are in
DIR/SET.json alone count as finished. So a set can be begun on one machine and ended on
another.

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
# What the results keep of the trees of the last held-out evaluation: key -> name there.
OF_TREES = {"tokens": "out", "nodes": "nodes", "critical_path": "critical_path"}
TOKENS = "sampled tokens of a held-out tree"
COLUMNS = [  # of the table, after score and difference: head, key, format
    ("4 times as long", "heldout_4x", ".3f"), ("16 times", "heldout_16x", ".3f"),
    ("tokens", "tokens", ".0f"), ("nodes", "nodes", ".1f"),
    ("critical path", "critical_path", ".0f")]
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile for this many seeds


@dataclass(frozen=True)
class Set:
    """Configurations that are compared: {name: flags}."""
    rows: dict[str, str]
    claims: tuple[str, ...] = ()  # names of those that are run with MORE_SEEDS as well
    task: str = ""  # runs of one task have one warm-up per seed, in whatever set they are
    flags: str = ""  # of all runs
    warm_up: str = ""  # of the warm-up alone; {model} is --model
    tokens: int = 200_000  # sampled in GRPO by each run
    seeds: tuple[int, ...] = ()  # of all rows; empty: SEEDS

    def seeds_of(self, label: str) -> tuple[int, ...]:
        if self.seeds:
            return self.seeds
        return (*SEEDS, *MORE_SEEDS) if label in self.claims else SEEDS

    def flags_of_all(self) -> str:
        return f"{self.flags} --task {self.task}".strip() if self.task else self.flags


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
    "fork (Tree-GRPO)": "--objective fork",
    "warm-up only": "--steps 0",
}
DEEP = dict(task="deep", warm_up="--warmup-steps 1500", tokens=300_000)
# At the default of 7e-4 a step can break the policy's syntax for good. Where forms are
# compared, such luck must not decide.
STEADY = dict(DEEP, flags="--lr 3e-4")
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
    }, claims=("two levels",), **DEEP),
    "price": Set({
        "inherit": "",
        "price 1": "--cost 1",
        "price 4": "--cost 4",
        "price 8": "--cost 8",
    }, **STEADY),
    "credit-evidence": Set(CREDIT, claims=tuple(CREDIT), task="evidence"),
    "credit-deep": Set(CREDIT, claims=tuple(CREDIT), **STEADY),
    "credit-definitions": Set(
        CREDIT | {"roots only": "--credit root"}, task="definitions", seeds=(0, 1),
        flags="--lora-rank 16 --lr 3e-4 --questions 4 --heldout 64",
        warm_up="--model {model} --warmup scripts --warmup-lr 1e-3 --warmup-steps 180",
        tokens=100_000),
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
        "two updates, clip 0.28": "--updates 2",
    }),
}


def run(name: str, out: str, model: str = "", seeds: list[int] | None = None) -> None:
    """Run what is missing of a set, seed by seed (or of these seeds), and print its table.

    Raises ValueError if a finished run had other flags, or if the set starts from a model
    and none is given, and RuntimeError if a run fails."""
    kind = SETS[name]
    if "{model}" in kind.warm_up and not model:
        raise ValueError(f"{name} starts from a pretrained model: give --model DIR")
    all_flags = kind.flags_of_all()
    known = known_runs(name, out)
    for seed in seeds or (*SEEDS, *MORE_SEEDS):
        for label, flags in kind.rows.items():
            if seed not in kind.seeds_of(label) or (label, seed) in known:
                continue
            warmup = run_path(out, name, "warmup", seed)
            first = (f"--seed {seed} --steps 0 {all_flags} --heldout 8 "
                     f"{kind.warm_up.format(model=model)}")
            if ALONE in flags:
                warmup = run_path(out, name, "warmup alone", seed)
                first += f" {ALONE}"
            if not os.path.exists(os.path.join(warmup, "warmup", "rlm.json")):
                train(warmup, first)

            path = run_path(out, name, label, seed)
            if is_finished(path):
                check_flags(path, f"--tokens {kind.tokens} {all_flags} {flags}")
            else:
                train(path, f"--seed {seed} --model {warmup}/warmup --warmup-steps 0 "
                            f"--steps 1000 --tokens {kind.tokens} {all_flags} {flags}")
            report(name, out)
    print(table(json_rows(name, out)))


def run_path(out: str, name: str, label: str, seed: int) -> str:
    if SETS[name].task:
        label = f"{SETS[name].task} {label}"
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


def known_runs(name: str, out: str) -> dict[tuple[str, int], dict]:
    """(configuration, seed) -> the run, of those in DIR/SET.json that have no directory.

    Raises ValueError if they had other flags."""
    path = os.path.join(out, f"{name}.json")
    if not os.path.exists(path):
        return {}
    results = read_json(path)
    known = {}
    for row in results["rows"]:
        label = row["name"]
        runs = [r for r in row["runs"]
                if not is_finished(run_path(out, name, label, r["seed"]))]
        had = row["flags"], results.get("flags"), results["tokens"]
        kind = SETS[name]
        if runs and had != (kind.rows.get(label), kind.flags_of_all(), kind.tokens):
            raise ValueError(
                f"{path}: {label} was run with other flags or tokens: remove it")
        known |= {(label, r["seed"]): r for r in runs}
    return known


def report(name: str, out: str) -> None:
    """Write DIR/SET.json, SET.md and SET.svg from the runs that are finished."""
    rows = json_rows(name, out)
    path, command = os.path.join(out, name), f"python -m lab.ablation {name}"
    scores = {row["name"]: [r["heldout_final"] for r in row["runs"]] for row in rows}
    tokens, flags = SETS[name].tokens, SETS[name].flags_of_all()
    title = f"Held-out score after {tokens:,} sampled tokens"

    results = {"command": command, "flags": flags, "tokens": tokens, "rows": rows}
    write_text(f"{path}.json", json.dumps(results))
    says = f"`{command}`"
    if flags:
        says += f": all runs with `{flags}`"
    write_text(f"{path}.md", f"{says}\n\n{table(rows)}\n")
    write_text(f"{path}.svg", chart.dots(scores, f"{title}, one dot per seed"))
    points = {row["name"]: [(r["tokens"], r["heldout_final"]) for r in row["runs"]
                            if r["tokens"] is not None] for row in rows}
    if any(points.values()):
        write_text(f"{path}-tokens.svg", chart.scatter(points, title, TOKENS))


def json_rows(name: str, out: str) -> list[dict]:
    """One row per configuration with all its finished runs, in the order of the set."""
    rows = []
    known = known_runs(name, out)
    for label, flags in SETS[name].rows.items():
        runs = []
        for seed in (*SEEDS, *MORE_SEEDS):
            path = run_path(out, name, label, seed)
            if is_finished(path):
                runs.append(read(path))
            elif (label, seed) in known:
                runs.append(known[label, seed])
        if runs:
            scores = [r["heldout_final"] for r in runs]
            rows.append({"name": label, "flags": flags, "runs": runs, "mean": mean(scores)})

    first = {r["seed"]: r["heldout_final"] for r in rows[0]["runs"]} if rows else {}
    for row in rows:
        row["difference"] = mean([r["heldout_final"] - first[r["seed"]] for r in row["runs"]
                                  if r["seed"] in first])
    return rows


def read(path: str) -> dict:
    """What the results keep of a run: its scores, means of its held-out trees, and some
    metrics of each step."""
    result = read_json(os.path.join(path, "result.json"))
    with open(os.path.join(path, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = {line["step"]: line for line in lines if line["phase"] == "grpo"}
    steps = [steps[number] for number in sorted(steps)]

    kept = {key: result.get(key) for key in ("seed", *HELDOUT, "sampled_tokens", "seconds")}
    final = [line for line in lines if line.get("name") == "heldout_final"][-1:] or [{}]
    kept |= {key: final[0].get(name) for key, name in OF_TREES.items()}
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
    """As Markdown. A column in which no run has a number is left out."""
    def interval(value):
        middle, low, high = value or (None, None, None)
        ends = f" [{low:+.3f}, {high:+.3f}]" if low is not None else ""
        return "" if middle is None else f"{middle:+.3f}{ends}"

    def mean_of(row, key, form):
        values = [r.get(key) for r in row["runs"]]
        return "" if None in values else f"{statistics.fmean(values):{form}}"

    more = [column for column in COLUMNS if any(mean_of(row, *column[1:]) for row in rows)]
    heads = ["configuration", "flags", "seeds", "mean", "difference",
             *(head for head, *_ in more)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        name = row["name"].replace("|", "\\|")
        flags = f"`{row['flags']}`" if row["flags"] else ""
        seeds = " ".join(f"{r['heldout_final']:.3f}" for r in row["runs"])
        cells = [name, flags, seeds, f"{row['mean'][0]:.3f}", interval(row["difference"]),
                 *(mean_of(row, key, form) for _, key, form in more)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare configurations of train.py.")
    parser.add_argument("set", choices=[*SETS, "credit"], help="which configurations")
    parser.add_argument("--out", required=True, help="the directory of all runs")
    parser.add_argument("--model", default="", help="what credit-definitions starts from; "
                        "without it, credit leaves that set out")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these, e.g. to share "
                        "the work among processes (default: all of the set)")
    args = parser.parse_args()
    names = [args.set]
    if args.set == "credit":
        names = ["credit-evidence", "credit-deep"]
        names += ["credit-definitions"] if args.model else []
    try:
        for name in names:
            run(name, args.out, args.model, args.seeds)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"lab.ablation: {error}")
    except KeyboardInterrupt:
        sys.exit("lab.ablation: interrupted; the same command continues")


if __name__ == "__main__":
    console.start(main)
