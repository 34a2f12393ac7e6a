"""What a step of training looked like: numbers for metrics.jsonl and one line for people.

Left out: held-out scores (scores.py), and the loss itself (grpo.py).
"""
import time
from collections import Counter
from statistics import fmean, pstdev

import torch
from torch import Tensor

from grpo import scored_groups
from tree import Node, Tree


class Clock:
    """Where the seconds of a step go. `stats` are those of the sampler."""

    def __init__(self, stats: dict):
        self.stats = stats

    def start(self) -> None:
        self.began, self.in_model = time.monotonic(), self.stats["seconds"]

    def trees_done(self) -> None:
        """From here on the step updates the weights."""
        self.updating = time.monotonic()
        self.sample_s = self.stats["seconds"] - self.in_model

    def seconds(self) -> dict:
        outside = self.updating - self.began - self.sample_s
        return {"sample_s": self.sample_s, "repl_s": max(0.0, outside),
                "update_s": time.monotonic() - self.updating}


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
        "failures": dict(Counter(r.failed for r in trees if r.failed)),
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
    lost = f" | failed {m['failed']}" if m["failed"] else ""
    score = f" (score {m['score']:.3f})" if m["score"] != m["reward"] else ""
    update = "no signal, no step"
    if m["sequences"]:
        update = f"entropy {m['entropy']:.2f} grad {m['grad_norm']:.2f} " \
                 f"forgot {m['forgot']:.2f}"
        if m["step_left"] < 1:
            update += f" in {m['step_left']:.2g} of a step"
    return (f"step {m['step']:4}/{steps} | reward {m['reward']:.3f}{score} | "
            f"{m['nodes']:.1f} nodes, {m['tokens']:.0f} tokens | "
            f"ran {m['ran']:.0%} asks {m['asks']:.0%} | {shares(m['ends'])}{lost} | "
            f"flat {m['flat']:.0%} | {update} | "
            f"sample {m['sample_s']:.1f} update {m['update_s']:.1f} s")


def totals(loss: Tensor, per_token: dict[str, Tensor]) -> Counter:
    """The loss of a pack, the number of its tokens, and sums over them: of what
    grpo.policy_loss returned. `update` of a Counter adds those of other packs and ranks."""
    sums = torch.stack([*per_token.values()]).sum(1).tolist()
    count = len(per_token["gap"])
    return Counter(dict(zip(per_token, sums)), loss=loss.item(), count=count)


def means(sums: Counter, steps: int = 1) -> dict:
    """Means over the tokens and the steps, as metrics.jsonl has them. {} of nothing."""
    over = dict.fromkeys(sums, sums["count"]) | {"loss": steps}
    return {name: sums[name] / over[name] for name in sums if name != "count"}
