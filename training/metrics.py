"""What a step of training looked like: numbers for metrics.jsonl and one line for people.
And a guard: no update ruins the policy, as a step that makes it forget is shortened.

One step of Adam in ten to fifty changes a few tokens that decide much, as whether a root
asks its children. Then the next trees score next to nothing. Such a step can be told at
once. It was to make the nodes with a positive advantage more likely, and makes them much
less likely. So some of these nodes are scored again after each step:

    forgot = mean over nodes of max(0, 1 - pi_after(node) / pi_before(node))

at the depth where it is largest, as a tree has one root among many children. Most steps
have 0.00 to 0.15, ruinous ones 0.6 to 1.0. While it is above MOST, half of the step is
taken back. TRPO (1502.05477) searches along its step in the same way, for a small KL. The
mean KL per token does not tell the two apart (docs/results.md): it counts each token alike,
and what bad nodes wrote is to be forgotten.

After any step, however short, layers in bfloat16 round differently. For N tokens that
changes the sum of the log-probabilities by about ROUNDING * sqrt(N), up or down. What a
node would lose by this alone, in the mean, is subtracted.

Left out: held-out scores (scores.py), and the loss itself (grpo.py).
"""
import math
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable
from statistics import fmean, pstdev

import torch
from torch import Tensor
from torch.optim import AdamW

from engine import packing
from engine.device import DEVICE
from grpo import scored_groups
from tree import Node, Tree

MOST = 0.2  # how much a step may forget
WATCHED = 64  # nodes per depth that are scored again, spread over the batch
HALVINGS = 8
ROUNDING = 0.02  # of a token's log-probability; 0.01 to 0.03 were measured


def describe(trees: list[Tree], credits: dict) -> dict:
    """What a batch of trees looked like: means per tree over those that did not fail.
    `credits` says for each trained node its advantages, one per sampled turn."""
    def is_flat(root: Node) -> bool:
        given = [credits[node] for node in root.walk() if node in credits]
        return not any(any(each.advantages) for each in given)

    scored = [tree for tree in trees if not tree.failed]
    nodes = [node for tree in scored for node in tree.root.walk()]
    n = len(scored)
    row = {
        "reward": fmean(tree.reward for tree in scored),
        "score": fmean(tree.root.score for tree in scored),
        "reward_std": fmean(pstdev(trees[i].reward for i in members)
                            for members in scored_groups(trees).values()),
        "flat": sum(is_flat(tree.root) for tree in scored) / n,
        "failed": len(trees) - n,
        "failures": dict(Counter(tree.failed for tree in trees if tree.failed)),
        "nodes": len(nodes) / n,
        "tokens": sum(node.sampled for node in nodes) / n,
        "errors": sum(len(node.errors) for node in nodes) / n,
        "ran": ran(nodes),
        "asks": sum(bool(tree.root.children) for tree in scored) / n,
        "deaths": dict(Counter(node.reason for node in nodes if node.reason)),
        "ends": dict(Counter(tree.root.end for tree in scored).most_common()),
    }
    for depth in sorted({node.depth for node in nodes}):
        level = [node for node in nodes if node.depth == depth]
        row[f"tokens_d{depth}"] = fmean(node.sampled for node in level)
        row[f"errors_d{depth}"] = fmean(len(node.errors) for node in level)
        scores = [node.score for node in level if node.score is not None]
        if depth and scores:
            row[f"score_d{depth}"] = fmean(scores)
    return row


def ran(nodes: list[Node]) -> float:
    """The share of messages whose block ran without an error, in nodes with a REPL."""
    acting = [node for node in nodes if node.kind == "rlm"]
    errors = sum(len(node.errors) for node in acting)
    return 1 - errors / max(1, sum(node.written for node in acting))


def shares(ends: dict[str, int]) -> str:
    """How nodes ended, as "final 90%, turns 10%"."""
    total = sum(ends.values())
    return ", ".join(f"{end} {count / total:.0%}" for end, count in ends.items())


def line(m: dict, steps: int) -> str:
    """One step for people. `m` are its metrics."""
    failed = f" | failed {m['failed']}" if m["failed"] else ""
    score = f" (score {m['score']:.3f})" if m["score"] != m["reward"] else ""
    update = "no signal, no step"
    if m["sequences"]:
        update = f"entropy {m['entropy']:.2f} grad {m['grad_norm']:.2f} " \
                 f"forgot {m['forgot']:.2f}"
        if m["step_left"] < 1:
            update += f" in {m['step_left']:.2g} of a step"
    return (f"step {m['step']:4}/{steps} | reward {m['reward']:.3f}{score} | "
            f"{m['nodes']:.1f} nodes, {m['tokens']:.0f} tokens | "
            f"ran {m['ran']:.0%} asks {m['asks']:.0%} | {shares(m['ends'])}{failed} | "
            f"flat {m['flat']:.0%} | {update} | "
            f"sample {m['sample_s']:.1f} update {m['update_s']:.1f} s")


# ------------------------------------------------------------------------------------------
# A step of the optimizer

