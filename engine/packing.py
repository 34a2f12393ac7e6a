"""Packing: which rows one forward pass computes together, and on which rank.

All ranks get work of similar cost. Rows that begin with the same tokens share a pack, as
the model computes a common prefix once. A row is any object with `ids`, its tokens.
"""
import math
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

WORTH_SHARING = 0.02  # a smaller share of a row is not worth gathering keys and values


def by_prefix(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    """(order, shared): the indices of the rows in the order of their tokens, and how many
    first tokens each row shares with the row before it; 0 if they are few.

    In this order a row shares most with the one before it. So the sum of `len(row) -
    shared` counts each prefix once, except short ones."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.asarray(rows[i]) for i in order]
    shared = [common(before, row) for before, row in pairwise(arrays)]
    shared = [n if n >= WORTH_SHARING * len(row) else 0
              for n, row in zip(shared, arrays[1:])]
    return order, [0, *shared][:len(rows)]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass
class Load:
    """Rows that are to be computed together, while they are divided."""
    rows: list = field(default_factory=list)
    size: float = 0.0  # what they take in memory, in tokens
    cost: float = 0.0  # what they take in time

    def add(self, rows: list, size: float, cost: float) -> None:
        self.rows += rows
        self.size += size
        self.cost += cost


def alike(rows: list, limit: float, attention_cost: float,
          seen_cost: float) -> list[Load]:
    """The rows that begin alike in packs of at most this size, or of one row. In the order
    of their tokens, a row joins the one before it, unless the two share little: small packs
    are easier to divide."""
    result = []
    for i, shared in zip(*by_prefix([row.ids for row in rows])):
        length = len(rows[i].ids)
        size = (1 + seen_cost) * length
        before = result[-1].size if result else limit
        if before + size - shared > limit or shared < WORTH_SHARING * before:
            result.append(Load())
            shared = 0
        cost = (length - shared) * (1 + attention_cost * length)
        result[-1].add([rows[i]], size - shared, cost)
    return result


def micro_batches(rows: list, max_tokens: int, attention_cost: float = 0.0,
                  seen_cost: float = 0.0, rank: int = 0, ranks: int = 1) -> list[list]:
    """This rank's share of the rows, as packs of at most max_tokens distinct tokens. Each
    token of a row adds seen_cost to that, for the copy of its keys and values.

    A row that is longer than max_tokens is a pack by itself. Every rank gets the same
    number of packs; some are empty if rows are few. A token in a row of T tokens takes the
    time 1 + attention_cost * T. At any moment all ranks work on packs of similar cost, so
    that no rank waits long for another."""
    def placed(units: list[Load], packs: list[Load]) -> bool:
        """Put each unit into the cheapest pack that has room, the largest first."""
        for unit in sorted(units, key=attrgetter("size"), reverse=True):
            with_room = [pack for pack in packs
                         if not pack.rows or pack.size + unit.size <= max_tokens]
            if not with_room:
                return False
            min(with_room, key=attrgetter("cost")).add(unit.rows, unit.size, unit.cost)
        return True

    units = alike(rows, max_tokens, attention_cost, seen_cost)
    if ranks > 1:  # so small that no rank is left without
        limit = min(max_tokens, sum(unit.size for unit in units) / ranks)
        units = alike(rows, limit, attention_cost, seen_cost)
    tokens = sum(min(unit.size, max_tokens) for unit in units)
    count = math.ceil(tokens / max_tokens / ranks) * ranks  # the least, equal for each rank
    while not placed(units, packs := [Load() for _ in range(count)]):
        count += ranks
    packs.sort(key=attrgetter("cost"), reverse=True)
    return [pack.rows for pack in packs[rank::ranks]]


@dataclass
class Pack:
    """A micro-batch: rows (grpo.Row) as tensors, T tokens, N of them sampled. The order of
    sampled tokens is that of model.logprobs."""
    ids: Tensor  # (1, T)
    mask: Tensor  # (1, T), 1 for sampled tokens
    lengths: list[int]  # of each row, in tokens
    depths: list[int]  # of each row's node
    sampled: list[int]  # of each row, its sampled tokens
    sampler: Tensor  # (N), their log-probabilities when they were sampled
    advantages: Tensor  # (N)
    weights: Tensor  # (N), what each weighs in the loss
    old: Tensor | None = None  # (N), those before the first of several updates
    reference: Tensor | None = None  # (N), those of pi_ref, for a KL term


def packs(rows: list, plan, world, device) -> list[Pack]:
    """This rank's share of the rows, as micro-batches on the device. `plan` is a Plan."""
    plan = plan.for_packs
    shares = micro_batches(rows, plan.row, plan.attention_cost, plan.seen_cost,
                           world.rank, world.size)
    return [collate(share, device) for share in shares]


def collate(rows: list, device) -> Pack:
    """The pack of these rows. Without rows it has one token, with mask 0."""
    def flat(values) -> Tensor:
        listed = [value for row in rows for value in values(row)]
        return torch.tensor(listed, dtype=torch.get_default_dtype(), device=device)

    ids = [i for row in rows for i in row.ids]
    mask = [m for row in rows for m in row.mask]
    return Pack(
        ids=torch.tensor([ids or [0]], device=device),
        mask=torch.tensor([mask or [0]], device=device),
        lengths=[len(row.ids) for row in rows] or [1],
        depths=[row.depth for row in rows],
        sampled=[sum(row.mask) for row in rows],
        sampler=flat(lambda row: [p for p, m in zip(row.logprobs, row.mask) if m]),
        advantages=flat(lambda row: row.advantages),
        weights=flat(lambda row: [row.weight] * sum(row.mask)))
