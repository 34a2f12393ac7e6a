"""Pictures as SVG files: curves of training, dots of an ablation, and a tree.

    python -m lab.chart OUT.svg NAME=RUN,RUN NAME=RUN,...
    python -m lab.chart OUT.svg --tree TREES.jsonl --number 3

Each NAME is a line: the mean over its runs of one metric of their metrics.jsonl, as a
moving average. The runs themselves are thin lines behind it. --tree draws a tree that
eval.py --save wrote, with the code that draws the trees of a report. Left out: the report's
own charts. Standard library and tree.py.
"""
import argparse
import itertools
import json
import os
import sys
from html import escape

from runtime import console
from runtime.files import write_text
from tree import Node, printable, read_rollouts

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 56, 174, 36, 44
COLOURS = ("#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0")  # distinct on white and on black
GREY = "#8a8a8a"
FAINT = f'stroke="{GREY}" stroke-opacity="0.25"'
TICKS = (0, 0.25, 0.5, 0.75, 1)
SPAN = 5  # steps in the moving average
LINE = 18  # between names of a scatter chart

COLUMN, ROW, BOX = 150, 23, 18  # of a tree: one column per depth, one row per leaf
MOST_CHILDREN, MOST_BOXES = 48, 240  # that are drawn of a node, and of a tree
BAD = "#d0453c"  # of a node that ended without an answer
ALONE = ("<style>svg{color:#1b1d22}@media(prefers-color-scheme:dark){svg{color:#e4e6eb}}"
         "</style>")  # for a tree outside of a page


