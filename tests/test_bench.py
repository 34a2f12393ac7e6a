"""What is measured is the real thing: the bench of a step runs train.py's own code."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import command
from lab import bench, gpu
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


TINY = Qwen3Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096)


@pytest.mark.parametrize("part, changes, figures", [
    (gpu.attention, {"rows": 4}, "packs_gap pages_in_place greedy_agreement logprob_gap"),
    (gpu.decode, {"loads": ((1, 20), (2, 30))},
     "read_gb_s make_s decode_roofline_share decode_tokens_s"),
    (gpu.prefill, {"size": 64}, "prefill_tokens_s prefill_matmul_share"),
    (gpu.update_lora, {"tokens": 64}, "lora_update_tokens_s lora_recomputed lora_peak_gib "
                                      "lora_plan_over_peak"),
    pytest.param(gpu.step, {"roots": 1}, "step_sample_s step_update_s",
                 marks=pytest.mark.slow)])
def test_the_parts_for_a_gpu_measure_what_their_help_names(
        part, changes, figures, monkeypatch):
    """On a CPU, and a tiny model: what they say there is no measure of anything."""
    monkeypatch.setattr(gpu, "REPEATS", 1)
    samples = bench.Samples("test")
    part(samples, config=TINY, **changes)
    assert {name.partition(" at ")[0] for name in samples} == set(figures.split())
    assert all(f"    {name}" in bench.gpu.__doc__ or f", {name}" in bench.gpu.__doc__
               for name in figures.split())
    if part is gpu.attention:
        assert max(samples["packs_gap"]) < 0.05 and samples["greedy_agreement"][0] > 0.9


ALL_WEIGHTS = """
from lab import bench, gpu
from test_bench import TINY

samples = bench.Samples("test")
gpu.update_all(samples, config=TINY, tokens=64)
names = "update_tokens_s mfu recomputed peak_gib plan_over_peak refresh_s"
assert set(samples) == set(names.split()), samples
"""


@pytest.mark.slow
def test_the_part_that_shards_its_weights():
    """In a process of its own, because it joins a process group."""
    tests = Path(__file__).parent
    path = f"{tests.parent}{os.pathsep}{tests}"
    subprocess.run([sys.executable, "-c", ALL_WEIGHTS], cwd=tests.parent, check=True,
                   env={**os.environ, "PYTHONPATH": path})


def test_a_part_that_fails_is_named_and_keeps_its_figures(monkeypatch, capsys, tmp_path):
    parts = tmp_path / "lab"
    parts.mkdir()
    (parts / "__init__.py").touch()
    (parts / "gpu.py").write_text("""if True:
        import json, sys, time
        name, path = sys.argv[1:]
        json.dump({name: [1.0, 2.0]}, open(path, "w"))
        if name == "slow":
            print("what it said before", file=sys.stderr, flush=True)
            time.sleep(60)
        if name == "broken":
            raise RuntimeError("out of memory\\nsome advice")
    """)
    monkeypatch.chdir(tmp_path)
    samples = bench.Samples("test")
    for name, limit in {"broken": 20, "slow": 3, "good": 20}.items():
        bench.run_part(name, limit, samples)
    assert samples == {"broken": [1, 2], "slow": [1, 2], "good": [1, 2]}
    assert samples.failed == ["broken", "slow"]
    said = capsys.readouterr().out.splitlines()
    assert "broken failed: exit status 1" in said
    assert "    RuntimeError: out of memory" in said and "    some advice" in said
    assert said[-2:] == ["slow failed: not done after 3 s", "    what it said before"]


def test_their_time_limits_are_less_than_ten_minutes_together():
    assert sum(gpu.PARTS.values()) < 570


def test_without_a_gpu_there_is_one_line(monkeypatch):
    monkeypatch.setattr(bench, "GPU", False)
    assert command(bench, monkeypatch, "gpu") == (
        "lab.bench gpu needs a CUDA GPU, and there is none")
