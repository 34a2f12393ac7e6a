"""Scores of answers: means, intervals, and the differences of methods.

Intervals are at 95 %, over questions. Left out: intervals over training runs. Tried: a
bootstrap alone, which is certain of four equal scores, so `interval` widens it.
"""
import itertools
from collections import Counter

import numpy as np

from config import RLMConfig
from tasks.text import as_text
from tree import Rollout

Z = 1.959964  # deviations on each side of a 95 % interval


def trained_as(config: RLMConfig) -> str:
    """The method that a checkpoint was trained as."""
    return f"rlm{config.max_depth if config.max_nodes > 1 else 0}"


def record_of(rollout: Rollout) -> dict:
    """What the statistics read of an answer. A context's length is its characters / 4."""
    nodes = list(rollout.root.walk())
    return {"id": rollout.task.id, "context": len(as_text(rollout.task.context)) // 4,
            "score": rollout.reward, "own": rollout.root.score,  # None without --reward
            "failed": rollout.failed, "end": rollout.root.end,
            "nodes": len(nodes), "out": sum(n.sampled + n.counted for n in nodes)}


def summary(records: list[dict], task: str, length: int | None, method: str) -> dict:
    """A row of the table: means over the questions that did not fail."""
    scored = [r for r in records if not r["failed"]]

    def mean(name: str) -> float | None:
        values = [r[name] for r in scored if r.get(name) is not None]
        return float(np.mean(values)) if values else None

    low, high = None, None
    if scored:
        low, high = interval([r["score"] for r in scored])
        length = length or round(mean("context"))
    return {
        "task": task, "method": method, "length": length, "n": len(scored),
        "failed": len(records) - len(scored), "low": low, "high": high,
        **{name: mean(name) for name in "score own in out nodes seconds".split()},
        "ends": dict(Counter(r["end"] for r in scored).most_common())}


def interval(scores: list[float], least: float = 0.0) -> tuple[float, float]:
    """The 95 % interval of the mean of scores between `least` and 1: the percentiles of
    2,000 bootstrap resamples (Efron, 1979), widened. As in Wilson's interval (1927), a
    share z²/(n + z²) of all questions may score `least`, or 1, though none of these did."""
    values = np.asarray(scores, dtype=float)
    n = len(values)
    picks = np.random.default_rng(0).integers(n, size=(2000, n))
    low, high = np.percentile(values[picks].mean(1), [2.5, 97.5]).tolist()
    unseen = Z ** 2 / (n + Z ** 2)
    low += unseen * (min(least, values.min()) - low)
    high += unseen * (max(1.0, values.max()) - high)
    return float(low), float(high)


def differences(cells: dict[tuple, list[dict]]) -> list[dict]:
    """For each two methods the mean difference of their scores, question by question, with
    its 95 % interval. `cells`: {(task, length, method): records}."""
    rows = []
    for (one, a), (two, b) in itertools.combinations(cells.items(), 2):
        if one[:2] != two[:2]:
            continue
        gaps = [x["score"] - y["score"] for x, y in zip(a, b, strict=True)
                if not x["failed"] and not y["failed"]]
        if gaps:
            low, high = interval(gaps, least=-1.0)
            rows.append({"task": one[0], "length": one[1], "a": one[2], "b": two[2],
                         "n": len(gaps), "difference": float(np.mean(gaps)), "low": low,
                         "high": high})
    return rows
