"""Objectives of others, to compare with: `python train.py --objective NAME`.

An objective is a function `credit(rollouts, config) -> {node: Credit}`: for each node that
is trained one advantage per sampled turn and the weight of its tokens. The loss is
grpo.py's. Each docstring names the switches of GRPOConfig that the objective reads, and
ValueError refuses values that it would ignore. The switches of the loss (--updates,
--clip-high, --kl) go with all of them but dpo. Your own objective can be a function like
these, in any file.

Left out: what needs another loss, or scores of turns (a critic, a process reward model).
"""
import math
import random

from grpo import (LENGTH_CONSTANT, Credit, GRPOConfig, advantages, credit, inherit,
                  relative, scored_groups)
from tree import Node, Rollout

NAMES = ("filter", "dpo", "own", "half_own", "process", "one_child")
KEEP = 0.5  # the score from which `filter` learns from a tree
BETA = 0.1  # of `dpo`, its paper's default
PROCESS = 0.2  # the advantage of a turn without an error in `process`


def filter(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """Rejection sampling: supervised learning on the trees that scored at least KEEP.

    ReST (2308.08998), RFT (2308.01825): the advantage is 1 for these trees, 0 for all
    others. There is no baseline. Reads credit, children, length; refuses std off."""
    _require(config, std=("on",))
    kept = [float(rollout.reward >= KEEP) for rollout in rollouts]
    return inherit(rollouts, kept, config)


def dpo(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """Online DPO (2305.18290) on the best and the worst tree of each group.

    The loss of a pair is L = -log sigmoid(beta m), with the margin
        m     = (log pi(best) - log pi_ref(best)) - (log pi(worst) - log pi_ref(worst))
        dL/dm = -beta sigmoid(-beta m)
    where log pi(tree) sums over its sampled tokens, weighted by the 1/k of their nodes.
    Here pi_ref is the policy that sampled the pair, new at every step. At its update
    pi = pi_ref, so m = 0, sigmoid(0) = 1/2, and
        grad L = -(beta / 2) (grad log pi(best) - grad log pi(worst))
    which is the policy gradient with the advantages beta / 2 and -beta / 2. A second update
    or a KL term would need another loss. The loss of a batch is the mean over its pairs; a
    group with equal rewards has none. Reads credit, children; refuses other values of std,
    length, updates, kl."""
    _require(config, std=("on",), length=("constant",), updates=(1,), kl=(0.0,))
    per_tree = [0.0] * len(rollouts)
    pairs = 0
    relative_rewards = advantages(rollouts, config)
    for members in scored_groups(rollouts).values():
        best = max(members, key=lambda i: relative_rewards[i])
        worst = min(members, key=lambda i: relative_rewards[i])
        if relative_rewards[best] > relative_rewards[worst]:
            per_tree[best], per_tree[worst] = BETA / 2, -BETA / 2
            pairs += 1

    # make_rows divides by the scored trees and the length constant; the mean is over pairs.
    trees = sum(not rollout.failed for rollout in rollouts)
    scale = LENGTH_CONSTANT * trees / max(1, pairs)
    return {node: Credit(given.advantages, given.weight * scale)
            for node, given in inherit(rollouts, per_tree, config).items()}


def own(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """A child's own score in place of its root's, where the task gives it one.

    Its advantage is relative to all trained nodes of the group that have a score, in
    whatever tree they are.
    It is the score s(x) of RAO (2605.06639) without what RAO adds for the children's
    scores; nodes without a score inherit. Reads credit, children, length, std; refuses
    credit root."""
    return _own_share(rollouts, config, 1.0)


def half_own(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """As `own`, but the advantage is the mean of the inherited and the child's own one."""
    return _own_share(rollouts, config, 0.5)


def process(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """An advantage of its own for each turn: whether its block ran without an error.

    After Agent-R1 (2511.14460). With v_t = 1 for a turn that has a block without an error
    and 0 for others, A_t = A + PROCESS * (v_t - mean of v over the group's trained
    turns). What is added is at most |A| / 2, so that it never outweighs the answer; where
    A is 0 all of it counts. Reads credit, children, length, std."""
    result = credit(rollouts, config)
    for members in scored_groups(rollouts).values():
        nodes = [node for i in members for node in rollouts[i].root.walk()
                 if node in result]
        valid = {node: [float(turn not in node.errors)
                        for turn in range(len(result[node].advantages))] for node in nodes}
        all_turns = [v for values in valid.values() for v in values]
        mean = sum(all_turns) / max(1, len(all_turns))

        for node in nodes:
            changed = []
            for advantage, v in zip(result[node].advantages, valid[node]):
                most = abs(advantage) / 2 or math.inf
                extra = max(-most, min(most, PROCESS * (v - mean)))
                changed.append(advantage + extra)
            result[node] = Credit(changed, result[node].weight)
    return result


def one_child(rollouts: list[Rollout], config: GRPOConfig) -> dict[Node, Credit]:
    """Train one child of each node, drawn at random, with weight 1, not all with 1/k.

    The expectation is that of children "mean", and there are fewer rows. The tokens of the
    root seed the draw, so that all ranks, and a resumed run, draw the same. Reads credit,
    length, std; refuses children sum and credit root."""
    _require(config, children=("mean",), credit=("inherit", "children"))
    result = credit(rollouts, config)
    drawn = {}
    for rollout in rollouts:
        rng = random.Random(str(rollout.root.ids))
        children = [rollout.root]
        while children:
            node = rng.choice(children)
            if node in result:
                drawn[node] = Credit(result[node].advantages, 1.0)
            children = [child for child in node.children if child.sampled]
    return drawn


def _own_share(rollouts: list[Rollout], config: GRPOConfig, share: float) -> dict:
    """Inherited credit; `share` of it is replaced by a node's own score, if it has one."""
    _require(config, credit=("inherit", "children"))
    result = credit(rollouts, config)
    for members in scored_groups(rollouts).values():
        scored = [node for i in members for node in rollouts[i].root.walk()
                  if node in result and node.score is not None]
        own_advantages = relative([node.score for node in scored], config) if scored else []
        for node, own_advantage in zip(scored, own_advantages):
            mixed = [(1 - share) * inherited + share * own_advantage
                     for inherited in result[node].advantages]
            result[node] = Credit(mixed, result[node].weight)
    return result


def _require(config: GRPOConfig, **allowed: tuple) -> None:
    """Raises ValueError for a switch with a value that the objective would ignore."""
    for name, values in allowed.items():
        value = getattr(config, name)
        if value not in values:
            raise ValueError(f"objective {config.objective} takes {name} "
                             f"{' or '.join(map(str, values))}, not {value}")
