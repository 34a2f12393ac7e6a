"""The Qwen3 decoder, readable: one forward pass for training and for cached decoding; LoRA.

A Qwen3 block is Llama's (pre-norm, grouped-query attention, SwiGLU, rotary positions) plus an
RMSNorm on every query and key head before the rotation, and no biases anywhere. Parameter names
are those of the Hugging Face checkpoints, so reading one needs no mapping and what was trained
loads in transformers or vLLM. The tiny model is this same class with a small config.

The KV cache is not here. Attention hands its queries, keys and values to `attend`: the sampler
brings one, `confined` is that of rows packed one after another without padding, each of which sees
only itself; without one it is plain causal attention over the row.

LoRA freezes every weight and adds (alpha / rank) B A to each linear layer of attention and MLP. The
sampler and checkpoints get the sum, computed in float32 one matrix at a time; adapters are saved
apart in PEFT's layout. With A uniform in +-1/sqrt(d_in) and alpha / rank in front, the best
learning rate hardly depends on the rank and is about ten times that of full fine-tuning.

Left out: dropout, sliding windows, rope scaling, quantised and mixture-of-experts checkpoints
(from_pretrained refuses them by name). Sources: Qwen3 technical report (arXiv 2505.09388), RoPE
(2104.09864), GQA (2305.13245), SwiGLU (2002.05202), LoRA (2106.09685), LoRA Without Regret
(Thinking Machines, 2025).

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, E head_dim, V vocabulary,
N sampled tokens of a batch, R rank.
"""
import contextlib
import glob
import inspect
import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

try:
    from torch.nn.attention.varlen import varlen_attn
    if "block_table" not in inspect.signature(varlen_attn).parameters:  # before torch 2.12
        varlen_attn = None
except ImportError:
    varlen_attn = None

SHARD_BYTES = 4 << 30  # a checkpoint is written in files of at most this size
LOGITS_BYTES = 1 << 27  # float32 logits that exist at a time in `logprobs`
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STORED = {"F32", "F16", "BF16"}  # what a checkpoint's tensors may be


