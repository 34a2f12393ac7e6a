"""The weights and configs of the golden files in tests/golden, made with transformers.

Each file holds a small Qwen3's logits in float32 and bfloat16 for two rows of ids, 64
greedy tokens with the gap between the two best logits at each, and the config as metadata.
The weights are not stored: `weights` makes them from the config, without torch's generator.
"""

import numpy as np
import torch

GREEDY, PROMPT = 64, 8  # tokens


def config(heads: int, kv_heads: int, head_dim: int, theta: float, tied: bool,
           hidden: int) -> dict:
    return {"model_type": "qwen3", "vocab_size": 211, "hidden_size": hidden,
            "intermediate_size": 3 * hidden, "num_hidden_layers": 3,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "hidden_act": "silu",
            "attention_bias": False}


CONFIGS = {  # head_dim is never hidden / heads
    "tied-1to1-64-1e4": config(4, 4, 64, 1e4, True, 96),
    "untied-2to1-64-1e6": config(4, 2, 64, 1e6, False, 80),
    "tied-4to1-128-5e6": config(4, 1, 128, 5e6, True, 64),
}


def weights(c: dict) -> dict[str, torch.Tensor]:
    """Random weights of this config, float32, under their names; the same everywhere."""
    D, E, M, V = c["hidden_size"], c["head_dim"], c["intermediate_size"], c["vocab_size"]
    H, K = c["num_attention_heads"] * E, c["num_key_value_heads"] * E
    layer = {
        "self_attn.q_proj": (H, D), "self_attn.k_proj": (K, D), "self_attn.v_proj": (K, D),
        "self_attn.o_proj": (D, H), "self_attn.q_norm": (E,), "self_attn.k_norm": (E,),
        "mlp.gate_proj": (M, D), "mlp.up_proj": (M, D), "mlp.down_proj": (D, M),
        "input_layernorm": (D,), "post_attention_layernorm": (D,)}
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(c["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape

    made = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        uniform = np.random.Generator(np.random.PCG64(seed)).random(shape) - 0.5
        value = 1 + uniform if len(shape) == 1 else uniform * (12 / shape[1]) ** 0.5
        made[name] = torch.from_numpy(value).float()
    return made


@torch.no_grad()
def greedy(logits_of, ids: list[int]) -> tuple[list[int], list[float]]:
    """GREEDY tokens, each by a full forward pass, and each one's lead over the second."""
    ids, leads = list(ids), []
    for _ in range(GREEDY):
        best = logits_of(torch.tensor([ids]))[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return ids[-GREEDY:], leads
