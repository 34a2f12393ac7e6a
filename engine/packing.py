"""Packing: which sequences one forward pass computes together, and on which rank.

All ranks get work of similar cost. Sequences that begin with the same tokens share a pack,
as the model computes a common prefix once. A sequence is any object with `ids`, its tokens.
"""
import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WORTH_SHARING = 0.02  # a smaller share of a sequence is not worth gathering keys and values


def by_prefix(sequences: list[list[int]]) -> tuple[list[int], list[int]]:
    """(order, shared): the indices of the sequences in the order of their tokens, and how
    many first tokens each sequence shares with the sequence before it; 0 if they are few.

    In this order a sequence shares most with the one before it. So the sum of
    `len(sequence) - shared` counts each prefix once, except short ones."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    shared, before = [], np.zeros(0)
    for sequence in (np.asarray(sequences[i]) for i in order):
        n = min(len(before), len(sequence))
        differ = np.flatnonzero(before[:n] != sequence[:n])
        n = int(differ[0]) if len(differ) else n
        shared.append(n if n >= WORTH_SHARING * len(sequence) else 0)
        before = sequence
    return order, shared


class PackSize(NamedTuple):
    """How much a pack holds, and what its tokens cost."""
    tokens: int  # distinct ones, at most
    attention_cost: float = 0.0  # a token of a sequence of T takes the time 1 + this * T
    copy_cost: float = 0.0  # each token adds this to the distinct ones, for its copied keys


@dataclass
class Load:
    """Sequences that are to be computed together, while they are divided."""
    sequences: list = field(default_factory=list)
    size: float = 0.0  # what they take in memory, in tokens
    cost: float = 0.0  # what they take in time


def prefix_groups(sequences: list, limit: float, attention_cost: float,
                  copy_cost: float) -> list[Load]:
    """The sequences that begin alike in packs of at most this size, or of one sequence. In
    the order of their tokens, a sequence joins the one before it, unless the two share
    little: small packs are easier to divide."""
    result = []
    for i, shared in zip(*by_prefix([sequence.ids for sequence in sequences])):
        length = len(sequences[i].ids)
        size = (1 + copy_cost) * length
        before = result[-1].size if result else limit
        if before + size - shared > limit or shared < WORTH_SHARING * before:
            result.append(Load())
            shared = 0
        result[-1].sequences.append(sequences[i])
        result[-1].size += size - shared
        result[-1].cost += (length - shared) * (1 + attention_cost * length)
    return result


def divided(sequences: list, size: PackSize, rank: int = 0, ranks: int = 1) -> list[list]:
    """This rank's share of the sequences, as packs of this size.

    A longer sequence is a pack by itself. Every rank gets the same number of packs; some
    are empty if sequences are few. At any moment all ranks work on packs of similar cost,
    so that no rank waits long for another."""
    def placed(units: list[Load], packs: list[Load]) -> bool:
        """Put each unit into the cheapest pack that has room, the largest first."""
        for unit in sorted(units, key=attrgetter("size"), reverse=True):
            with_room = [pack for pack in packs
                         if not pack.sequences or pack.size + unit.size <= max_tokens]
            if not with_room:
                return False
            pack = min(with_room, key=attrgetter("cost"))
            pack.sequences += unit.sequences
            pack.size += unit.size
            pack.cost += unit.cost
        return True

    max_tokens, *costs = size
    units = prefix_groups(sequences, max_tokens, *costs)
    if ranks > 1:  # so small that no rank is left without
        limit = min(max_tokens, sum(unit.size for unit in units) / ranks)
        units = prefix_groups(sequences, limit, *costs)
    tokens = sum(min(unit.size, max_tokens) for unit in units)
    count = math.ceil(tokens / max_tokens / ranks) * ranks  # the least, equal for each rank
    while not placed(units, packs := [Load() for _ in range(count)]):
        count += ranks
    packs.sort(key=attrgetter("cost"), reverse=True)
    return [pack.sequences for pack in packs[rank::ranks]]


@dataclass
class Pack:
    """A pack: sequences (grpo.Sequence) as tensors, T tokens, N of them sampled. The
    order of sampled tokens is that of model.logprobs."""
    ids: Tensor  # (1, T)
    mask: Tensor  # (1, T), 1 for sampled tokens
    lengths: list[int]  # of each sequence, in tokens
    sequences: list  # what they were made of
    sampled: list[int]  # of each sequence, its sampled tokens
    sampler_logprobs: Tensor  # (N), their log-probabilities when they were sampled
    advantages: Tensor  # (N)
    weights: Tensor  # (N), what each weighs in the loss
    old_logprobs: Tensor | None = None  # (N), those before the first of several updates
    reference_logprobs: Tensor | None = None  # (N), those of pi_ref, for a KL term


def packs(sequences: list, size: PackSize, world, device) -> list[Pack]:
    """This rank's share of the sequences, as packs on the device."""
    shares = divided(sequences, size, world.rank, world.size)
    return [collate(share, device) for share in shares]


def collate(sequences: list, device) -> Pack:
    """The pack of these sequences. Without sequences it has one token, with mask 0."""
    ids = [i for sequence in sequences for i in sequence.ids]
    mask = [m for sequence in sequences for m in sequence.mask]
    logprobs = [p for sequence in sequences
                for p, m in zip(sequence.logprobs, sequence.mask) if m]
    advantages = [a for sequence in sequences for a in sequence.advantages]
    weights = [sequence.weight for sequence in sequences for _ in range(sum(sequence.mask))]
    logprobs, advantages, weights = (
        torch.tensor(values, dtype=torch.get_default_dtype(), device=device)
        for values in (logprobs, advantages, weights))
    return Pack(
        ids=torch.tensor([ids or [0]], device=device),
        mask=torch.tensor([mask or [0]], device=device),
        lengths=[len(sequence.ids) for sequence in sequences] or [1],
        sequences=sequences,
        sampled=[sum(sequence.mask) for sequence in sequences],
        sampler_logprobs=logprobs,
        advantages=advantages,
        weights=weights)
