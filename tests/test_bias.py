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
