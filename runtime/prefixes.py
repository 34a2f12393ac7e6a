"""What sequences of tokens have in common."""
from itertools import pairwise

import numpy as np

WORTH_SHARING = 0.02  # of a row: less is not worth a gather of its keys and values


def by_prefix(rows: list[list[int]]) -> tuple[list[int], list[int]]:
    """(order, shared): the rows' indices, so that rows that begin alike are neighbours, and
    how many first tokens each shares with its neighbour before, or 0 if they are few.

    The order is that of the tokens themselves, in which no other row before shares more.
    So the sum of `len(row) - shared` counts each distinct prefix once, but for those."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.asarray(rows[i]) for i in order]
    shared = [common(before, row) for before, row in pairwise(arrays)]
    shared = [n if n >= WORTH_SHARING * len(row) else 0
              for n, row in zip(shared, arrays[1:])]
    return order, [0, *shared][:len(rows)]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
