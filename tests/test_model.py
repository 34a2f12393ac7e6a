"""The decoder: its arithmetic against a slow reference, log-probabilities, checkpoints."""
import gc
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_module
from lab import golden
from model import Qwen3, Qwen3Config
from runtime import hf
from runtime.attention import linear_float32

ROOT = Path(__file__).resolve().parent.parent
QWEN = ROOT.parent / "shared" / "qwen3-4b-base"
SHAPES = {  # heads, key/value heads, head_dim, tied
    "one key head per query head": (3, 3, 8, True),
    "four query heads per key head": (4, 1, 8, False),
    "head_dim unlike hidden over heads": (4, 2, 14, True),
    "wide heads, untied": (2, 1, 32, False),
}
TIED_AND_UNTIED = ["head_dim unlike hidden over heads", "wide heads, untied"]
VOCABULARY = 37


def build(shape="head_dim unlike hidden over heads", seed=0, **changes):
    """A small decoder in which every weight is random, those of the norms as well."""
    heads, kv_heads, head_dim, tied = SHAPES[shape]
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=64, rope_theta=700.0, rms_norm_eps=1e-3,
        tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model = Qwen3(Qwen3Config(**fields | changes))
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


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only wait for each other on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the forward pass ---------------------------------------------------------------------

def slow_norm(x, weight, eps):
    mean = sum(float(value) ** 2 for value in x) / len(x)
    return x / math.sqrt(mean + eps) * weight


def slow_rope(x, position, theta):
    """The numbers i and i + E/2 of a head are a point in the plane, turned by an angle."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def slow_attention(queries, keys, values):
    """Each query head over the positions up to its own; lists of heads by position."""
    group = len(queries[0]) // len(keys[0])
    outs = []
    for t in range(len(queries)):
        heads = []
        for h, query in enumerate(queries[t]):
            past = [keys[s][h // group] for s in range(t + 1)]
            scores = [float(query @ key) / math.sqrt(len(query)) for key in past]
            powers = [math.exp(score - max(scores)) for score in scores]
            heads.append(sum(power / sum(powers) * values[s][h // group]
                             for s, power in enumerate(powers)))
        outs.append(torch.cat(heads))
    return outs


def slow_logits(weights, c, ids):
    """For one row, by token and head, in float64, from the weights' names."""
    w = {name: weight.double() for name, weight in weights.items()}
    eps, E = c.rms_norm_eps, c.head_dim
    xs = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        queries, keys, values = [], [], []
        for t, x in enumerate(xs):
            x = slow_norm(x, w[at + "input_layernorm.weight"], eps)
            q, k, v = (w[f"{attention}{name}_proj.weight"] @ x for name in "qkv")
            if c.model_type == "qwen2":
                q, k, v = (y + w[f"{attention}{name}_proj.bias"]
                           for name, y in zip("qkv", (q, k, v)))
            q, k, v = (y.split(E) for y in (q, k, v))
            if c.model_type == "qwen3":
                q = [slow_norm(head, w[attention + "q_norm.weight"], eps) for head in q]
                k = [slow_norm(head, w[attention + "k_norm.weight"], eps) for head in k]
            queries.append([slow_rope(head, t, c.rope_theta) for head in q])
            keys.append([slow_rope(head, t, c.rope_theta) for head in k])
            values.append(v)
        for t, out in enumerate(slow_attention(queries, keys, values)):
            x = xs[t] + w[attention + "o_proj.weight"] @ out
            y = slow_norm(x, w[at + "post_attention_layernorm.weight"], eps)
            gate = w[mlp + "gate_proj.weight"] @ y
            gate = gate / (1 + (-gate).exp())
            up = w[mlp + "up_proj.weight"] @ y
            xs[t] = x + w[mlp + "down_proj.weight"] @ (gate * up)
    head = w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return torch.stack([head @ slow_norm(x, w["model.norm.weight"], eps) for x in xs])


