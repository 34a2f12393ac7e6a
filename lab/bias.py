"""How far the expected gradient of an objective is from the true one: `python -m lab.bias`.

A policy over trees that is small enough to enumerate. The root answers at once (token 0),
asks one child (1), or asks two and adds a token of its own (2, then 3 or 4); a child says 5
or 6. That makes eleven trees and seven logits. The true gradient is that of the expected
reward. The expected gradient of an objective sums over all groups of G trees, each through
the rows and the loss of grpo.py at ratio 1. A child's own score is 1 if it says 6. Left
out: objectives that look at errors or draw at random.
"""
import itertools
from dataclasses import replace

import torch
from torch.nn.functional import cosine_similarity

from grpo import LENGTH_CONSTANT, GRPOConfig, collate, credit, make_rows, policy_loss
from lab import objectives
from runtime import console
from tree import Node, Rollout, Turn

THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = {"children": "sum", "length": "constant", "std": "off"}
GROUP = 3
SWITCHES = [("constant", "sum"), ("constant", "mean"), ("sequence", "sum"),
            ("sequence", "mean"), ("batch", "mean")]  # length, children
BOTH = ({"children": "sum"}, {"children": "mean"})
WEIGHTS = {"node_mean": "1/N", "rao": "by depth"}  # what they have in place of 1/k
WITH_STD = ("grpo", "node_mean", "fork", "own", "half_own")
OTHERS = [
    *((name, switch) for name in ("leave_one_out", "max_rl", "filter", "dpo")
      for switch in BOTH),
    ("node_mean", {"std": "off"}), ("node_mean", {"std": "off", "length": "sequence"}),
    *((name, {"std": "off"} | switch) for name in ("own", "half_own", "fork")
      for switch in BOTH),
    ("rao", {"children": "sum"}), ("rao", {}), ("rao", {"length": "batch"}),
]


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


def groups_of(size):
    """(sampled tokens, rollouts, 1) of every group of so many trees."""
    places = [list(all_trees()) for _ in range(size)]  # no two places share a Node
    for group in itertools.product(*places):
        ids = [i for _, tokens, _ in group for i in tokens]
        yield ids, [Rollout({}, "group", root, reward) for root, _, reward in group], 1


def forks_of(size):
    """The same for the objective "fork": a tree, and size - 1 that fork from it. The last
    number is that of the nodes that the fork can be at, one of which is drawn."""
    rewards = {tuple(tokens): reward for _, tokens, reward in all_trees()}
    for root, tokens, reward in all_trees():
        first = Rollout({}, "group", root, reward)
        kept = tokens[:len(tokens) - len(root.children)]
        for point in root.children:
            said = [child.ids[-1] for child in root.children]
            for drawn in itertools.product((5, 6), repeat=size - 1):
                trees = [first]
                for b in drawn:
                    said[point.path[0]] = b
                    again = node((), kept, *(node(c.path, [s]) for c, s in
                                             zip(root.children, said)))
                    for other in again.walk():
                        if other.path != point.path:  # taken over, not sampled
                            other.turns[1] = replace(other.turns[1], logprobs=None)
                    trees.append(Rollout({}, "group", again, rewards[*kept, *said],
                                         origin=root))
                yield [*tokens, *drawn], trees, len(root.children)
    for ids, trees, _ in groups_of(size):  # without a child the fork is at the root
        if not trees[0].root.children:
            root = trees[0].root
            yield ids, [trees[0], *(replace(t, origin=root) for t in trees[1:])], 1


def group_gradients(config, group_size, objective=credit, groups=groups_of):
    """(probabilities (groups,), gradients of J (groups, 7)) of all groups of this size.

    J is scaled by the length constant if there is one, as if that were 1."""
    theta = THETA.clone().requires_grad_()
    logprobs = token_logprobs(theta)
    constant = LENGTH_CONSTANT if config.length == "constant" else 1.0
    probabilities, gradients = [], []
    for ids, rollouts, draws in groups(group_size):
        probabilities.append(logprobs.detach()[ids].sum().exp() / draws)

        rows = make_rows(rollouts, objective(rollouts, config), config)
        gradient = torch.zeros_like(theta)
        if rows:
            pack = collate(rows, "cpu")
            sampled = logprobs[pack["ids"][pack["mask"].bool()]]
            pack["sampler"] = sampled.detach()
            loss, _ = policy_loss(sampled, torch.zeros(len(sampled)), pack, config)
            gradient, = torch.autograd.grad(-loss * constant, theta, retain_graph=True)
        gradients.append(gradient)
    return torch.stack(probabilities), torch.stack(gradients)


def expected_gradient(config, group_size, objective=credit, groups=groups_of):
    probabilities, gradients = group_gradients(config, group_size, objective, groups)
    return probabilities @ gradients


def table_row(config, gradient):
    """A line of the table. Only where the advantage is the reward minus a mean, the norm
    can be compared."""
    true = true_gradient()
    is_grpo = config.objective in ("grpo", "leave_one_out")
    weight = "" if config.length == "batch" else config.children
    if config.children == "mean":
        weight = WEIGHTS.get(config.objective, weight)
    children = gradient[5:].norm() / gradient[:5].norm()  # tokens 5 and 6 are children's
    true_children = true[5:].norm() / true[:5].norm()
    cells = [
        config.objective,
        weight,
        config.length,
        config.std if config.objective in WITH_STD else "",
        f"{gradient.norm() / true.norm():.3f}" if is_grpo else "",
        f"{cosine_similarity(gradient, true, dim=0):.4f}",
        f"{children / true_children:.2f}",
    ]
    print(f"| {' | '.join(cells)} |")


def main():
    print(f"Groups of {GROUP}. The true gradient's norm is {true_gradient().norm():.4f}.")
    print("Expected gradients are scaled by G / (G - 1) and by the length constant.\n")
    print("| objective | children | length | std | norm / true | cosine | "
          "children over root / true |")
    print("|---|---|---|---|---|---|---|")
    for std, (length, children) in itertools.product(("off", "on"), SWITCHES):
        config = GRPOConfig(children=children, length=length, std=std)
        table_row(config, expected_gradient(config, GROUP) * GROUP / (GROUP - 1))
    for name, switches in OTHERS:
        config = GRPOConfig(objective=name, **switches)
        groups = forks_of if name == "fork" else groups_of
        objective = getattr(objectives, name)
        table_row(config, expected_gradient(config, GROUP, objective, groups))


if __name__ == "__main__":
    console.start(main)
