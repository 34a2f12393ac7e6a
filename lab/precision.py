"""What 16 bits do to small steps: `python -m lab.precision MODEL`. Prints a table.

Adapters of rank 16 learn the messages of a few scripted trees, in float32, float16 and
bfloat16. Each type has the same questions, the same adapters at the start and the same
number of steps. The columns:

    off base     mean distance of the untrained model's log-probabilities from float32
    after 1 3 10 mean change of the log-probabilities, after so many steps of Adam
    gap          mean distance of log-probabilities of sampler and trainer after 10 steps;
                 merged: the sampler has a copy with merged adapters; apart: it has none
    update       tokens per second, forward and backward
    sampled      tokens per second of 32 requests side by side, merged and apart

The log-probabilities are those of the sampled tokens, measured in the type itself. Left
out: the noise of a whole run; its curve is a matter of train.py --dtype.
"""
import asyncio
import random
import sys
import time

import torch

import grpo
import rlm
from runtime import console
import tasks
import train
from model import Qwen3
from runtime.device import DEVICE, TYPES
from sampler import Sampler
from tokenizer import Tokenizer

RANK, ALPHA = 16, 32.0
RATES = (3e-4, 3e-5)
STEPS = (1, 3, 10)
ROWS = 12  # conversations that are learnt
REQUESTS, TOKENS = 32, 48  # sampled at once, and how many tokens each


def conversations(path: str) -> tuple[Tokenizer, list]:
    """Nodes of scripted trees, whose questions come from their numbers."""
    tokenizer, limits = Tokenizer.from_pretrained(path), rlm.load_config(path)
    questions = [tasks.make("definitions", random.Random(i)) for i in range(ROWS)]
    trees = train.demonstrations(questions, tokenizer, limits, "precision")
    return tokenizer, [node for tree in trees for node in tree.root.walk()][:ROWS]


def logprobs(model: Qwen3, pack: dict) -> torch.Tensor:
    return model.logprobs(pack["ids"], pack["mask"], pack["lengths"])[0]


def learn(model: Qwen3, pack: dict, rate: float) -> list[float]:
    """The mean change of the log-probabilities after each of STEPS."""
    scale = train.FIRST_SCALE if model.lm_head.weight.dtype == torch.float16 else 1.0
    optimizer = torch.optim.AdamW(model.adapters().values(), lr=rate, betas=(0.9, 0.95),
                                  weight_decay=0.0)
    with torch.no_grad():
        before = logprobs(model, pack).mean().item()
    changes = []
    for step in range(1, STEPS[-1] + 1):
        (-scale * logprobs(model, pack).mean()).backward()
        for weight in model.adapters().values():
            weight.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            with torch.no_grad():
                changes.append(logprobs(model, pack).mean().item() - before)
    return changes


def gap_and_speed(model: Qwen3, prompt: list[int], copy: bool) -> tuple[float, float]:
    """Distance of the sampler's log-probabilities from the trainer's, and its speed."""
    sampler = Sampler(model, memory=1 << 30, batch=REQUESTS, window=2048, copy=copy)

    async def sample():
        return await asyncio.gather(*(
            sampler.generate(prompt, TOKENS, key=(i,)) for i in range(REQUESTS)))

    asyncio.run(sample())  # what the first call allocates is not counted
    sampler.load(model)
    begin = time.perf_counter()
    done = asyncio.run(sample())
    seconds = time.perf_counter() - begin
    rows = []
    for one in done:
        ids = [*prompt, *one.ids]
        mask = [0] * len(prompt) + [1] * len(one.ids)
        rows.append(grpo.Row(ids, mask, [], [], 1))
    with torch.no_grad():
        trainer = torch.cat([logprobs(model, grpo.collate([row], DEVICE)) for row in rows])
    sampled = torch.tensor([p for one in done for p in one.logprobs], device=DEVICE)
    return (trainer - sampled).abs().mean().item(), len(sampled) / seconds


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m lab.precision MODEL")
    path = sys.argv[1]
    try:
        tokenizer, nodes = conversations(path)
    except (OSError, ValueError) as error:
        sys.exit(f"lab.precision: {error}")
    rows = [grpo.Row(node.ids, node.mask, [], [], 1) for node in nodes]
    pack = grpo.collate(rows, DEVICE)
    prompt = nodes[0].ids[:nodes[0].mask.index(1)]
    base = None
    print("| type | off base | rate | after 1 | 3 | 10 | gap merged | apart | update | "
          "sampled merged | apart |\n" + "|---" * 11 + "|")
    for name, dtype in TYPES.items():
        for rate in RATES:
            model = Qwen3.from_pretrained(path, dtype, DEVICE).add_lora(RANK, ALPHA)
            with torch.no_grad():
                start = logprobs(model, pack)
            base = start if base is None else base
            off = (start - base).abs().mean().item()
            begin = time.perf_counter()
            changes = learn(model, pack, rate)
            passes = STEPS[-1] + (1 + len(STEPS)) / 3  # a forward pass is a third of one
            speed = passes * pack["ids"].numel() / (time.perf_counter() - begin)
            merged, apart = (gap_and_speed(model, prompt, copy) for copy in (True, False))
            cells = [name, f"{off:.4f}", f"{rate:g}", *(f"{c:+.4f}" for c in changes),
                     f"{merged[0]:.4f}", f"{apart[0]:.4f}", f"{speed:.0f}",
                     f"{merged[1]:.0f}", f"{apart[1]:.0f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    console.start(main)
