"""Checkpoints in the Hugging Face layout: config.json, safetensors files, PEFT's adapters.

What does not fit is refused with one line that names the file and what is wrong in it.
Left out: any format but safetensors, and quantised weights.
"""
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.parallel import full_tensor, local_share
from util import read_json, reading, write_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
STORED = ("BF16", "F16", "F32")  # what the tensors of a checkpoint may be
NUMBERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads", "rope_theta")
FAMILIES = {  # model_type -> its class in transformers
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
LAYERS = ("full_attention", "linear_attention")  # the second in hybrids only
LINEAR = ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads",
          "linear_key_head_dim", "linear_value_head_dim")
# A Qwen3.5 that also sees: of its checkpoint the decoder is read.
WRAPPER, WRAPPED, PREFIX = "qwen3_5", "model.language_model.", "model."
UNREAD = ("model.visual.", "mtp.")
ONLY = {  # what the decoder does in one way
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,  # qwen2's biases on q, k and v have no field
    "mlp_bias": False,
    "quantization_config": None,
}


# --- config.json --------------------------------------------------------------------------

def read_config(path: str) -> dict[str, Any]:
    """The fields of config.json; a null is left out. Raises FileNotFoundError, or
    ValueError with one line that names the file and the field."""
    with reading(path):
        return _checked(read_json(path), path)


def _checked(raw: dict[str, Any], path: str) -> dict[str, Any]:
    if raw.get("model_type") == WRAPPER:  # it decides about these two
        raw = raw.get("text_config", {}) | {field: raw.get(field) for field in (
            "tie_word_embeddings", "quantization_config")}
    raw = {field: value for field, value in raw.items() if value is not None}
    refused = [field for field, only in ONLY.items() if raw.get(field, only) != only]
    if raw.get("model_type") not in FAMILIES:
        refused.append("model_type")
    hybrid = raw.get("model_type") == "qwen3_5_text"
    kinds = raw.get("layer_types", ["full_attention"])
    if "full_attention" not in kinds or set(kinds) - set(LAYERS[:1 + hybrid]):
        refused.append("layer_types")
    if hybrid:
        raw.setdefault("partial_rotary_factor", 0.25)
        if len(kinds) != raw.get("num_hidden_layers"):
            refused.append("layer_types")
    else:
        raw.pop("layer_types", None)  # all are alike
    for field in ("rope_scaling", "rope_parameters"):
        rope = raw.get(field, {})
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            refused.append(field)
        # Newer versions of transformers read these here.
        raw |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")
                if name in rope}
    if refused:
        found = ", ".join(f"{field} {raw.get(field)!r:.80}" for field in refused)
        raise ValueError(f"{path}: not supported: {found}")

    missing = [field for field in NUMBERS + LINEAR * hybrid if not raw.get(field)]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    if hybrid and raw["linear_num_value_heads"] % raw["linear_num_key_heads"]:
        raise ValueError("linear_num_value_heads is no multiple of linear_num_key_heads")
    if hybrid and raw["linear_conv_kernel_dim"] < 2:
        raise ValueError("linear_conv_kernel_dim is less than 2")
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    raw.setdefault("tie_word_embeddings", False)
    return raw


def is_wrapped(path: str) -> bool:
    """Is the decoder in this directory a part of a larger model?"""
    return read_json(os.path.join(path, CONFIG)).get("model_type") == WRAPPER


