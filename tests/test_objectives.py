"""The objectives of others: numbers by hand, DPO against its textbook loss."""
import random

import pytest
import torch
from test_grpo import node, plain, rollout

import grpo
from grpo import GRPOConfig, collate, make_rows, micro_batches, node_weights, policy_loss
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
    dict(objective="one_child", children="sum"),
    dict(objective="one_child", credit="root")])
def test_a_switch_that_an_objective_would_ignore_is_refused(switches):
    name = list(switches)[1]
    objective = getattr(objectives, switches["objective"])
    with pytest.raises(ValueError, match=f"objective {switches['objective']} takes {name}"):
        objective([], GRPOConfig(**switches))


@pytest.mark.parametrize("name", "filter dpo own half_own process one_child".split())
def test_a_batch_without_a_scored_tree_has_no_credit(name):
    objective, config = getattr(objectives, name), GRPOConfig(objective=name)
    assert objective([], config) == objective([rollout(1.0, failed="lost")], config) == {}
