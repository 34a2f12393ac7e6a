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


def cosine(name, groups=bias.groups_of, **switches):
    config = GRPOConfig(objective=name, **switches)
    gradient = bias.expected_gradient(config, 2, getattr(objectives, name), groups)
    return cosine_similarity(gradient, bias.true_gradient(), dim=0).item(), gradient


def test_the_mean_of_the_others_needs_no_correction():
    _, gradient = cosine("leave_one_out", children="sum")
    assert torch.allclose(gradient, bias.true_gradient(), atol=1e-6)


@pytest.mark.parametrize("name, switches", [
    ("max_rl", {"children": "sum"}), ("node_mean", {"length": "sequence"}), ("rao", {}),
    ("rao", {"children": "sum"}), ("own", {"children": "sum", "std": "off"})])
def test_other_objectives_point_elsewhere_but_not_away(name, switches):
    assert 0.9 < cosine(name, **switches)[0] < 0.9995


def test_a_tree_that_forks_at_a_child_is_distributed_like_the_one_it_forks_from():
    """By enumeration; the groups' probabilities sum to 1. Over all trees this does not
    hold: a root that asked nobody is sampled again, one that asked is kept."""
    logprobs = bias.token_logprobs(bias.THETA)
    expected = sum(logprobs[ids].sum().exp() * r for _, ids, r in bias.all_trees())
    rows = [(logprobs[ids].sum().exp().item() / draws, trees)
            for ids, trees, draws in bias.forks_of(2)]
    assert sum(p for p, _ in rows) == pytest.approx(1)
    assert sum(p * trees[0].reward for p, trees in rows) == pytest.approx(expected.item())
    at_child = [(p, trees) for p, trees in rows if trees[0].root.children]
    first, forked = (sum(p * trees[i].reward for p, trees in at_child) for i in (0, 1))
    assert first == pytest.approx(forked)
    assert sum(p * trees[1].reward for p, trees in rows) > 1.05 * expected.item()


def test_forks_train_children_more_than_their_root():
    """Each child that is sampled again adds to the gradient of children alone."""
    config = GRPOConfig(objective="fork", children="sum", std="off")
    plain = bias.expected_gradient(GRPOConfig(**bias.UNBIASED), 2)
    forked = bias.expected_gradient(config, 2, objectives.fork, bias.forks_of)
    shares = [g[5:].norm() / g[:5].norm() for g in (plain, forked)]
    assert 1.2 * shares[0] < shares[1]
