"""Training curves as one SVG file: `python -m lab.chart OUT.svg NAME=run,run NAME=run,...`.

Each NAME is a line: the mean over its runs of one metric of their metrics.jsonl, as a
moving average. The runs themselves are thin lines behind it. Left out: every other kind of
chart. Standard library only.
"""
import argparse
import json
import os
import sys
from html import escape

from runtime import console
from runtime.files import write_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 56, 150, 36, 44
COLOURS = ("#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0")  # distinct on white and on black
GREY = "#8a8a8a"
FAINT = f'stroke="{GREY}" stroke-opacity="0.25"'
TICKS = (0, 0.25, 0.5, 0.75, 1)
SPAN = 5  # steps in the moving average


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

    for (name, runs), colour in zip(lines.items(), COLOURS):
        runs = [smooth(run) for run in runs]
        parts += [path(run, f'stroke="{colour}" stroke-opacity="0.3"') for run in runs]
        mean = [sum(values) / len(values) for values in zip(*runs)]
        parts.append(path(mean, f'stroke="{colour}" stroke-width="2.5"'))
        parts.append(text(x(len(mean) - 1) + 8, y(mean[-1]) + 4, f"{name} {mean[-1]:.2f}",
                          colour=colour, weight="bold"))
    return page(HEIGHT, parts)


def dots(rows: dict[str, list[float]], title: str) -> str:
    """One line per row: its name, a dot per value, a bar at their mean. x is 0 to 1."""
    left, right, line = 220, 70, 24
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
        parts += [f'<circle cx="{x(value):.1f}" cy="{y}" r="4" fill="{COLOURS[0]}" '
                  'fill-opacity="0.6"/>' for value in values]
        bar = f'stroke="{COLOURS[1]}" stroke-width="3"'
        parts.append(rule(x(mean), y - 8, x(mean), y + 8, bar))
        parts.append(text(WIDTH - right + 10, y + 4, f"{mean:.2f}", colour=COLOURS[1]))
    return page(height, parts)


def text(x: float, y: float, words: str, anchor="start", colour=GREY,
         weight="normal") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
            f'font-weight="{weight}">{escape(words)}</text>')


def rule(x1: float, y1: float, x2: float, y2: float, style=FAINT) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}/>'


def page(height: float, parts: list[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="13">\n' + "\n".join(parts) + "\n</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw training curves as SVG.")
    parser.add_argument("out", help="the SVG file to write")
    parser.add_argument("lines", nargs="+", metavar="NAME=RUN,RUN",
                        help="a line and the directories of its runs")
    parser.add_argument("--metric", default="reward", help="which metric (default reward)")
    parser.add_argument("--title", default="", help="above the chart (default the metric)")
    args = parser.parse_args()
    try:
        lines = {}
        for line in args.lines:
            name, _, runs = line.partition("=")
            lines[name] = [read(run, args.metric) for run in runs.split(",")]
            if not all(lines[name]):
                raise ValueError(f"{line}: a run without GRPO steps")
        write_text(args.out, svg(lines, args.title or args.metric))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"lab.chart: {error}")


if __name__ == "__main__":
    console.start(main)
