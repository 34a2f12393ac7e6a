"""Several ranks are one: two processes over gloo against one, and what ends them."""
import os
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import FLAT, ROOT, SHORT
from test_sampler import HYBRID
from torch.distributed.tensor import DTensor

import grpo
import tasks
import train
from config import RLMConfig
from engine import packing, plan
from engine.parallel import World, full_tensor
from model import Decoder, DecoderConfig
from repl import REPLError
from training.questions import Questions
from tokenizer import Tokenizer
from training import checkpoint, metrics, settings, setup
from training import trees as many
from training.run import Run
from tree import Message, Node, Tree

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
KINDS = {"full": {"lr": 1e-3, "kl": 0.01}, "lora": {"lora_rank": 2, "lr": 1e-2}}


# --- one step on hand-made trees, by one rank or by two -----------------------------------

def make_model(path):
    tokenizer = Tokenizer.train(["abc abd aef"] * 9, 300)
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(  # a hybrid: it has both kinds of layer
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=384, **HYBRID))
    for net in model.model["layers"][::2]:
        torch.nn.init.constant_(net.linear_attn.A_log, -2.0)  # it forgets slowly
    model.save_pretrained(path)
    tokenizer.save(path)
    setup.TINY_RLM.save(f"{path}/rlm.json")


SHORT_STEP = 1  # which is halved four times


def trees(step):
    """Two groups; ten nodes with an advantage, of 20 to 300 tokens."""
    rng = random.Random(step)

    def node(path, *children):
        made = Node(path, children=list(children))
        for _ in range(2):
            prompt, answer = (tuple(rng.randrange(256) for _ in range(rng.randint(10, 150)))
                              for _ in range(2))
            made.add(Message("user", "", prompt))
            made.add(Message("assistant", "", answer, (-5.5,) * len(answer)))
        return made

    return [Tree(None, group, node((), *(node((i,)) for i in range(n))), reward)
            for group, reward, n in (
                ("a", 1.0, 3), ("a", 0.0, 1), ("b", 0.2, 0), ("b", 0.7, 2))]


def take_step(out, kind, number, world):
    """Resume, take one step, save. Of two ranks the first gets 3 rows, the other one 7.
    Returns loss, gradients, weights and metrics."""
    found, optimizer_step = {}, train.optimizer_step
    compared = grpo.with_references
    row = grpo.Sequence([*range(9)], [0] + [1] * 8, [0.0] * 9, [], 1.0)

    def watch(model, *more):
        found["gradients"] = {name: full_tensor(weight.grad).clone()
                              for name, weight in model.named_parameters()
                              if weight.requires_grad}
        return optimizer_step(model, *more)

    def collect(setup, model, *more):
        # A forward pass without a backward pass must leave no weight gathered.
        with torch.no_grad():
            model.logprobs(packing.collate([row], "cpu"))
        sharded = all(isinstance(w, DTensor) for w in model.parameters())
        assert (world.size == 2) == sharded
        found["model"] = model
        assert bool(setup.plan.need()["reference"]) == (kind == "full")
        return trees(number)

    def score(pack, config, model, reference):
        weights = reference.parameters() if reference else []
        assert all(isinstance(w, DTensor) == (world.size == 2) for w in weights)
        return compared(pack, config, model, reference)

    def unequal(rows, *_):
        return [rows[:3], rows[3:]][world.rank:world.rank + 1]

    config = train.Config(out=str(out), resume=number > 0, steps=number + 1, heldout=1,
                          model=str(out.parent / "model"), warmup_steps=0, **KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "compute_dtype", lambda path: torch.float64)
        patch.setattr(plan, "LEAST_PACK", 512)  # several packs
        patch.setattr(metrics, "MOST", -1.0 if number == SHORT_STEP else 1.0)
        patch.setattr(metrics, "HALVINGS", 4)
        sampler = SimpleNamespace(stats={"seconds": 0.0})
        patch.setattr(train, "make_sampler", lambda *_: sampler)
        patch.setattr(train, "sample_trees", collect)
        patch.setattr(train, "evaluate", lambda *_: None)
        patch.setattr(train, "optimizer_step", watch)
        patch.setattr(grpo, "with_references", score)
        patch.setattr(Run, "log_step", lambda *args: found.update(metrics=args[-1]))
        patch.setattr(Run, "finish", lambda run: None)
        if world.size == 2:
            patch.setattr(packing, "divided", unequal)
        train.train(config, world)
    found["weights"] = dict(found.pop("model").merged())
    return found


SERVE = """
import sys
from pathlib import Path
sys.path[:0] = [".", "tests"]
import torch
torch.set_default_dtype(torch.float64)
from engine.parallel import World
from test_parallel import KINDS, take_step
world, folder = World(), Path(sys.argv[1])
for kind in KINDS:
    for number in range(2):
        found = take_step(folder / kind, kind, number, world)
        if world.rank == 0:
            torch.save(found, folder / f"{kind}{number}.pt")
if world.rank == 1:
    sys.exit("it broke")
world.gather(None)
"""


