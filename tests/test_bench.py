"""The benchmarks on a tiny model. What they say of speed here is no measure of anything."""
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import command

from experiments import bench, gpu
from model import Decoder, DecoderConfig

TINY = DecoderConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096)


@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [
    ("sampler", ["trees"]), ("train", ["plain", "shared"])])
def test_what_is_compared_on_a_cpu(name, expected, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "SMALL", TINY)
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "ANSWER", 4)
    assert command(bench, monkeypatch, name) is None
    figures = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [figure[0] for figure in figures] == expected
    assert min(float(figure[1]) for figure in figures) > 0


@pytest.mark.parametrize("part", gpu.PARTS)
def test_the_parts_for_a_gpu_run_on_a_cpu(part, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "NEW", 8)
    monkeypatch.setattr(gpu, "LOADS", [(2, 30)])
    torch.manual_seed(0)
    gpu.PARTS[part](Decoder(replace(TINY, max_position_embeddings=136)).bfloat16())
    if dist.is_initialized():  # as sharded weights need
        dist.destroy_process_group()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert rows
    if part == "agreement":
        assert max(float(mean) for _, mean, _ in rows) < 0.05
