"""How far the expected gradient of each objective is from the true one: `python tests/bias.py`.

A tree policy small enough to enumerate: the root answers at once (token 0), asks one child (1), or
asks two and adds a token of its own (2, then 3 or 4); a child says 5 or 6. Eleven trees, seven
logits. The true gradient is that of the expected reward; the expected gradient of an objective sums
over all groups of G trees, each through grpo.py's own rows and loss, at ratio 1.
"""
import itertools
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo import GRPOConfig, collate, make_rows, policy_loss  # noqa: E402
from tree import Node, Rollout, Turn  # noqa: E402

THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = dict(children="sum", length="constant", std="off")


def token_logprobs(theta):
    """log pi of tokens 0 to 6; each is one of 0-2, 3-4 or 5-6."""
    return torch.cat([part.log_softmax(0) for part in theta.split([3, 2, 2])])


def node(path, ids, *children):
    made = Node(path, children=list(children))
    made.add(Turn("user", "", (0,)))
    made.add(Turn("assistant", "", tuple(ids), (0.0,) * len(ids)))
    return made


def all_trees():
    """(root, sampled tokens, reward) of every tree; it is right to ask two children that both
    say 6, and each part of that is worth something."""
    yield node((), [0]), [0], 0.35
    for b in (5, 6):
        yield node((), [1], node((0,), [b])), [1, b], 0.1 + 0.4 * (b == 6)
    for c, b1, b2 in itertools.product((3, 4), (5, 6), (5, 6)):
        root = node((), [2, c], node((0,), [b1]), node((1,), [b2]))
        yield root, [2, c, b1, b2], 0.2 * (c == 3) + 0.4 * (b1 == 6) + 0.4 * (b2 == 6) * (b1 == 6)


def true_gradient(theta=THETA):
    theta = theta.clone().requires_grad_()
    logprobs = token_logprobs(theta)
    sum(logprobs[ids].sum().exp() * reward for _, ids, reward in all_trees()).backward()
    return theta.grad


def group_gradients(config, G, theta=THETA):
    """(probabilities (groups,), gradients of J (groups, 7)) of all groups of G trees."""
    trees = list(all_trees())
    theta = theta.clone().requires_grad_()
    probabilities, gradients = [], []
    for group in itertools.product(trees, repeat=G):
        logprobs = token_logprobs(theta)
        p = logprobs.detach()[[i for _, ids, _ in group for i in ids]].sum().exp()
        rows = make_rows([Rollout({}, "g", root, reward) for root, _, reward in group], config)
        gradient = torch.zeros_like(theta)
        if rows:
            t = collate(rows, "cpu")
            sampled = logprobs[t["ids"][t["mask"].bool()]]
            t["sampler"] = sampled.detach()
            loss, _, _ = policy_loss(sampled, torch.zeros(len(sampled)), t, config)
            gradient, = torch.autograd.grad(-loss, theta)
        probabilities.append(p)
        gradients.append(gradient)
    return torch.stack(probabilities), torch.stack(gradients)


def expected_gradient(config, G, theta=THETA):
    p, g = group_gradients(config, G, theta)
    return p @ g


def main():
    true, G = true_gradient(), 3
    print(f"true gradient, its norm {true.norm():.4f}; groups of {G}; expected ones are scaled by "
          "G / (G - 1) and, for a constant length, by that constant")
    print("| children | length | std | norm / true | cosine | children over root / true |")
    print("|---|---|---|---|---|---|")
    for std, (length, children) in itertools.product(("off", "on"), (
            ("constant", "sum"), ("constant", "mean"), ("sequence", "sum"), ("sequence", "mean"),
            ("batch", "mean"))):
        config = GRPOConfig(children=children, length=length, std=std, length_constant=1.0)
        g = expected_gradient(config, G) * G / (G - 1)
        cosine = torch.nn.functional.cosine_similarity(g, true, dim=0)
        part = (g[5:].norm() / g[:5].norm()) / (true[5:].norm() / true[:5].norm())
        print(f"| {'' if length == 'batch' else children} | {length} | {std} | "
              f"{g.norm() / true.norm():.3f} | {cosine:.4f} | {part:.2f} |")


if __name__ == "__main__":
    main()
