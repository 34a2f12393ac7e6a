"""Damaged files and odd values: the same result, or one line that names what is wrong."""
import json
import math
import os
import shutil

import pytest
import torch
from conftest import FLAT, ROOT, SHORT, command
from test_tasks import ROWS

import tasks
import train
from config import load_config
from engine import hf
from model import open_checkpoint
from training.questions import read
from tokenizer import Tokenizer

ODD = (None, 5, "x", [], {}, True, -1, math.nan)


def one_line(make):
    """Nothing but an OSError or a ValueError of one line comes out of it."""
    try:
        make()
    except (OSError, ValueError) as error:
        assert "\n" not in str(error)


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


def test_adapters_of_a_renamed_run_open_on_their_own_weights(
        short_run, tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "a-old"
    command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
            "--warmup-steps", 0, "--lora-rank", 2, "--heldout", 1, "--out", first)
    last = sorted(os.listdir(first / "checkpoints"))[-1]
    want = dict(open_checkpoint(str(first / "checkpoints" / last)).named_parameters())
    first.rename(second)
    shutil.copytree(short_run / "init", first / "warmup")  # of another run
    found = dict(open_checkpoint(str(second / "checkpoints" / last)).named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in want.items())


def fields_of(value, path=()):
    """The paths of all fields of nested objects."""
    for name, inner in value.items():
        yield (*path, name)
        if isinstance(inner, dict) and len(path) < 2:
            yield from fields_of(inner, (*path, name))


def with_odd(value, path, odd):
    inner = odd if len(path) == 1 else with_odd(value[path[0]], path[1:], odd)
    return value | {path[0]: inner}


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "rlm.json"])
def test_odd_values_in_the_files_of_a_checkpoint_give_one_line(name, tmp_path):
    readers = {"config.json": lambda: hf.read_config(str(tmp_path / name)),
               "tokenizer_config.json": lambda: Tokenizer.from_pretrained(tmp_path),
               "rlm.json": lambda: load_config(str(tmp_path))}
    shutil.copytree(ROOT / "assets" / "tiny", tmp_path, dirs_exist_ok=True)
    whole = json.loads((tmp_path / name).read_text())
    for path in fields_of(whole):
        for odd in ODD:
            (tmp_path / name).write_text(json.dumps(with_odd(whole, path, odd)))
            one_line(readers[name])


@pytest.mark.parametrize("task", ROWS)
def test_odd_rows_are_left_out_or_can_be_scored(task, tmp_path):
    row, *_ = ROWS[task]
    odd_rows = [row | {name: odd} for name in row for odd in ODD]
    odd_rows += [row | {"answer": text} for text in ("[entity", "5", "[]", "['many']")]
    if task == "evidence":
        odd_rows += [row | {"papers": ["a"]}, row | {"evidence": ["x"]}]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(one) for one in (*odd_rows, row)] + ["[" * 100_000]
    path.write_text("\n".join(lines))
    module = tasks.load(task)
    for question in read(str(path), module):
        right = getattr(module, "right_answer", lambda question: question.answer)(question)
        assert 0 <= tasks.score_of(question, right) <= 1


def test_odd_states_give_one_line(short_run, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(short_run, out)
    last = sorted((out / "checkpoints").iterdir())[-1] / "state.json"
    for text in ("[]", '{"odd": 1}', "5"):
        last.write_text(text)
        assert "\n" not in command(train, monkeypatch, "--resume", "--out", out)


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
    """The checkpoints of a run beside it, whose name its own name matches as a pattern; and
    a directory that holds no run."""
    flags = *SHORT, "--model", short_run / "warmup", "--warmup-steps", 0, "--heldout", 1
    beside = tmp_path / "a1" / "checkpoints" / "grpo-000000"
    beside.mkdir(parents=True)
    assert FLAT in command(train, monkeypatch, *flags, "--out", tmp_path / "a[12]")
    assert beside.exists()
    mine = tmp_path / "mine" / "checkpoints" / "me"
    mine.mkdir(parents=True)
    message = command(train, monkeypatch, *flags, "--out", tmp_path / "mine")
    assert "not empty and holds no run" in message and len(list(mine.parent.iterdir())) == 1
