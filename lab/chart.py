"""Training curves as one SVG file: `python chart.py out.svg NAME=run,run,... NAME=run,...`.

Each NAME is a line: the mean over its runs of one metric of their metrics.jsonl, as a moving
average, above the runs themselves, thin. Left out: every other kind of chart. Standard library.
"""
import argparse
import json
import os
import sys
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 56, 150, 36, 44
COLOURS = ("#2f7fd8", "#d8622f", "#2f9e6e", "#9a5fd0")  # told apart on white and on black
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
    return [sum(part) / len(part) for part in
            (values[max(0, i - SPAN + 1):i + 1] for i in range(len(values)))]


def svg(lines: dict[str, list[list[float]]], title: str) -> str:
    """`lines`: name -> one list of values a run. The y axis is 0 to 1."""
    steps = max(len(run) for runs in lines.values() for run in runs)
    x = lambda i: LEFT + (WIDTH - LEFT - RIGHT) * i / max(1, steps - 1)  # noqa: E731
    y = lambda v: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * v  # noqa: E731

    def path(values, style):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline fill="none" {style} points="{points}"/>'

    parts = [text(LEFT, 20, title, weight="bold")]
    for v in TICKS:
        parts += [rule(LEFT, y(v), WIDTH - RIGHT, y(v)), text(LEFT - 8, y(v) + 4, f"{v:g}", "end")]
    for i in range(0, steps, max(1, round(steps / 6 / 10) * 10)):
        parts.append(text(x(i), HEIGHT - BOTTOM + 18, str(i), "middle"))
    parts.append(text(x(steps / 2), HEIGHT - 6, "GRPO step", "middle"))
    for (name, runs), colour in zip(lines.items(), COLOURS):
        runs = [smooth(run) for run in runs]
        parts += [path(run, f'stroke="{colour}" stroke-opacity="0.3"') for run in runs]
        shared = min(len(run) for run in runs)
        mean = [sum(run[i] for run in runs) / len(runs) for i in range(shared)]
        parts += [path(mean, f'stroke="{colour}" stroke-width="2.5"'),
                  text(x(shared - 1) + 8, y(mean[-1]) + 4, f"{name} {mean[-1]:.2f}",
                       colour=colour, weight="bold")]
    return page(HEIGHT, parts)


def dots(rows: dict[str, list[float]], title: str) -> str:
    """One line a row: its name, a dot a value, a bar at their mean. The x axis is 0 to 1."""
    left, line, right = 220, 24, 70
    height = 60 + line * len(rows)
    x = lambda v: left + (WIDTH - left - right) * v  # noqa: E731
    parts = [text(8, 20, title)]
    for v in TICKS:
        parts += [rule(x(v), 30, x(v), height - 22), text(x(v), height - 6, f"{v:g}", "middle")]
    for i, (name, values) in enumerate(rows.items()):
        y, middle = 48 + line * i, sum(values) / len(values)
        parts += [text(left - 10, y + 4, name, "end", COLOURS[0])]
        parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="4" fill="{COLOURS[0]}" '
                  'fill-opacity="0.6"/>' for v in values]
        parts += [rule(x(middle), y - 8, x(middle), y + 8,
                       f'stroke="{COLOURS[1]}" stroke-width="3"'),
                  text(WIDTH - right + 10, y + 4, f"{middle:.2f}", colour=COLOURS[1])]
    return page(height, parts)


def text(x: float, y: float, words: str, anchor="start", colour=GREY, weight="normal") -> str:
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
    parser.add_argument("lines", nargs="+", metavar="NAME=RUN,RUN", help="a line and its runs")
    parser.add_argument("--metric", default="reward", help="which metric (default 'reward')")
    parser.add_argument("--title", default="", help="above the chart (default: the metric)")
    args = parser.parse_args()
    try:
        lines = {}
        for line in args.lines:
            name, _, runs = line.partition("=")
            lines[name] = [read(run, args.metric) for run in runs.split(",")]
            if not all(lines[name]):
                raise ValueError(f"{line}: a run without GRPO steps")
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(svg(lines, args.title or args.metric))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"chart.py: {error}")


if __name__ == "__main__":
    main()
