"""An objective that was tried: python train.py --objective experiments/matched.py"""
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import grpo
from grpo import Credit, GRPOConfig, relative
from tree import Node, Rollout


def credit(rollouts: list[Rollout], config: GRPOConfig,
           by_answer: bool = True) -> dict[Node, Credit]:
    """An objective: a child is compared with the children of its group that were asked the
    same, by roots that wrote the same. Those that wrote the same share the mean reward of
    their trees, so what siblings did averages out. A child without a peer inherits."""
    result, peers = grpo.credit(rollouts, config), defaultdict(lambda: defaultdict(list))
    for rollout in rollouts:
        asked = {}
        for node in rollout.root.walk():
            said = tuple(turn.ids for turn in node.turns if turn.sampled)
            asked[node.path] = (*asked.get(node.path[:-1], (rollout.group,)), said[:1])
            if node.depth and node in result:
                place = node.path, *asked[node.path[:-1]]
                told = repr(node.answer) if by_answer else said
                peers[place][told].append((node, rollout.reward))
    for place in peers.values():
        nodes = [node for same in place.values() for node, _ in same]
        means = [fmean(r for _, r in same) for same in place.values() for _ in same]
        if len(nodes) > 1:
            for node, advantage in zip(nodes, relative(means, config)):
                turns = len(result[node].advantages)
                result[node] = replace(result[node], advantages=[advantage] * turns)
    return result
