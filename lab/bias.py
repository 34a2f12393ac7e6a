"""How far the expected gradient of an objective is from the true one: `python -m lab.bias`.

The policy has seven logits and eleven possible trees, so all can be enumerated. The root
answers at once (token 0), asks one child (1), or asks two and says one more token (2, then
3 or 4). A child says 5 or 6; its own score is 1 for a 6. The expected gradient of an
objective is a sum over all groups of trees, each through the rows and the loss of grpo.py.
"""
import itertools

import torch
from torch.nn.functional import cosine_similarity

from grpo import LENGTH_CONSTANT, GRPOConfig, credit, make_rows, policy_loss
from lab import objectives
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


def main():
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
