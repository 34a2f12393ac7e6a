"""What sequences of tokens have in common."""
from itertools import pairwise

import numpy as np


def by_prefix(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    """(order, shared): the rows' indices, so that rows that begin alike are neighbours, and
    how many first tokens each shares with its neighbour before.

    The order is that of the tokens themselves, in which no other row before shares more.
    So the sum of `len(row) - shared` counts each distinct prefix once."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.asarray(rows[i]) for i in order]
    shared = [common(before, row) for before, row in pairwise(arrays)]
    return order, [0, *shared][:len(rows)]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
