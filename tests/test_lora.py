"""LoRA: what the adapters compute, where they are merged, how they are saved, and training runs."""
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_model import build, distance, masked, some_ids  # noqa: E402
from test_train import SHORT, command, weights  # noqa: E402

from runtime import checkpoint  # noqa: E402
import train  # noqa: E402
from model import ADAPTED, Qwen3  # noqa: E402
from sampler import Sampler  # noqa: E402

RANKS = [1, 16]


def adapted(rank=4, alpha=32.0, shape="head_dim unlike hidden over heads", dtype=torch.float32):
    """A model whose adapters changed it noticeably."""
    model = build(shape).to(dtype).add_lora(rank, alpha, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=generator).mul_(0.05 * rank ** 0.5 / alpha)
    return model


def logits(model):
    with torch.no_grad():
        return model(some_ids(model))


@pytest.mark.parametrize("rank", RANKS)
def test_fresh_adapters_are_on_every_linear_layer_and_change_nothing(rank):
    plain, model = build(), build().add_lora(rank, 32.0)
    assert torch.equal(logits(model), logits(plain))
    linear = {name for name, w in plain.named_parameters() if name.split(".")[-2] in ADAPTED}
    assert len(linear) == 7 * 3  # all matrices but the tied table
    assert linear == {name for name, w in plain.named_parameters() if w.dim() == 2} - {
        "model.embed_tokens.weight"}
    trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
    for name in linear:
        outputs, inputs = dict(plain.named_parameters())[name].shape
        A, B = (trained.pop(name.replace("weight", f"lora_{x}")) for x in "AB")
        assert A.shape == (rank, inputs) and B.shape == (outputs, rank) and not B.any()
        assert A.dtype == B.dtype == torch.float32
        assert A.abs().max() <= inputs ** -0.5
    assert not trained  # nothing else has a gradient


def test_A_is_uniform_with_the_bound_of_its_inputs():
    layer = build(hidden_size=200).add_lora(64, 32.0).model["layers"][0].self_attn.q_proj
    A = layer.lora_A * 200 ** 0.5
    assert abs(A.mean()) < 0.02 and abs(A.square().mean() - 1 / 3) < 0.01  # that of U(-1, 1)
    again = build(hidden_size=200).add_lora(64, 32.0).model["layers"][0].self_attn.q_proj
    other = build(hidden_size=200).add_lora(64, 32.0, 1).model["layers"][0].self_attn.q_proj
    assert torch.equal(again.lora_A, layer.lora_A) and not torch.equal(other.lora_A, layer.lora_A)


@pytest.mark.parametrize("rank", RANKS)
def test_adapters_add_alpha_over_rank_times_B_A(rank):
    model = adapted(rank, alpha=8.0)
    plain = build()
    with torch.no_grad():
        for (name, weight), layer in zip(
                ((n, w) for n, w in plain.named_parameters() if n.split(".")[-2] in ADAPTED),
                (m for _, m in model._adapted())):
            weight += 8.0 / rank * layer.lora_B @ layer.lora_A
    assert distance(logits(model), logits(plain)) < 1e-5
    assert distance(logits(model), logits(build())) > 1e-2
    merged = dict(model.merged())
    assert [*merged] == [name for name, _ in plain.named_parameters()]
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(merged[name], weight.detach())


def test_without_adapters_it_is_the_model_that_it_was():
    model, base = adapted(), build()
    changed = logits(model)
    with model.adapters_off():
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), changed)
    with pytest.raises(KeyError), model.adapters_off():
        raise KeyError
    assert torch.equal(logits(model), changed)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_merged_weights(recompute):
    """dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW; only adapters get one."""
    model = adapted(rank=3)
    model.recompute = recompute
    plain = model.merged_copy().requires_grad_(True)
    ids = some_ids(model)
    for m in (model, plain):
        m.logprobs(ids, masked(m, ids))[0].sum().backward()
    whole = dict(plain.named_parameters())
    for name, layer in model._adapted():
        dW = whole[f"{name}.weight"].grad
        torch.testing.assert_close(layer.lora_B.grad, layer.scale * dW @ layer.lora_A.T,
                                   atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.lora_A.grad, layer.scale * layer.lora_B.T @ dW,
                                   atol=1e-4, rtol=1e-4)
        assert layer.weight.grad is None
    assert model.model["embed_tokens"].weight.grad is None


