"""Several ranks are one: two processes over gloo against one; checkpoints, faults, bad
input."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import FLAT, SHORT, command
from torch.distributed.tensor import DTensor

import grpo
import train
from lab import kills
from model import Qwen3, Qwen3Config
from runtime import checkpoint
from runtime.parallel import Agreed, LeanAdamW, World, full_tensor
from runtime.run import facts
from tokenizer import Tokenizer
from tree import Node, Rollout, Turn

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
KINDS = {"full": {"lr": 1e-3}, "lora": {"lora_rank": 2, "lr": 1e-2}}


# --- one step on hand-made trees, by one rank or by two -----------------------------------

def make_model(path):
    tokenizer = Tokenizer.train(["abc abd aef"] * 9, 300)
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(tokenizer.vocab_size, 32, 48, 2, 4, 2, 8, 384))
    model.save_pretrained(path)
    tokenizer.save(path)
    train.TINY_RLM.save(f"{path}/rlm.json")


def trees(step):
    """Two groups; ten nodes with an advantage, of 20 to 300 tokens."""
    rng = random.Random(step)

    def node(path, *children):
        made = Node(path, children=list(children))
        for _ in range(2):
            prompt, answer = (tuple(rng.randrange(256) for _ in range(rng.randint(10, 150)))
                              for _ in range(2))
            made.add(Turn("user", "", prompt))
            made.add(Turn("assistant", "", answer, (-5.5,) * len(answer)))
        return made

    return [Rollout(None, group, node((), *(node((i,)) for i in range(n))), reward)
            for group, reward, n in (
                ("a", 1.0, 3), ("a", 0.0, 1), ("b", 0.2, 0), ("b", 0.7, 2))]


def make_trainer(out, world, number=0, **flags):
    flags = {"model": str(out.parent / "model"), "heldout": 1, "warmup_steps": 0,
             "save_every": 1} | flags
    trainer = train.Trainer(
        train.Config(out=str(out), resume=number > 0, steps=number + 1, **flags), world)
    trainer.plan = replace(trainer.plan, row=512)  # several micro-batches
    return trainer


def step(out, kind, number, world, split=None):
    """Resume, take one step, save. `split` of the rows go to rank 0, the others to rank
    1."""
    try:
        trainer = make_trainer(out, world, number, **KINDS[kind])
        if number == 0:
            trainer.end_warm_up()
        return watched_step(trainer, number, split if world.size == 2 else None)
    finally:
        world.release()


def watched_step(trainer, number, split):
    """Loss, gradients, weights and metrics of one step of the loop, without a sampler."""
    found, optimizer_step = {}, trainer.optimizer_step
    model, world, dealt = trainer.model, trainer.world, grpo.micro_batches

    def watch(lr, loss):
        found["gradients"] = {name: full_tensor(weight.grad).clone()
                              for name, weight in model.named_parameters()
                              if weight.requires_grad}
        return optimizer_step(lr, loss)

    def unequal(rows, *_):
        return [rows[:split], rows[split:]][world.rank:world.rank + 1]

    trainer.optimizer_step = watch
    trainer.sampler = SimpleNamespace(load=lambda model: None, stats={"seconds": 0.0},
                                      model=model.merged_copy())
    trainer.collect = lambda step: trees(number)
    trainer.show = lambda rollouts, metrics: found.update(metrics=metrics)
    trainer.reference = None
    # A forward pass without a backward pass must leave no weight gathered.
    with torch.no_grad():
        model.logprobs(torch.arange(9)[None], torch.ones(1, 9))
    assert (world.size == 2) == all(isinstance(w, DTensor) for w in model.parameters())
    if split:
        grpo.micro_batches = unequal
    try:
        trainer.reinforce()
    finally:
        grpo.micro_batches = dealt
    found["weights"] = dict(model.merged())
    return found


def serve(folder):
    """One of two ranks: takes the steps whose numbers come on its standard input."""
    world, folder = World(), Path(folder)
    for line in sys.stdin:
        for kind in KINDS:
            found = step(folder / kind, kind, int(line), world, split=3)
            if world.rank == 0:
                torch.save(found, folder / f"{kind}.tmp")
                os.rename(folder / f"{kind}.tmp", folder / f"{kind}-{int(line)}.pt")
    world.close()


def start_ranks(folder):
    """Two processes in the environment that torchrun gives them."""
    # The port is held here, as by torchrun: nobody can take it before rank 0 does.
    start_ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True,
                                      wait_for_workers=False)
    code = f"from test_parallel import serve; serve({str(folder)!r})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(start_ranks.store.port), "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": path}
    return [subprocess.Popen([sys.executable, "-c", code], text=True, cwd=ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE,
                             env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)]


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
    """Step 0 on two ranks with 3 rows and 7, step 1 on one, step 2 on two; full and
    LoRA."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        make_model(path / "model")
    processes = start_ranks(two)
    try:
        for number in range(3):
            if number != 1:
                for p in processes:
                    p.stdin.write(f"{number}\n")
                    p.stdin.flush()
            for kind in KINDS:
                want = step(one / kind, kind, number, World())
                if number == 1:
                    got = step(two / kind, kind, number, World())
                else:
                    file = two / f"{kind}-{number}.pt"
                    while not file.exists():
                        assert all(p.poll() is None for p in processes), end(processes)
                        time.sleep(0.05)
                    got = torch.load(file)
                assert want["metrics"]["rows"] == got["metrics"]["rows"] == 10
                assert got["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"],
                                                               rel=1e-5)
                close(got["gradients"], want["gradients"])
                close(got["weights"], want["weights"])
                for name, value in want["metrics"].items():
                    if isinstance(value, float) and not name.endswith(("_s", "_gb")):
                        assert got["metrics"][name] == pytest.approx(value, rel=1e-4), name
    finally:
        done = end(processes)
    assert [status for status, _ in done] == [0, 0], done


