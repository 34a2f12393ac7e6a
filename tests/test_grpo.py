"""From rewards to a loss: numbers worked out by hand, and what must not depend on batching."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lab import bias  # noqa: E402
from grpo import (STATS, GRPOConfig, Row, advantages, collate, credit, dpo_advantages,  # noqa: E402
                  make_rows, micro_batches, node_weights, own_correlation, policy_loss)
from model import Qwen3, Qwen3Config  # noqa: E402
from tree import Node, Rollout, Turn  # noqa: E402


def node(path, sampled, *children, start=0):
    """A node with one prompt of two tokens and, if it spoke, `sampled` tokens over two turns."""
    made = Node(path, children=list(children))
    made.add(Turn("user", "", (start, start + 1)))
    if sampled:
        half = sampled // 2
        made.add(Turn("assistant", "", tuple(range(half)), tuple([-0.5] * half)))
        made.add(Turn("user", "", (7,)))
        made.add(Turn("assistant", "", tuple(range(sampled - half)), (-0.25,) * (sampled - half)))
    return made


def ragged():
    """Three levels; at (1,) and (2, 1) nodes that never spoke, (2,) with many children."""
    return node((), 4,
                node((0,), 3),
                node((1,), 0, node((1, 0), 0)),
                node((2,), 5, node((2, 0), 1), node((2, 1), 0), node((2, 2), 2), node((2, 3), 6)),
                node((3,), 2, node((3, 0), 8)))


def rollout(reward, root=None, group="g", failed=""):
    return Rollout({}, group, root or node((), 2), reward, failed)


def plain(**switches):
    """Without the division by the deviation: numbers that can be read off."""
    return GRPOConfig(**{"std": "off"} | switches)


# --- advantages -----------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards = [rollout(r) for r in (1.0, 0.0, 0.5, 0.5)]
    assert advantages(rewards, plain()) == [0.5, -0.5, 0.0, 0.0]
    deviation = math.sqrt(0.125)  # of the population: (1/4 + 1/4 + 0 + 0) / 4
    assert advantages(rewards) == pytest.approx(
        [0.5 / (deviation + 0.01), -0.5 / (deviation + 0.01), 0, 0])
    assert advantages(rewards, GRPOConfig(std_floor=0.0))[0] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
@pytest.mark.parametrize("std", ["on", "off"])
def test_equal_rewards_give_exactly_0(reward, size, std):
    assert advantages([rollout(reward)] * size, GRPOConfig(std=std, std_floor=0.0)) == [0.0] * size


def test_groups_are_what_the_rollouts_say_in_whatever_order():
    mixed = [rollout(1.0, group="a"), rollout(5.0, group="b"), rollout(0.0, group="a"),
             rollout(9.0, group="b"), rollout(3.0, group="c")]
    assert advantages(mixed, plain()) == [0.5, -2.0, -0.5, 2.0, 0.0]


def test_failed_rollouts_are_neither_scored_nor_in_the_mean():
    some = [rollout(1.0), rollout(0.0, failed="lost"), rollout(0.5), rollout(9.0, failed="lost")]
    assert advantages(some, plain()) == [0.25, 0.0, -0.25, 0.0]
    assert advantages([rollout(1.0, failed="x"), rollout(0.5)]) == [0.0, 0.0]
    rows = make_rows(some, plain(length="sequence"))
    assert [row.advantages for row in rows] == [[0.25] * 2, [-0.25] * 2]
    assert rows[0].weight == 1 / 2 / 2  # two sampled tokens, two trees that count


# --- the weights of a tree ------------------------------------------------------------------------


def coefficients(y, mean, factor=1.0):
    """J(y) = J_node(y) + (1/k) sum_i J(y_i), as {path: its factor}, straight from the formula."""
    terms = {y.path: factor}
    spoke = [c for c in y.children if any(t.logprobs for t in c.turns)]
    k = len(spoke) if mean else 1
    for child in spoke:
        terms |= coefficients(child, mean, factor / k)
    return terms


@pytest.mark.parametrize("children", ["mean", "sum"])
def test_node_weights_are_the_recursion_unrolled(children):
    weights = node_weights(ragged(), GRPOConfig(children=children))
    assert {n.path: w for n, w in weights.items()} == pytest.approx(
        coefficients(ragged(), children == "mean"))
    assert (1,) not in {n.path for n in weights} and (2, 1) not in {n.path for n in weights}


def test_node_weights_by_hand():
    weights = {n.path: w for n, w in node_weights(ragged()).items()}
    assert weights == pytest.approx({
        (): 1, (0,): 1 / 3, (2,): 1 / 3, (2, 0): 1 / 9, (2, 2): 1 / 9, (2, 3): 1 / 9,
        (3,): 1 / 3, (3, 0): 1 / 3})
    for level in (1, 2):  # forty children weigh as much as two, at every level with children
        wide = node((), 1, *(node((i,), 1, node((i, 0), 1)) for i in range(40)))
        total = sum(w for n, w in node_weights(wide).items() if n.depth == level)
        assert total == pytest.approx(1)


def test_every_node_has_its_roots_advantage():
    rows = make_rows([rollout(1.0, ragged()), rollout(0.25, ragged()), rollout(0.25, ragged())],
                     plain())
    assert [set(row.advantages) for row in rows] == [{0.5}] * 8 + [{-0.25}] * 16
    spoke = [n for n in ragged().walk() if n.sampled]
    for row, n in zip(rows, spoke * 3):
        assert (row.ids, row.mask, row.logprobs) == (n.ids, n.mask, n.logprobs)


@pytest.mark.parametrize("who, trained", [("root", [()]), ("children", [
    (0,), (2,), (2, 0), (2, 2), (2, 3), (3,), (3, 0)])])
def test_credit_says_who_is_trained(who, trained):
    trees = [rollout(1.0, ragged()), rollout(0.0, ragged())]
    rows = make_rows(trees, plain(credit=who, length="batch"))
    nodes = [n for r in trees for n in r.root.walk() if n.path in trained]
    assert [(row.ids, set(row.advantages)) for row in rows] == [
        (n.ids, {a}) for n, a in zip(nodes, [0.5] * len(trained) + [-0.5] * len(trained))]
    assert {row.weight for row in rows} == {1 / sum(n.sampled for n in nodes)}  # trained tokens


def test_one_child_is_drawn_and_its_expectation_is_the_mean():
    draw, seen = random.Random(0), {}
    for _ in range(600):
        weights = {n.path: w for n, w in node_weights(ragged(), GRPOConfig(children="one"),
                                                      draw).items()}
        assert set(weights.values()) == {1.0} and () in weights
        assert len([p for p in weights if len(p) == 1]) == 1
        for path in weights:
            seen[path] = seen.get(path, 0) + 1 / 600
    mean = {n.path: w for n, w in node_weights(ragged()).items()}
    assert seen == pytest.approx(mean, abs=0.08)  # drawing one has 1/k as its expectation
    summed = {n.path: w for n, w in node_weights(ragged(), GRPOConfig(children="sum")).items()}
    assert summed == {path: 1.0 for path in mean}


def small_batch():
    """Two trees: 4 tokens with children of 2 and 6, and a lone root of 5. A third was lost, and
    a fourth of another group has no signal but counts in the means."""
    first = node((), 4, node((0,), 2), node((1,), 6))
    return [rollout(1.0, first), rollout(0.0, node((), 5)), rollout(7.0, node((), 9), failed="x"),
            rollout(0.3, node((), 3), group="flat")]


@pytest.mark.parametrize("length, children, weights", [
    ("sequence", "mean", [1 / 4 / 3, 1 / 2 / 2 / 3, 1 / 2 / 6 / 3, 1 / 5 / 3]),
    ("sequence", "sum", [1 / 4 / 3, 1 / 2 / 3, 1 / 6 / 3, 1 / 5 / 3]),
    ("constant", "mean", [1 / 10 / 3, 1 / 2 / 10 / 3, 1 / 2 / 10 / 3, 1 / 10 / 3]),
    ("constant", "sum", [1 / 10 / 3] * 4),
    ("batch", "mean", [1 / 20] * 4)])  # 4 + 2 + 6 + 5 + 3 tokens, alike
def test_weights_of_a_batch_by_hand(length, children, weights):
    rows = make_rows(small_batch(), plain(length=length, children=children,
                                           length_constant=10.0))
    assert [row.weight for row in rows] == pytest.approx(weights)
    assert [set(row.advantages) for row in rows] == [{0.5}] * 3 + [{-0.5}]


def test_no_signal_no_rows():
    assert make_rows([rollout(0.5), rollout(0.5)], GRPOConfig()) == []
    assert make_rows([rollout(0.5, failed="x")], GRPOConfig()) == make_rows([], GRPOConfig()) == []


@pytest.mark.parametrize("name", ["objective", "credit", "children", "length", "std", "overlong"])
def test_an_unknown_switch_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 'none'"):
        GRPOConfig(**{name: "none"})


@pytest.mark.parametrize("switches", [
    dict(credit="root", children="sum"), dict(credit="root", own=0.5), dict(own=1.5),
    dict(length="batch", children="sum"), dict(clip_low=1.0),
    dict(objective="filter", std="off"),
    dict(objective="filter", process=0.1), dict(objective="dpo", updates=2),
    dict(objective="dpo", kl=0.1), dict(objective="dpo", length="sequence"),
    dict(objective="dpo", overlong="mask"), dict(clip_high=0.28), dict(keep=0.1),
    dict(objective="filter", dpo_beta=1.0)])
def test_switches_that_contradict_each_other_are_refused(switches):
    with pytest.raises(ValueError):
        GRPOConfig(**switches)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_the_name_of_its_group(reward):
    with pytest.raises(ValueError, match="group g: .*not finite"):
        advantages([rollout(1.0), rollout(reward)])
    assert advantages([rollout(1.0), rollout(0.0), rollout(reward, failed="lost")], plain()) == [
        0.5, -0.5, 0.0]


# --- credit beyond inheritance, other objectives --------------------------------------------------


def cut(reward, end):
    root = node((), 2)
    root.end = end
    return rollout(reward, root)


@pytest.mark.parametrize("how, expected", [
    ("keep", [0.7, -0.3, -0.4]), ("mask", [0.7, -0.3, 0.0]),
    ("punish", [0.7 + 0.5 / 3, -0.3 + 0.5 / 3, -0.4 - 1 / 3])])
def test_overlong_trees_by_hand(how, expected):
    trees = [cut(1.0, "final"), cut(0.0, "final"), cut(-0.1, "turns")]
    assert advantages(trees, plain(overlong=how)) == pytest.approx(expected)


@pytest.mark.parametrize("switches", [dict(kl=0.1), dict(own=0.25), dict(process=0.1)])
def test_a_masked_tree_has_no_row_whatever_else_is_on(switches):
    trees = scored_trees()
    trees[0].root.end = "turns"
    rows = [make_rows(trees, plain(overlong=how, **switches)) for how in ("keep", "mask")]
    assert len(rows[0]) - len(rows[1]) == sum(1 for _ in trees[0].root.walk()) == 3


@pytest.mark.parametrize("wrong", [dict(updates=0), dict(kl=-1.0), dict(keep=math.nan),
                                   dict(gap_max=0.5), dict(length_constant=0.0)])
def test_a_number_below_its_least_value_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*, the least is"):
        GRPOConfig(**wrong)


def test_a_margin_of_thousands_of_nats_is_no_overflow():
    config = GRPOConfig(objective="dpo", dpo_beta=1.0)
    t = {"advantages": torch.tensor([1.0, -1.0]), "weights": torch.ones(2),
         "old": torch.tensor([0.0, -1e4]), "reference": torch.tensor([-1e4, 0.0]),
         "pairs": torch.zeros(2, dtype=torch.long)}
    for sign, expected in ((1.0, 0.0), (-1.0, 1.0)):  # far better already; far worse
        batch = t | {"advantages": sign * t["advantages"]}
        dpo_advantages([batch], config)
        assert batch["advantages"].abs().tolist() == [expected] * 2


def scored_trees():
    """Three trees of one group, rewards 1, 0, 0.5; children with scores 1, 0 | 0.5 | none."""
    trees = [node((), 4, node((0,), 2), node((1,), 2)), node((), 4, node((0,), 2)),
             node((), 4, node((0,), 2))]
    for child, score in zip((c for tree in trees for c in tree.children), (1.0, 0.0, 0.5, None)):
        child.score = score
    return [rollout(r, tree) for r, tree in zip((1.0, 0.0, 0.5), trees)]


def test_own_scores_are_mixed_with_the_inherited_advantage():
    trees = scored_trees()
    worth = credit(trees, plain(own=0.25))
    by_path = [[worth[n] for n in r.root.walk()] for r in trees]
    assert by_path == [
        [[0.5] * 2, [0.75 * 0.5 + 0.25 * 0.5] * 2, [0.75 * 0.5 - 0.25 * 0.5] * 2],
        [[-0.5] * 2, [0.75 * -0.5 + 0.25 * 0.0] * 2], [[0.0] * 2, [0.0] * 2]]
    x, y = [1.0, 0.0, 0.5], [0.5, 0.5, -0.5]  # the children with scores, and what they inherit
    assert own_correlation(trees, [0.5, -0.5, 0.0]) == pytest.approx(
        sum((a - 0.5) * (b - 1 / 6) for a, b in zip(x, y))
        / math.sqrt(sum((a - 0.5) ** 2 for a in x) * sum((b - 1 / 6) ** 2 for b in y)))
    assert own_correlation([rollout(1.0)], [0.5]) is None


def test_the_process_reward_is_given_a_turn_and_never_outweighs_the_answer():
    trees = scored_trees()
    trees[0].root.errors = [1]  # of 14 turns in the group one is wrong
    worth = credit(trees, plain(process=0.1))
    right, wrong = 0.1 * (1 - 13 / 14), 0.1 * (0 - 13 / 14)
    assert worth[trees[0].root] == pytest.approx([0.5 + right, 0.5 + wrong])
    assert worth[trees[2].root] == pytest.approx([right, right])  # its answer says nothing
    large = credit(trees, plain(process=9.0))
    assert large[trees[0].root] == pytest.approx([0.5 + 0.25, 0.5 - 0.25])
    for r, a in zip(trees, advantages(trees, plain())):
        assert all(x * a >= a * a / 2 for n in r.root.walk() for x in large[n])


def test_rejection_sampling_learns_from_what_scored_enough_and_from_nothing_else():
    trees = [rollout(r, group=g) for r, g in ((0.7, "a"), (0.6, "a"), (0.0, "a"), (0.2, "b"),
                                              (0.1, "b"), (0.9, "c"))]
    config = GRPOConfig(objective="filter", keep=0.6)
    assert advantages(trees, config) == [1, 1, 0, 0, 0, 1]
    assert len(make_rows(trees, config)) == 3


def test_the_gradient_of_dpo_is_that_of_its_textbook_loss():
    """-log sigmoid(beta m) with m written out over two whole trees; here it comes as advantages
    over micro-batches of a single row."""
    rng = random.Random(0)

    def some_tree():
        ids = lambda: [rng.randrange(10) for _ in range(rng.randint(1, 5))]  # noqa: E731
        return bias.node((), ids(), bias.node((0,), ids(), bias.node((0, 0), ids())),
                         bias.node((1,), ids()))

    groups = [(1.0, 0.2, 0.5), (0.1, 0.9), (0.4, 0.4)]  # the last says nothing
    trees = [rollout(r, some_tree(), str(g)) for g, rewards in enumerate(groups) for r in rewards]
    config = GRPOConfig(objective="dpo", dpo_beta=0.3)
    rows = make_rows(trees, config)
    assert len(rows) == 4 * 4
    table = torch.randn(10, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    reference = torch.randn(10, generator=torch.Generator().manual_seed(1)).double().log_softmax(0)

    def tree_logprob(root, logprobs):
        return sum(w * logprobs[[i for i, m in zip(n.ids, n.mask) if m]].sum()
                   for n, w in node_weights(root).items())

    loss = 0.0
    for better, worse in ((0, 1), (4, 3)):
        m = sum(sign * (tree_logprob(trees[i].root, table.log_softmax(0))
                        - tree_logprob(trees[i].root, reference))
                for i, sign in ((better, 1), (worse, -1)))
        loss = loss - torch.nn.functional.logsigmoid(config.dpo_beta * m) / 2
    loss.backward()
    expected, table.grad = table.grad, None

    batches = [collate(part, "cpu") for part in micro_batches(rows, 1)]
    for t in batches:
        ids = t["ids"][t["mask"].bool()]
        t["old"], t["reference"] = table.log_softmax(0)[ids].detach(), reference[ids]
        t["sampler"] = t["old"]
    dpo_advantages(batches, config)
    for t in batches:
        logprobs = table.log_softmax(0)[t["ids"][t["mask"].bool()]]
        policy_loss(logprobs, torch.zeros(len(logprobs)), t, config)[0].backward()
    assert torch.allclose(table.grad, expected, atol=1e-7) and expected.abs().max() > 0.01


# --- the loss -------------------------------------------------------------------------------------


def loss_and_stats(new, old, sampler, a, w, config=GRPOConfig(), **more):
    """policy_loss with all tokens at depth 0; stats by name."""
    t = {"old": old, "sampler": sampler, "advantages": a, "weights": w,
         "depths": torch.zeros(len(new), dtype=torch.long)} | more
    loss, stats, gap_max = policy_loss(new, torch.zeros(len(new)), t, config)
    return loss, dict(zip(STATS, stats.sum(1).tolist())) | {"gap_max": gap_max}


def loss_of(ratio, advantage, gap=0.0, weight=1.0, **config):
    """The loss of one token, and its gradient in the token's log-probability."""
    new = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, stats = loss_and_stats(new, old, old - gap, torch.tensor([advantage]).double(),
                                 torch.tensor([weight]).double(), GRPOConfig(**config))
    loss.backward()
    return loss.item(), new.grad.item(), stats


