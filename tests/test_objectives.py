"""The objectives of others: numbers by hand, gradients, DPO against its textbook loss."""
import random

import pytest
import torch
from test_grpo import node, plain, rollout

import grpo
from grpo import (CLIP_LOW, LENGTH_CONSTANT, GRPOConfig, collate, make_rows, micro_batches,
                  node_weights, policy_loss, priced)
from lab import bias, objectives
from tree import Turn


def scored_trees():
    """Three trees of a group, rewards 1, 0, 0.5; children's scores 1, 0 | 0.5 | none."""
    roots = [node((), 4, node((0,), 2), node((1,), 2)), node((), 4, node((0,), 2)),
             node((), 4, node((0,), 2))]
    children = [child for root in roots for child in root.children]
    for child, score in zip(children, (1.0, 0.0, 0.5, None)):
        child.score = score
    return [rollout(reward, root) for reward, root in zip((1.0, 0.0, 0.5), roots)]


def deeper_trees():
    """As above, but the first child has a child without a score; and a failed tree."""
    trees = scored_trees()
    trees[0].root.children[0].children = [node((0, 0), 3)]
    return [*trees, rollout(9.0, failed="lost")]


def is_(by_tree, weights):
    """{(tree, path): (advantage, weight)} from one entry per node, in pre-order."""
    places = [(0, ()), (0, (0,)), (0, (0, 0)), (0, (1,)), (1, ()), (1, (0,)), (2, ()),
              (2, (0,))]
    return dict(zip(places, zip(by_tree, weights, strict=True), strict=True))


# Rewards 1, 0, 0.5. Trees of 4, 2 and 2 nodes, which by 1/k have these weights:
BY_K = [1, 1 / 2, 1 / 2, 1 / 2, 1, 1, 1, 1]
HAND = [
    # 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2
    ("leave_one_out", {}, is_([0.75] * 4 + [-0.75] * 2 + [0.0] * 2, BY_K)),
    # (1 - 0.5) / 0.5, (0 - 0.5) / 0.5, (0.5 - 0.5) / 0.5
    ("max_rl", {}, is_([1.0] * 4 + [-1.0] * 2 + [0.0] * 2, BY_K)),
    ("node_mean", {"std": "off"}, is_(
        [0.5] * 4 + [-0.5] * 2 + [0.0] * 2, [1 / 4] * 4 + [1 / 2] * 4)),
    # R of the roots: 1 + 0.4 (1 + 0) / 2 = 1.2, 0 + 0.4 * 0.5 = 0.2, and 0.5, as its child
    # has no score. Baselines: 0.7 / 2 = 0.35, 1.7 / 2 = 0.85, 1.4 / 2 = 0.7.
    # R of the children with a score: 1 (its child has none), 0 and 0.5. Without: inherited.
    # Depth weights: 8 nodes, 3 depths; 3 of them at depth 0, 4 at 1, 1 at 2.
    ("rao", {}, is_(
        [0.85, 0.65, 0.85, -0.35, -0.65, -0.35, -0.2, -0.2],
        [8 / 9, 8 / 12, 8 / 3, 8 / 12, 8 / 9, 8 / 12, 8 / 9, 8 / 12])),
    # Roots are left out of the weights, not of the baselines: 5 nodes, 2 depths.
    ("rao", {"credit": "children"}, {
        place: given for place, given in is_(
            [0, 0.65, 0.85, -0.35, 0, -0.35, 0, -0.2],
            [0, 5 / 8, 5 / 2, 5 / 8, 0, 5 / 8, 0, 5 / 8]).items() if place[1]}),
    ("rao", {"children": "sum"}, is_(
        [0.85, 0.65, 0.85, -0.35, -0.65, -0.35, -0.2, -0.2], [1] * 8)),
]


def by_place(trees, credit):
    return {(number, n.path): (credit[n].advantages, credit[n].weight)
            for number, tree in enumerate(trees) for n in tree.root.walk() if n in credit}


@pytest.mark.parametrize("name, switches, expected", HAND)
def test_advantages_and_weights_are_those_worked_out_by_hand(name, switches, expected):
    trees = deeper_trees()
    config = GRPOConfig(objective=name, **switches)
    found = by_place(trees, getattr(objectives, name)(trees, config))
    assert found.keys() == expected.keys()
    for place, (advantage, weight) in expected.items():
        advantages, found_weight = found[place]
        assert advantages == pytest.approx([advantage] * 2), place
        assert found_weight == pytest.approx(weight), place


