"""Bias and variance of rules of credit, exact: `python -m lab.bias OUT.json`.

A root says one token, and k children say one token each; CHANCE says how often they are
right. The reward is (1 - dial) * (is the root right?) + dial * (the share of the children
that are). All groups of three trees are enumerated, each through the objectives and the
rows of the code, without a division by the deviation. Left out: roots that choose how many
children they ask, and what the length of a message does (all have one token).
"""
import itertools
import math
import sys
from collections import Counter

import torch
from torch.nn.functional import cosine_similarity

from grpo import LENGTH_CONSTANT, Credit, GRPOConfig, credit, make_rows
from lab import objectives
from runtime.files import write_json
from tree import Node, Rollout, Turn

GROUP = 3
CHANCE = (0.6, 0.4)  # that a root is right, and that a child is
CHILDREN = (1, 2, 4, 8)
DIALS = (0.0, 0.25, 0.5, 0.75, 1.0)
SUMMED = {"std": "off", "children": "sum"}
RULES = {  # name: (objective, switches, whether one child drawn stands for all k)
    "inherit, 1/k": ("grpo", {"std": "off"}, False),
    "inherit, summed": ("grpo", SUMMED, False),
    "all tokens alike": ("grpo", {"std": "off", "length": "batch"}, False),
    "roots only": ("grpo", {"std": "off", "credit": "root"}, False),
    "own score": ("own", SUMMED, False),
    "RAO": ("rao", {"children": "sum"}, False),
    "leave one out": ("leave_one_out", {"children": "sum"}, False),
    "one child drawn": ("grpo", SUMMED, True),
}


def node(path: tuple, token: int, *children: Node) -> Node:
    made = Node(path, children=list(children))
    made.add(Turn("user", "", (0,)))
    made.add(Turn("assistant", "", (token,), (0.0,)))
    return made


def moments(name: str, k: int, dial: float) -> tuple[torch.Tensor, float]:
    """How a rule estimates the gradient by the logits (root, child), from one group: its
    mean (2), and its variance, summed over both.

    A root says 0, or 1 (right). Its children say 2, or 3 (right)."""
    objective, switches, draw = RULES[name]
    config = GRPOConfig(objective=objective, **switches)
    objective = credit if objective == "grpo" else getattr(objectives, objective)
    p, q = CHANCE
    outcomes = {}  # (root, right children, is the drawn one right?): probability
    for x, right in itertools.product((0, 1), range(k + 1)):
        chance = p if x else 1 - p
        chance *= math.comb(k, right) * q ** right * (1 - q) ** (k - right)
        of_drawn = {1: right / k, 0: 1 - right / k} if draw else {None: 1.0}
        for drawn, share in of_drawn.items():
            outcomes[x, right, drawn] = chance * share

    mean, square = torch.zeros(2).double(), 0.0
    for group in itertools.combinations_with_replacement(outcomes, GROUP):
        orders = math.factorial(GROUP)
        orders //= math.prod(map(math.factorial, Counter(group).values()))
        chance = orders * math.prod(outcomes[tree] for tree in group)
        rollouts, left_out = [], []
        for x, right, drawn in group:
            # The first children are right, the last are wrong.
            children = [node((i,), 2 + (i < right)) for i in range(k)]
            for child in children:
                child.score = float(child.ids[-1] == 3)
            reward = (1 - dial) * x + dial * right / k
            rollouts.append(Rollout({}, "group", node((), x, *children), reward))
            left_out += children[1:] if drawn else children[:-1]
        credits = objective(rollouts, config)
        if draw:
            credits = {n: Credit(given.advantages, given.weight * (k if n.depth else 1))
                       for n, given in credits.items() if n not in left_out}

        estimate = torch.zeros(2).double()
        for row in make_rows(rollouts, credits, config):
            kind, says = divmod(row.ids[-1], 2)
            slope = row.weight * row.advantages[0] * (says - CHANCE[kind])
            estimate[kind] += LENGTH_CONSTANT * slope
        mean += chance * estimate
        square += chance * float(estimate @ estimate)
    return mean, square - float(mean @ mean)


def cell(name: str, k: int, dial: float) -> dict:
    """The angle between the expected and the true gradient in degrees, and the variance
    over the square of the mean. None where a rule learns nothing: roots only, at dial 1."""
    mean, variance = moments(name, k, dial)
    found = {"children": k, "dial": dial, "degrees": None, "noise": None}
    if mean.norm() > 1e-9:
        p, q = CHANCE
        true = torch.tensor([(1 - dial) * p * (1 - p), dial * q * (1 - q)]).to(mean)
        cosine = cosine_similarity(mean, true, dim=0).clamp(-1, 1)
        found["degrees"] = math.degrees(cosine.acos())
        found["noise"] = variance / float(mean @ mean)
    return found


if __name__ == "__main__":
    found = {"command": "python -m lab.bias OUT.json"}
    for rule in RULES:
        found[rule] = [cell(rule, k, dial) for k in CHILDREN for dial in DIALS]
    write_json(sys.argv[1], found)
