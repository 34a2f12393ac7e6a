"""What only a GPU can tell: a table in Markdown.

    python -m experiments.gpu [--model DIR]        without it a random Qwen3-4B

How far the log-probabilities of the sampler and of packed sequences are from those of plain
rows; the speed of prompts, decoding and updates, to compare with the card's data sheet; and
the peak of memory beside the plan. Each part is a process. Without a GPU DIR can be tiny.
"""
import argparse
import asyncio
import random
from functools import partial
from multiprocessing import get_context

import engine  # noqa: F401  before torch: it says how torch's threads wait

import torch

from engine import parallel
from engine.device import DEVICE
from engine.packing import collate
from engine.pages import token_bytes
from engine.plan import GIB, SHORT, Plan, Sizes
from experiments.bench import clock, our_losses, sequence_of, step
from grpo import Sequence
from model import Decoder, DecoderConfig
from sampler import Sampler

QWEN3_4B = DecoderConfig(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128)
NEW = 128  # tokens that are sampled after a prompt
LOADS = [(batch, length) for length in (1024, 8192) for batch in (1, 16, 64, 96)]
UPDATE = ("weights", "gradients", "optimizer", "gathered", "activations")  # of a plan


def show(name: str, *values: float) -> None:
    print(f"| {name} | {' | '.join(f'{value:,.4g}' for value in values)} |", flush=True)


def prompt(model: Decoder, length: int, seed: int) -> list[int]:
    """At most so many tokens, of any vocabulary, with room for NEW after them."""
    length = min(length, model.config.max_position_embeddings - NEW)
    return random.Random(seed).choices(range(64), k=length)


def generate(sampler: Sampler, prompts: list[list[int]], tokens: int) -> list:
    async def together() -> list:
        return await asyncio.gather(
            *(sampler.generate(ids, tokens, key=(i,)) for i, ids in enumerate(prompts)))

    sampler.stats.clear()
    return asyncio.run(together())


@torch.inference_mode()
def agreement(model: Decoder) -> None:
    shared = prompt(model, 4096, seed=9)[20:]
    prompts = [shared + prompt(model, 20, seed) for seed in range(3)]
    sampler = Sampler(model)
    done = generate(sampler, prompts, NEW)
    sampled = torch.tensor([new.logprobs for new in done], device=DEVICE).flatten()  # N
    ids = torch.tensor(
        [[*given, *new.ids] for given, new in zip(prompts, done)], device=DEVICE)  # B T
    rows = [Sequence(row, [0] * (len(row) - NEW) + [1] * NEW, [], [], 1.0)
            for row in ids.tolist()]
    plain = torch.cat([model.logprobs(collate([row], DEVICE))[0] for row in rows])  # N
    packed, _ = model.logprobs(collate(rows, DEVICE))
    for name, got in (("sampler", sampled), ("packed sequences", packed)):
        gap = (got - plain).abs()
        show(f"{name}: mean, largest difference", gap.mean().item(), gap.max().item())


def sampling(model: Decoder) -> None:
    weights = sum(weight.numel() for weight in model.parameters())
    cached = token_bytes(model.config, 1)  # numbers
    sampler = Sampler(model, batch=96)
    generate(sampler, [prompt(model, 1024, seed=9)], 1)  # libraries begin slowly
    for batch, length in LOADS:
        prompts = [prompt(model, length, seed) for seed in range(batch)]
        length = len(prompts[0])
        if batch * (length + NEW) > sampler.cache.count * sampler.cache.size:
            print(f"| {batch} x {length} | does not fit into the cache |")
            continue
        sampler.load(model)  # forgets the prompts before
        done = generate(sampler, prompts, 1)
        rate = batch * length / sampler.stats["seconds"]
        show(f"{batch} x {length}: prompt tokens/s, TFLOP/s", rate, 2e-12 * weights * rate)
        prompts = [[*ids, *new.ids] for ids, new in zip(prompts, done)]
        generate(sampler, prompts, NEW)  # all but the last token is cached: decode steps
        rate = sampler.stats["steps"] / sampler.stats["seconds"]
        read = 2e-9 * (weights + batch * (length + NEW / 2) * cached)  # GB of a step
        show(f"{batch} x {length}: decoded tokens/s, GB/s", batch * rate, read * rate)


def update(model: Decoder, rank: int = 0, above: int = 0) -> None:
    """Of four rows of 8,192 tokens, or of so many that no layer is computed again."""
    rows = [sequence_of(prompt(model, above or 8192, seed), 0) for seed in range(4)]
    c, length, sizes = model.config, len(rows[0].ids), Sizes.of(model)
    if rank:
        model.requires_grad_(True).add_lora(rank, 32.0)
    else:
        model.float().requires_grad_(True)
        parallel.shard(model, torch.bfloat16)
    model.recompute_above = above
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def one_step() -> None:
        step(model, optimizer, our_losses(model, rows, length))
        torch.get_device_module(DEVICE).synchronize()

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()  # a random model is made in float32
    one_step()  # it may compile
    seconds = min(clock(one_step) for _ in range(3))
    plan = Plan(c, sizes, length, rank, torch.bfloat16, 0, recompute_above=above)
    layers, head = sizes.model - sizes.embedding, c.vocab_size * c.hidden_size
    attention = c.is_linear.count(False) * c.num_attention_heads * c.head_dim * length
    rate = len(rows) * length / seconds
    matrices = 4 if rank else 6  # frozen ones have no gradient
    flop = matrices * (layers + head / 2) + 6 * attention  # of a token; half are sampled
    show("tokens/s, TFLOP/s", rate, 1e-12 * flop * rate)
    if DEVICE == "cuda":
        planned = sum(plan.need()[part] for part in UPDATE) / GIB
        show("peak GiB, planned GiB", torch.cuda.max_memory_allocated() / GIB, planned)


PARTS = {"agreement": agreement, "sampling": sampling, "update of all weights": update,
         "update of adapters": partial(update, rank=16),
         "update of adapters, short rows": partial(update, rank=16, above=SHORT)}


def run(part: str, path: str) -> None:
    if path:
        model = Decoder.from_pretrained(path, torch.bfloat16, DEVICE)
    else:
        with torch.device(DEVICE):
            model = Decoder(QWEN3_4B).to(torch.bfloat16)
    PARTS[part](model)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what only a GPU can tell.")
    parser.add_argument("--model", default="", help="directory of a checkpoint")
    path = parser.parse_args().model
    print(f"| torch {torch.__version__} on {DEVICE} | | |\n{'|---' * 3}|")
    for part in PARTS:
        print(f"| **{part}** | | |", flush=True)
        process = get_context("spawn").Process(target=run, args=(part, path))
        process.start()
        process.join()  # if it fails, it shows a traceback, and the next one begins


if __name__ == "__main__":
    main()