@pytest.mark.parametrize("family", hf.FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_definition_written_out_in_loops(shape, family):
    model = build(shape, model_type=family)
    ids = some_ids(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with torch.no_grad():
        got = model(ids)
    for row in range(2):
        want = slow_logits(weights, model.config, ids[row].tolist()).float()
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)


def test_a_token_changes_no_logits_before_it():
    model = build()
    ids = some_ids(model)
    other = ids.clone()
    other[:, 6] = (ids[:, 6] + 1) % VOCABULARY
    with torch.no_grad():
        a, b = model(ids), model(other)
    torch.testing.assert_close(a[:, :6], b[:, :6], atol=1e-6, rtol=0)
    assert (a[:, 6:] - b[:, 6:]).abs().amax((0, 2)).min() > 1e-4


def test_recomputing_layers_changes_no_gradient():
    plain, again = build(), build()
    again.recompute = True
    ids, calls = some_ids(plain), []
    block = again.model["layers"][1]
    block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, again):
        model.logprobs(ids, masked(ids))[0].sum().backward()
    assert len(calls) == 2  # forward, and once more in the backward pass
    for (name, a), b in zip(plain.named_parameters(), again.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-6, msg=name)
    with torch.no_grad():
        again(ids)
    assert len(calls) == 3  # nothing to recompute without a backward pass


# --- against transformers -----------------------------------------------------------------

