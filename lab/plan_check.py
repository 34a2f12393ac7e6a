"""The memory plan beside what a real update takes: `python -m lab.plan_check [--rank 16]
[--row 2048] [--recompute] [--dtype bfloat16] [--model DIR]`. Linux, CPU, about 16 GB and
some minutes.

The checkpoint DIR, or a random Qwen3 of the 0.6B shape, is loaded, the sampler's copy and a
cache of one window are made and written to, and the weights are updated from two
micro-batches of one full row each. Prints peak memory without torch's own, the plan's sum,
and their ratio.

glibc keeps blocks below 32 MB after they are freed, which adds up to 15 % at short rows.
With MALLOC_MMAP_THRESHOLD_=1048576 in the environment the peak is what is really in use.
"""
import argparse
import tempfile

import torch

from model import Qwen3, Qwen3Config
from runtime import console
from runtime.device import give_back_memory
from runtime.plan import Plan
from sampler import Sampler

QWEN3_06B = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "max_position_embeddings": 40_960}


def memory(field: str) -> int:
    """Bytes that /proc/self/status gives for VmRSS, or for VmHWM, its peak."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) << 10


def start_counting() -> int:
    """Start the peak afresh; returns what is in use now."""
    give_back_memory()
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return before


def adamw(model: Qwen3) -> torch.optim.AdamW:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-6, fused=True)


def update(model: Qwen3, optimizer, row: int, batches: int) -> None:
    ids = torch.arange(row)[None] % model.config.vocab_size
    mask = (torch.arange(row) < 300)[None]  # two chunks of logits; more need only time
    for _ in range(batches):
        model.logprobs(ids, mask)[0].mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the memory plan predicts.")
    parser.add_argument("--rank", type=int, default=0, help="of adapters; 0: all weights")
    parser.add_argument("--row", type=int, default=1024, help="tokens, default 1024")
    parser.add_argument("--dtype", default="float32", help="of frozen weights")
    parser.add_argument("--model", help="a checkpoint, instead of a random 0.6B")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--apart", action="store_true",
                        help="the sampler has no copy of frozen weights")
    args = parser.parse_args()

    config = Qwen3Config(**QWEN3_06B)
    if args.model:
        config = Qwen3Config.read(f"{args.model}/config.json")
    frozen = getattr(torch, args.dtype) if args.rank else torch.float32
    plan = Plan(config, window=args.row, row=args.row, rank=args.rank,
                element=frozen.itemsize, recompute=args.recompute, apart=args.apart,
                have=0)  # nothing to spare: a cache of one window
    need = plan.need()

    tiny = Qwen3(Qwen3Config(64, 32, 64, 1, 2, 1, 16))
    update(tiny, adamw(tiny), 16, 1)  # what torch loads when it is first used
    with tempfile.TemporaryDirectory() as path:
        if not args.model:
            Qwen3(config).to(frozen).save_pretrained(path)
        before = start_counting()
        model = Qwen3.from_pretrained(args.model or path, frozen)
    model.recompute = args.recompute
    if args.rank:
        model.add_lora(args.rank, 32.0)
    sampler = Sampler(model, memory=need["KV cache"], window=args.row,
                      copy=args.rank > 0 and not args.apart)
    sampler.pool.fill_(1)
    sampler.attention.rows = torch.ones_like(sampler.pool)  # as many as it may gather
    optimizer = adamw(model)
    update(model, optimizer, 16, 1)  # so that the optimizer's state is there
    sampler.load(model)
    update(model, optimizer, args.row, 2)

    taken, total = memory("VmHWM") - before, sum(need.values())
    for part, size in need.items():
        print(f"{part:13} {size / 1e9:7.3f} GB")
    print(f"plan {total / 1e9:.2f} GB, measured {taken / 1e9:.2f} GB, plan / measured "
          f"{total / taken:.3f}")


if __name__ == "__main__":
    console.start(main)
