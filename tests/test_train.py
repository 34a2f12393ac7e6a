"""Short runs through the command line: what they leave behind, resuming, bad input."""
import asyncio
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FLAT, SHORT, command, data_of

import eval as evaluation
import rlm
import tasks
import train
from grpo import WATCHED
from model import Qwen3, Qwen3Config
from runtime import checkpoint, plan
from runtime.flags import parse
from runtime.parallel import World
from runtime.run import BUILT_IN, Start, starting_point
from runtime.stop import Stopped
from tokenizer import Tokenizer
from tree import Rollout

ROOT = Path(__file__).resolve().parent.parent
DATA = os.path.join(os.path.dirname(__file__), "data", "papers.jsonl")
QWEN = ROOT.parent / "shared" / "qwen3-4b-base"


def weights(path):
    return dict(Qwen3.from_pretrained(str(path)).named_parameters())


def lines(out):
    text = Path(out, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def make_trainer(monkeypatch, out, *flags):
    """A trainer that has loaded its model, as main() makes it."""
    monkeypatch.setattr("sys.argv", ["train.py", "--out", str(out), *map(str, flags)])
    return train.Trainer(parse("", train.Config, train.GROUPS), World())


def one_step(trainer, trees):
    """One step of GRPO on these trees, without a sampler; returns its metrics."""
    trainer.sampler = SimpleNamespace(load=lambda model: None, stats={"seconds": 0.0},
                                      model=trainer.model.merged_copy())
    trainer.reference = None
    if trainer.config.kl and not trainer.model.rank:
        trainer.reference = trainer.model.merged_copy()
    trainer.collect = lambda step: trees
    trainer.reinforce()
    return lines(trainer.config.out)[-1]


# --- what a run leaves --------------------------------------------------------------------

def test_a_run_leaves_a_model_a_result_metrics_and_a_report(short_run):
    result = json.loads((short_run / "result.json").read_text())
    for key in ("seed credit heldout_warmup heldout_final heldout_4x heldout_16x heldout_n "
                "window_tokens context_tokens sampled_tokens seconds flags").split():
        assert key in result
    assert result["context_tokens"] > result["window_tokens"]
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt",
            "tokenizer_config.json", "rlm.json"} <= set(os.listdir(short_run / "final"))
    steps = [row for row in lines(short_run) if row["phase"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2]
    # In float32 sampler and trainer agree.
    assert all(row["largest_gap"] < 1e-4 for row in steps)
    trees = data_of((short_run / "report.html").read_text())["trees"]
    assert [tree["name"] for tree in trees] == [f"step 2 #{i}" for i in range(4)] + [
        f"held out, step 2 #{i}" for i in range(3)]


def test_the_tokenizer_of_a_tiny_model_fits_it(short_run):
    tokenizer = Tokenizer.from_pretrained(short_run / "init")
    model = Qwen3.from_pretrained(str(short_run / "init"))
    assert tokenizer.vocab_size <= model.config.vocab_size


def test_real_text_trains_two_steps_and_is_evaluated(tmp_path, monkeypatch):
    out = tmp_path / "c"
    assert FLAT in command(train, monkeypatch, *SHORT, "--data", DATA, "--out", out)
    assert json.loads((out / "result.json").read_text())["heldout_n"] == 1
    report = tmp_path / "rows.json"
    assert command(evaluation, monkeypatch, "--model", out / "final", "--data", DATA,
                   "--split", "all", "--n", 3, "--json", report) is None
    (row,) = json.loads(report.read_text())["rows"]
    assert row["task"] == "evidence" and row["method"] == "rlm1" and row["n"] == 3
    assert 0 <= row["low"] <= row["score"] <= row["high"] <= 1 and row["length"] > 100


def test_the_trained_model_answers_over_real_files(short_run, monkeypatch, capsys):
    status = command(rlm, monkeypatch, "--model", short_run / "final", "--trace",
                     "What is a rollout?", "README.md", "tree.py")
    assert status is None or "no answer" in status  # three supervised steps teach little
    assert "root" in capsys.readouterr().out


def test_tokens_end_a_run_and_the_best_weights_stay(short_run, tmp_path, monkeypatch):
    out = tmp_path / "h"
    assert FLAT in command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
                   "--warmup-steps", 0, "--heldout", 1, "--out", out,
                   *"--tokens 1 --eval-every 1".split())
    # One step is more than one token.
    (step,) = [row for row in lines(out) if row["phase"] == "grpo"]
    assert step["flat"] == 1 and step["skipped"] == 1
    state = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())
    assert state["best"] == {"step": 1, "score": 0.0} and weights(out / "best")
    assert json.loads((out / "result.json").read_text())["sampled_tokens"] == (
        step["tokens"] * 4)


