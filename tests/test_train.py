"""Short whole runs through the command lines: what they leave behind, resuming, bad input."""
import asyncio
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lab import ablation
from runtime import checkpoint
import eval as evaluation
import grpo
from runtime import plan
import rlm
import tasks
import train
import warmup
from runtime.flags import parse
from grpo import STATS
from model import Qwen3
from sampler import Sampler
from tokenizer import Tokenizer
from tree import Node

DATA = os.path.join(os.path.dirname(__file__), "data", "papers.jsonl")
SHORT = ("--warmup-steps 3 --warmup-trees 6 --warmup-rows 4 --steps 2 --questions 2 --group 2 "
         "--heldout 3 --show-every 1").split()


def command(module, monkeypatch, *args):
    """Run a script's main with these arguments; its exit status or message, None if it returned."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
    try:
        module.main()
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture
def finished(short_run):
    return short_run


def weights(path):
    return dict(Qwen3.from_pretrained(str(path)).named_parameters())


def test_a_run_leaves_a_model_a_result_and_metrics(finished):
    result = json.loads((finished / "result.json").read_text())
    for key in ("seed credit heldout_warmup heldout_final heldout_4x heldout_n window_tokens "
                "context_tokens seconds").split():
        assert key in result
    assert result["context_tokens"] > result["window_tokens"]
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt",
            "tokenizer_config.json", "rlm.json"} <= set(os.listdir(finished / "final"))
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["largest_gap"] < 1e-4 for row in steps)  # float32: sampler and trainer agree
    assert rlm.RLMConfig.load(finished / "final" / "rlm.json") == warmup.TINY_RLM


def test_an_interrupted_run_resumes_to_the_same_weights(finished, tmp_path, monkeypatch):
    """Ctrl-C in the second step, then --resume: as if it had never stopped."""
    collect, calls = rlm.collect, []

    async def interrupted(questions, *args, **more):
        calls.append(len(questions))
        if calls.count(4) == 2:  # 2 questions x 2 trees: the second step
            raise KeyboardInterrupt
        return await collect(questions, *args, **more)

    out = tmp_path / "b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlm, "collect", interrupted)
        assert "--resume" in command(train, patch, *SHORT, "--out", out, "--model",
                                     finished / "init")
    assert not (out / "result.json").exists()
    state = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())
    assert (state["phase"], state["step"]) == ("grpo", 1)
    assert command(train, monkeypatch, "--out", out, "--resume") is None  # flags from run.json
    whole, resumed = weights(finished / "final"), weights(out / "final")
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-4, atol=1e-5)


def test_real_text_trains_two_steps_and_is_evaluated(tmp_path, monkeypatch, capsys):
    out = tmp_path / "c"
    assert command(train, monkeypatch, *SHORT, "--data", DATA, "--out", out) is None
    assert json.loads((out / "result.json").read_text())["heldout_n"] == 1
    report = tmp_path / "rows.json"
    assert command(evaluation, monkeypatch, "--model", out / "final", "--data", DATA, "--n", 3,
                   "--json", report) is None
    (row,) = json.loads(report.read_text())["rows"]
    assert row["task"] == "evidence" and row["method"] == "rlm1" and row["n"] == 3
    assert 0 <= row["low"] <= row["score"] <= row["high"] <= 1 and row["length"] > 100


def test_the_trained_model_answers_over_real_files_without_breaking(finished, monkeypatch, capsys):
    status = command(rlm, monkeypatch, "--model", finished / "final", "--trace",
                     "What is a rollout?", "README.md", "tree.py")
    assert status is None or "no answer" in status  # three supervised steps teach little
    assert "root" in capsys.readouterr().out


def test_a_batch_without_signal_changes_no_weight(finished):
    trainer = train.Trainer(train.RunConfig(out=str(finished.parent / "d"), heldout=2,
                                            model=str(finished / "final")),
                            train.WarmupConfig(), train.UpdateConfig(), grpo.GRPOConfig())
    task = tasks.make_task("evidence", random.Random(0))
    sampler = Sampler(trainer.model, batch=4, window=trainer.config.window)
    trees = asyncio.run(rlm.collect([task] * 4, rlm.local_policy(sampler, trainer.tokenizer),
                                    trainer.tokenizer, trainer.config, (0,), ["g"] * 4))
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    flat = [train.Rollout(r.task, "g", r.root, 0.5) for r in trees]
    metrics = trainer.update(flat, 0)
    assert metrics["rows"] == 0 and metrics["grad_norm"] == 0
    assert all(torch.equal(before[n], w) for n, w in trainer.model.named_parameters())
    signal = [train.Rollout(r.task, "g", r.root, float(i)) for i, r in enumerate(trees)]
    assert trainer.update(signal, 0)["grad_norm"] > 0


def make_trainer(monkeypatch, finished, out, flags):
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", str(finished / "warmup"), "--heldout",
                                      "2", "--out", str(out), *flags.split()])
    return train.Trainer(*parse("", train.CONFIGS))


@pytest.mark.parametrize("flags, rounds", [("", 3), ("--objective filter", 1)])
def test_what_is_no_signal_depends_on_the_objective(flags, rounds, finished, tmp_path, monkeypatch):
    """Trees that are all right say nothing to a baseline, and all to rejection sampling."""
    trainer = make_trainer(monkeypatch, finished, tmp_path / "g",
                           f"--resample 2 --questions 2 --group 2 {flags}")
    asked = []
    trainer.ahead, trainer.refresh = None, lambda: None
    trainer.grow = lambda step, again, trees: asked.append(again) or {
        n: (Node(), 1.0, "") for n in range(len(trees))}
    kept, _ = trainer.sample(0)
    assert asked == list(range(rounds)) and len(kept) == 4


@pytest.mark.parametrize("flags", [
    "--objective dpo --norms-by-depth", "--kl 0.1 --updates 2", "--lora-rank 2 --objective dpo",
    "--own 0.5 --process 0.1 --children one", "--objective filter --keep 0.1 --overlong mask"])
def test_every_objective_moves_the_weights_and_logs_what_to_watch(flags, finished, tmp_path,
                                                                  monkeypatch):
    trainer = make_trainer(monkeypatch, finished, tmp_path / "g", flags + " --max-norm 1e9")
    trainer.end_warmup()
    trainer.make_reference()
    task = tasks.make_task("evidence", random.Random(0))
    trees = warmup.demonstrations([task] * 8, trainer.tokenizer, trainer.config, 0)
    assert len({r.reward for r in trees}) > 2 and any(r.root.children for r in trees)
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    gradients, zero_grad = [], trainer.optimizer.zero_grad
    monkeypatch.setattr(trainer.optimizer, "zero_grad", lambda **more: (gradients.append(
        {n: w.grad.clone() for n, w in trainer.model.named_parameters() if w.requires_grad}),
        zero_grad(**more)))
    m = trainer.update(trees, 3)
    assert any(not torch.equal(before[n], w) for n, w in trainer.model.named_parameters())
    assert all(math.isfinite(m[name]) for name in (*STATS[1:], "loss", "grad_norm"))
    assert sum(d["share"] for d in m["by_depth"]) == pytest.approx(1)
    assert m["kl"] > 0 if "--updates" in flags else m["ratio"] == pytest.approx(1)
    if "--norms-by-depth" in flags:
        assert all(d["grad_norm"] > 0 for d in m["by_depth"]) and len(gradients) == 3
        for name, gradient in gradients.pop().items():  # the parts of the depths make up the whole
            torch.testing.assert_close(sum(g[name] for g in gradients), gradient, rtol=1e-3,
                                       atol=1e-5 * float(gradient.abs().max()) + 1e-9)
    assert -1 <= m["own_correlation"] <= 1


def test_groups_without_signal_are_sampled_again(finished, tmp_path, monkeypatch):
    out = tmp_path / "h"
    assert command(train, monkeypatch, *SHORT, "--model", finished / "warmup", "--warmup-steps", 0,
                   "--heldout", 1, "--out", out,
                   *"--resample 1 --tokens 1 --eval-every 1".split()) is None
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["phase"] == "grpo"]  # one step is more than a token
    assert step["flat"] == 1 and step["skipped"] == 1  # three supervised steps answer nothing
    best = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())["best"]
    assert best == {"step": 1, "score": 0.0} and weights(out / "best")
    assert json.loads((out / "result.json").read_text())["sampled_tokens"] > step["tokens"] * 4


def test_a_set_of_configurations_is_run_continued_and_reported(tmp_path, monkeypatch):
    """Three runs of which one was finished before; the files say what the runs say."""
    monkeypatch.setattr(ablation, "SETS", {"two": {"default": "", "summed": "--children sum"}})
    monkeypatch.setattr(ablation, "SEEDS", (0, 1))
    asked = []

    def fake(path, flags):
        asked.append((os.path.basename(path), flags))
        os.makedirs(os.path.join(path, "warmup"), exist_ok=True)
        score = 0.1 * len(asked)
        (result := os.path.join(path, "result.json"))
        with open(result, "w", encoding="utf-8") as file:
            json.dump({"seed": int(path[-1]), "heldout_warmup": 0.1, "heldout_final": score,
                       "heldout_4x": 0.2, "sampled_tokens": 9, "seconds": 1.0,
                       "flags": {"children": "sum" if "summed" in path else "mean"}}, file)
        with open(os.path.join(path, "warmup", "rlm.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        with open(os.path.join(path, "metrics.jsonl"), "w", encoding="utf-8") as file:
            file.write(json.dumps({"phase": "grpo", "step": 1, "reward": score, "entropy": 0.5,
                                   "tokens_worse": 7.0, "tokens_better": None,
                                   "own_correlation": 0.25}) + "\n")

    monkeypatch.setattr(ablation, "train", fake)
    fake(str(tmp_path / "summed-0"), "")  # 0.1: finished before
    ablation.run("two", str(tmp_path))
    assert [path for path, _ in asked] == ["summed-0", "warmup-0", "default-0", "warmup-1",
                                           "default-1", "summed-1"]
    saved = json.loads((tmp_path / "two.json").read_text())
    first, second = saved["rows"]
    assert [r["heldout_final"] for r in second["runs"]] == pytest.approx([0.1, 0.6])
    # Differences -0.2 and +0.1: mean -0.05, standard error 0.15, Student's 12.71 for two.
    assert second["difference"] == pytest.approx([-0.05, -0.05 - 12.71 * 0.15,
                                                  -0.05 + 12.71 * 0.15], abs=1e-3)
    assert first["difference"][0] == 0 and second["runs"][0]["tokens_worse"] == [7.0]
    assert (tmp_path / "two.svg").read_text().count("<circle") == 4
    ablation.SETS["two"]["summed"] = "--children one"
    with pytest.raises(ValueError, match="summed-0 was run with children sum, not one"):
        ablation.run("two", str(tmp_path))


def test_the_tokenizer_of_a_tiny_model_fits_it(finished):
    tokenizer = Tokenizer.from_pretrained(finished / "init")
    assert tokenizer.vocab_size <= Qwen3.from_pretrained(str(finished / "init")).config.vocab_size


@pytest.mark.parametrize("args, says", [
    (["--model", "/nowhere"], "/nowhere"),
    (["--out", "/proc/nowhere"], "/proc/nowhere"),  # nobody can write there, not even root
    (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--credit", "both"], "inherit or root or children"),
    (["--credit", "root", "--children", "sum"], "have no effect"),
    (["--objective", "dpo", "--kl", "0.1"], "dpo takes neither kl"),
    (["--ablation", "core"], "sets all flags itself"),
    (["--plan", "--task", "niah"], "evidence or deep"),
    (["--group", "1"], "group is 1, the least is 2"),
    (["--lr", "nan"], "lr is nan"),
    (["--clip-high", "0.28"], "need updates"),
    (["--warmup", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--warmup-score", "0.5"], "of the trees of warmup"),
    (["--task", "deep", "--data", DATA], "not of data"),
    (["--sandbox", "maybe"], "require, auto or off"),
    (["--length", "none"], "sequence or constant or batch"),
    (["--task", "niah"], "evidence or deep"),
    (["--warmup-degenerate", "lazy"], "echo, flood"),
    (["--warmup-lr", "1e30", "--warmup-steps", "5"], "not finite"),
])
def test_bad_input_gives_one_line(args, says, tmp_path, monkeypatch):
    message = command(train, monkeypatch, *SHORT, "--out", tmp_path / "e", *args)
    assert isinstance(message, str) and says in message and "\n" not in message
    assert not (tmp_path / "e" / "result.json").exists()
    assert not (tmp_path / "e" / "final").exists()


def test_an_unknown_set_of_configurations_is_refused(tmp_path, monkeypatch):
    message = command(train, monkeypatch, "--ablation", "all", "--out", tmp_path / "e")
    assert "there are core" in message


def test_a_run_is_neither_overwritten_nor_changed_by_mistake(finished, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for flags, says in (
            ((), "holds another run"),
            (("--overwrite", "--model", out / "warmup"), "lies in --out"),
            (("--overwrite", "--warmup", "/nowhere.jsonl"), "/nowhere.jsonl"),
            (("--resume", "--seed", 7), "seed is 0; a resumed run cannot change it"),
            (("--resume", "--credit", "root"), "credit is 'inherit'")):
        message = command(train, monkeypatch, *SHORT, "--out", out, *flags)
        assert says in message
        after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert {p: b for p, b in after.items() if p.name != "lock"} == {
            p: b for p, b in before.items() if p.name != "lock"}


@pytest.mark.parametrize("args", [["--step", "3"], ["--steps", "many"]])
def test_an_unknown_flag_or_a_wrong_type_is_an_error(args, tmp_path, monkeypatch, capsys):
    assert command(train, monkeypatch, *args, "--out", tmp_path / "f") == 2
    assert args[0] in capsys.readouterr().err


def test_a_config_that_is_not_qwen3_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    message = command(train, monkeypatch, "--model", tmp_path / "llama", "--out", tmp_path / "g")
    assert "model_type is 'llama'" in message and not (tmp_path / "g").exists()


def test_a_run_that_cannot_fit_stops_before_loading(finished, tmp_path, monkeypatch, capsys):
    def never(*args, **more):
        raise AssertionError("weights were read")
    monkeypatch.setattr(Qwen3, "from_pretrained", never)
    monkeypatch.setattr(plan, "device_bytes", lambda device: 100 << 20)
    message = command(train, monkeypatch, "--model", finished / "final", "--out", tmp_path / "i")
    assert "needs" in message and "the device has 0.1" in message and "\n" not in message
    assert not (tmp_path / "i").exists()
    table = capsys.readouterr().out
    assert command(train, monkeypatch, "--model", finished / "final", "--plan") is None
    assert capsys.readouterr().out == table  # a run starts with what --plan prints


def test_a_broken_row_of_the_data_is_named(tmp_path, monkeypatch):
    lines = open(DATA, encoding="utf-8").read().splitlines()
    row = json.loads(lines[1])
    row["evidence"][0]["selections"][0]["text"] = "never written"
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]))
    message = command(train, monkeypatch, "--data", bad, "--out", tmp_path / "h")
    assert "line 2" in message and "does not occur" in message
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("args, says", [
    (["--n", "0"], "--n"),
    (["--data", DATA, "--n", "99"], "holds only"),
    (["--json", "/nowhere/rows.json"], "/nowhere/rows.json"),
])
def test_bad_input_to_eval_gives_one_line(args, says, finished, monkeypatch):
    message = command(evaluation, monkeypatch, "--model", finished / "final", *args)
    assert isinstance(message, str) and says in message and "\n" not in message


def test_the_bootstrap_interval_covers_the_mean():
    rng, hits = random.Random(0), 0
    for _ in range(200):  # 95 % nominal; a binomial mean of 60 draws, true mean 0.3
        low, high = evaluation.bootstrap([float(rng.random() < 0.3) for _ in range(60)], 500)
        hits += low <= 0.3 <= high
    assert 180 <= hits <= 200


def test_heldout_questions_share_no_term_with_training():
    held = {tasks.keyword(t) for t in evaluation.heldout_tasks(128)}
    seen = {tasks.keyword(tasks.make_task("evidence", random.Random(i))) for i in range(2000)}
    assert not held & seen


def test_half_of_the_warm_up_may_be_degenerate():
    questions = [tasks.make_task("evidence", random.Random(i)) for i in range(40)]
    trees = warmup.demonstrations(questions, None, warmup.TINY_RLM, 0, "echo")
    kinds = [tasks.degenerate(r.task, r.root) for r in trees]
    assert set(kinds[1::2]) == {"echo"} and kinds[::2].count("echo") < 5
    assert train.describe(trees)["degenerate"]["echo"] == kinds.count("echo") / 40


@pytest.mark.slow
def test_a_deep_run_trains_and_keeps_its_depth(tmp_path, monkeypatch):
    out = tmp_path / "deep"
    assert command(train, monkeypatch, *SHORT, "--task", "deep", "--out", out) is None
    assert json.loads((out / "result.json").read_text())["heldout_4x"] is None
    assert rlm.RLMConfig.load(str(out / "final" / "rlm.json")).max_depth == 2
    again = tmp_path / "one"
    assert command(train, monkeypatch, *SHORT, "--task", "deep", "--max-depth", 1, "--model",
                   out / "warmup", "--warmup-steps", 0, "--out", again) is None
    assert rlm.RLMConfig.load(str(again / "final" / "rlm.json")).max_depth == 1


@pytest.mark.slow
def test_the_default_run_learns_to_delegate(tmp_path, monkeypatch):
    """The claim, at the defaults: about ten minutes."""
    out = tmp_path / "tiny"
    assert command(train, monkeypatch, "--out", out) is None
    result = json.loads((out / "result.json").read_text())
    assert 0.10 <= result["heldout_warmup"] <= 0.45
    assert result["heldout_final"] >= 0.80  # one seed; the mean of three is above 0.85
    assert abs(result["heldout_4x"] - result["heldout_final"]) <= 0.10
    assert grpo.GRPOConfig().credit == "inherit"
