"""By enumeration of all groups: whose expected gradient is the true one."""
import itertools

import pytest
import torch
from torch.nn.functional import cosine_similarity

from engine.packing import collate
from grpo import LENGTH_CONSTANT, GRPOConfig, credit, make_rows, policy_loss
from tree import Node, Rollout, Turn

# A policy with eleven possible trees. The root answers at once (token 0), asks one child
# (1), or asks two and says one more token (2, then 3 or 4). A child says 5 or 6.
THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = {"children": "sum", "length": "constant", "std": "off"}


def token_logprobs(theta):
    """log pi of tokens 0 to 6, each of which is one of 0-2, 3-4 or 5-6."""
    return torch.cat([part.log_softmax(0) for part in theta.split([3, 2, 2])])


def node(path, ids, *children):
    made = Node(path, children=list(children))
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
    """The mean gradient of J (7,) over all groups of this size, by their probabilities,
    through the rows and the loss of grpo.py; times the length constant."""
    theta = THETA.clone().requires_grad_()
    logprobs = token_logprobs(theta)
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
            gradient, = torch.autograd.grad(-loss, theta, retain_graph=True)
            expected += logprobs.detach()[ids].sum().exp() * gradient * LENGTH_CONSTANT
    return expected


@pytest.mark.parametrize("group_size", [2, 3])
def test_summed_children_constant_length_no_std_is_the_true_gradient(group_size):
    """Exactly: (G - 1) / G of the gradient of the expected reward."""
    gradient = expected_gradient(GRPOConfig(**UNBIASED), group_size)
    expected = true_gradient() * (group_size - 1) / group_size
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("switch", [
    dict(children="mean"), dict(length="sequence"), dict(std="on"),
    dict(children="mean", length="batch")])
def test_every_other_choice_is_biased(switch):
    """Not only in length: the direction differs, so no learning rate makes up for it."""
    gradient = expected_gradient(GRPOConfig(**UNBIASED | switch), 2)
    assert cosine_similarity(gradient, true_gradient(), dim=0) < 0.9995