@dataclass(frozen=True)
class Qwen3Config:
    """The fields of config.json that the decoder uses, under their names there."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, path: str) -> "Qwen3Config":
        """From a config.json. Raises FileNotFoundError, or ValueError naming file and field."""
        with open(path, encoding="utf-8") as file:
            try:
                raw = json.load(file)
            except ValueError as error:
                raise ValueError(f"{path}: not JSON ({error})") from None
        if not isinstance(raw, dict) or raw.get("model_type") != "qwen3":
            kind = raw.get("model_type") if isinstance(raw, dict) else None
            raise ValueError(f"{path}: model_type is {kind!r}; only 'qwen3' (dense) is supported")
        if raw.get("quantization_config"):
            raise ValueError(f"{path}: quantization_config: only bf16, fp16 or fp32 weights work")
        for field in ("use_sliding_window", "layer_types"):
            if raw.get(field) and set(raw[field] if isinstance(raw[field], list) else [field]) != {
                    "full_attention"}:
                raise ValueError(f"{path}: {field}: only full attention is supported")
        if raw.get("attention_bias") or raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{path}: attention_bias or hidden_act is not that of a Qwen3")
        raw = {k: v for k, v in raw.items() if v is not None}  # null is as good as absent
        for field in ("rope_scaling", "rope_parameters"):  # newer writers put rope_theta inside
            rope = raw.get(field, {})
            if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in (
                    None, "default"):
                raise ValueError(f"{path}: {field} {rope!r:.200} is not supported, only the "
                                 "default one")
            if "rope_theta" in rope:
                raw.setdefault("rope_theta", rope["rope_theta"])
        raw.setdefault("tie_word_embeddings", False)
        missing = [f for f in ("vocab_size", "hidden_size", "intermediate_size",
                               "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
                   if type(raw.get(f)) is not int or raw[f] < 1]
        if not isinstance(raw.get("rope_theta"), (int, float)) or not raw["rope_theta"] > 0:
            missing.append("rope_theta")
        if missing:
            raise ValueError(f"{path}: lacks positive number(s) for {', '.join(missing)}")
        raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        if type(raw["head_dim"]) is not int or raw["head_dim"] < 2 or raw["head_dim"] % 2:
            raise ValueError(f"{path}: head_dim {raw['head_dim']!r:.40} is not a positive even "
                             "number")
        if raw["num_attention_heads"] % raw["num_key_value_heads"]:
            raise ValueError(f"{path}: num_attention_heads is no multiple of num_key_value_heads")
        return cls(**{k: raw[k] for k in cls.__dataclass_fields__ if k in raw})

    def to_json(self, dtype: torch.dtype) -> dict:
        """What config.json holds, with the constants that other readers ask for."""
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **asdict(self),
                "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
                "use_sliding_window": False, "rope_scaling": None,
                "torch_dtype": str(dtype).removeprefix("torch.")}


class Qwen3(nn.Module):
    """Logits from ids. `recompute` is activation checkpointing: a layer keeps only its input for
    the backward pass and computes the rest again. `rank` is that of the adapters, 0 without."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config, self.recompute, self.rank, self.compiled = config, False, 0, False
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for weight in self.parameters():  # 0.02 at Qwen3-4B's width, and as much at any other
            if weight.dim() == 2 and not weight.is_meta:
                nn.init.normal_(weight, std=config.hidden_size ** -0.5)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor | None = None, attend=None) -> Tensor:
        """(B, T) ids -> (B, T, D) final states. `attend(layer, q, k, v) -> out` replaces plain
        causal attention, for a KV cache; positions count from 0 in each row by default."""
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        x = self.model["embed_tokens"](ids_BT)  # B T D
        rope = rotation(positions_BT, self.config.head_dim, self.config.rope_theta, x.dtype)
        for block in self.model["layers"]:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, attend, use_reentrant=False)  # B T D
            else:
                x = block(x, rope, attend)  # B T D
        return self.model["norm"](x)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        return self.lm_head(self.hidden(ids_BT))

    def logprobs(self, ids_BT: Tensor, mask_BT: Tensor, lengths: list[int] | None = None,
                 chunk: int | None = None):
        """Log-probability and entropy (nats) of each token where mask is 1, given those before.

        With `lengths` B is 1 and T is so many rows one after another, each of which sees only
        itself. Returns two float32 tensors of shape (N,), rows one after another. The logits exist
        for `chunk` tokens at a time (by default LOGITS_BYTES of them): a 32k row over 151,936
        entries would be 20 GB. Entropy has no gradient. A row's first token is never masked 1.
        """
        if lengths is None:
            x_BTD = self.hidden(ids_BT)
        else:
            positions_T = torch.cat([torch.arange(n) for n in lengths]).to(ids_BT.device)
            attend = confined(lengths, ids_BT.device)
            if self.compiled:  # or every pack's lengths would compile the layers anew
                attend = torch.compiler.disable(attend)
            x_BTD = self.hidden(ids_BT, positions_T[None], attend)
        wanted = mask_BT[:, 1:].bool()  # position t predicts token t + 1
        x_ND, target_N = x_BTD[:, :-1][wanted], ids_BT[:, 1:][wanted]
        chunk = chunk or max(1, LOGITS_BYTES // (4 * self.config.vocab_size))
        return HeadLogprobs.apply(x_ND, self.lm_head.weight, target_N, chunk)

    def compile_layers(self) -> None:
        """torch.compile them for packs of any lengths; attention stays as it is."""
        self.compiled = True
        for block in self.model["layers"]:
            block.compile(dynamic=True)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    # --- LoRA ---------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, seed: int = 0) -> "Qwen3":
        """Freeze every weight and put fresh float32 adapters on all linear layers but the head.
        B is zero, so the model is what it was."""
        generator = torch.Generator().manual_seed(seed)
        self.requires_grad_(False)
        self.rank, self.alpha = rank, alpha
        for _, layer in self._adapted():
            bound = layer.in_features ** -0.5
            A_RI = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            device = "cpu" if layer.weight.is_meta else layer.weight.device
            layer.lora_A = nn.Parameter(A_RI.to(device))
            layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))
            layer.scale = alpha / rank
        return self

    @contextlib.contextmanager
    def adapters_off(self):
        """The weights that LoRA started from: the reference policy of a KL term, at no memory."""
        layers = [layer for _, layer in self._adapted()]
        for layer in layers:
            layer.on = False
        try:
            yield
        finally:
            for layer in layers:
                layer.on = True

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of a plain model that computes the same, in its order. An adapted weight
        is a new float32 tensor, made when its turn comes, and of a sharded model so is every
        weight (all ranks have to ask for it); the others are this model's own."""
        layers = {f"{name}.weight": layer for name, layer in self._adapted()} if self.rank else {}
        for name, weight in self.named_parameters():
            if name in layers:
                yield name, whole(weight).float() + layers[name].change()
            elif "lora_" not in name:
                yield name, whole(weight.detach())

    def merged_copy(self, dtype: torch.dtype | None = None) -> "Qwen3":
        """A frozen plain model of its own memory that computes the same, up to `dtype`'s rounding;
        made tensor by tensor, so that never more than the two exist."""
        with torch.device("meta"):
            copy = Qwen3(self.config)
        dtype = dtype or self.lm_head.weight.dtype
        return copy._fill({name: weight.to(dtype, copy=True) for name, weight in self.merged()}
                          ).requires_grad_(False)

    @torch.no_grad()
    def merge_gap(self, copy: "Qwen3") -> float:
        """What rounding to the copy's dtype did to the adapters' change, relative to that change
        (Frobenius norms over all adapted weights). Near 1 the copy hardly sees the change."""
        lost, change = 0.0, 0.0
        rounded = dict(copy.named_parameters())
        for name, layer in self._adapted():
            exact = whole(layer.weight).float() + layer.change()
            lost += (rounded[f"{name}.weight"].float() - exact).square().sum().item()
            change += layer.change().square().sum().item()
        return (lost / change) ** 0.5 if change else 0.0

    def save_adapter(self, path: str, base: str, write: bool = True) -> None:
        """Write adapter_config.json and adapter_model.safetensors as PEFT does; `base` is where
        the frozen weights are. Without `write` only the other ranks are helped to."""
        tensors = {f"base_model.model.{name}.lora_{part}.weight": whole(tensor.detach())
                   for name, layer in self._adapted()
                   for part, tensor in (("A", layer.lora_A), ("B", layer.lora_B))}
        if not write:
            return
        os.makedirs(path, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
                  os.path.join(path, "adapter_model.safetensors"), metadata={"format": "pt"})
        _write_json(os.path.join(path, "adapter_config.json"), {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": self.rank, "lora_alpha": self.alpha, "target_modules": list(ADAPTED),
            "lora_dropout": 0.0, "bias": "none", "inference_mode": True})

    def load_adapter(self, path: str) -> None:
        """Take over adapters that save_adapter wrote, into a model that has some of that kind."""
        wanted = {f"base_model.model.{name}.lora_{part}.weight": tensor
                  for name, layer in self._adapted()
                  for part, tensor in (("A", layer.lora_A), ("B", layer.lora_B))}
        file = os.path.join(path, "adapter_model.safetensors")
        with torch.no_grad():
            for name, tensor in _read([file], wanted, path):
                wanted[name].copy_(like(tensor.to(wanted[name].device), wanted[name]))

    def _adapted(self) -> list[tuple[str, "Linear"]]:
        return [(name, m) for name, m in self.named_modules() if isinstance(m, Linear)]

    # --- checkpoints --------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, path: str, dtype: torch.dtype = torch.float32, device: str = "cpu",
                        prepare=lambda model: None) -> "Qwen3":
        """A checkpoint directory in the Hugging Face layout, one file or shards with an index.

        Each tensor goes from the file to its place in `dtype` on `device`, one after the other.
        Before that, `prepare(model)` may put adapters on it and shard it: then a rank keeps its
        share only. Raises FileNotFoundError or ValueError with one line that names files and
        tensors."""
        if not os.path.isdir(path):
            raise FileNotFoundError(f"{path}: no such model directory")
        with torch.device("meta"):  # no memory, no initialisation: every weight is replaced
            model = cls(Qwen3Config.read(os.path.join(path, "config.json")))
        wanted = dict(model.named_parameters())  # a tied lm_head appears once, as embed_tokens
        ignored = {"lm_head.weight"} - set(wanted)  # some tied checkpoints ship it
        prepare(model)
        places = dict(model.named_parameters())
        # A copy, not the mapped file: a file that is replaced must not change the weights.
        return model._fill({name: like(tensor.to(dtype=dtype, device=device, copy=True),
                                       places[name])
                            for name, tensor in _read(_shards(path), wanted, path, ignored)})

    def _fill(self, weights: dict[str, Tensor]) -> "Qwen3":
        self.load_state_dict(weights, strict=False, assign=True)
        if self.config.tie_word_embeddings:  # assign=True replaced one of the two names
            self.lm_head.weight = self.model["embed_tokens"].weight
        self.check_tie()
        return self

    def check_tie(self) -> None:
        """Raise RuntimeError unless embedding and head are one tensor exactly if tied."""
        one = self.lm_head.weight is self.model["embed_tokens"].weight
        if one != self.config.tie_word_embeddings:
            raise RuntimeError("embed_tokens and lm_head are not tied as the config says")

    def save_pretrained(self, path: str, dtype: torch.dtype | None = None) -> None:
        """Write config.json and safetensors files of at most SHARD_BYTES, with an index; adapters
        are merged. The other ranks of a sharded model have to run through `merged`."""
        merged = self.merged()
        try:
            self._save(merged, path, dtype or self.lm_head.weight.dtype)
        finally:
            deque(merged, 0)  # the others wait for it, also if the disk is full

    def _save(self, merged: Iterator[tuple[str, Tensor]], path: str, dtype: torch.dtype) -> None:
        os.makedirs(path, exist_ok=True)
        shards = [[]]
        for name, weight in self.named_parameters():
            if "lora_" in name:
                continue
            size = weight.numel() * dtype.itemsize
            if shards[-1] and sum(n for _, n in shards[-1]) + size > SHARD_BYTES:
                shards.append([])
            shards[-1].append((name, size))
        index = {}
        for i, shard in enumerate(shards, 1):  # one shard's tensors in memory at a time
            file = ("model.safetensors" if len(shards) == 1
                    else f"model-{i:05d}-of-{len(shards):05d}.safetensors")
            save_file({name: weight.to("cpu", dtype).contiguous()
                       for _, (name, weight) in zip(shard, merged)},
                      os.path.join(path, file), metadata={"format": "pt"})
            index.update((name, file) for name, _ in shard)
        index_file = os.path.join(path, "model.safetensors.index.json")
        if len(shards) > 1:
            total = sum(n for shard in shards for _, n in shard)
            _write_json(index_file, {"metadata": {"total_size": total}, "weight_map": index})
        elif os.path.exists(index_file):
            os.remove(index_file)  # of an earlier checkpoint: readers would follow it
        _write_json(os.path.join(path, "config.json"), self.config.to_json(dtype))