@pytest.mark.parametrize("ratio, advantage, surrogate, slope, clipped", [
    (1.0, 2.0, 2.0, 2.0, 0), (1.0, -2.0, -2.0, -2.0, 0),
    (1.1, 2.0, 2.2, 2.2, 0), (1.5, 2.0, 2.4, 0.0, 1),  # a good token: no more than 1 + eps_high
    (0.5, 2.0, 1.0, 1.0, 0),  # but all the way back
    (0.9, -2.0, -1.8, -1.8, 0), (0.5, -2.0, -1.6, 0.0, 1),  # a bad one: no less than 1 - eps_low
    (1.5, -2.0, -3.0, -3.0, 0)])
def test_the_clipped_surrogate_by_hand(ratio, advantage, surrogate, slope, clipped):
    loss, grad, stats = loss_of(ratio, advantage, weight=0.5)
    assert loss == pytest.approx(-0.5 * surrogate) and stats["clipped"] == clipped
    assert grad == pytest.approx(-0.5 * slope)


def test_the_two_sides_clip_by_their_own_limits():
    limits = dict(updates=2, clip_high=0.4, clip_low=0.1)
    assert loss_of(1.5, 1.0, **limits)[0] == pytest.approx(-1.4)
    assert loss_of(0.5, -1.0, **limits)[0] == pytest.approx(0.9)


