"""The objectives of others: numbers by hand."""
import pytest
from test_grpo import made, node

from baselines import objectives
from grpo import GRPOConfig


def scored_trees():
    """Three trees of a group and a lost one. Rewards 1, 0, 0.5; scores of the children 1, 0
    | 0.5 | none. The first child has a child, without a score."""
    roots = [node((), 4, node((0,), 2, node((0, 0), 3)), node((1,), 2)),
             node((), 4, node((0,), 2)), node((), 4, node((0,), 2))]
    children = [child for root in roots for child in root.children]
    for child, score in zip(children, (1.0, 0.0, 0.5, None)):
        child.score = score
    roots[0].score = 0.3  # the task's own, where a reward replaces it: nobody reads it
    trees = [made(reward, root) for reward, root in zip((1.0, 0.0, 0.5), roots)]
    return [*trees, made(9.0, failed="lost")]


# Advantage and weight of each node, in pre-order. Trees of 4, 2 and 2 nodes have by 1/k:
BY_K = [1, 1 / 2, 1 / 2, 1 / 2, 1, 1, 1, 1]
HAND = [
    ("own", {"std": "off"},  # scores 1, 0, 0.5 of all; the others inherit
     [0.5, 0.5, 0.5, -0.5, -0.5, 0.0, 0.0, 0.0], BY_K),
    ("filter", {}, [1.0] * 4 + [0.0] * 2 + [1.0] * 2, BY_K),  # who scored 0.5 or more
    # R of the roots: 1 + 0.4 (1 + 0) / 2 = 1.2, 0 + 0.4 * 0.5 = 0.2, and 0.5, as its child
    # has no score. Baselines: 0.7 / 2 = 0.35, 1.7 / 2 = 0.85, 1.4 / 2 = 0.7.
    # R of the children with a score: 1 (its child has none), 0 and 0.5. Without: inherited.
    # Depth weights: 8 nodes, 3 depths; 3 of them at depth 0, 4 at 1, 1 at 2.
    ("rao", {}, [0.85, 0.65, 0.85, -0.35, -0.65, -0.35, -0.2, -0.2],
     [8 / 9, 8 / 12, 8 / 3, 8 / 12, 8 / 9, 8 / 12, 8 / 9, 8 / 12]),
    # Roots are left out of the weights, not of the baselines: 5 nodes, 2 depths.
    ("rao", {"trained": "children"}, [0.65, 0.85, -0.35, -0.35, -0.2],
     [5 / 8, 5 / 2, 5 / 8, 5 / 8, 5 / 8]),
    ("rao", {"children": "sum"},
     [0.85, 0.65, 0.85, -0.35, -0.65, -0.35, -0.2, -0.2], [1] * 8),
]


@pytest.mark.parametrize("name, switches, advantages, weights", HAND)
def test_credit_is_what_was_worked_out_by_hand(name, switches, advantages, weights):
    trees = scored_trees()
    credit = getattr(objectives, name)(trees, GRPOConfig(objective=name, **switches))
    nodes = [n for tree in trees[:3] for n in tree.root.walk() if n in credit]
    assert len(nodes) == len(credit) == len(weights)
    for n, advantage, weight in zip(nodes, advantages, weights):
        assert credit[n].advantages == pytest.approx([advantage] * 2), n.path
        assert credit[n].weight == pytest.approx(weight), n.path


@pytest.mark.parametrize("name", objectives.NAMES)
def test_equal_rewards_and_a_lone_tree_carry_no_gradient_and_lost_trees_no_credit(name):
    objective, config = getattr(objectives, name), GRPOConfig(objective=name)
    # The mean of three times 0.35 is not 0.35.
    equal, zero = ([made(reward, node((), 4, node((0,), 2))) for _ in range(3)]
                   for reward in (0.35, 0.0))
    lone = [made(0.3, node((), 4, node((0,), 2)))]
    lone[0].root.children[0].score = 1.0
    for trees in (equal, zero, lone):
        credit = objective(trees, config)
        assert len(credit) == 2 * len(trees)
        assert not any(a for given in credit.values() for a in given.advantages)
    assert objective([], config) == objective([made(1.0, failed="lost")], config) == {}


@pytest.mark.parametrize("name, switch", [
    ("filter", {"std": "off"}), ("rao", {"std": "off"})])
def test_a_switch_that_an_objective_does_not_read_is_refused(name, switch):
    with pytest.raises(ValueError, match=f"{name} does not read --{[*switch][0]}"):
        objectives.check_switches(GRPOConfig(objective=name, **switch))
