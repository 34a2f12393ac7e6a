"""Pictures of runs as SVG files, drawn with matplotlib.

    python -m experiments.figures OUT.svg NAME=RUN,RUN NAME=RUN,...    directories of runs
    python -m experiments.figures OUT.svg experiments/results/main.json      recorded ones
    python -m experiments.figures OUT.svg TREES.jsonl         a group of trees (--save)

Of runs it shows the reward per step, as a moving average: the mean of the runs of a NAME,
and each run as a thin line. Of trees it shows the first group with unequal rewards: who
gets which advantage, and the first child of the best tree as text.
"""
import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from grpo import GRPOConfig, advantages
from tasks import Task
from tree import Node, Rollout, read_rollouts, render
from util import read_json

COLOURS = ("#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0")  # distinct on white and on black
GREY = "#8a8a8a"
FROM_BAD_TO_GOOD = LinearSegmentedColormap.from_list("", ["#d97706", "#969696", "#257ad5"])
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


def group(saved: list[Rollout]) -> Figure:
    """Raises ValueError if the trees of each group have the same reward."""
    for name in dict.fromkeys(tree.group for tree in saved):
        trees = [tree for tree in saved if tree.group == name and not tree.failed]
        if len({tree.reward for tree in trees}) > 1:
            break
    else:
        raise ValueError("the trees of each group have the same reward")
    trees.sort(key=lambda tree: -tree.reward)
    figure = Figure(figsize=(8, 3))
    figure.suptitle(f"{len(trees)} answers to: {trees[0].task.query}")
    places = figure.subplots(-(-len(trees) // 4), 4, squeeze=False).ravel()
    for axes in places:
        axes.axis("off")
    for axes, tree, advantage in zip(places, trees, advantages(trees, GRPOConfig())):
        draw(axes, tree.root, 0.0, 1.0, FROM_BAD_TO_GOOD((advantage + 1) / 2))
        axes.set_title(f"{tree.reward:.2f} → {advantage:+.1f}", y=-0.25, fontsize=10)
    below = ["reward → advantage: orange nodes become less likely, blue ones more"]
    below += [render(child, width=56) for child in trees[0].root.children[:1]]
    text = "\n".join(below).replace(" ", "\N{NO-BREAK SPACE}")  # or SVG joins blanks
    figure.text(0.1, 0, text, va="top", family="monospace", fontsize=8)
    return figure


def draw(axes, node: Node, left: float, right: float, colour) -> None:
    """The node above its children, who share the room from left to right."""
    middle, step = (left + right) / 2, (right - left) / max(1, len(node.children))
    for i, child in enumerate(node.children):
        start = left + i * step
        axes.plot([middle, start + step / 2], [-node.depth, -child.depth], color=GREY,
                  zorder=1)
        draw(axes, child, start, start + step, colour)
    axes.scatter(middle, -node.depth, s=40 if node.depth else 90, color=[colour], zorder=2,
                 clip_on=False)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, *given = sys.argv[1:]
    with matplotlib.rc_context(STYLE):
        if given[0].endswith(".jsonl") and "=" not in given[0]:
            figure = group(read_rollouts(given[0], Task))
        else:
            runs = [pair for what in given for pair in read(what).items()]
            figure = curves(dict(runs))
        figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