@pytest.mark.parametrize("gap, trust", [
    (0.0, 1.0), (math.log(1.5), 1.5), (math.log(0.25), 0.25), (5.0, 2.0)])
def test_the_gap_to_the_sampler_is_a_truncated_weight(gap, trust):
    loss, grad, stats = loss_of(1.1, 1.0, gap)
    assert loss == pytest.approx(-1.1 * trust) and grad == pytest.approx(-1.1 * trust)
    assert [stats["gap"], stats["gap_max"]] == pytest.approx([abs(gap)] * 2)


def test_a_batch_by_hand_and_its_diagnostics_by_depth():
    old = torch.tensor([-1.0, -2.0, -0.5])
    new = old + torch.tensor([1.5, 0.5, 1.0]).log()
    sampler = old - torch.tensor([0.0, math.log(3.0), -math.log(2.0)])
    t = {"old": old, "sampler": sampler, "advantages": torch.tensor([1.0, -1.0, 0.5]),
         "weights": torch.tensor([0.1, 0.2, 0.3]), "depths": torch.tensor([0, 2, 0])}
    loss, stats, gap_max = policy_loss(new, torch.tensor([0.4, 0.5, 0.6]), t, GRPOConfig())
    # 1.2 clipped, untrusted 1; -0.8 clipped, weight 3 cut to 2; 0.5 at ratio 1, weight 1/2.
    assert loss.item() == pytest.approx(-(0.1 * 1.2 - 0.2 * 2 * 0.8 + 0.3 * 0.5 * 0.5))
    assert gap_max == pytest.approx(math.log(3)) and stats[:, 1].tolist() == [0] * len(STATS)
    assert dict(zip(STATS, stats[:, 0].tolist())) == pytest.approx({
        "tokens": 2, "ratio": 2.5, "clipped": 1, "kl": 0.5 - math.log(1.5), "reference_kl": 0,
        "entropy": 1.0, "advantage": 1.5, "gap": math.log(2)})
    assert dict(zip(STATS, stats[:, 2].tolist())) == pytest.approx({
        "tokens": 1, "ratio": 0.5, "clipped": 1, "kl": -0.5 + math.log(2), "reference_kl": 0,
        "entropy": 0.5, "advantage": 1.0, "gap": math.log(3)})


