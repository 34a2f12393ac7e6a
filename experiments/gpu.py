"""What only a GPU can tell: a table in Markdown.

    python -m experiments.gpu [--model DIR]

Each part is a process of its own, and each row is printed when it is measured:

    agreement   log-probabilities of the sampler and of packed rows, beside plain rows
    sampling    prompts and decoding, beside products of matrices and reads of memory
    update      all weights: MFU, and peak memory beside the plan
    lora        the same with adapters of rank 16
    step        one step of GRPO, 16 questions x 8 trees, in its parts

Weights are random, of the shape of Qwen3-4B, or those of DIR. Shares are of what the card
itself reads and multiplies here. Without a GPU it runs on a tiny DIR.
"""
import argparse
import asyncio
import random
import subprocess
import sys
import time
from functools import partial

import engine  # before torch: it says how torch's threads wait

import torch

from engine import parallel
from engine.device import DEVICE
from engine.packing import collate
from engine.plan import GIB, Plan
from experiments.bench import random_ids, seconds_of, update
from grpo import Row
from model import Qwen3, Qwen3Config
from repl import REPL, trees_at_once
from rlm import side_by_side
from sampler import Sampler

QWEN3_4B = Qwen3Config(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128)
NEW = 128  # tokens that are sampled after a prompt
LOADS = [(batch, length) for length in (1024, 8192) for batch in (1, 16, 64, 96)]
SAMPLING = ("sampler copy", "KV cache", "cache rows")  # of a plan
GROUP, QUESTIONS, CHILDREN, TURNS = 8, 16, 4, 4
MATRIX = 8192 if DEVICE == "cuda" else 512


def row(name: str, *values: float) -> None:
    print(f"| {name} | {' | '.join(f'{value:,.4g}' for value in values)} |", flush=True)


def best(run, repeats: int = 3) -> float:
    """Seconds of the fastest run; the first, which may compile, does not count."""
    return min([seconds_of(run) for _ in range(repeats + 1)][1:])


def multiplied() -> float:
    """FLOP per second of a large product in bfloat16."""
    a, b = torch.randn(2, MATRIX, MATRIX, device=DEVICE, dtype=torch.bfloat16)
    return 2 * MATRIX ** 3 / best(lambda: a @ b)


def read() -> float:
    """Bytes per second of a sum over much memory."""
    large = torch.zeros(8 * MATRIX ** 2, device=DEVICE)
    return large.nbytes / best(large.sum)


