"""Several ranks are one: two processes over gloo against one; checkpoints, faults, bad input."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from lab import kills
import pytest
import ranks
import torch
import torch.distributed as dist
from test_train import SHORT, command

from runtime import checkpoint
import grpo
import train
from runtime.parallel import Agreed, LeanAdamW, World

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def start(script, *args, size=2, each=lambda rank: ()):
    """As many processes as one run, in the environment that torchrun gives them."""
    # Held here, as by torchrun: no other process can take the port before rank 0 does.
    start.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [subprocess.Popen(
        [sys.executable, ROOT / script, *map(str, (*args, *each(rank)))], text=True, cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                          "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": str(start.store.port), "OMP_NUM_THREADS": "1",
                          "TORCHELASTIC_USE_AGENT_STORE": "True"})
        for rank in range(size)]


def end(processes, seconds=300):
    """(exit status, standard error) of each."""
    try:
        return [(p.returncode, errors) for p in processes
                for _, errors in [p.communicate(timeout=seconds)]]
    finally:
        for p in processes:
            p.kill()


def close(got, want):
    for name, tensor in want.items():
        worst = (got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
        assert worst <= 1e-5, (name, worst)


def test_two_ranks_are_one_and_a_run_moves_from_two_to_one_and_back(tmp_path):
    """Step 0 on two ranks with 3 rows and 7, step 1 on one, step 2 on two; full and LoRA."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        ranks.make_model(path / "model")
    processes = start("tests/ranks.py", two)
    try:
        for number in range(3):
            if number != 1:
                for p in processes:
                    p.stdin.write(f"{number}\n")
                    p.stdin.flush()
            for kind in ranks.KINDS:
                want = ranks.step(one / kind, kind, number, World())
                if number == 1:
                    got = ranks.step(two / kind, kind, number, World())
                else:
                    file = two / f"{kind}-{number}.pt"
                    while not file.exists():
                        assert all(p.poll() is None for p in processes), end(processes)
                        time.sleep(0.05)
                    got = torch.load(file)
                assert want["rows"] == 10
                assert got["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"], rel=1e-5)
                close(got["gradients"], want["gradients"])
                close(got["weights"], want["weights"])
                for name, value in want["metrics"].items():
                    if isinstance(value, float):
                        assert got["metrics"][name] == pytest.approx(value, rel=1e-4), name
    finally:
        done = end(processes)
    assert [status for status, _ in done] == [0, 0], done


# --- failures --------------------------------------------------------------------------------


class Pair(World):
    """Rank 0 of two; the other one says what it is told to."""

    def __init__(self, other, rank=0):
        super().__init__()
        self.size, self.rank, self.other = 2, rank, other

    def gather(self, value):
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_a_failure_on_one_rank_is_raised_on_all_and_told_by_the_first():
    world = Pair("it broke")
    with pytest.raises(Agreed, match="rank 1: it broke") as caught, world.together():
        pass
    assert world.message(caught.value) == "train.py: rank 1: it broke"
    with pytest.raises(Agreed) as caught, Pair(None, rank=1).together():
        raise OSError("no space")
    assert Pair(None, rank=1).message(caught.value) == 1  # rank 0 tells
    assert "rank 1: gone" in Pair(None, rank=1).message(RuntimeError("gone"))
    with Pair(None).together():
        pass


def test_ranks_that_differ_are_told_apart():
    Pair({"code": "a", "flags": "x"}).agree({"code": "a", "flags": "x"})
    with pytest.raises(Agreed, match="differ in flags: rank 0 has x, rank 1 y"):
        Pair({"code": "a", "flags": "y"}).agree({"code": "a", "flags": "x"})
    assert set(train.facts({})) == {"flags", "code", "torch", "device"}


def test_more_ranks_than_questions_are_refused(tmp_path):
    world = Pair(None)
    world.agree = lambda facts: None
    with pytest.raises(Agreed, match="2 ranks, but only 1 questions"):
        train.Trainer(train.RunConfig(out=str(tmp_path / "a")), train.WarmupConfig(),
                      train.UpdateConfig(questions=1), grpo.GRPOConfig(), world)
    assert not (tmp_path / "a").exists()


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_gone(tmp_path):
    code = ("import sys, time; from parallel import World; w = World(); "
            "w.take(sys.argv[1]); print('taken', flush=True); time.sleep(600)")
    first = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE)
    world = World()
    try:
        assert first.stdout.readline() == "taken\n"
        with pytest.raises(OSError, match="another run is writing"):
            world.take(str(tmp_path))
    finally:
        first.kill()
        first.wait()
    world.take(str(tmp_path))
    world.release()


@pytest.fixture
def saved(tmp_path):
    """A run of two steps with the checkpoints of both."""
    ranks.make_model(tmp_path / "model")
    out = tmp_path / "run"
    for number in range(2):
        ranks.step(out, "full", number, World())
    return out


