"""Short runs through the command line: what they leave behind, resuming, bad input."""
import copy
import inspect
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from conftest import PAPERS, ROOT, SHORT, SMALL_MODEL, command, data_of

import ask
import eval as evaluation
import grpo
import rlm
import tasks
import train
import training.run
from ask import RLM
from config import RLMConfig
from engine import packing
from engine.parallel import World
from grpo import Sequence
from model import Decoder, DecoderConfig
from sampler import Sampler
from tasks import Question
from training.scripts import saved_trees
from tokenizer import Tokenizer
from training import checkpoint, metrics, settings, setup
from training.run import Run, State, read_state, weights_of
from tree import Message, Sampling, Tree, read_trees, write_trees
from util import read_flags


def weights(path):
    return dict(Decoder.from_pretrained(str(path)).named_parameters())


def lines(out):
    text = Path(out, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Enough(Exception):
    """Ends a run where a test has what it wants."""


def stopped_at(name, monkeypatch, out, *flags):
    """The arguments of this function of train.py, with which a run with these flags would
    call it."""
    names, given = inspect.signature(getattr(train, name)).parameters, {}

    def take(*args):
        given.update(zip(names, args))
        raise Enough

    monkeypatch.setattr("sys.argv", ["train.py", "--out", str(out), *map(str, flags)])
    with monkeypatch.context() as patch, pytest.raises(Enough):
        patch.setattr(train, name, take)
        if name != "evaluate":
            patch.setattr(train, "evaluate", lambda *args: None)
        train.train(read_flags("", train.Config, train.GROUPS), World())
    return SimpleNamespace(**given)


@pytest.fixture
def loop_of(short_run, tmp_path, monkeypatch):
    """loop_of(flags): what grpo_loop gets after the short run's warm-up."""
    def make(*flags):
        return stopped_at("grpo_loop", monkeypatch, tmp_path / "t", "--model",
                          short_run / "warmup", "--warmup-steps", 0, "--heldout", 1,
                          "--steps", 1, *flags)

    return make


def reinforce(loop, trees):
    """Steps of GRPO on these trees, without a sampler; returns the metrics of the last."""
    def sample(setup, model, sampler, asked, key, *more):
        return trees[min(key[1], len(trees) - 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "sample_trees", sample)
        train.grpo_loop(**vars(loop))
    return lines(loop.run.out)[-1]


def copies(model):
    return {name: w.detach().clone() for name, w in model.named_parameters()}


def trees_of(out):
    """The kept trees of a run."""
    return sorted((out / "trees").iterdir())


def moved(before, model):
    return any(not torch.equal(before[n], w) for n, w in model.named_parameters())


# --- what a run leaves --------------------------------------------------------------------

def test_a_run_leaves_a_model_a_result_metrics_and_a_report(short_run):
    result = json.loads((short_run / "result.json").read_text())
    assert 0 <= result["heldout_warmup"] <= 1 and result["heldout_n"] == 3
    [gain] = result["differences"]
    assert gain["n"] == 3 and gain["difference"] == pytest.approx(
        result["heldout_final"] - result["heldout_warmup"])
    assert {"config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json", "rlm.json"} <= set(os.listdir(short_run / "final"))
    steps = [row for row in lines(short_run) if row["phase"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2]
    sizes = {row["name"]: row["length"] for row in lines(short_run) if "length" in row}
    assert 3.5 < sizes["heldout_4x"] / sizes["heldout_final"] < 4.5
    trees = data_of((short_run / "report.html").read_text())["trees"]
    assert [tree["name"] for tree in trees] == [f"#{i}" for i in range(4)]


def test_a_run_keeps_the_trees_of_its_last_steps(
        short_run, scripted_trees, tmp_path, monkeypatch):
    """Without contexts, but with all that --warmup and the report need."""
    assert [path.name for path in trees_of(short_run)] == ["000001.jsonl", "000002.jsonl"]
    monkeypatch.setattr(training.run, "KEPT_STEPS", 2)
    run = Run(Mock(config=train.Config(out=str(tmp_path)), world=World(), began=0.0,
                   tokenizer=Tokenizer.from_pretrained(short_run / "warmup")), State())
    for run.state.step in (8, 9, 10):
        run.keep_trees(scripted_trees, grpo.credit(scripted_trees, run.config))
    assert [path.stem for path in trees_of(tmp_path)] == ["000009", "000010"] == [
        f"{step:06}" for step in run.shown]

    path = tmp_path / "trees" / "000010.jsonl"
    for kept, tree in zip(read_trees(path, Question), scripted_trees, strict=True):
        assert kept.question == replace(tree.question, context=None)
        assert (kept.reward, kept.group) == (tree.reward, tree.group)
        for got, want in zip(kept.root.walk(), tree.root.walk(), strict=True):
            assert (got.path, got.answer) == (want.path, want.answer)
            assert ([message.text for message in got.messages]
                    == [message.text for message in want.messages])
            assert got.sampled == want.sampled
    assert 0 < len(saved_trees(path)) < len(scripted_trees)


# --- the update ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def scripted_trees(short_run):
    """Eight scripted trees for one question, with the ids of the short run's tokenizer."""
    tokenizer = Tokenizer.from_pretrained(short_run / "warmup")
    question = tasks.make(tasks.load("requests"), random.Random(0))
    config = setup.tiny_rlm(tasks.load("requests"))
    trees = train.scripted_trees([question] * 8, tokenizer, config, 0, World())
    assert len({tree.reward for tree in trees}) > 2
    assert any(tree.root.children for tree in trees)
    return [replace(tree, group="one") for tree in trees]


@pytest.mark.parametrize("flags", ["--kl 0.1 --updates 2", "--lora-rank 2 --objective own"])
def test_an_update_moves_the_weights_and_logs_what_to_watch(
        flags, loop_of, scripted_trees):
    loop = loop_of(*flags.split())
    before = copies(loop.model)
    other = [replace(tree, group="other") for tree in scripted_trees]
    row = reinforce(loop, [scripted_trees + other])
    assert moved(before, loop.model)
    assert all(math.isfinite(row[name]) for name in
               ("ratio", "kl", "reference_kl", "entropy", "gap", "loss", "grad_norm"))
    if "--updates" in flags:
        assert row["kl"] > 0
    else:
        assert row["ratio"] == pytest.approx(1)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_batch_without_signal_changes_no_weight_and_ten_in_a_row_end_a_run(
        kl, loop_of, scripted_trees, capsys):
    loop = loop_of("--steps", 30, "--kl", kl)
    flat = [Tree(tree.question, "g", tree.root, 0.5) for tree in scripted_trees]
    before = copies(loop.model)
    row = reinforce(loop, [flat] * 30)
    assert row["step"] == 10 and row["flat"] == 1 and ("entropy" in row) == (kl > 0)
    assert kl or not moved(before, loop.model)
    assert "stopped: in the last 10 steps" in capsys.readouterr().out
    loop.run.state.silent = 0
    assert reinforce(loop, [flat] * 14 + [scripted_trees] + [flat] * 30)["step"] == 25


def test_the_best_weights_are_those_of_the_best_validation(
        loop_of, scripted_trees, monkeypatch):
    loop, saved = loop_of("--steps", 3, "--eval-every", 1), []
    run, scores = loop.run, iter((0.5, 0.9, 0.6))
    monkeypatch.setattr(train, "evaluate", lambda *_: next(scores))
    monkeypatch.setattr(run, "save_model", lambda *_: saved.append(run.state.step))
    reinforce(loop, [scripted_trees])
    assert saved == [1, 2]


def test_the_rate_rises_over_five_steps_and_falls_to_a_tenth():
    config = train.Config(lr=2.0, steps=100)
    rates = [train.learning_rate(config, State(step=step)) for step in (0, 4, 50, 100)]
    assert rates == pytest.approx([0.4, 2 * 0.964, 1.1, 0.2])
    config = replace(config, tokens=8)  # they end a run, too
    assert train.progress(config, State(step=1, sampled=8)) == 1


def test_a_step_that_forgets_too_much_is_shortened(
        loop_of, scripted_trees, monkeypatch, tmp_path):
    """From the third step on: of the full step a power of a half is left, adapters too."""
    for flags in ((), ("--lora-rank", 2)):
        ends = {}
        for most in (1.0, 0.01):
            shutil.rmtree(tmp_path / "t", ignore_errors=True)
            loop = loop_of("--steps", 6, *flags)
            found, optimizer_step = [], train.optimizer_step

            def watch(model, optimizer, *more):
                found.append(copies(model))
                monkeypatch.setattr(metrics, "MOST", most if len(found) == 6 else 1.0)
                return optimizer_step(model, optimizer, *more)

            with monkeypatch.context() as patch:
                patch.setattr(train, "optimizer_step", watch)
                row = reinforce(loop, [scripted_trees])
            ends[most] = found[-1], copies(loop.model), row
        before, full, row = ends[1.0]
        again, shorter, short = ends[0.01]
        assert row["step_left"] == 1 > short["step_left"] and short["forgot"] <= most
        for name, start in before.items():
            assert torch.equal(start, again[name])
            want = start + short["step_left"] * (full[name] - start)
            torch.testing.assert_close(shorter[name], want, rtol=1e-5, atol=1e-7)
    assert metrics.shorten(loop.optimizer, iter([1.0] * 9).__next__) == (1.0, 0.5 ** 8)


def watch_of(model, rows, dtype):
    """It has seen the rows in other packs than those of its own."""
    plan, world = SimpleNamespace(dtype=dtype, pack_size=packing.PackSize(2000)), World()
    watch = metrics.Watch(model, rows, SimpleNamespace(plan=plan, world=world))
    for pack in packing.packs(rows, packing.PackSize(400), world, "cpu"):
        logprobs, _ = model.logprobs(pack)
        watch.note(pack, logprobs, logprobs.sum(), {"gap": logprobs.detach()})
    return watch


def test_what_a_step_forgot_is_what_good_nodes_lost(short_run, monkeypatch):
    """At the worst depth. Of the second depth every other node is watched."""
    monkeypatch.setattr(metrics, "WATCHED", 3)
    model = Decoder.from_pretrained(str(short_run / "warmup"))
    rng = random.Random(0)
    rows = [Sequence([rng.randrange(256) for _ in range(30 + n)], [0] * 30 + [1] * n,
                     [0.0] * n, [advantage] * n, 1.0, depth)
            for depth, n, advantage in ((0, 2, 1.0), (1, 9, 1.0), (1, 9, 0.5), (2, 4, 1.0),
                                        (0, 12, -1.0)) for _ in range(3)]

    def scores():
        with torch.no_grad():
            return [model(torch.tensor([row.ids]))[0, 29:-1].log_softmax(-1).gather(
                1, torch.tensor(row.ids[30:])[:, None]).sum().item() for row in rows]

    good = [rows[i] for i in (0, 1, 2, 3, 5, 7, 9, 10, 11)]
    assert metrics.good_sequences(rows) == good
    watch, before = watch_of(model, rows, torch.float32), scores()
    assert watch.forgot() == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape)
    lost = [max(0.0, 1 - math.exp(a - b)) for a, b in zip(scores(), before)]
    want = [sum(lost[at]) / 3 for at in (slice(3), slice(3, 9, 2), slice(9, 12))]
    assert max(want) > 1.2 * min(want)
    assert watch.forgot() == pytest.approx(max(want), abs=1e-4)


def test_what_bfloat16_rounds_otherwise_is_not_forgotten():
    """After a step of nearly nothing, by nodes of 300 tokens."""
    torch.manual_seed(0)
    master = Decoder(DecoderConfig(**SMALL_MODEL | {"hidden_size": 256}, vocab_size=999))
    model, rng = copy.deepcopy(master).bfloat16(), random.Random(0)
    rows = [Sequence([rng.randrange(999) for _ in range(320)], [0] * 20 + [1] * 300, [],
                     [1.0], 1.0) for _ in range(16)]
    forgot = []
    for dtype in (torch.float32, torch.bfloat16):  # what the plan says of the same model
        watch = watch_of(model, rows, dtype)
        with torch.no_grad():
            for weight, wide in zip(model.parameters(), master.parameters()):
                wide += 1e-6 * torch.randn_like(wide).sign()
                weight.copy_(wide)
        forgot.append(watch.forgot())
    assert forgot[0] > 0.03 and forgot[1] < 0.01
    drawn = -torch.expm1(0.7 * torch.randn(10 ** 6)).clamp(max=0)
    assert metrics.expected_loss(0.7) == pytest.approx(drawn.mean().item(), abs=1e-3)


def test_the_weights_of_the_warm_up_are_gone_before_grpo(short_run, tmp_path, monkeypatch):
    old = []

    def imitate(nodes, setup, model):
        old.extend(weakref.ref(weight) for weight in model.parameters())

        return 0.0

    monkeypatch.setattr(train, "imitate", imitate)
    monkeypatch.setattr(train, "optimizer_step", lambda *args: None)
    stopped_at("grpo_loop", monkeypatch, tmp_path / "w", "--model", short_run / "init",
               "--warmup-steps", 1, "--warmup", "scripts", "--heldout", 1)
    assert len(old) > 20 and not any(weight() is not None for weight in old)


def test_a_teachers_trees_take_the_place_of_scripts(
        short_run, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "trees.jsonl"
    assert command(evaluation, monkeypatch, "--policy", "oracle", "--split", "train",
                   "--n", 4, "--model", short_run / "init", "--save", saved) is None
    trees = read_trees(saved)
    trees[0].root.messages[-1] = Message("assistant", "too long " * 400, (), ())
    write_trees(saved, trees)
    given = stopped_at("imitate", monkeypatch, tmp_path / "run", *SHORT, "--warmup", saved,
                       "--model", short_run / "init")
    assert "4 of 4 trees are fit to learn from" in capsys.readouterr().out
    train.imitate(**vars(given))
    assert all(weight.grad is not None for weight in given.model.parameters())

    tokenizer = Tokenizer.from_pretrained(short_run / "init")
    for node in given.nodes:
        assert len(node.ids) <= given.setup.plan.window
        sampled = [t.ids for t in node.messages if t.is_sampled]
        texts = [t.text for t in node.messages if t.role == "assistant"]
        assert sampled == [tuple(tokenizer.message(text)) for text in texts]
    for tree in trees:
        [*tree.root.walk()][-1].errors.append(0)
    write_trees(tmp_path / "errors", trees)
    text = saved.read_text().replace('"end": "final"', '"end": "turns"')
    (tmp_path / "unfinished").write_text(text)
    saved.write_text(saved.read_text().replace('"reward": 1.0', '"reward": 0.0'))
    for path in (saved, tmp_path / "errors", tmp_path / "unfinished"):
        with pytest.raises(ValueError, match="none of its 4 trees"):
            saved_trees(str(path))


@pytest.mark.parametrize("flags", ["--data {}/rows.jsonl", "--lora-rank 2"])
def test_a_run_trains_on_what_its_flags_say(
        flags, objective, short_run, tmp_path, monkeypatch):
    """From nothing, interrupted in its second step, and with checkpoints of each."""
    def spied(owner, name, *effects):
        spy = Mock(wraps=getattr(owner, name), side_effect=effects or None)
        monkeypatch.setattr(owner, name, spy)
        return spy.call_args_list

    rows = [{"question": "Who?", "context": {"a": f"Ann {i} did."}, "answer": f"Ann {i}"}
            for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rlm.json").write_text('{"turn_tokens": 16}')
    for owner, name, value in (
            (setup, "TINY_MODEL", SMALL_MODEL), (setup, "TOKENIZER_TREES", 32),
            (settings, "SCRIPTED", 16), (training.run, "SAVE_SECONDS", -1.0)):
        monkeypatch.setattr(owner, name, value)
    imitated, played = spied(train, "imitate"), spied(train, "scripted_trees")
    sampled, packed = spied(train, "sample_trees"), spied(train.packing, "packs")
    clipped = spied(torch.nn.utils, "clip_grad_norm_")
    stepped = spied(train, "optimizer_step", DEFAULT, KeyboardInterrupt, *[DEFAULT] * 4)
    out = tmp_path / "a"
    message = command(train, monkeypatch, *SHORT, "--out", out, "--warmup-steps", 3,
                      "--heldout", 2, "--eval-every", 2, "--seed", 1, "--kl", 0.1, "--lr",
                      0.01, "--rlm", tmp_path / "rlm.json", "--objective", objective,
                      *flags.format(tmp_path).split())
    assert f"train.py --resume --out {out}" in message
    assert command(train, monkeypatch, "--resume", "--out", out) is None

    texts = {"trees": set(), "validation": set(), "heldout": set()}  # no two share one
    for label, questions in [*(("trees", call.args[0]) for call in played),
                             *((call.args[5], call.args[3]) for call in sampled)]:
        texts[label.split("_")[0]].update(
            text for question in questions for text in question.context.values())
    assert all(texts.values())
    assert sum(map(len, texts.values())) == len(set.union(*texts.values()))
    first, second = (call.args[3] for call in sampled if call.args[5] == "trees")
    assert not any(question in second for question in first)
    assert len(sampled[0].args[3]) == 2

    batches, given = ([[(node.ids, node.mask) for node in call.args[0]] for call in calls]
                      for calls in (imitated, packed[:4]))
    assert batches == given
    assert batches[0] != batches[1] == batches[2] != batches[3]
    rates = [call.args[2] for call in stepped]
    assert rates[0] > rates[1] == rates[2] > rates[3] and rates[4] < rates[5]
    assert [call.args[1] for call in clipped] == [settings.SCRATCH.max_norm] * 5
    assert not any(call.args[2].lora_rank for call in imitated)
    drawn, other = (run / "init" / "model.safetensors" for run in (out, short_run))
    assert drawn.read_bytes() != other.read_bytes()  # the other has another seed
    kl = [row["reference_kl"] for row in lines(out) if row["phase"] == "grpo"]
    assert abs(kl[0]) < 1e-6 < kl[1]
    final, *others = (
        RLM(path).sampler.model(torch.arange(40)[None]).detach() for path in
        (out / "final", out / "best", checkpoint.checkpoints(str(out))[-1]))
    for other in others:
        torch.testing.assert_close(other, final)


@pytest.mark.parametrize("program, flags", [
    (ask, f"--task evidence Why? {PAPERS} --temperature 0.5 --top-p 0.25"),
    (evaluation, "--tasks evidence --n 1 --temperature 0.5 --top-p 0.25"),
    (train, "--task evidence --heldout 1 --out {}")])
def test_flags_arrive_where_they_are_used(program, flags, short_run, tmp_path, monkeypatch):
    """At the sampler and at the REPL, of the first message."""
    (tmp_path / "rlm.json").write_text('{"turn_tokens": 5}')
    generate, repl = Mock(side_effect=Enough), Mock(wraps=rlm.REPL)
    monkeypatch.setattr(Sampler, "generate", generate)
    monkeypatch.setattr(rlm, "REPL", repl)
    for seed in (7, 8):
        with pytest.raises(Enough):
            command(program, monkeypatch, "--model", short_run / "final", "--seed", seed,
                    "--rlm", tmp_path / "rlm.json", "--sandbox", "off",
                    *flags.format(tmp_path / str(seed)).split())
        (_, most), given = generate.call_args
        assert (most, given["key"][0]) == (5, seed)
        drawn = () if program is train else (0.5, 0.25)
        assert given["sampling"] == Sampling(*drawn)
    (first, *_), (last, tools, limits, _) = (call.args for call in repl.call_args_list)
    assert "def search" in tools and limits.sandbox == "off"
    assert (first != last) == (program is evaluation)  # its questions are drawn by --seed


# --- where a run starts from --------------------------------------------------------------

@pytest.mark.parametrize("phase, parts, weights", [
    ("warmup", ["optimizer"], "last"), ("warmup", ["adapter", "optimizer"], "model"),
    ("grpo", ["optimizer"], "last"), ("grpo", ["adapter", "optimizer"], "warmup")])
def test_adapters_are_continued_on_the_weights_that_they_belong_to(
        phase, parts, weights, tmp_path):
    last = tmp_path / "checkpoints" / f"{phase}-000007"
    for part in ["../warmup-000001", *parts]:
        (last / part).mkdir(parents=True)
    state = {"phase": phase, "step": 7, "elapsed": 99.0}
    (last / "state.json").write_text(json.dumps(state))
    (tmp_path / "run.json").write_text("{}")
    config = train.Config(out=str(tmp_path), model="M", resume=True)
    state = read_state(config)
    want = {"last": str(last), "model": "M", "warmup": str(tmp_path / "warmup")}
    assert weights_of(config, state) == want[weights]
    assert (state.step, state.checkpoint) == (7, str(last))
    run = Run(Mock(config=config, world=World(), began=time.monotonic()), state)
    assert run.elapsed() >= 99


@pytest.mark.parametrize("flags, width, want", [
    ({"lora_rank": 1}, 0, (1000, 3e-3, 2.8e-3)),
    ({"lr": 0.5, "warmup_steps": 3}, 0, (3, 3e-3, 0.5)),
    ({"model": "M"}, 4096, (0, 1e-5, 1e-6)),
    ({"model": "M", "warmup": "F", "lora_rank": 16}, 2560, (120, 2e-4, 2e-5)),
    ({"model": "M", "lora_rank": 16}, 1280, (0, 4e-4, 8e-5)),
    ({"model": "M"}, 1280, (0, 1e-5, 2e-6)),
    ({"model": "M", "warmup_steps": 3}, 4096, (3, 1e-5, 1e-6)),
    ({"model": "M", "warmup": "scripts"}, 128, (1000, 3e-3, 1.4e-3))])
def test_defaults_suit_the_checkpoint(flags, width, want):
    """What was pretrained gets no scripts that it did not ask for, and small steps."""
    config = settings.filled_in(train.Config(**flags), width)
    assert (config.warmup_steps, config.warmup_lr, config.lr) == pytest.approx(want)
    assert bool(config.warmup) == bool(config.warmup_steps)  # what is imitated has a name


@pytest.mark.parametrize("warmup, trees", [
    ("scripts", "brief prompts; trees of at most 8 nodes, 2 turns each"),
    ("", "full prompts; trees of at most 32 nodes, 6 turns each")])
def test_scripts_spare_a_checkpoint_from_elsewhere_the_explanations(
        warmup, trees, short_run, tmp_path, monkeypatch, capsys):
    shutil.copytree(short_run / "final", tmp_path / "elsewhere")
    RLMConfig().save(tmp_path / "elsewhere" / "rlm.json")
    command(train, monkeypatch, "--model", tmp_path / "elsewhere", "--warmup", warmup,
            "--task", "requests", "--plan")
    assert trees in capsys.readouterr().out


def test_a_checkpoint_goes_on_with_its_task(short_run, tmp_path, monkeypatch, capsys):
    shutil.copytree(short_run / "final", tmp_path / "other")
    for task, says in (("oolong", "data points"), ("requests", "Sort"), ("", "Sort")):
        RLMConfig(style="brief", task=task).save(tmp_path / "other" / "rlm.json")
        command(train, monkeypatch, "--model", tmp_path / "other", "--plan")
        assert says in capsys.readouterr().out.partition("--- user")[2]
    RLMConfig(task=str(tmp_path / "mine.py")).save(tmp_path / "other" / "rlm.json")
    assert "name it" in command(train, monkeypatch, "--model", tmp_path / "other", "--plan")


# --- stopped, killed, resumed -------------------------------------------------------------

VICTIM = """
import os, signal, sys
sys.path.insert(0, ".")
import train, training.run
training.run.SAVE_EVERY = 2
collect = train.sample_trees
def killed(setup, model, sampler, asked, key, *args):
    if key[1] == 3:  # its fourth step
        os.kill(os.getpid(), signal.SIGKILL)
    return collect(setup, model, sampler, asked, key, *args)
train.sample_trees = killed
train.main()
"""


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_run_resumes_as_if_nothing_had_happened(
        rank, objective, short_run, tmp_path, monkeypatch):
    """Killed in its fourth step, it goes on from the checkpoint after the second."""
    victim = tmp_path / "victim.py"
    victim.write_text(VICTIM)
    flags = (*SHORT, "--steps", 4, "--heldout", 1, "--lr", 1e-2, "--lora-rank", rank,
             "--model", short_run / "warmup", "--warmup-steps", 0, "--objective", objective)
    straight, out = tmp_path / "straight", tmp_path / "killed"
    assert command(train, monkeypatch, *flags, "--out", straight) is None

    done = subprocess.run([sys.executable, victim, *map(str, flags), "--out", out],
                          cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in lines(out) if row["phase"] == "grpo"] == [1, 2, 3]
    half = out / "checkpoints" / "grpo-000004.tmp"
    half.mkdir()  # as if it had been killed while it wrote this one
    assert {path.stem for path in trees_of(out)} == {"000001", "000002", "000003"}
    (out / "trees" / "000009.jsonl").write_text("")  # of a step after the checkpoint
    assert command(train, monkeypatch, "--out", out, "--resume") is None

    assert len(lines(out)) == len(lines(straight)) and not half.exists()
    assert [path.name for path in trees_of(out)] == [
        f"{step:06}.jsonl" for step in range(1, 5)]
    for got, want in zip(trees_of(out), trees_of(straight)):
        kept = [[tree.root.ids for tree in read_trees(path)] for path in (got, want)]
        assert kept[0] == kept[1]
    for got, want in zip(lines(out), lines(straight)):
        for key in ("phase", "step", "reward", "score"):
            assert got.get(key) == want.get(key), key
        if want["phase"] == "grpo":
            assert want["grad_norm"] > 0
            for key in ("sequences", "tokens", "sequence_tokens"):
                assert got[key] == want[key], key
            for key in ("loss", "grad_norm", "entropy"):
                assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key
    gains = [json.loads((path / "result.json").read_text())["differences"]
             for path in (out, straight)]
    assert gains[0] == gains[1] != []
    resumed = weights(out / "final")
    for name, weight in weights(straight / "final").items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-4, atol=1e-5)


def test_a_run_is_neither_overwritten_nor_changed_by_mistake(short_run, monkeypatch):
    def files():
        return {path: path.read_bytes() for path in short_run.rglob("*") if path.is_file()}

    before = files()
    for flags, says in (
            ((), "holds a run: --resume continues it"),
            (("--resume", "--seed", 7), "seed is 0; a resumed run cannot change it"),
            (("--resume", "--trained", "roots"), "trained is 'all'")):
        assert says in command(train, monkeypatch, *SHORT, "--out", short_run, *flags)
        assert files() == before


def test_a_resumed_run_takes_no_other_rows(short_run, tmp_path, monkeypatch):
    data, out = tmp_path / "rows.jsonl", tmp_path / "a"
    rows = [{"question": f"q{i}", "context": f"a {i}", "answer": "a"} for i in range(6)]
    data.write_text("\n".join(map(json.dumps, rows)))
    flags = "--model", short_run / "final", "--data", data, "--steps", 0, "--heldout", 1
    assert command(train, monkeypatch, *flags, "--out", out) is None
    data.write_text("\n".join(map(json.dumps, rows[::-1])))
    message = command(train, monkeypatch, "--resume", "--out", out)
    assert "cannot change" in message and "\n" not in message


# --- bad input ----------------------------------------------------------------------------

@pytest.mark.parametrize("args, says", [
    (["--model", "/nowhere"], "/nowhere"),
    (["--resume"], "holds no run to resume"),
    (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--trained", "both"], "all or roots or children"),
    (["--objective", "nothing"], "nothing"),
    (["--group", "1"], "group is 1: it has to be at least 2"),
    (["--task", "/nowhere/task.py"], "/nowhere/task.py"),
    (["--task", str(ROOT / "sandbox/__init__.py")], "has no function score"),
    (["--model", "", "--task", "no_scripts.py"], "give --model"),
    (["--warmup-lr", "9e11", "--warmup-steps", "2"], "not finite")])
def test_bad_input_gives_one_line(args, says, short_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no_scripts.py").write_text("make = lambda rng, **more: ('q', 'c', 'c')\n"
                                     "score = lambda task, answer: 0.0\n")
    message = command(train, monkeypatch, *SHORT, "--model", short_run / "init", "--out",
                      tmp_path / "e", *args)
    assert isinstance(message, str) and says in message and "\n" not in message
    assert not (tmp_path / "e" / "final").exists()
    assert "9e11" in args or not (tmp_path / "e").exists()


@pytest.mark.parametrize("flag, function, says", [
    ("--objective", "loss(*given): return given[1].mean()", "gives torch.Size([]) in"),
    ("--objective", "loss(*given): return given[1][:, None]", ", 1]) in place of"),
    ("--objective", "credit(*given): pass", "gives None in place of {node: Credit}"),
    ("--objective", "credit(trees, config): return {trees[0].root: 1.0}", "1.0 in place"),
    ("--reward", "score(a, b): return 1.0", "called as score(question, answer, root)"),
    ("--reward", "score(*given): return '1.0'", "gives '1.0' in place of a finite number"),
    ("--task", "demonstrate(*given): pass", "gives None in place of the text"),
    ("--task", "TOOLS(): pass", "no tuple of functions")])
def test_what_is_wrong_with_a_users_function_is_said_in_one_line(
        flag, function, says, short_run, tmp_path, monkeypatch):
    (path := tmp_path / "theirs.py").write_text(
        "from grpo import credit\nfrom tasks.requests import demonstrate, make, score\n"
        f"def {function}")
    message = command(train, monkeypatch, *SHORT, "--model", short_run / "warmup",
                      "--warmup", "scripts", "--heldout", 1, "--kl", 0.1, "--out",
                      tmp_path / "e", flag, path)
    assert says in message and "\n" not in message
    assert str(path) in message and function.partition("(")[0] in message
    assert (tmp_path / "e").exists() != ("called as" in says or flag == "--task")


def test_a_run_that_cannot_fit_stops_before_loading(
        short_run, tmp_path, monkeypatch, capsys):
    def never(*args, **more):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Decoder, "from_pretrained", never)
    monkeypatch.setattr(setup, "free_memory", lambda world: 1 << 20)
    flags = "--model", short_run / "final", "--data", PAPERS, "--heldout", 1
    message = command(train, monkeypatch, *flags, "--out", tmp_path / "i")
    assert "does not fit into 1 MiB" in message and "\n" not in message
    assert not (tmp_path / "i").exists()
    for card, has in ((0, "1 MiB"), (80, "79 GiB")):
        assert command(train, monkeypatch, *flags, "--plan", "--card", card) is None
        out = capsys.readouterr().out
        assert f"the device has {has}\n" in out and "gold answers score 1.000" in out


# --- what takes minutes -------------------------------------------------------------------

@pytest.mark.slow
def test_the_default_run_learns_to_delegate(tmp_path, monkeypatch):
    """The claim, at the defaults: about ten minutes."""
    out = tmp_path / "tiny"
    assert command(train, monkeypatch, "--out", out) is None
    result = json.loads((out / "result.json").read_text())
    assert 0.10 <= result["heldout_warmup"] <= 0.45
    assert result["heldout_final"] >= 0.80  # of one seed