def read(run: str, metric: str) -> list[float]:
    """The metric of each GRPO step of a run, in order."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    steps = {row["step"]: row[metric] for row in rows if row["phase"] == "grpo"}
    return [value for _, value in sorted(steps.items())]


def smooth(values: list[float]) -> list[float]:
    windows = [values[max(0, end - SPAN):end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def svg(lines: dict[str, list[list[float]]], title: str) -> str:
    """`lines`: name -> one list of values per run. The y axis is 0 to 1."""
    steps = max(len(run) for runs in lines.values() for run in runs)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)

    def y(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

    def path(values, style):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline fill="none" {style} points="{points}"/>'

    parts = [text(LEFT, 20, title, weight="bold")]
    for tick in TICKS:
        parts.append(rule(LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for step in range(0, steps, max(1, round(steps / 6 / 10) * 10)):
        parts.append(text(x(step), HEIGHT - BOTTOM + 18, str(step), "middle"))
    parts.append(text(x(steps / 2), HEIGHT - 6, "GRPO step", "middle"))

    labels = []
    for (name, runs), colour in zip(lines.items(), COLOURS):
        runs = [smooth(run) for run in runs]
        parts += [path(run, f'stroke="{colour}" stroke-opacity="0.3"') for run in runs]
        mean = [sum(values) / len(values) for values in zip(*runs)]
        parts.append(path(mean, f'stroke="{colour}" stroke-width="2.5"'))
        labels.append((y(mean[-1]), f"{name} {mean[-1]:.2f}", seeds(runs), colour))

    below = 0.0  # where the next label has room
    for at, name, says, colour in sorted(labels):
        at = max(at, below)
        parts.append(text(WIDTH - RIGHT + 10, at, name, colour=colour, weight="bold"))
        parts.append(text(WIDTH - RIGHT + 10, at + 15, says, colour=colour))
        below = at + 36
    return page(HEIGHT, parts)


def dots(rows: dict[str, list[float]], title: str) -> str:
    """One line per row: its name, a dot per value, a bar at their mean. A single value is
    a ring without a bar, since there is no mean. x is 0 to 1."""
    left, right, line = 220, 120, 24
    height = 60 + line * len(rows)

    def x(value):
        return left + (WIDTH - left - right) * value

    parts = [text(8, 20, title)]
    for tick in TICKS:
        parts.append(rule(x(tick), 30, x(tick), height - 22))
        parts.append(text(x(tick), height - 6, f"{tick:g}", "middle"))

    for i, (name, values) in enumerate(rows.items()):
        y = 48 + line * i
        mean = sum(values) / len(values)
        parts.append(text(left - 10, y + 4, name, "end", COLOURS[0]))
        opacity = 0.6 if len(values) > 1 else 0
        parts += [f'<circle cx="{x(value):.1f}" cy="{y}" r="4" fill="{COLOURS[0]}" '
                  f'fill-opacity="{opacity}" stroke="{COLOURS[0]}"/>' for value in values]
        if len(values) > 1:
            bar = f'stroke="{COLOURS[1]}" stroke-width="3"'
            parts.append(rule(x(mean), y - 8, x(mean), y + 8, bar))
        parts.append(text(WIDTH - right + 10, y + 4, f"{mean:.2f}", colour=COLOURS[1]))
        parts.append(text(WIDTH - 8, y + 4, seeds(values), "end"))
    return page(height, parts)


def scatter(rows: dict[str, list[tuple[float, float]]], title: str, label: str) -> str:
    """Points (x, y) per row, and at the right its name, with a line from their mean. y is 0
    to 1, x begins at 0."""
    most = max(x for points in rows.values() for x, _ in points) or 1

    def at(x, y):
        return (LEFT + (WIDTH - LEFT - RIGHT) * x / most,
                HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y)

    parts = [text(LEFT, 20, title, weight="bold")]
    for tick in TICKS:
        left, y = at(0, tick)
        parts.append(rule(left, y, WIDTH - RIGHT, y))
        parts.append(text(left - 8, y + 4, f"{tick:g}", "end"))
        x, bottom = at(tick * most, 0)
        parts.append(text(x, bottom + 18, f"{tick * most:.0f}", "middle"))
    parts.append(text(at(most / 2, 0)[0], HEIGHT - 6, label, "middle"))

    names = []
    for (name, points), colour in zip(rows.items(), itertools.cycle(COLOURS)):
        for x, y in (at(*point) for point in points):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" '
                         'fill-opacity="0.6"/>')
        if points:
            x, y = at(*(sum(values) / len(values) for values in zip(*points)))
            names.append((y, x, name, colour))

    end = HEIGHT - BOTTOM - LINE * len(names)  # the first name is here at the lowest
    below = 0.0  # where the next name has room
    for i, (y, x, name, colour) in enumerate(sorted(names)):
        place = max(min(y, end + LINE * i), below)
        thin = f'stroke="{colour}" stroke-opacity="0.4"'
        parts.append(rule(x + 5, y, WIDTH - RIGHT + 8, place, thin))
        parts.append(text(WIDTH - RIGHT + 12, place + 4, name, colour=colour))
        below = place + LINE
    return page(HEIGHT, parts, WIDTH + 40)  # for long names


def seeds(values: list) -> str:
    return f"{len(values)} seeds" if len(values) > 1 else "1 seed"


# --- a tree -------------------------------------------------------------------------------

def tree(root: Node, advantages: dict[Node, float] = {}, largest: float = 0.0,
         style: str = "") -> str:
    """The nodes of a tree as boxes: a column per depth, children below each other.

    A box is as wide as its node sampled tokens. Its colour is the node's advantage, blue
    above 0 and orange below, full at `largest`; grey: it has none. The label is the node's
    place among its siblings, what went wrong, and its answer. Each box is a link to #nI,
    where I counts the nodes of root.walk() from 0."""
    number = {node: i for i, node in enumerate(root.walk())}
    most = max(1, *map(sampled, number))
    rows = itertools.count()
    edges, boxes, legend = [], {}, []

    def place(node: Node) -> float:
        """Draw what is below a node, then the node, in the middle of it. Returns its y."""
        room = min(MOST_CHILDREN, max(0, MOST_BOXES - len(boxes)))
        ys = [place(child) for child in node.children[:room]]
        x = 6 + COLUMN * node.depth
        if len(node.children) > room:
            ys.append(ROW * next(rows) + 14)
            rest = f"… {len(node.children) - room:,} more"
            edges.append(text(x + COLUMN + 4, ys[-1] + 4, rest, colour="currentColor"))
        y = ROW * next(rows) + 14 if not ys else (ys[0] + ys[-1]) / 2

        width = 8 + (COLUMN - 40) * sampled(node) / most
        name = label(node)
        begin, end = x + max(width, 6 * len(name) + 8), x + COLUMN
        for below in ys:
            edges.append(
                f'<path d="M{begin:.0f} {y:.0f}C{end - 4:.0f} {y:.0f} {end - 14:.0f} '
                f'{below:.0f} {end:.0f} {below:.0f}" fill="none" stroke="{GREY}"/>')
        advantage = advantages.get(node)
        border = f'stroke="{GREY}"'
        if not answered(node):
            border = f'stroke="{BAD}" stroke-width="2"'
        boxes[number[node]] = (
            f'<a href="#n{number[node]}"><title>{escape(told(node, advantage))}</title>'
            f'<rect x="{x}" y="{y - BOX / 2:.1f}" width="{width:.1f}" height="{BOX}" '
            f'rx="4" {border} {shade(advantage, largest)}/>'
            + text(x + 5, y + 4, name, colour="currentColor") + "</a>")
        return y

    place(root)
    columns = 1 + max(node.depth for node in number)
    width, height = max(300, COLUMN * columns + 20), ROW * next(rows) + 34
    legend.append(text(8, height - 9, f"width: sampled tokens, at most {most:,}"))
    if largest:
        height += 18
        for i, part in enumerate((-1, -0.5, 0, 0.5, 1)):
            legend.append(f'<rect x="{8 + 12 * i}" y="{height - 18}" width="12" '
                          f'height="10" {shade(part * largest, largest)}/>')
        says = f"advantage, −{largest:.2g} to +{largest:.2g}; grey: none"
        legend.append(text(76, height - 9, says))
    in_order = [box for _, box in sorted(boxes.items())]  # for the Tab key
    return page(height, [style, *edges, *in_order, *legend], width, 12)


def sampled(node: Node) -> int:
    """Tokens; four characters count as one where a server told no tokens."""
    written = sum(len(turn.text) for turn in node.turns if turn.role == "assistant")
    return node.sampled or node.counted or written // 4


def answered(node: Node) -> bool:
    return node.end in ("final", "text")


def shade(advantage: float | None, largest: float) -> str:
    if advantage is None or not largest:
        return f'fill="{GREY}" fill-opacity="0.3"'
    strength = min(1.0, abs(advantage) / largest)
    return (f'fill="{COLOURS[advantage < 0]}" '
            f'fill-opacity="{0.08 + 0.62 * strength:.2f}"')


def label(node: Node) -> str:
    name = str(node.path[-1]) if node.path else "root"
    if not answered(node):
        name += f" ✗ {node.end}"
    if isinstance(node.answer, str):
        name += f" {node.answer}"
    elif node.answer is not None:
        name += f" {json.dumps(node.answer, ensure_ascii=False)}"
    name = printable(" ".join(name[:100].split()))
    return name if len(name) <= 20 else f"{name[:19]}…"


def told(node: Node, advantage: float | None) -> str:
    """All about a node in one line."""
    says = (f"{node.kind} {'.'.join(map(str, node.path))}: {node.end}, "
            f"{sampled(node):,} sampled tokens, {len(node.errors)} errors")
    if advantage is not None:
        says += f", advantage {advantage:+.2f}"
    return printable(says)


# --- SVG ----------------------------------------------------------------------------------


def text(x: float, y: float, words: str, anchor="start", colour=GREY,
         weight="normal") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
            f'font-weight="{weight}">{escape(words)}</text>')


def rule(x1: float, y1: float, x2: float, y2: float, style=FAINT) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}/>'


def page(height: float, parts: list[str], width: float = WIDTH, size: int = 13) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="sans-serif" font-size="{size}">\n'
            + "\n".join(parts) + "\n</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw training curves or a tree as SVG.")
    parser.add_argument("out", help="the SVG file to write")
    parser.add_argument("lines", nargs="*", metavar="NAME=RUN,RUN",
                        help="a line and the directories of its runs")
    parser.add_argument("--tree", metavar="FILE", help="draw a tree of this JSONL file "
                        "(eval.py --save) instead of lines")
    parser.add_argument("--number", type=int, default=0, help="which tree (default 0)")
    parser.add_argument("--metric", default="reward", help="which metric (default reward)")
    parser.add_argument("--title", default="", help="above the chart (default the metric)")
    args = parser.parse_args()
    try:
        if bool(args.tree) == bool(args.lines):
            raise ValueError("give lines or --tree FILE")
        if args.tree:
            root = read_rollouts(args.tree)[args.number].root
            write_text(args.out, tree(root, style=ALONE))
            return
        lines = {}
        for line in args.lines:
            name, _, runs = line.partition("=")
            lines[name] = [read(run, args.metric) for run in runs.split(",")]
            if not all(lines[name]):
                raise ValueError(f"{line}: a run without GRPO steps")
        write_text(args.out, svg(lines, args.title or args.metric))
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"lab.chart: {error}")


if __name__ == "__main__":
    console.start(main)