# --- the sampler's copy ----------------------------------------------------------------------

def test_the_sampler_holds_the_merged_weights_and_never_shares_memory():
    model = adapted()
    sampler = Sampler(model, memory=1 << 20)
    assert distance(logits(sampler.model), logits(model)) < 1e-6
    mine = {w.data_ptr() for w in model.parameters()}
    assert not mine & {w.data_ptr() for w in sampler.model.parameters()}
    assert sampler.model.rank == 0 and not any("lora" in n for n, _ in
                                               sampler.model.named_parameters())
    with torch.no_grad():
        for _, layer in model._adapted():
            layer.lora_B += 0.01
    before = {w.data_ptr() for w in sampler.model.parameters()}
    sampler.load(model)
    assert distance(logits(sampler.model), logits(model)) < 1e-6
    assert before == {w.data_ptr() for w in sampler.model.parameters()}  # in place


def test_merging_happens_in_float32_and_its_gap_is_what_rounding_lost():
    model = adapted(dtype=torch.bfloat16)
    copy = model.merged_copy()
    lost = change = 0.0
    for name, layer in model._adapted():
        exact = layer.weight.double() + layer.scale * (layer.lora_B.double()
                                                       @ layer.lora_A.double())
        rounded = copy.get_submodule(name).weight
        assert rounded.dtype == torch.bfloat16
        # the nearest bfloat16 (8 bits): off by half a unit in the last place, 2^-8, at most
        assert ((rounded - exact).abs() <= exact.abs() * 2 ** -7.99).all()
        lost += (rounded.double() - exact).square().sum().item()
        change += (exact - layer.weight.double()).square().sum().item()
    assert model.merge_gap(copy) == pytest.approx((lost / change) ** 0.5, rel=1e-3)
    assert 0.001 < model.merge_gap(copy) < 0.5
    assert adapted().merge_gap(adapted().merged_copy()) < 1e-6  # float32
    fresh = build().bfloat16().add_lora(2, 32.0)
    assert fresh.merge_gap(fresh.merged_copy()) == 0.0


def test_a_bfloat16_base_trains_float32_adapters():
    model = adapted(dtype=torch.bfloat16)
    ids = some_ids(model)
    model.logprobs(ids, masked(model, ids))[0].sum().backward()
    for name, weight in model.named_parameters():
        assert (weight.dtype == torch.float32) == ("lora_" in name) == (weight.grad is not None)
        assert weight.grad is None or weight.grad.dtype == torch.float32
    exact = adapted()  # the same weights, not rounded
    exact.logprobs(ids, masked(exact, ids))[0].sum().backward()
    a, b = (torch.cat([w.grad.flatten() for n, w in m.named_parameters() if "lora_" in n])
            for m in (model, exact))
    assert distance(a, b) < 0.1


# --- files -----------------------------------------------------------------------------------

