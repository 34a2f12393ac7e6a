"""Several ranks are one: two processes over gloo against one; checkpoints, faults, bad input."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch

import train
from parallel import Agreed, World

ROOT = Path(__file__).resolve().parent.parent


def environment(rank=0, size=1, port=0):
    return os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                         "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*args, size=2, script="tests/ranks.py", **options):
    """As many processes as one run, as torchrun starts them; their output is read by `end`."""
    port = free_port()
    return [subprocess.Popen([sys.executable, ROOT / script, *map(str, args)], text=True,
                             env=environment(rank, size, port) | options.get(f"rank{rank}", {}),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(size)]


def end(processes):
    """(exit status, standard error) of each."""
    try:
        return [(p.wait(120), p.stderr.read()) for p in processes]
    finally:
        for p in processes:
            p.kill()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of two runs that start from the same model."""
    paths = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for path in paths:
        ranks.make_model(path / "model")
    return paths


def close(got, want):
    for name, tensor in want.items():
        worst = (got[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
        assert worst <= 1e-5, (name, worst)


def test_two_ranks_are_one_and_a_run_moves_from_two_to_one_and_back(models):
    """Step 0 on two ranks with 3 rows and 7, step 1 on one, step 2 on two."""
    one, two = models
    for number in range(3):
        if number != 1:
            for status, errors in end(start(two, number)):
                assert status == 0, errors
        for kind in ranks.KINDS:
            want = ranks.step(one / kind, kind, number, World())
            got = (ranks.step(two / kind, kind, number, World()) if number == 1
                   else torch.load(two / f"{kind}.pt"))
            assert want["rows"] == 10
            assert got["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"], rel=1e-5)
            close(got["gradients"], want["gradients"])
            close(got["weights"], want["weights"])
            for name, value in want["metrics"].items():
                if isinstance(value, float):
                    assert got["metrics"][name] == pytest.approx(value, rel=1e-4), name
