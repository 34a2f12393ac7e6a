"""A set of configurations: what is run, what is continued, what the results say. And the
program that mixes degenerate policies into a warm-up."""
import json
import random
import sys
from pathlib import Path

import pytest
from conftest import FLAT, SHORT, command

import tasks
import train
from lab import ablation, degenerate, objectives
from runtime.flags import parse

RESULTS = Path(ablation.__file__).parent / "results"


def finish(path, score):
    """The files of a finished run."""
    (path / "warmup").mkdir(parents=True)
    (path / "warmup" / "rlm.json").write_text("{}")
    (path / "result.json").write_text(json.dumps({
        "seed": int(path.name[-1]), "heldout_warmup": 0.1, "heldout_final": score,
        "heldout_4x": 0.2, "heldout_16x": None, "sampled_tokens": 9, "seconds": 1.0,
        "flags": {"children": "sum" if "summed" in path.name else "mean", "task": "deep",
                  "tokens": 200_000, "heldout": 64}}))
    (path / "metrics.jsonl").write_text(json.dumps({
        "phase": "grpo", "step": 1, "reward": score, "entropy": 0.5, "tokens_worse": 7.0,
        "tokens_better": None, "own_correlation": 0.25}) + "\n" + json.dumps({
            "phase": "eval", "name": "heldout_final", "out": 80.0, "nodes": 4.0,
            "critical_path": 30.0}) + "\n")


def test_a_set_of_configurations_is_run_continued_and_reported(tmp_path, monkeypatch):
    """Of the runs one was finished before; the files say what the runs say."""
    two = {"default": "", "summed": "--children sum"}
    compared = ablation.Set(
        two, task="deep", flags="--heldout 64", warm_up="--warmup-steps 9")
    monkeypatch.setattr(ablation, "SETS", {"two": compared})
    monkeypatch.setattr(ablation, "SEEDS", (0, 1))
    monkeypatch.setattr(ablation, "MORE_SEEDS", ())
    asked = []

    def train(path, flags):
        asked.append(Path(path).name)
        assert "--task deep" in flags
        assert ("--warmup-steps 9" in flags) == ("warmup-" in path)
        # A warm-up's own scores are not kept, so few questions do.
        assert flags.rpartition("--heldout ")[2][:2].strip() == (
            "8" if "warmup-" in path else "64")
        finish(Path(path), 0.1 * (1 + len(asked)))

    monkeypatch.setattr(ablation, "train", train)
    finish(tmp_path / "deep-summed-0", 0.1)
    assert command(ablation, monkeypatch, "two", "--out", tmp_path) is None
    assert asked == ["deep-warmup-0", "deep-default-0", "deep-warmup-1", "deep-default-1",
                     "deep-summed-1"]

    first, second = json.loads((tmp_path / "two.json").read_text())["rows"]
    assert [r["heldout_final"] for r in second["runs"]] == pytest.approx([0.1, 0.6])
    # Differences -0.2 and +0.1: mean -0.05, standard error 0.15, Student's 12.71 for two.
    low, high = -0.05 - 12.71 * 0.15, -0.05 + 12.71 * 0.15
    assert second["difference"] == pytest.approx([-0.05, low, high], abs=1e-3)
    assert first["difference"][0] == 0 and second["runs"][0]["tokens_worse"] == [7.0]
    assert (tmp_path / "two.svg").read_text().count("<circle") == 4
    assert (tmp_path / "two-tokens.svg").read_text().count("<circle") == 4
    head, _, row, _ = (tmp_path / "two.md").read_text().split("\n\n")[1].splitlines()
    assert head.endswith("| 4 times as long | tokens | nodes | critical path |")
    assert row.endswith("| 0.200 | 80 | 4.0 | 30 |")

    two["summed"] = "--children mean"
    message = command(ablation, monkeypatch, "two", "--out", tmp_path)
    assert "deep-summed-0 was run with children sum, not mean" in message
    two["summed"] = "--children sum --tokens 9"
    message = command(ablation, monkeypatch, "two", "--out", tmp_path)
    assert "deep-summed-0 was run with tokens 200000, not 9" in message


def test_a_set_goes_on_from_its_results_alone(tmp_path, monkeypatch):
    """One seed is run in one place, the other in another that got the results of the first:
    the table has both."""
    two = {"default": "", "summed": "--children sum"}
    monkeypatch.setattr(ablation, "SETS", {"two": ablation.Set(two)})
    monkeypatch.setattr(ablation, "SEEDS", (0, 1))
    monkeypatch.setattr(ablation, "MORE_SEEDS", ())
    asked = []

    def train(path, flags):
        asked.append(Path(path).name)
        finish(Path(path), 0.1 * (1 + len(asked)))

    monkeypatch.setattr(ablation, "train", train)
    first, second = tmp_path / "first", tmp_path / "second"
    assert command(ablation, monkeypatch, "two", "--out", first, "--seeds", 0) is None
    assert asked == ["warmup-0", "default-0", "summed-0"]
    second.mkdir()
    (second / "two.json").write_text((first / "two.json").read_text())
    assert command(ablation, monkeypatch, "two", "--out", second) is None
    assert asked[3:] == ["warmup-1", "default-1", "summed-1"]
    rows = json.loads((second / "two.json").read_text())["rows"]
    assert [r["heldout_final"] for r in rows[1]["runs"]] == pytest.approx([0.4, 0.7])

    two["default"] = "--kl 1"
    message = command(ablation, monkeypatch, "two", "--out", second)
    assert "two.json: default was run with other flags" in message
    two["default"] = ""
    monkeypatch.setattr(ablation, "SETS", {"two": ablation.Set(two, flags="--lr 1e-4")})
    message = command(ablation, monkeypatch, "two", "--out", second)
    assert "two.json: default was run with other flags" in message