# --- the update ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def scripted_trees(short_run):
    """Eight scripted trees for one question, with the ids of the short run's tokenizer."""
    tokenizer = Tokenizer.from_pretrained(short_run / "warmup")
    task = tasks.make("notes", random.Random(0))
    config = train.tiny_rlm(train.Config())
    trees = train.demonstrations([task] * 8, tokenizer, config, 0)
    assert len({tree.reward for tree in trees}) > 2
    assert any(tree.root.children for tree in trees)
    return trees


def test_a_batch_without_signal_changes_no_weight(short_run, tmp_path, scripted_trees,
                                                  monkeypatch):
    trainer = make_trainer(monkeypatch, tmp_path / "d", "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--steps", 1)
    trainer.end_warm_up()
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    flat = [Rollout(tree.task, "g", tree.root, 0.5) for tree in scripted_trees]
    row = one_step(trainer, flat)
    assert row["rows"] == row["grad_norm"] == 0
    assert row["skipped"] == 1 and row["entropy"] is None
    assert all(torch.equal(before[n], w) for n, w in trainer.model.named_parameters())
    trainer.world.release()


def test_in_float16_the_loss_is_scaled_and_a_step_that_overflows_is_left_out(
        short_run, tmp_path, scripted_trees, monkeypatch):
    """Too large a scale is halved until the gradient is finite; then the step is the one
    that float32 takes, up to the rounding of float16."""
    moved = {}
    trees = [pick(scripted_trees, key=lambda tree: tree.reward) for pick in (min, max)]
    for dtype in ("float32", "float16"):
        trainer = make_trainer(
            monkeypatch, tmp_path / dtype, "--model", short_run / "warmup", "--heldout", 1,
            "--warmup-steps", 0, "--steps", 1, "--lora-rank", 2, "--dtype", dtype)
        trainer.end_warm_up()
        assert trainer.model.lm_head.weight.dtype == getattr(torch, dtype)
        state = trainer.run.state
        assert state["scale"] == (train.FIRST_SCALE if dtype == "float16" else 1.0)
        state["scale"] *= 2.0 ** 24 if dtype == "float16" else 1.0
        weights = trainer.model.adapters()
        start = {name: weight.detach().clone() for name, weight in weights.items()}
        left_out = 0
        while all(torch.equal(start[name], weights[name]) for name in start):
            before, state["step"] = state["scale"], 0
            row = one_step(trainer, trees)
            left_out += state["scale"] == before / 2
        assert math.isfinite(row["grad_norm"]) and (left_out > 10) == (dtype == "float16")
        moved[dtype] = torch.cat([(weights[name] - start[name]).flatten()
                                  for name in start]), row["grad_norm"]
        trainer.world.release()
    (exact, norm), (half, half_norm) = moved.values()
    assert half_norm == pytest.approx(norm, rel=0.05)
    assert torch.cosine_similarity(exact, half, 0) > 0.9


@pytest.mark.slow
def test_the_weights_of_the_warm_up_are_gone_before_grpo(short_run, tmp_path, monkeypatch):
    trainer = make_trainer(monkeypatch, tmp_path / "w", "--model", short_run / "init",
                           "--warmup-steps", 1, "--heldout", 1)
    old = [weakref.ref(weight) for weight in trainer.model.parameters()]
    trainer.warm_up()
    trainer.end_warm_up()
    assert len(old) > 40 and not any(weight() is not None for weight in old)
    trainer.world.release()