@pytest.mark.parametrize("rank", RANKS)
def test_adapters_are_saved_and_loaded(rank, tmp_path):
    model = adapted(rank)
    model.save_adapter(tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == rank and config["lora_alpha"] == 32.0 and config["peft_type"] == "LORA"
    other = build().add_lora(rank, 32.0, seed=9)
    other.load_adapter(tmp_path)
    assert torch.equal(logits(other), logits(model))
    wrong = build().add_lora(rank + 1, 32.0)
    with pytest.raises(ValueError, match=r"lora_A.weight has shape"):
        wrong.load_adapter(tmp_path)


def test_a_saved_model_has_its_adapters_merged(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    assert not any("lora" in name for name in load_file(tmp_path / "model.safetensors"))
    assert distance(logits(Qwen3.from_pretrained(tmp_path)), logits(model)) < 1e-6


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", ["head_dim unlike hidden over heads", "wide heads, untied"])
def test_peft_loads_the_adapters_to_the_same_logits(rank, shape, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted(rank, shape=shape)
    build(shape).save_pretrained(tmp_path / "base")
    model.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "base",
                                                         torch_dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert distance(theirs(some_ids(model)).logits, logits(model)) < 1e-5
        assert distance(base.base_model(some_ids(model))[0], theirs.base_model.model.model(
            some_ids(model))[0]) < 1e-5  # adapters are inside
        theirs.save_pretrained(tmp_path / "again")
    back = build(shape).add_lora(rank, 32.0)
    back.load_adapter(tmp_path / "again")
    assert torch.equal(logits(back), logits(model))


# --- runs ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def finished(tmp_path_factory, short_run):
    out = tmp_path_factory.mktemp("lora") / "a"
    with pytest.MonkeyPatch.context() as patch:
        assert command(train, patch, *SHORT, "--out", out, "--lora-rank", 1,
                       "--model", short_run / "init") is None
    return out


def test_a_run_keeps_what_the_full_warmup_left_but_for_the_adapters(finished, short_run):
    warm, final = weights(finished / "warmup"), weights(finished / "final")
    init = weights(short_run / "init")
    for name in warm:
        assert not torch.equal(warm[name], init[name])  # the warm-up trained all
        if name.split(".")[-2] not in ADAPTED:
            assert torch.equal(final[name], warm[name])
    model = Qwen3.from_pretrained(str(finished / "warmup")).add_lora(1, 32.0)
    model.load_adapter(finished / "final" / "adapter")
    for name, weight in model.merged():
        torch.testing.assert_close(final[name], weight, rtol=1e-6, atol=1e-7)
    config = json.loads((finished / "final" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == os.path.join(finished, "warmup")
    last = Path(checkpoint.last_checkpoint(finished))
    assert not (last / "model.safetensors").exists()  # only what changes
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["merge_gap"] < 1e-5 for row in rows if row["phase"] == "grpo")


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_adapters(finished, tmp_path, monkeypatch):
    out = tmp_path / "b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "log", lambda self, metrics: (_ for _ in ()).throw(
            KeyboardInterrupt) if metrics.get("phase") == "grpo" else None)
        assert "--resume" in command(train, patch, *SHORT, "--out", out, "--lora-rank", 1)
    state = json.loads(Path(checkpoint.last_checkpoint(out), "state.json").read_text())
    assert (state["phase"], state["step"]) == ("grpo", 1)
    message = command(train, monkeypatch, "--out", out, "--resume", "--lora-rank", 2)
    assert "run.json: lora_rank is 1" in message
    message = command(train, monkeypatch, "--out", out, "--resume", "--lora-rank", 0)
    assert "run.json: lora_rank is 1" in message
    message = command(train, monkeypatch, "--out", out, "--resume", "--lora-alpha", 8)
    assert "run.json: lora_alpha is 32.0" in message
    assert command(train, monkeypatch, "--out", out, "--resume") is None
    whole, resumed = weights(finished / "final"), weights(out / "final")
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-4, atol=1e-5)


def test_the_frozen_base_is_bfloat16_unless_all_is_float32_on_a_cpu(tmp_path, monkeypatch):
    for stored, key in (("float32", "dtype"), ("bfloat16", "dtype"), ("bfloat16", "torch_dtype")):
        (tmp_path / "config.json").write_text(json.dumps({key: stored}))
        with monkeypatch.context() as patch:
            patch.setattr(train, "device", lambda: "cpu")
            assert train.frozen_dtype(str(tmp_path)) == getattr(torch, stored)
            patch.setattr(train, "device", lambda: "cuda")
            assert train.frozen_dtype(str(tmp_path)) == torch.bfloat16


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_trained_with_a_bfloat16_base(finished, tmp_path, monkeypatch):
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "rlm.json"):
        (tmp_path / name).write_bytes((finished / "final" / name).read_bytes())
    Qwen3.from_pretrained(str(finished / "final"), torch.bfloat16).save_pretrained(tmp_path)
    out = tmp_path / "out"
    assert command(train, monkeypatch, *SHORT, "--model", tmp_path, "--out", out, "--steps", 1,
                   "--warmup-steps", 0, "--lora-rank", 2) is None
    for part in ("warmup", "final"):
        tensors = load_file(out / part / "model.safetensors")
        assert {w.dtype for w in tensors.values()} == {torch.bfloat16}
    start = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(w, start[n]) for n, w in load_file(
        out / "warmup" / "model.safetensors").items())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("phase") == "grpo" and "merge_gap" in row for row in rows)
