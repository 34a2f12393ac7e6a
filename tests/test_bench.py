"""What is measured is the real thing: the bench of a step runs train.py's own code."""
import sys

import pytest
import torch

from conftest import command
from lab import bench
from model import Qwen3, Qwen3Config


@pytest.fixture
def tiny(tmp_path):
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    Qwen3(config).save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_our_step_samples_updates_and_says_how_long_its_parts_took(tiny):
    ours = bench.FlatTrainer(tiny, [[1, 2, 3], [4, 5, 6]], group=4, tokens=5)
    for _ in range(2):
        before = [weight.clone() for weight in ours.model.parameters()]
        parts = ours.step()
        assert list(parts) == ["sample_s", "score_s", "update_s", "step_s"]
        assert min(parts.values()) > 0
        whole = parts.pop("step_s")
        assert sum(parts.values()) == pytest.approx(whole)
        for old, new in zip(before, ours.model.parameters()):
            assert not torch.equal(old, new)
    assert ours.sampler.stats["sampled"] == 2 * 2 * 4 * 5
    # The first token of a completion needs no pass of its own, and a prompt is shared.
    assert ours.sampler.stats["computed"] < 2 * 2 * (3 + 4 * 5)


def test_without_trl_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    message = command(bench, monkeypatch, "step")
    assert "trl" in message and "requirements-lab.txt" in message
    assert "\n" not in message