def names(out):
    return [os.path.basename(path) for path in checkpoint.checkpoints(out)]


def test_the_last_whole_checkpoint_is_taken(saved, capsys):
    assert names(saved) == ["grpo-000001", "grpo-000002"]
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    (saved / "checkpoints" / "grpo-000003.tmp").mkdir()  # killed while it was written
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    weights = saved / "checkpoints" / "grpo-000002" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000001")
    assert "grpo-000002: damaged (model.safetensors)" in capsys.readouterr().err
    (saved / "checkpoints" / "grpo-000001" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        checkpoint.last_checkpoint(saved)
    weights.write_bytes(whole)
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    assert checkpoint.last_checkpoint(saved.parent) is None


def test_a_damaged_checkpoint_is_written_anew_when_the_run_gets_there_again(saved):
    weights = saved / "checkpoints" / "grpo-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ranks.step(saved, "full", 1, World())  # resumes from the first, takes the second step again
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")


def test_a_disk_without_room_leaves_the_checkpoints_that_there_are(saved, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", full)
        with pytest.raises(ValueError, match="No space left"):
            ranks.step(saved, "full", 2, World())
    assert names(saved) == ["grpo-000001", "grpo-000002"]
    assert ranks.step(saved, "full", 2, World())["rows"] == 10
    assert names(saved) == ["grpo-000002", "grpo-000003"]
    assert len(os.listdir(saved / "checkpoints")) == 2  # the last two; what was left aside is gone
    assert checkpoint.no_room(str(saved / "not" / "there"), 3, 1) is None
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="0.0 GB are free, 3 checkpoints need"):
        ranks.step(saved.parent / "other", "full", 0, World())
    assert not (saved.parent / "other").exists()


def test_a_resumed_run_refuses_another_model_and_forgets_later_metrics(saved, monkeypatch):
    trainer = train.Trainer(
        train.RunConfig(out=str(saved), model=str(saved.parent / "model"), resume=True, heldout=1),
        train.WarmupConfig(warmup_steps=0), train.UpdateConfig(), grpo.GRPOConfig())
    trainer.log({"step": 3})
    trainer.save_checkpoint()  # the same step: not written again
    trainer.trim(checkpoint.last_checkpoint(saved))
    assert (saved / "metrics.jsonl").read_text() == ""
    trainer.world.release()
    ranks.make_model(saved.parent / "other")
    message = command(train, monkeypatch, "--out", saved, "--resume", "--model",
                      saved.parent / "other", "--heldout", 1)
    assert "model is" in message and "cannot change it" in message


def test_lean_states_stay_close_to_full_ones():
    torch.manual_seed(0)
    start, moved = torch.randn(64, 8), []
    for kind in (torch.optim.AdamW, LeanAdamW):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        rng = torch.Generator().manual_seed(1)
        for _ in range(30):
            weight.grad = weight.detach() + 0.3 * torch.randn(64, 8, generator=rng)
            optimizer.step()
        moved.append(weight.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.01 * moved[0].norm()
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


# --- whole runs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_layers_compute_the_same():
    torch.manual_seed(0)
    model = ranks.Qwen3(ranks.Qwen3Config(64, 32, 48, 2, 4, 2, 8, 384))
    packs = [[10, 20], [33, 7, 15], [50]]
    rows = [torch.randint(64, (1, sum(lengths))) for lengths in packs]

    def run():
        model.zero_grad()
        for ids, lengths in zip(rows, packs):
            mask = (torch.arange(ids.shape[1]) % lengths[0] > 0).long()[None]
            mask[0, [sum(lengths[:i]) for i in range(len(lengths))]] = 0
            model.logprobs(ids, mask, lengths)[0].mean().backward()
        return {name: w.grad.clone() for name, w in model.named_parameters()}

    want = run()
    model.compile_layers()
    close(run(), want)


@pytest.mark.slow
def test_overlap_samples_with_the_weights_before_the_last_update(tmp_path, monkeypatch):
    """And with a learning rate of nothing it is the same run."""
    lines, done = [], []
    for method in ("refresh", "update"):
        old = getattr(train.Trainer, method)
        monkeypatch.setattr(train.Trainer, method, lambda self, *args, old=old, method=method: (
            done.append(method), old(self, *args))[1])
    for name, flags in (("a", ()), ("b", ("--overlap",))):
        out = tmp_path / name
        done.clear()
        assert command(train, monkeypatch, *SHORT, "--steps", 3, "--lr", "1e-30", "--out", out,
                       *flags) is None
        r, u = "refresh", "update"
        assert done == ([r, r, u, r, u, u] if flags else [r, u] * 3)
        lines.append([json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()])
    for one, other in zip(*lines, strict=True):
        for name in {"reward", "nodes", "tokens", "loss", "score"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sampling", "updating", "saving"])
def test_a_killed_rank_ends_all_and_the_run_resumes(moment, tmp_path, monkeypatch):
    """Each in the second step of torchrun's two ranks; then one process continues."""
    assert command(train, monkeypatch, *SHORT, "--out", tmp_path / "warm") is None
    out, flags = tmp_path / "run", (*SHORT, "--warmup-steps", 0, "--steps", 3, "--save-every", 1,
                                    "--model", tmp_path / "warm" / "warmup")
    code = ("import os, signal, sys, time; sys.path.insert(0, '.'); import train\n"
            "def die(self, *a, **m):\n"
            "    if self.world.rank == 1 and self.state['step'] == 1:\n"
            f"        open({str(tmp_path / 'victim.died')!r}, 'w').write(repr(time.time()))\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            f"name = {dict(sampling='grow', updating='packs', saving='save_adapter')[moment]!r}\n"
            "old = getattr(train.Trainer, name)\n"
            "setattr(train.Trainer, name, lambda self, *a: (die(self), old(self, *a))[1])\n"
            "train.main()\n")
    script = tmp_path / "victim.py"
    script.write_text(code)
    done = subprocess.run([*TORCHRUN, "--master-port", str(random.randrange(20000, 60000)), script,
                           *map(str, flags), "--out", out], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert time.time() - float(script.with_suffix(".died").read_text()) < 60  # the limit
    assert done.returncode and ("SIGKILL" in done.stderr or "Signal 9" in done.stderr)
    assert "train.py: " in done.stderr, done.stderr  # the other rank says something, too
    assert command(train, monkeypatch, *flags, "--out", out, "--resume") is None
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["phase"] == "grpo"] == [1, 2, 3]


@pytest.mark.slow
def test_an_infinite_loss_on_one_rank_ends_all_with_one_line(tmp_path, monkeypatch):
    assert command(train, monkeypatch, *SHORT, "--out", tmp_path / "warm") is None
    out = tmp_path / "run"
    script = tmp_path / "victim.py"
    script.write_text(
        "import sys; sys.path.insert(0, '.'); import train\n"
        "old = train.Trainer.backward\n"
        "def backward(self, t):\n"
        "    loss, *rest = old(self, t)\n"
        "    return loss if self.world.rank == 0 else float('inf'), *rest\n"
        "real = train.Trainer.update\n"
        "def update(self, rollouts, step):\n"
        "    for i, r in enumerate(rollouts):\n"
        "        object.__setattr__(r, 'reward', float(i % 2))\n"
        "    return real(self, rollouts, step)\n"
        "train.Trainer.backward, train.Trainer.update = backward, update\n"
        "train.main()\n")
    done = subprocess.run([*TORCHRUN, "--master-port", str(random.randrange(20000, 60000)), script,
                           *SHORT, "--warmup-steps", "0", "--model", tmp_path / "warm" / "warmup",
                           "--out", out], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode
    assert done.stderr.count("train.py: the loss is inf") == 1  # rank 0 tells it for all
    whole = checkpoint.last_checkpoint(str(out))  # the weights from before
    for (_, got), (_, want) in zip(weights(whole), weights(tmp_path / "warm" / "warmup")):
        assert torch.equal(got, want)


def weights(path):
    return ranks.Qwen3.from_pretrained(str(path)).named_parameters()


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_the_run_resumes(tmp_path, monkeypatch):
    out = tmp_path / "run"
    run = subprocess.Popen([*TORCHRUN, "--master-port", str(random.randrange(20000, 60000)),
                            "train.py", *SHORT, "--steps", "500", "--save-every", "1", "--out",
                            str(out)], cwd=ROOT, stdout=subprocess.DEVNULL, text=True,
                           stderr=subprocess.PIPE, start_new_session=True)
    while not (out / "checkpoints" / "grpo-000002").exists():
        assert run.poll() is None
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)  # what a terminal does
    _, errors = run.communicate(timeout=60)
    assert run.returncode and "--resume" in errors
    done = len(list((out / "checkpoints").iterdir()))
    assert done
    assert command(train, monkeypatch, "--out", out, "--resume", "--steps", 3) is None
    assert json.loads((out / "result.json").read_text())["heldout_final"] is not None


@pytest.mark.slow
def test_workers_end_with_torchrun(tmp_path):
    run = subprocess.Popen([*TORCHRUN, "train.py", *SHORT, "--steps", "500", "--out",
                            str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while not (tmp_path / "run" / "init" / "rlm.json").exists():
        assert run.poll() is None
        time.sleep(0.2)
    workers = [int(pid) for pid in children.read_text().split()]
    assert len(workers) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while kills.alive(workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