def test_a_run_ends_when_ten_steps_in_a_row_taught_nothing(
        short_run, tmp_path, scripted_trees, monkeypatch, capsys):
    trainer = make_trainer(monkeypatch, tmp_path / "q", "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--steps", 30)
    trainer.end_warm_up()
    flat = [Rollout(tree.task, "g", tree.root, 0.5) for tree in scripted_trees]
    trees = [flat] * 4 + [scripted_trees] + [flat] * 30
    trainer.sampler = SimpleNamespace(load=lambda model: None, stats={"seconds": 0.0})
    trainer.reference, trainer.collect = None, lambda step: trees[step]
    trainer.reinforce()
    assert lines(tmp_path / "q")[-1]["step"] == 15
    assert "stopped after step 15: in the last 10 steps" in capsys.readouterr().out
    trainer.world.release()


def test_a_run_without_any_gradient_ends_with_status_1_and_says_what_to_change(
        short_run, tmp_path, monkeypatch, capsys):
    """Also one that is resumed; one that has learnt something ends with 0."""
    out = tmp_path / "run"
    shutil.copytree(short_run, out)
    message = command(train, monkeypatch, "--out", out, "--resume", "--steps", 3)
    assert message.startswith("train.py: no step had a gradient: all trees of a question")
    assert "\n" not in message
    for advice in ("easier ones", "--warmup", "harder ones", "--group"):
        assert advice in message
    assert "done in" in capsys.readouterr().out and (out / "result.json").exists()
    path = out / "checkpoints" / "grpo-000003" / "state.json"
    state = json.loads(path.read_text())
    assert state["skipped"] == state["step"] == 3
    path.write_text(json.dumps(state | {"skipped": 2}))
    assert command(train, monkeypatch, "--out", out, "--resume") is None


def test_lengths_that_a_kind_cannot_have_are_left_out():
    def longer(task):
        config = train.Config(task=task, heldout=9, warmup="trees.jsonl")
        return list(train.read_questions(config)[2])

    assert longer("notes") == ["heldout_4x", "heldout_16x"]
    assert longer("pairs") == ["heldout_4x"] and longer("deep") == []


def test_without_children_scripts_call_nobody_and_the_checkpoint_says_so(
        short_run, tmp_path, monkeypatch):
    out = tmp_path / "alone"
    assert FLAT in command(train, monkeypatch, *SHORT, "--method", "rlm0", "--out", out,
                           "--model", short_run / "init")
    saved = rlm.RLMConfig.load(str(out / "final" / "rlm.json"))
    assert saved.max_depth == 0 and saved.max_nodes == 1
    questions = [tasks.make("notes", random.Random(i)) for i in range(40)]
    trees = train.demonstrations(questions, None, saved, 0)
    written = [turn.text for tree in trees for turn in tree.root.turns
               if turn.role == "assistant"]
    assert not any(tree.root.children for tree in trees)
    assert not any("_query" in text for text in written)
    # Among them are some that search and read themselves.
    assert 0.05 < sum(tree.reward for tree in trees) / 40 < 0.6
    with pytest.raises(ValueError, match="niah has no script that calls nobody"):
        train.demonstrations([tasks.make("niah", random.Random(0))], None, saved, 0)


def test_the_report_can_be_read_while_a_run_goes_on(short_run, tmp_path, monkeypatch):
    seen = []

    def look(trainer, step):
        seen.append((tmp_path / "r" / "report.html").read_text())
        return collect(trainer, step)

    collect = train.Trainer.collect
    monkeypatch.setattr(train.Trainer, "collect", look)
    assert FLAT in command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
                   "--warmup-steps", 0, "--heldout", 1, "--eval-every", 1,
                   "--out", tmp_path / "r")
    first, second = ([tree["name"] for tree in data_of(page)["trees"]] for page in seen)
    assert first == ["held out, step 0 #0"]
    assert second[0] == "step 1 #0" and second[-1] == "held out, step 1 #0"


def test_the_report_is_written_between_evaluations_too(short_run, tmp_path, monkeypatch):
    seen = []

    def look(trainer, step):
        seen.append(data_of((tmp_path / "r" / "report.html").read_text())["trees"])
        return collect(trainer, step)

    collect = train.Trainer.collect
    monkeypatch.setattr(train, "REPORT_SECONDS", -1.0)
    monkeypatch.setattr(train.Trainer, "collect", look)
    assert FLAT in command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--out", tmp_path / "r")
    assert [trees[0]["name"] for trees in seen] == ["held out, step 0 #0", "step 1 #0"]
    # Each node has the advantage that it was trained with.
    advantages = [node["adv"] for tree in seen[1][:4] for node in tree["nodes"]
                  if node["n"]]
    assert advantages and None not in advantages
    assert seen[1][-1]["nodes"][0]["adv"] is None  # held out