def agreement(model: Qwen3) -> None:
    rng = random.Random(0)
    shared = random_ids(rng, window(model) // 2)
    prompts = [shared + random_ids(rng, 20) for _ in range(3)]  # so few may be split
    sampler = Sampler(model)
    done = generate(sampler, prompts, NEW)
    rows = [row_of([*ids, *new.ids], [0] * len(ids) + [1] * len(new.ids))
            for ids, new in zip(prompts, done)]
    sampled = torch.tensor([p for new in done for p in new.logprobs], device=DEVICE)
    pack = collate(rows, DEVICE)
    with torch.inference_mode():
        packed, _ = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
        alone = [collate([each], DEVICE) for each in rows]
        plain = torch.cat([model.logprobs(one["ids"], one["mask"])[0] for one in alone])
    print(f"| attention of the sampler | {type(sampler.attention).__name__} |")
    for name, got in (("sampler", sampled), ("packed rows", packed)):
        gap = (got - plain).abs()
        row(f"{name}: mean, largest difference", gap.mean().item(), gap.max().item())


def sampling(model: Qwen3) -> None:
    c, flops, bandwidth = model.config, multiplied(), read()
    row("TFLOP/s of a product; GB/s read", flops / 1e12, bandwidth / 1e9)
    weights = sum(weight.numel() for weight in model.parameters())
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    size = model.lm_head.weight.itemsize
    sampler, rng = Sampler(model, batch=96), random.Random(2)
    for batch, length in LOADS:
        length = min(length, window(model))
        if batch * (length + NEW) > sampler.pages.count * sampler.pages.size:
            print(f"| {batch} x {length} | does not fit into the cache |")
            continue
        sampler.load(model)  # forgets the prompts before
        prompts = [random_ids(rng, length) for _ in range(batch)]
        filled = seconds_of(lambda: generate(sampler, prompts, 1))
        before = dict(sampler.stats)
        generate(sampler, prompts, NEW)  # the prompts are cached: only decode steps
        seconds, steps = (sampler.stats[key] - before[key] for key in ("seconds", "steps"))
        least = size * (weights + batch * (length + NEW / 2) * cached) / bandwidth
        row(f"{batch} x {length}: prompt tokens/s, share of the product's rate",
            batch * length / filled, 2 * weights * batch * length / filled / flops)
        row(f"{batch} x {length}: decoded tokens/s, share of the reading rate",
            batch * steps / seconds, least * steps / seconds)


def update_all(model: Qwen3, rank: int = 0) -> None:
    c, tokens, flops = model.config, window(model), multiplied()
    length, rng = window(model), random.Random(0)
    mask = [i // 64 % 2 for i in range(length - 1)] + [1]  # every other 64 are sampled
    rows = [row_of(random_ids(rng, length), mask) for _ in range(4)]
    plan = Plan(c, tokens, tokens, rank, torch.bfloat16, 0, recompute=True)
    if rank:
        model.requires_grad_(True).add_lora(rank, 32.0)
    else:
        model.float().requires_grad_(True)
        parallel.shard(model, torch.bfloat16)
    model.recompute = True
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    if DEVICE == "cuda":  # the model was made in float32
        torch.cuda.reset_peak_memory_stats()
    seconds = best(lambda: update(model, optimizer, rows, tokens))
    layers, head = plan.parameters[0] - plan.parameters[1], c.vocab_size * c.hidden_size
    width = c.num_hidden_layers * c.num_attention_heads * c.head_dim
    work = sum(6 * (layers * len(r.ids) + head * sum(r.mask) + width * len(r.ids) ** 2)
               for r in rows)
    row("tokens/s, MFU of the product's rate",
        sum(len(r.ids) for r in rows) / seconds, work / seconds / flops)
    if DEVICE == "cuda":
        planned = sum(n for part, n in plan.need().items() if part not in SAMPLING)
        row("peak GiB, planned GiB", torch.cuda.max_memory_allocated() / GIB, planned / GIB)


def step(model: Qwen3) -> None:
    """Adapters are trained. Each node takes TURNS turns of NEW tokens (fewer in a small
    window); a REPL runs a line of code after each, and as many tokens of observation
    follow. After its first turn a root waits for CHILDREN children."""
    model.requires_grad_(True).add_lora(16, 32.0)
    model.recompute = True
    sampler = Sampler(model, batch=96, copy=True)
    longest = model.config.max_position_embeddings
    new = min(NEW, longest // (3 * TURNS))
    prompt = min(1000, longest - 2 * new * TURNS)
    rows, waited = [], 0.0

    async def node(question: int, key: str, children: int) -> None:
        nonlocal waited
        rng, ids = random.Random(key), random_ids(random.Random(question), prompt)
        mask = [0] * prompt
        async with REPL("x" * 10_000) as repl:
            for turn in range(TURNS):
                done = await sampler.generate(ids, new, key=(key, turn))
                began = time.perf_counter()
                await repl.execute("print(context[:100])")
                waited += time.perf_counter() - began
                ids = [*ids, *done.ids, *random_ids(rng, new)]
                mask += [1] * len(done.ids) + [0] * new
                if turn == 0:
                    await asyncio.gather(*(node(-1, f"{key} {i}", 0)
                                           for i in range(children)))
        rows.append(row_of(ids, mask))

    trees = [(n, (n // GROUP, str(n), CHILDREN)) for n in range(QUESTIONS * GROUP)]
    at_once = trees_at_once(1 + CHILDREN)
    rollouts = seconds_of(lambda: asyncio.run(
        side_by_side(lambda _, tree: node(*tree), trees, at_once, "trees")))
    optimizer = torch.optim.AdamW(model.adapters().values(), lr=1e-6, fused=True)
    updated = seconds_of(lambda: update(model, optimizer, rows, 8192))
    row("seconds of a step: rollouts, of these forward passes; update",
        rollouts, sampler.stats["seconds"], updated)
    row("milliseconds that a turn waits for its REPL", 1e3 * waited / (len(rows) * TURNS))
    row("sampled tokens; tokens of all rows; hours of 100 such steps",
        sum(sum(r.mask) for r in rows), sum(len(r.ids) for r in rows),
        100 * (rollouts + updated) / 3600)


def generate(sampler: Sampler, prompts: list[list[int]], tokens: int) -> list:
    async def together():
        return await asyncio.gather(*(sampler.generate(ids, tokens, key=(i,))
                                      for i, ids in enumerate(prompts)))

    return asyncio.run(together())


def row_of(ids: list[int], mask: list[int]) -> Row:
    return Row(ids, mask, [-10.0] * len(ids), [1.0] * sum(mask), 1e-3)


def window(model: Qwen3) -> int:
    return min(8192, model.config.max_position_embeddings - NEW)


PARTS = {"agreement": agreement, "sampling": sampling, "update": update_all,
         "lora": partial(update_all, rank=16), "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what only a GPU can tell.")
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all")
    parser.add_argument("--model", default="", help="directory of a checkpoint")
    args = parser.parse_args()
    if not args.part:
        where = torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU"
        print(f"| {where}, torch {torch.__version__} | | | |\n{'|---' * 4}|", flush=True)
        for part in PARTS:
            print(f"| **{part}** | |", flush=True)
            rest = [f"--model={args.model}"] if args.model else []
            done = subprocess.run([sys.executable, "-m", "experiments.gpu", part, *rest])
            if done.returncode:
                print(f"| failed with {done.returncode} | |", flush=True)
        return
    if args.model:
        model = Qwen3.from_pretrained(args.model, torch.bfloat16, DEVICE)
    else:
        with torch.device(DEVICE):
            model = Qwen3(QWEN3_4B).to(torch.bfloat16)
    PARTS[args.part](model)


if __name__ == "__main__":
    main()
