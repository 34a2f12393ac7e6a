"""From rewards to a loss: numbers by hand, and what must not depend on batching."""
import math
import pickle
import random
from dataclasses import replace

import pytest
import torch

from grpo import (LENGTH_CONSTANT, TRUST_MAX, WATCHED, Credit, GRPOConfig, Row, Stats,
                  advantages, collate, credit, distinct_tokens, make_rows, micro_batches,
                  node_weights, own_correlation, policy_loss)
from model import Qwen3, Qwen3Config
from runtime.attention import Gather, PackedRows
from tree import Node, Rollout, Turn


def node(path, sampled, *children):
    """A node with a prompt of two tokens and, if it spoke, `sampled` tokens in 2 turns."""
    made = Node(path, children=list(children))
    made.add(Turn("user", "", (0, 1)))
    if sampled:
        half = sampled // 2
        made.add(Turn("assistant", "", tuple(range(half)), (-0.5,) * half))
        made.add(Turn("user", "", (7,)))
        rest = sampled - half
        made.add(Turn("assistant", "", tuple(range(rest)), (-0.25,) * rest))
    return made


def ragged():
    """Three levels. (1,), (1, 0) and (2, 1) never spoke; (2,) has many children."""
    return node((), 4,
                node((0,), 3),
                node((1,), 0, node((1, 0), 0)),
                node((2,), 5, node((2, 0), 1), node((2, 1), 0), node((2, 2), 2),
                     node((2, 3), 6)),
                node((3,), 2, node((3, 0), 8)))


def rollout(reward, root=None, group="g", failed=""):
    return Rollout({}, group, root or node((), 2), reward, failed)


def plain(**switches):
    """Without the division by the deviation: numbers that can be read off."""
    return GRPOConfig(**{"std": "off"} | switches)


def rows_of(rollouts, config):
    return make_rows(rollouts, credit(rollouts, config), config)


# --- advantages -----------------------------------------------------------------------


def test_advantages_by_hand():
    trees = [rollout(reward) for reward in (1.0, 0.0, 0.5, 0.5)]
    assert advantages(trees, plain()) == [0.5, -0.5, 0.0, 0.0]
    deviation = math.sqrt(0.125)  # of the population: (1/4 + 1/4 + 0 + 0) / 4
    most = 0.5 / (deviation + 0.01)
    assert advantages(trees) == pytest.approx([most, -most, 0, 0])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
@pytest.mark.parametrize("std", ["on", "off"])
def test_equal_rewards_give_exactly_0(reward, size, std):
    assert advantages([rollout(reward)] * size, GRPOConfig(std=std)) == [0.0] * size


def test_groups_are_what_the_rollouts_say_in_whatever_order():
    mixed = [rollout(1.0, group="a"), rollout(5.0, group="b"), rollout(0.0, group="a"),
             rollout(9.0, group="b"), rollout(3.0, group="c")]
    assert advantages(mixed, plain()) == [0.5, -2.0, -0.5, 2.0, 0.0]


def test_failed_rollouts_are_neither_scored_nor_in_the_mean():
    trees = [rollout(1.0), rollout(0.0, failed="lost"), rollout(0.5),
             rollout(9.0, failed="lost")]
    assert advantages(trees, plain()) == [0.25, 0.0, -0.25, 0.0]
    assert advantages([rollout(1.0, failed="x"), rollout(0.5)]) == [0.0, 0.0]
    rows = rows_of(trees, plain(length="sequence"))
    assert [row.advantages for row in rows] == [[0.25] * 2, [-0.25] * 2]
    assert rows[0].weight == 1 / 2 / 2  # two sampled tokens, two trees that count
    assert trees[1].root not in credit(trees, plain())


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_the_name_of_its_group(reward):
    with pytest.raises(ValueError, match="group g: .*not finite"):
        advantages([rollout(1.0), rollout(reward)])
    trees = [rollout(1.0), rollout(0.0), rollout(reward, failed="lost")]
    assert advantages(trees, plain()) == [0.5, -0.5, 0.0]


