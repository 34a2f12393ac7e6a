"""Qwen3, Qwen2 and Llama: logits and ids of the reference implementations, both ways; and
that cache and adapters work with each. What needs transformers is skipped without it."""
import json
import random

import golden
import pytest
import torch
from test_model import distance, some_ids
from test_sampler import build
from test_tokenizer import TEXTS, fast_json

from engine.hf import FAMILIES
from model import Decoder
from engine.vocabulary import STEPS
from tokenizer import Tokenizer

families = pytest.mark.parametrize("family", FAMILIES)


def their_model(transformers, family, heads, kv_heads, tied, vocab=150, head_dim=16):
    """transformers' model of this shape; all weights are random, biases and norms too."""
    hybrid = family == "qwen3_5_text"
    linear = dict(linear_num_key_heads=kv_heads, linear_num_value_heads=2 * kv_heads,
                  linear_key_head_dim=12, linear_value_head_dim=20) if hybrid else {}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=vocab, hidden_size=16 * heads, intermediate_size=96,
        num_hidden_layers=4 if hybrid else 2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, **linear)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
            elif name.endswith(("bias", "A_log")):
                weight.normal_()
            else:
                weight.uniform_(0.5, 1.5)
    return model


@families
@pytest.mark.parametrize("heads, kv_heads, tied", [(4, 2, True), (3, 1, False)])
def test_logits_and_greedy_tokens_are_those_of_transformers_both_ways(
        family, heads, kv_heads, tied, tmp_path, float64_everywhere):
    transformers = pytest.importorskip("transformers")
    theirs = their_model(transformers, family, heads, kv_heads, tied)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = Decoder.from_pretrained(tmp_path / "theirs", torch.float64)
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", torch_dtype=torch.float64).eval()
    assert type(again) is type(theirs)
    assert type(again).__name__ == FAMILIES[family].architecture

    ids = some_ids(ours, rows=2, length=40)
    with torch.no_grad():
        want = theirs(ids).logits
        for got in (ours(ids), again(ids).logits):
            assert (got - want).abs().max() < 1e-10
    start = ids[0, :8].tolist()
    tokens, leads = golden.greedy(lambda x: theirs(x).logits, start)
    end = next((i for i, lead in enumerate(leads) if lead < 1e-9), None)  # a tie
    assert golden.greedy(ours, start)[0][:end] == tokens[:end]


@families
def test_merged_adapters_compute_what_adapters_do(family, float64):
    model = build(model_type=family)
    ids = some_ids(model)
    with torch.no_grad():
        before = model(ids)
        model.add_lora(4, 32.0)
        for name, weight in model.adapters().items():
            weight.normal_(std=0.01 if "lora_B" in name else 1.0)
        assert distance(model(ids), before) > 1e-3
        assert distance(model.merged_copy()(ids), model(ids)) < 1e-10


@pytest.mark.parametrize("tied, inner", [
    (True, {}), (False, {"tie_word_embeddings": True})])
def test_a_qwen3_5_that_also_sees_is_read_as_its_decoder(
        tied, inner, tmp_path, float64_everywhere):
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = transformers.Qwen3_5Config(
        tie_word_embeddings=tied, text_config=inner | small | dict(
            vocab_size=150, num_hidden_layers=4, num_key_value_heads=2, head_dim=16,
            eos_token_id=7, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=12, linear_value_head_dim=20),
        vision_config=dict(depth=1, hidden_size=64, intermediate_size=96, num_heads=4,
                           out_hidden_size=64))
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    theirs.save_pretrained(tmp_path)
    Tokenizer.train(TEXTS, 140).save(tmp_path)
    ours = Decoder.from_pretrained(tmp_path, torch.float64)
    ids = some_ids(ours, length=70)
    with torch.no_grad():
        assert distance(ours(ids), theirs(input_ids=ids).logits) < 1e-10
    assert 7 in Tokenizer.from_pretrained(tmp_path).stop_ids


# --- tokenizers against the package tokenizers --------------------------------------------

def assert_equal_ids(ours, reference):
    rng = random.Random(5)
    hostile = ["  1", " 1  2 a", "\n\n 7\t8", "'s'S1's", "½²Ⅷ٣", "don't've", "", " ",
               "\u2028 1", "3.14e-10", "A1b2C3", "a\x04b", " \x04 \x04a", *TEXTS]
    pieces = ["a", "Zq", "7", "12", " ", "  ", "\n", "'ll", "é", "日本", "한", "😀", "½",
              "_", "...", "\u00a0", "ſ", "\u0301", "\u093f"]
    mixed = ["".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(500)]
    for text in hostile + mixed:
        assert ours.encode(text) == reference.encode(text).ids, repr(text)


@pytest.mark.parametrize("cut", STEPS)
def test_each_cut_is_read_written_and_gives_the_ids_of_the_reference(cut, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tiny = Tokenizer.train(TEXTS, 400)
    data = fast_json(tiny, cut)
    for token in data["added_tokens"]:
        token["single_word"] = False  # the reference asks for it
    del data["model"]["vocab"]["Ą"]  # the byte 4, as in SmolLM2
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.cut == cut
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert_equal_ids(ours, reference)
    ours.save(tmp_path / "saved")
    assert_equal_ids(Tokenizer.from_pretrained(tmp_path / "saved"), reference)
