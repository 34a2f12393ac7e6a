"""The pictures of README.md and docs/results.md, as SVG that is legible on white and dark.

    python -m experiments.pictures

reads experiments/results: group.jsonl (the eight trees of one question), main.json (the
reward of each step of each run) and requests.json (the share of children that are right, of
a Qwen). It writes group.svg, curve.svg and children.svg beside them.
"""
from html import escape
from pathlib import Path
from statistics import fmean

from grpo import GRPOConfig, advantages
from tasks import Question
from tree import Node, Tree, read_trees
from util import read_json, write_text

RESULTS = Path(__file__).parent / "results"
GREY = "#808080"
COLOURS = ("#2f7fd8", "#2f9e6e", "#d8622f", "#9a5fd0", "#c9a227")
SPAN = 5  # steps in the moving average
NODE_WIDTH, LEVEL = 16, 46  # of a child, and from a root to its children
COLUMN, ROW = 150, 110  # of one tree


def svg(width: float, height: float, parts: list[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" fill="{GREY}" '
            'font-family="ui-monospace, monospace" font-size="12">\n'
            + "\n".join(parts) + "\n</svg>\n")


def text(x: float, y: float, line: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" xml:space="preserve" {more}>{escape(line)}</text>'


def coloured(advantage: float) -> str:
    """Orange below 0, blue above it; paler near 0."""
    colour = "#d97706" if advantage < 0 else "#257ad5"
    return f'fill="{colour}" fill-opacity="{min(1.0, 0.3 + abs(advantage)):.2f}"'


def tree_at(x: float, y: float, tree: Tree, advantage: float) -> list[str]:
    """A root above its children, in one colour, and its reward below."""
    root, colour = tree.root, coloured(advantage)
    first = x - NODE_WIDTH * (len(root.children) - 1) / 2
    places = [first + NODE_WIDTH * i for i in range(len(root.children))]
    lines = [f'<path d="M{x:g} {y:g} L{place:g} {y + LEVEL:g}" stroke="{GREY}"/>'
             for place in places]
    dots = [f'<circle cx="{place:g}" cy="{y + LEVEL:g}" r="5" {colour}/>'
            for place in places]
    return [*lines, f'<circle cx="{x:g}" cy="{y:g}" r="8" {colour}/>', *dots,
            text(x, y + LEVEL + 26, f"{tree.reward:.2f} → {advantage:+.1f}",
                 'text-anchor="middle"')]


def spoken(node: Node) -> list[str]:
    """What a node read and wrote, a line each. Fences are left out."""
    marks = {"assistant": "»", "user": "·"}
    return [f"{marks[message.role]} {line}" for message in node.messages[1:]
            for line in message.text.split("\n") if "```" not in line]


def group(trees: list[Tree]) -> str:
    """The trees of a question, the best first, and what one root and its child said."""
    trees = sorted(trees, key=lambda tree: -tree.reward)
    given = advantages(trees, GRPOConfig())
    parts = [text(10, 20, f"{len(trees)} answers to: {trees[0].question.query}")]
    for i, (tree, advantage) in enumerate(zip(trees, given, strict=True)):
        parts += tree_at(75 + COLUMN * (i % 4), 50 + ROW * (i // 4), tree, advantage)
    lines = ["reward → advantage. Blue becomes more likely, orange less, pale stays.",
             "A child has the colour of its root: only the root was scored.", ""]
    root = trees[0].root
    lines += ["the root of the best tree (· read, » wrote)", *spoken(root)]
    lines += ["", "its first child", *spoken(root.children[0])]
    top = 60 + ROW * 2
    parts += [text(10, top + 16 * i, line) for i, line in enumerate(lines)]
    return svg(620, top + 16 * len(lines), parts)


def curves(arms: dict[str, list[list[float]]], what: str) -> str:
    """Moving averages by step: thin lines are runs, thick ones their mean."""
    left, top, width, height = 40, 12, 420, 240
    steps = max(len(run) for runs in arms.values() for run in runs)

    def path(values: list[float], look: str) -> str:
        means = [fmean(values[max(0, i - SPAN):i]) for i in range(1, len(values) + 1)]
        points = " ".join(
            f"{left + width * i / (steps - 1):.1f},{top + height * (1 - mean):.1f}"
            for i, mean in enumerate(means))
        return f'<polyline points="{points}" fill="none" {look}/>'

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        parts += [f'<path d="M{left} {y:g} h{width}" stroke="{GREY}" opacity="0.3"/>',
                  text(left - 6, y + 4, f"{share:g}", 'text-anchor="end"')]
    for i, ((name, runs), colour) in enumerate(zip(arms.items(), COLOURS)):
        # A run that ended early, with nothing left to learn from, stays where it was.
        whole = [run + run[-1:] * (steps - len(run)) for run in runs]
        mean = [fmean(values) for values in zip(*whole)]
        if len(runs) > 1:
            parts += [path(run, f'stroke="{colour}" opacity="0.35"') for run in runs]
        parts += [path(mean, f'stroke="{colour}" stroke-width="3"'),
                  text(left + width + 12, top + 20 + 20 * i, f"{name}, runs: {len(runs)}",
                       f'fill="{colour}"')]
    parts += [text(left, top + height + 20, f"{what} by step of GRPO, 1 to {steps}")]
    return svg(left + width + 290, top + height + 32, parts)


def main() -> None:
    trees = read_trees(str(RESULTS / "group.jsonl"), Question)
    write_text(str(RESULTS / "group.svg"), group(trees))
    for source, key, what, picture in (
            ("main", "reward", "reward", "curve"),
            ("requests", "score_d1", "share of children that are right", "children")):
        arms = {name: [run[key] for run in runs]
                for name, runs in read_json(str(RESULTS / f"{source}.json")).items()
                if isinstance(runs, list)}
        write_text(str(RESULTS / f"{picture}.svg"), curves(arms, what))


if __name__ == "__main__":
    main()