def golden_file(name):
    with safe_open(ROOT / "tests" / "golden" / f"{name}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["config"]) == golden.CONFIGS[name]
        return {key: file.get_tensor(key) for key in file.keys()}


def ours(name, folder, dtype=torch.float32):
    """The golden model through a checkpoint directory like those of transformers."""
    (folder / "config.json").write_text(json.dumps(golden.CONFIGS[name]))
    save_file(golden.weights(golden.CONFIGS[name]), folder / "model.safetensors")
    return Qwen3.from_pretrained(folder, dtype)


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_logits_and_greedy_tokens_are_those_that_transformers_gave(name, tmp_path):
    want, model = golden_file(name), ours(name, tmp_path)
    with torch.no_grad():
        got = model(want["ids"])
        half = ours(name, tmp_path, torch.bfloat16)(want["ids"])
    assert distance(got, want["logits"]) < 1e-5
    assert (got - want["logits"]).abs().max() < 1e-4 * want["logits"].abs().max()
    assert distance(half, want["logits_bf16"]) < 2e-2
    theirs = distance(want["logits_bf16"], want["logits"])
    assert distance(half, want["logits"]) < 1.1 * theirs  # rounding hurts no more here
    tokens, _ = golden.greedy(model, want["ids"][0, :golden.PROMPT].tolist())
    ties = [i for i, gap in enumerate(want["ahead"].tolist()) if gap < 1e-4]
    end = min(ties, default=None)  # after a tie either token is right
    assert tokens[:end] == want["greedy"].tolist()[:end]


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_the_installed_transformers_agrees_and_reads_what_is_written(name, tmp_path,
                                                                     monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(hf, "SHARD_BYTES", 200_000)
    want, model = golden_file(name), ours(name, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path / "saved", torch_dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    reference = golden.reference(golden.CONFIGS[name])
    with torch.no_grad():
        assert distance(reference(want["ids"]).logits, want["logits"]) < 1e-5
        assert distance(theirs(want["ids"]).logits, want["logits"]) < 1e-5
        back = Qwen3.from_pretrained(tmp_path / "theirs")
        assert torch.equal(back(want["ids"]), model(want["ids"]))


# --- log-probabilities --------------------------------------------------------------------

def plain_logprobs(model, ids, mask):
    """What `logprobs` promises, from all logits at once."""
    all_BTV = model(ids)[:, :-1].log_softmax(-1)
    chosen = all_BTV.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(all_BTV.exp() * all_BTV).sum(-1)
    wanted = mask[:, 1:].bool()
    return chosen[wanted], entropy[wanted]


@pytest.mark.parametrize("shape", TIED_AND_UNTIED)
@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_logprobs_entropy_and_gradients_are_those_of_the_full_logits(chunk, shape):
    model, plain = build(shape), build(shape)
    ids = some_ids(model, rows=3)
    mask = masked(ids)
    got, got_entropy = model.logprobs(ids, mask, chunk=chunk)
    want, want_entropy = plain_logprobs(plain, ids, mask)
    assert got.shape == got_entropy.shape == (int(mask.sum()),)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropy, want_entropy, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 2, len(got))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5, msg=name)
        assert b.grad.abs().max() > 1e-3, name


class Largest(TorchDispatchMode):
    """Notes the tensors that operations make: how many rows of logits each has, and which
    operations make one of the head's shape."""

    def __init__(self):
        super().__init__()
        self.rows, self.weights = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = ("aten.t.default", "aten.permute.default", "aten.detach.default")
        made = isinstance(out, torch.Tensor) and str(func) not in views
        if made and out.shape[-1:] == (VOCABULARY,):
            self.rows.append(out.shape.numel() // VOCABULARY)
        if made and out.shape[:1] == (VOCABULARY,):
            self.weights.append(str(func))
        return out


def test_logits_exist_for_at_most_chunk_tokens_and_the_head_has_one_gradient(monkeypatch):
    model = build("wide heads, untied")
    ids = some_ids(model, rows=3)
    with Largest() as seen:
        logprobs, _ = model.logprobs(ids, torch.ones_like(ids), chunk=7)
        assert seen.rows and max(seen.rows) == 7
        seen.weights.clear()
        logprobs.sum().backward()
    assert max(seen.rows) == 7
    # one tensor for the head, to which each of five chunks adds in place; the embedding's
    assert sorted(w for w in seen.weights if "addmm_" not in w) == [
        "aten.embedding_dense_backward.default", "aten.zeros_like.default"]
    assert sum("addmm_" in w for w in seen.weights) == 5
    monkeypatch.setattr(model_module, "LOGITS_BYTES", 4 * VOCABULARY * 5)
    with Largest() as seen:
        model.logprobs(ids, torch.ones_like(ids))  # the default chunk
    assert max(seen.rows) == 5


HEAD_MEMORY = """
import sys, torch
from model import HeadLogprobs, LOGITS_BYTES
N, D, V, twice = (int(x) for x in sys.argv[1:])
def memory(field):
    lines = open("/proc/self/status")
    return next(int(x.split()[1]) for x in lines if x.startswith(field)) << 10
x = torch.randn(N, D).requires_grad_()
w = torch.randn(V, D).mul_(D ** -0.5).requires_grad_()
y = torch.randint(V, (N,))
HeadLogprobs.apply(x[:9], w, y[:9], 4)[0].sum().backward()  # what torch itself takes
if not twice:
    w.grad = x.grad = None
before = memory("VmRSS") + (0 if twice else w.nbytes + x.nbytes)  # weights and gradients
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
HeadLogprobs.apply(x, w, y, LOGITS_BYTES // (4 * V))[0].sum().backward()
print(memory("VmHWM") - before)
"""


def in_a_process(code, *args):
    """What this code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], text=True,
                          cwd=ROOT, capture_output=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("twice", [0, 1])
def test_the_head_of_qwen3_over_8k_tokens_takes_less_than_a_gigabyte(twice):
    """Beyond weights and gradients; `twice`: this gradient is added to an earlier one."""
    extra = in_a_process(HEAD_MEMORY, 8192, 1024, 151_936, twice)
    print(f"{extra / 1e9:.2f} GB")
    assert extra < 1e9


def test_right_padding_and_neighbours_do_not_change_the_logprobs_of_a_row():
    model = build()
    rows = [some_ids(model, 1, length, seed=length)[0] for length in (9, 2, 5)]
    ids, mask = torch.full((3, 13), 5), torch.zeros(3, 13, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = row
        mask[i, 1:len(row)] = 1
    with torch.no_grad():
        together = model.logprobs(ids, mask)
        alone = [model.logprobs(row[None], torch.ones(1, len(row))) for row in rows]
    for got, want in zip(together, zip(*alone)):
        torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=0)


def test_a_mask_without_ones_gives_no_logprobs():
    model = build()
    got, entropy = model.logprobs(some_ids(model), torch.zeros(2, 11))
    assert got.shape == entropy.shape == (0,)
    got.sum().backward()


# --- checkpoints --------------------------------------------------------------------------

@pytest.fixture
def saved(tmp_path):
    build().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", hf.FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_saved_is_loaded(shape, family, tmp_path):
    model = build(shape, model_type=family)
    model.save_pretrained(tmp_path)
    back = Qwen3.from_pretrained(tmp_path)
    assert back.config == model.config and same(back, model)
    assert not same(build(shape, seed=1), model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, w in back.named_parameters() if w.requires_grad] == names
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["config.json", "model.safetensors"]


def test_a_tied_head_is_not_written_and_stays_tied_though_a_file_may_have_it(saved):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    for _ in range(2):
        back = Qwen3.from_pretrained(saved)
        assert same(back, build())
        assert back.lm_head.weight is back.model["embed_tokens"].weight
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file)


@pytest.mark.parametrize("shape", TIED_AND_UNTIED)
def test_shards_hold_at_most_their_size_and_nothing_of_them_outlives_a_later_save(
        shape, tmp_path, monkeypatch):
    model = build(shape)
    with monkeypatch.context() as patch:
        patch.setattr(hf, "SHARD_BYTES", 12_000)
        model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    places = {name: file for file, tensors in files.items() for name in tensors}
    assert places == index["weight_map"]
    sizes = [[tensor.nbytes for tensor in tensors.values()] for tensors in files.values()]
    assert all(sum(size) <= 12_000 or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert same(Qwen3.from_pretrained(tmp_path), model)
    other = build(shape, seed=1)
    other.save_pretrained(tmp_path)
    assert same(Qwen3.from_pretrained(tmp_path), other)


def test_the_dtype_asked_for_is_the_one_computed_in_and_saved(saved, tmp_path):
    half = Qwen3.from_pretrained(saved, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert half(some_ids(half)).dtype == torch.bfloat16
    half.save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert same(Qwen3.from_pretrained(tmp_path / "b", dtype=torch.bfloat16), half)


def rewrite(path, **changes):
    """Change fields of a JSON file; `...` removes one."""
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 700.0},
    {"rope_theta": ..., "rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 700.0}},
    {"rope_theta": ..., "rope_parameters": {"rope_theta": 700, "rope_type": "default"},
     "rope_scaling": {"type": "default"}}])
def test_rope_theta_is_read_in_all_spellings(spelling, saved):
    rewrite(saved / "config.json", **spelling)
    back = Qwen3.from_pretrained(saved)
    assert back.config.rope_theta == 700 and same(back, build())
    rewrite(saved / "config.json", rope_theta=900.0)
    assert not same(Qwen3.from_pretrained(saved), build())  # it does reach the logits


def test_a_field_that_is_null_is_a_missing_field(tmp_path):
    model = build("wide heads, untied", hidden_size=64)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", head_dim=None, tie_word_embeddings=None,
            layer_types=["full_attention"] * 3)
    assert same(Qwen3.from_pretrained(tmp_path), model)


@pytest.mark.skipif(not QWEN.exists(), reason="needs ../shared/qwen3-4b-base")
def test_qwen3_4b_has_its_parameters_under_their_names():
    with torch.device("meta"):
        model = Qwen3(Qwen3Config.read(str(QWEN / "config.json")))
    assert sum(weight.numel() for weight in model.parameters()) == 4_022_468_096
    index = json.loads((QWEN / "model.safetensors.index.json").read_text())
    names = {name for name, _ in model.named_parameters()}
    assert names == set(index["weight_map"]) - {"lm_head.weight"}


LOAD_MEMORY = """
import sys, threading, torch
from model import Qwen3
def anonymous():
    lines = open("/proc/self/status")
    return next(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.001):
        peak = max(peak, anonymous())
Qwen3.from_pretrained(sys.argv[3])  # what torch loads when first used
before, thread = anonymous(), threading.Thread(target=watch)
thread.start()
model = Qwen3.from_pretrained(sys.argv[1], getattr(torch, sys.argv[2]))
over.set(), thread.join()
print(((max(peak, anonymous()) - before) << 10) / sum(w.nbytes for w in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [
    pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_loading_takes_hardly_more_memory_than_the_weights(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 16 << 20)
    large = build(vocab_size=30_000, hidden_size=512, intermediate_size=1536,
                  num_hidden_layers=8)
    large.bfloat16().save_pretrained(tmp_path)
    build().save_pretrained(tmp_path / "small")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ratio = in_a_process(LOAD_MEMORY, tmp_path, dtype, tmp_path / "small")
    assert 0.9 < ratio < 1.15


def test_weights_do_not_change_with_the_file_they_came_from(saved):
    back = Qwen3.from_pretrained(saved)
    file = saved / "model.safetensors"
    with open(file, "r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        raw.write(b"\xff" * 1000)
    assert same(back, build())


def test_a_model_is_freed_with_its_last_name(saved):
    """Without the garbage collector: a cycle would keep an old model beside the new one."""
    gc.collect()
    gc.disable()
    try:
        model = Qwen3.from_pretrained(saved, prepare=lambda model: model.add_lora(2, 32.0))
        model.recompute = True
        ids = some_ids(model)
        model.logprobs(ids, masked(ids))[0].sum().backward()
        copy = model.merged_copy()
        held = [weakref.ref(part) for each in (model, copy)
                for part in (each, each.lm_head.weight, each.model["layers"][0])]
        del model, copy
        assert [ref() for ref in held] == [None] * 6
    finally:
        gc.enable()


def test_a_broken_tie_is_noticed():
    model = build()
    model.check_tie()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="tied"):
        model.check_tie()


# --- checkpoints that cannot be read ------------------------------------------------------

def refusal(path):
    """The one line with which a directory is refused."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        Qwen3.from_pretrained(str(path))
    assert type(caught.value) in (ValueError, FileNotFoundError)  # no subclass
    line = str(caught.value)
    assert line and "\n" not in line and len(line) < 1500
    return line


def edit(path, changes):
    """Change tensors of a file; None removes one."""
    tensors = load_file(path) | changes
    save_file({name: w for name, w in tensors.items() if w is not None}, path)


INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("name, content, words", [
    ("config.json", None, ""),
    *(("config.json", text, "JSON") for text in (b"", b"{", b"\xff\xfe{}", b"nothing")),
    *(("config.json", text, "model_type is None") for text in (b"[]", b"null", b"{}")),
    (WEIGHTS, None, "missing (1 of 1 files)"),
    *((INDEX, text, "") for text in (
        b"", b"{", b"\xff", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}',
        b'{"weight_map": null}', b'{"weight_map": {"model.norm.weight": 3}}',
        b'{"weight_map": {"model.norm.weight": ["a"]}}'))])
def test_a_file_that_is_gone_or_not_what_it_should_be_is_named(saved, name, content, words):
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(content)
    line = refusal(saved)
    assert str(saved / name) in line and words in line


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(saved, keep):
    data = (saved / WEIGHTS).read_bytes()
    end = keep if isinstance(keep, int) else int(keep * len(data))
    (saved / WEIGHTS).write_bytes(data[:end])
    assert str(saved / WEIGHTS) in refusal(saved)


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("field, value", [
    *(("model_type", kind) for kind in ("qwen3_moe", "qwen3_5", "gemma3", "mistral")),
    ("quantization_config", {"quant_method": "fp8"}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("layer_types", "sliding_attention"),
    ("layer_types", [{}]),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("hidden_act", "gelu"),
    ("rope_scaling", YARN),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", "default"),
    ("rope_parameters", YARN | {"rope_theta": 700.0}),
    ("head_dim", 7),
    ("hidden_size", 0),
    ("num_hidden_layers", "3"),
    ("rope_theta", 0),
    ("num_key_value_heads", 3),
    *((field, ...) for field in ("vocab_size", "hidden_size", "intermediate_size",
                                 "num_hidden_layers", "num_attention_heads",
                                 "num_key_value_heads", "rope_theta"))])
def test_what_the_decoder_does_not_do_is_refused_by_field(saved, field, value):
    rewrite(saved / "config.json", **{field: value})
    line = refusal(saved)
    assert str(saved / "config.json") in line and field in line
    if field == "model_type":
        assert value in line and "llama, qwen2, qwen3" in line


def test_rope_scaling_is_refused_beside_default_rope_parameters(saved):
    rewrite(saved / "config.json", rope_scaling=YARN,
            rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    assert "rope_scaling" in refusal(saved)


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 12_000)
    build().save_pretrained(tmp_path)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight",
                 "model.layers.0.self_attn.k_norm.weight"):
        edit(tmp_path / places[name], {name: None})
    norm = tmp_path / places["model.norm.weight"]
    gate = tmp_path / places["model.layers.0.mlp.gate_proj.weight"]
    edit(norm, {"model.norm.weight": torch.ones(25),
                "model.layers.0.self_attn.q_proj.bias": torch.ones(3)})
    edit(gate, {"model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2),
                "extra.weight": torch.ones(1)})
    line = refusal(tmp_path)
    for words in (f"{norm}: model.norm.weight has shape (25,), the model has (24,)",
                  f"{gate}: model.layers.0.mlp.gate_proj.weight has shape (2, 2)",
                  f"{norm}: unexpected model.layers.0.self_attn.q_proj.bias",
                  f"{gate}: unexpected extra.weight",
                  f"{tmp_path}: missing model.layers.1,2.mlp.up_proj.weight, "
                  "model.layers.0.self_attn.k_norm.weight"):
        assert words in line


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_quantised_tensors_are_refused_whatever_the_config_says(saved, dtype):
    edit(saved / WEIGHTS, {"model.norm.weight": torch.ones(24).to(dtype)})
    line = refusal(saved)
    assert str(saved / WEIGHTS) in line and "model.norm.weight" in line
    assert "supported are BF16, F16, F32" in line


@pytest.mark.parametrize("name, advice", [
    ("Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
    ("Qwen2.5-0.5B", "hf download OWNER/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"),
    ("./Qwen3-4B", "hf download OWNER/Qwen3-4B --local-dir Qwen3-4B"),
    ("/no/such/place", None),
])
def test_a_name_that_is_no_directory_comes_with_the_command_that_downloads_it(name, advice):
    line = refusal(name)
    assert line.startswith(f"{name}: no such model directory")
    assert line.endswith(f"to download it: {advice}" if advice else "directory")


def test_a_missing_directory_head_or_shard_is_named(tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    assert refusal(nowhere) == f"{nowhere}: no such model directory"
    build("wide heads, untied").save_pretrained(tmp_path)
    edit(tmp_path / WEIGHTS, {"lm_head.weight": None})
    assert "lm_head.weight" in refusal(tmp_path)
    monkeypatch.setattr(hf, "SHARD_BYTES", 12_000)
    build().save_pretrained(tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in refusal(tmp_path)


def test_a_gguf_file_is_no_checkpoint(saved):
    (saved / WEIGHTS).rename(saved / "model-q4.gguf")
    line = refusal(saved)
    assert str(saved / "model-q4.gguf") in line and "only those are read" in line
    line = refusal(saved / "model-q4.gguf")
    assert line.startswith(f"{saved / 'model-q4.gguf'}: a file") and "GGUF" in line
    (saved / "config.json").unlink()
    line = refusal(saved)
    assert line.startswith(f"{saved / 'config.json'}: missing")
    assert str(saved / "model-q4.gguf") in line


def test_an_adapter_is_no_checkpoint(tmp_path):
    build().add_lora(1, 32.0).save_adapter(tmp_path, "base")
    line = refusal(tmp_path)
    assert str(tmp_path / "config.json") in line and "adapter_config.json" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_layers_compute_in(dtype):
    """In training and in sampling: they are those of the exact product."""
    model = build().to(dtype)
    ids = torch.randint(0, model.config.vocab_size, (1, 30))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        hidden = model.hidden(ids)[0, :-1].double()
        exact = (hidden @ model.lm_head.weight.double().T).log_softmax(-1)
        got, _ = model.logprobs(ids, mask)
    want = exact.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    logits = linear_float32(hidden.to(dtype), model.lm_head.weight)
    assert logits.dtype == torch.float32
