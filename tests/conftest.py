"""What several test files share. Before torch is loaded: one thread, for small models on a
machine that may be busy, and no GPU, whose program is experiments/bench.py."""
import base64
import gc
import json
import os
import re
import signal
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

# A job in the background begins with Ctrl-C ignored, but tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ROOT / "tests" / "data" / "papers.jsonl"
SHORT = ("--warmup-steps 1 --steps 2 --questions 2 --group 2 "
         "--heldout 3").split()
FLAT = "no step had an advantage"  # how SHORT ends: one supervised step teaches nothing
SMALL_MODEL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                   num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                   max_position_embeddings=384, rope_theta=1e4)
# Rewards that differ between trees, and depend on nothing but what was sampled.
OBJECTIVE = """
from dataclasses import replace
import grpo
def credit(trees, config):
    drawn = [replace(r, reward=sum(r.root.ids) % 97 / 96) for r in trees]
    return grpo.credit(drawn, config)
"""


def pytest_collection_finish(session):
    """What is loaded by now stays. Every collection of garbage would look through it."""
    gc.collect()
    gc.freeze()


def command(module, monkeypatch, *args):
    """Run a program's main with these arguments. Returns its exit status or message, and
    None if it returned."""
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
    try:
        module.main()
    except SystemExit as stop:
        return stop.code
    return None


def data_of(page):
    """The trees of the last step on a report page, unpacked as its script does."""
    packed = re.search(r"id=data>([A-Za-z0-9+/=\n]*)</script>", page)[1].split("\n")[-1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.fixture
def float64():
    """What is to be equal is compared in float64. There rounding is far below 1e-10 and a
    mistake far above, whatever the processor. In float32 they can be of equal size."""
    import torch
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64_everywhere(float64, monkeypatch):
    """Also where a library asks for float32, as transformers does in norms and angles."""
    import torch
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture
def objective(tmp_path):
    """A file for --objective, with which each step has a gradient."""
    path = tmp_path / "objective.py"
    path.write_text(OBJECTIVE)
    return path


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """A finished short run from nothing, of a smaller model: init, warmup, final."""
    import tasks
    import train
    from config import load_config
    from training import setup

    out = tmp_path_factory.mktemp("run") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "TINY_MODEL", SMALL_MODEL)
        patch.setattr(setup, "TOKENIZER_TREES", 32)
        assert FLAT in command(train, patch, *SHORT, "--out", out)
    for folder in ("warmup", "final"):
        path = out / folder / "rlm.json"
        config = load_config(path.parent)
        assert config == replace(setup.tiny_rlm(tasks.load("requests")), task="requests")
        # A model that learnt nothing writes until it is stopped. Here that is soon.
        replace(config, turn_tokens=16).save(path)
    return out