def test_claims_have_more_seeds_and_a_lone_root_its_own_warm_up(tmp_path, monkeypatch):
    rows = {"default": "", "alone": ablation.ALONE, "summed": "--children sum"}
    compared = ablation.Set(rows, claims=("default", "alone"))
    monkeypatch.setattr(ablation, "SETS", {"three": compared})
    monkeypatch.setattr(ablation, "SEEDS", (0,))
    monkeypatch.setattr(ablation, "MORE_SEEDS", (1,))
    asked = {}

    def train(path, flags):
        asked[Path(path).name] = flags
        finish(Path(path), 0.5)

    monkeypatch.setattr(ablation, "train", train)
    assert command(ablation, monkeypatch, "three", "--out", tmp_path) is None
    assert list(asked) == ["warmup-0", "default-0", "warmup-alone-0", "alone-0", "summed-0",
                           "warmup-1", "default-1", "warmup-alone-1", "alone-1"]
    for name, flags in asked.items():
        assert (ablation.ALONE in flags) == ("alone" in name)
        start = f"--model {tmp_path / 'warmup-alone'}-{name[-1]}/warmup "
        assert (start in flags) == name.startswith("alone")


def test_credit_is_run_on_three_tasks_the_last_from_a_pretrained_model(
        tmp_path, monkeypatch):
    """Every configuration is one that train.py takes. Sets of one task share what is equal:
    `price` begins with the same runs as credit-deep."""
    asked = {}

    def fake(path, flags):
        asked[Path(path).name] = flags.split()
        finish(Path(path), 0.5)

    monkeypatch.setattr(ablation, "train", fake)
    monkeypatch.setattr(ablation, "check_flags", lambda path, flags: None)
    out = ["--out", tmp_path]
    assert "give --model" in command(ablation, monkeypatch, "credit-definitions", *out)
    assert command(ablation, monkeypatch, "credit", "--model", "m", *out) is None
    for task, seeds in (("evidence", 5), ("deep", 5), ("definitions", 2)):
        names = [name for name in asked if name.startswith(f"{task}-")]
        rows = ablation.SETS[f"credit-{task}"].rows
        assert len(names) == seeds * (len(rows) + 1)  # and a warm-up per seed
        assert all(asked[name][asked[name].index("--task") + 1] == task for name in names)
    assert "m" in asked["definitions-warmup-1"]
    for flags in asked.values():
        monkeypatch.setattr(sys, "argv", ["train.py", *flags])
        config = parse("", train.Config, train.GROUPS)
        if config.objective != "grpo":
            getattr(objectives, config.objective)([], config)

    asked.clear()
    assert command(ablation, monkeypatch, "price", *out) is None
    assert {name.rpartition("-")[0] for name in asked} == {
        "deep-price-1", "deep-price-4", "deep-price-8"}


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "TRAIN", str(tmp_path / "nowhere.py"))
    message = command(ablation, monkeypatch, "core", "--out", tmp_path)
    assert "warmup-0: exit status 2" in message and "\n" not in message
    assert "nowhere.py" in (tmp_path / "warmup-0" / "train.log").read_text()


def test_an_unknown_set_is_refused(tmp_path, monkeypatch, capsys):
    assert command(ablation, monkeypatch, "all", "--out", tmp_path) == 2
    assert "'core', 'deep', 'price'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["core", "more", "credit-evidence", "credit-deep",
                                  "credit-definitions", "price"])
def test_the_committed_tables_say_what_the_committed_runs_say(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert ablation.table(rows) in (RESULTS / f"{name}.md").read_text()
    for row in rows:
        assert ablation.mean([r["heldout_final"] for r in row["runs"]]) == row["mean"]


@pytest.mark.slow
def test_the_share_of_a_degenerate_policy_is_counted_and_printed(
        short_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "demonstrate", tasks.demonstrate)  # both are put back
    monkeypatch.setattr(train.Trainer, "collect", train.Trainer.collect)
    flags = [*SHORT, "--model", str(short_run / "init"), "--out", str(tmp_path / "l")]
    monkeypatch.setattr(sys, "argv", ["degenerate", "letters", *flags])
    with pytest.raises(SystemExit, match=FLAT):
        degenerate.main()
    assert "letters: share 0.00 in the first step" in capsys.readouterr().out
    questions = [tasks.make("evidence", random.Random(i)) for i in range(40)]
    config = train.tiny_rlm(train.Config())
    trees = train.demonstrations(questions, None, config, 0)
    assert 0.3 < degenerate.share(trees, "letters") < 0.7
    assert command(degenerate, monkeypatch, "nothing") == (
        "lab.degenerate: give one of echo, letters, flood, constant, endless, at_once, "
        "then flags of train.py")
