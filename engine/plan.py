"""What a run needs in memory, from config.json alone: `python train.py --model DIR --plan`.

Sums what is held at the same time in an update, the fullest moment of a step. What SHARE
leaves of the device is for the rest: the process, workspaces of libraries, the sampler's
buffers, masks, fragmentation.
"""
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.device import DEVICE, LARGEST_LOGITS, compute_dtype, free_bytes
from engine.packing import PackSize
from engine.pages import FlashPages, GatheredPages, window_bytes
from engine.states import shapes
from util import readable

# How many sequences of full length the cache holds. The least is low, so that a longer
# window fits. Fewer such sequences then run at once, so sampling takes longer.
LEAST_WINDOWS, MOST_WINDOWS = 4, 96
MOST_REQUESTS = {"cuda": 192, "cpu": 96}  # at once; most end before their window is full
SHARE = {"cuda": 0.9, "cpu": 0.7}  # how much a run takes; a CPU has other programs, too
GIB = 1 << 30
LEAST_PACK = 2048  # tokens of a pack
LEAST_WORK = 1 << 21  # its tokens times the hidden size on a GPU
SHORT = 4096  # tokens of a pass that keeps activations where longer ones do not
LEAST_WINDOW = 4096  # a window is not made shorter than this
WINDOW_STEP = 1024  # a window that is made shorter is a multiple of this


class Sizes(NamedTuple):
    """How many parameters a decoder has."""
    model: int  # without adapters
    embedding: int  # embedding and head, which are one matrix if they are tied
    layer: int  # the largest
    adapter: int  # of adapters of rank 1

    @classmethod
    def of(cls, model) -> "Sizes":
        """`model` may be on meta. It has no adapters yet."""
        def count(part) -> int:
            return sum(weight.numel() for weight in part.parameters())

        layers = [count(block) for block in model.model["layers"]]
        embedding = count(model) - sum(layers) - count(model.model["norm"])
        adapted = [layer for _, layer in model.adapted()]
        adapter = sum(layer.in_features + layer.out_features for layer in adapted)
        return cls(count(model), embedding, max(layers), adapter)


