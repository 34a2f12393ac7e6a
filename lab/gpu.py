"""The parts of `python -m lab.bench gpu`, whose help says what their figures are.

`python -m lab.gpu PART FILE` runs one of them, in a process of its own, so that neither its
memory nor its failure reaches the others. FILE gets all samples after each new one: what a
part measured before it failed is kept. Weights are random, of the shape of Qwen3-4B.
"""
import asyncio
import random
import statistics
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

from lab.bench import (
    QWEN3_4B, REPEATS, Samples, adamw, converse, generate_all, make_row, random_ids,
    seconds_of, tree_load, update, with_children)
from model import Qwen3, Qwen3Config
from runtime import console, parallel
from runtime.attention import PackedRows, linear_float32
from runtime.device import DEVICE, memory_used
from runtime.files import write_json
from runtime.pages import attention_for
from runtime.plan import GIB, Plan, memory
from sampler import Sampler

PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, by its data sheet


def attention(samples: Samples, config: Qwen3Config = QWEN3_4B, rows: int = 40) -> None:
    """The update's packs and the sampler's pages, each beside what takes no short cut."""
    rng = random.Random(0)
    prompt = random_ids(rng, 600, config)
    ids = [prompt + random_ids(rng, 150, config) for _ in range(rows)]
    lengths = [len(row) for row in ids]
    packed = PackedRows(sum(ids, []), lengths, torch.device(DEVICE))
    H, K, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, len(packed.computed), E).to(DEVICE, torch.bfloat16)
               for n in (H, K, K))
    got = packed.attend(0, q, k, v)  # 1 H C E
    for row in packed.states.split(lengths):
        row_q, row_k, row_v = (x[:, :, row].float() for x in (q, k, v))
        want = F.scaled_dot_product_attention(
            row_q, row_k, row_v, is_causal=True, enable_gqa=True)  # 1 H T E
        samples.add("packs_gap", (got[:, :, row].float() - want).abs().max().item())

    model = random_model(config)
    sampler = Sampler(model, memory=0.25)
    samples.add("pages_in_place", float(attention_for(model).__name__ == "FlashPages"))
    agree, gaps = [], []
    contexts = [random_ids(rng, 1000, config) for _ in range(8)]
    for row, done in zip(contexts, generate_all(sampler, contexts, 128, temperature=0)):
        with torch.inference_mode():
            whole = torch.tensor([row + list(done.ids)], device=model.device)  # 1 T
            hidden = model.hidden(whole)[0, len(row) - 1:-1]  # N D
            logits = linear_float32(hidden, model.lm_head.weight)  # N V
        sampled = whole[0, len(row):]
        logprobs = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]  # N
        agree += (logits.argmax(-1) == sampled).tolist()
        gaps += [abs(x - y) for x, y in zip(logprobs.tolist(), done.logprobs)]
    samples.add("greedy_agreement", statistics.mean(agree))
    samples.add("logprob_gap", statistics.mean(gaps))


def decode(samples: Samples, config: Qwen3Config = QWEN3_4B,
           loads: tuple = ((1, 960), (16, 960), (64, 960), (1, 32_000))) -> None:
    """Decode steps, beside the time in which the card reads weights and cache once."""
    large = torch.zeros(1 << 29 if DEVICE == "cuda" else 1 << 20, device=DEVICE)
    for repeat in range(REPEATS + 1):
        seconds = seconds_of(lambda: [large.sum() for _ in range(10)])
        if repeat:
            samples.add("read_gb_s", 10 * large.nbytes / seconds / 1e9)
    del large

    model = random_model(config)
    weights = sum(weight.numel() for weight in model.parameters())
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    made = []
    samples.add("make_s", seconds_of(lambda: made.append(Sampler(model, memory=0.25))))
    sampler = made.pop()
    rng = random.Random(2)
    for batch, length in loads:
        for _ in range(REPEATS):
            sampler.load(model)
            rows = [random_ids(rng, length, config) for _ in range(batch)]
            generate_all(sampler, rows, 1)  # fills the cache: only decode steps follow
            before = dict(sampler.stats)
            generate_all(sampler, rows, 128)
            seconds, steps = (sampler.stats[name] - before[name]
                              for name in ("seconds", "steps"))
            read = 2 * (weights + batch * (length + 64) * cached)  # 2 bytes per number
            least = read / statistics.median(samples["read_gb_s"]) / 1e9
            load, rate = f"{batch} x {length}", steps / seconds
            samples.add(f"decode_roofline_share at {load}", least * rate)
            samples.add(f"decode_tokens_s at {load}", batch * rate)


