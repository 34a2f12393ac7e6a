"""What a run needs in memory, from config.json alone: `python train.py --model DIR --plan`.

Sums what is held at the same time in an update, the fullest moment of a step. What SHARE
leaves of the device is for the rest: the process, workspaces of libraries, the sampler's
buffers, masks, fragmentation.
"""
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.delta import CHUNK
from engine.device import DEVICE, compute_dtype, free_bytes
from engine.pages import FlashPages, GatheredRows
from engine.states import SLOTS_PER_WINDOW, shapes, state_bytes
from util import readable

# How many sequences of full length the cache holds. The least is low, so that a longer
# window fits. Fewer such sequences then run at once, so sampling takes longer.
LEAST_WINDOWS, MOST_WINDOWS = 4, 96
MOST_REQUESTS = {"cuda": 192, "cpu": 96}  # at once; most end before their window is full
SHARE = {"cuda": 0.9, "cpu": 0.7}  # of what is free; a CPU has other programs, too
GIB = 1 << 30
CARDS = (24, 48, 80, 141)  # GiB of a GPU; one of them is left to CUDA
LEAST_ROW = 2048  # tokens of a micro-batch, if the window is shorter
LEAST_WORK = 1 << 21  # its tokens x width, to keep a GPU busy
LEAST_WINDOW = 4096  # a window is not made shorter than this
WINDOW_STEP = 1024  # a window that is made shorter is a multiple of this


