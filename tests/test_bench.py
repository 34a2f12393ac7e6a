"""The benchmarks on a tiny model. What they say of speed here is no measure of anything."""
import sys
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from lab import bench, gpu
from model import Qwen3Config

TINY = Qwen3Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096)


@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [
    ("sampler", ["tree_vs_transformers", "work_over_minimum"]),
    ("train", ["update_vs_transformers", "shared_vs_transformers"])])
def test_what_is_compared_on_a_cpu(name, expected, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "SMALL", TINY)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "ANSWER", 4)
    monkeypatch.setattr(sys, "argv", ["bench.py", name])
    bench.main({name: getattr(bench, name)})
    figures = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [figure[0] for figure in figures] == expected
    assert min(float(figure[1]) for figure in figures) > 0


@pytest.mark.parametrize("part, changes", [
    (gpu.agreement, {"prompts": 2}), (gpu.sampling, {"loads": ((2, 30),)}),
    (gpu.update_all, {"tokens": 64, "rank": 16}), (gpu.update_all, {"tokens": 64})])
def test_the_parts_for_a_gpu_run_on_a_cpu(part, changes, monkeypatch):
    monkeypatch.setattr(gpu, "REPEATS", 1)
    torch.manual_seed(0)
    samples = defaultdict(list)
    part(samples, config=TINY, **changes)
    if dist.is_initialized():  # as sharded weights need
        dist.destroy_process_group()
    assert samples and min(map(min, samples.values())) >= 0
    if part is gpu.agreement:
        assert samples["logprob_gap"][0] < 0.05