def test_the_correlation_of_own_scores_and_inherited_advantages():
    trees = [node((), 4, node((0,), 2), node((1,), 2)), node((), 4, node((0,), 2))]
    scored = [child for tree in trees for child in tree.children]
    for child, score in zip(scored, (1.0, 0.0, 0.5)):
        child.score = score
    rollouts = [rollout(1.0, trees[0]), rollout(0.0, trees[1])]
    own, inherited = [1.0, 0.0, 0.5], [0.5, 0.5, -0.5]
    both = sum((s - 0.5) * (a - 1 / 6) for s, a in zip(own, inherited))
    squares = (sum((s - 0.5) ** 2 for s in own)
               * sum((a - 1 / 6) ** 2 for a in inherited))
    found = own_correlation(rollouts, [0.5, -0.5])
    assert found == pytest.approx(both / math.sqrt(squares))
    assert own_correlation(rollouts, [0.5, 0.5]) is None  # one of the two is constant
    assert own_correlation([rollout(1.0)], [0.5]) is None  # no score at all


# --- the weights of a tree ------------------------------------------------------------


def coefficients(y, mean, factor=1.0):
    """J(y) = J_node(y) + (1/k) sum_i J(y_i) as {path: factor}, straight from there."""
    terms = {y.path: factor}
    spoke = [c for c in y.children if any(t.logprobs for t in c.turns)]
    k = len(spoke) if mean else 1
    for child in spoke:
        terms |= coefficients(child, mean, factor / k)
    return terms


@pytest.mark.parametrize("children", ["mean", "sum"])
def test_node_weights_are_the_recursion_unrolled(children):
    weights = node_weights(ragged(), GRPOConfig(children=children))
    by_path = {n.path: weight for n, weight in weights.items()}
    assert by_path == pytest.approx(coefficients(ragged(), children == "mean"))
    assert (1,) not in by_path and (2, 1) not in by_path


def test_node_weights_by_hand():
    weights = {n.path: weight for n, weight in node_weights(ragged()).items()}
    assert weights == pytest.approx({
        (): 1, (0,): 1 / 3, (2,): 1 / 3, (2, 0): 1 / 9, (2, 2): 1 / 9, (2, 3): 1 / 9,
        (3,): 1 / 3, (3, 0): 1 / 3})
    wide = node((), 1, *(node((i,), 1, node((i, 0), 1)) for i in range(40)))
    for level in (1, 2):  # forty children weigh as much as two, at every level
        total = sum(weight for n, weight in node_weights(wide).items() if n.depth == level)
        assert total == pytest.approx(1)


def test_every_node_has_its_roots_advantage():
    trees = [rollout(reward, ragged()) for reward in (1.0, 0.25, 0.25)]
    rows = rows_of(trees, plain())
    assert [set(row.advantages) for row in rows] == [{0.5}] * 8 + [{-0.25}] * 16
    spoke = [n for n in ragged().walk() if n.sampled]
    for row, n in zip(rows, spoke * 3):
        assert (row.ids, row.mask, row.logprobs) == (n.ids, n.mask, n.logprobs)


@pytest.mark.parametrize("who, trained", [
    ("root", [()]),
    ("children", [(0,), (2,), (2, 0), (2, 2), (2, 3), (3,), (3, 0)])])
def test_credit_says_who_is_trained(who, trained):
    trees = [rollout(1.0, ragged()), rollout(0.0, ragged())]
    rows = rows_of(trees, plain(credit=who, length="batch"))
    nodes = [n for r in trees for n in r.root.walk() if n.path in trained]
    expected = [0.5] * len(trained) + [-0.5] * len(trained)
    assert [(row.ids, set(row.advantages)) for row in rows] == [
        (n.ids, {a}) for n, a in zip(nodes, expected)]
    trained_tokens = sum(n.sampled for n in nodes)
    assert [row.weight for row in rows] == pytest.approx([1 / trained_tokens] * len(rows))


def small_batch():
    """Two trees: 4 tokens with children of 2 and 6, and a lone root of 5. A third was lost.
    A fourth, of another group, has no signal but counts in the means."""
    first = node((), 4, node((0,), 2), node((1,), 6))
    return [rollout(1.0, first), rollout(0.0, node((), 5)),
            rollout(7.0, node((), 9), failed="x"), rollout(0.3, node((), 3), group="flat")]


