"""The decoder: its arithmetic against transformers, log-probabilities, checkpoints."""
import json

import golden
import pytest
from conftest import ROOT
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import model as model_module
from engine.attention import PackedLayout
from engine.linear import linear, linear_float32, ordered, put
from engine.packing import collate
from grpo import Sequence
from model import Decoder, DecoderConfig

SHAPES = {  # heads, key/value heads, head_dim, tied
    "head_dim unlike hidden over heads": (4, 2, 14, True),
    "wide heads, untied": (2, 1, 32, False),
}
VOCABULARY = 37
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def build(shape="head_dim unlike hidden over heads", seed=0, **changes):
    """A small decoder in which every weight is random, those of the norms as well."""
    heads, kv_heads, head_dim, tied = SHAPES[shape]
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=64, rope_theta=700.0, rms_norm_eps=1e-3,
        tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**fields | changes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return model


def some_ids(model, rows=2, length=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator)


def masked(ids, seed=2):
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0] = False
    return mask.long()


def same(a, b):
    ids = some_ids(a)
    with torch.no_grad():
        return torch.equal(a(ids), b(ids))


def distance(a, b):
    """The relative difference of two tensors, in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("less, times", [(0, 1), (1, 2)])
def test_recomputing_layers_changes_no_gradient(less, times, float64):
    plain, again = build(), build()
    ids, calls = some_ids(plain), []
    again.recompute_above = ids.numel() - less
    again.model["layers"][1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, again):
        model.logprobs(packed(ids, masked(ids)))[0].sum().backward()
    assert len(calls) == times  # forward; if too long, once more in the backward pass
    for a, b in zip(plain.parameters(), again.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=0)


# --- against transformers -----------------------------------------------------------------

def golden_file(name):
    with safe_open(ROOT / "tests" / "golden" / f"{name}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["config"]) == golden.CONFIGS[name]
        return {key: file.get_tensor(key) for key in file.keys()}


def ours(name, folder, dtype=torch.float32):
    """The golden model through a checkpoint directory like those of transformers."""
    (folder / "config.json").write_text(json.dumps(golden.CONFIGS[name]))
    save_file(golden.weights(golden.CONFIGS[name]), folder / "model.safetensors")
    return Decoder.from_pretrained(folder, dtype)


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_logits_and_greedy_tokens_are_those_that_transformers_gave(name, tmp_path):
    # Ours in float64, so that only what the files rounded is left, on any processor.
    want, model = golden_file(name), ours(name, tmp_path, torch.float64)
    with torch.no_grad():
        got = model(want["ids"])
        half = ours(name, tmp_path, torch.bfloat16)(want["ids"])
    assert distance(got, want["logits"]) < 1e-5
    assert (got - want["logits"]).abs().max() < 1e-4 * want["logits"].abs().max()
    theirs = distance(want["logits_bf16"], want["logits"])
    assert distance(half, want["logits"]) < 1.1 * theirs  # kernels differ by 0.02
    tokens, _ = golden.greedy(model, want["ids"][0, :golden.PROMPT].tolist())
    ties = [i for i, gap in enumerate(want["ahead"].tolist()) if gap < 1e-4]
    end = min(ties, default=None)  # after a tie either token is right
    assert tokens[:end] == want["greedy"].tolist()[:end]


# --- log-probabilities --------------------------------------------------------------------

def packed(ids, mask):
    """The pack of the rows of two tensors. What is sampled begins behind a row's first."""
    return collate([Sequence(row, [0, *marks[1:]], [0.0] * len(row), [], 1.0)
                    for row, marks in zip(ids.tolist(), mask.tolist())], "cpu")


def plain_logprobs(model, ids, mask):
    """What `logprobs` promises, from all logits at once."""
    all_BTV = model(ids)[:, :-1].log_softmax(-1)
    chosen = all_BTV.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(all_BTV.exp() * all_BTV).sum(-1)
    wanted = mask[:, 1:].bool()
    return chosen[wanted], entropy[wanted]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 4096])
@pytest.mark.parametrize("trained_head", [True, False])
def test_logprobs_entropy_and_gradients_are_those_of_the_full_logits(
        trained_head, chunk, shape, monkeypatch, float64):
    monkeypatch.setattr(model_module, "LOGITS_BYTES", 4 * VOCABULARY * chunk)
    model, plain = build(shape).double(), build(shape).double()  # rounding is far below
    for each in (model, plain):
        each.lm_head.weight.requires_grad_(trained_head)
    ids = some_ids(model, rows=3)
    mask = masked(ids)
    got, got_entropy = model.logprobs(packed(ids, mask))
    want, want_entropy = plain_logprobs(plain, ids, mask)
    assert got.shape == got_entropy.shape == (int(mask.sum()),)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    torch.testing.assert_close(got_entropy, want_entropy, atol=1e-10, rtol=0)
    weights = torch.linspace(-1, 2, len(got))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        if not b.requires_grad:
            assert a.grad is None
            continue
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=0, msg=name)
        assert b.grad.abs().max() > 1e-3, name