def prefill(samples: Samples, config: Qwen3Config = QWEN3_4B, size: int = 8192) -> None:
    """A long prompt, beside the product of two square matrices."""
    model = random_model(config)
    sampler = Sampler(model, memory=0.25)
    weights = sum(weight.numel() for weight in model.parameters())
    layers = weights - config.vocab_size * config.hidden_size  # logits are for one token
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = 2 * layers * size + 2 * size ** 2 * width
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    rng = random.Random(3)
    for repeat in range(REPEATS + 1):
        product = seconds_of(lambda: [a @ a for _ in range(20)]) / 20
        row = random_ids(rng, size, config)
        seconds = seconds_of(lambda: generate_all(sampler, [row], 1))
        if repeat:
            samples.add("prefill_tokens_s", size / seconds)
            samples.add("prefill_matmul_share", flops / seconds / (2 * size ** 3 / product))


def update_all(samples: Samples, config: Qwen3Config = QWEN3_4B,
               tokens: int = 4096) -> None:
    """Updates of all weights; then the sampler's copy of them."""
    model = time_updates(samples, config, tokens, rank=0)
    sampler = Sampler(model, memory=1 << 30, batch=1, dtype=torch.bfloat16)
    for repeat in range(REPEATS + 1):
        seconds = seconds_of(lambda: sampler.load(model))
        if repeat:
            samples.add("refresh_s", seconds)


def update_lora(samples: Samples, config: Qwen3Config = QWEN3_4B,
                tokens: int = 4096) -> None:
    time_updates(samples, config, tokens, rank=16)


def time_updates(samples: Samples, config: Qwen3Config, tokens: int, rank: int) -> Qwen3:
    """Updates from 16 rows of this many tokens: their rate and memory."""
    world = parallel.World()
    plan = Plan(config, tokens, tokens, rank, 2, 0, recompute=rank > 0)
    if sum(plan.need(sampling=False).values()) > memory(world):
        plan = replace(plan, recompute=True)
    rng, name = random.Random(0), "lora_" if rank else ""
    rows = [make_row(random_ids(rng, tokens, config)) for _ in range(16)]
    layers = plan.parameters[0] - plan.table_parameters
    head = config.vocab_size * config.hidden_size
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = sum(6 * len(row.ids) * layers + 6 * sum(row.mask) * head
                + 6 * len(row.ids) ** 2 * width for row in rows)

    model = random_model(config, rank, trained=True)
    model.recompute = plan.recompute
    optimizer = adamw(model)
    for repeat in range(REPEATS + 1):
        seconds = seconds_of(lambda: update(model, optimizer, rows, tokens))
        if repeat:
            samples.add(f"{name}update_tokens_s", len(rows) * tokens / seconds)
            if not rank:
                samples.add("mfu", flops / seconds / PEAK_FLOPS)
    peak = memory_used()
    samples.add(f"{name}recomputed", float(plan.recompute))
    samples.add(f"{name}peak_gib", peak / GIB)
    planned = plan.need(sampling=False)
    samples.add(f"{name}plan_over_peak", sum(planned.values()) / peak)
    return model


def step(samples: Samples, config: Qwen3Config = QWEN3_4B, roots: int = 64) -> None:
    """A step of GRPO with adapters, without REPLs: the tree load, and an update from all
    nodes of it."""
    model = random_model(config, 16, trained=True)
    model.recompute = True
    optimizer, sampler = adamw(model), Sampler(model, memory=0.5, batch=96)
    for repeat in range(REPEATS + 1):
        nodes = tree_load(config, roots, seed=repeat)
        sampler.load(model)
        sampled = seconds_of(lambda: asyncio.run(converse(sampler, nodes)))
        rows = [make_row(node.ids) for node in with_children(nodes)]
        learnt = seconds_of(lambda: update(model, optimizer, rows, 4096))
        if repeat:
            samples.add("step_sample_s", sampled)
            samples.add("step_update_s", learnt)


def random_model(config: Qwen3Config, rank: int = 0, trained: bool = False) -> Qwen3:
    """bfloat16, and with adapters if they are trained; or float32 and sharded, if all
    weights are."""
    whole = trained and not rank
    with torch.device("meta"):
        model = Qwen3(config)
    model.to(torch.float32 if whole else torch.bfloat16)
    if whole:
        parallel.shard(model, torch.bfloat16)
    model.to_empty(device=DEVICE)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.02)
            else:
                weight.fill_(1)
    if rank:
        model.add_lora(rank, 32.0)
    return model


class Written(Samples):
    """Samples that a file has, too, after each new one."""

    def __init__(self, title: str, path: str):
        super().__init__(title)
        self.path = path

    def add(self, name: str, value: float) -> None:
        super().add(name, value)
        write_json(self.path, self)


# With the seconds after which it is ended: together less than ten minutes.
PARTS = {attention: 70, decode: 130, prefill: 50, update_all: 110, update_lora: 80,
         step: 110}


def main() -> None:
    name, path = sys.argv[1:]
    part = next(part for part in PARTS if part.__name__ == name)
    part(Written(name, path))


if __name__ == "__main__":
    console.start(main)
