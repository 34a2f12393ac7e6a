"""Pictures of runs as SVG files, drawn with matplotlib.

    python -m experiments.figures OUT.svg NAME=RUN,RUN NAME=RUN,...    directories of runs
    python -m experiments.figures OUT.svg experiments/results/main.json      recorded ones

The reward per step as a moving average: the mean of the runs of a NAME, and each run as a
thin line.
"""
import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from util import read_json

COLOURS = ("#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0")  # distinct on white and on black
GREY = "#8a8a8a"
STYLE = {
    "svg.hashsalt": "rlm", "svg.fonttype": "none", "savefig.transparent": True,
    "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False}
STYLE |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color",
                        "ytick.color", "grid.color"), GREY)
SPAN = 5  # steps in the moving average


def read(what: str) -> dict[str, list[dict]]:
    """{name: its runs}, of NAME=RUN,RUN or of a file of experiments/results."""
    name, equals, paths = what.partition("=")
    if equals:
        return {name: [{"reward": rewards(path)} for path in paths.split(",")]}
    return {name: runs for name, runs in read_json(what).items() if isinstance(runs, list)}


def rewards(run: str) -> list[float]:
    """One per GRPO step of a run."""
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["reward"] for row in rows if row["phase"] == "grpo"]


def smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, end - SPAN):end]) for end in range(1, len(values) + 1)]


def curves(runs: dict[str, list[dict]]) -> Figure:
    """A mean is as long as the shortest run of its name."""
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    for (name, of_name), colour in zip(runs.items(), COLOURS * len(runs)):
        each = [smooth(run["reward"]) for run in of_name]
        mean = [fmean(values) for values in zip(*each)]
        axes.plot(range(1, 1 + len(mean)), mean, color=colour, linewidth=2.5,
                  label=f"{name} {mean[-1]:.2f}, n {len(each)}")
        for values in each:
            axes.plot(range(1, 1 + len(values)), values, color=colour, linewidth=1,
                      alpha=0.3)
    axes.set(ylim=(0, None), xlabel="GRPO step", ylabel="reward")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, *given = sys.argv[1:]
    with matplotlib.rc_context(STYLE):
        runs = [pair for what in given for pair in read(what).items()]
        curves(dict(runs)).savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
