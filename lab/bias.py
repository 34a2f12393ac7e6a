"""How far the expected gradient of an objective is from the true one: `python -m lab.bias`.

The policy has seven logits and eleven possible trees, so all can be enumerated. The root
answers at once (token 0), asks one child (1), or asks two and says one more token (2, then
3 or 4). A child says 5 or 6; its own score is 1 for a 6. The expected gradient of an
objective is a sum over all groups of trees, each through the rows and the loss of grpo.py.

`python -m lab.bias OUT.json` writes bias and variance by the number of children, and by how
much of the reward is the children's work.
"""
import itertools
import math
import sys
from collections import Counter

import torch
from torch.nn.functional import cosine_similarity

from grpo import LENGTH_CONSTANT, Credit, GRPOConfig, credit, make_rows, policy_loss
from lab import objectives
from runtime.files import write_json
from runtime.packing import collate
from tree import Node, Rollout, Turn

THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = {"children": "sum", "length": "constant", "std": "off"}
GROUP = 3
SWITCHES = [("constant", "sum"), ("constant", "mean"), ("sequence", "sum"),
            ("sequence", "mean"), ("batch", "mean")]  # length, children
BOTH = ({"children": "sum"}, {"children": "mean"})
FORMS = [
    *(("grpo", {"children": children, "length": length, "std": std})
      for std in ("off", "on") for length, children in SWITCHES),
    *((name, switch) for name in ("leave_one_out", "max_rl", "filter", "dpo")
      for switch in BOTH),
    ("node_mean", {"std": "off"}), ("node_mean", {"std": "off", "length": "sequence"}),
    *(("own", {"std": "off"} | switch) for switch in BOTH),
    ("rao", {"children": "sum"}), ("rao", {}), ("rao", {"length": "batch"}),
]


OFF, SUM = {"std": "off"}, {"std": "off", "children": "sum"}
RULES = {  # name: (objective, switches, whether one child drawn stands for all k)
    "inherit, 1/k": ("grpo", OFF, False),
    "inherit, summed": ("grpo", SUM, False),
    "roots only": ("grpo", OFF | {"credit": "root"}, False),
    "own score": ("own", SUM, False),
    "RAO": ("rao", {"children": "sum"}, False),
    "leave one out": ("leave_one_out", {"children": "sum"}, False),
    "one child drawn": ("grpo", SUM, True),
}
CHANCE = (0.6, 0.4)  # that a root is right, and that a child is


def token_logprobs(theta):
    """log pi of tokens 0 to 6, each of which is one of 0-2, 3-4 or 5-6."""
    return torch.cat([part.log_softmax(0) for part in theta.split([3, 2, 2])])


def node(path, ids, *children):
    made = Node(path, children=list(children))
    made.score = float(ids == [6]) if path else None
    made.add(Turn("user", "", (0,)))
    made.add(Turn("assistant", "", tuple(ids), (0.0,) * len(ids)))
    return made


def all_trees():
    """(root, sampled tokens, reward) of every tree.

    The best is to ask two children that both say 6; parts of it are worth something."""
    yield node((), [0]), [0], 0.35
    for b in (5, 6):
        yield node((), [1], node((0,), [b])), [1, b], 0.1 + 0.4 * (b == 6)
    for c, b1, b2 in itertools.product((3, 4), (5, 6), (5, 6)):
        root = node((), [2, c], node((0,), [b1]), node((1,), [b2]))
        reward = 0.2 * (c == 3) + 0.4 * (b1 == 6) + 0.4 * (b2 == 6) * (b1 == 6)
        yield root, [2, c, b1, b2], reward


def true_gradient():
    theta = THETA.clone().requires_grad_()
    logprobs = token_logprobs(theta)
    expected = sum(logprobs[ids].sum().exp() * reward for _, ids, reward in all_trees())
    expected.backward()
    return theta.grad


