"""What a step of training looked like: numbers for metrics.jsonl and one line for people.

Left out: what the loss computes (grpo.Stats) and held-out scores (eval.py).
"""
from collections import Counter

from tree import Node, Rollout


OUT_OF = {"turns": "out of turns", "window": "out of window", "budget": "out of budget"}


def describe(rollouts: list[Rollout], advantages: list[float]) -> dict:
    """What a batch of trees looked like: means per tree over those that did not fail."""
    scored, groups = [], {}
    for rollout, advantage in zip(rollouts, advantages):
        if not rollout.failed:
            scored.append((rollout, advantage))
            groups.setdefault(rollout.group, []).append(advantage)
    n = len(scored)
    nodes = [node for rollout, _ in scored for node in rollout.root.walk()]
    flat = [not any(advantages) for advantages in groups.values()]
    return {
        "reward": sum(rollout.reward for rollout, _ in scored) / n,
        "flat": sum(flat) / len(groups),  # share of the groups that carry no gradient
        "failed": len(rollouts) - n,
        "failures": dict(Counter(r.failed for r in rollouts if r.failed)),
        "nodes": len(nodes) / n,
        "turns": sum(node.written for node in nodes) / n,
        "tokens": sum(node.sampled for node in nodes) / n,
        "critical_path": sum(critical_path(rollout.root) for rollout, _ in scored) / n,
        "tokens_worse": _mean([sampled_tokens([r]) for r, a in scored if a < 0]),
        "tokens_better": _mean([sampled_tokens([r]) for r, a in scored if a > 0]),
        "errors": sum(len(node.errors) for node in nodes) / n,
        "block_s": sum(node.repl_seconds for node in nodes) / n,
        "ends": dict(Counter(rollout.root.end for rollout, _ in scored).most_common()),
    }


def sampled_tokens(rollouts: list[Rollout]) -> int:
    return sum(node.sampled for rollout in rollouts for node in rollout.root.walk())


def critical_path(node: Node) -> int:
    """The tokens that had to be written one after another: those of the node, and of each
    of its queries the child with the longest such path. What a tree takes at least, however
    many run side by side. Four characters count as a token where there are no ids."""
    own = sum(len(turn.ids) or len(turn.text) // 4 for turn in node.turns
              if turn.role == "assistant")
    longest: dict[tuple, int] = {}
    for child in node.children:
        longest[child.asked] = max(longest.get(child.asked, 0), critical_path(child))
    return own + sum(longest.values())


def _mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def shares(ends: dict[str, int]) -> str:
    """How roots ended, the most frequent end first: "final 90%, out of turns 10%"."""
    total = sum(ends.values())
    return ", ".join(f"{OUT_OF.get(end, end)} {count / total:.0%}"
                     for end, count in ends.items())


def line(m: dict, steps: int) -> str:
    """One step for people. `m` are its metrics."""
    lost = ""
    if m["failed"]:
        lost = f" | failed {m['failed']}: {next(iter(m['failures']))[:60]}"
    update = "no signal, no step"
    if m["rows"]:
        update = f"entropy {m['entropy']:.2f} grad {m['grad_norm']:.2f}"
    return (f"step {m['step']:4}/{steps} | reward {m['reward']:.3f} | {m['nodes']:.1f} "
            f"nodes, {m['tokens']:.0f} tokens | {shares(m['ends'])}{lost} | flat groups "
            f"{m['flat']:.0%} | {update} | sample {m['sample_s']:.1f} "
            f"update {m['update_s']:.1f} s")