def config_json(config, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json holds: model.py's config, and `dtype` of the weights beside it."""
    fields = {name: value for name, value in asdict(config).items() if value is not None}
    return {
        "architectures": [FAMILIES[config.model_type]],
        **fields,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# --- weights ------------------------------------------------------------------------------

def read_weights(path: str, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`read_tensors` of a checkpoint's files. Raises FileNotFoundError or ValueError, with
    one line, before the first tensor is read."""
    return read_tensors(weight_files(path), wanted)


def weight_files(path: str) -> list[str]:
    names = ["model.safetensors"]
    index = os.path.join(path, INDEX)
    if os.path.exists(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
    return [os.path.join(path, name) for name in names]


def write_weights(path: str, tensors: Iterable[tuple[str, Tensor]],
                  dtype: torch.dtype) -> None:
    """Write one file, model.safetensors, after the last tensor was iterated over."""
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors}
    _save(stored, path, "model.safetensors")


# --- adapters -----------------------------------------------------------------------------
# What we call NAME.lora_A, PEFT calls base_model.model.NAME.lora_A.weight.

def save_adapter(model, path: str, base: str, write: bool = True) -> None:
    """Write PEFT's files; `base` is the directory of the frozen weights, absolute or seen
    from `path`. With sharded weights all ranks call this, one of them with `write`."""
    tensors = {f"base_model.model.{name}.weight": full_tensor(weight.detach())
               for name, weight in model.adapters().items()}
    if not write:
        return
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    seen = os.path.normpath(os.path.join(path, base))  # before there is a directory `path`
    _save(tensors, path, ADAPTER, {"base": last_bytes(seen)})
    write_json(os.path.join(path, ADAPTER_CONFIG), {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.rank,
        "lora_alpha": model.alpha,
        "target_modules": sorted({name.split(".")[-1] for name, _ in model.adapted()}),
    })


def adapter_config(path: str) -> dict:
    """Of a checkpoint that has adapters and no weights of its own; else {}."""
    file = os.path.join(path, "adapter", ADAPTER_CONFIG)
    alone = os.path.exists(file) and not os.path.exists(os.path.join(path, CONFIG))
    return read_json(file) if alone else {}


def last_bytes(path: str) -> str:
    """A checksum that tells weights of the same shape apart: of the file's end."""
    with open(weight_files(path)[-1], "rb") as file:
        file.seek(-min(2 ** 16, os.path.getsize(file.name)), os.SEEK_END)
        return str(zlib.crc32(file.read()))


@torch.no_grad()
def load_adapter(model, path: str, base: str) -> None:
    """Fill the model's adapters, of the same rank, from files. Raises like read_weights, and
    ValueError if they were trained beside other weights than those in `base`."""
    with _open(os.path.join(path, ADAPTER)) as file:
        if (file.metadata() or {}).get("base") not in (None, last_bytes(base)):
            raise ValueError(f"{path} was trained beside other weights than {base} has")
    places = {f"base_model.model.{name}.weight": weight
              for name, weight in model.adapters().items()}
    for name, tensor in read_tensors([os.path.join(path, ADAPTER)], places):
        place = places[name]
        place.copy_(local_share(tensor.to(place.device), place))


# --- safetensors files --------------------------------------------------------------------

def read_tensors(files: list[str],
                 wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the `wanted`, mapped from disk when its turn comes. All
    headers are checked first: a ValueError names the first tensor that does not fit."""
    found = set()
    for file in files:
        with _open(file) as tensors:
            for stored_as in tensors.keys():
                name = stored_as.replace(WRAPPED, PREFIX)
                if name.startswith(UNREAD):
                    continue
                header = tensors.get_slice(stored_as)
                shape, stored = tuple(header.get_shape()), header.get_dtype()
                want = tuple(wanted[name].shape) if name in wanted else None
                # A checkpoint may hold the head beside the embedding that it is tied to.
                if want is None and name == "lm_head.weight":
                    continue
                if want is None:
                    raise ValueError(f"{file}: the model has no {name}")
                if shape != want or stored not in STORED:
                    raise ValueError(f"{file}: {name} has shape {shape} of {stored}, the "
                                     f"model has {want} of {', '.join(STORED)}")
                found.add(name)
    missing = sorted(set(wanted) - found)
    if missing:
        raise ValueError(f"{files[0]}: {len(missing)} tensors missing, as {missing[0]}")

    for file in files:
        with _open(file) as tensors:
            for stored_as in tensors.keys():
                name = stored_as.replace(WRAPPED, PREFIX)
                if name in wanted:
                    yield name, tensors.get_tensor(stored_as)


def _save(tensors: dict[str, Tensor], path: str, name: str, more: dict = {}) -> None:
    """With `more` metadata. Raises OSError if the disk is full."""
    os.makedirs(path, exist_ok=True)
    file = os.path.join(path, name)
    open(file, "wb").close()
    mode = os.stat(file).st_mode  # by the user's umask; save_file makes it private
    try:
        save_file(tensors, file, metadata={"format": "pt", **more})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    os.chmod(file, mode)


def _open(file: str):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from None
