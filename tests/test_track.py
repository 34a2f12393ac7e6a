"""Metrics that are sent elsewhere as well, with stand-ins for the packages."""
import sys
import types

import pytest

import train
from conftest import SHORT, command
from runtime.track import check, tracker

ROW = {"phase": "grpo", "step": 3, "reward": 0.5, "rows": 7, "ends": {"final": 2},
       "worse": None, "task": "x", "elapsed": 1.5}


def test_nothing_is_tracked_unless_asked_for():
    assert tracker("none", "out", "1", {})(ROW) is None


def test_numbers_go_to_tensorboard_under_their_phase(monkeypatch, tmp_path):
    sent = []

    class SummaryWriter:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            sent.append((self.folder, name, value, step))

        def flush(self):
            sent.append("flushed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker("tensorboard", str(tmp_path), "1", {})(ROW)
    folder = str(tmp_path / "tensorboard")
    assert sent == [(folder, "grpo/reward", 0.5, 3), (folder, "grpo/rows", 7, 3),
                    (folder, "grpo/elapsed", 1.5, 3), "flushed"]


def stand_in(monkeypatch, log) -> list[dict]:
    """In place of wandb: log(row) gets the rows. Returns the options of its runs."""
    begun = []

    def init(**options):
        begun.append(options)
        return types.SimpleNamespace(define_metric=lambda *_, **__: None, log=log)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return begun


def test_numbers_go_to_wandb_and_a_resumed_run_goes_on(monkeypatch):
    sent = []
    begun = stand_in(monkeypatch, sent.append)
    tracker("wandb", "runs/a/", "1f", {"lr": 1.0})(ROW)
    assert begun == [{"project": "rlm", "name": "a", "id": "a-1f", "resume": "allow",
                      "config": {"lr": 1.0}}]
    assert sent == [{"grpo/reward": 0.5, "grpo/rows": 7, "grpo/elapsed": 1.5, "step": 3}]


@pytest.mark.parametrize("name, module", [
    ("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_not_there_is_one_line(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"--track {name} needs a package: pip install"):
        check(name)


def test_a_missing_package_is_noticed_before_a_directory_is_emptied(
        monkeypatch, tmp_path, capsys):
    (tmp_path / "best").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = "--out", tmp_path, "--overwrite", "--track", "wandb"
    assert "pip install wandb" in command(train, monkeypatch, *flags)
    assert (tmp_path / "best").exists()


@pytest.mark.slow
def test_every_row_of_a_run_is_sent(monkeypatch, tmp_path, capsys):
    sent = []
    stand_in(monkeypatch, sent.append)
    command(train, monkeypatch, *SHORT, "--out", tmp_path / "a", "--track", "wandb")
    names = {name for row in sent for name in row}
    assert {"warmup/loss", "grpo/reward", "heldout_warmup/score", "heldout_final/score",
            "heldout_16x/score"} <= names
    assert all("step" in row for row in sent)
    assert "goes on without" not in capsys.readouterr().err


def test_a_run_goes_on_if_its_metrics_cannot_be_sent(monkeypatch, capsys):
    def log(row):
        raise OSError("no network")

    stand_in(monkeypatch, log)
    track = tracker("wandb", "out", "1", {})
    track(ROW)
    track(ROW)
    assert capsys.readouterr().err.count("the run goes on without it") == 1