@pytest.mark.parametrize("passes", [1, 2])
def test_logits_exist_for_some_tokens_at_a_time(passes, monkeypatch):
    """Once, or in the backward pass once more, for the gradient of the head."""
    seen = []

    def watched(x, weight):
        seen.append(len(x))
        return linear_float32(x, weight)

    monkeypatch.setattr(model_module, "LOGITS_BYTES", 4 * VOCABULARY * 7)
    monkeypatch.setattr(model_module, "linear_float32", watched)
    model, ids = build(), torch.zeros(1, 31, dtype=torch.long)
    model.lm_head.weight.requires_grad_(passes == 2)
    model.logprobs(packed(ids, torch.ones_like(ids)))[0].sum().backward()
    assert seen == [7, 7, 7, 7, 2] * passes  # of 30


# --- checkpoints --------------------------------------------------------------------------

@pytest.fixture
def saved(tmp_path):
    build().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape, family", [*zip(SHAPES, ("qwen2", "qwen3"))])
def test_what_was_saved_is_loaded(shape, family, tmp_path):
    model = build(shape, model_type=family)
    model.save_pretrained(tmp_path)
    if not model.config.tie_word_embeddings:  # as a Llama's config may leave it out
        rewrite(tmp_path / "config.json", tie_word_embeddings=...)
    back = Decoder.from_pretrained(tmp_path)
    assert back.config == model.config and same(back, model)
    assert not same(build(shape, seed=1), model)


def test_a_tied_head_is_not_written_and_stays_tied_though_a_file_may_have_it(saved):
    tensors = load_file(saved / WEIGHTS)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding + 1}, saved / WEIGHTS)
    back = Decoder.from_pretrained(saved)
    assert same(back, build())
    assert back.lm_head.weight is back.model["embed_tokens"].weight


def test_weights_in_several_files_are_found_by_their_index(saved):
    names = sorted(tensors := load_file(saved / WEIGHTS))
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == part},
                  saved / part)
    (saved / WEIGHTS).unlink()
    (saved / INDEX).write_text(json.dumps({"weight_map": places}))
    assert same(Decoder.from_pretrained(saved), build())


def rewrite(path, **changes):
    """Change fields of a JSON file; `...` removes one."""
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


# --- checkpoints that cannot be read ------------------------------------------------------

@pytest.mark.parametrize("name, content", [
    ("config.json", None), ("config.json", b"{}"), (WEIGHTS, None), (WEIGHTS, b"half"),
    (INDEX, b"{")])
def test_a_file_that_is_gone_or_not_what_it_should_be_is_named(saved, name, content):
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=str(saved)):
        Decoder.from_pretrained(saved)


@pytest.mark.parametrize("field, value", [
    ("model_type", "qwen3_moe"), ("quantization_config", {"quant_method": "fp8"}),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("layer_types", ["linear_attention"] * 3),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 700.0}),
    ("hidden_size", ...)])
def test_what_the_decoder_does_not_do_is_refused_by_field(saved, field, value):
    rewrite(saved / "config.json", **{field: value})
    with pytest.raises(ValueError, match=f"config.json: .*{field}"):
        Decoder.from_pretrained(saved)


@pytest.mark.parametrize("name, tensor", [
    ("model.layers.1.mlp.up_proj.weight", None), ("model.norm.weight", torch.ones(25)),
    ("model.norm.weight", torch.ones(24).to(torch.float8_e4m3fn))])
def test_a_tensor_that_does_not_fit_is_named(saved, name, tensor):
    tensors = load_file(saved / WEIGHTS) | {name: tensor}
    save_file({n: w for n, w in tensors.items() if w is not None}, saved / WEIGHTS)
    with pytest.raises(ValueError, match=name):
        Decoder.from_pretrained(saved)


def test_logits_are_float32_where_layers_compute_in_bfloat16():
    """In training and in sampling: they are those of the exact product."""
    model = build().bfloat16()
    ids = torch.randint(0, model.config.vocab_size, (1, 30))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        rows = PackedLayout(ids[0].tolist(), [30], "cpu")
        hidden = model.hidden(ids, rows.positions[None], rows)[0, :-1].double()
        exact = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)
        got, _ = model.logprobs(packed(ids, mask))
        logits = linear_float32(hidden.bfloat16(), model.lm_head.weight)
    want = exact.gather(1, ids[0, 1:, None])[:, 0]
    # A sum of D products is off by at most D 2^-24 of the sum of their sizes, in a token's
    # logit and in the norm. This is 1e-5 here, and a bfloat16 logit would be off by 1e-2.
    sizes = hidden.abs() @ model.lm_head.weight.double().abs().T
    within = 2 * len(hidden[0]) * 2 ** -24 * sizes.max()
    assert (got.double() - want).abs().max() < within
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_an_ordered_weight_gives_the_same_products(rows):
    weight, new = torch.randn(2, 48, 70)
    x, bias = torch.randn(2, rows, 70), torch.randn(48)
    quick = torch.nn.Parameter(ordered(weight), requires_grad=False)
    for values in (weight, new):
        put(quick, values)
        torch.testing.assert_close(linear(x, quick, bias), x @ values.T + bias)
        torch.testing.assert_close(linear(x, quick), x @ values.T)