def test_lines_of_a_run_appear_at_once_in_a_file(tmp_path):
    """A reader sees the first lines while the run goes on."""
    code = ("import sys, train; train.Trainer = lambda *_: print('first') or sys.exit("
            "open(sys.argv[-1]).read()); train.main()")
    log = tmp_path / "log"
    with open(log, "w") as file:
        run = subprocess.run([sys.executable, "-c", code, "--out", str(tmp_path / "o"),
                              "--data", str(log)], cwd=ROOT, stdout=file,
                             stderr=subprocess.PIPE, text=True)
    assert run.stderr.strip() == "first"


@pytest.mark.parametrize("flags", [
    "", "--kl 0.1 --updates 2", "--lora-rank 2 --kl 0.1",
    "--lora-rank 2 --objective dpo", "--objective own --bf16-states",
    "--objective filter", "--objective rao --cost 0.5",
    "--objective node_mean --length sequence"])
def test_every_objective_moves_the_weights_and_logs_what_to_watch(
        flags, short_run, tmp_path, scripted_trees, monkeypatch):
    trainer = make_trainer(monkeypatch, tmp_path / "g", "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--steps", 1,
                           *flags.split())
    trainer.end_warm_up()
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    row = one_step(trainer, scripted_trees)
    assert any(not torch.equal(before[n], w) for n, w in trainer.model.named_parameters())
    assert all(math.isfinite(row[name]) for name in (*WATCHED[1:], "loss", "grad_norm"))
    assert sum(depth["share"] for depth in row["by_depth"]) == pytest.approx(1)
    if "--updates" in flags:
        assert row["kl"] > 0
    else:
        assert row["ratio"] == pytest.approx(1)
    assert -1 <= row["own_correlation"] <= 1
    trainer.world.release()


