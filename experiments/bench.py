"""The sampler and the update beside transformers on a CPU.

    python -m experiments.bench sampler         or train

A figure is the median of its samples, with their quartiles beside it. Weights are random.
Compare figures of one run only, never of two machines. experiments/gpu.py measures a GPU.
"""
import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine import hf
from engine.packing import collate, micro_batches
from grpo import GRPOConfig, Row, policy_loss
from model import Qwen3, Qwen3Config
from sampler import Sampler

SMALL = Qwen3Config(  # 42 million parameters
    vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64)
REPEATS = 3
ANSWER, OBSERVATION = 64, 200  # tokens of a sampled turn, and of what follows it


def in_transformers(model: Qwen3) -> torch.nn.Module:
    """transformers' model with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = hf.config_json(model.config, torch.float32)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), attn_implementation="sdpa")
    theirs.load_state_dict(model.state_dict())
    return theirs


def seconds_of(run) -> float:
    """Wall clock of `run()`, the work of a GPU included."""
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def sampler(samples: dict[str, list[float]]) -> None:
    """The sampler, beside transformers' `generate`.

    The load: 8 roots with the same 1,000 tokens take 3 turns each; after its first a
    root waits for 4 children of 2 turns, all with the same 500 tokens. A turn is 64 sampled
    tokens, and 200 of observation follow. transformers has the same weights; there all
    nodes at the same turn are a batch, padded on the left. Both begin with an empty cache.

    tree_vs_transformers: its seconds over ours.
    work_over_minimum: positions that our sampler computed over the fewest that will do,
        each beginning of a conversation once.
    """
    torch.manual_seed(0)
    model = Qwen3(SMALL)
    ours, theirs = Sampler(model, memory=3 << 30, batch=64), in_transformers(model)
    for _ in range(REPEATS):
        ours.load(model)
        computed = ours.stats["computed"]
        nodes, peers = tree_load(), tree_load()
        seconds = seconds_of(lambda: asyncio.run(converse(ours, nodes)))
        peer = seconds_of(lambda: converse_with_transformers(theirs, peers))
        samples["tree_vs_transformers"].append(peer / seconds)
        computed = ours.stats["computed"] - computed
    # The last token that a conversation samples is never computed.
    ends = [node.ids[:-1] for root in nodes for node in (root, *root.children)]
    least = len({hash(tuple(ids[:n + 1])) for ids in ends for n in range(len(ids))})
    samples["work_over_minimum"].append(computed / least)


@dataclass
class Talk:
    """A node of a load: its tokens so far, how many turns it takes, who it waits for."""
    ids: list[int]
    turns: int
    key: str
    children: list["Talk"] = field(default_factory=list)

    def add(self, turn: int, sampled: list[int]) -> None:
        seen = random_ids(random.Random(f"{self.key} {turn}"), OBSERVATION)
        self.ids = self.ids + sampled + (seen if turn + 1 < self.turns else [])


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(64) for _ in range(count)]  # in every vocabulary


def tree_load() -> list[Talk]:
    rng = random.Random(0)
    prompt, system = random_ids(rng, 1000), random_ids(rng, 500)
    return [Talk(prompt, 3, str(i), [Talk(system, 2, f"{i}.{j}") for j in range(4)])
            for i in range(8)]


async def converse(sampler: Sampler, nodes: list[Talk]) -> None:
    """Every node is a coroutine, as in a rollout."""
    async def run(node: Talk) -> None:
        for turn in range(node.turns):
            done = await sampler.generate(node.ids, ANSWER, key=(node.key, turn))
            node.add(turn, list(done.ids))
            if turn == 0:
                await asyncio.gather(*(run(child) for child in node.children))

    await asyncio.gather(*(run(node) for node in nodes))


def converse_with_transformers(model, nodes: list[Talk]) -> None:
    """The same in batches: first turns, then those of all children, then the others."""
    children = [child for node in nodes for child in node.children]
    batches = [(nodes, 0), (children, 0), (children, 1), (nodes, 1), (nodes, 2)]
    for batch, turn in batches:
        rows = [node.ids for node in batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])  # B T
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            done = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, pad_token_id=0, eos_token_id=None, max_new_tokens=ANSWER,
                min_new_tokens=ANSWER)
        for node, sampled in zip(batch, done[:, width:].tolist()):
            node.add(turn, sampled)


def train(samples: dict[str, list[float]]) -> None:
    """The update, beside a plain transformers training step; all weights are trained.

    An update is forward, loss, backward, clipping and AdamW (fused in both). Every other 64
    tokens of a row are sampled. Plain rows are 8 of 256 tokens; shared ones those of a
    question, 8 trees of 5 nodes, with the same 600 tokens first and 150 of their own.
    transformers takes 8 rows at a time. Both sides run in turn.

    update_vs_transformers, shared_vs_transformers: the seconds of transformers over ours,
        on plain and on shared rows.
    """
    torch.manual_seed(0)
    ours = Qwen3(SMALL)
    theirs = in_transformers(ours)
    adam_ours, adam_theirs = (torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
                              for model in (ours, theirs))
    rng = random.Random(0)
    prompt = random_ids(rng, 600)
    plain = [random_ids(rng, 256) for _ in range(8)]
    shared = [prompt + random_ids(rng, 150) for _ in range(40)]
    for figure, ids, given, repeats in (  # short ones vary more
            ("update_vs_transformers", plain, 0, 3 * REPEATS),
            ("shared_vs_transformers", shared, len(prompt), REPEATS)):
        rows = []
        for row in ids:
            mask = [int(i >= given) * (i // 64 % 2) for i in range(len(row) - 1)] + [1]
            advantages = [float(rng.choice([-1, 1]))] * sum(mask)
            rows.append(Row(row, mask, [-10.0 * m for m in mask], advantages, 1e-3))
        for repeat in range(repeats + 1):
            seconds = seconds_of(lambda: update(ours, adam_ours, rows, 8192))
            peer = seconds_of(lambda: update_theirs(theirs, adam_theirs, rows))
            if repeat:  # the first does not count
                samples[figure].append(peer / seconds)


def update(model: Qwen3, optimizer, rows: list[Row], max_tokens: int) -> None:
    for rows_of_pack in micro_batches(rows, max_tokens):
        pack = collate(rows_of_pack, model.lm_head.weight.device)
        logprobs, entropies = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
        policy_loss(logprobs, entropies, pack, GRPOConfig())[0].backward()
    optimizer_step(model, optimizer)


def update_theirs(model, optimizer, rows: list[Row]) -> None:
    """The same policy gradient, in batches of 8 rows of one length."""
    for first in range(0, len(rows), 8):
        batch = rows[first:first + 8]
        ids = torch.tensor([row.ids for row in batch])  # B T
        mask = torch.tensor([row.mask for row in batch])  # B T
        scale = torch.tensor([[row.weight * row.advantages[0]] for row in batch])  # B 1
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # B T-1 V
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # B T-1
        (-scale * mask[:, 1:] * logprobs).sum().backward()
    optimizer_step(model, optimizer)


def optimizer_step(model, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def report(samples: dict[str, list[float]], name: str) -> None:
    where = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{name} on {where}\n\n{'':36}{'median':>12}{'quartiles':>28}{'n':>5}")
    for figure, values in samples.items():
        some = values if len(values) > 1 else 2 * values
        low, middle, high = statistics.quantiles(some, n=4, method="inclusive")
        spread = f"{low:,.4g} to {high:,.4g}"
        print(f"{figure:36}{middle:12,.4g}{spread:>28}{len(values):5}")


def main(benchmarks: dict[str, Callable]) -> None:
    """Run the one that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in benchmarks:
        sys.exit(f"name one of: {', '.join(benchmarks)}")
    name, samples = sys.argv[1], defaultdict(list)
    benchmarks[name](samples)
    report(samples, name)


if __name__ == "__main__":
    main({"sampler": sampler, "train": train})
