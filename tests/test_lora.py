"""LoRA: what adapters compute, where they are merged, how they are saved; training runs."""
import json
from pathlib import Path

import pytest
import torch
from conftest import SHORT, command
from test_model import SHAPES, build, distance, some_ids
from test_sampler import HYBRID
from test_train import weights

import grpo
import train
from engine import device, hf
from engine.packing import collate
from grpo import GRPOConfig, Sequence
from model import Decoder
from training import checkpoint


def adapted(rank=4, alpha=32.0, shape="head_dim unlike hidden over heads",
            dtype=None, **changes):
    """A model whose adapters changed it noticeably."""
    model = build(shape, **changes).to(dtype).add_lora(rank, alpha, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.adapters().items():
            if "lora_B" in name:
                weight.normal_(generator=generator).mul_(0.05 * rank ** 0.5 / alpha)
    return model


def logits(model):
    with torch.no_grad():
        return model(some_ids(model))


def test_fresh_adapters_are_on_every_linear_layer_and_change_nothing():
    plain, model = build(), build().add_lora(16, 32.0)
    assert torch.equal(logits(model), logits(plain))
    layers = {name for name, w in plain.named_parameters() if w.dim() == 2}
    layers.remove("model.embed_tokens.weight")
    trained = {name for name, w in model.named_parameters() if w.requires_grad}
    assert trained == {name.replace("weight", f"lora_{part}")
                       for name in layers for part in "AB"}
    assert {w.dtype for w in model.adapters().values()} == {torch.float32}
    other_rank = build().add_lora(16, 32.0).adapters()
    assert all(torch.equal(other_rank[name], w) for name, w in model.adapters().items())


@pytest.mark.parametrize("rank", [1, 16])
def test_adapters_add_alpha_over_rank_times_B_A(rank, float64):
    model, plain = adapted(rank, alpha=8.0), build()
    with torch.no_grad():
        for name, layer in model.adapted():
            plain.get_submodule(name).weight += 8.0 / rank * layer.lora_B @ layer.lora_A
    assert distance(logits(model), logits(plain)) < 1e-10
    assert distance(logits(model), logits(build())) > 1e-2
    merged = dict(model.merged())
    assert [*merged] == [name for name, _ in plain.named_parameters()]
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(merged[name], weight.detach(), rtol=0, atol=1e-10)


def test_without_adapters_it_is_the_model_that_it_was_which_is_a_runs_reference():
    model, base = adapted(), build()
    changed = logits(model)
    ids = some_ids(model)[:1]
    row = Sequence(ids[0].tolist(), [0] + [1] * (ids.shape[1] - 1), [], [], 1.0)
    pack = grpo.with_references(collate([row], "cpu"), GRPOConfig(kl=0.1), model, None)
    assert torch.equal(pack.reference_logprobs, base.logprobs(pack)[0])
    assert torch.equal(logits(model), changed)


def test_merging_happens_in_float32():
    model = adapted(dtype=torch.bfloat16)
    copy = model.merged_copy()
    for name, layer in model.adapted():
        product = layer.lora_B.double() @ layer.lora_A.double()
        exact = layer.weight.double() + layer.scale * product
        rounded = copy.get_submodule(name).weight
        assert rounded.dtype == torch.bfloat16
        # the nearest bfloat16 (8 bits): off by half a unit in the last place, 2^-8, at most
        assert ((rounded - exact).abs() <= exact.abs() * 2 ** -7.99).all()


# --- files --------------------------------------------------------------------------------

@pytest.mark.parametrize("rank, shape, changes", [
    *zip((1, 16), SHAPES, ({}, {})), (4, "wide heads, untied", HYBRID)])
def test_peft_loads_the_adapters_to_the_same_logits(
        rank, shape, changes, tmp_path, float64_everywhere):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = adapted(rank, shape=shape, **changes)
    build(shape, **changes).save_pretrained(tmp_path / "base")
    hf.save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", torch_dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert distance(theirs(some_ids(model)).logits, logits(model)) < 1e-10
    back = build(shape, **changes).add_lora(rank, 32.0)
    hf.load_adapter(back, tmp_path / "adapter")
    assert torch.equal(logits(back), logits(model))


# --- runs ---------------------------------------------------------------------------------

def test_a_run_with_adapters_changes_nothing_else(
        objective, short_run, tmp_path, monkeypatch):
    out = tmp_path / "a"
    assert command(train, monkeypatch, *SHORT, "--out", out, "--lora-rank", 1, "--model",
                   short_run / "warmup", "--objective", objective) is None
    warm, final = weights(out / "warmup"), weights(out / "final")
    start = weights(short_run / "warmup")
    adapted = dict(Decoder.from_pretrained(short_run / "warmup").adapted())
    for name in warm:
        moves = name.removesuffix(".weight") in adapted  # adapters are all that is trained
        for before, after in ((start, warm), (warm, final)):
            assert torch.equal(before[name], after[name]) == (not moves)
    model = Decoder.from_pretrained(out / "warmup").add_lora(1, 32.0)
    adapter = out / "final" / "adapter"
    hf.load_adapter(model, adapter)
    for name, weight in model.merged():
        assert torch.equal(final[name], weight)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../../warmup"  # a run may be renamed
    last = Path(checkpoint.checkpoints(out)[-1])
    assert not (last / "model.safetensors").exists()  # only what changes


@pytest.mark.parametrize("stored, fast, want", [
    ("float32", True, "float32"), ("bfloat16", True, "bfloat16"),
    ("float16", True, "bfloat16"), ("bfloat16", False, "float32")])
def test_a_cpu_computes_in_bfloat16_if_it_can_and_the_checkpoint_has_16_bits(
        stored, fast, want, tmp_path, monkeypatch):
    raw = hf.config_json(build().config, getattr(torch, stored))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast},
                        raising=False)
    assert device.compute_dtype(str(tmp_path)) == getattr(torch, want)
