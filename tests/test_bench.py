"""The benchmarks on a tiny model. What they say of speed here is no measure of anything."""
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import command

from experiments import bench
from model import Decoder, DecoderConfig

TINY = DecoderConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096)


@pytest.mark.slow
def test_the_sampler_is_compared_with_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "SMALL", TINY)
    monkeypatch.setattr(bench, "REQUESTS", (1, 3))
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "ANSWER", 8)
    assert command(bench, monkeypatch, "sampler") is None
    *rates, trees = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in rates] == ["1", "3"]
    assert float(re.search(r"trees: ([\d.]+)", trees)[1]) > 0


@pytest.mark.parametrize("part", bench.PARTS)
def test_the_parts_for_a_gpu_run_on_a_cpu(part, monkeypatch, capsys):
    monkeypatch.setattr(bench, "NEW", 8)
    monkeypatch.setattr(bench, "LOADS", [(2, 30)])
    torch.manual_seed(0)
    bench.PARTS[part](Decoder(replace(TINY, max_position_embeddings=136)).bfloat16())
    if dist.is_initialized():  # as sharded weights need
        dist.destroy_process_group()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert rows
    if part == "agreement":
        assert max(float(mean) for _, mean, _ in rows) < 0.05
