"""The decoder and the log-probabilities of its tokens.

A Llama block is pre-norm, with grouped-query attention, SwiGLU and rotary positions. Qwen2
(also 2.5) adds biases to the queries, keys and values. Qwen3 has no biases, but an RMSNorm
on every query and key head before the rotation. Qwen3.5 is a hybrid: three of four layers
are a gated delta net (engine/delta.py); the fourth has attention with an output gate, which
rotates a quarter of each head. Which family does what is a table in engine/hf.py.
Parameters have the names of the Hugging Face checkpoints, so a trained model loads in
transformers or vLLM. LoRA is in engine/lora.py.

Left out: dropout, sliding windows, rope scaling, quantised and mixture-of-experts
checkpoints; engine/hf.py refuses them by name. Tried and failed: float16, whose update is
slower than float32 on a CPU.

Sources: Llama (arXiv 2302.13971), Qwen2 and Qwen3 (2407.10671, 2505.09388), RoPE
(2104.09864), GQA (2305.13245), SwiGLU (2002.05202), Gated DeltaNet (2412.06464), Qwen3.5
(qwen3_5 in transformers).

Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, E head_dim, M width of
the MLP, V vocabulary, N sampled tokens of a batch.
"""
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import hf
from engine.attention import Layout, PackedLayout, gather, recomputed
from engine.device import DEVICE, LARGEST_LOGITS, compute_dtype, upcast
from engine.linear import head_for, linear_float32
from engine.lora import Adaptable, Linear
from engine.packing import Pack
from engine.parallel import local_share
from util import write_json

LOGITS_BYTES = LARGEST_LOGITS[DEVICE]


@dataclass(frozen=True)
class DecoderConfig:
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
    model_type: str = "qwen3"
    # The rest is for hybrids.
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None
    linear_conv_kernel_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None

    @classmethod
    def read(cls, path: str) -> "DecoderConfig":
        """Raises FileNotFoundError, or ValueError with a line that names file and field."""
        raw = hf.read_config(path)
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})

    @property
    def family(self) -> hf.Family:
        """What this decoder does otherwise than a Llama."""
        return hf.FAMILIES[self.model_type]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it is a delta net."""
        types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        return [kind == "linear_attention" for kind in types]


# --- the decoder --------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        D, kinds = config.hidden_size, config.is_linear
        # The KV cache has room for layers with attention alone, so each kind is numbered.
        number = kinds[:layer].count(kinds[layer])
        self.is_linear = kinds[layer]
        self.input_layernorm = norm(config, D)
        if self.is_linear:
            self.linear_attn = DeltaNet(config, number)
        else:
            self.self_attn = Attention(config, number)
        self.post_attention_layernorm = norm(config, D)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope, layout) -> Tensor:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        x = x + mixer(self.input_layernorm(x), rope, layout)  # B T D
        return x + self.mlp(self.post_attention_layernorm(x))  # B T D


def norm(config: DecoderConfig, size: int) -> nn.RMSNorm:
    kind = OffsetNorm if config.family.offset_norm else nn.RMSNorm
    return kind(size, config.rms_norm_eps)


class OffsetNorm(nn.RMSNorm):
    """An RMSNorm that stores its weight minus 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + upcast(self.weight)  # bfloat16 would round it
        return F.rms_norm(upcast(x), self.normalized_shape, weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        D, E = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.head_dim = layer, E
        bias, self.gated = config.family.bias, config.family.output_gate
        self.q_proj = Linear(D, (1 + self.gated) * H * E, bias)  # a gate beside each query
        self.k_proj = Linear(D, K * E, bias)
        self.v_proj = Linear(D, K * E, bias)
        self.o_proj = Linear(H * E, D)
        self.q_norm = self.k_norm = nn.Identity()
        if config.family.head_norm:
            self.q_norm, self.k_norm = norm(config, E), norm(config, E)

    def forward(self, x: Tensor, rope, layout) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)  # B T H E, or B T K E
        q = self.q_proj(x)
        if self.gated:
            q, gate = q.unflatten(2, (-1, 2, self.head_dim)).unbind(3)  # B T H E each
        q = rotate(self.q_norm(q.view(heads)), rope)  # B T H E
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), rope)  # B T K E
        v = self.v_proj(x).view(heads)  # B T K E
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # B H T E, B K T E, B K T E
        out = layout.attend(self.layer, q, k, v).transpose(1, 2)  # B T H E
        if self.gated:
            out = out * gate.sigmoid()
        return self.o_proj(out.flatten(2))  # B T D


