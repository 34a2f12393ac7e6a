"""Charts: recorded results, curves from the files of runs, and a group of trees."""
import json
from pathlib import Path

import pytest
from conftest import command

pytest.importorskip("matplotlib")

from experiments import figures
from tasks import Task
from tree import Node, Rollout, Turn, write_rollouts

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


def tree(group, reward, *children):
    root = Node((), children=list(children))
    for node in root.walk():
        node.add(Turn("user", "<b>", (1,)))
        node.add(Turn("assistant", "x & y", (2, 3), (-1.0, -1.0)))
    return Rollout(Task("t", "notes", "<q>", {}), group, root, reward)


def test_the_picture_is_of_the_first_group_that_learns_with_children_like_their_root(
        tmp_path, monkeypatch):
    good = tree("b", 1.0, Node((0,), children=[Node((0, 0))]), Node((1,)))
    trees = [tree("a", 0.5), tree("a", 0.5), tree("b", 0.0, Node((0,))), good]
    saved, out = tmp_path / "trees.jsonl", tmp_path / "out.svg"
    write_rollouts(saved, trees)
    assert command(figures, monkeypatch, out, saved) is None
    assert "&lt;q&gt;" in out.read_text()  # what is written is escaped
    axes = figures.group(trees).axes
    fills = [{tuple(dot.get_facecolor()[0]) for dot in each.collections}
             for each in axes[:2]]
    assert [len(each.collections) for each in axes[:3]] == [4, 2, 0]
    assert len(fills[0]) == len(fills[1]) == 1 and fills[0] != fills[1]