@dataclass(frozen=True)
class Plan:
    """A run's needs. Trained weights and gradients are float32. Activations, frozen weights
    and the sampler have the type `dtype`. `lora_rank` 0 trains all weights."""
    config: Any  # the DecoderConfig of model.py, which this file does not import
    sizes: Sizes
    window: int  # tokens of the longest conversation
    lora_rank: int
    dtype: torch.dtype
    have: int  # bytes of the device
    recompute_above: float = math.inf  # tokens of a pass with activation checkpointing
    unmerged: bool = False  # the sampler computes adapters beside the trainer's weights
    device: str = DEVICE
    most_windows: int = MOST_WINDOWS  # that the trees of a step or an evaluation can fill
    reference: bool = False  # a KL term has a frozen model of its own

    @property
    def pack_tokens(self) -> int:
        """Tokens in a forward pass of the update: a window, or what keeps a device busy."""
        work = LEAST_WORK // self.config.hidden_size if self.device == "cuda" else 0
        return max(self.window, LEAST_PACK, work)

    @property
    def recompute(self) -> bool:
        """Whether layers of the longest row are computed again in the backward pass."""
        return self.pack_tokens > self.recompute_above

    @property
    def for_packs(self) -> "Plan":
        """The plan of a pack: the same, or that of so few tokens that none of its
        layers is computed again. A longer row is then a pack of its own."""
        if not self.recompute or not self.recompute_above:
            return self
        return replace(self, window=self.recompute_above, recompute_above=math.inf)

    @property
    def pack_size(self) -> PackSize:
        plan = self.for_packs
        return PackSize(plan.pack_tokens, plan.attention_cost, plan.copy_cost)

    @property
    def layers(self) -> tuple[int, int]:
        """How many layers have attention, and how many are a delta net."""
        linear = self.config.is_linear
        return linear.count(False), linear.count(True)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers of a token: hidden state, all queries, all keys, inside the MLP."""
        c = self.config
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return c.hidden_size, query, key, c.intermediate_size

    @property
    def attention_cost(self) -> float:
        """Attention to T tokens costs T times this share of all other work for a token."""
        return self.layers[0] * self.widths[1] / self.sizes.model

    @property
    def copy_cost(self) -> float:
        """Bytes of one token's keys and values, copied for a row that shares it, divided by
        the bytes that a computed token keeps. For a moment, flash attention's backward
        pass also holds gradients of the copy, of each query head's, and their sums in
        float32."""
        (_, query, key, _), size = self.widths, self.dtype.itemsize
        copy, moment = 2 * key * size, 2 * (key + query) * size + 8 * key
        if self.device == "cpu":  # it computes one row after another, in float32
            copy, moment = 8 * key, 0
        copies = 1 if self.recompute else self.layers[0]  # so many layers keep theirs
        return (copies * copy + moment) / sum(self.kept_bytes)

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """What all layers keep of each token for the backward pass; and what a layer that
        is computed again there keeps until its gradients are known."""
        (hidden, query, key, inner), (full, linear) = self.widths, self.layers
        family, size, is_cpu = self.config.family, self.dtype.itemsize, self.device == "cpu"
        # An RMSNorm keeps its input. On a CPU that is float32; if its weight is trained,
        # also the result.
        normed = 4 if family.offset_norm else size
        if is_cpu:
            normed = 4 if self.lora_rank else 8
        # Two norms and the inputs of linear layers; gate, up, SiLU and product.
        mlp = 2 * hidden * (normed + size) + 4 * inner * size
        # Queries, keys, values and attention's output. A gate adds itself and the product.
        attention = mlp + (query + key) * (2 * size + normed * family.head_norm)
        attention += 2 * query * size * family.output_gate
        if is_cpu:  # short rows attend in float32, each by itself
            attention += 8 * (query + key) - size * (query + 2 * key)
        net = 0
        if linear:
            (_, channels), (heads, _, dimension) = shapes(self.config)
            values = heads * dimension
            # The convolution's input, its output and SiLU of that; the rule's output and
            # its norm; z, SiLU of it and their product; decay and strength.
            net = mlp + size * (3 * channels + values) + (normed + 12) * values + 20 * heads
        if self.recompute:
            return (full + linear) * hidden * size, max(attention, net)
        return full * attention + linear * net, 0

    def activations(self) -> int:
        """What a forward pass keeps, and the largest temporary tensors of both passes."""
        (hidden, _, _, inner), size = self.widths, self.dtype.itemsize
        kept, running = self.kept_bytes
        # The gradients of the product, of SiLU and of the gate exist at the same time.
        running += 3 * inner * size
        if self.layers[1]:  # one delta rule is computed again: measured, heads of 128
            (_, channels), (heads, _, dimension) = shapes(self.config)
            running += 22 * channels + 38 * heads * dimension
        logits = 4 * self.pack_tokens * self.config.vocab_size
        logits = min(LARGEST_LOGITS[self.device], logits)
        head = 2 * logits + 3 * self.pack_tokens * hidden * size
        head += (size < 4) * self.second_head
        # The head's gradient is the first, and is float32.
        whole = 0 if self.lora_rank else 4 * self.config.vocab_size * hidden
        most = self.pack_tokens * kept + max(head, self.pack_tokens * running) + whole
        return most if self.for_packs == self else max(most, self.for_packs.activations())

    @property
    def second_head(self) -> int:
        """Bytes of the head that a CPU has beside the weights: in float32 if they have 16
        bits, and for the sampler in another order."""
        c, size = self.config, max(4, self.dtype.itemsize)
        return (self.device == "cpu") * size * c.vocab_size * c.hidden_size

    @property
    def window_bytes(self) -> int:
        """Whole pages for the keys and values of a full window, one more in reserve for a
        request that runs, and the states of linear layers."""
        page = (GatheredPages if self.device == "cpu" else FlashPages).page
        tokens = page * (-(-self.window // page) + 1)
        return window_bytes(self.config, self.dtype.itemsize, tokens)

    def need(self, ranks: int = 1) -> dict[str, int]:
        """Bytes of each part on each of `ranks`, which has a share of the trained model and
        a sampler of its own."""
        sizes, size = self.sizes, self.dtype.itemsize
        adapters = self.lora_rank * sizes.adapter
        # What is complete at a time of a sharded model: the embedding, two layers to
        # compute with, gradients of one, and the same in float32 to sum them over ranks.
        gathered = (sizes.embedding + 2 * sizes.layer) * size
        trained, weights = adapters, sizes.model * size + 4 * adapters
        if not self.lora_rank:
            gathered += (sizes.embedding + sizes.layer) * (size + 4)
            trained, weights = sizes.model, 4 * sizes.model
        casts = ranks > 1 or (not self.lora_rank and size != 4)
        copies = casts or (self.lora_rank > 0 and not self.unmerged)
        parts = {
            "weights": weights // ranks,
            "reference": self.reference * sizes.model * size // ranks,
            "gradients": 4 * trained // ranks,
            "optimizer": 8 * trained // ranks,
            "gathered": gathered if casts else 0,
            "sampler copy": copies * sizes.model * size + self.second_head,
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
        none; layers are computed again in the backward pass, of long rows or of all; with
        adapters on one rank, the sampler also has no copy of the frozen weights. If none
        fits, the last try."""
        changes = [{}, {"recompute_above": SHORT}, {"recompute_above": 0}]
        if self.lora_rank and ranks == 1:
            changes.append({"recompute_above": 0, "unmerged": True})
        longest = (self.window - 1) // WINDOW_STEP * WINDOW_STEP
        windows = [self.window, *range(longest, LEAST_WINDOW - 1, -WINDOW_STEP)]
        tries = [replace(self, window=window, **change)
                 for window in windows for change in changes]
        return next((plan for plan in tries if plan.fits(ranks)), tries[-1])

    def described(self) -> str:
        """For people: what this run takes on one device and on each of eight, with the
        longest window that fits, and how many of these the cache holds."""
        columns = [["devices", "window", *self.need(), "sum", "cached windows"]]
        for n in (1, 8):
            plan = self.fitted(n)
            need, windows = plan.need(n), plan.need(n)["KV cache"] // plan.window_bytes
            columns.append([
                n, f"{plan.window:,}" if plan.fits(n) else "does not fit",
                *map(readable, need.values()), readable(sum(need.values())), windows])
        return "\n".join([
            f"{self.sizes.model:,} parameters, "
            f"{self.lora_rank * self.sizes.adapter:,} in adapters",
            f"the device has {readable(self.have)}",
            *("{:16}{:<16}{}".format(*row) for row in zip(*columns))])


def plan_of(config, model, rlm_config, have: int) -> Plan:
    """The plan of a run with these flags, and trees of this RLMConfig.
    `model` is the decoder, which may be on meta."""
    device, dtype = DEVICE, compute_dtype(config.model)
    if config.card:  # a GPU that need not be here; CUDA takes one of its GB
        device, dtype, have = "cuda", torch.bfloat16, (config.card - 1) * GIB
    nodes = max(config.questions * config.group, config.heldout) * rlm_config.max_nodes
    return Plan(model.config, Sizes.of(model), rlm_config.window, config.lora_rank, dtype,
                have, device=device, most_windows=min(nodes, MOST_WINDOWS),
                reference=bool(config.kl and not config.lora_rank))


def free_memory(world) -> int:
    """Free bytes that each rank has at least: all have the same plan. On a CPU the ranks of
    a machine share its memory. A collective: all ranks call it."""
    sharing = 1 if DEVICE == "cuda" else world.local_size
    return min(world.gather(free_bytes() // sharing))