def expected_gradient(config, group_size, objective=credit):
    """The mean gradient of J (7,) over all groups of this size, by their probabilities.

    J is scaled by the length constant if there is one, as if that were 1."""
    theta = THETA.clone().requires_grad_()
    logprobs = token_logprobs(theta)
    constant = LENGTH_CONSTANT if config.length == "constant" else 1.0
    expected = torch.zeros_like(theta)
    places = [list(all_trees()) for _ in range(group_size)]  # no two places share a Node
    for group in itertools.product(*places):
        ids = [i for _, tokens, _ in group for i in tokens]
        rollouts = [Rollout({}, "group", root, reward) for root, _, reward in group]
        rows = make_rows(rollouts, objective(rollouts, config), config)
        if rows:
            pack = collate(rows, "cpu")
            sampled = logprobs[pack["ids"][pack["mask"].bool()]]
            pack["sampler"] = sampled.detach()
            loss, _ = policy_loss(sampled, torch.zeros(len(sampled)), pack, config)
            gradient, = torch.autograd.grad(-loss * constant, theta, retain_graph=True)
            expected += logprobs.detach()[ids].sum().exp() * gradient
    return expected


def moments(name, k, dial):
    """How a rule estimates the gradient by the logits (root, child), from one group: its
    mean, and its variance, summed over both. All is exact.

    A root says 0 or 1 (right) and asks k children, who say 2 or 3 (right). The reward is
    (1 - dial) * (is the root right?) + dial * (the share of the children that are)."""
    objective, switches, draw = RULES[name]
    config = GRPOConfig(objective=objective, **switches)
    objective = credit if objective == "grpo" else getattr(objectives, objective)
    p, q = CHANCE
    outcomes = {}  # (root, right children, the drawn child): probability
    for x, right, drawn in itertools.product((0, 1), range(k + 1), (0, 1)):
        chance = p if x else 1 - p
        chance *= math.comb(k, right) * q ** right * (1 - q) ** (k - right)
        outcomes[x, right, drawn] = chance * (right if drawn else k - right) / k

    mean, square = torch.zeros(2).double(), 0.0
    for group in itertools.combinations_with_replacement(outcomes, GROUP):
        orders = math.factorial(GROUP)
        orders //= math.prod(map(math.factorial, Counter(group).values()))
        chance = orders * math.prod(outcomes[tree] for tree in group)
        rollouts, left_out = [], []
        for x, right, drawn in group:
            children = [node((i,), [2 + (i < right)]) for i in range(k)]
            for child in children:
                child.score = float(child.ids[-1] == 3)
            reward = (1 - dial) * x + dial * right / k
            rollouts.append(Rollout({}, "group", node((), [x], *children), reward))
            left_out += children[:-1] if drawn == 0 else children[1:]
        credits = objective(rollouts, config)
        if draw:  # the first children are right, the last are wrong
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


def by_children(path):
    """Write, for each rule, number of children and dial: the angle between the expected and
    the true gradient in degrees, and the variance over the square of the mean."""
    rows = []
    dials = (0.0, 0.25, 0.5, 0.75, 1.0)
    for name, k, dial in itertools.product(RULES, (1, 2, 4, 8), dials):
        mean, variance = moments(name, k, dial)
        p, q = CHANCE
        true = torch.tensor([(1 - dial) * p * (1 - p), dial * q * (1 - q)]).double()
        row = {"rule": name, "children": k, "dial": dial, "mean": mean.tolist(),
               "true": true.tolist(), "degrees": None, "noise": None}
        if mean.norm() > 1e-9:  # roots only learn nothing where only children matter
            cosine = cosine_similarity(mean, true, dim=0).clamp(-1, 1)
            row["degrees"] = math.degrees(cosine.acos())
            row["noise"] = variance / float(mean @ mean)
        rows.append(row)
    write_json(path, {"command": "python -m lab.bias OUT.json", "rows": rows})


def main():
    if sys.argv[1:]:
        return by_children(sys.argv[1])
    print(f"Groups of {GROUP}, by the length constant; of grpo also by G / (G - 1).\n")
    print("| objective | switches | norm / true | cosine | children over root / true |")
    print("|---|---|---|---|---|")
    true = true_gradient()
    for name, switches in FORMS:
        objective = credit if name == "grpo" else getattr(objectives, name)
        config = GRPOConfig(objective=name, **switches)
        gradient = expected_gradient(config, GROUP, objective)
        if name == "grpo":
            gradient *= GROUP / (GROUP - 1)
        ratio = gradient.norm() / true.norm()
        cosine = cosine_similarity(gradient, true, dim=0)
        children, of_true = (g[5:].norm() / g[:5].norm() for g in (gradient, true))
        print(f"| {name} | {' '.join(switches.values())} | {ratio:.3f} | {cosine:.4f} | "
              f"{children / of_true:.2f} |")


if __name__ == "__main__":
    main()
