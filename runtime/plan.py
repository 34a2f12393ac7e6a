"""What a run needs in memory, from config.json alone: `python train.py --model DIR --plan`.

Sums what is held at the same time in an update, the fullest moment of a step. Counted: weights,
gradients, Adam's two moments, the sampler's copy and cache, what the forward pass keeps for the
backward pass, and the largest temporary tensors of both. Not counted: the process itself (torch
is 0.3 GB on a CPU, a CUDA context 0.5 GB), a sampler's prefill (smaller than an update of the same
rows) and fragmentation. Of several ranks each holds a share of the trained model and a sampler of
its own.
"""
import os
from dataclasses import dataclass, replace

import torch

from model import ADAPTED, LOGITS_BYTES, Qwen3, Qwen3Config

MOST_WINDOWS = 96  # the cache is made for at most so many sequences of full length
SPARE = 0.9  # the cache takes no more of the device than this, the others counted
GIB = 1 << 30
PARTS = ("weights", "gradients", "optimizer", "gathered", "sampler copy", "KV cache",
         "activations")


@dataclass(frozen=True)
class Plan:
    """A run's needs. Trained weights and gradients are float32. Activations and the sampler take
    `frozen` bytes an element (2: bfloat16, 4: float32) with adapters, as frozen weights do, and
    `compute` bytes in full fine-tuning, which is `rank` 0."""
    config: Qwen3Config
    window: int  # tokens of the longest conversation
    row: int  # tokens in a forward pass of the update
    rank: int
    frozen: int
    recompute: bool  # activation checkpointing by layer
    have: int  # bytes of the device
    compute: int = 4
    moment: int = 4  # bytes of each of Adam's two moments

    @property
    def bytes(self) -> int:
        return self.frozen if self.rank else self.compute

    @property
    def parameters(self) -> tuple[int, int]:
        """Of the model, and of the adapters."""
        with torch.device("meta"):
            model = Qwen3(self.config)
        shapes = [w.shape for name, w in model.named_parameters() if name.split(".")[-2] in ADAPTED]
        return (sum(w.numel() for w in model.parameters()),
                self.rank * sum(a + b for a, b in shapes))

    def need(self, ranks: int = 1, sampling: bool = True) -> dict[str, int]:
        """Bytes of each of PARTS, on each of `ranks`; without a sampler for the warm-up."""
        model, adapters = self.parameters
        trained = adapters if self.rank else model
        kept = model * (self.frozen if self.rank else 4) + adapters * 4
        parts = {"weights": kept // ranks, "gradients": trained * 4 // ranks,
                 "optimizer": 2 * trained * self.moment // ranks,
                 "gathered": self.gathered() if ranks > 1 or self.casts else 0,
                 "sampler copy": model * self.bytes if sampling else 0, "KV cache": 0,
                 "activations": self.activations()}
        if sampling:
            parts["KV cache"] = self.cache_tokens(sum(parts.values())) * self.token_bytes
        return parts

    @property
    def casts(self) -> bool:
        """Whether layers compute in another type than their weights have."""
        return not self.rank and self.compute != 4

    def gathered(self) -> int:
        """Of sharded weights: what is whole at a time. The embedding and two layers to compute
        with, and, if trained, gradients of the embedding and a layer, which are then reduced in
        float32."""
        c = self.config
        table = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        layer = (self.parameters[0] - table) // c.num_hidden_layers
        return (table + 2 * layer) * self.bytes + (table + layer) * (self.bytes + 4) * (
            not self.rank)

    @property
    def token_bytes(self) -> int:
        c = self.config
        return c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * self.bytes

    def cache_tokens(self, others: int) -> int:
        """Whole windows in the memory that is left, MOST_WINDOWS at most, one at least."""
        windows = int(SPARE * self.have - others) // (self.token_bytes * self.window)
        return max(1, min(windows, MOST_WINDOWS)) * self.window

    @property
    def checkpoint_bytes(self) -> int:
        """On disk: trained weights and Adam's two moments, in float32."""
        model, adapters = self.parameters
        return 12 * (adapters if self.rank else model)

    def activations(self) -> int:
        """What a forward pass keeps, and the largest temporary tensors of the backward pass."""
        c, b = self.config, self.bytes
        D, M, V = c.hidden_size, c.intermediate_size, c.vocab_size
        H, K = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        # An RMSNorm keeps its input in float32, and if its weight is trained the normed one too.
        norms = (4 if self.rank else 8) * (2 * D + H + K)
        # Inputs of the linear layers; q, k, v and the output of attention; gate, up, SiLU, product.
        layer = self.row * (norms + b * (2 * D + 2 * H + 2 * K + 4 * M))
        kept = c.num_hidden_layers * (self.row * D * b if self.recompute else layer)
        running = layer if self.recompute else 0
        mlp = self.row * b * 3 * M  # gradients of the product, SiLU and gate at the same time
        head = 2 * min(LOGITS_BYTES, self.row * V * 4) + 3 * self.row * D * b
        # The head's gradient is made first. The embedding's is dense too; tied, they are added.
        table = 0 if self.rank else V * D * 4
        return max(kept + head + table, kept + running + mlp + table,
                   (3 if c.tie_word_embeddings else 1) * table)

    def problem(self, warmup: bool, ranks: int = 1) -> str | None:
        """None if the run fits, else one line that says what it needs and what would fit."""
        def total(plan: Plan) -> int:
            full = replace(plan, rank=0).need(ranks, False) if warmup else {}
            return max(sum(plan.need(ranks).values()), sum(full.values()))
        if total(self) <= self.have:
            return None
        changes = {"--recompute": replace(self, recompute=True),
                   "--bf16-states": replace(self, moment=2),
                   "--bf16-states --recompute": replace(self, moment=2, recompute=True),
                   "--lora-rank 16": replace(self, rank=16),
                   "--lora-rank 16 --recompute": replace(self, rank=16, recompute=True)}
        fits = [flags for flags, plan in changes.items() if total(plan) <= self.have]
        first = " with its warm-up, which trains all weights" if warmup and self.rank else ""
        return (f"the run needs {total(self) / GIB:.1f} GiB{first}, the device has "
                f"{self.have / GIB:.1f}; " + (f"it fits with {' or '.join(fits)}" if fits else
                "reduce the window in rlm.json or --micro-tokens, or take a smaller model"))

    def table(self, many: int = 8) -> str:
        """For people: full fine-tuning and LoRA, on one rank and on `many`."""
        full, lora = replace(self, rank=0), replace(self, rank=self.rank or 16)
        plans = [full, full, lora, lora]
        needs = [plan.need(n) for plan, n in zip(plans, (1, many) * 2)]
        name, unit = ("GiB", GIB) if sum(needs[0].values()) > GIB else ("MiB", 1 << 20)

        def line(head, cells):
            return f"{head:13}" + "".join(f"{cell:>18}" for cell in cells)
        model, adapters = lora.parameters
        return "\n".join([
            f"{model:,} parameters, {adapters:,} in adapters of rank {lora.rank}; rows of "
            f"{self.row:,} tokens{', layers recomputed' * self.recompute}; {name} on each rank:",
            line("", [f"{kind}, {n} rank{'s' * (n > 1)}" for kind in ("full", f"LoRA {lora.rank}")
                      for n in (1, many)]),
            *(line(part, [f"{need[part] / unit:.2f}" for need in needs]) for part in PARTS),
            line("sum", [f"{sum(need.values()) / unit:.2f}" for need in needs]),
            line("cache tokens", [f"{need['KV cache'] // plan.token_bytes:,}"
                                  for plan, need in zip(plans, needs)]),
            f"the device has {self.have / unit:,.2f} {name}"])


def device_bytes(device: str) -> int:
    """What is free on the device: of the GPU, or of this machine within its control group."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # counts what caches would give back
            free = next(int(x.split()[1]) << 10 for x in file if x.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:
            used -= next(int(x.split()[1]) for x in file if x.startswith("inactive_file"))
        free = min(free, int(limit) - used) if limit != "max" else free
    except (OSError, StopIteration, ValueError):
        pass
    return free