# --- failures -----------------------------------------------------------------------------

class Pair(World):
    """Rank 0 of two. The other one always gathers the same value."""

    def __init__(self, other, rank=0):
        super().__init__()
        self.size, self.rank, self.other = 2, rank, other

    def gather(self, value):
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_a_failure_on_one_rank_is_raised_on_all_and_printed_by_the_first():
    world = Pair("it broke")
    with pytest.raises(Agreed, match="rank 1: it broke") as caught, world.together():
        pass
    assert world.message(caught.value) == "train.py: rank 1: it broke"
    with pytest.raises(Agreed) as caught, Pair(None, rank=1).together():
        raise OSError("no space")
    assert Pair(None, rank=1).message(caught.value) == 1  # rank 0 prints it
    assert "rank 1: gone" in Pair(None, rank=1).message(RuntimeError("gone"))
    with Pair(None).together():
        pass


def test_ranks_that_differ_are_named():
    Pair({"code": "a", "flags": "x"}).agree({"code": "a", "flags": "x"})
    with pytest.raises(Agreed, match="differ in flags: rank 0 has x, rank 1 y"):
        Pair({"code": "a", "flags": "y"}).agree({"code": "a", "flags": "x"})
    assert set(facts(train.Config())) == {"flags", "code", "torch", "device"}