class Watch:
    """What an optimizer step measures of itself, and how much the policy forgets by it.
    `note` gets what the update's own forward passes say, pack by pack."""

    def __init__(self, model, sequences: list, setup):
        self.model, self.world = model, setup.world
        self.rounding = ROUNDING if setup.plan.dtype == torch.bfloat16 else 0.0
        self.sequences = good_sequences(sequences)
        self.packs = packing.packs(self.sequences, setup.plan.pack_size, self.world, DEVICE)
        self.places = {id(sequence): i for i, sequence in enumerate(self.sequences)}
        self.before = {}  # place of a sequence -> its log-probability, of this rank's packs
        self.sums = Counter()  # of this rank's packs, then of all

    def note(self, pack: packing.Pack, logprobs: Tensor, loss: Tensor,
             per_token: dict[str, Tensor]) -> None:
        """A pack before the step: the log-probabilities of its sampled tokens, and what
        grpo.policy_loss returned."""
        self.before |= self.of_sequences(pack, logprobs)
        self.sums.update(totals(loss, per_token))  # adds

    def loss(self) -> float:
        """That of the step. All ranks have to call it, once."""
        parts, self.sums = self.world.gather(self.sums), Counter()
        for part in parts:
            self.sums.update(part)
        return self.sums["loss"]

    def of_sequences(self, pack: packing.Pack, logprobs: Tensor) -> dict[int, float]:
        """The sums over the watched sequences of a pack."""
        parts = logprobs.detach().cpu().double().split(pack.sampled)
        places = [self.places.get(id(sequence)) for sequence in pack.sequences]
        return {place: part.sum().item()
                for place, part in zip(places, parts) if place is not None}

    @torch.no_grad()
    def forgot(self) -> float:
        """In [0, 1], the same on all ranks."""
        now = {}
        for pack in self.packs:
            now |= self.of_sequences(pack, self.model.logprobs(pack)[0])
        before, after = (ChainMap(*self.world.gather(part)) for part in (self.before, now))
        forgotten = defaultdict(list)
        for i, sequence in enumerate(self.sequences):
            change = after[i] - before[i]
            # A NaN counts as forgotten, not as 0.
            share = 1.0 if math.isnan(change) else -math.expm1(min(0.0, change))
            by_rounding = expected_loss(self.rounding * math.sqrt(sum(sequence.mask)))
            forgotten[sequence.depth].append(share - by_rounding)
        return max([0.0, *(sum(each) / len(each) for each in forgotten.values())])


def expected_loss(deviation: float) -> float:
    """The mean of max(0, 1 - e^x) for normal x of mean 0."""
    x = torch.tensor(deviation / math.sqrt(2), dtype=torch.float64)
    return (1 - torch.special.erfcx(x).item()) / 2


def good_sequences(sequences: list) -> list:
    """Sequences with a positive advantage, at most WATCHED per depth."""
    by_depth = defaultdict(list)
    for sequence in sequences:
        if sum(sequence.advantages) > 0:
            by_depth[sequence.depth].append(sequence)
    return [sequence for of_depth in by_depth.values()
            for sequence in of_depth[::math.ceil(len(of_depth) / WATCHED)]]


def shorten(optimizer: AdamW, forgot: Callable) -> tuple[float, float]:
    """Take half of the last step back until `forgot()` is at most MOST. Returns what it is
    then, and the share of the step that is left."""
    left = 1.0
    while (share := forgot()) > MOST and left > 0.5 ** HALVINGS:
        left /= 2
        take_back(optimizer, left)
    return share, left


@torch.no_grad()
def take_back(optimizer: AdamW, share: float) -> None:
    """Undo this share of the last step. It is computed again from the optimizer's moments,
    so no copy of the weights is needed."""
    group, = optimizer.param_groups
    beta1, beta2 = group["betas"]
    for weight, last in optimizer.state.items():
        mean = last["exp_avg"] / (1 - beta1 ** last["step"])
        square = last["exp_avg_sq"] / (1 - beta2 ** last["step"])
        weight += share * group["lr"] * mean / (square.sqrt() + group["eps"])


def totals(loss: Tensor, per_token: dict[str, Tensor]) -> Counter:
    """The loss of a pack, the number of its tokens, and sums over them: of what
    grpo.policy_loss returned. `update` of a Counter adds those of other packs and ranks."""
    sums = torch.stack([*per_token.values()]).sum(1).tolist()
    count = len(per_token["gap"])
    return Counter(dict(zip(per_token, sums)), loss=loss.item(), count=count)


def of_steps(steps: list[tuple]) -> dict:
    """What metrics.jsonl has of the optimizer steps (their sums, the gradient's norm before
    clipping, how much was forgotten, the share of the step that is left): means over all
    tokens, the mean loss, and of all else the worst."""
    sums = Counter()
    for step in steps:
        sums.update(step[0])
    over = dict.fromkeys(sums, sums["count"]) | {"loss": len(steps)}
    means = {name: sums[name] / over[name] for name in sums if name != "count"}
    _, norms, forgot, left = zip(*steps) if steps else ((),) * 4
    return means | {"grad_norm": max(norms, default=0.0),
                    "forgot": max(forgot, default=0.0), "step_left": min(left, default=1.0)}
