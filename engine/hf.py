"""Checkpoints in the Hugging Face layout: config.json, safetensors files, PEFT's adapters.

What does not fit is refused with one line that names the file and what is wrong in it.
Left out: any format but safetensors, and quantised weights.
"""
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.parallel import full_tensor, local_share
from util import read_json, reading, write_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
STORED = torch.bfloat16, torch.float16, torch.float32, torch.float64  # of checkpoints


# --- config.json --------------------------------------------------------------------------

@dataclass(frozen=True)
class Family:
    """Where the models of a family differ from Llama."""
    architecture: str  # the name of its class in transformers
    bias: bool = False  # queries, keys and values have biases
    head_norm: bool = False  # an RMSNorm on every query and key head
    output_gate: bool = False  # attention's output is multiplied by a gate
    offset_norm: bool = False  # RMSNorms store their weight minus 1
    hybrid: bool = False  # layer_types says which layers are delta nets


# model_type -> its family. A new dense family that the switches describe is one line here.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", bias=True),
    "qwen3": Family("Qwen3ForCausalLM", head_norm=True),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", head_norm=True, output_gate=True,
                           offset_norm=True, hybrid=True),
}
NUMBERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads", "rope_theta")
LINEAR = ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads",
          "linear_key_head_dim", "linear_value_head_dim")
ONLY = {  # the decoder supports one value of these fields
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,  # Qwen2 has its biases without this field
    "mlp_bias": False,
    "quantization_config": None,
}
# A Qwen3.5 that also sees is a wrapper around the decoder, the only part that is read.
WRAPPER, WRAPPED, PREFIX = "qwen3_5", "model.language_model.", "model."
UNREAD = ("model.visual.", "mtp.")


def read_config(path: str) -> dict[str, Any]:
    """The fields of config.json; a null is left out. Raises FileNotFoundError, or
    ValueError with one line that names the file and the field."""
    with reading(path):
        return _checked(read_json(path), path)


def _checked(raw: dict[str, Any], path: str) -> dict[str, Any]:
    if raw.get("model_type") == WRAPPER:  # only the wrapper has these two fields
        raw = raw.get("text_config", {}) | {field: raw.get(field) for field in (
            "tie_word_embeddings", "quantization_config")}
    raw = {field: value for field, value in raw.items() if value is not None}
    refused = [field for field, only in ONLY.items() if raw.get(field, only) != only]
    family = FAMILIES.get(raw.get("model_type"))
    if not family:
        refused.append("model_type")
    hybrid = family and family.hybrid
    layers = raw.get("layer_types", ["full_attention"])
    known = {"full_attention", "linear_attention"} if hybrid else {"full_attention"}
    if "full_attention" not in layers or not known.issuperset(layers):
        refused.append("layer_types")
    if hybrid:
        raw.setdefault("partial_rotary_factor", 0.25)
        if len(layers) != raw.get("num_hidden_layers"):
            refused.append("layer_types")
    for field in ("rope_scaling", "rope_parameters"):
        rope = raw.get(field, {})
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            refused.append(field)
        # Newer versions of transformers write these numbers here.
        raw |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")
                if name in rope}
    if refused:
        found = ", ".join(f"{field} {raw.get(field)!r:.80}" for field in refused)
        raise ValueError(f"{path}: not supported: {found}")
    missing = [field for field in NUMBERS + LINEAR * bool(hybrid) if not raw.get(field)]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    raw.setdefault("tie_word_embeddings", False)
    return raw


def config_json(config, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json holds: model.py's config, and `dtype` of the weights beside it."""
    fields = {name: value for name, value in asdict(config).items() if value is not None}
    return {
        "architectures": [config.family.architecture],
        **fields,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# --- weights ------------------------------------------------------------------------------

def weight_files(path: str) -> list[str]:
    """The safetensors files of a checkpoint."""
    names = [WEIGHTS]
    index = os.path.join(path, INDEX)
    if os.path.exists(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
    return [os.path.join(path, name) for name in names]


def read_tensors(files: list[str],
                 wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each of the `wanted`, mapped from disk when its turn comes. Raises
    FileNotFoundError, or ValueError for the first tensor that does not fit."""
    found = set()
    for file in files:
        with _open(file) as tensors:
            for stored_as in tensors.keys():
                name = stored_as.replace(WRAPPED, PREFIX)
                # A checkpoint may hold the head beside the embedding that it is tied to.
                tied_head = name == "lm_head.weight" and name not in wanted
                if tied_head or name.startswith(UNREAD):
                    continue
                if name not in wanted:
                    raise ValueError(f"{file}: the model has no {name}")
                tensor, want = tensors.get_tensor(stored_as), wanted[name].shape
                if tensor.shape != want or tensor.dtype not in STORED:
                    raise ValueError(
                        f"{file}: {name} is {tuple(tensor.shape)} in {tensor.dtype}, the "
                        f"model has {tuple(want)} in one of {', '.join(map(str, STORED))}")
                found.add(name)
                yield name, tensor
    missing = sorted(set(wanted) - found)
    if missing:
        raise ValueError(f"{files[0]}: {len(missing)} tensors missing, as {missing[0]}")


def write_tensors(path: str, name: str, tensors: Iterable[tuple[str, Tensor]],
                  dtype: torch.dtype) -> None:
    """Write the file `name` in the directory `path`, after the last tensor was iterated
    over. Raises OSError if the disk is full."""
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors}
    os.makedirs(path, exist_ok=True)
    file = os.path.join(path, name)
    open(file, "wb").close()
    mode = os.stat(file).st_mode  # save_file would let nobody but this user read it
    try:
        save_file(stored, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    os.chmod(file, mode)


def _open(file: str):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from None


# --- adapters -----------------------------------------------------------------------------
# What we call NAME.lora_A, PEFT calls base_model.model.NAME.lora_A.weight.

def save_adapter(model, path: str, base: str, write: bool = True) -> None:
    """Write PEFT's files; `base` is the directory of the frozen weights, absolute or seen
    from `path`. With sharded weights all ranks call this, one of them with `write`."""
    tensors = [(f"base_model.model.{name}.weight", full_tensor(weight.detach()))
               for name, weight in model.adapters().items()]
    if not write:
        return
    write_tensors(path, ADAPTER, tensors, tensors[0][1].dtype)
    write_json(os.path.join(path, ADAPTER_CONFIG), {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.alpha,
        "target_modules": sorted({name.split(".")[-1] for name, _ in model.adapted()}),
    })


@torch.no_grad()
def load_adapter(model, path: str) -> None:
    """Fill the model's adapters, of the same rank, from files. Raises like read_tensors.
    That they were trained beside other weights of the same shapes goes unnoticed."""
    places = {f"base_model.model.{name}.weight": weight
              for name, weight in model.adapters().items()}
    for name, tensor in read_tensors([os.path.join(path, ADAPTER)], places):
        place = places[name]
        place.copy_(local_share(tensor.to(place.device), place))


def adapter_config(path: str) -> dict:
    """PEFT's config, in a checkpoint with adapters and no weights of its own; else {}."""
    file = os.path.join(path, "adapter", ADAPTER_CONFIG)
    alone = os.path.exists(file) and not os.path.exists(os.path.join(path, CONFIG))
    return read_json(file) if alone else {}