@pytest.mark.parametrize("length, children, weights", [
    ("sequence", "mean", [1 / 4 / 3, 1 / 2 / 2 / 3, 1 / 2 / 6 / 3, 1 / 5 / 3]),
    ("sequence", "sum", [1 / 4 / 3, 1 / 2 / 3, 1 / 6 / 3, 1 / 5 / 3]),
    ("constant", "mean", [1 / 64 / 3, 1 / 2 / 64 / 3, 1 / 2 / 64 / 3, 1 / 64 / 3]),
    ("constant", "sum", [1 / 64 / 3] * 4),
    ("batch", "mean", [1 / 20] * 4)])  # 4 + 2 + 6 + 5 + 3 tokens, alike
def test_weights_of_a_batch_by_hand(length, children, weights):
    rows = rows_of(small_batch(), plain(length=length, children=children))
    assert [row.weight for row in rows] == pytest.approx(weights)
    assert [set(row.advantages) for row in rows] == [{0.5}] * 3 + [{-0.5}]


def test_no_signal_no_rows_but_with_a_kl_term():
    flat = [rollout(0.5), rollout(0.5)]
    for trees in (flat, [rollout(0.5, failed="x")], []):
        assert rows_of(trees, GRPOConfig()) == []
    assert len(rows_of(flat, GRPOConfig(kl=0.1))) == 2


@pytest.mark.parametrize("length", ["sequence", "constant", "batch"])
def test_a_tree_without_a_sampled_token_gives_no_row_and_no_nan(length):
    silent, config = node((), 0, node((0,), 0)), GRPOConfig(length=length)
    assert rows_of([rollout(1.0, silent), rollout(0.0, silent)], config) == []
    (row,) = rows_of([rollout(1.0, silent), rollout(0.0)], config)
    assert math.isfinite(row.weight)


def test_rows_take_what_an_objective_says():
    root = node((), 5, node((0,), 2), node((1,), 4))
    tree = rollout(1.0, root)
    given = {root: Credit([1.0, -2.0], 3.0), root.children[1]: Credit([0.0, 0.0], 1.0)}
    (row,) = make_rows([tree], given, GRPOConfig())
    assert row.advantages == [1.0] * 2 + [-2.0] * 3 and row.weight == 3 / LENGTH_CONSTANT
    with pytest.raises(ValueError, match="one advantage per sampled turn"):
        make_rows([tree], {root: Credit([1.0], 1.0)}, GRPOConfig())


@pytest.mark.parametrize("switches, says", [
    (dict(credit="none"), "credit is 'none'"), (dict(children="one"), "children is 'one'"),
    (dict(length="none"), "length is 'none'"), (dict(std="none"), "std is 'none'"),
    (dict(updates=0), "updates is 0, the least is"), (dict(kl=-1.0), "kl is -1.0"),
    (dict(cost=math.nan), "cost is nan"),
    (dict(credit="root", children="sum"), "trains no children"),
    (dict(length="batch", children="sum"), "all tokens alike")])
def test_a_wrong_or_inert_switch_is_refused(switches, says):
    with pytest.raises(ValueError, match=says):
        GRPOConfig(**switches)


# --- the loss -------------------------------------------------------------------------


def loss_and_stats(new, old, sampler, advantage, weight, config=GRPOConfig(), **more):
    """policy_loss with all tokens at depth 0; the sums of its stats by name."""
    pack = {"old": old, "sampler": sampler, "advantages": advantage, "weights": weight,
            "depths": torch.zeros(len(new), dtype=torch.long)} | more
    loss, stats = policy_loss(new, torch.zeros(len(new)), pack, config)
    return loss, dict(zip(WATCHED, stats.sums[0])) | {"largest_gap": stats.largest_gap}


def loss_of(ratio, advantage, gap=0.0, weight=1.0, **config):
    """The loss of one token, and its gradient in the token's log-probability."""
    new = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, stats = loss_and_stats(new, old, old - gap, torch.tensor([advantage]).double(),
                                 torch.tensor([weight]).double(), GRPOConfig(**config))
    loss.backward()
    return loss.item(), new.grad.item(), stats


