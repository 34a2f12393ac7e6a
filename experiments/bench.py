"""The sampler and the update beside transformers on a CPU.

    python -m experiments.bench sampler         or train

Prints the seconds of transformers over ours, with the same random weights: medians with
their quartiles. experiments/gpu.py measures a GPU.
"""
import asyncio
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from timeit import timeit

import engine  # noqa: F401  before torch: it says how torch's threads wait

import torch

from engine import hf
from engine.packing import PackSize, collate, divided
from grpo import GRPOConfig, Sequence, policy_loss
from model import Decoder, DecoderConfig
from sampler import Sampler

SMALL = DecoderConfig(  # 42 million parameters
    vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64)
REPEATS = 3
ANSWER = 64  # sampled tokens of a turn
ROOT, CHILD, OBSERVATION = [1] * 1000, [2] * 500, [3] * 200  # of any tokens
clock = partial(timeit, number=1)  # seconds


def in_transformers(model: Decoder) -> torch.nn.Module:
    """transformers' model with the same weights."""
    import transformers

    config = transformers.Qwen3Config(**hf.config_json(model.config, torch.float32))
    theirs = transformers.Qwen3ForCausalLM(config)
    theirs.load_state_dict(model.state_dict())
    return theirs


def sampler() -> dict[str, list[float]]:
    """8 roots with one prompt take 3 turns each. After its first, a root waits for 4
    children of 2 turns, all with one prompt as well. After a turn an observation
    follows."""
    model = Decoder(SMALL)
    ours, theirs = Sampler(model, memory=3 << 30, batch=64), in_transformers(model)
    ratios = []
    for _ in range(REPEATS):
        ours.load(model)  # empties the cache
        seconds = clock(lambda: asyncio.run(trees(ours)))
        ratios.append(clock(lambda: trees_in_batches(theirs)) / seconds)
    return {"trees": ratios}


async def trees(sampler: Sampler) -> None:
    """Every node is a coroutine, as in a tree."""
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
    def turn(batch: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(batch)  # B T
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            pad_token_id=0, max_new_tokens=ANSWER, min_new_tokens=ANSWER).tolist()

    roots, children = turn([ROOT] * 8), turn([CHILD] * 32)
    turn([ids + OBSERVATION for ids in children])
    for _ in range(2):
        roots = turn([ids + OBSERVATION for ids in roots])


def train() -> dict[str, list[float]]:
    """Forward, loss, backward, clipping and AdamW, of all weights. `plain`: 8 rows of 256
    tokens. `shared`: 40, the nodes of 8 trees, with the same 600 tokens first and 150 of
    their own. transformers takes 8 rows at a time."""
    ours = Decoder(SMALL)
    theirs = in_transformers(ours)
    adam = torch.optim.AdamW(ours.parameters(), lr=1e-6, fused=True)
    adam_theirs = torch.optim.AdamW(theirs.parameters(), lr=1e-6, fused=True)
    loads = {"plain": [sequence_of([n] * 256, 0) for n in range(8)],
             "shared": [sequence_of(ROOT[:600] + [2 + n] * 150, 600) for n in range(40)]}
    figures = {}
    for name, sequences in loads.items():
        ratios = []
        for _ in range(1 + REPEATS):
            seconds = clock(lambda: step(ours, adam, our_losses(ours, sequences, 8192)))
            peer = clock(lambda: step(theirs, adam_theirs, their_losses(theirs, sequences)))
            ratios.append(peer / seconds)
        figures[name] = ratios[1:]  # the first warms up
    return figures


def sequence_of(ids: list[int], given: int) -> Sequence:
    """`given` tokens of a prompt, and of the others every other 64 were sampled."""
    mask = [0] * given + [i // 64 % 2 for i in range(given, len(ids))]
    return Sequence(ids, mask, [-10.0] * len(ids), [1.0] * sum(mask), 1e-3)


def our_losses(model: Decoder, sequences: list[Sequence],
               max_tokens: int) -> Iterator[torch.Tensor]:
    for share in divided(sequences, PackSize(max_tokens)):
        pack = collate(share, model.lm_head.weight.device)
        logprobs, entropies = model.logprobs(pack)
        yield policy_loss(logprobs, entropies, pack, GRPOConfig())[0]


def their_losses(model, sequences: list[Sequence]) -> Iterator[torch.Tensor]:
    for first in range(0, len(sequences), 8):
        batch = sequences[first:first + 8]
        ids = torch.tensor([sequence.ids for sequence in batch])  # B T
        mask = torch.tensor([sequence.mask for sequence in batch])  # B T
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # B T-1 V
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # B T-1
        yield (-1e-3 * mask[:, 1:] * logprobs).sum()


def step(model, optimizer, losses: Iterator[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    benchmark = {"sampler": sampler, "train": train}.get(sys.argv[-1])
    if not benchmark:
        sys.exit("name one of: sampler, train")
    torch.manual_seed(0)
    for figure, values in benchmark().items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        print(f"{figure:8} {median:.3f} ({low:.3f} to {high:.3f}), n {len(values)}")


if __name__ == "__main__":
    main()