def torchrun(script, *flags, **more):
    """A run of two ranks."""
    port = str(random.randrange(20000, 60000))
    return subprocess.Popen(
        [*TORCHRUN, "--master-port", port, str(script), *map(str, flags)], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **more)


def close(got, want):
    """In float64 they are 2e-14 apart at most. In float32 no bound would be tight: Adam
    divides a gradient by its own size, so of one near 0 it magnifies the rounding."""
    for name, tensor in want.items():
        worst = (got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-2)
        assert worst <= 1e-10 and tensor.dtype == torch.float64, (name, worst)


def test_two_ranks_are_one_and_a_run_moves_from_two_to_one(float64, tmp_path):
    """Step 0 on two ranks with 3 rows and 7; step 1, which is shortened, on two; step 2 on
    one; full and LoRA. Then one rank fails, which ends the other and is told."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        make_model(path / "model")
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    run = torchrun(script, two)
    alone = {(kind, number): take_step(one / kind, kind, number, World())
             for kind in KINDS for number in range(3)}
    _, errors = run.communicate(timeout=300)
    assert run.returncode and "it broke\n" in errors
    for kind in KINDS:
        for number in range(3):
            want = alone[kind, number]
            if number < 2:
                got = torch.load(two / f"{kind}{number}.pt")
            else:
                got = take_step(two / kind, kind, number, World())
            assert (got["metrics"]["step_left"] < 1) == (number == SHORT_STEP)
            close(got["gradients"], want["gradients"])
            close(got["weights"], want["weights"])
            for name, value in want["metrics"].items():
                if isinstance(value, float) and not name.endswith("_s"):
                    assert got["metrics"][name] == pytest.approx(value, 1e-10, 1e-10), name


def test_what_is_half_written_never_takes_the_place_of_what_is_whole(tmp_path):
    path = tmp_path / "best"
    for number in range(2):
        with checkpoint.writing(str(path), World()) as aside:
            Path(aside, "number").write_text(str(number))
    with pytest.raises(OSError), checkpoint.writing(str(path), World()) as aside:
        Path(aside, "number").write_text("2")
        raise OSError("no space left")
    assert (path / "number").read_text() == "1"


@pytest.mark.slow
def test_a_run_of_two_ranks_ends_with_all_its_files(short_run, tmp_path):
    """What rank 0 does alone at the end must need no other rank, or the run would hang."""
    out = tmp_path / "run"
    run = torchrun("train.py", *SHORT, "--model", short_run / "init", "--lora-rank", 2,
                   "--warmup", "scripts", "--kl", 0.1, "--eval-every", 1, "--out", out)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 1 and FLAT in errors
    assert {"result.json", "report.html", "final"} <= set(os.listdir(out))


def on_ranks(size, function):
    """What function(world) returns on each of so many ranks. Here these are threads."""
    both, values = threading.Barrier(size, timeout=20), [None] * size

    def one(rank):
        def gather(value):
            values[rank] = value
            both.wait()
            gathered = pickle.loads(pickle.dumps(values))
            both.wait()
            return gathered

        world = World()
        world.rank, world.size, world.gather = rank, size, gather
        return function(world)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_ranks_share_all_trees_alike_and_what_one_loses_is_lost_for_all(monkeypatch):
    """Four questions on eight ranks; and the warm-up, as its packs have to be the same."""
    here, shares, lost = threading.local(), Counter(), {1}

    async def attempt(grown, *_):
        shares[here.rank] += 1
        key = grown.args[-1]
        turn = Message("assistant", "", (key[-1],), (0.0,))
        return Node(messages=[turn]), 0.0, "lost" * (here.rank in lost)

    def sampled(world):
        run = Mock(world=world, rlm_config=RLMConfig())
        here.rank = world.rank
        trees = train.sample_trees(run, None, Mock(), asked, (), "", 4)
        return [(tree.question, tree.group, tree.root.ids) for tree in trees]

    def warmed_up(world):
        here.rank = world.rank
        nodes = train.warm_up_nodes(Mock(
            config=train.Config(warmup_steps=1), plan=Mock(window=9), world=world,
            saved=[], defaults=settings.SCRATCH, questions=questions,
            rlm_config=setup.tiny_rlm(questions.task)))
        return [node.ids for node in nodes]

    monkeypatch.setattr(many, "attempt", attempt)
    questions = Questions(tasks.load("requests"), heldout=4)
    asked = questions.heldout
    want = [(asked[i // 4], str(i // 4), [i]) for i in range(16)]
    assert on_ranks(8, sampled) == [want] * 8 and shares == dict.fromkeys(range(8), 2)
    assert on_ranks(2, warmed_up) == [[[i] for i in range(16)]] * 2
    lost.add(0)
    with pytest.raises(REPLError, match="every tree failed"):
        on_ranks(2, warmed_up)
