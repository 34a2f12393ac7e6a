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


def test_the_sampled_gradient_has_that_expectation_within_three_standard_errors():
    probabilities, gradients = bias.group_gradients(GRPOConfig(**bias.UNBIASED), 2)
    rng = torch.Generator().manual_seed(0)
    sampled = gradients[torch.multinomial(probabilities, 20_000, True, generator=rng)]
    error = sampled.std(0) / 20_000 ** 0.5
    assert ((sampled.mean(0) - bias.true_gradient() / 2).abs() < 3 * error).all()


@pytest.mark.parametrize("switch", [
    dict(children="mean"), dict(length="sequence"), dict(std="on"),
    dict(children="mean", length="batch")])
def test_every_other_choice_is_biased(switch):
    """Not only in length: the direction differs, so no learning rate makes up for it."""
    gradient = bias.expected_gradient(GRPOConfig(**bias.UNBIASED | switch), 2)
    assert cosine_similarity(gradient, bias.true_gradient(), dim=0) < 0.9995


def test_rejection_sampling_without_a_baseline_is_further_off_than_dpo():
    cosines = []
    for objective in (objectives.filter, objectives.dpo):
        config = GRPOConfig(objective=objective.__name__, children="sum")
        gradient = bias.expected_gradient(config, 2, objective)
        cosines.append(cosine_similarity(gradient, bias.true_gradient(), dim=0).item())
    assert 0.5 < cosines[0] < cosines[1] < 0.9995