def gradient_agrees(trees, config, expected):
    """Whether the gradient is that of finite differences of J, which is written out from
    {(tree, path): (advantage, weight)}, away from ratio 1, in float64."""
    logits, old = torch.randn(2, 10, dtype=torch.float64,
                              generator=torch.Generator().manual_seed(0))
    old = (0.9 * logits + 0.1 * old).log_softmax(0)

    def j(logits):
        logprobs, total = logits.log_softmax(0), 0.0
        for number, tree in enumerate(trees):
            for n in tree.root.walk():
                A, weight = expected.get((number, n.path), (0.0, 0.0))
                c = 1 / LENGTH_CONSTANT
                if config.length == "sequence":
                    c = 1 / max(1, n.sampled)
                for token in [i for i, m in zip(n.ids, n.mask) if m]:
                    ratio = (logprobs[token] - old[token]).exp()
                    clipped = ratio.clamp(1 - CLIP_LOW, 1.2)
                    total += weight * c * torch.minimum(ratio * A, clipped * A)
        return total / sum(not tree.failed for tree in trees)

    objective = getattr(objectives, config.objective)
    rows = make_rows(trees, objective(trees, config), config)
    pack = {key: value.double() if key in ("advantages", "weights") else value
            for key, value in collate(rows, "cpu").items()}
    tokens = pack["ids"][pack["mask"].bool()]
    pack["old"] = pack["sampler"] = old[tokens]
    moved = logits.clone().requires_grad_()
    logprobs = moved.log_softmax(0)[tokens]
    policy_loss(logprobs, torch.zeros(len(tokens)), pack, config)[0].backward()
    steps = torch.eye(10, dtype=torch.float64) * 1e-6
    numeric = torch.stack([(j(logits + h) - j(logits - h)) / 2e-6 for h in steps])
    assert numeric.abs().max() > 1e-4
    return torch.allclose(-moved.grad, numeric, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("length", ["constant", "sequence"])
@pytest.mark.parametrize("name, switches, expected", HAND)
def test_the_gradient_is_that_of_finite_differences(name, switches, expected, length):
    config = GRPOConfig(objective=name, length=length, **switches)
    assert gradient_agrees(deeper_trees(), config, expected)


@pytest.mark.parametrize("name", objectives.NAMES)
def test_equal_rewards_and_a_lone_tree_carry_no_gradient(name):
    """But for `filter`, which has no baseline, and own scores, which may still differ."""
    config = GRPOConfig(objective=name)
    equal = [rollout(0.3, node((), 4, node((0,), 2))) for _ in range(3)]
    for trees in (equal, equal[:1]):
        credit = getattr(objectives, name)(trees, config)
        assert len(credit) == 2 * len(trees)
        assert not any(a for given in credit.values() for a in given.advantages)
    equal[0].root.children[0].score = 0.0
    equal[1].root.children[0].score = 1.0
    credit = getattr(objectives, name)(equal, config)
    differs = any(any(credit[tree.root.children[0]].advantages) for tree in equal)
    assert differs == (name in ("own", "half_own", "rao"))


def test_a_lone_tree_has_no_baseline_for_its_children_either():
    tree = scored_trees()[0]
    credit = objectives.rao([tree], GRPOConfig(objective="rao"))
    assert [given.advantages for given in credit.values()] == [[0.0, 0.0]] * 3


def test_rewards_that_are_not_above_0_have_no_mean_to_divide_by():
    trees = [rollout(-1.0), rollout(0.5), rollout(0.5)]
    credit = objectives.max_rl(trees, GRPOConfig(objective="max_rl"))
    assert [credit[tree.root].advantages for tree in trees] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("name", ("grpo", *objectives.NAMES))
def test_at_a_price_of_0_nothing_changes(name):
    trees, config = deeper_trees(), GRPOConfig(objective=name)
    objective = grpo.credit if name == "grpo" else getattr(objectives, name)
    assert by_place(trees, objective(priced(trees, config), config)) == by_place(
        trees, objective(trees, config))


def test_a_price_is_taken_off_the_reward_that_the_objective_sees():
    """100 per thousand: 0.1 per token. The trees sampled 11, 6 and 6 tokens."""
    trees, config = deeper_trees(), plain(cost=100.0)
    assert [tree.reward for tree in priced(trees, config)] == pytest.approx(
        [1 - 1.1, 0 - 0.6, 0.5 - 0.6, 9 - 0.2])
    assert [tree.reward for tree in trees] == [1.0, 0.0, 0.5, 9.0]
    # Net rewards -0.1, -0.6, -0.1: their mean is -0.8 / 3.
    assert grpo.advantages(priced(trees, config), config)[:3] == pytest.approx(
        [0.5 / 3, -1 / 3, 0.5 / 3])

    # RAO: the first child, with 2 tokens and 3 below it, has 1 - 0.5, the second 0 - 0.2,
    # and that of the second tree 0.5 - 0.2. R of the roots is -0.1 + 0.4 * 0.15,
    # -0.6 + 0.4 * 0.3, -0.1; the baseline of the first is -0.29.
    config = GRPOConfig(objective="rao", cost=100.0)
    credit = objectives.rao(priced(trees, config), config)
    first, second = trees[0].root.children
    assert credit[trees[0].root].advantages[0] == pytest.approx(-0.04 + 0.29)
    assert credit[first].advantages[0] == pytest.approx(0.5 + 0.29)
    assert credit[second].advantages[0] == pytest.approx(-0.2 + 0.29)


def test_rejection_sampling_learns_from_what_scored_enough_and_from_nothing_else():
    trees = [rollout(reward, group=group) for reward, group in (
        (0.7, "a"), (0.5, "a"), (0.0, "a"), (0.2, "b"), (0.1, "b"), (0.9, "c"))]
    trees.append(rollout(1.0, failed="lost"))
    config = GRPOConfig(objective="filter")
    credit = objectives.filter(trees, config)
    assert [credit[tree.root].advantages[0] for tree in trees[:-1]] == [1, 1, 0, 0, 0, 1]
    assert trees[-1].root not in credit
    assert len(make_rows(trees, credit, config)) == 3


@pytest.mark.parametrize("objective, share", [("own", 1.0), ("half_own", 0.5)])
def test_own_scores_replace_a_share_of_the_inherited_advantage(objective, share):
    trees = scored_trees()
    credit = getattr(objectives, objective)(trees, plain(objective=objective))
    by_tree = [[credit[n].advantages for n in tree.root.walk()] for tree in trees]
    rest = 1 - share
    assert by_tree == [
        [[0.5] * 2, [rest * 0.5 + share * 0.5] * 2, [rest * 0.5 - share * 0.5] * 2],
        [[-0.5] * 2, [rest * -0.5 + share * 0.0] * 2],
        [[0.0] * 2, [0.0] * 2]]
    assert credit[trees[0].root.children[0]].weight == 0.5


def test_the_process_reward_is_per_turn_and_never_outweighs_the_answer(monkeypatch):
    trees = scored_trees()
    trees[0].root.errors = [1]  # of 14 turns in the group one is wrong
    config = plain(objective="process")
    monkeypatch.setattr(objectives, "PROCESS", 0.1)
    credit = objectives.process(trees, config)
    right, wrong = 0.1 * (1 - 13 / 14), 0.1 * (0 - 13 / 14)
    assert credit[trees[0].root].advantages == pytest.approx([0.5 + right, 0.5 + wrong])
    assert credit[trees[2].root].advantages == pytest.approx([right, right])  # A is 0

    monkeypatch.setattr(objectives, "PROCESS", 9.0)
    credit = objectives.process(trees, config)
    assert credit[trees[0].root].advantages == pytest.approx([0.5 + 0.25, 0.5 - 0.25])
    for tree, inherited in zip(trees, grpo.advantages(trees, config)):
        for n in tree.root.walk():
            assert all(x * inherited >= inherited ** 2 / 2 for x in credit[n].advantages)


def test_one_child_is_drawn_per_node_and_its_expectation_is_the_mean():
    def ragged(number):  # the tokens of the root, which seed the draw, tell the trees apart
        root = node((), 2, node((0,), 3), node((1,), 0),
                    node((2,), 5, node((2, 0), 1), node((2, 1), 0), node((2, 2), 2)),
                    node((3,), 2, node((3, 0), 8)))
        root.turns[0] = Turn("user", "", (number, 1))
        return root

    trees = [rollout(number % 2, ragged(number)) for number in range(600)]
    config = GRPOConfig(objective="one_child")
    drawn = objectives.one_child(trees, config)
    share = {}
    for tree in trees:
        paths = [n.path for n in tree.root.walk() if n in drawn]
        assert paths[0] == () and len([path for path in paths if len(path) == 1]) == 1
        for path in paths:
            share[path] = share.get(path, 0) + 1 / 600
    mean = {n.path: weight for n, weight in node_weights(trees[0].root).items()}
    assert share == pytest.approx(mean, abs=0.08)
    assert {given.weight for given in drawn.values()} == {1.0}
    assert objectives.one_child(trees, config) == drawn  # on every rank the same


def test_the_gradient_of_dpo_is_that_of_its_textbook_loss():
    """-log sigmoid(beta m) at pi = pi_ref, with m written out over two trees with all their
    nodes, is what comes as advantages over micro-batches of a single row."""
    rng = random.Random(0)

    def ids():
        return [rng.randrange(10) for _ in range(rng.randint(1, 5))]

    def some_tree():
        return bias.node((), ids(), bias.node((0,), ids(), bias.node((0, 0), ids())),
                         bias.node((1,), ids()))

    groups = [(1.0, 0.2, 0.5), (0.1, 0.9), (0.4, 0.4)]  # the last says nothing
    trees = [rollout(reward, some_tree(), str(g))
             for g, rewards in enumerate(groups) for reward in rewards]
    trees.append(rollout(5.0, some_tree(), "0", failed="lost"))
    logits = torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
    reference = logits.log_softmax(0)

    def tree_logprob(root, logprobs):
        return sum(weight * logprobs[[i for i, m in zip(n.ids, n.mask) if m]].sum()
                   for n, weight in node_weights(root).items())

    textbook = logits.clone().requires_grad_()
    loss = 0.0
    for best, worst in ((0, 1), (4, 3)):
        margin = 0.0
        for i, sign in ((best, 1), (worst, -1)):
            root = trees[i].root
            margin += sign * (tree_logprob(root, textbook.log_softmax(0))
                              - tree_logprob(root, reference))
        loss = loss - torch.nn.functional.logsigmoid(objectives.BETA * margin) / 2
    loss.backward()

    config = GRPOConfig(objective="dpo")
    rows = make_rows(trees, objectives.dpo(trees, config), config)
    assert len(rows) == 4 * 4
    online = logits.clone().requires_grad_()
    for part in micro_batches(rows, 1):
        pack = collate(part, "cpu")
        logprobs = online.log_softmax(0)[pack["ids"][pack["mask"].bool()]]
        pack["sampler"] = logprobs.detach()
        policy_loss(logprobs, torch.zeros(len(logprobs)), pack, config)[0].backward()
    assert torch.allclose(online.grad, textbook.grad, atol=1e-7)
    assert textbook.grad.abs().max() > 0.01


@pytest.mark.parametrize("switches", [
    dict(objective="filter", std="off"),
    dict(objective="dpo", std="off"), dict(objective="dpo", updates=2),
    dict(objective="dpo", kl=0.1), dict(objective="dpo", length="sequence"),
    dict(objective="own", credit="root"), dict(objective="half_own", credit="root"),
    dict(objective="leave_one_out", std="off"), dict(objective="max_rl", std="off"),
    dict(objective="node_mean", children="sum"),
    dict(objective="node_mean", length="batch"), dict(objective="rao", std="off"),
    dict(objective="one_child", children="sum"),
    dict(objective="one_child", credit="root")])
def test_a_switch_that_an_objective_would_ignore_is_refused(switches):
    name = list(switches)[1]
    objective = getattr(objectives, switches["objective"])
    with pytest.raises(ValueError, match=f"objective {switches['objective']} takes {name}"):
        objective([], GRPOConfig(**switches))


@pytest.mark.parametrize("name", objectives.NAMES)
def test_a_batch_without_a_scored_tree_has_no_credit(name):
    objective, config = getattr(objectives, name), GRPOConfig(objective=name)
    assert objective([], config) == objective([rollout(1.0, failed="lost")], config) == {}
