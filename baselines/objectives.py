"""Objectives of others, to compare with: `python train.py --objective NAME`.

An objective is a function `credit(trees, config) -> {node: Credit}`: for each node that
is trained one advantage per sampled turn and the weight of its tokens. The loss is
grpo.py's. Left out: scores of turns (a critic, a process reward model).
"""
from collections import Counter
from dataclasses import replace
from statistics import fmean

from grpo import (Credit, GRPOConfig, centred, credit, inherit, relative,
                  scored_groups)
from tree import Node, Tree

NAMES = ("rao", "filter", "own")
LAMBDA = 0.4  # the share of its children's scores in a node's return in `rao`
KEEP = 0.5  # the reward from which `filter` learns from a tree


def check_switches(config: GRPOConfig) -> None:
    """Raises ValueError for a changed switch that the objective does not read."""
    if config.objective != "own" and config.std != GRPOConfig.std:
        raise ValueError(f"{config.objective} does not read --std {config.std}")


def rao(trees: list[Tree], config: GRPOConfig) -> dict[Node, Credit]:
    """Every node is judged by its own score, and by how well its children did.

    RAO (2605.06639). With s(x) the score of a node, and its tree g,
        R(x) = s(x) + LAMBDA * the mean of s over x's children
        A(x) = R(x) - the mean of R(root) over the OTHER trees of the group
        weight(x) = N / (D * N_d)
    for N trained nodes in the batch, at D depths, N_d of them at the depth d of x. Where a
    node has no s, the paper has no A(x): here it inherits that of its root, and it is left
    out of its parent's mean (0, if nothing is left). A tree alone in its group has no
    baseline, so its nodes have 0. Children sum drops the depth weights: all are 1."""
    returns = {}
    for tree in trees:
        for node in tree.root.walk():
            score = node.score if node.depth else tree.reward
            below = [child.score for child in node.children if child.score is not None]
            if score is not None:
                returns[node] = score + LAMBDA * fmean(below or [0.0])

    inherited, groups = [0.0] * len(trees), scored_groups(trees).values()
    for members in groups:
        gaps = centred([returns[trees[i].root] for i in members])
        for i, gap in zip(members, gaps):  # from the mean of all to that of the others
            inherited[i] = gap * len(members) / max(1, len(members) - 1)
    result = inherit(trees, inherited, config)
    for members in groups:
        for i in members if len(members) > 1 else ():
            root = trees[i].root
            for node in result.keys() & returns.keys() & set(root.walk()):
                own_advantage = returns[node] - (returns[root] - inherited[i])
                turns = len(result[node].advantages)
                result[node] = replace(result[node], advantages=[own_advantage] * turns)

    at_depth = Counter(node.depth for node in result)
    for node, given in result.items():
        weight = len(result) / (len(at_depth) * at_depth[node.depth])
        result[node] = replace(given, weight=weight if config.children == "mean" else 1.0)
    return result


def filter(trees: list[Tree], config: GRPOConfig) -> dict[Node, Credit]:
    """Rejection sampling, as ReST (2308.08998) and RFT (2308.01825): the advantage is 1 for
    trees with a reward of at least KEEP, 0 for all others. There is no baseline."""
    kept = [float(tree.reward >= KEEP) for tree in trees]
    return inherit(trees, kept, config)


def own(trees: list[Tree], config: GRPOConfig) -> dict[Node, Credit]:
    """A child's own score in place of its root's, where the task gives it one. It is
    compared with all trained children of the group that have one. Other nodes inherit."""
    result = credit(trees, config)
    for members in scored_groups(trees).values():
        scored = [node for i in members for node in trees[i].root.walk()
                  if node in result and node.depth and node.score is not None]
        compared = relative([node.score for node in scored], config) if scored else []
        for node, advantage in zip(scored, compared):
            turns = len(result[node].advantages)
            result[node] = replace(result[node], advantages=[advantage] * turns)
    return result
