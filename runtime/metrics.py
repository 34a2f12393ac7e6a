"""What a step of training looked like: numbers for metrics.jsonl and one line for people.

Left out: what the loss computes (grpo.Stats) and held-out scores (eval.py).
"""
from collections import Counter

from tree import Rollout


def describe(rollouts: list[Rollout]) -> dict:
    """What a batch of trees looked like: means per tree over those that did not fail."""
    scored = [rollout for rollout in rollouts if not rollout.failed]
    groups = {}
    for rollout in scored:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    flat = [max(rewards) - min(rewards) < 1e-9 for rewards in groups.values()]
    nodes = [node for rollout in scored for node in rollout.root.walk()]
    n = len(scored)
    row = {
        "reward": sum(rollout.reward for rollout in scored) / n,
        "flat": sum(flat) / len(groups),  # share of the groups that carry no gradient
        "failed": len(rollouts) - n,
        "failures": dict(Counter(r.failed for r in rollouts if r.failed)),
        "nodes": len(nodes) / n,
        "tokens": sum(node.sampled for node in nodes) / n,
        "errors": sum(len(node.errors) for node in nodes) / n,
        "ends": dict(Counter(rollout.root.end for rollout in scored).most_common()),
    }
    own = [r.root.score for r in scored if r.root.score is not None]
    if own:  # --reward replaces the task's own score, and the roots keep the latter
        row["score"] = sum(own) / len(own)
    return row


def shares(ends: dict[str, int]) -> str:
    """How roots ended, the most frequent end first: "final 90%, turns 10%"."""
    total = sum(ends.values())
    return ", ".join(f"{end} {count / total:.0%}" for end, count in ends.items())


def line(m: dict, steps: int) -> str:
    """One step for people. `m` are its metrics."""
    lost = f" | failed {m['failed']}" if m["failed"] else ""
    own = f" (score {m['score']:.3f})" if "score" in m else ""
    update = "no signal, no step"
    if m["rows"]:
        update = f"entropy {m['entropy']:.2f} grad {m['grad_norm']:.2f}"
    return (f"step {m['step']:4}/{steps} | reward {m['reward']:.3f}{own} | "
            f"{m['nodes']:.1f} nodes, {m['tokens']:.0f} tokens | "
            f"{shares(m['ends'])}{lost} | flat groups {m['flat']:.0%} | {update} | "
            f"sample {m['sample_s']:.1f} update {m['update_s']:.1f} s")
