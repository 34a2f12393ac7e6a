"""Pictures as SVG files, drawn with matplotlib.

    python -m experiments.chart OUT.svg NAME=RUN,RUN NAME=RUN,...     directories of runs
    python -m experiments.chart OUT.svg experiments/results/main.json       recorded ones
    python -m experiments.chart OUT.svg experiments/results/deep.json --kind dots

Curves show the reward per step, as a moving average, or with --y what a file has of some
steps: the mean of the runs of a NAME, and each run as a thin line. Dots show the held-out
score of each run, with a bar at the mean. The same data give the same file, byte for byte.
"""
import argparse
import itertools
import json
import os
from functools import partial
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from util import read_json

COLOURS = (  # distinct on white and on black
    "#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0", "#b08a1e", "#d0508c")
GREY = "#8a8a8a"
STYLE = {
    "svg.hashsalt": "rlm", "svg.fonttype": "none", "savefig.transparent": True,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS), "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "text.color": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "grid.color": GREY, "grid.alpha": 0.25}
SPAN = 5  # steps in the moving average
Runs = dict[str, list[dict]]  # name -> its runs, each {metric: a number, or one per step}


def read(run: str) -> dict:
    """The reward of each GRPO step of a run."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return {"reward": [row["reward"] for row in rows if row["phase"] == "grpo"]}


def recorded(path: str) -> Runs:
    """What a file of experiments/results holds: of an ablation, or of runs by name."""
    data = read_json(path)
    if "rows" in data:
        return {row["name"]: row["runs"] for row in data["rows"]}
    return {name: runs for name, runs in data.items() if isinstance(runs, list)}


def smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, end - SPAN):end]) for end in range(1, len(values) + 1)]


def curves(axes: Axes, runs: Runs, key: str = "reward") -> None:
    """A mean is as long as the shortest run of its name."""
    for colour, (name, of_name) in zip(itertools.cycle(COLOURS), runs.items()):
        steps = of_name[0].get("steps")
        each = [run[key] if steps else smooth(run[key]) for run in of_name]
        steps = steps or range(1, 1 + max(map(len, each)))
        mean = list(map(fmean, zip(*each)))
        axes.plot(steps[:len(mean)], mean, color=colour, linewidth=2.5,
                  label=f"{name} {mean[-1]:.2f}, n {len(each)}")
        for values in each:
            axes.plot(steps[:len(values)], values, color=colour, linewidth=1, alpha=0.3)
    axes.set(ylim=(0, None), xlabel="GRPO step", ylabel=key)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def dots(axes: Axes, runs: Runs) -> None:
    for at, (name, of_name) in enumerate(runs.items()):
        scores = [run["heldout_final"] for run in of_name]
        mean = fmean(scores)
        axes.plot(scores, [at] * len(scores), "o", color=COLOURS[0], alpha=0.6)
        axes.plot(mean, at, "|", color=COLOURS[1], markersize=16, markeredgewidth=3)
        axes.text(1.02, at, f"{mean:.2f}, n {len(scores)}", va="center")
    axes.set(xlim=(0, 1), xlabel="held-out score", yticks=range(len(runs)))
    axes.set_yticklabels(runs)
    axes.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw runs of train.py as SVG.")
    parser.add_argument("out", help="the SVG file to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN,RUN or FILE.json",
                        help="directories of runs, or a file of experiments/results")
    kinds = {"curves": curves, "dots": dots}
    parser.add_argument("--kind", default="curves", choices=kinds)
    parser.add_argument("--y", default="reward", help="what the curves show")
    args = parser.parse_args()
    if args.kind == "curves":
        kinds["curves"] = partial(curves, key=args.y)
    runs = {}
    for what in args.runs:
        name, equals, paths = what.partition("=")
        if equals:
            runs[name] = [read(path) for path in paths.split(",")]
        else:
            runs |= recorded(what)

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4))
        axes = figure.add_subplot()
        kinds[args.kind](axes, runs)
        figure.savefig(args.out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