@pytest.mark.parametrize("ratio, advantage, surrogate, slope, clipped", [
    (1.0, 2.0, 2.0, 2.0, 0), (1.0, -2.0, -2.0, -2.0, 0), (1.1, 2.0, 2.2, 2.2, 0),
    (1.5, 2.0, 2.56, 0.0, 1),  # a good token: no more than 1 + eps_high
    (0.5, 2.0, 1.0, 1.0, 0),  # but all the way back
    (0.9, -2.0, -1.8, -1.8, 0),
    (0.5, -2.0, -1.6, 0.0, 1),  # a bad one: no less than 1 - eps_low
    (1.5, -2.0, -3.0, -3.0, 0)])
def test_the_clipped_surrogate_by_hand(ratio, advantage, surrogate, slope, clipped):
    loss, gradient, stats = loss_of(ratio, advantage, weight=0.5)
    assert loss == pytest.approx(-0.5 * surrogate) and stats["clipped"] == clipped
    assert gradient == pytest.approx(-0.5 * slope)


def test_the_two_sides_clip_by_their_own_limits():
    assert loss_of(1.5, 1.0, updates=2)[0] == pytest.approx(-1.28)
    assert loss_of(0.5, -1.0, updates=2)[0] == pytest.approx(0.8)


@pytest.mark.parametrize("gap, trust", [
    (0.0, 1.0), (math.log(1.5), 1.5), (math.log(0.25), 0.25), (5.0, 2.0)])
def test_the_gap_to_the_sampler_is_a_truncated_weight(gap, trust):
    loss, gradient, stats = loss_of(1.1, 1.0, gap)
    assert loss == pytest.approx(-1.1 * trust) and gradient == pytest.approx(-1.1 * trust)
    assert [stats["gap"], stats["largest_gap"]] == pytest.approx([abs(gap)] * 2)


def test_a_batch_by_hand_and_its_diagnostics_by_depth():
    old = torch.tensor([-1.0, -2.0, -0.5])
    new = old + torch.tensor([1.5, 0.5, 1.0]).log()
    sampler = old - torch.tensor([0.0, math.log(3.0), -math.log(2.0)])
    pack = {"old": old, "sampler": sampler, "advantages": torch.tensor([1.0, -1.0, 0.5]),
            "weights": torch.tensor([0.1, 0.2, 0.3]), "depths": torch.tensor([0, 2, 0])}
    loss, stats = policy_loss(new, torch.tensor([0.4, 0.5, 0.6]), pack, GRPOConfig())
    # 1.28 clipped, trust 1; -0.8 clipped, trust 3 cut to 2; 0.5 at ratio 1, trust 1/2.
    assert loss.item() == pytest.approx(-(0.1 * 1.28 - 0.2 * 2 * 0.8 + 0.3 * 0.5 * 0.5))

    metrics = stats.metrics()
    assert metrics["largest_gap"] == pytest.approx(math.log(3))
    first, middle, last = metrics["by_depth"]
    assert set(middle.values()) == {0}
    assert first == pytest.approx({
        "share": 2 / 3, "ratio": 1.25, "clipped": 0.5, "kl": (0.5 - math.log(1.5)) / 2,
        "reference_kl": 0, "entropy": 0.5, "advantage": 0.75, "gap": math.log(2) / 2})
    assert last == pytest.approx({
        "share": 1 / 3, "ratio": 0.5, "clipped": 1, "kl": -0.5 + math.log(2),
        "reference_kl": 0, "entropy": 0.5, "advantage": 1.0, "gap": math.log(3)})
    assert [metrics["ratio"], metrics["entropy"]] == pytest.approx([1.0, 0.5])


def test_stats_add_up_over_packs_of_different_depth_and_travel_between_ranks():
    shallow = Stats([[2.0] * len(WATCHED)], 0.5)
    deep = Stats([[1.0] * len(WATCHED), [4.0] * len(WATCHED)], 0.25)
    total = pickle.loads(pickle.dumps(shallow)) + deep
    assert total == deep + shallow == sum([Stats(), shallow, deep], Stats())
    assert total.sums == [[3.0] * len(WATCHED), [4.0] * len(WATCHED)]
    assert total.largest_gap == 0.5
    empty = Stats().metrics()
    assert empty.keys() == total.metrics().keys() and empty["ratio"] is None


