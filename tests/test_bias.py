"""By enumeration of all groups: whose expected gradient is the true one."""
import pytest
import torch
from torch.nn.functional import cosine_similarity

from grpo import GRPOConfig
from lab import bias, objectives


@pytest.mark.parametrize("group_size", [2, 3])
def test_summed_children_constant_length_no_std_is_the_true_gradient(group_size):
    """Exactly: (G - 1) / G of the gradient of the expected reward."""
    gradient = bias.expected_gradient(GRPOConfig(**bias.UNBIASED), group_size)
    expected = bias.true_gradient() * (group_size - 1) / group_size
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("switch", [
    dict(children="mean"), dict(length="sequence"), dict(std="on"),
    dict(children="mean", length="batch")])
def test_every_other_choice_is_biased(switch):
    """Not only in length: the direction differs, so no learning rate makes up for it."""
    gradient = bias.expected_gradient(GRPOConfig(**bias.UNBIASED | switch), 2)
    assert cosine_similarity(gradient, bias.true_gradient(), dim=0) < 0.9995


def test_the_mean_of_the_others_needs_no_correction():
    config = GRPOConfig(objective="leave_one_out", children="sum")
    gradient = bias.expected_gradient(config, 2, objectives.leave_one_out)
    assert torch.allclose(gradient, bias.true_gradient(), atol=1e-6)


P, Q = (p * (1 - p) for p in bias.CHANCE)  # variances of a root's and a child's token


def test_of_k_children_the_rules_give_what_is_worked_out_by_hand():
    """G = 3 trees, k = 4, dial 0.5. The truth is (P / 2, Q / 2).

    Summed: a child's token has the covariance 0.5 Q / 4 with its tree's reward, and there
    are 4; the group's mean takes a third away. With 1/k a quarter of that is left. A
    child's own score has the covariance Q with its token whatever the dial is, times 4
    children; the mean of all 12 takes a twelfth away."""
    for rule, of_child in [("inherit, summed", 2 / 3 * Q / 2), ("inherit, 1/k", Q / 12),
                           ("one child drawn", 2 / 3 * Q / 2), ("own score", 11 / 3 * Q)]:
        mean, _ = bias.moments(rule, 4, 0.5)
        assert mean.tolist() == pytest.approx([2 / 3 * P / 2, of_child])


def test_the_variance_of_a_group_is_what_is_worked_out_by_hand():
    """One child, which does not matter. With m of 3 roots right, the root's part is the
    group's variance m (3 - m) / 9: 2/9 with chance t = 3 P, else 0. The child's part is
    sum A c / 3 with c independent of A: its variance is E[sum A^2] / 9 times Q."""
    _, variance = bias.moments("inherit, 1/k", 1, 0.0)
    t = 3 * P
    assert variance == pytest.approx(4 / 81 * t * (1 - t) + 2 / 9 * P * Q)
