"""Charts: the committed one again, and curves from the files of runs."""
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from conftest import command

from lab import chart
from tree import Node, Rollout, Turn, write_rollouts

RESULTS = Path(chart.__file__).parent / "results"


def test_the_dots_of_the_committed_results_are_the_committed_chart():
    rows = json.loads((RESULTS / "core.json").read_text())["rows"]
    scores = {row["name"]: [run["heldout_final"] for run in row["runs"]] for row in rows}
    drawn = chart.dots(scores, "Held-out F1 after 170,000 sampled tokens, one dot a seed")
    assert drawn == (RESULTS / "core.svg").read_text()


def write_run(path, rewards):
    """Steps in reverse, and one was done again after a crash: the later line counts."""
    lines = [{"phase": "warmup", "step": 1}, {"phase": "grpo", "step": 1, "reward": 9.0}]
    lines += [{"phase": "grpo", "step": step, "reward": reward}
              for step, reward in reversed(list(enumerate(rewards, 1)))]
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_curve_is_the_mean_of_its_runs_as_a_moving_average(tmp_path, monkeypatch):
    first = write_run(tmp_path / "a", [0.0] * 4 + [1.0] * 4)
    second = write_run(tmp_path / "b", [0.5] * 6)
    assert chart.read(first, "reward") == [0.0] * 4 + [1.0] * 4
    assert chart.smooth([0.0] * 4 + [1.0] * 4)[3:] == [0.0, 0.2, 0.4, 0.6, 0.8]

    out = tmp_path / "out.svg"
    assert command(chart, monkeypatch, out, f"<x>={first},{second}") is None
    drawn = out.read_text()
    assert drawn.count("<polyline") == 3  # two runs and their mean, over the steps of both
    assert "&lt;x&gt; 0.45</text>" in drawn  # (0.4 + 0.5) / 2 at step 6
    assert ">2 seeds</text>" in drawn


def test_labels_of_lines_that_end_together_do_not_lie_on_each_other():
    drawn = chart.svg({"a": [[0.5] * 3], "b": [[0.5] * 3], "c": [[0.51] * 3]}, "title")
    found = re.findall(r'y="([\d.]+)"[^>]*>([abc]) 0.5', drawn)
    heights = sorted(float(y) for y, _ in found)
    assert len(found) == 3 and all(b - a > 30 for a, b in zip(heights, heights[1:]))


def test_a_row_of_one_seed_looks_different_from_one_of_three():
    one, three = (chart.dots({"x": values}, "") for values in ([0.5], [0.4, 0.5, 0.6]))
    assert ">1 seed<" in one and ">3 seeds<" in three
    bar = 'stroke-width="3"'  # the mean
    assert bar not in one and bar in three
    assert 'fill-opacity="0"' in one and 'fill-opacity="0"' not in three


def test_a_saved_tree_becomes_a_picture(tmp_path, monkeypatch):
    root = Node(end="final", answer={"a": "<b>"})
    root.add(Turn("assistant", "text", (1, 2), (-0.5, -0.5)))
    root.children.append(Node((0,), end="final", answer="plants"))
    trees, out = tmp_path / "trees.jsonl", tmp_path / "tree.svg"
    write_rollouts(trees, [Rollout({}, "g", Node(), 0.0), Rollout({}, "g", root, 1.0)])
    assert command(chart, monkeypatch, out, "--tree", trees, "--number", 1) is None
    assert chart.tree(root, style=chart.ALONE) == out.read_text()
    ElementTree.parse(out)
    assert ">0 plants</text>" in out.read_text()
    for wrong in (("--tree", trees, "--number", 2), ("x=y", "--tree", trees), (),
                  ("--tree", tmp_path / "none")):
        assert "\n" not in command(chart, monkeypatch, out, *wrong)


def test_a_run_without_steps_or_a_missing_file_is_one_line(tmp_path, monkeypatch):
    empty = write_run(tmp_path / "a", [])
    (empty / "metrics.jsonl").write_text("")
    for run, says in ((empty, "a run without GRPO steps"), ("/nowhere", "/nowhere")):
        message = command(chart, monkeypatch, tmp_path / "out.svg", f"x={run}")
        assert says in message and "\n" not in message


def test_points_are_where_their_numbers_say_and_named_at_their_mean():
    drawn = chart.scatter({"free": [(100, 0.0), (50, 1.0)], "none": []}, "t", "tokens")
    right, bottom = chart.WIDTH - chart.RIGHT, chart.HEIGHT - chart.BOTTOM
    middle = (chart.LEFT + right) / 2
    assert f'cx="{right:.1f}" cy="{bottom:.1f}"' in drawn
    assert f'cx="{middle:.1f}" cy="{chart.TOP:.1f}"' in drawn
    assert drawn.count("<circle") == 2 and ">free</text>" in drawn and "none" not in drawn


def test_names_of_points_that_lie_on_each_other_do_not():
    rows = {f"row {i}": [(9.0, 0.01)] for i in range(11)}
    drawn = chart.scatter(rows, "title", "tokens")
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>row \d', drawn))
    assert len(heights) == 11 and heights[-1] < chart.HEIGHT - chart.BOTTOM
    assert all(b - a >= chart.LINE for a, b in zip(heights, heights[1:]))