class HeadLogprobs(torch.autograd.Function):
    """x (N, D), weight (V, D), target (N,) -> log p(target) and entropy, (N,) in float32.

    Logits exist for `chunk` tokens at a time and are computed again in the backward pass. Written
    out because autograd would make a gradient of the weight (622 MB for V 151,936 and D 1024) for
    every chunk before adding it; here each chunk is added to one."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, target_N, chunk):
        parts = []
        for x, target in zip(x_ND.split(chunk), target_N.split(chunk)):
            all_nV = F.linear(x, weight_VD).float()
            norm_n = all_nV.logsumexp(-1)
            all_nV -= norm_n[:, None]  # logits become log-probabilities
            chosen_n = all_nV.gather(1, target[:, None])[:, 0]
            parts.append((chosen_n, -all_nV.exp().mul_(all_nV).sum(-1), norm_n))
            del all_nV  # before the next chunk's
        logprobs_N, entropy_N, norm_N = map(torch.cat, zip(*parts))
        ctx.save_for_backward(x_ND, weight_VD, target_N, norm_N)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _):
        x_ND, weight_VD, target_N, norm_N = ctx.saved_tensors
        dx_ND = torch.empty_like(x_ND)
        dweight_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        for at in torch.arange(len(x_ND)).split(ctx.chunk):
            if not len(at):  # no token was masked 1
                continue
            n = slice(int(at[0]), int(at[-1]) + 1)
            x, target, grad = x_ND[n], target_N[n, None], grad_N[n, None]
            d_nV = F.linear(x, weight_VD).float()
            d_nV.sub_(norm_N[n, None]).exp_().mul_(-grad)  # -p g; the chosen one gets (1 - p) g
            d_nV.scatter_add_(1, target, grad)
            d_nV = d_nV.to(x.dtype)
            torch.mm(d_nV, weight_VD, out=dx_ND[n])
            if dweight_VD is not None:
                dweight_VD.addmm_(d_nV.T, x)
            del d_nV
        return dx_ND, dweight_VD, None, None


class Linear(nn.Linear):
    """x W^T without bias; with adapters (alpha / rank) (x A^T) B^T on top, computed in x's
    dtype."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)
        self.register_parameter("lora_A", None)  # (R, inputs)
        self.register_parameter("lora_B", None)  # (outputs, R)
        self.on, self.scale = True, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.lora_A is None or not self.on:
            return y
        low = F.linear(x, self.lora_A.to(x.dtype)) * self.scale  # B T R
        return y + F.linear(low, self.lora_B.to(x.dtype))

    def change(self) -> Tensor:
        """(outputs, inputs) in float32: what the adapters add to the weight."""
        return self.scale * (whole(self.lora_B) @ whole(self.lora_A))


