"""Charts: the committed one again, and curves from the files of runs."""
import json
from pathlib import Path

from conftest import command

from lab import chart

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