def test_the_kl_term_by_hand_and_its_expectation():
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, stats = loss_and_stats(new, new, new.detach(), zero, zero + 0.5,
                                 GRPOConfig(kl=0.2), reference=new.detach() + math.log(3))
    loss.backward()
    assert loss.item() == pytest.approx(0.2 * 0.5 * (3 - math.log(3) - 1))
    assert stats["reference_kl"] == pytest.approx(3 - math.log(3) - 1)
    assert new.grad.item() == pytest.approx(0.2 * 0.5 * (1 - 3))

    p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)  # E_p[k3] is KL(p || q)
    _, stats = loss_and_stats(p, p, p, p * 0, p * 0, GRPOConfig(kl=1.0), reference=q)
    k3 = (q - p).exp() - (q - p) - 1
    assert (p.exp() @ k3).item() == pytest.approx((p.exp() @ (p - q)).item())
    assert stats["reference_kl"] == pytest.approx(k3.sum().item())


def test_on_the_first_update_the_gradient_is_the_policy_gradient():
    rng = torch.Generator().manual_seed(0)
    new = (-torch.rand(50, generator=rng)).requires_grad_()
    advantage, weight = torch.randn(50, generator=rng), torch.rand(50, generator=rng)
    pack = {"sampler": new.detach(), "advantages": advantage, "weights": weight,
            "depths": torch.zeros(50, dtype=torch.long)}  # no "old": it is the policy
    loss, stats = policy_loss(new, torch.zeros(50), pack, GRPOConfig())
    loss.backward()
    assert stats.metrics()["clipped"] == 0 and stats.metrics()["ratio"] == 1
    assert loss.item() == pytest.approx(-(weight * advantage).sum().item(), abs=1e-5)
    assert torch.allclose(new.grad, -weight * advantage)


@pytest.mark.parametrize("switches", [dict(), dict(kl=0.3), dict(updates=2)])
def test_the_gradient_agrees_with_finite_differences(switches):
    """On a table of logits, with clipped, unclipped and truncated tokens among them."""
    rng = torch.Generator().manual_seed(1)

    def normal(*size):
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    logits = normal(12, 5).requires_grad_()
    picked = torch.randint(5, (12, 1), generator=rng)
    old = logits.detach().log_softmax(-1).gather(1, picked)[:, 0] + 0.6 * normal(12)
    sampler, reference, advantage = old + normal(12), old + normal(12), normal(12)
    weight = torch.rand(12, generator=rng, dtype=torch.float64)
    config = GRPOConfig(**switches)

    def loss(logits):
        logprobs = logits.log_softmax(-1).gather(1, picked)[:, 0]
        return loss_and_stats(logprobs, old, sampler, advantage, weight, config,
                              reference=reference)

    value, stats = loss(logits)
    assert 0 < stats["clipped"] < 12 and ((old - sampler).exp() > TRUST_MAX).any()
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


# --- packs ----------------------------------------------------------------------------


