"""Checkpoints in the Hugging Face layout: config.json, safetensors files, PEFT's adapters.

This file knows names, shapes and files; model.py brings the tensors and takes them back.
What does not fit is refused with one line that names the file and all that is wrong.

Left out: writing aside and renaming a whole directory (runtime/checkpoint.py does that),
quantised files, and any format but safetensors.
"""
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.files import read_json, write_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARD_BYTES = 4 << 30  # a checkpoint is written in files of at most this size
STORED = ("BF16", "F16", "F32")  # what the tensors of a checkpoint may be
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")
FAMILIES = {  # model_type -> its class in transformers
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# --- config.json --------------------------------------------------------------------------

def read_config(path: str) -> dict[str, Any]:
    """The fields of config.json that model.py uses, checked, and others. A field that is
    null is left out.

    Raises FileNotFoundError, or ValueError with one line that names the file and the field.
    """
    _check_directory(os.path.dirname(path) or ".")
    raw = read_json(path)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r:.80}; supported are dense models "
                         f"of {', '.join(FAMILIES)}")
    raw = {field: value for field, value in raw.items() if value is not None}

    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config: only bf16, fp16 or fp32 weights "
                         "work")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window: only full attention is supported")
    layers = raw.get("layer_types") or ["full_attention"]
    if not isinstance(layers, list) or set(map(str, layers)) != {"full_attention"}:
        raise ValueError(f"{path}: layer_types: only full attention is supported")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise ValueError(f"{path}: {field}: the only biases supported are those of "
                             "qwen2, on q, k and v")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r:.40} is not supported, "
                         "only 'silu'")

    for field in ("rope_scaling", "rope_parameters"):
        rope = raw.get(field, {})
        kind = None
        if isinstance(rope, dict):
            kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ValueError(f"{path}: {field} {rope!r:.200} is not supported, only the "
                             "default one")
        if "rope_theta" in rope:  # newer versions of transformers write it here
            raw.setdefault("rope_theta", rope["rope_theta"])

    missing = [f for f in SIZES if type(raw.get(f)) is not int or raw[f] < 1]
    theta = raw.get("rope_theta")
    if not isinstance(theta, (int, float)) or not theta > 0:
        missing.append("rope_theta")
    if missing:
        raise ValueError(f"{path}: lacks positive number(s) for {', '.join(missing)}")

    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    size = raw.setdefault("head_dim", raw["hidden_size"] // heads)
    if type(size) is not int or size < 2 or size % 2:
        raise ValueError(f"{path}: head_dim {size!r:.40} is not a positive even number")
    if heads % kv_heads:
        raise ValueError(f"{path}: num_attention_heads is no multiple of "
                         "num_key_value_heads")
    raw.setdefault("tie_word_embeddings", False)
    return raw


def _check_directory(path: str) -> None:
    """Raise FileNotFoundError, with advice, for what holds no config.json."""
    if os.path.isfile(path):
        raise FileNotFoundError(f"{path}: a file; a model is a directory with {CONFIG} and "
                                "*.safetensors (GGUF is not read)")
    if not os.path.isdir(path):
        line = f"{path}: no such model directory"
        name_on_the_hub = re.fullmatch(r"(?:([\w-]+)/)?([\w.-]+)",
                                       os.path.normpath(path))
        if name_on_the_hub:
            owner, name = name_on_the_hub.groups("OWNER")
            if os.path.isdir("assets/tiny"):
                line += " (a tiny one is in assets/tiny)"
            line += f"; to download it: hf download {owner}/{name} --local-dir {name}"
        raise FileNotFoundError(line)

    if os.path.exists(os.path.join(path, CONFIG)):
        return
    for name in ("final", "best", "warmup", "init"):
        inside = os.path.join(path, name)
        if os.path.exists(os.path.join(inside, CONFIG)):
            raise FileNotFoundError(
                f"{path}: the directory of a run; its model is {inside}")
    line = f"{os.path.join(path, CONFIG)}: missing"
    others = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    if os.path.exists(os.path.join(path, ADAPTER_CONFIG)):
        line += f"; with {ADAPTER_CONFIG} this is an adapter, not a model"
    elif others:
        line += f"; {os.path.join(path, others[0])} is GGUF, which is not read"
    raise FileNotFoundError(line)


def config_json(fields: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What config.json holds: `fields`, and the constants that other readers ask for."""
    return {
        "architectures": [FAMILIES[fields["model_type"]]],
        **fields,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rope_scaling": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# --- weights ------------------------------------------------------------------------------

def read_weights(path: str, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the `wanted`, as stored, from a checkpoint's files.

    Raises FileNotFoundError or ValueError, with one line, before the first tensor is read.
    """
    # A checkpoint may hold the head beside the embedding that it is tied to.
    ignored = {"lm_head.weight"} - set(wanted)
    return read_tensors(weight_files(path), wanted, path, ignored)


def write_weights(path: str, tensors: Iterable[tuple[str, Tensor]], sizes: dict[str, int],
                  dtype: torch.dtype) -> None:
    """Write files of at most SHARD_BYTES, and an index if there are several.

    `sizes` has each tensor's bytes on disk, in the order in which `tensors` come. Only the
    tensors of one file are in memory at a time.
    """
    os.makedirs(path, exist_ok=True)
    shards = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size

    tensors, places = iter(tensors), {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {}
        for _ in names:
            name, tensor = next(tensors)
            shard[name] = tensor.to("cpu", dtype).contiguous()
            places[name] = file
        save_file(shard, os.path.join(path, file), metadata={"format": "pt"})

    index = os.path.join(path, INDEX)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(index, {"metadata": total, "weight_map": places})
    elif os.path.exists(index):
        os.remove(index)  # an earlier checkpoint's: readers would follow it


# --- adapters -----------------------------------------------------------------------------
# What we call NAME.lora_A, PEFT calls base_model.model.NAME.lora_A.weight.

def read_adapter(path: str, wanted: dict[str, Tensor], rank: int,
                 alpha: float) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of each of the `wanted` adapters. Raises like read_weights, also
    if the files are of another rank or alpha."""
    file = os.path.join(path, ADAPTER_CONFIG)
    raw = read_json(file)
    for field, value in (("r", rank), ("lora_alpha", alpha)):
        found = raw.get(field) if isinstance(raw, dict) else None
        if found != value:
            raise ValueError(f"{file}: {field} is {found!r:.40}, the model's adapters have "
                             f"{value}")
    names = {f"base_model.model.{name}.weight": name for name in wanted}
    places = {theirs: wanted[name] for theirs, name in names.items()}
    for theirs, tensor in read_tensors([os.path.join(path, ADAPTER)], places, path):
        yield names[theirs], tensor


def write_adapter(path: str, tensors: dict[str, Tensor], rank: int, alpha: float,
                  base: str) -> None:
    """`tensors` go by our names; `base` is the directory of the frozen weights."""
    os.makedirs(path, exist_ok=True)
    theirs = {f"base_model.model.{name}.weight": tensor.cpu().contiguous()
              for name, tensor in tensors.items()}
    save_file(theirs, os.path.join(path, ADAPTER), metadata={"format": "pt"})
    write_json(os.path.join(path, ADAPTER_CONFIG), {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ADAPTED),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    })


# --- safetensors files --------------------------------------------------------------------

def weight_files(path: str) -> list[str]:
    """The safetensors files of a checkpoint, through its index where there is one."""
    names = ["model.safetensors"]
    index = os.path.join(path, INDEX)
    if os.path.exists(index):
        raw = read_json(index)
        places = raw.get("weight_map") if isinstance(raw, dict) else None
        names = list(places.values()) if isinstance(places, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{index}: weight_map names no files")

    files = [os.path.join(path, name) for name in sorted(set(names))]
    absent = [file for file in files if not os.path.exists(file)]
    if absent:
        line = f"{', '.join(absent)}: missing ({len(absent)} of {len(files)} files)"
        endings = (".gguf", ".bin", ".pth")
        others = sorted(name for name in os.listdir(path) if name.endswith(endings))
        if others:
            other = os.path.join(path, others[0])
            line += f"; {other} is no safetensors file, and only those are read"
        raise FileNotFoundError(line)
    return files


def read_tensors(files: list[str], wanted: dict[str, Tensor], path: str,
                 ignored: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the `wanted`, mapped from disk when its turn comes.

    All headers are checked first. A ValueError lists every name, shape and type that does
    not fit; it names the file, or `path` for what no file has.
    """
    _check(files, wanted, path, set(ignored))
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():
                if name in wanted:
                    yield name, tensors.get_tensor(name)


def _check(files: list[str], wanted: dict[str, Tensor], path: str,
           ignored: set[str]) -> None:
    found, misfits, others = set(), defaultdict(set), []
    for file in files:
        with _open(file) as tensors:
            names = set(tensors.keys()) - ignored
            extra = names - set(wanted)
            if extra:
                others.append(f"{file}: unexpected {_one_line(extra)}")
            for name in names & set(wanted):
                found.add(name)
                header = tensors.get_slice(name)
                shape, stored = tuple(header.get_shape()), header.get_dtype()
                want = tuple(wanted[name].shape)
                if shape != want:
                    fault = f"has shape {shape}, the model has {want}"
                    misfits[file, fault].add(name)
                elif stored not in STORED:
                    fault = f"is {stored}, supported are {', '.join(STORED)}"
                    misfits[file, fault].add(name)
    missing = set(wanted) - found
    if missing:
        others.append(f"{path}: missing {_one_line(missing)}")
    lines = [f"{file}: {_one_line(names)} {fault}"
             for (file, fault), names in sorted(misfits.items())]
    if lines or others:
        raise ValueError("; ".join(lines + others))


def _open(file: str):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from None


def _one_line(names: set[str]) -> str:
    """Names of tensors; those that differ in the layer alone as one: layers.0,1,2.mlp."""
    groups = defaultdict(list)
    for name in names:
        layer = re.search(r"(?<=layers\.)\d+", name)
        pattern = re.sub(r"(?<=layers\.)\d+", "{}", name)
        groups[pattern] += [int(layer[0])] if layer else []
    return ", ".join(pattern.replace("{}", ",".join(map(str, sorted(layers))))
                     for pattern, layers in sorted(groups.items()))
