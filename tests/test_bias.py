"""By enumeration of all groups of two trees: whose expected gradient is the true one."""
import itertools

import pytest
import torch
from torch.nn.functional import cosine_similarity

from engine.packing import collate
from grpo import LENGTH_CONSTANT, GRPOConfig, credit, make_sequences, policy_loss
from tree import Message, Node, Tree

# A policy with eleven possible trees. The root answers at once (token 0), asks one child
# (1), or asks two and says one more token (2, then 3 or 4). A child says 5 or 6.
THETA = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, -0.6, 0.5], dtype=torch.float64)
UNBIASED = {"children": "sum", "length": "constant", "std": "off"}


def node(path, ids, *children):
    made = Node(path, children=list(children))
    made.add(Message("user", "", (0,)))
    made.add(Message("assistant", "", tuple(ids), (0.0,) * len(ids)))
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
def test_only_summed_children_constant_length_no_std_give_the_true_gradient(
        switch, float64):
    """Exactly, times (G - 1) / G. Others differ in direction, not only in length."""
    theta = THETA.clone().requires_grad_()
    logprobs = torch.cat([part.log_softmax(0) for part in theta.split([3, 2, 2])])
    reward = sum(logprobs[ids].sum().exp() * reward for _, ids, reward in all_trees())
    true, = torch.autograd.grad(reward, theta, retain_graph=True)
    expected, config = torch.zeros_like(theta), GRPOConfig(**UNBIASED | switch)
    for group in itertools.product(all_trees(), all_trees()):
        ids = [i for _, tokens, _ in group for i in tokens]
        trees = [Tree({}, "group", root, reward) for root, _, reward in group]
        rows = make_sequences(trees, credit(trees, config), config)
        if rows:
            pack = collate(rows, "cpu")
            sampled = logprobs[pack.ids[pack.mask.bool()]]
            pack.sampler_logprobs = sampled.detach()
            loss, _ = policy_loss(sampled, torch.zeros(len(sampled)), pack, config)
            gradient, = torch.autograd.grad(-loss, theta, retain_graph=True)
            expected += logprobs.detach()[ids].sum().exp() * gradient * LENGTH_CONSTANT
    exact = torch.allclose(expected, true / 2, rtol=0, atol=1e-10)
    assert exact == (not switch)
    assert exact or cosine_similarity(expected, true, dim=0) < 0.9995
