"""A set of configurations: what is run, what is continued, what the results say."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import command

import train
from baselines import objectives
from experiments import ablation
from grpo import check_switches
from util import parse


@pytest.fixture
def asked(monkeypatch):
    """{name of a run: its flags}; each is done at once, and scores more than the last."""
    asked = {}

    def run(command, **streams):
        path = Path(command[command.index("--out") + 1])
        asked[path.name] = " ".join(command[4:])
        finish(path, 0.1 * len(asked))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(ablation.subprocess, "run", run)
    return asked


def finish(path, score):
    """The files of a finished run."""
    path.mkdir(exist_ok=True)
    (path / "result.json").write_text(json.dumps({
        "seed": int(path.name[-1]), "heldout_final": score}))
    (path / "metrics.jsonl").write_text(json.dumps({
        "phase": "eval", "name": "heldout_final", "out": 80.0, "nodes": 4.0}) + "".join(
        "\n" + json.dumps({"name": "heldout_now", "sampled": tokens, "score": now})
        for tokens, now in ((100, 0.2), (3000, 0.95), (5000, 1.0))))


def test_a_set_is_run_continued_and_reported(asked, tmp_path, monkeypatch, capsys):
    """One was finished before."""
    rows = {"default": "", "summed": "--children sum"}
    some = ablation.Set(rows, "--task deep", "--warmup-steps 9")
    monkeypatch.setattr(ablation, "SETS", {"some": some})
    monkeypatch.setattr(ablation, "SEEDS", (0, 1))
    finish(tmp_path / "some-summed-0", 0.2)
    assert command(ablation, monkeypatch, "some", "--out", tmp_path) is None
    assert [name.removeprefix("some-") for name in asked] == [
        "warmup-0", "default-0", "warmup-1", "default-1", "summed-1"]
    for name, flags in asked.items():
        assert "--task deep" in flags
        assert ("--warmup-steps 9" in flags) == ("warmup" in name)
    assert f"--model {tmp_path}/some-warmup-1/warmup " in asked["some-summed-1"]

    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| summed | `--children sum` | 3k | 3k, 3k | 0.200 0.500 | 0.350 |"
    _, row = json.loads((tmp_path / "some.json").read_text())["rows"]
    assert [run["heldout_final"] for run in row["runs"]] == pytest.approx([0.2, 0.5])


@pytest.mark.parametrize("name", ablation.SETS)
def test_every_configuration_is_one_that_train_takes(name, asked, tmp_path, monkeypatch):
    command(ablation, monkeypatch, name, "--out", tmp_path)
    for flags in asked.values():
        monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
        config = parse("", train.Config, train.GROUPS)
        if config.objective != "grpo":
            check_switches(getattr(objectives, config.objective), config)


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "TRAIN", str(tmp_path / "nowhere.py"))
    message = command(ablation, monkeypatch, "board", "--out", tmp_path)
    assert "board-warmup-0: exit status 2" in message
