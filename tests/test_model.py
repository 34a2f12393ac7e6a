"""The decoder: its arithmetic against a slow reference, its log-probabilities, its checkpoints."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "golden")]

import make  # noqa: E402
import model as model_module  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402

QWEN = ROOT.parent / "shared" / "qwen3-4b-base"
SHAPES = {  # heads, key/value heads, head_dim, tied
    "one key head a query head": (3, 3, 8, True),
    "four query heads a key head": (4, 1, 8, False),
    "head_dim unlike hidden over heads": (4, 2, 14, True),
    "wide heads, untied": (2, 1, 32, False),
}


def build(shape="head_dim unlike hidden over heads", seed=0, **changes):
    """A small decoder in which every weight is random, those of the norms as well."""
    heads, kv_heads, head_dim, tied = SHAPES[shape]
    config = Qwen3Config(**{**dict(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=64, rope_theta=700.0, rms_norm_eps=1e-3,
        tie_word_embeddings=tied), **changes})
    torch.manual_seed(seed)
    model = Qwen3(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return model


def some_ids(model, rows=2, length=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only wait for each other on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the forward pass ------------------------------------------------------------------------

def slow_norm(x, weight, eps):
    mean = sum(float(value) ** 2 for value in x) / len(x)
    return x / math.sqrt(mean + eps) * weight


def slow_rope(x, position, theta):
    """Number i of a head and number i + E/2 are a point in the plane, turned by an angle."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def slow_logits(weights, c, ids):
    """Qwen3 for one row, token by token and head by head in float64, from the weights' names."""
    w = {name: weight.double() for name, weight in weights.items()}
    E, group = c.head_dim, c.num_attention_heads // c.num_key_value_heads
    xs = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        attention, mlp = p + "self_attn.", p + "mlp."
        keys, values, queries = [], [], []
        for t, x in enumerate(xs):
            x = slow_norm(x, w[p + "input_layernorm.weight"], c.rms_norm_eps)
            q = (w[attention + "q_proj.weight"] @ x).split(E)
            k = (w[attention + "k_proj.weight"] @ x).split(E)
            q = [slow_norm(head, w[attention + "q_norm.weight"], c.rms_norm_eps) for head in q]
            k = [slow_norm(head, w[attention + "k_norm.weight"], c.rms_norm_eps) for head in k]
            queries.append([slow_rope(head, t, c.rope_theta) for head in q])
            keys.append([slow_rope(head, t, c.rope_theta) for head in k])
            values.append((w[attention + "v_proj.weight"] @ x).split(E))
        for t in range(len(xs)):
            heads = []
            for h in range(c.num_attention_heads):
                g = h // group
                scores = [float(queries[t][h] @ keys[s][g]) / math.sqrt(E) for s in range(t + 1)]
                powers = [math.exp(score - max(scores)) for score in scores]
                heads.append(sum(power / sum(powers) * values[s][g]
                                 for s, power in enumerate(powers)))
            x = xs[t] + w[attention + "o_proj.weight"] @ torch.cat(heads)
            y = slow_norm(x, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = w[mlp + "gate_proj.weight"] @ y
            gate = gate / (1 + (-gate).exp())
            xs[t] = x + w[mlp + "down_proj.weight"] @ (gate * (w[mlp + "up_proj.weight"] @ y))
    head = w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
    return torch.stack([head @ slow_norm(x, w["model.norm.weight"], c.rms_norm_eps) for x in xs])


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_definition_written_out_in_loops(shape):
    model = build(shape)
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
    other[:, 6] = (ids[:, 6] + 1) % 37
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
        model.logprobs(ids, masked(model, ids))[0].sum().backward()
    assert len(calls) == 2  # forward, and once more in the backward pass
    for (name, a), b in zip(plain.named_parameters(), again.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-6, msg=name)
    with torch.no_grad():
        again(ids)
    assert len(calls) == 3  # nothing to recompute without a backward pass


# --- against transformers --------------------------------------------------------------------

def golden(name):
    with safe_open(ROOT / "tests" / "golden" / f"{name}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["config"]) == make.CONFIGS[name]
        return {key: file.get_tensor(key) for key in file.keys()}


def ours(name, folder, dtype=torch.float32):
    """The golden model through a checkpoint directory as transformers would have written it."""
    (folder / "config.json").write_text(json.dumps(make.CONFIGS[name]))
    save_file(make.weights(make.CONFIGS[name]), folder / "model.safetensors")
    return Qwen3.from_pretrained(folder, dtype)


def distance(a, b):
    """The relative difference of two tensors, in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def same_greedy(tokens, want, ahead):
    """Equal up to the first place where the two best logits are a tie."""
    ties = [i for i, gap in enumerate(ahead) if gap < 1e-4]
    return tokens[:min(ties, default=None)] == want[:min(ties, default=None)]


@pytest.mark.parametrize("name", make.CONFIGS)
def test_logits_and_greedy_tokens_are_those_that_transformers_gave(name, tmp_path):
    want, model = golden(name), ours(name, tmp_path)
    with torch.no_grad():
        got = model(want["ids"])
        half = ours(name, tmp_path, torch.bfloat16)(want["ids"])
    assert distance(got, want["logits"]) < 1e-5
    assert (got - want["logits"]).abs().max() < 1e-4 * want["logits"].abs().max()
    assert distance(half, want["logits_bf16"]) < 2e-2
    # rounding hurts no more here than there
    assert distance(half, want["logits"]) < 1.1 * distance(want["logits_bf16"], want["logits"])
    tokens, _ = make.greedy(model, want["ids"][0, :make.PROMPT].tolist())
    assert same_greedy(tokens, want["greedy"].tolist(), want["ahead"].tolist())


def test_the_golden_files_cover_what_they_should():
    c = list(make.CONFIGS.values())
    assert len(c) >= 6 and {x["tie_word_embeddings"] for x in c} == {True, False}
    assert {x["num_attention_heads"] / x["num_key_value_heads"] for x in c} >= {1, 2, 4, 8}
    assert {x["head_dim"] for x in c} == {64, 128}
    assert {x["rope_theta"] for x in c} == {1e4, 1e6, 5e6}
    assert all(x["head_dim"] * x["num_attention_heads"] != x["hidden_size"] for x in c)
    files = list((ROOT / "tests" / "golden").glob("*.safetensors"))
    assert {f.stem for f in files} == set(make.CONFIGS)
    assert sum(f.stat().st_size for f in files) < 2_000_000


@pytest.mark.parametrize("name", make.CONFIGS)
def test_the_installed_transformers_agrees_and_reads_what_is_written(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    want, model = golden(name), ours(name, tmp_path)
    with torch.no_grad():
        assert distance(make.reference(make.CONFIGS[name])(want["ids"]).logits,
                        want["logits"]) < 1e-5
        monkeypatch.setattr(model_module, "SHARD_BYTES", 200_000)
        model.save_pretrained(tmp_path / "saved")
        theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "saved",
                                                               torch_dtype=torch.float32).eval()
        assert distance(theirs(want["ids"]).logits, want["logits"]) < 1e-5
        theirs.save_pretrained(tmp_path / "theirs")
        assert torch.equal(Qwen3.from_pretrained(tmp_path / "theirs")(want["ids"]),
                           model(want["ids"]))


# --- log-probabilities -----------------------------------------------------------------------

def masked(model, ids, seed=2):
    mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.6).long()
    mask[:, 0] = 0
    return mask


def plain_logprobs(model, ids, mask):
    """What `logprobs` promises, from all logits at once."""
    all_BTV = model(ids)[:, :-1].log_softmax(-1)
    chosen = all_BTV.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(all_BTV.exp() * all_BTV).sum(-1)
    wanted = mask[:, 1:].bool()
    return chosen[wanted], entropy[wanted]


@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_logprobs_entropy_and_gradients_are_those_of_the_full_logits_for_any_chunk(chunk):
    for shape in ("head_dim unlike hidden over heads", "wide heads, untied"):
        ours, plain = build(shape), build(shape)
        ids = some_ids(ours, rows=3)
        mask = masked(ours, ids)
        got, got_entropy = ours.logprobs(ids, mask, chunk=chunk)
        want, want_entropy = plain_logprobs(plain, ids, mask)
        assert got.shape == got_entropy.shape == (int(mask.sum()),)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got_entropy, want_entropy, atol=1e-5, rtol=1e-5)
        weights = torch.linspace(-1, 2, len(got))
        (got * weights).sum().backward()
        (want * weights).sum().backward()
        for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters()):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5, msg=name)
            assert b.grad.abs().max() > 1e-3, name


class Largest(TorchDispatchMode):
    """Notes how many rows of V numbers the tensors have that operations make."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows, self.weights = vocabulary, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = ("aten.t.default", "aten.permute.default", "aten.detach.default")
        made = isinstance(out, torch.Tensor) and str(func) not in views
        if made and out.shape[-1:] == (self.vocabulary,):
            self.rows.append(out.shape.numel() // self.vocabulary)
        if made and out.shape[:1] == (self.vocabulary,):
            self.weights.append(str(func))
        return out


def test_logits_exist_for_at_most_chunk_tokens_and_the_head_has_one_gradient():
    model = build("wide heads, untied")
    ids = some_ids(model, rows=3)
    with Largest(37) as seen:
        logprobs, _ = model.logprobs(ids, torch.ones_like(ids), chunk=7)
        assert seen.rows and max(seen.rows) == 7
        seen.weights.clear()
        logprobs.sum().backward()
    assert max(seen.rows) == 7
    # one tensor for the head, to which each of five chunks adds in place; the embedding's
    assert sorted(w for w in seen.weights if "addmm_" not in w) == [
        "aten.embedding_dense_backward.default", "aten.zeros_like.default"]
    assert sum("addmm_" in w for w in seen.weights) == 5


def test_the_default_chunk_holds_its_bytes(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS_BYTES", 4 * 37 * 5)
    model = build()
    with Largest(37) as seen:
        model.logprobs(some_ids(model, 3), torch.ones(3, 11))
    assert max(seen.rows) == 5


HEAD_MEMORY = """
import sys, torch
from model import HeadLogprobs, LOGITS_BYTES
N, D, V, twice = (int(x) for x in sys.argv[1:])
def memory(field):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(field)) << 10
x, w = torch.randn(N, D).requires_grad_(), torch.randn(V, D).mul_(D ** -0.5).requires_grad_()
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
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("twice", [0, 1])
def test_the_head_of_qwen3_over_8k_tokens_takes_less_than_a_gigabyte(twice):
    """Beyond weights and gradients; `twice`: with a gradient there to which this one is added."""
    (extra,) = in_a_process(HEAD_MEMORY, 8192, 1024, 151_936, twice)
    print(f"{int(extra) / 1e9:.2f} GB")
    assert int(extra) < 1e9


def test_right_padding_and_neighbours_do_not_change_the_logprobs_of_a_row():
    model = build()
    rows = [some_ids(model, 1, length, seed=length)[0] for length in (9, 2, 5)]
    ids, mask = torch.full((3, 13), 5), torch.zeros(3, 13, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = row
        mask[i, 1:len(row)] = 1
    with torch.no_grad():
        together, entropy = model.logprobs(ids, mask)
        alone = [model.logprobs(row[None], torch.ones(1, len(row))) for row in rows]
    torch.testing.assert_close(together, torch.cat([a for a, _ in alone]), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.cat([e for _, e in alone]), atol=1e-5, rtol=0)


def test_a_mask_without_ones_gives_no_logprobs():
    model = build()
    got, entropy = model.logprobs(some_ids(model), torch.zeros(2, 11))
    assert got.shape == entropy.shape == (0,)


# --- checkpoints -----------------------------------------------------------------------------

def same(a, b):
    ids = some_ids(a)
    with torch.no_grad():
        return torch.equal(a(ids), b(ids))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_saved_is_loaded(shape, tmp_path):
    model = build(shape)
    model.save_pretrained(tmp_path)
    back = Qwen3.from_pretrained(tmp_path)
    assert back.config == model.config and same(back, model)
    assert not same(build(shape, seed=1), model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, weight in back.named_parameters() if weight.requires_grad] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tied_head_is_not_written_and_stays_tied_when_read(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    back = Qwen3.from_pretrained(tmp_path)
    assert back.lm_head.weight is back.model["embed_tokens"].weight


def test_a_tied_checkpoint_may_ship_its_head(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    back = Qwen3.from_pretrained(tmp_path)
    assert same(back, model)
    assert back.lm_head.weight is back.model["embed_tokens"].weight


@pytest.mark.parametrize("shape", ["head_dim unlike hidden over heads", "wide heads, untied"])
def test_shards_hold_at_most_their_size_and_are_read_back(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "SHARD_BYTES", 12_000)
    model = build(shape)
    model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert {k: v for v, tensors in files.items() for k in tensors} == index["weight_map"]
    sizes = [[tensor.nbytes for tensor in tensors.values()] for tensors in files.values()]
    assert all(sum(size) <= 12_000 or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert same(Qwen3.from_pretrained(tmp_path), model)


def test_saving_over_a_sharded_checkpoint_leaves_nothing_of_it_to_be_read(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "SHARD_BYTES", 12_000)
        build(seed=1).save_pretrained(tmp_path)
    model = build()
    model.save_pretrained(tmp_path)
    assert same(Qwen3.from_pretrained(tmp_path), model)


def test_the_dtype_asked_for_is_the_one_computed_in_and_saved(tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "a")
    half = Qwen3.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert half(some_ids(half)).dtype == torch.bfloat16
    half.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert same(Qwen3.from_pretrained(tmp_path / "b", dtype=torch.bfloat16), half)


def rewrite(path, **changes):
    """Change fields of a JSON file; None removes one."""
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 700.0},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 700, "rope_type": "default"},
     "rope_scaling": {"type": "default"}}])
def test_rope_theta_is_read_in_both_spellings(spelling, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", **spelling)
    back = Qwen3.from_pretrained(tmp_path)
    assert back.config.rope_theta == 700 and same(back, model)
    rewrite(tmp_path / "config.json", rope_theta=900.0, rope_parameters=None)
    assert not same(Qwen3.from_pretrained(tmp_path), model)  # it does reach the logits


def test_a_null_in_a_config_is_a_missing_field(tmp_path):
    model = build("wide heads, untied", hidden_size=64)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "head_dim": None, "rope_theta": None,
                                  "rope_parameters": {"rope_theta": 700.0}}))
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
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("RssAnon"))
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_loading_takes_hardly_more_memory_than_the_weights(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "SHARD_BYTES", 16 << 20)
    build(vocab_size=30_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8
          ).bfloat16().save_pretrained(tmp_path)
    build().save_pretrained(tmp_path / "small")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (ratio,) = in_a_process(LOAD_MEMORY, tmp_path, dtype, tmp_path / "small")
    assert 0.9 < float(ratio) < 1.15


def test_weights_do_not_change_with_the_file_they_came_from(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    back = Qwen3.from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        raw.write(b"\xff" * 1000)
    assert same(back, model)


SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from model import Qwen3
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[3]),
                        world_size=2)
model = Qwen3.from_pretrained(sys.argv[1])
ids = torch.arange(20).view(2, 10)
want = model(ids).detach()
for block in model.model["layers"]:
    fully_shard(block)
fully_shard(model)
model.check_tie()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
got = model(ids)
assert torch.allclose(got, want, atol=1e-5), (got - want).abs().max()
got.square().mean().backward()
optimizer.step()
model.check_tie()
assert not torch.allclose(model(ids), want, atol=1e-3)
model.reshard()
head, table = model.lm_head.weight.full_tensor(), model.model["embed_tokens"].weight.full_tensor()
assert torch.equal(head, table)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_tie_survives_sharding_over_two_ranks_and_a_step(tmp_path):
    build().save_pretrained(tmp_path / "model")
    ranks = [subprocess.Popen([sys.executable, "-c", SHARDED, tmp_path / "model", tmp_path / "meet",
                               str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}) for rank in range(2)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_broken_tie_is_noticed():
    model = build()
    model.check_tie()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="tied"):
        model.check_tie()


# --- checkpoints that cannot be read ---------------------------------------------------------

def refusal(path):
    """The one line with which a directory is refused."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        Qwen3.from_pretrained(str(path))
    assert type(caught.value) in (ValueError, FileNotFoundError)  # no subclass that says less
    line = str(caught.value)
    assert line and "\n" not in line and len(line) < 1500
    return line


@pytest.fixture
def saved(tmp_path):
    build().save_pretrained(tmp_path)
    return tmp_path


def test_everything_that_does_not_fit_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "SHARD_BYTES", 12_000)
    build().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    lost = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight",
            "model.layers.0.self_attn.k_norm.weight"]
    for name in lost:
        edit(tmp_path / index[name], lambda t, name=name: t.pop(name))
    norm = tmp_path / index["model.norm.weight"]
    gate = tmp_path / index["model.layers.0.mlp.gate_proj.weight"]
    edit(norm, lambda t: t.update({"model.norm.weight": torch.ones(25)}))
    edit(norm, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(3)}))
    edit(gate, lambda t: t.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2),
                                   "extra.weight": torch.ones(1)}))
    line = refusal(tmp_path)
    assert "missing model.layers.1,2.mlp.up_proj.weight, model.layers.0.self_attn.k_norm" in line
    for words in (f"{norm}: model.norm.weight has shape (25,), the config says (24,)",
                  f"{gate}: model.layers.0.mlp.gate_proj.weight has shape (2, 2)",
                  f"{norm}: unexpected model.layers.0.self_attn.q_proj.bias",
                  f"{gate}: unexpected extra.weight"):
        assert words in line


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_directory_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_missing_config_is_named(saved):
    (saved / "config.json").unlink()
    assert str(saved / "config.json") in refusal(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"nothing"])
