"""Charts: recorded results, and curves from the files of runs."""
import json
from pathlib import Path

import pytest
from conftest import command

pytest.importorskip("matplotlib")

from experiments import figures

RESULTS = Path(figures.__file__).parent / "results"


def test_recorded_results_can_be_drawn(tmp_path, monkeypatch):
    out = tmp_path / "out.svg"
    assert command(figures, monkeypatch, out, RESULTS / "main.json") is None
    assert "inherit 0." in out.read_text()


def write_run(path, rewards):
    lines = [{"phase": "warmup", "step": 1}]
    lines += [{"phase": "grpo", "reward": reward} for reward in rewards]
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_curve_is_the_mean_of_its_runs_as_a_moving_average(tmp_path, monkeypatch):
    first = write_run(tmp_path / "a", [0.0] * 4 + [1.0] * 4)
    second = write_run(tmp_path / "b", [0.5] * 6)
    out = tmp_path / "out.svg"
    assert command(figures, monkeypatch, out, f"<x>={first},{second}") is None
    assert "&lt;x&gt; 0.45, n 2<" in out.read_text()  # (0.4 + 0.5) / 2 at step 6
