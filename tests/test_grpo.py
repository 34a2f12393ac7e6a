"""From rewards to a loss: numbers worked out by hand, and what must not depend on batching."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo import (GRPOConfig, Row, advantages, collate, make_rows, micro_batches,  # noqa: E402
                  node_weights, policy_loss)
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


# --- advantages -----------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards = [rollout(r) for r in (1.0, 0.0, 0.5, 0.5)]
    assert advantages(rewards, std=False) == [0.5, -0.5, 0.0, 0.0]
    deviation = math.sqrt(0.125)  # of the population: (1/4 + 1/4 + 0 + 0) / 4
    assert advantages(rewards, True, 0.01) == pytest.approx(
        [0.5 / (deviation + 0.01), -0.5 / (deviation + 0.01), 0, 0])
    assert advantages(rewards, True, 0.0)[0] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_0(reward, size, std):
    assert advantages([rollout(reward)] * size, std, 0.0) == [0.0] * size


def test_groups_are_what_the_rollouts_say_in_whatever_order():
    mixed = [rollout(1.0, group="a"), rollout(5.0, group="b"), rollout(0.0, group="a"),
             rollout(9.0, group="b"), rollout(3.0, group="c")]
    assert advantages(mixed, std=False) == [0.5, -2.0, -0.5, 2.0, 0.0]


def test_failed_rollouts_are_neither_scored_nor_in_the_mean():
    some = [rollout(1.0), rollout(0.0, failed="lost"), rollout(0.5), rollout(9.0, failed="lost")]
    assert advantages(some, std=False) == [0.25, 0.0, -0.25, 0.0]
    assert advantages([rollout(1.0, failed="x"), rollout(0.5)], std=True) == [0.0, 0.0]
    rows = make_rows(some, GRPOConfig(length="sequence", std=False))
    assert [row.advantage for row in rows] == [0.25, -0.25]
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
    weights = node_weights(ragged(), children)
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
                     GRPOConfig(std=False))
    assert [row.advantage for row in rows] == [0.5] * 8 + [-0.25] * 16
    spoke = [n for n in ragged().walk() if n.sampled]
    for row, n in zip(rows, spoke * 3):
        assert (row.ids, row.mask, row.logprobs) == (n.ids, n.mask, n.logprobs)


def test_credit_root_trains_roots_only():
    rows = make_rows([rollout(1.0, ragged()), rollout(0.0, ragged())],
                     GRPOConfig(std=False, credit="root", length="batch"))
    assert [(row.ids, row.advantage) for row in rows] == [
        (ragged().ids, 0.5), (ragged().ids, -0.5)]
    assert {row.weight for row in rows} == {1 / 8}  # of the tokens that are trained


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
    rows = make_rows(small_batch(), GRPOConfig(length=length, children=children,
                                               length_constant=10.0, std=False))
    assert [row.weight for row in rows] == pytest.approx(weights)
    assert [row.advantage for row in rows] == [0.5, 0.5, 0.5, -0.5]


def test_no_signal_no_rows():
    assert make_rows([rollout(0.5), rollout(0.5)], GRPOConfig()) == []
    assert make_rows([rollout(0.5, failed="x")], GRPOConfig()) == make_rows([], GRPOConfig()) == []


@pytest.mark.parametrize("name", ["credit", "children", "length"])
def test_an_unknown_switch_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 'none'"):
        GRPOConfig(**{name: "none"})


# --- the loss -------------------------------------------------------------------------------------


def loss_of(ratio, advantage, gap=0.0, weight=1.0, **config):
    """The loss of one token, and its gradient in the token's log-probability."""
    new = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, stats = policy_loss(new, old, old - gap, torch.tensor([advantage]).double(),
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
    assert loss_of(1.5, 1.0, clip_high=0.4, clip_low=0.1)[0] == pytest.approx(-1.4)
    assert loss_of(0.5, -1.0, clip_high=0.4, clip_low=0.1)[0] == pytest.approx(0.9)


@pytest.mark.parametrize("gap, trust", [
    (0.0, 1.0), (math.log(1.5), 1.5), (math.log(0.25), 0.25), (5.0, 2.0)])
def test_the_gap_to_the_sampler_is_a_truncated_weight(gap, trust):
    loss, grad, stats = loss_of(1.1, 1.0, gap)
    assert loss == pytest.approx(-1.1 * trust) and grad == pytest.approx(-1.1 * trust)
    assert stats["gap"] == stats["gap_max"] == pytest.approx(abs(gap))


def test_a_batch_by_hand_and_its_diagnostics():
    old = torch.tensor([-1.0, -2.0, -0.5])
    new = old + torch.tensor([1.5, 0.5, 1.0]).log()
    sampler = old - torch.tensor([0.0, math.log(3.0), -math.log(2.0)])
    loss, stats = policy_loss(new, old, sampler, torch.tensor([1.0, -1.0, 0.5]),
                              torch.tensor([0.1, 0.2, 0.3]), GRPOConfig())
    # 1.2 clipped, untrusted 1; -0.8 clipped, weight 3 cut to 2; 0.5 at ratio 1, weight 1/2.
    assert loss.item() == pytest.approx(-(0.1 * 1.2 - 0.2 * 2 * 0.8 + 0.3 * 0.5 * 0.5))
    assert stats == {"tokens": 3, "clipped": 2, "gap": pytest.approx(math.log(6)),
                     "gap_max": pytest.approx(math.log(3))}


def test_on_the_first_update_the_ratio_is_1_and_the_gradient_the_policy_gradient():
    rng = torch.Generator().manual_seed(0)
    new = (-torch.rand(50, generator=rng)).requires_grad_()
    a, w = torch.randn(50, generator=rng), torch.rand(50, generator=rng)
    loss, stats = policy_loss(new, new, new.detach(), a, w, GRPOConfig())  # old is not detached
    loss.backward()
    assert stats["clipped"] == 0 and loss.item() == pytest.approx(-(w * a).sum().item(), abs=1e-5)
    assert torch.allclose(new.grad, -w * a)


def test_the_gradient_agrees_with_finite_differences():
    """On a table of logits, with clipped, unclipped and truncated tokens among them."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    picked = torch.randint(5, (12,), generator=rng)
    old = (logits.detach().log_softmax(-1).gather(1, picked[:, None])[:, 0]
           + 0.6 * torch.randn(12, generator=rng, dtype=torch.float64))
    sampler = old + torch.randn(12, generator=rng, dtype=torch.float64)
    a = torch.randn(12, generator=rng, dtype=torch.float64)
    w = torch.rand(12, generator=rng, dtype=torch.float64)

    def loss(logits):
        logprobs = logits.log_softmax(-1).gather(1, picked[:, None])[:, 0]
        return policy_loss(logprobs, old, sampler, a, w, GRPOConfig())

    value, stats = loss(logits)
    assert 0 < stats["clipped"] < 12 and ((old - sampler).exp() > 2).any()
    value.backward()
    numeric, h = torch.zeros_like(logits), 1e-6
    for i in range(12):
        for j in range(5):
            step = torch.zeros_like(logits)
            step[i, j] = h
            with torch.no_grad():
                numeric[i, j] = (loss(logits + step)[0] - loss(logits - step)[0]) / (2 * h)
    assert torch.allclose(logits.grad, numeric, atol=1e-8)
    assert (logits.grad.abs().sum(1) == 0).sum() == stats["clipped"]


# --- batches --------------------------------------------------------------------------------------


def random_rows(n, seed=0, most=60):
    rng, rows = random.Random(seed), []
    for _ in range(n):
        length = rng.randint(3, most)
        mask = [0] + [int(rng.random() < 0.5) for _ in range(length - 2)] + [1]
        rows.append(Row([rng.randrange(64) for _ in mask], mask,
                        [-4.0 * rng.random() * m for m in mask], rng.choice([-1.0, 0.7]),
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
    rows = [Row([5, 6, 7], [0, 1, 1], [0.0, -0.5, -0.25], 2.0, 0.1),
            Row([8, 9], [0, 1], [0.0, -1.0], -1.0, 0.2)]
    t = collate(rows, "cpu")
    assert t["ids"].tolist() == [[5, 6, 7, 8, 9]] and t["lengths"] == [3, 2]
    assert t["mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert t["sampler_logprobs"].tolist() == [-0.5, -0.25, -1.0]
    assert t["advantages"].tolist() == [2.0, 2.0, -1.0]
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
                        rng.choice([-1.0, 0.7]), 1e-3))

    def update(packs):
        model.zero_grad()
        total = 0.0
        for pack in packs:
            t = collate(pack, "cpu")
            logprobs, _ = model.logprobs(t["ids"], t["mask"], t["lengths"])
            loss, _ = policy_loss(logprobs, logprobs, t["sampler_logprobs"], t["advantages"],
                                  t["weights"], GRPOConfig())
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
            loss, _ = policy_loss(logprobs, old, t["sampler_logprobs"],
                                  t["advantages"], t["weights"], GRPOConfig())
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