def test_more_ranks_than_questions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train.plan, "memory", lambda world: 1 << 34)
    world = Pair(None)
    world.agree = lambda facts: None
    with pytest.raises(Agreed, match="2 ranks, but only 1 questions"):
        train.Trainer(train.Config(out=str(tmp_path / "a"), questions=1), world)
    assert not (tmp_path / "a").exists()


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_gone(tmp_path):
    code = ("import sys, time; from runtime.parallel import World; w = World(); "
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
    make_model(tmp_path / "model")
    out = tmp_path / "run"
    for number in range(2):
        step(out, "full", number, World())
    return out


def names(out):
    return [os.path.basename(path) for path in checkpoint.checkpoints(out)]


def test_the_last_undamaged_checkpoint_is_taken(saved, capsys):
    assert names(saved) == ["grpo-000001", "grpo-000002"]
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    (saved / "checkpoints" / "grpo-000003.tmp").mkdir()  # killed while it was written
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    file = saved / "checkpoints" / "grpo-000002" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000001")
    assert "grpo-000002: damaged (model.safetensors)" in capsys.readouterr().err
    (saved / "checkpoints" / "grpo-000001" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        checkpoint.last_checkpoint(saved)
    file.write_bytes(content)
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")
    assert checkpoint.last_checkpoint(saved.parent) is None


def test_a_damaged_checkpoint_is_written_anew_when_the_run_gets_there_again(saved):
    file = saved / "checkpoints" / "grpo-000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    step(saved, "full", 1, World())  # resumes from the first, takes the second step again
    assert checkpoint.last_checkpoint(saved).endswith("grpo-000002")


def test_a_disk_without_room_leaves_the_checkpoints_that_there_are(saved, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", full)
        with pytest.raises(ValueError, match="No space left"):
            step(saved, "full", 2, World())
    assert names(saved) == ["grpo-000001", "grpo-000002"]
    assert step(saved, "full", 2, World())["metrics"]["rows"] == 10
    # The last two stay, and what was left aside is gone.
    assert sorted(os.listdir(saved / "checkpoints")) == ["grpo-000002", "grpo-000003"]
    assert checkpoint.no_room(str(saved / "not" / "there"), 1) is None
    # What the run itself holds makes room for what it writes.
    room = checkpoint.shutil.disk_usage(saved).free
    assert checkpoint.no_room(str(saved), room + 1000) is None
    assert checkpoint.no_room(str(saved), 2 * room) is not None
    monkeypatch.setattr(checkpoint.shutil, "disk_usage",
                        lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="1000 bytes are free, checkpoints .* need .*iB"):
        step(saved.parent / "other", "full", 0, World())
    assert not (saved.parent / "other").exists()


@pytest.mark.slow
def test_torch_is_not_heard_when_one_process_saves_and_resumes(tmp_path):
    """Each in a process of its own, as torch warns once per process."""
    code = ("import sys, torch\nfrom runtime import checkpoint\n"
            "model = torch.nn.Linear(2, 2)\n"
            "optimizer = torch.optim.AdamW(model.parameters())\n"
            "model(torch.ones(2)).sum().backward()\noptimizer.step()\n"
            "getattr(checkpoint, sys.argv[1])(model, optimizer, sys.argv[2])")
    for name in ("save_optimizer", "load_optimizer"):
        done = subprocess.run([sys.executable, "-c", code, name, tmp_path / "o"], cwd=ROOT,
                              text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_resumed_run_refuses_another_model_and_forgets_later_metrics(saved, monkeypatch):
    before = (saved / "metrics.jsonl").read_text()
    with open(saved / "metrics.jsonl", "a") as file:
        file.write('{"step": 3}\n')
    trainer = make_trainer(saved, World(), number=2)
    trainer.run.save_checkpoint()  # the same step: it is not written again
    assert (saved / "metrics.jsonl").read_text() == before
    trainer.world.release()
    make_model(saved.parent / "other")
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


# --- whole runs ---------------------------------------------------------------------------

def torchrun(script, *flags):
    """A run of two ranks that ends by itself."""
    port = str(random.randrange(20000, 60000))
    return subprocess.run([*TORCHRUN, "--master-port", port, str(script), *map(str, flags)],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("moment, method", [
    ("sampling", "train.Trainer.collect"), ("updating", "train.Trainer.packs"),
    ("saving", "runtime.run.Run._adapter")])
def test_a_killed_rank_ends_all_and_the_run_resumes(moment, method, tmp_path, monkeypatch):
    """Each in the second step of torchrun's two ranks; then one process continues."""
    assert FLAT in command(train, monkeypatch, *SHORT, "--out", tmp_path / "warm")
    out = tmp_path / "run"
    flags = (*SHORT, "--warmup-steps", 0, "--steps", 3, "--save-every", 1, "--model",
             tmp_path / "warm" / "warmup")
    owner, _, name = method.rpartition(".")
    died = tmp_path / "died"
    script = tmp_path / "victim.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "sys.path.insert(0, '.')\n"
        "import runtime.run, train\n"
        f"old = {method}\n"
        "def die(self, *args):\n"
        "    run = getattr(self, 'run', self)\n"
        "    if self.world.rank == 1 and run.state['step'] == "
        f"{2 if moment == 'saving' else 1}:\n"
        f"        open({str(died)!r}, 'w').write(repr(time.time()))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return old(self, *args)\n"
        f"{owner}.{name} = die\n"
        "train.main()\n")
    done = torchrun(script, *flags, "--out", out)
    assert time.time() - float(died.read_text()) < 60  # the limit
    assert done.returncode and ("SIGKILL" in done.stderr or "Signal 9" in done.stderr)
    assert "train.py: " in done.stderr, done.stderr  # the other rank says something, too
    assert FLAT in command(train, monkeypatch, *flags, "--out", out, "--resume")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["phase"] == "grpo"] == [1, 2, 3]


@pytest.mark.slow
def test_an_infinite_loss_on_one_rank_ends_all_with_one_line(tmp_path, monkeypatch):
    assert FLAT in command(train, monkeypatch, *SHORT, "--out", tmp_path / "warm")
    out = tmp_path / "run"
    script = tmp_path / "victim.py"
    script.write_text(
        "import sys\n"
        "sys.path.insert(0, '.')\n"
        "import train\n"
        "from train import Trainer\n"
        "old, loss = Trainer.collect, train.policy_loss\n"
        "def collect(self, step):\n"
        "    train.rank, trees = self.world.rank, old(self, step)\n"
        "    for i, tree in enumerate(trees):\n"
        "        object.__setattr__(tree, 'reward', float(i % 2))\n"
        "    return trees\n"
        "def policy_loss(*args):\n"
        "    value, stats = loss(*args)\n"
        "    return value * (1 if train.rank == 0 else float('inf')), stats\n"
        "Trainer.collect, train.policy_loss = collect, policy_loss\n"
        "train.main()\n")
    done = torchrun(script, *SHORT, "--warmup-steps", 0, "--model",
                    tmp_path / "warm" / "warmup", "--out", out)
    assert done.returncode
    # The loss is infinite, or not a number where it was 0; rank 0 prints it for all.
    assert done.stderr.count("train.py: the loss is") == 1, done.stderr
    last = checkpoint.last_checkpoint(str(out))  # the weights from before
    for (_, got), (_, want) in zip(weights(last), weights(tmp_path / "warm" / "warmup")):
        assert torch.equal(got, want)


def weights(path):
    return Qwen3.from_pretrained(str(path)).named_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--lora-rank 2 --kl 0.1"])
def test_a_run_of_two_ranks_ends_with_all_its_files(flags, tmp_path):
    """What rank 0 does alone at the end must need no other rank, or the run would hang. It
    says why the run failed before another rank's end lets torchrun end all."""
    done = torchrun("train.py", *SHORT, *flags.split(), "--eval-every", 1, "--out",
                    tmp_path / "run")
    assert done.returncode == 1 and done.stderr.count(FLAT) == 1, done.stderr
    assert {"result.json", "report.html", "final", "best"} <= set(
        os.listdir(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_the_run_resumes(number, tmp_path, monkeypatch):
    """What was trained so far is saved, though no step was to be saved yet."""
    out = tmp_path / "run"
    run = subprocess.Popen([*TORCHRUN, "--master-port", str(random.randrange(20000, 60000)),
                            "train.py", *SHORT, "--steps", "500", "--save-every", "1000",
                            "--out", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, start_new_session=True)

    def steps():
        path = out / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return [row["step"] for row in map(json.loads, rows) if row["phase"] == "grpo"]

    while len(steps()) < 3:
        assert run.poll() is None
        time.sleep(0.2)
    os.killpg(run.pid, number)  # what a terminal does
    _, errors = run.communicate(timeout=60)
    assert run.returncode
    assert errors.count("train.py: interrupted; continue with: torchrun") == 1, errors
    state = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())
    assert state["step"] == steps()[-1] >= 3
    assert FLAT in command(train, monkeypatch, "--out", out, "--resume", "--steps", 3)
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
