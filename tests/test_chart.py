"""Charts: recorded ones again, curves from the files of runs, and a group of trees."""
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import command

pytest.importorskip("matplotlib")

from experiments import chart, picture
from tasks import Task
from tree import Node, Rollout, Turn

RESULTS = Path(chart.__file__).parent / "results"


def test_the_recorded_results_are_the_committed_charts(tmp_path, monkeypatch):
    for name, data, *flags in (("reward", "main"), ("deep", "deep", "--kind", "dots"),
                               ("children", "children", "--y", "right")):
        out = tmp_path / "out.svg"
        assert command(chart, monkeypatch, out, RESULTS / f"{data}.json", *flags) is None
        assert out.read_bytes() == (RESULTS / f"{name}.svg").read_bytes()


def test_the_picture_of_a_group_colours_each_child_like_its_root():
    def tree(reward, *children):
        root = Node((), children=list(children))
        for node in root.walk():
            node.add(Turn("user", "<b>", (1,)))
            node.add(Turn("assistant", "x & y", (2, 3), (-1.0, -1.0)))
        return Rollout(Task("t", "notes", "<q>", {}), "g", root, reward)

    good, bad = tree(1.0, Node((0,)), Node((1,))), tree(0.0, Node((0,)))
    svg = ElementTree.fromstring(picture.picture([bad, good]))  # what is written is escaped
    fills = [each.get("fill") for each in svg.iter() if each.tag.endswith("circle")]
    assert len(fills) == 5 and len(set(fills[:3])) == len(set(fills[3:])) == 1
    assert fills[0] != fills[3]


def write_run(path, rewards):
    lines = [{"phase": "warmup", "step": 1}]
    lines += [{"phase": "grpo", "reward": reward} for reward in rewards]
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_curve_is_the_mean_of_its_runs_as_a_moving_average(tmp_path, monkeypatch):
    first = write_run(tmp_path / "a", [0.0] * 4 + [1.0] * 4)
    second = write_run(tmp_path / "b", [0.5] * 6)
    assert chart.read(first) == {"reward": [0.0] * 4 + [1.0] * 4}
    assert chart.smooth([0.0] * 4 + [1.0] * 4)[3:] == [0.0, 0.2, 0.4, 0.6, 0.8]
    out = tmp_path / "out.svg"
    assert command(chart, monkeypatch, out, f"<x>={first},{second}") is None
    assert "&lt;x&gt; 0.45, n 2<" in out.read_text()  # (0.4 + 0.5) / 2 at step 6