def test_a_config_that_is_not_json_is_named(saved, content):
    (saved / "config.json").write_bytes(content)
    line = refusal(saved)
    assert str(saved / "config.json") in line and "JSON" in line


@pytest.mark.parametrize("kind", ["", "qwen3_moe", "qwen2", "qwen3_5", "llama"])
def test_a_config_of_another_model_is_refused_by_its_type(saved, kind):
    for content in ["[]", "null", "{}"] if not kind else [json.dumps({"model_type": kind})]:
        (saved / "config.json").write_text(content)
        line = refusal(saved)
        assert str(saved / "config.json") in line and "model_type" in line
        assert kind in line and "only 'qwen3'" in line


def test_layers_that_are_all_of_full_attention_are_fine(saved):
    rewrite(saved / "config.json", layer_types=["full_attention"] * 3)
    assert same(Qwen3.from_pretrained(saved), build())


@pytest.mark.parametrize("field, value", [
    ("quantization_config", {"quant_method": "fp8"}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("quantization_config", {"quant_method": "awq", "bits": 4}),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("head_dim", 7),
    ("hidden_size", 0),
    ("num_hidden_layers", "3"),
    ("rope_theta", 0),
    ("attention_bias", True),
    ("hidden_act", "gelu"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", "yarn"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 700.0}),
    ("num_key_value_heads", 3)])
def test_what_the_decoder_does_not_do_is_refused_by_field(saved, field, value):
    rewrite(saved / "config.json", **{field: value})
    line = refusal(saved)
    assert str(saved / "config.json") in line and field in line


def test_rope_scaling_is_refused_beside_default_rope_parameters(saved):
    rewrite(saved / "config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0},
            rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    assert "rope_scaling" in refusal(saved)


@pytest.mark.parametrize("field", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rope_theta"])
def test_a_missing_field_is_named(saved, field):
    rewrite(saved / "config.json", **{field: None})
    line = refusal(saved)
    assert str(saved / "config.json") in line and field in line


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep if isinstance(keep, int) else int(keep * len(whole))])
    assert str(file) in refusal(saved)


def test_a_missing_tensor_is_named(saved):
    edit(saved / "model.safetensors", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    line = refusal(saved)
    assert str(saved) in line and "model.layers.1.mlp.up_proj.weight" in line


def test_a_missing_head_of_an_untied_model_is_named(tmp_path):
    build("wide heads, untied").save_pretrained(tmp_path)
    edit(tmp_path / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(tmp_path)


def test_a_tensor_of_the_wrong_shape_is_named(saved):
    edit(saved / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(25)}))
    line = refusal(saved)
    assert str(saved / "model.safetensors") in line and "model.norm.weight" in line
    assert "(25,)" in line and "(24,)" in line


def test_an_unexpected_tensor_is_named(saved):
    edit(saved / "model.safetensors",
         lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(56)}))
    line = refusal(saved)
    assert str(saved / "model.safetensors") in line
    assert "model.layers.0.self_attn.q_proj.bias" in line


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_quantised_tensors_are_refused_whatever_the_config_says(saved, dtype):
    edit(saved / "model.safetensors",
         lambda t: t.update({"model.norm.weight": torch.ones(24).to(dtype)}))
    line = refusal(saved)
    assert str(saved / "model.safetensors") in line and "model.norm.weight" in line
    assert "supported are BF16, F16, F32" in line


def test_a_gguf_file_is_no_checkpoint(saved):
    (saved / "model.safetensors").rename(saved / "model-q4.gguf")
    line = refusal(saved)
    assert str(saved / "model-q4.gguf") in line and "only those are read" in line


def test_a_missing_weight_file_is_named(saved):
    (saved / "model.safetensors").unlink()
    assert str(saved / "model.safetensors") in refusal(saved)


def test_a_missing_shard_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "SHARD_BYTES", 12_000)
    build().save_pretrained(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in refusal(tmp_path)


@pytest.mark.parametrize("content", [
    b"", b"{", b"\xff", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}',
    b'{"weight_map": null}', b'{"weight_map": {"model.norm.weight": 3}}'])
def test_an_index_that_is_not_json_or_names_no_files_is_named(saved, content):
    index = saved / "model.safetensors.index.json"
    index.write_bytes(content)
    assert str(index) in refusal(saved)
