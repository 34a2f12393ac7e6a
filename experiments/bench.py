"""The sampler beside transformers on a CPU, and what only a GPU can tell.

    python -m experiments.bench sampler [--model DIR]     without it a small random model
    python -m experiments.bench gpu [--model DIR]         without it a random Qwen3-4B

`sampler` prints the tokens that both decode per second, by the number of requests. Then it
prints the seconds of transformers for 40 nodes over ours: the median with its quartiles.

`gpu` prints a table in Markdown: how far the log-probabilities of the sampler and of packed
sequences are from those of plain rows; the speed of prompts, decoding and updates, to
compare with the card's data sheet; and the peak of memory beside the plan. Each part is a
process. Without a GPU DIR can be tiny.
"""
import argparse
import asyncio
import random
import statistics
import tempfile
from functools import partial
from multiprocessing import get_context
from timeit import timeit

import engine  # noqa: F401  before torch: it says how torch's threads wait

import torch

from engine import parallel
from engine.device import DEVICE
from engine.packing import collate
from engine.pages import token_bytes
from engine.plan import GIB, SHORT, Plan, Sizes
from grpo import GRPOConfig, Sequence, policy_loss
from model import Decoder, DecoderConfig
from sampler import Sampler

clock = partial(timeit, number=1)  # seconds


def generate(sampler: Sampler, prompts: list[list[int]], tokens: int) -> list:
    async def together() -> list:
        return await asyncio.gather(
            *(sampler.generate(ids, tokens, key=(i,)) for i, ids in enumerate(prompts)))

    sampler.stats.clear()
    return asyncio.run(together())


# ------------------------------------------------------------------------------------------
# Beside transformers

SMALL = DecoderConfig(  # 42 million parameters
    vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64)
REQUESTS = (1, 8, 36, 96)
REPEATS = 3
ANSWER = 64  # sampled tokens of a turn
ROOT, CHILD, OBSERVATION = [1] * 1000, [2] * 500, [3] * 200  # of any tokens


def beside_transformers(path: str) -> None:
    """All weights are float32."""
    import transformers

    ours = Decoder.from_pretrained(path).order()
    sampler = Sampler(ours, memory=3 << 30, batch=max(REQUESTS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generate(sampler, [CHILD], 1)  # libraries begin slowly
    turn(theirs, [CHILD], 1)
    for count in REQUESTS:
        prompts = [CHILD] * count
        seconds = {"ours": [], "transformers": []}
        for tokens in (1, 1 + ANSWER):  # the difference is decoding
            sampler.load(ours)  # empties the cache
            seconds["ours"].append(clock(lambda: generate(sampler, prompts, tokens)))
            seconds["transformers"].append(clock(lambda: turn(theirs, prompts, tokens)))
        rates = [f"{name} {count * ANSWER / (end - first):.0f}"
                 for name, (first, end) in seconds.items()]
        print(f"{count} requests, tokens/s: {', '.join(rates)}", flush=True)

    ratios = []
    for _ in range(REPEATS):
        sampler.load(ours)
        seconds = clock(lambda: asyncio.run(trees(sampler)))
        ratios.append(clock(lambda: trees_in_batches(theirs)) / seconds)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(f"trees: {median:.3f} ({low:.3f} to {high:.3f}), n {REPEATS}")


async def trees(sampler: Sampler) -> None:
    """8 roots with one prompt take 3 turns each. After its first, a root waits for 4
    children of 2 turns, all with one prompt as well. After a turn an observation follows.
    Every node is a coroutine, as in a tree."""
    async def node(ids: list[int], turns: int, key: tuple, children: int) -> None:
        for turn in range(turns):
            done = await sampler.generate(ids, ANSWER, key=(*key, turn))
            ids = [*ids, *done.ids, *OBSERVATION]
            if turn == 0:
                below = [node(CHILD, 2, (*key, i), 0) for i in range(children)]
                await asyncio.gather(*below)

    await asyncio.gather(*(node(ROOT, 3, (i,), 4) for i in range(8)))


def trees_in_batches(model) -> None:
    """First turns, then those of all children, then the others: each time equally long."""
    roots, children = turn(model, [ROOT] * 8), turn(model, [CHILD] * 32)
    turn(model, [ids + OBSERVATION for ids in children])
    for _ in range(2):
        roots = turn(model, [ids + OBSERVATION for ids in roots])


def turn(model, batch: list[list[int]], tokens: int | None = None) -> list[list[int]]:
    """The prompts, with `tokens` (ANSWER unless given) that transformers samples after."""
    ids, tokens = torch.tensor(batch), tokens or ANSWER  # B T
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
        top_k=0, top_p=1.0, repetition_penalty=1.0,  # whatever the checkpoint says
        pad_token_id=0, max_new_tokens=tokens, min_new_tokens=tokens).tolist()


# ------------------------------------------------------------------------------------------
# What only a GPU can tell

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


@torch.inference_mode()
def agreement(model: Decoder) -> None:
    shared = prompt(model, 4096, seed=9)[20:]
    prompts = [shared + prompt(model, 20, seed) for seed in range(3)]
    sampler = Sampler(model)
    done = generate(sampler, prompts, NEW)
    sampled = torch.tensor([new.logprobs for new in done], device=DEVICE).flatten()  # N
    rows = [Sequence([*given, *new.ids], [0] * len(given) + [1] * NEW, [], [], 1.0)
            for given, new in zip(prompts, done)]
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
    """Of four rows of 8,192 tokens, or of so many that no layer is computed again. Every
    other 64 tokens were sampled."""
    rows = [prompt(model, above or 8192, seed) for seed in range(4)]
    c, length, sizes = model.config, len(rows[0]), Sizes.of(model)
    mask = [i // 64 % 2 for i in range(length)]
    sequences = [
        Sequence(ids, mask, [-10.0] * length, [1.0] * sum(mask), 1e-3) for ids in rows]
    if rank:
        model.requires_grad_(True).add_lora(rank, 32.0)
    else:
        model.float().requires_grad_(True)
        parallel.shard(model, torch.bfloat16)
    model.recompute_above = above
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        for sequence in sequences:
            pack = collate([sequence], DEVICE)
            policy_loss(*model.logprobs(pack), pack, GRPOConfig())[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.get_device_module(DEVICE).synchronize()

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()  # a random model is made in float32
    step()  # it may compile
    seconds = min(clock(step) for _ in range(3))
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


def gpu(path: str) -> None:
    print(f"| torch {torch.__version__} on {DEVICE} | | |\n{'|---' * 3}|")
    for part in PARTS:
        print(f"| **{part}** | | |", flush=True)
        process = get_context("spawn").Process(target=run, args=(part, path))
        process.start()
        process.join()  # if it fails, it shows a traceback, and the next one begins


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast sampling and updates are.")
    parser.add_argument("what", choices=("sampler", "gpu"))
    parser.add_argument("--model", default="", help="directory of a checkpoint")
    given = parser.parse_args()
    if given.what == "gpu":
        gpu(given.model)
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as small:
        if not given.model:
            Decoder(SMALL).save_pretrained(small)
        beside_transformers(given.model or small)


if __name__ == "__main__":
    main()
