"""What a run needs in memory, from config.json alone: `python train.py --model DIR --plan`.

Sums what is held at the same time in an update, the fullest moment of a step. Counted:
weights, gradients, Adam's two moments, the sampler's copy and cache, what the forward pass
keeps for the backward pass, and the largest temporary tensors of both. Of several ranks,
each has a share of the trained model and a sampler of its own.

Left out: the process itself (torch is 0.3 GB on a CPU, a CUDA context 0.5 GB), a sampler's
prefill (smaller than an update of the same rows), a reference model, and fragmentation.
"""
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.device import COMPUTE, DEVICE

LOGITS_BYTES = 1 << 27  # float32 logits that Qwen3.logprobs holds at a time
MOST_WINDOWS = 96  # the cache is made for at most this many sequences of full length
DEVICE_SHARE = 0.9  # of the device, for the cache and everything else together
GIB = 1 << 30
MIB = 1 << 20
PARTS = ("weights", "gradients", "optimizer", "gathered", "sampler copy", "KV cache",
         "activations")


@dataclass(frozen=True)
class Plan:
    """A run's needs. Trained weights and gradients are float32.

    With adapters, activations and the sampler take `frozen` bytes per element, as frozen
    weights do (2: bfloat16, 4: float32). In full fine-tuning, which is `rank` 0, they take
    `compute` bytes.
    """
    config: Any  # the Qwen3Config of model.py, which this file does not import
    window: int  # tokens of the longest conversation
    row: int  # tokens in a forward pass of the update
    rank: int
    frozen: int
    recompute: bool  # activation checkpointing by layer
    have: int  # bytes of the device
    compute: int = 4
    moment: int = 4  # bytes per element of each of Adam's two moments

    @property
    def element(self) -> int:
        """Bytes per element of activations, the sampler's weights and its cache."""
        return self.frozen if self.rank else self.compute

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """D, H, K, M of the sums below: hidden size, query heads, key heads, MLP."""
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        return c.hidden_size, heads * c.head_dim, kv_heads * c.head_dim, c.intermediate_size

    @property
    def layer_parameters(self) -> int:
        D, H, K, M = self.widths
        norms = 2 * D + 2 * self.config.head_dim
        return 2 * D * H + 2 * D * K + 3 * D * M + norms

    @property
    def table_parameters(self) -> int:
        """Embedding and head, which are one matrix if tied."""
        tables = 1 if self.config.tie_word_embeddings else 2
        return tables * self.config.vocab_size * self.config.hidden_size

    @property
    def parameters(self) -> tuple[int, int]:
        """Of the model, and of the adapters."""
        D, H, K, M = self.widths
        layers = self.config.num_hidden_layers
        model = self.table_parameters + layers * self.layer_parameters + D
        # An adapter of a matrix has `rank` rows of its inputs and as many of its outputs.
        ends = 2 * (D + H) + 2 * (D + K) + 3 * (D + M)
        return model, layers * self.rank * ends

    @property
    def attention_cost(self) -> float:
        """Attention to T tokens costs T times this share of all other work for a token."""
        return self.config.num_hidden_layers * self.widths[1] / self.parameters[0]

    def need(self, ranks: int = 1, sampling: bool = True) -> dict[str, int]:
        """Bytes of each of PARTS on each of `ranks`; the warm-up needs no sampler."""
        model, adapters = self.parameters
        trained = adapters if self.rank else model
        weights = model * (self.frozen if self.rank else 4) + adapters * 4
        parts = {
            "weights": weights // ranks,
            "gradients": trained * 4 // ranks,
            "optimizer": 2 * trained * self.moment // ranks,
            "gathered": self.gathered() if ranks > 1 or self.casts else 0,
            "sampler copy": model * self.element if sampling else 0,
            "KV cache": 0,
            "activations": self.activations(),
        }
        if sampling:
            parts["KV cache"] = self.cache_tokens(sum(parts.values())) * self.token_bytes
        return parts

    @property
    def casts(self) -> bool:
        """Whether layers compute in another type than their weights have."""
        return not self.rank and self.compute != 4

    def gathered(self) -> int:
        """Bytes of a sharded model's weights and gradients that are complete at a time.

        The embedding and two layers to compute with. If they are trained, also gradients of
        the embedding and of one layer, and the same in float32, to sum them over ranks.
        """
        table, layer = self.table_parameters, self.layer_parameters
        size = (table + 2 * layer) * self.element
        if not self.rank:
            size += (table + layer) * (self.element + 4)
        return size

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in the cache."""
        _, _, K, _ = self.widths
        return self.config.num_hidden_layers * 2 * K * self.element

    def cache_tokens(self, others: int) -> int:
        """Tokens of 1 to MOST_WINDOWS full windows: what fits beside `others` bytes."""
        room = int(DEVICE_SHARE * self.have - others)
        windows = room // (self.token_bytes * self.window)
        return max(1, min(windows, MOST_WINDOWS)) * self.window

    @property
    def checkpoint_bytes(self) -> int:
        """On disk: trained weights in float32, and Adam's two moments."""
        model, adapters = self.parameters
        return (4 + 2 * self.moment) * (adapters if self.rank else model)

    def disk_bytes(self, checkpoints: int, warmup: bool, best: bool) -> int:
        """What a run's directory holds when it is fullest: so many checkpoints, of a
        warm-up with all weights; the models warmup and final; and best, if it is kept,
        twice while it is replaced."""
        model, adapters = self.parameters
        step = replace(self, rank=0) if warmup else self
        weights = model * (self.frozen if self.rank else 4) + 4 * adapters
        return checkpoints * step.checkpoint_bytes + (4 if best else 2) * weights

    def activations(self) -> int:
        """What a forward pass keeps, and the largest temporary tensors of both passes."""
        layers, vocabulary = self.config.num_hidden_layers, self.config.vocab_size
        D, H, K, M = self.widths
        # An RMSNorm keeps its input in float32; if its weight is trained, also the result.
        norms = (4 if self.rank else 8) * (2 * D + H + K)
        # Inputs of linear layers; q, k, v, attention's output; gate, up, SiLU and product.
        layer = self.row * (norms + self.element * (2 * D + 2 * H + 2 * K + 4 * M))
        kept = layers * layer
        running = 0
        if self.recompute:
            kept = layers * self.row * D * self.element
            running = layer
        # The gradients of the product, of SiLU and of the gate exist at the same time.
        mlp = 3 * self.row * M * self.element

        logits = min(LOGITS_BYTES, self.row * vocabulary * 4)
        head = 2 * logits + 3 * self.row * D * self.element
        # The head's gradient is made first. The embedding's is dense, too. If tied, both
        # are there when they are added up.
        table = 0 if self.rank else vocabulary * D * 4
        adding = (3 if self.config.tie_word_embeddings else 1) * table
        return max(kept + head + table, kept + running + mlp + table, adding)

    def problem(self, warmup: bool, ranks: int = 1) -> str | None:
        """None if the run fits, else one line: what it needs, and what would fit."""
        def total(plan: Plan) -> int:
            need = sum(plan.need(ranks).values())
            if warmup:  # it trains all weights
                full = replace(plan, rank=0).need(ranks, sampling=False)
                need = max(need, sum(full.values()))
            return need

        if total(self) <= self.have:
            return None
        changes = {
            "--recompute": {"recompute": True},
            "--bf16-states": {"moment": 2},
            "--bf16-states --recompute": {"moment": 2, "recompute": True},
            "--lora-rank 16": {"rank": 16},
            "--lora-rank 16 --recompute": {"rank": 16, "recompute": True},
        }
        fits = [flags for flags, change in changes.items()
                if total(replace(self, **change)) <= self.have]
        advice = "reduce the window in rlm.json or --micro-tokens, or take a smaller model"
        if fits:
            advice = f"it fits with {' or '.join(fits)}"
        first = ""
        if warmup and self.rank:
            first = " with its warm-up, which trains all weights"
        return (f"the run needs {total(self) / GIB:.1f} GiB{first}, the device has "
                f"{self.have / GIB:.1f}; {advice}")

    def table(self, many: int = 8) -> str:
        """For people: full fine-tuning and LoRA, each on one rank and on `many`."""
        full, lora = replace(self, rank=0), replace(self, rank=self.rank or 16)
        columns = {}
        for name, plan in (("full", full), (f"LoRA {lora.rank}", lora)):
            columns[f"{name}, 1 rank"] = plan, plan.need()
            columns[f"{name}, {many} ranks"] = plan, plan.need(many)
        most = sum(full.need().values())
        name, unit = ("GiB", GIB) if most > GIB else ("MiB", MIB)

        def line(head, cells):
            return f"{head:13}" + "".join(f"{cell:>18}" for cell in cells)

        needs = [need for _, need in columns.values()]
        tokens = [need["KV cache"] // plan.token_bytes for plan, need in columns.values()]
        model, adapters = lora.parameters
        again = ", layers recomputed" if self.recompute else ""
        return "\n".join([
            f"{model:,} parameters, {adapters:,} in adapters of rank {lora.rank}; rows of "
            f"{self.row:,} tokens{again}; {name} on each rank:",
            line("", columns),
            *(line(part, [f"{need[part] / unit:.2f}" for need in needs]) for part in PARTS),
            line("sum", [f"{sum(need.values()) / unit:.2f}" for need in needs]),
            line("cache tokens", [f"{count:,}" for count in tokens]),
            f"the device has {self.have / unit:,.2f} {name}",
        ])


def of_run(config, shape, window: int, frozen: torch.dtype, world) -> Plan:
    """The plan of a run with these flags, for a model of this shape.

    On a CPU the ranks of a machine share its memory."""
    sharing = 1 if DEVICE == "cuda" else world.local_size
    return Plan(shape, window, max(window, config.micro_tokens), config.lora_rank,
                frozen.itemsize, config.recompute, device_bytes(DEVICE) // sharing,
                COMPUTE.itemsize, moment=2 if config.bf16_states else 4)


def device_bytes(device: str) -> int:
    """Free memory: of the GPU, or of this machine within the limit of its control group."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        free = _field("/proc/meminfo", "MemAvailable") << 10  # counts what caches give back
        limit = _field("/sys/fs/cgroup/memory.max", "")  # "max": there is none
        used = _field("/sys/fs/cgroup/memory.current", "")
        cached = _field("/sys/fs/cgroup/memory.stat", "inactive_file")
        free = min(free, limit - used + cached)
    except (OSError, StopIteration, ValueError):
        pass
    return free


def _field(path: str, name: str) -> int:
    """The number in the first line that starts with `name`."""
    with open(path, encoding="ascii") as file:
        line = next(line for line in file if line.startswith(name))
    return int("".join(character for character in line if character.isdigit()))