def test_the_kl_term_by_hand_and_its_expectation():
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, stats = loss_and_stats(new, new, new.detach(), zero, zero + 0.5, GRPOConfig(kl=0.2),
                                 reference=new.detach() + math.log(3))
    loss.backward()
    assert loss.item() == pytest.approx(0.2 * 0.5 * (3 - math.log(3) - 1))
    assert stats["reference_kl"] == pytest.approx(3 - math.log(3) - 1)
    assert new.grad.item() == pytest.approx(0.2 * 0.5 * (1 - 3))
    p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)  # E_p[k3] is KL(p || q)
    _, stats = loss_and_stats(p, p, p, p * 0, p * 0, GRPOConfig(kl=1.0), reference=q)
    k3 = (q - p).exp() - (q - p) - 1
    assert (p.exp() @ k3).item() == pytest.approx((p.exp() @ (p - q)).item())
    assert stats["reference_kl"] == pytest.approx(k3.sum().item(), rel=1e-5)


def test_on_the_first_update_the_ratio_is_1_and_the_gradient_the_policy_gradient():
    rng = torch.Generator().manual_seed(0)
    new = (-torch.rand(50, generator=rng)).requires_grad_()
    a, w = torch.randn(50, generator=rng), torch.rand(50, generator=rng)
    t = {"sampler": new.detach(), "advantages": a, "weights": w,
         "depths": torch.zeros(50, dtype=torch.long)}  # no "old": it is the policy itself
    loss, stats, _ = policy_loss(new, torch.zeros(50), t, GRPOConfig())
    loss.backward()
    assert stats[STATS.index("clipped")] == 0 and stats[STATS.index("ratio")] == 50
    assert loss.item() == pytest.approx(-(w * a).sum().item(), abs=1e-5)
    assert torch.allclose(new.grad, -w * a)