class DeltaNet(nn.Module):
    """A gated delta net: q, k and v come from a short causal convolution. How much each
    token forgets and writes depends on its input."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        D, self.layer = config.hidden_size, layer
        H, self.value_dim = config.linear_num_value_heads, config.linear_value_head_dim
        self.key_shape = config.linear_num_key_heads, config.linear_key_head_dim
        values, keys = H * self.value_dim, math.prod(self.key_shape)
        channels = 2 * keys + values
        self.sizes = keys, keys, values
        self.in_proj_qkv = Linear(D, channels)
        self.in_proj_z = Linear(D, values)
        self.in_proj_b = nn.Linear(D, H, bias=False)
        self.in_proj_a = nn.Linear(D, H, bias=False)
        self.conv1d = nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        # At first a head forgets 0.1 % to 80 % per token (the authors' choice).
        step = torch.empty(H).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step.expm1().log())  # softplus of it is the step
        self.A_log = nn.Parameter(torch.empty(H).uniform_(1, 16).log_())
        self.norm = nn.RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, D)

    def forward(self, x: Tensor, rope, layout) -> Tensor:
        qkv = layout.convolve(self.layer, self.in_proj_qkv(x), self.conv1d.weight)
        q, k, v = F.silu(qkv).split(self.sizes, -1)
        q, k = (x.unflatten(2, self.key_shape) for x in (q, k))  # B T heads dimension
        v = v.unflatten(2, (-1, self.value_dim))  # B T heads dimension
        rate, bias, a = map(upcast, (self.A_log, self.dt_bias, self.in_proj_a(x)))
        decay = -rate.exp() * F.softplus(a + bias)  # B T heads
        strength = self.in_proj_b(x).sigmoid()  # B T heads
        out = layout.recur(self.layer, q, k, v, decay, strength)  # B T heads dimension

        gate = F.silu(upcast(self.in_proj_z(x))).view(out.shape)
        out = (self.norm(out) * gate).to(x.dtype)
        return self.out_proj(out.flatten(2))  # B T D


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)  # B T M
        return self.down_proj(gated)  # B T D


def rotation(positions_BT: Tensor, size: int, theta: float, dtype: torch.dtype):
    """cos and sin of the rotary angles, each (B, T, 1, size), for `rotate`.

    The first `size` numbers of a head turn: i and i + size/2 are a point in the plane, that
    turns by position * theta^(-2i/size). Angles are float32: positions reach 262,144."""
    i = torch.arange(0, size, 2, device=positions_BT.device, dtype=torch.float32)
    angles = positions_BT[..., None].float() * theta ** (-i / size)  # B T size/2
    cos, sin = angles.cos(), angles.sin()
    cos = torch.cat((cos, cos), -1)[:, :, None]  # B T 1 size
    sin = torch.cat((-sin, sin), -1)[:, :, None]  # B T 1 size
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, rope) -> Tensor:
    cos, sin = rope
    size = cos.shape[-1]
    turning = x[..., :size]
    turned = turning * cos + turning.roll(size // 2, -1) * sin  # B T H size
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # on meta it would load torch's compiler, for 2 s
            super().reset_parameters()


class Decoder(Adaptable):
    """Logits from ids: a Qwen3.5, Qwen3, Qwen2 or Llama, by config.model_type."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.recompute_above = math.inf  # tokens; activation checkpointing by layer
        self.model = nn.ModuleDict({
            "embed_tokens": Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(
                Layer(config, i) for i in range(config.num_hidden_layers)),
            "norm": norm(config, config.hidden_size),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        for weight in self.parameters():
            if weight.dim() == 2 and not weight.is_meta:  # 0.02 at Qwen3-4B's hidden size
                nn.init.normal_(weight, std=config.hidden_size ** -0.5)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor | None = None,
               layout: Layout | None = None) -> Tensor:
        """(B, T) ids -> (B, T, D) final states.

        Positions count from 0 unless given. `layout` says how tokens see each other; by
        default they are B rows."""
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
        layout = layout or Layout(ids_BT)
        x = self.model["embed_tokens"](ids_BT)  # B T D
        turning = int(self.config.head_dim * (self.config.partial_rotary_factor or 1))
        rope = rotation(positions_BT, turning, self.config.rope_theta, x.dtype)
        recompute = ids_BT.numel() > self.recompute_above
        for layer in self.model["layers"]:
            x = recomputed(layer, x, rope, layout) if recompute else layer(x, rope, layout)
        return self.model["norm"](x)  # B T D

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        return self.lm_head(self.hidden(ids_BT))

    def logprobs(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats) of each sampled token of a pack, given those
        of its sequence before it: two float32 (N,). Entropy has no gradient.

        T holds the sequences one after another. Each sees only itself, and what several
        begin with is computed once. A sequence's first token was not sampled."""
        wanted_T = pack.mask[0, 1:].bool()  # position t predicts token t + 1
        layout = PackedLayout(pack.ids[0].tolist(), pack.lengths, pack.ids.device)
        ids_BC = pack.ids[:, layout.computed]  # 1 T -> 1 C, each common prefix once
        x_BCD = self.hidden(ids_BC, layout.positions[None], layout)
        x_ND = gather(x_BCD[0], layout.states[:-1][wanted_T])  # C D -> N D
        target_N = pack.ids[0, 1:][wanted_T]  # T -> N
        chunk = max(1, LOGITS_BYTES // (4 * self.config.vocab_size))
        return HeadLogprobs.apply(x_ND, self.lm_head.weight, target_N, chunk)

    # --- checkpoints ----------------------------------------------------------------------

    @classmethod
    def on_meta(cls, config: DecoderConfig) -> "Decoder":
        """One whose parameters have names and shapes, but no values and no memory."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def from_pretrained(cls, path: str, dtype: torch.dtype = torch.float32,
                        device: str = "cpu",
                        prepare: Callable = lambda model: None) -> "Decoder":
        """From a directory in the Hugging Face layout. `prepare(model)` runs before weights
        are read. It may add adapters and shard the model: a rank then keeps its share only.
        Raises FileNotFoundError, or ValueError with a line that names files and tensors."""
        model = cls.on_meta(DecoderConfig.read(os.path.join(path, hf.CONFIG)))
        prepare(model)
        weights = {name: w.detach().to(device) for name, w in model.adapters().items()}
        places = model.weights()
        for name, tensor in hf.read_tensors(hf.weight_files(path), places):
            # A copy, so that replacing the file does not change the weights.
            tensor = tensor.to(dtype=dtype, device=device, copy=True)
            weights[name] = local_share(tensor, places[name])
        model.fill(weights)
        return model

    def save_pretrained(self, path: str, dtype: torch.dtype | None = None) -> None:
        """Write config.json and the weights, adapters merged. With sharded weights one rank
        calls this while the others iterate over `merged`."""
        dtype = dtype or self.lm_head.weight.dtype
        hf.write_tensors(path, hf.WEIGHTS, self.merged(), dtype)
        write_json(os.path.join(path, hf.CONFIG), hf.config_json(self.config, dtype))

    def merged_copy(self, dtype: torch.dtype | None = None) -> "Decoder":
        """A frozen plain model that computes the same, in new memory and in `dtype`."""
        copy, dtype = Decoder.on_meta(self.config), dtype or self.lm_head.weight.dtype
        copy.fill({name: weight.to(dtype, copy=True) for name, weight in self.merged()})
        return copy.requires_grad_(False)

    def fill(self, weights: dict[str, Tensor]) -> None:
        """Replace the parameters of these names by these tensors."""
        self.load_state_dict(weights, strict=False, assign=True)
        if self.config.tie_word_embeddings:  # assign=True replaced one of the two names
            self.lm_head.weight = self.model["embed_tokens"].weight


# --- log-probabilities --------------------------------------------------------------------

class HeadLogprobs(torch.autograd.Function):
    """x (N, D), weight (V, D), target (N,) -> log p(target) and entropy, float32 (N,).

    Logits exist for n = `chunk` tokens at a time. What depends on x alone has its gradient
    in the forward pass already, but for a factor of each token. If the weight is trained,
    the backward pass computes the logits again. All chunks then add to one gradient of the
    weight; autograd would make one per chunk."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, target_N, chunk):
        of_x, of_weight, *_ = ctx.needs_input_grad
        parts, slopes, head_VD = [], [], head_for(weight_VD)
        for x, target in zip(x_ND.split(chunk), target_N.split(chunk)):
            all_nV = linear_float32(x, head_VD)  # n D -> n V
            norm_n = all_nV.logsumexp(-1)  # n V -> n
            all_nV -= norm_n[:, None]  # logits become log-probabilities
            chosen_n = all_nV.gather(1, target[:, None])[:, 0]  # n V -> n
            entropy_n = -all_nV.exp().mul_(all_nV).sum(-1)  # n V -> n
            parts.append((chosen_n, entropy_n, norm_n))
            if of_x and not of_weight:
                d_nV = logits_gradient(all_nV, target, torch.ones_like(norm_n))
                slopes.append(d_nV.to(x.dtype) @ weight_VD)  # n V -> n D
                del d_nV
            del all_nV  # before the next chunk's
        logprobs_N, entropy_N, norm_N = map(torch.cat, zip(*parts))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        else:
            ctx.save_for_backward(x_ND, weight_VD, target_N, norm_N)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _):
        if not ctx.needs_input_grad[1]:
            slope_ND, = ctx.saved_tensors
            return (slope_ND * grad_N[:, None]).to(slope_ND.dtype), None, None, None
        x_ND, weight_VD, target_N, norm_N = ctx.saved_tensors
        dx_ND, dweight_VD = torch.empty_like(x_ND), torch.zeros_like(weight_VD)
        head_VD = head_for(weight_VD)
        for begin in range(0, len(x_ND), ctx.chunk):
            n = slice(begin, begin + ctx.chunk)
            all_nV = linear_float32(x_ND[n], head_VD)  # n D -> n V
            all_nV -= norm_N[n, None]
            d_nV = logits_gradient(all_nV, target_N[n], grad_N[n]).to(x_ND.dtype)
            torch.mm(d_nV, weight_VD, out=dx_ND[n])  # n V -> n D
            dweight_VD.addmm_(d_nV.T, x_ND[n])
            del all_nV, d_nV
        return dx_ND, dweight_VD, None, None


def logits_gradient(logprobs_nV: Tensor, target_n: Tensor, grad_n: Tensor) -> Tensor:
    """From all log-probabilities, in place: the gradient of the logits, where `grad_n` is
    that of the targets' log-probabilities."""
    grad_n1 = grad_n[:, None]
    d_nV = logprobs_nV.exp_().mul_(-grad_n1)  # -p g
    return d_nV.scatter_add_(1, target_n[:, None], grad_n1)  # (1 - p) g for the target


# --- checkpoints --------------------------------------------------------------------------

def open_checkpoint(path: str) -> Decoder:
    """The model of a directory, to sample from. If that holds adapters alone, they are
    added to the weights that they were trained on."""
    saved = hf.adapter_config(path)
    base = path
    if saved:  # an absolute path, or one seen from the adapters
        base = os.path.join(path, "adapter", saved["base_model_name_or_path"])
    model = Decoder.from_pretrained(base, compute_dtype(base), DEVICE)
    if saved:
        model.add_lora(saved["r"], saved["lora_alpha"])
        hf.load_adapter(model, os.path.join(path, "adapter"))
        model = model.merged_copy()
    return model.order()