def test_a_teachers_trees_take_the_place_of_scripts(
        short_run, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "trees.jsonl"
    assert command(evaluation, monkeypatch, "--policy", "oracle", "--split", "train",
                   "--n", 4, "--model", short_run / "init", "--save", saved) is None
    out = tmp_path / "run"
    assert command(train, monkeypatch, *SHORT, "--warmup", saved, "--model",
                   short_run / "init", "--steps", 0, "--out", out) is None
    assert "4 of 4 trees are fit to learn from" in capsys.readouterr().out
    tokenizer = Tokenizer.from_pretrained(short_run / "init")
    tree = train.teacher_trees(str(saved), tokenizer)[0]
    for node in tree.root.walk():
        sampled = [t.ids for t in node.turns if t.logprobs is not None]
        texts = [t.text for t in node.turns if t.role == "assistant"]
        assert sampled == [(*tokenizer.encode(t), tokenizer.end_of_turn) for t in texts]
        # What is not sampled is what a rollout would have shown.
        opening = tokenizer.open(node.turns[0].text, node.turns[1].text)
        assert node.ids[:len(opening)] == opening
    saved.write_text(saved.read_text().replace('"reward": 1.0', '"reward": 0.0'))
    with pytest.raises(ValueError, match="none of its 4 trees"):
        train.teacher_trees(str(saved), tokenizer)


# --- where a run starts from --------------------------------------------------------------

@pytest.mark.parametrize("last, phase, step, rank, weights, adapter, optimizer", [
    (None, "warmup", 0, 0, "M", "", ""),
    ("C", "warmup", 0, 0, "C", "", ""),
    ("C", "warmup", 7, 16, "M", "C/adapter", "C/optimizer"),
    ("C", "grpo", 0, 0, "C", "", ""),
    ("C", "grpo", 7, 0, "C", "", "C/optimizer"),
    ("C", "grpo", 0, 16, "O/warmup", "C/adapter", ""),
    ("C", "grpo", 7, 16, "O/warmup", "C/adapter", "C/optimizer")])
def test_where_a_run_starts_from(last, phase, step, rank, weights, adapter, optimizer):
    config = train.Config(out="O", model="M", lora_rank=rank)
    state = {"phase": phase, "step": step}
    assert starting_point(config, last, state) == Start(
        weights, adapter, optimizer, last or "", state)


def test_a_warm_up_from_nothing_trains_and_keeps_all_weights():
    config, state = train.Config(out="O", lora_rank=16), {"phase": "warmup", "step": 7}
    assert starting_point(config, "C", state).weights == "C"


@pytest.mark.parametrize("flags, scratch, want", [
    ({}, True, (450, 3e-3, 50, 7e-4)),
    ({"lora_rank": 1}, True, (450, 3e-3, 50, 2.8e-3)),
    ({"lr": 0.5, "warmup_steps": 3, "steps": 0}, True, (3, 3e-3, 0, 0.5)),
    ({"model": "M"}, False, (0, 1e-5, 100, 1e-6)),
    ({"model": "M", "warmup": "scripts"}, False, (60, 1e-5, 100, 1e-6)),
    ({"model": "M", "warmup": "F", "lora_rank": 16}, False, (60, 2e-4, 100, 2e-5)),
    ({"model": "M"}, True, (0, 3e-3, 50, 7e-4)),
    ({"model": "M", "warmup": "scripts"}, True, (450, 3e-3, 50, 7e-4))])
def test_defaults_suit_the_checkpoint(flags, scratch, want, monkeypatch):
    """What was pretrained gets no scripts that it did not ask for, and small steps."""
    limits = replace(rlm.RLMConfig(), scratch=scratch)
    monkeypatch.setattr(rlm, "load_config", lambda path: limits)
    monkeypatch.setattr(train, "compute_dtype", lambda path: torch.float32)
    config = train.settle(train.Config(**flags))
    assert config.dtype == "float32"
    got = config.warmup_steps, config.warmup_lr, config.steps, config.lr
    assert got == pytest.approx(want)
    assert train.settle(config) == config
    with pytest.raises(ValueError, match="lr is -0.5; it is -1, or not below 0"):
        train.settle(train.Config(lr=-0.5))


@pytest.mark.parametrize("number, status", [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_weights(
        number, status, short_run, tmp_path, monkeypatch, capsys):
    """Stopped while it samples the second step, then --resume: as if it had never been."""
    collect, calls = rlm.collect, []

    async def interrupted(questions, *args, **more):
        calls.append(len(questions))
        if calls.count(4) == 2:  # 2 questions x 2 trees: the second step
            os.kill(os.getpid(), number)
            await asyncio.sleep(600)
        return await collect(questions, *args, **more)

    out = tmp_path / "b"
    before = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlm, "collect", interrupted)
        assert command(train, patch, *SHORT, "--out", out, "--model",
                       short_run / "init") == status
    assert capsys.readouterr().err == (
        f"train.py: interrupted; continue with: python train.py --resume --out {out}\n")
    assert "Step 1 of 2 of GRPO, written on" in (out / "report.html").read_text()
    assert signal.getsignal(number) is before and not (out / "result.json").exists()
    state = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())
    assert (state["phase"], state["step"]) == ("grpo", 1)
    # The flags come from run.json.
    assert FLAT in command(train, monkeypatch, "--out", out, "--resume")
    straight, resumed = weights(short_run / "final"), weights(out / "final")
    for name, weight in straight.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-4, atol=1e-5)


