"""What a run needs in memory, from config.json alone: `python train.py --model DIR --plan`.

Sums what is held at the same time in an update, the fullest moment of a step. Counted:
weights, gradients, Adam's two moments, the sampler's copy and cache, what the forward pass
keeps for the backward pass, and the largest temporary tensors of both. Of several ranks,
each has a share of the trained model and a sampler of its own.

A run takes the first of these that fits (`fitted`): all activations are kept; layers are
computed again in the backward pass; with adapters on one rank, the sampler has no copy of
the frozen weights, and computes the adapters beside them; the window is halved.

Left out: the process itself (torch is 0.3 GB on a CPU, a CUDA context 0.5 GB), a sampler's
prefill (smaller than an update of the same rows), a reference model, and fragmentation.
"""
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.device import DEVICE, TYPES
from runtime.files import readable
from runtime.pages import decode

LOGITS_BYTES = 1 << 27  # float32 logits that Qwen3.logprobs holds at a time
MOST_WINDOWS = 96  # the cache is made for at most this many sequences of full length
DEVICE_SHARE = 0.9  # of the device, for the cache and everything else together
GIB = 1 << 30
MIB = 1 << 20
CARDS = (24, 48, 80, 141)  # GiB of a GPU; `what_fits` leaves one of them to CUDA
LEAST_ROW = 2048  # tokens of a micro-batch, if the window is shorter
LEAST_WINDOW = 4096  # a window that nobody asked for is not made shorter than this
PARTS = ("weights", "gradients", "optimizer", "gathered", "sampler copy", "KV cache",
         "cache rows", "activations")