def random_rows(n, seed=0, longest=60):
    rng, rows = random.Random(seed), []
    for _ in range(n):
        length = rng.randint(3, longest)
        mask = [0] + [int(rng.random() < 0.5) for _ in range(length - 2)] + [1]
        ids = [rng.randrange(64) for _ in mask]
        logprobs = [-4.0 * rng.random() * m for m in mask]
        per_token = [rng.choice([-1.0, 0.7])] * sum(mask)
        rows.append(Row(ids, mask, logprobs, per_token, rng.random() / 100))
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 59, 60, 200, 1000, 10**9])
def test_micro_batches_share_every_row_once_and_keep_the_limit(limit, ranks):
    rows = random_rows(50)
    shares = [micro_batches(rows, limit, 1e-3, 0.1, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1

    packs = [pack for share in shares for pack in share]
    assert sorted(id(row) for pack in packs for row in pack) == sorted(map(id, rows))
    for pack in packs:
        assert sum(len(row.ids) for row in pack) <= limit or len(pack) == 1
    tokens = sum(len(row.ids) for row in rows)
    full = sum(1 for pack in packs if pack)
    assert limit < 60 or full <= max(ranks, 2 * math.ceil(tokens / limit))
    assert micro_batches([], limit, ranks=ranks) == []
    assert len(micro_batches(rows, 10**9)) == 1 and len(micro_batches(rows, 1)) == 50


def test_the_ranks_costs_are_even_in_each_round():
    rows = random_rows(400, longest=500)

    def cost(pack):
        return sum(len(row.ids) * (1 + 1e-3 * len(row.ids)) for row in pack)

    rounds = list(zip(*(micro_batches(rows, 2000, 1e-3, 0.1, r, 4) for r in range(4))))
    assert len(rounds) > 5
    assert all(min(map(cost, r)) > 0.9 * max(map(cost, r)) for r in rounds)


def test_collate_lists_sampled_tokens_in_the_order_of_the_models_logprobs():
    rows = [Row([5, 6, 7], [0, 1, 1], [0.0, -0.5, -0.25], [2.0, 1.5], 0.1, 1),
            Row([8, 9], [0, 1], [0.0, -1.0], [-1.0], 0.2)]
    pack = collate(rows, "cpu")
    assert pack["ids"].tolist() == [[5, 6, 7, 8, 9]] and pack["lengths"] == [3, 2]
    assert pack["mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert pack["sampler"].tolist() == [-0.5, -0.25, -1.0]
    assert pack["advantages"].tolist() == [2.0, 1.5, -1.0]
    assert pack["depths"].tolist() == [1, 1, 0]
    assert pack["weights"].tolist() == pytest.approx([0.1, 0.1, 0.2])
    ids = pack["ids"][:, 1:][pack["mask"][:, 1:].bool()]  # how Qwen3.logprobs picks them
    assert ids.tolist() == [6, 7, 9]


def update(model, packs, behind=None):
    """(loss, gradients by name) of a batch; pi_old is `behind` nats below the policy."""
    model.zero_grad()
    total = 0.0
    for rows in packs:
        pack = collate(rows, "cpu")
        logprobs, entropies = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
        if behind is not None:
            pack["old"] = logprobs.detach() - behind
        loss, _ = policy_loss(logprobs, entropies, pack, GRPOConfig())
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packed_rows_give_the_loss_and_gradients_of_each_row_alone():
    """Rows of 10 to 4,000 tokens, and an empty pack; with recomputation too."""
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(64, 32, 48, 1, 4, 2, 8, 4096))
    rng, rows = random.Random(0), []
    for length in (10, 11, 37, 300, 1500, 4000):
        mask = [0] + [int(rng.random() < 0.5) for _ in range(length - 1)]
        rows.append(Row([rng.randrange(64) for _ in mask], mask, [-4.0 * m for m in mask],
                        [rng.choice([-1.0, 0.7])] * sum(mask), 1e-3))

    loss, alone = update(model, [[row] for row in rows])
    for model.recompute, packs in ((False, [rows]), (True, [rows[3:], [], rows[:3]])):
        total, packed = update(model, packs)
        assert total == pytest.approx(loss, rel=1e-5)
        for name, gradient in alone.items():
            difference = (packed[name] - gradient).abs().max()
            assert difference <= 1e-5 * gradient.abs().max(), name

    model.recompute = False
    ids, mask = torch.tensor([rows[0].ids]), torch.tensor([rows[0].mask])
    unpacked = model.logprobs(ids, mask)[0]
    assert torch.allclose(unpacked, model.logprobs(ids, mask, [10])[0], atol=1e-6)


def growing_rows(rng, count, longest):
    """Rows that begin like an earlier one up to a random place, or are equal to it."""
    rows = []
    for _ in range(count):
        ids = [rng.randrange(64)]
        if rows and rng.random() < 0.8:
            before = rng.choice(rows).ids
            ids = before[:rng.randint(1, len(before))]
        ids = ids + [rng.randrange(64) for _ in range(rng.randint(0, longest))]
        mask = [0] + [int(rng.random() < 0.5) for _ in ids[1:]]
        per_token = [rng.choice([-1.0, 0.7])] * sum(mask)
        rows.append(Row(ids, mask, [-4.0 * rng.random() * m for m in mask], per_token,
                        rng.random() / 100, rng.randrange(3)))
    return rows


@pytest.mark.parametrize("tries", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_what_rows_share_is_computed_once_and_nothing_else_changes(tries):
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(64, 16, 24, 2, 4, 2, 4, 128))
    rng = random.Random(0)
    for seed in range(tries):
        rows = growing_rows(rng, rng.randint(1, 9), 12)
        separate = [collate([row], "cpu") for row in rows]
        together = collate(rows, "cpu")
        packed = PackedRows(together["ids"][0].tolist(), together["lengths"], "cpu")
        prefixes = {tuple(row.ids[:n + 1]) for row in rows for n in range(len(row.ids))}
        assert len(packed.computed) == together["computed"] == len(prefixes)

        def learn(packs):
            model.zero_grad()
            stats = Stats()
            for pack in packs:
                got = model.logprobs(pack["ids"], pack["mask"], pack["lengths"])
                loss, part = policy_loss(*got, pack, GRPOConfig())
                loss.backward()
                stats += part
            return stats, [w.grad.clone() for w in model.parameters()]

        model.recompute = seed % 2 == 1
        want, gradients = learn(separate)
        got, shared = learn([together])
        for a, b in zip(got.sums, want.sums):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
        for a, b in zip(shared, gradients):
            assert (a - b).abs().max() <= 1e-5 * max(1e-3, b.abs().max())


def test_gradients_of_many_rows_are_summed_in_float32():
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    Gather.apply(x, torch.tensor([0] + [1] * 1000)).sum().backward()
    assert x.grad.flatten().tolist() == [1.0, 1000.0]  # in bfloat16 it ends at 256


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("questions, shared, own", [(8, 600, 150), (3, 50, 10), (1, 9, 9)])
def test_rows_that_share_a_prompt_are_packed_together(questions, shared, own, ranks):
    rng, rows = random.Random(0), []
    for _ in range(questions):
        prompt = [rng.randrange(64) for _ in range(shared)]
        for _ in range(40):
            ids = prompt + [rng.randrange(64) for _ in range(own)]
            rows.append(Row(ids, [0] * shared + [1] * own, [], [1.0] * own, 1.0))
    rng.shuffle(rows)
    packs = [pack for rank in range(ranks)
             for pack in micro_batches(rows, 8192, 1e-4, 0.02, rank, ranks)]
    assert sorted(id(row) for pack in packs for row in pack) == sorted(map(id, rows))
    computed = [distinct_tokens(pack) for pack in packs]
    for pack, distinct in zip(packs, computed):
        assert distinct + 0.02 * sum(len(row.ids) for row in pack) <= 8192
    if ranks == 1:
        assert sum(computed) <= 1.02 * distinct_tokens(rows)
    else:  # so that each has as much to do, some prompts are computed on two ranks
        assert sum(computed) <= distinct_tokens(rows) + len(packs) * shared


def test_loss_and_gradient_are_the_same_in_one_micro_batch_and_in_eight():
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(64, 32, 48, 2, 4, 2, 8, 128))
    rows = random_rows(8, seed=3)
    assert len({len(row.ids) for row in rows}) > 4

    # A later update of the batch: pi_old is behind, and good tokens are clipped.
    loss, one = update(model, micro_batches(rows, 10**9), 0.25)
    for packs in (micro_batches(rows, 1), micro_batches(rows, 130), [rows[5:], rows[:5]]):
        total, many = update(model, packs, 0.25)
        assert total == pytest.approx(loss, rel=1e-5)
        for name, gradient in one.items():
            most = gradient.abs().max()
            assert most > 0
            assert torch.allclose(gradient, many[name], rtol=1e-4, atol=1e-5 * most), name

    heavier = [replace(row, weight=2 * row.weight) for row in rows]
    doubled, _ = update(model, [heavier], 0.25)
    assert doubled == pytest.approx(2 * loss, rel=1e-5)