def test_in_the_warm_up_a_stopped_run_leaves_a_page_and_runs_no_script_again(
        short_run, tmp_path, monkeypatch, capsys):
    out, step = tmp_path / "w", train.Trainer.optimizer_step

    def stopped(trainer, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "optimizer_step", stopped)
        assert command(train, patch, *SHORT, "--out", out, "--model",
                       short_run / "init") == 130
    assert "Step 1 of 3 of the warm-up" in (out / "report.html").read_text()
    monkeypatch.setattr(train, "demonstrations", None)
    monkeypatch.setattr(train, "LINE_SECONDS", 0.0)  # every step is a slow one
    assert FLAT in command(train, monkeypatch, "--out", out, "--resume")
    assert "warm-up    2/3 | loss" in capsys.readouterr().out
    for name, weight in weights(short_run / "warmup").items():
        torch.testing.assert_close(weights(out / "warmup")[name], weight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_optimizers_step_saves_the_step_that_was_taken(
        number, short_run, tmp_path, scripted_trees, monkeypatch):
    """Weights, counter and metrics agree, whichever thread receives the signal."""
    trainer = make_trainer(monkeypatch, tmp_path / "i", "--model", short_run / "warmup",
                           "--warmup-steps", 0, "--heldout", 1, "--steps", 2)
    trainer.end_warm_up()
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    step = trainer.optimizer.step

    def interrupted():
        step()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(trainer.optimizer, "step", interrupted)
    with pytest.raises(Stopped) as stopped, trainer.run.stop:
        one_step(trainer, scripted_trees)
    assert stopped.value.number == number
    assert trainer.run.state["step"] == 1 and lines(tmp_path / "i")[-1]["step"] == 1
    assert any(not torch.equal(before[n], w) for n, w in trainer.model.named_parameters())
    trainer.world.release()


def test_a_second_ctrl_c_ends_a_run_at_once():
    code = ("import time; from runtime.stop import Stop\n"
            "with Stop(loud=True):\n    print('ready', flush=True)\n"
            "    while True:\n        time.sleep(0.01)")
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert "at once" in run.stdout.readline() and run.poll() is None
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 130 and errors == "train.py: ended at once\n"


def test_a_run_saves_when_ten_minutes_have_passed(short_run, tmp_path, monkeypatch):
    flags = (*SHORT, "--model", short_run / "warmup", "--warmup-steps", 0, "--heldout", 1)
    for seconds, saved in ((600, ["grpo-000000", "grpo-000002"]),
                           (0, ["grpo-000001", "grpo-000002"])):
        monkeypatch.setattr("runtime.run.SAVE_SECONDS", seconds)
        out = tmp_path / str(seconds)
        assert FLAT in command(train, monkeypatch, *flags, "--out", out)
        assert sorted(os.listdir(out / "checkpoints")) == saved


@pytest.mark.parametrize("error, is_shown", [
    (RuntimeError("[pair.cc:534] gloo: Connection closed by peer [127.0.0.1]:99"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
    (torch.OutOfMemoryError("CUDA out of memory"), True)])
def test_of_several_ranks_only_the_death_of_another_is_one_line(
        error, is_shown, tmp_path, monkeypatch):
    """A bug keeps its traceback."""
    def fails(config, world):
        world.size = 2
        raise error

    monkeypatch.setattr(train, "Trainer", fails)
    if is_shown:
        with pytest.raises(RuntimeError, match=str(error)):
            command(train, monkeypatch, "--out", tmp_path / "a")
    else:
        message = command(train, monkeypatch, "--out", tmp_path / "a")
        assert message == f"train.py: {error}"


def test_a_run_of_an_earlier_version_resumes_if_its_flags_are_built_in_now(
        short_run, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(short_run, out)
    flags = json.loads((out / "run.json").read_text()) | BUILT_IN | {
        "compile": False, "keep_last": 2, "sample_threads": 1, "show_every": 25}
    (out / "run.json").write_text(json.dumps(flags | {"lora_alpha": 16.0}))
    message = command(train, monkeypatch, "--out", out, "--resume")
    assert "lora_alpha is 16.0; a resumed run cannot change it to 32.0" in message
    (out / "run.json").write_text(json.dumps(flags))
    assert FLAT in command(train, monkeypatch, "--out", out, "--resume")


def test_a_run_is_neither_overwritten_nor_changed_by_mistake(
        short_run, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(short_run, out)

    def files():
        return {path: path.read_bytes() for path in out.rglob("*")
                if path.is_file() and path.name != "lock"}

    before = files()
    for flags, says in (
            ((), "holds another run"),
            (("--overwrite", "--model", out / "warmup"), "lies in --out"),
            (("--overwrite", "--warmup", "/nowhere.jsonl"), "/nowhere.jsonl"),
            (("--resume", "--seed", 7), "seed is 0; a resumed run cannot change it"),
            (("--resume", "--credit", "root"), "credit is 'inherit'")):
        assert says in command(train, monkeypatch, *SHORT, "--out", out, *flags)
        assert files() == before


# --- bad input ----------------------------------------------------------------------------

@pytest.mark.parametrize("args, says", [
    (["--model", "/nowhere"], "/nowhere"),
    (["--resume"], "holds no run to resume"),
    (["--out", "/proc/nowhere"], "/proc"),  # nobody can write there, not even root
    (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--credit", "both"], "inherit or root or children"),
    (["--credit", "root", "--children", "sum"], "no effect"),
    (["--objective", "nothing"], "nothing"),
    (["--group", "1"], "group is 1, the least is 2"),
    (["--lr", "nan"], "lr is nan"),
    (["--warmup", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--warmup", "x.jsonl", "--warmup-steps", "0"], "warmup has no effect"),
    (["--sandbox", "maybe"], "require or auto or off"),
    (["--length", "none"], "constant or sequence or batch"),
    (["--task", "nothing"], "evidence, deep"),
    (["--task", "/nowhere/task.py"], "/nowhere/task.py"),
    (["--reward", "/nowhere/reward.py"], "/nowhere/reward.py"),
    (["--warmup-lr", "1e30", "--warmup-steps", "5"], "not finite")])
def test_bad_input_gives_one_line(args, says, short_run, tmp_path, monkeypatch):
    message = command(train, monkeypatch, *SHORT, "--model", short_run / "init", "--out",
                      tmp_path / "e", *args)
    assert isinstance(message, str) and says in message and "\n" not in message
    assert not (tmp_path / "e" / "result.json").exists()
    assert not (tmp_path / "e" / "final").exists()
    assert "--resume" not in args or not (tmp_path / "e").exists()


@pytest.mark.parametrize("args", [["--step", "3"], ["--steps", "many"]])
def test_an_unknown_flag_or_a_wrong_type_is_an_error(args, tmp_path, monkeypatch, capsys):
    assert command(train, monkeypatch, *args, "--out", tmp_path / "f") == 2
    assert args[0] in capsys.readouterr().err


def test_the_help_shows_at_most_36_flags_in_groups(monkeypatch, capsys):
    assert command(train, monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    flags = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags)) <= 36
    places = [said.index(f"\n{title}:") for title in (
        "common flags", *train.GROUPS)]
    assert places == sorted(places)


def test_a_model_of_another_family_is_refused_before_anything_is_written(
        tmp_path, monkeypatch):
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    message = command(train, monkeypatch, "--model", tmp_path / "mamba", "--out",
                      tmp_path / "g")
    assert "model_type is 'mamba'" in message and not (tmp_path / "g").exists()


def test_a_run_that_cannot_fit_stops_before_loading(
        short_run, tmp_path, monkeypatch, capsys):
    def never(*args, **more):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Qwen3, "from_pretrained", never)
    monkeypatch.setattr(plan, "device_bytes", lambda device: 10 << 20)
    message = command(train, monkeypatch, "--model", short_run / "final", "--out",
                      tmp_path / "i")
    assert "needs" in message and "the device has 10 MiB" in message and "\n" not in message
    assert not (tmp_path / "i").exists()
    table = capsys.readouterr().out
    assert table.count("\n") == 16 and "a model made from nothing" in table
    assert command(train, monkeypatch, "--model", short_run / "final", "--plan") is None
    planned = capsys.readouterr().out  # a run starts with what --plan prints
    assert planned.splitlines()[:12] == table.splitlines()[:12]
    assert "the largest window that fits" in planned


def test_a_run_says_what_comes_and_shows_its_plan_only_if_memory_is_tight(
        short_run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "o"
    make_trainer(monkeypatch, out, "--model", short_run / "warmup", "--warmup-steps", 7,
                 "--warmup", "scripts", "--heldout", 5).world.release()
    said = capsys.readouterr().out
    assert "first a warm-up of 7 steps" in said and "then GRPO, 50 steps" in said
    assert f"{out} gets report.html" in said and f"--resume --out {out}\n" in said
    assert "activations" not in said


def test_the_plan_of_a_tiny_model_counts_the_tokens_that_it_gets(
        short_run, monkeypatch, capsys):
    assert command(train, monkeypatch, "--plan") is None
    size = sum(weight.numel() for weight in weights(short_run / "init").values())
    assert f"{size:,} parameters" in capsys.readouterr().out


def test_the_directory_of_a_run_leads_to_its_model(short_run, monkeypatch):
    for program in (evaluation, rlm, train):
        more = ["question", "README.md"] if program is rlm else []
        message = command(program, monkeypatch, "--model", short_run, *more)
        assert f"the directory of a run; its model is {short_run / 'final'}" in message


def test_a_broken_row_of_the_data_is_named(tmp_path, monkeypatch, capsys):
    rows = Path(DATA).read_text(encoding="utf-8").splitlines()
    row = json.loads(rows[1])
    row["evidence"][0]["selections"][0]["text"] = "never written"
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([rows[0], json.dumps(row), *rows[2:]]))
    message = command(
        train, monkeypatch, "--data", bad, "--strict", "--out", tmp_path / "h")
    assert "line 2" in message and "does not occur" in message
    assert not (tmp_path / "h").exists()
    config = train.Config(data=str(bad), warmup_steps=0)
    asked, heldout, _ = train.read_questions(config)
    assert len(asked) + len(heldout) == len(rows) - 1
    said = capsys.readouterr().out
    assert "1 of 6 rows left out" in said and "line 2: evidence[0]: field 'text'" in said


# --- what takes minutes -------------------------------------------------------------------

@pytest.mark.slow
def test_a_deep_run_trains_and_keeps_its_depth(tmp_path, monkeypatch):
    out = tmp_path / "deep"
    assert FLAT in command(train, monkeypatch, *SHORT, "--task", "deep", "--out", out)
    assert json.loads((out / "result.json").read_text())["heldout_4x"] is None
    assert rlm.RLMConfig.load(str(out / "final" / "rlm.json")).max_depth == 2
    again = tmp_path / "one"
    assert FLAT in command(train, monkeypatch, *SHORT, "--task", "deep", "--method", "rlm1",
                   "--model", out / "warmup", "--warmup-steps", 0, "--out", again)
    assert rlm.RLMConfig.load(str(again / "final" / "rlm.json")).max_depth == 1


@pytest.mark.slow
@pytest.mark.skipif(not QWEN.exists(), reason="needs the vocabulary of Qwen3")
@pytest.mark.parametrize("flags", [(), ("--lora-rank", 16)], ids=["full", "lora"])
def test_a_pretrained_miniature_with_full_prompts_at_4096_tokens(
        tmp_path, monkeypatch, capsys, flags):
    """Qwen3's own vocabulary and a context of 4,096 tokens, which random weights fill."""
    shape = Qwen3Config(151_936, 64, 128, 2, 4, 2, 16, max_position_embeddings=4096)
    Qwen3(shape).save_pretrained(str(tmp_path / "mini"))
    Tokenizer.from_pretrained(str(QWEN)).save(str(tmp_path / "mini"))
    (tmp_path / "odd.py").write_text(
        "import itertools\nvalues = itertools.cycle([0.0, 1.0])\n\n"
        "def score(task, answer):\n    return next(values)\n")
    assert command(
        train, monkeypatch, "--model", tmp_path / "mini", "--data", DATA, "--out",
        tmp_path / "run", "--reward", tmp_path / "odd.py", "--steps", 2, "--questions", 2,
        "--group", 2, *flags) is None
    assert "full prompts, a window of 4,096 tokens" in capsys.readouterr().out
    steps = [row for row in lines(tmp_path / "run") if row["phase"] == "grpo"]
    assert len(steps) == 2 and all(row["grad_norm"] > 0 for row in steps)
    assert all(row["tokens"] > 2000 and row["largest_gap"] < 1e-2 for row in steps)


@pytest.mark.slow
def test_the_default_run_learns_to_delegate(tmp_path, monkeypatch):
    """The claim, at the defaults: about ten minutes."""
    out = tmp_path / "tiny"
    assert command(train, monkeypatch, "--out", out) is None
    result = json.loads((out / "result.json").read_text())
    assert 0.10 <= result["heldout_warmup"] <= 0.45
    assert result["heldout_final"] >= 0.80  # of one seed


def test_a_run_that_learnt_nothing_leaves_nothing_in_the_way(
        short_run, monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def make(rng, tokens=None, heldout=False):\n    return 'q', 'c', 'a'\n"
        "def oracle(task, node):\n    return '```repl\\nFINAL(1)\\n```'\n"
        "def score(task, answer):\n    return 1 / 0\n")
    flags = *SHORT, "--model", short_run / "init", "--out", tmp_path / "run"
    assert "wrong.py" in command(train, monkeypatch, *flags, "--task", wrong)
    assert FLAT in command(train, monkeypatch, *flags)