@dataclass(frozen=True)
class Plan:
    """A run's needs. Trained weights and gradients are float32. Activations, frozen weights
    and the sampler take `element` bytes per number. `rank` 0 trains all weights."""
    config: Any  # the Qwen3Config of model.py, which this file does not import
    window: int  # tokens of the longest conversation
    row: int  # tokens in a forward pass of the update
    rank: int
    element: int
    have: int  # bytes of the device
    recompute: bool = False  # activation checkpointing by layer
    apart: bool = False  # the sampler computes adapters beside the trainer's weights
    moment: int = 4  # bytes per element of each of Adam's two moments
    device: str = DEVICE

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """D, H, K, M of the sums below: hidden size, query heads, key heads, MLP."""
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        return c.hidden_size, heads * c.head_dim, kv_heads * c.head_dim, c.intermediate_size

    @property
    def layer_parameters(self) -> int:
        D, H, K, M = self.widths
        vectors = 2 * D
        if self.config.qk_norm:
            vectors += 2 * self.config.head_dim
        if self.config.qkv_bias:
            vectors += H + 2 * K
        return 2 * D * H + 2 * D * K + 3 * D * M + vectors

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
        weights = model * (self.element if self.rank else 4) + adapters * 4
        copies = ranks > 1 or self.casts or (self.rank and not self.apart)
        parts = {
            "weights": weights // ranks,
            "gradients": trained * 4 // ranks,
            "optimizer": 2 * trained * self.moment // ranks,
            "gathered": self.gathered() if ranks > 1 or self.casts else 0,
            "sampler copy": model * self.element if sampling and copies else 0,
            "KV cache": 0,
            "cache rows": 0,
            "activations": self.activations(),
        }
        if sampling:
            cache = self.cache_tokens(sum(parts.values())) * self.token_bytes
            parts["KV cache"], parts["cache rows"] = cache, cache * self.gathers
        return parts

    @property
    def gathers(self) -> bool:
        """Whether the cache is there twice, for want of a kernel that reads its pages. The
        GPUs of another machine are taken to have it."""
        here = self.device == DEVICE
        return self.device == "cpu" or (here and decode is None)

    @property
    def casts(self) -> bool:
        """Whether layers compute in another type than their weights have."""
        return not self.rank and self.element != 4

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
        windows = room // (self.token_bytes * self.window * (1 + self.gathers))
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
        weights = model * (self.element if self.rank else 4) + 4 * adapters
        return checkpoints * step.checkpoint_bytes + (4 if best else 2) * weights

    @property
    def kept_bytes(self) -> int:
        """What a layer keeps of each token for the backward pass."""
        D, H, K, M = self.widths
        # An RMSNorm keeps its input in float32; if its weight is trained, also the result.
        normed = 2 * D
        if self.config.qk_norm:
            normed += H + K
        norms = (4 if self.rank else 8) * normed
        # Inputs of linear layers; q, k, v, attention's output; gate, up, SiLU and product.
        kept = norms + self.element * (2 * D + 2 * H + 2 * K + 4 * M)
        if self.device == "cpu":  # short rows attend in float32, each by itself
            kept += 4 * (2 * H + 2 * K) - self.element * (H + 2 * K)
        return kept

    @property
    def seen_cost(self) -> float:
        """What a row costs for each token that another row has computed: it keeps a copy of
        the token's keys and values. As a share of what a computed token keeps."""
        _, _, K, _ = self.widths
        size = 4 if self.device == "cpu" else self.element
        return 2 * K * size / self.kept_bytes

    def activations(self) -> int:
        """What a forward pass keeps, and the largest temporary tensors of both passes."""
        layers, vocabulary = self.config.num_hidden_layers, self.config.vocab_size
        D, H, K, M = self.widths
        layer = self.row * self.kept_bytes
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
        if self.device == "cpu" and self.element != 4:  # there it is multiplied in float32
            head += vocabulary * D * 4
        if self.device == "cpu":  # masks of rows that share a prefix, in float32
            kept += self.row * self.window * 4
        return max(kept + head + table, kept + running + mlp + table, adding)

    def total(self, ranks: int = 1, all_weights: bool = False) -> int:
        """Bytes on each rank. `all_weights`: its warm-up trains all of them."""
        most = sum(self.need(ranks).values())
        if all_weights:
            full = replace(self, rank=0).need(ranks, sampling=False)
            most = max(most, sum(full.values()))
        return most

    def fitted(self, ranks: int = 1, all_weights: bool = False,
               least: int = LEAST_WINDOW) -> "Plan":
        """With as few changes as make it fit. If nothing does, with all of them."""
        changes = [{}, {"recompute": True}]
        if self.rank and ranks == 1:
            changes.append({"recompute": True, "apart": True})
        window = self.window // 2
        while window >= least:
            row = min(self.row, max(window, LEAST_ROW))
            changes.append(changes[-1] | {"window": window, "row": row})
            window //= 2
        for change in changes:
            plan = replace(self, **change)
            if plan.total(ranks, all_weights) <= plan.have:
                break
        return plan

    def problem(self, ranks: int = 1, all_weights: bool = False) -> str | None:
        """None if the run fits, else one line: what it needs, and what would fit."""
        need = self.total(ranks, all_weights)
        if need <= self.have:
            return None
        advice = "reduce the window in rlm.json, or take more cards or a smaller model"
        for flags, change in (("--bf16-states", {"moment": 2}),
                              ("--lora-rank 16", {"rank": self.rank or 16})):
            if replace(self, **change).fitted(ranks).total(ranks) <= self.have:
                advice = f"it fits with {flags}"
                break
        first = ""
        if all_weights and self.rank:
            first = " with its warm-up, which trains all weights"
        return (f"the run needs {readable(need)}{first}, the device has "
                f"{readable(self.have)}; {advice}")

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
        return "\n".join([
            f"{model:,} parameters, {adapters:,} in adapters of rank {lora.rank}; rows of "
            f"{self.row:,} tokens{self.remarks()}; {name} on each rank:",
            line("", columns),
            *(line(part, [f"{need[part] / unit:.2f}" for need in needs]) for part in PARTS),
            line("sum", [f"{sum(need.values()) / unit:.2f}" for need in needs]),
            line("cache tokens", [f"{count:,}" for count in tokens]),
            f"the device has {self.have / unit:,.2f} {name}",
        ])

    def remarks(self) -> str:
        remark = ", layers computed again" if self.recompute else ""
        return remark + (", adapters sampled unmerged" if self.apart else "")

    def what_fits(self) -> str:
        """For people: the largest window by the size of a card and the number of cards."""
        counts = (1, 2, 4, 8)
        heads = [f"{name}, {n} x" for name in ("full", "LoRA") for n in counts]
        lines = ["the largest window that fits, by card and number of cards:",
                 "        " + "".join(f"{head:>10}" for head in heads)]
        for card in CARDS:
            cells = []
            for rank in (0, self.rank or 16):
                start = replace(self, rank=rank, have=(card - 1) * GIB, device="cuda")
                for n in counts:
                    plan = start.fitted(n)
                    fits = plan.total(n) <= plan.have
                    cells.append(f"{plan.window:,}" if fits else "-")
            lines.append(f"{card:4} GB " + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join(lines)


def of_run(config, shape, window: int, have: int) -> Plan:
    """The plan of a run with these flags, for a model of this shape and `have` bytes."""
    return Plan(shape, window, max(window, LEAST_ROW), config.lora_rank,
                TYPES[config.dtype].itemsize, have, moment=2 if config.bf16_states else 4)


def memory(world) -> int:
    """Bytes that each rank has at least: all have the same plan. On a CPU the ranks of a
    machine share its memory. A collective: all ranks call it."""
    sharing = 1 if DEVICE == "cuda" else world.local_size
    return min(world.gather(device_bytes(DEVICE) // sharing))


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
