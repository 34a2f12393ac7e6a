"""No update ruins the policy: an optimizer step that makes it forget is shortened.

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

Layers in bfloat16 round otherwise after any step, however short. Of N tokens that changes
the sum of the log-probabilities by about ROUNDING * sqrt(N), up or down. What a node would
lose by this alone, in the mean, is subtracted.
"""
import math
from collections import ChainMap, defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import AdamW

from engine import packing
from engine.device import DEVICE

MOST = 0.2  # how much a step may forget
WATCHED = 64  # nodes per depth that are scored again, spread over the batch
HALVINGS = 8
ROUNDING = 0.02  # of a token's log-probability; 0.01 to 0.03 were measured


class Watch:
    """How much the policy forgets by a step. Before it, `note` is told what the update's
    own forward pass says of every pack."""

    def __init__(self, model, sequences: list, plan, world):
        self.model, self.world = model, world
        self.rounding = ROUNDING if plan.dtype == torch.bfloat16 else 0.0
        self.sequences = good_sequences(sequences)
        self.packs = packing.packs(self.sequences, plan, world, DEVICE)
        self.places = {id(sequence): i for i, sequence in enumerate(self.sequences)}
        self.before = {}  # place of a sequence -> its log-probability, of this rank's packs

    def note(self, pack: packing.Pack, logprobs: Tensor) -> None:
        """The log-probabilities of the sampled tokens of a pack, before the step."""
        self.before |= self.of_sequences(pack, logprobs)

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
        lost = defaultdict(list)
        for i, sequence in enumerate(self.sequences):
            change = after[i] - before[i]
            # A NaN counts as forgotten, not as 0.
            share = 1.0 if math.isnan(change) else -math.expm1(min(0.0, change))
            by_rounding = expected_loss(self.rounding * math.sqrt(sum(sequence.mask)))
            lost[sequence.depth].append(share - by_rounding)
        return max([0.0, *(sum(each) / len(each) for each in lost.values())])


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