@pytest.mark.parametrize("switches", [
    dict(), dict(kl=0.3), dict(updates=2, clip_high=0.5, gap_max=1.2)])
def test_the_gradient_agrees_with_finite_differences(switches):
    """On a table of logits, with clipped, unclipped and truncated tokens among them."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    picked = torch.randint(5, (12,), generator=rng)
    old = (logits.detach().log_softmax(-1).gather(1, picked[:, None])[:, 0]
           + 0.6 * torch.randn(12, generator=rng, dtype=torch.float64))
    sampler = old + torch.randn(12, generator=rng, dtype=torch.float64)
    reference = old + torch.randn(12, generator=rng, dtype=torch.float64)
    a = torch.randn(12, generator=rng, dtype=torch.float64)
    w = torch.rand(12, generator=rng, dtype=torch.float64)
    config = GRPOConfig(**switches)

    def loss(logits):
        logprobs = logits.log_softmax(-1).gather(1, picked[:, None])[:, 0]
        return loss_and_stats(logprobs, old, sampler, a, w, config, reference=reference)

    value, stats = loss(logits)
    assert 0 < stats["clipped"] < 12 and ((old - sampler).exp() > config.gap_max).any()
    value.backward()
    numeric, h = torch.zeros_like(logits), 1e-6
    for i in range(12):
        for j in range(5):
            step = torch.zeros_like(logits)
            step[i, j] = h
            with torch.no_grad():
                numeric[i, j] = (loss(logits + step)[0] - loss(logits - step)[0]) / (2 * h)
    assert torch.allclose(logits.grad, numeric, atol=1e-8)
    if not config.kl:  # a clipped token has no gradient
        assert (logits.grad.abs().sum(1) == 0).sum() == stats["clipped"]


# --- bias -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("G", [2, 3])
def test_summed_children_constant_length_no_std_is_the_true_gradient(G):
    """Exactly, by enumeration of all groups: (G - 1) / G of the gradient of the expected reward."""
    config = GRPOConfig(**bias.UNBIASED)
    expected = bias.expected_gradient(config, G) * config.length_constant
    assert torch.allclose(expected, bias.true_gradient() * (G - 1) / G, atol=1e-6)


def test_the_sampled_gradient_has_that_expectation_within_three_standard_errors():
    p, g = bias.group_gradients(GRPOConfig(**bias.UNBIASED, length_constant=1.0), 2)
    picked = torch.multinomial(p, 20_000, True, generator=torch.Generator().manual_seed(0))
    error = g[picked].std(0) / 20_000 ** 0.5
    assert ((g[picked].mean(0) - bias.true_gradient() / 2).abs() < 3 * error).all()


@pytest.mark.parametrize("switch", [dict(children="mean"), dict(length="sequence"), dict(std="on"),
                                    dict(children="mean", length="batch")])
def test_every_other_choice_is_biased(switch):
    """Not only in length: the direction differs, so no learning rate makes up for it."""
    g = bias.expected_gradient(GRPOConfig(**bias.UNBIASED | switch), 2)
    assert torch.nn.functional.cosine_similarity(g, bias.true_gradient(), dim=0) < 0.9995


def test_a_tree_without_a_sampled_token_gives_no_row_and_no_nan():
    silent = node((), 0, node((0,), 0))
    for length in ("sequence", "constant", "batch"):
        assert make_rows([rollout(1.0, silent), rollout(0.0, silent)],
                         GRPOConfig(length=length, process=0.1)) == []
        rows = make_rows([rollout(1.0, silent), rollout(0.0)], GRPOConfig(length=length))
        assert len(rows) == 1 and math.isfinite(rows[0].weight)


# --- batches --------------------------------------------------------------------------------------


def random_rows(n, seed=0, most=60):
    rng, rows = random.Random(seed), []
    for _ in range(n):
        length = rng.randint(3, most)
        mask = [0] + [int(rng.random() < 0.5) for _ in range(length - 2)] + [1]
        advantage = rng.choice([-1.0, 0.7])
        rows.append(Row([rng.randrange(64) for _ in mask], mask,
                        [-4.0 * rng.random() * m for m in mask], [advantage] * sum(mask),
                        rng.random() / 100))
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 59, 60, 200, 1000, 10**9])
def test_micro_batches_share_every_row_once_and_keep_the_limit(limit, ranks):
    rows = random_rows(50)
    shares = [micro_batches(rows, limit, 1e-3, rank, ranks) for rank in range(ranks)]
    packs = [pack for share in shares for pack in share]
    assert len({len(share) for share in shares}) == 1
    assert sorted(map(id, (row for pack in packs for row in pack))) == sorted(map(id, rows))
    assert all(sum(len(row.ids) for row in pack) <= limit or len(pack) == 1 for pack in packs)
    tokens = sum(len(row.ids) for row in rows)
    full = sum(1 for pack in packs if pack)
    assert full <= max(ranks, 2 * -(-tokens // limit)) or limit < 60  # rows have at most 60
    assert micro_batches([], limit, ranks=ranks) == []
    assert len(micro_batches(rows, 10**9)) == 1 and len(micro_batches(rows, 1)) == 50


def test_the_ranks_costs_are_even_in_each_round():
    rows = random_rows(400, most=500)

    def cost(pack):
        return sum(len(row.ids) * (1 + 1e-3 * len(row.ids)) for row in pack)

    rounds = list(zip(*(micro_batches(rows, 2000, 1e-3, rank, 4) for rank in range(4))))
    assert len(rounds) > 5 and all(min(map(cost, r)) > 0.9 * max(map(cost, r)) for r in rounds)


def test_collate_lists_sampled_tokens_in_the_order_of_the_models_logprobs():
    rows = [Row([5, 6, 7], [0, 1, 1], [0.0, -0.5, -0.25], [2.0, 1.5], 0.1, 1),
            Row([8, 9], [0, 1], [0.0, -1.0], [-1.0], 0.2)]
    t = collate(rows, "cpu")
    assert t["ids"].tolist() == [[5, 6, 7, 8, 9]] and t["lengths"] == [3, 2]
    assert t["mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert t["sampler"].tolist() == [-0.5, -0.25, -1.0]
    assert t["advantages"].tolist() == [2.0, 1.5, -1.0] and t["depths"].tolist() == [1, 1, 0]
    assert t["weights"].tolist() == pytest.approx([0.1, 0.1, 0.2])
    ids = t["ids"][:, 1:][t["mask"][:, 1:].bool()]  # how Qwen3.logprobs picks them
    assert ids.tolist() == [6, 7, 9]


def test_packed_rows_give_the_loss_and_gradients_of_each_row_alone():
    """Rows of 10 to 4,000 tokens, and an empty pack; with recomputation too."""
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(64, 32, 48, 1, 4, 2, 8, 4096))
    rng, rows = random.Random(0), []
    for length in (10, 11, 37, 300, 1500, 4000):
        mask = [0] + [int(rng.random() < 0.5) for _ in range(length - 1)]
        rows.append(Row([rng.randrange(64) for _ in mask], mask, [-4.0 * m for m in mask],
                        [rng.choice([-1.0, 0.7])] * sum(mask), 1e-3))

    def update(packs):
        model.zero_grad()
        total = 0.0
        for pack in packs:
            t = collate(pack, "cpu")
            logprobs, entropies = model.logprobs(t["ids"], t["mask"], t["lengths"])
            loss, _, _ = policy_loss(logprobs, entropies, t, GRPOConfig())
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters()}

    whole, alone = update([[row] for row in rows])
    for model.recompute, packs in ((False, [rows]), (True, [rows[3:], [], rows[:3]])):
        total, packed = update(packs)
        assert total == pytest.approx(whole, rel=1e-5)
        for name, grad in alone.items():
            assert (packed[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    ids, mask = torch.tensor([rows[0].ids]), torch.tensor([rows[0].mask])
    model.recompute = False
    padded = model.logprobs(ids, mask)[0]  # no packing at all
    assert torch.allclose(padded, model.logprobs(ids, mask, [10])[0], atol=1e-6)


def test_loss_and_gradient_are_the_same_in_one_micro_batch_and_in_eight():
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(64, 32, 48, 2, 4, 2, 8, 128))
    rows = random_rows(8, seed=3)

    def update(batches):
        model.zero_grad()
        total = 0.0
        for part in batches:
            t = collate(part, "cpu")
            logprobs, _ = model.logprobs(t["ids"], t["mask"], t["lengths"], chunk=16)
            old = logprobs.detach() - 0.25  # a later update of the batch: good tokens are clipped
            loss, _, _ = policy_loss(logprobs, logprobs, t | {"old": old}, GRPOConfig())
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters()}

    assert len({len(row.ids) for row in rows}) > 4
    whole, one = update(micro_batches(rows, 10**9))
    for batches in (micro_batches(rows, 1), micro_batches(rows, 130), [rows[5:], rows[:5]]):
        total, many = update(batches)
        assert total == pytest.approx(whole, rel=1e-5)
        for name, grad in one.items():
            assert grad.abs().max() > 0
            assert torch.allclose(grad, many[name], rtol=1e-4, atol=1e-5 * grad.abs().max()), name
    doubled, _ = update([[replace(row, weight=2 * row.weight) for row in rows]])
    assert doubled == pytest.approx(2 * whole, rel=1e-5)
