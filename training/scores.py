"""Scores of answers: means, intervals, several trees per question, and differences.

Intervals are at 95 %, over questions, each with the mean of its trees. Left out: intervals
over training runs. Tried: a bootstrap alone, which is certain of four equal scores, so
`interval` widens it.
"""
import itertools
import math
from collections import Counter
from statistics import fmean

import numpy as np

from config import RLMConfig
from tasks.common import as_text
from tree import Tree

Z = 1.959964  # deviations on each side of a 95 % interval
WHAT_HELPS = (  # where all trees of a question score alike
    "Take easier questions or --warmup if they score 0, harder ones if they score 1; or "
    "raise --group")


def method_of(config: RLMConfig) -> str:
    """The method that a checkpoint was trained as."""
    return f"rlm{config.max_depth if config.max_nodes > 1 else 0}"


def record_of(tree: Tree) -> dict:
    """What the statistics read of an answer. A context's length is its characters / 4."""
    nodes = list(tree.root.walk())
    return {"id": tree.question.id, "context": len(as_text(tree.question.context)) // 4,
            "score": tree.root.score, "reward": tree.reward,
            "failed": tree.failed, "end": tree.root.end,
            "nodes": len(nodes), "out": sum(n.sampled + n.counted for n in nodes)}


def by_question(records: list[dict], name: str = "score") -> dict[str, list[float]]:
    """The scores, or rewards, of each question's trees, by the question's id. Trees that
    failed are left out, and with them a question that has no other."""
    found: dict[str, list[float]] = {}
    for record in records:
        if not record["failed"]:
            found.setdefault(record["id"], []).append(record[name])
    return found


def summary(records: list[dict], task: str, length: int | None, method: str) -> dict:
    """A row of the table: score and reward are means over questions, all else over trees.
    `n` are the questions with a tree that did not fail, `failed` the trees that did."""
    scored = [r for r in records if not r["failed"]]
    means, rewards = ([fmean(values) for values in by_question(records, name).values()]
                      for name in ("score", "reward"))

    def mean(name: str) -> float | None:
        values = [r[name] for r in scored if r.get(name) is not None]
        return fmean(values) if values else None

    if scored:
        length = length or round(mean("context"))
    return {
        "task": task, "method": method, "length": length, **mean_of(means),
        "reward": fmean(rewards) if rewards else None,
        "failed": len(records) - len(scored),
        **{name: mean(name) for name in "in out nodes seconds".split()},
        "ends": dict(Counter(r["end"] for r in scored).most_common())}


def mean_of(scores: list[float]) -> dict:
    """Their number, mean and interval; None where there are no scores."""
    if not scores:
        return {"n": 0, "score": None, "low": None, "high": None}
    low, high = interval(scores)
    return {"n": len(scores), "score": fmean(scores), "low": low, "high": high}


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


def best_of(scores: list[float], k: int) -> float:
    """The expected best of k of these scores, drawn without replacement. Where they are 0
    and 1 it is pass@k, with the unbiased estimate of Chen et al. (arXiv 2107.03374)."""
    ways = math.comb(len(scores), k)  # of which comb(i, k - 1) have the i-th as their best
    return sum(score * (math.comb(i, k - 1) / ways)
               for i, score in enumerate(sorted(scores)))


def alike(scores: list[float]) -> str:
    """How the scores of a question's trees compare. GRPO learns from mixed ones alone."""
    low, high = min(scores), max(scores)
    if low < high:
        return "mixed"
    return f"all {int(low)}" if low in (0, 1) else "else alike"


def differences(cells: dict[tuple, dict[str, list[float]]]) -> list[dict]:
    """For each two methods the mean difference of their scores, question by question, with
    its 95 % interval. `cells`: {(task, length, method): scores by_question}."""
    rows = []
    for (one, a), (two, b) in itertools.combinations(cells.items(), 2):
        gaps = [fmean(a[id]) - fmean(b[id]) for id in a if id in b]
        if one[:2] == two[:2] and gaps:
            low, high = interval(gaps, least=-1.0)
            rows.append({"task": one[0], "length": one[1], "a": one[2], "b": two[2],
                         "n": len(gaps), "difference": fmean(gaps), "low": low,
                         "high": high})
    return rows
