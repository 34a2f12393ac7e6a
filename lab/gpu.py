"""Figures that only a GPU can give: `python -m lab.gpu agreement|sampling|update|lora`.

Weights are random, in bfloat16, of the shape of Qwen3-4B. The docstring of a benchmark
names its figures. Each takes less than three minutes.
"""
import asyncio
import random
from functools import partial

import torch

from grpo import Row
from lab.bench import main, random_ids, seconds_of, update
from model import Qwen3, Qwen3Config
from runtime import parallel
from runtime.device import DEVICE
from runtime.packing import collate
from runtime.pages import attention_for
from runtime.plan import GIB, Plan
from sampler import Sampler

QWEN3_4B = Qwen3Config(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SAMPLING = ("sampler copy", "KV cache", "cache rows")  # parts of a plan
REPEATS = 3
PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, by its data sheet


def agreement(samples: dict, config: Qwen3Config = QWEN3_4B, prompts: int = 40) -> None:
    """The sampler's attention over pages beside the update's over packs.

    pages_in_place: 1 if the sampler has its path for GPUs.
    logprob_gap: mean difference of the two log-probabilities of 128 tokens that are sampled
        after each of 40 prompts, which share their first 600 tokens.
    """
    rng, model = random.Random(0), random_model(config)
    shared = random_ids(rng, 600)
    contexts = [shared + random_ids(rng, 150) for _ in range(prompts)]
    sampler = Sampler(model, memory=0.25)
    samples["pages_in_place"].append(float(attention_for(model).__name__ == "FlashPages"))
    rows = [Row(row + list(done.ids), [0] * len(row) + [1] * len(done.ids),
                [0.0] * len(row) + list(done.logprobs), [1.0] * len(done.ids), 1.0)
            for row, done in zip(contexts, generate(sampler, contexts, 128))]
    pack = collate(rows, DEVICE)
    with torch.inference_mode():
        logprobs, _ = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
    samples["logprob_gap"].append((logprobs - pack["sampler"]).abs().mean().item())


def sampling(samples: dict, config: Qwen3Config = QWEN3_4B,
             loads: tuple = ((1, 960), (16, 960), (64, 960), (1, 32_000))) -> None:
    """Prompts, and decode steps beside the time in which the card reads all once.

    read_gb_s: GB that the card reads in a second, of 2 GiB that are summed.
    prefill_tokens_s at B x T: of B prompts of T tokens.
    decode_tokens_s at B x T: tokens per second of all B together, in the steps alone.
    decode_roofline_share at B x T: the time in which the card reads the weights and the
        cache once, over that of a decode step.
    """
    large = torch.zeros(1 << 29 if DEVICE == "cuda" else 1 << 20, device=DEVICE)
    times = [seconds_of(lambda: [large.sum() for _ in range(10)]) for _ in range(4)]
    bandwidth = 10 * large.nbytes / min(times)
    samples["read_gb_s"].append(bandwidth / 1e9)
    del large

    model = random_model(config)
    weights = sum(weight.numel() for weight in model.parameters())
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sampler, rng = Sampler(model, memory=0.25), random.Random(2)
    for batch, length in loads:
        for _ in range(REPEATS):
            sampler.load(model)  # forgets the prompts before
            rows = [random_ids(rng, length) for _ in range(batch)]
            filled = seconds_of(lambda: generate(sampler, rows, 1))
            before = dict(sampler.stats)
            generate(sampler, rows, 128)  # the cache is full: only decode steps
            seconds, steps = (sampler.stats[name] - before[name]
                              for name in ("seconds", "steps"))
            read = 2 * (weights + batch * (length + 64) * cached)  # 2 bytes per number
            load, rate = f"{batch} x {length}", steps / seconds
            samples[f"prefill_tokens_s at {load}"].append(batch * length / filled)
            samples[f"decode_tokens_s at {load}"].append(batch * rate)
            samples[f"decode_roofline_share at {load}"].append(read / bandwidth * rate)


def update_all(samples: dict, config: Qwen3Config = QWEN3_4B, tokens: int = 4096,
               rank: int = 0) -> None:
    """Updates of all weights from 16 rows of 4,096 tokens, clipping and AdamW included.
    Layers are computed again in the backward pass. With `rank`, adapters are trained. The
    names then begin with lora, and lora_mfu counts gradients of all weights.

    update_tokens_s: tokens per second.
    update_mfu: operations over 989 TFLOP/s times the seconds: 6 per weight and token (of
        the head: per sampled token) and causal attention, but nothing computed again.
    update_peak_gib, update_plan_over_peak: the most memory allocated; what runtime/plan.py
        says, without a sampler, over it.
    """
    name = "lora" if rank else "update"
    plan = Plan(config, tokens, tokens, rank, torch.bfloat16, 0, recompute=True)
    mask = [i // 64 % 2 for i in range(tokens)]  # every other 64 tokens are sampled
    rows = [Row(random_ids(random.Random(i), tokens), mask, [-10.0] * tokens,
                [1.0] * sum(mask), 1e-3) for i in range(16)]
    if rank:
        model = random_model(config).add_lora(rank, 32.0)
    else:
        model = random_model(config, torch.float32)
        parallel.shard(model, torch.bfloat16)
    model.recompute = True
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    layers = plan.parameters[0] - plan.parameters[1]
    head = config.vocab_size * config.hidden_size
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    work = 6 * len(rows) * (
        layers * tokens + head * sum(mask) + width * tokens ** 2)
    for repeat in range(REPEATS + 1):
        seconds = seconds_of(lambda: update(model, optimizer, rows, tokens))
        if repeat:  # the first does not count
            samples[f"{name}_tokens_s"].append(len(rows) * tokens / seconds)
            samples[f"{name}_mfu"].append(work / seconds / PEAK_FLOPS)
    peak = max(torch.cuda.max_memory_allocated(), 1)  # without a GPU it is 0
    planned = sum(size for part, size in plan.need().items() if part not in SAMPLING)
    samples[f"{name}_peak_gib"].append(peak / GIB)
    samples[f"{name}_plan_over_peak"].append(planned / peak)


def generate(sampler: Sampler, rows: list[list[int]], tokens: int) -> list:
    async def gather():
        return await asyncio.gather(*(sampler.generate(row, tokens, key=(i,))
                                      for i, row in enumerate(rows)))

    return asyncio.run(gather())


def random_model(config: Qwen3Config, dtype: torch.dtype = torch.bfloat16) -> Qwen3:
    with torch.device(DEVICE):
        return Qwen3(config).to(dtype)


if __name__ == "__main__":
    main({"agreement": agreement, "sampling": sampling, "update": update_all,
          "lora": partial(update_all, rank=16)})
