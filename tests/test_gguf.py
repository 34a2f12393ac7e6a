"""experiments/gguf.py on tiny files that are written here, for each family: logits and ids
of the references. It is skipped without gguf and transformers, and downloads no model."""
import pytest
import torch
from test_families import assert_equal_ids, their_model
from test_model import distance, some_ids
from test_tokenizer import TEXTS

from model import Decoder
from tokenizer import MARKERS, Tokenizer

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from experiments.gguf import main, read_model, read_tokenizer  # it needs gguf


def write_file(path, family, tied):
    """A file of transformers' model, which is returned, with a small tokenizer. If tied, it
    has the embedding in 8 bits and once more, as the head, in 32."""
    tiny = Tokenizer.train(TEXTS, 400)
    tokens = [*tiny.vocab, *MARKERS, "<think>", "[PAD]"]
    model = their_model(transformers, family, 4, 2, tied, vocab=len(tokens), head_dim=32)
    writer = gguf.GGUFWriter(path, family)
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 64,
             "feed_forward_length": 96, "attention.head_count": 4,
             "attention.head_count_kv": 2, "attention.key_length": 32,
             "rope.dimension_count": 32}
    for name, size in sizes.items():
        writer.add_uint32(f"{family}.{name}", size)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if family == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tiny.vocab) + [3, 3, 3, 4, 5])
    writer.add_token_merges([" ".join(pair) for pair in tiny.merges])
    writer.add_eos_token_id(tiny.end_of_turn)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    for name, weight in model.named_parameters():
        weight.data = weight.data.half().float()  # what the directory can hold
        values, place = weight.data.numpy(), known.get_name(name, (".weight", ".bias"))
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, 16, 64)  # llama.cpp takes one of each in turn
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.F32
        if tied and place == "token_embd.weight":
            writer.add_tensor("output.weight", values)
            kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(place, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_becomes_the_model_that_it_was(family, tied, tmp_path):
    theirs = write_file(tmp_path / "model.gguf", family, tied)
    main(str(tmp_path / "model.gguf"), tmp_path)
    ours = Decoder.from_pretrained(tmp_path)
    assert ours.config.tie_word_embeddings == tied
    if family == "llama" and not tied:  # transformers reads such a file as we do
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf")
    ids = some_ids(ours)
    with torch.no_grad():
        assert distance(ours(ids), theirs(ids).logits) < 1e-5
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal_ids(tokenizer, reference.backend_tokenizer)
    assert {*tokenizer.special} == {*MARKERS, "<think>"}


def test_what_the_program_cannot_read_is_refused():
    with pytest.raises(ValueError, match="not supported: architecture qwen2"):
        read_model({"general.architecture": "qwen2", "qwen2.rope.scaling.type": "yarn"}, {})
    with pytest.raises(ValueError, match="not supported: tokenizer gpt2, pre llama-bpe"):
        read_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"})
