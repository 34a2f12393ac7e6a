"""By enumeration of all groups of two trees: whose expected gradient is the true one."""
import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from engine.packing import collate
from grpo import LENGTH_CONSTANT, GRPOConfig, credit, make_rows, policy_loss
from sampler import Request, sample
from tree import Node, Rollout, Sampling, Turn

# A policy with eleven possible trees. The root answers at once (token 0), asks one child
# (1), or asks two and says one more token (2, then 3 or 4). A child says 5 or 6.
THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = {"children": "sum", "length": "constant", "std": "off"}


def node(path, ids, *children):
    made = Node(path, children=list(children))
    made.add(Turn("user", "", (0,)))
    made.add(Turn("assistant", "", tuple(ids), (0.0,) * len(ids)))
    return made


def all_trees():
    """(root, sampled tokens, reward) of every tree."""
    yield node((), [0]), [0], 0.35
    for b in (5, 6):
        yield node((), [1], node((0,), [b])), [1, b], 0.1 + 0.4 * (b == 6)
    for c, b1, b2 in itertools.product((3, 4), (5, 6), (5, 6)):
        root = node((), [2, c], node((0,), [b1]), node((1,), [b2]))
        reward = 0.2 * (c == 3) + 0.4 * (b1 == 6) + 0.4 * (b2 == 6) * (b1 == 6)
        yield root, [2, c, b1, b2], reward


@pytest.mark.parametrize("switch", [
    {}, dict(children="mean"), dict(length="sequence"), dict(std="on"),
    dict(children="sum", length="batch")])
def test_only_summed_children_constant_length_no_std_give_the_true_gradient(switch):
    """Exactly, times (G - 1) / G. Others differ in direction, not only in length."""
    theta = THETA.clone().requires_grad_()
    logprobs = torch.cat([part.log_softmax(0) for part in theta.split([3, 2, 2])])
    reward = sum(logprobs[ids].sum().exp() * reward for _, ids, reward in all_trees())
    true, = torch.autograd.grad(reward, theta, retain_graph=True)
    expected, config = torch.zeros_like(theta), GRPOConfig(**UNBIASED | switch)
    for group in itertools.product(all_trees(), all_trees()):
        ids = [i for _, tokens, _ in group for i in tokens]
        rollouts = [Rollout({}, "group", root, reward) for root, _, reward in group]
        rows = make_rows(rollouts, credit(rollouts, config), config)
        if rows:
            pack = collate(rows, "cpu")
            sampled = logprobs[pack["ids"][pack["mask"].bool()]]
            pack["sampler"] = sampled.detach()
            loss, _ = policy_loss(sampled, torch.zeros(len(sampled)), pack, config)
            gradient, = torch.autograd.grad(-loss, theta, retain_graph=True)
            expected += logprobs.detach()[ids].sum().exp() * gradient * LENGTH_CONSTANT
    exact = torch.allclose(expected, true / 2, atol=1e-6)
    assert exact == (not switch)
    assert exact or cosine_similarity(expected, true, dim=0) < 0.9995


@pytest.mark.parametrize("sampling", [Sampling(1.6), Sampling(0.8), Sampling(1.3, 0.8)])
def test_however_tokens_are_drawn_the_expected_update_is_that_of_the_policy(sampling):
    """One token of five, drawn over an even grid of random numbers. With a KL term too, and
    with top_p over the tokens that can come."""
    n, grid = 20_000, (np.arange(20_000) + 0.5) / 20_000
    theta = torch.tensor([0.9, -0.2, 0.3, -0.9, 0.1], dtype=torch.float64).requires_grad_()
    reward = torch.tensor([0.2, 1.0, -0.5, 0.7, 0.1], dtype=torch.float64)
    logprobs = theta.log_softmax(0)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    requests = [Request([0], 1, sampling, frozenset(), bool, grid[i:], None)
                for i in range(n)]
    new, plain, drawn = map(torch.from_numpy, sample(
        logprobs.detach().expand(n, -1), requests))
    new = new.long()
    pack = {"sampler": plain, "drawn": drawn, "advantages": reward[new],
            "reference": reference[new], "weights": torch.full((n,), 1 / n)}
    loss, watched = policy_loss(logprobs[new], torch.zeros(n), pack, GRPOConfig(kl=0.5))
    gradient, = torch.autograd.grad(loss, theta, retain_graph=True)

    can_come = torch.zeros(5, dtype=bool).index_fill(0, new, True)
    # The + 1 is a constant where all can come; else the mass of those that can is no goal.
    gain = reward - 0.5 * (logprobs - reference - 1)
    true, = torch.autograd.grad(-(logprobs.exp() * gain)[can_come].sum(), theta)
    assert watched["gap"].max() < 1e-6 and can_come.all() == (sampling.top_p == 1)
    assert torch.allclose(gradient, true, atol=1e-3)
