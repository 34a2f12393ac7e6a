"""Damaged and foreign files: the same result, or one line that names what is wrong."""
import shutil

import pytest
from conftest import SHORT, command

import train


@pytest.mark.slow
def test_a_run_with_a_damaged_file_resumes_or_says_why_in_one_line(
        short_run, tmp_path, monkeypatch):
    files = [path.relative_to(short_run) for path in short_run.rglob("*") if path.is_file()]
    files = [path for path in files if path.parts[0] not in ("init", "final")]
    for number, path in enumerate(files):
        for cut in (False, True):
            out = tmp_path / f"{number}{cut}"
            shutil.copytree(short_run, out)
            (out / "result.json").unlink()
            if cut:
                content = (short_run / path).read_bytes()
                (out / path).write_bytes(content[:len(content) // 2])
            else:
                (out / path).unlink(missing_ok=True)
            said = command(train, monkeypatch, "--resume", "--out", out)
            assert "\n" not in str(said), (path, cut)
            shutil.rmtree(out)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
        short_run, tmp_path, monkeypatch):
    def warm_up(setup, state):
        raise ValueError("it begins")

    out = tmp_path / "run"
    shutil.copytree(short_run, out)
    for name in ("checkpoints", "trees"):
        shutil.rmtree(out / name)
    monkeypatch.setattr(train, "warm_up", warm_up)
    assert "it begins" in command(train, monkeypatch, "--resume", "--out", out)


def test_a_run_keeps_off_what_is_not_its_own(short_run, tmp_path, monkeypatch):
    flags = *SHORT, "--model", short_run / "warmup", "--warmup-steps", 0, "--heldout", 1
    mine = tmp_path / "mine" / "checkpoints" / "me"
    mine.mkdir(parents=True)
    message = command(train, monkeypatch, *flags, "--out", tmp_path / "mine")
    assert "not empty and holds no run" in message and len(list(mine.parent.iterdir())) == 1