class Block(nn.Module):
    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope, attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)  # B T D
        return x + self.mlp(self.post_attention_layernorm(x))  # B T D


class Attention(nn.Module):
    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        D, E = config.hidden_size, config.head_dim
        self.layer = layer
        self.q_proj = Linear(D, config.num_attention_heads * E)
        self.k_proj = Linear(D, config.num_key_value_heads * E)
        self.v_proj = Linear(D, config.num_key_value_heads * E)
        self.o_proj = Linear(config.num_attention_heads * E, D)
        self.q_norm = RMSNorm(E, config.rms_norm_eps)
        self.k_norm = RMSNorm(E, config.rms_norm_eps)
        self.head_dim = E

    def forward(self, x: Tensor, rope, attend) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), rope).transpose(1, 2)  # B H T E
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), rope).transpose(1, 2)  # B K T E
        v = self.v_proj(x).view(heads).transpose(1, 2)  # B K T E
        if attend is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = attend(self.layer, q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # B H T E -> B T D


class MLP(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(D, M)
        self.up_proj = Linear(D, M)
        self.down_proj = Linear(M, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # B T D


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotation(positions_BT: Tensor, head_dim: int, theta: float, dtype: torch.dtype):
    """cos and sin of the rotary angles, each (B, T, 1, E): pair (i, i + E/2) turns by
    position * theta^(-2i/E); sin is negative in the first half. Angles in float32: positions reach
    262,144."""
    i = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32)
    angles = positions_BT[..., None].float() * theta ** (-i / head_dim)  # B T E/2
    cos, sin = angles.cos(), angles.sin()
    return (torch.cat((cos, cos), -1)[:, :, None].to(dtype),
            torch.cat((-sin, sin), -1)[:, :, None].to(dtype))  # B T 1 E


def rotate(x: Tensor, rope) -> Tensor:
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin  # B T H E


def confined(lengths: list[int], device: torch.device):
    """`attend` for rows of these lengths packed into one: causal attention within each. No T x T
    mask is made. Flash attention over all rows at once where there is a kernel for it, else SDPA
    on one row after another."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if varlen_attn and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # T H E, T K E, T K E
            out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0),
                              enable_gqa=True)
            return out.transpose(0, 1)[None]  # 1 H T E
        rows = zip(*(x.split(lengths, 2) for x in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
                          for row in rows], 2)  # 1 H T E

    return attend


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's all; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, place: Tensor) -> Tensor:
    """This rank's share of it, if `place` is sharded; no longer a view of the whole."""
    if not isinstance(place, DTensor):
        return tensor
    share = distribute_tensor(tensor, place.device_mesh, place.placements, src_data_rank=None)
    return share.clone()


def _shards(path: str) -> list[str]:
    """The safetensors files of a checkpoint, through its index where there is one."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            try:
                files = sorted(set(json.load(file)["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index}: not an index ({error!r:.200})") from None
        if not files or not all(isinstance(name, str) for name in files):
            raise ValueError(f"{index}: weight_map names no files")
    else:
        files = ["model.safetensors"]
    files = [os.path.join(path, name) for name in files]
    absent = [file for file in files if not os.path.exists(file)]
    if absent:
        other = [f for kind in ("gguf", "bin", "pth") for f in glob.glob(f"{path}/*.{kind}")]
        hint = f"; {other[0]} is no safetensors file, and only those are read" if other else ""
        raise FileNotFoundError(f"{', '.join(absent)}: missing ({len(absent)} of {len(files)} "
                                f"files){hint}")
    return files


def _read(files: list[str], wanted: dict[str, Tensor], path: str, ignored=()
          ) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the files, each mapped from disk when its turn comes. First all headers
    are checked, and every name, shape and type that does not fit is told at once."""
    found, wrong, unexpected = set(), [], defaultdict(set)
    for file in files:
        with _open(file) as tensors:
            for name in set(tensors.keys()) - set(ignored):
                if name not in wanted:
                    unexpected[file].add(name)
                    continue
                found.add(name)
                header = tensors.get_slice(name)
                shape, want = tuple(header.get_shape()), tuple(wanted[name].shape)
                if shape != want:
                    wrong.append(f"{file}: {name} has shape {shape}, the config says {want}")
                elif header.get_dtype() not in STORED:
                    wrong.append(f"{file}: {name} is {header.get_dtype()}, supported are "
                                 f"{', '.join(sorted(STORED))}")
    wrong = sorted(wrong) + [f"{file}: unexpected {_names(n)}" for file, n in unexpected.items()]
    if missing := set(wanted) - found:
        wrong.append(f"{path}: missing {_names(missing)}")
    if wrong:
        raise ValueError("; ".join(wrong))
    for file in files:
        with _open(file) as tensors:
            for name in filter(wanted.__contains__, tensors.keys()):
                yield name, tensors.get_tensor(name)


def _open(file: str):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error})") from None


def _names(names: set[str]) -> str:
    """Tensor names on one line; those that differ in the layer alone as one."""
    groups = defaultdict(list)
    for name in names:
        layer = re.search(r"(?<=layers\.)\d+", name)
        groups[re.sub(r"(?<=layers\.)\d+", "{}", name)] += [int(layer[0])] if layer else []
    return ", ".join(name.replace("{}", ",".join(map(str, sorted(layers))))
                     for name, layers in sorted(groups.items()))


def _write_json(path: str, value) -> None:
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
    os.replace(path + ".tmp", path)