@dataclass(frozen=True)
class Plan:
    """A run's needs. Trained weights and gradients are float32. Activations, frozen weights
    and the sampler have the type `dtype`. `rank` 0 trains all weights."""
    config: Any  # the DecoderConfig of model.py, which this file does not import
    window: int  # tokens of the longest conversation
    row: int  # tokens in a forward pass of the update
    rank: int
    dtype: torch.dtype
    have: int  # bytes of the device
    recompute: bool = False  # activation checkpointing by layer
    apart: bool = False  # the sampler computes adapters beside the trainer's weights
    device: str = DEVICE
    most_windows: int = MOST_WINDOWS  # that the trees of a step or an evaluation can fill
    reference: bool = False  # a KL term has a frozen model of its own

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """D, H, K, M of the sums below: hidden size, query heads, key heads, MLP."""
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        return c.hidden_size, heads * c.head_dim, kv_heads * c.head_dim, c.intermediate_size

    @property
    def linear_widths(self) -> tuple[int, int, int]:
        """C, V, N of the sums below: channels of the convolution, values and heads of a
        delta net."""
        (_, channels), (heads, _, dimension) = shapes(self.config)
        return channels, heads * dimension, heads

    @property
    def layers(self) -> tuple[int, int]:
        """How many have attention, and how many a delta net."""
        linear = self.config.is_linear
        return linear.count(False), linear.count(True)

    @property
    def parameters(self) -> tuple[int, int, int, int]:
        """Of the model; of embedding and head, which are one matrix if tied; of the largest
        layer; and of the adapters, `rank` rows at both ends of each matrix."""
        c = self.config
        D, H, K, M = self.widths
        (full, linear), gate = self.layers, H * (c.model_type == "qwen3_5_text")
        table = (1 if c.tie_word_embeddings else 2) * c.vocab_size * D
        rest, rest_ends = 3 * D * M + 2 * D, 3 * (D + M)
        layer = rest + 2 * D * (H + K) + D * gate
        if c.model_type == "qwen2":
            layer += H + 2 * K
        elif c.model_type != "llama":
            layer += 2 * c.head_dim
        model = table + full * layer + D
        ends = full * (rest_ends + 2 * (D + H) + 2 * (D + K) + gate)
        if linear:
            C, V, N = self.linear_widths
            net = rest + D * (C + 2 * V + 2 * N)
            net += C * c.linear_conv_kernel_dim + 2 * N + c.linear_value_head_dim
            model += linear * net
            layer = max(layer, net)
            ends += linear * (rest_ends + 3 * D + C + 2 * V)
        return model, table, layer, self.rank * ends

    @property
    def attention_cost(self) -> float:
        """Attention to T tokens costs T times this share of all other work for a token."""
        return self.layers[0] * self.widths[1] / self.parameters[0]

    @property
    def seen_cost(self) -> float:
        """The size of a row's copy of a token's keys and values, over that of a computed
        token. Flash attention's backward pass holds, for a moment, gradients of the copy,
        of each query head's, and their sums in float32."""
        D, H, K, _ = self.widths
        (full, linear), size = self.layers, self.dtype.itemsize
        copy, moment = 2 * K * size, 2 * (K + H) * size + 8 * K
        if self.device == "cpu":  # one row after another
            copy, moment = 8 * K, 0
        if self.recompute:  # only one layer has copies
            return (copy + moment) / ((full + linear) * D * size + max(self.kept_bytes))
        kept, kept_linear = self.kept_bytes
        return (full * copy + moment) / (full * kept + linear * kept_linear)

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """What a layer keeps of each token for the backward pass: with attention, and with
        a delta net."""
        D, H, K, M = self.widths
        hybrid, size = self.config.model_type == "qwen3_5_text", self.dtype.itemsize
        # An RMSNorm keeps its input. On a CPU that is float32; if its weight is trained,
        # also the result.
        normed = 2 * D + H + K if hybrid or self.config.model_type == "qwen3" else 2 * D
        each = 4 if hybrid else size
        if self.device == "cpu":
            each = 4 if self.rank else 8
        # Inputs of linear layers; q, k, v, attention's output; gate, up, SiLU and product.
        kept = each * normed + size * (2 * D + 2 * H + 2 * K + 4 * M)
        if self.device == "cpu":  # short rows attend in float32, each by itself
            kept += 4 * (2 * H + 2 * K) - size * (H + 2 * K)
        if not self.layers[1]:
            return kept, 0
        C, V, N = self.linear_widths
        # Beside norms, inputs and the MLP: the convolution's input and output, SiLU of it;
        # the rule's output, normed; z, SiLU of it; their product. Decay and strength.
        net = each * (2 * D + V) + size * (2 * D + 4 * M)
        net += size * (3 * C + V) + 4 * 3 * V + 4 * 5 * N
        return kept + size * 2 * H, net

    @property
    def rule_bytes(self) -> int:
        """What one delta rule keeps of each token while its layer goes backward."""
        _, (heads, key, value) = shapes(self.config)
        keys = 11 * self.config.linear_num_key_heads * key  # measured, as what follows
        each = 1.5 * key + 3 * value + 9 * CHUNK + 3 * key * value / CHUNK
        return 4 * (keys + heads * each)

    def activations(self) -> int:
        """What a forward pass keeps, and the largest temporary tensors of both passes."""
        (full, linear), vocabulary = self.layers, self.config.vocab_size
        D, _, _, M = self.widths
        layer, net = (self.row * kept for kept in self.kept_bytes)
        kept, running = full * layer + linear * net, 0
        if self.recompute:
            kept = (full + linear) * self.row * D * self.dtype.itemsize
            running = max(layer, net)
        if linear:  # the rule of a layer is computed again
            running += int(self.row * self.rule_bytes)
        # The gradients of the product, of SiLU and of the gate exist at the same time.
        mlp = 3 * self.row * M * self.dtype.itemsize
        logits = 1 << (27 if self.device == "cpu" else 30)  # as model.py has it
        head = 2 * min(logits, self.row * vocabulary * 4)
        head += 3 * self.row * D * self.dtype.itemsize

        # In float32: the head's gradient, which is first.
        whole = 0 if self.rank else 4 * vocabulary * D
        return kept + max(head, running + mlp) + whole

    @property
    def window_bytes(self) -> int:
        """Whole pages for the keys and values of a full window, one more in reserve for each
        request that runs, and the states of linear layers."""
        page = (GatheredRows if self.device == "cpu" else FlashPages).page
        token = 2 * self.layers[0] * self.widths[2] * self.dtype.itemsize
        states = SLOTS_PER_WINDOW * state_bytes(self.config, self.dtype.itemsize)
        return token * page * (-(-self.window // page) + 1) + states

    def need(self, ranks: int = 1) -> dict[str, int]:
        """Bytes of each part on each of `ranks`, which has a share of the trained model and
        a sampler of its own."""
        model, table, layer, adapters = self.parameters
        # What is complete at a time of a sharded model: the embedding, two layers to
        # compute with, gradients of one, and the same in float32 to sum them over ranks.
        gathered = (table + 2 * layer) * self.dtype.itemsize
        trained, weights = adapters, model * self.dtype.itemsize + 4 * adapters
        if not self.rank:
            gathered += (table + layer) * (self.dtype.itemsize + 4)
            trained, weights = model, 4 * model
        casts = ranks > 1 or (not self.rank and self.dtype.itemsize != 4)
        copies = casts or (self.rank and not self.apart)
        parts = {
            "weights": weights // ranks,
            "reference": self.reference * model * self.dtype.itemsize // ranks,
            "gradients": 4 * trained // ranks,
            "optimizer": 8 * trained // ranks,
            "gathered": gathered if casts else 0,
            "sampler copy": model * self.dtype.itemsize if copies else 0,
            "activations": self.activations(),
        }
        # Full windows, as many as fit beside the rest. A CPU gathers the cache in rows.
        times = 2 if self.device == "cpu" else 1
        left = int(SHARE[self.device] * self.have) - sum(parts.values())
        windows = max(left // (times * self.window_bytes), LEAST_WINDOWS)
        cache = min(windows, self.most_windows) * self.window_bytes
        return parts | {"KV cache": cache, "cache rows": (times - 1) * cache}

    def fits(self, ranks: int) -> bool:
        return sum(self.need(ranks).values()) <= SHARE[self.device] * self.have

    def fitted(self, ranks: int = 1) -> "Plan":
        """The longest window that fits, with the first of these changes that it needs:
        none; layers are computed again in the backward pass; with adapters on one rank, the
        sampler also has no copy of the frozen weights. If none fits, the last try."""
        changes = [{}, {"recompute": True}]
        if self.rank and ranks == 1:
            changes.append({"recompute": True, "apart": True})
        longest = (self.window - 1) // WINDOW_STEP * WINDOW_STEP
        plans = [self]
        plans += [replace(self, window=window, row=min(self.row, max(window, LEAST_ROW)))
                  for window in range(longest, LEAST_WINDOW - 1, -WINDOW_STEP)]
        tries = [replace(plan, **change) for plan in plans for change in changes]
        return next((plan for plan in tries if plan.fits(ranks)), tries[-1])

    def on_card(self, size: int) -> "Plan":
        """The same run on a GPU of `size` GB, which need not be in this machine."""
        have, row = (size - 1) * GIB, max(self.row, LEAST_WORK // self.config.hidden_size)
        return replace(self, have=have, row=row, device="cuda", dtype=torch.bfloat16)

    def table(self, wanted: "Plan") -> str:
        """For people: what this run takes on each of one and of eight cards, and by the
        size of a card the longest window that fits, up to that of `wanted`, how many of
        them the cache holds, and whether the sampler has no copy."""
        needs = [self.need(n) for n in (1, 8)]
        needs = [need | {"sum": sum(need.values())} for need in needs]
        rows = [("cards", 1, 8)]
        rows += [(part, *(readable(need[part]) for need in needs)) for part in needs[0]
                 if any(need[part] for need in needs)]
        for card in CARDS:
            cells = []
            for n in (1, 8):
                plan = wanted.on_card(card).fitted(n)
                windows = plan.need(n)["KV cache"] // plan.window_bytes
                cell = f"{plan.window:,}, {windows} windows" + ", no copy" * plan.apart
                cells.append(cell if plan.fits(n) else "-")
            rows.append((f"window, {card} GB", *cells))
        model, *_, adapters = self.parameters
        return "\n".join([
            f"{model:,} parameters, {adapters:,} in adapters",
            f"a window of {self.window:,} tokens; the device has {readable(self.have)}",
            *(f"{name:16}{one:<30}{eight}" for name, one, eight in rows)])


def plan_of(config, shape, limits, have: int) -> Plan:
    """The plan of a run with these flags, whose trees have these limits (an RLMConfig)."""
    row = max(limits.window, LEAST_ROW)
    if DEVICE == "cuda":
        row = max(row, LEAST_WORK // shape.hidden_size)
    nodes = max(config.questions * config.group, config.heldout) * limits.max_nodes
    return Plan(shape, limits.window, row, config.lora_rank, compute_dtype(config.model),
                have, most_windows=min(nodes, MOST_WINDOWS),
                reference=bool(config.kl and not config.lora_rank))


def free_memory(world) -> int:
    """Free bytes that each rank has at least: all have the same plan. On a CPU the ranks of
    a machine share its memory. A collective: all ranks call it."""
    sharing = 1 if DEVICE == "cuda" else world.local_size
    return min(world.gather(free_bytes() // sharing))
