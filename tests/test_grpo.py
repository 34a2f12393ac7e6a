"""From rewards to a loss: numbers by hand, and what must not depend on batching."""
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from test_sampler import HYBRID

from engine.attention import PackedLayout, gather
from engine.packing import Pack, PackSize, collate, divided
from grpo import (CLIP_HIGH, CLIP_LOW, LENGTH_CONSTANT, Credit, GRPOConfig, Sequence,
                  advantages, credit, credits_of, make_sequences, minibatches, node_weights,
                  policy_loss)
from model import Decoder, DecoderConfig
from training.metrics import describe, of_steps, totals
from tree import Message, Node, Tree


def node(path, sampled, *children):
    """A node with a prompt of two tokens and, if it spoke, `sampled` tokens in 2 turns."""
    made = Node(path, children=list(children))
    made.add(Message("user", "", (0, 1)))
    if sampled:
        half = sampled // 2
        made.add(Message("assistant", "", tuple(range(half)), (-0.5,) * half))
        made.add(Message("user", "", (7,)))
        rest = sampled - half
        made.add(Message("assistant", "", tuple(range(rest)), (-0.25,) * rest))
    return made


def ragged():
    """Three levels. (1,), (1, 0) and (2, 1) never spoke; (2,) has many children."""
    return node((), 4,
                node((0,), 3),
                node((1,), 0, node((1, 0), 0)),
                node((2,), 5, node((2, 0), 1), node((2, 1), 0), node((2, 2), 2),
                     node((2, 3), 6)),
                node((3,), 2, node((3, 0), 8)))


def made(reward, root=None, group="g", failed=""):
    return Tree({}, group, root or node((), 2), reward, failed)


def plain(**switches):
    """Without the division by the deviation: numbers that can be read off."""
    return GRPOConfig(**{"std": "off"} | switches)


def rows_of(trees, config):
    return make_sequences(trees, credit(trees, config), config)


def test_advantages_by_hand():
    trees = [made(reward) for reward in (1.0, 0.0, 0.5, 0.5)]
    assert advantages(trees, plain()) == [0.5, -0.5, 0.0, 0.0]
    deviation = math.sqrt(0.125)  # of the population: (1/4 + 1/4 + 0 + 0) / 4
    most = 0.5 / (deviation + 0.01)
    assert advantages(trees, GRPOConfig()) == pytest.approx([most, -most, 0, 0])


def test_groups_are_what_the_trees_say_and_failed_trees_do_not_count():
    trees = [made(1.0, group="a"), made(5.0, group="b"), made(0.5, group="a"),
             made(9.0, group="b"), made(7.0, group="a", failed="lost")]
    assert advantages(trees, plain()) == [0.25, -2.0, -0.25, 2.0, 0.0]


def coefficients(y, mean, factor=1.0):
    """J(y) = J_node(y) + (1/k) sum_i J(y_i) as {path: factor}, straight from there."""
    terms = {y.path: factor}
    spoke = [c for c in y.children if any(t.logprobs for t in c.messages)]
    for child in spoke:
        terms |= coefficients(child, mean, factor / len(spoke) if mean else factor)
    return terms


@pytest.mark.parametrize("children", ["mean", "sum"])
def test_node_weights_are_the_recursion_unrolled(children):
    weights = node_weights(ragged(), GRPOConfig(children=children))
    by_path = {n.path: weight for n, weight in weights.items()}
    assert by_path == pytest.approx(coefficients(ragged(), children == "mean"))


@pytest.mark.parametrize("who, trained", [
    ("all", [n.path for n in ragged().walk() if n.sampled]), ("roots", [()]),
    ("children", [(0,), (2,), (2, 0), (2, 2), (2, 3), (3,), (3, 0)])])
def test_who_is_trained_has_its_roots_advantage(who, trained):
    trees = [made(1.0, ragged()), made(0.0, ragged())]
    rows = rows_of(trees, plain(trained=who))
    nodes = [n for r in trees for n in r.root.walk() if n.path in trained]
    expected = [0.5] * len(trained) + [-0.5] * len(trained)
    assert [(row.ids, row.depth, set(row.advantages)) for row in rows] == [
        (n.ids, n.depth, {a}) for n, a in zip(nodes, expected)]


@pytest.mark.parametrize("length, weights", [
    ("sequence", [1 / 4 / 3, 1 / 2 / 2 / 3, 1 / 2 / 6 / 3, 1 / 5 / 3]),
    ("constant", [1 / 64 / 3, 1 / 2 / 64 / 3, 1 / 2 / 64 / 3, 1 / 64 / 3]),
    ("batch", [1 / 20] * 4)])  # 4 + 2 + 6 + 5 + 3 tokens, alike
def test_weights_of_a_batch_by_hand(length, weights):
    """A tree of 4, 2 and 6 tokens, a lone root of 5, a lost one, and one of another group,
    without a signal, that counts in the means."""
    trees = [made(1.0, node((), 4, node((0,), 2), node((1,), 6))),
             made(0.0, node((), 5)), made(7.0, node((), 9), failed="x"),
             made(0.3, node((), 3), group="flat")]
    rows = rows_of(trees, plain(
        length=length, children="sum" if length == "batch" else "mean"))
    assert [row.weight for row in rows] == pytest.approx(weights)


def test_no_signal_no_rows_but_with_a_kl_term():
    flat = [made(0.5), made(0.5)]
    for trees in (flat, [made(0.5, failed="x")], []):
        assert rows_of(trees, GRPOConfig()) == []
    assert len(rows_of(flat, GRPOConfig(kl=0.1))) == 2


def test_rows_take_what_an_objective_says():
    root = node((), 5, node((0,), 2), node((1,), 4))
    tree = made(1.0, root)
    given = {root: Credit([1.0, -2.0], 3.0), root.children[1]: Credit([0.0, 0.0], 1.0)}
    (row,) = make_sequences([tree], given, GRPOConfig())
    assert row.advantages == [1.0] * 2 + [-2.0] * 3 and row.weight == 3 / LENGTH_CONSTANT
    with pytest.raises(ValueError, match="a Credit with 2 advantages"):
        credits_of(lambda *_: {root: Credit([1.0], 1.0)}, [tree], GRPOConfig())


def test_an_inert_switch_is_refused():
    with pytest.raises(ValueError, match="all tokens alike"):
        GRPOConfig(length="batch")


def pack_of(old, sampler, advantages, weights):
    return Pack(None, None, [], [], [], sampler, torch.tensor(advantages),
                torch.tensor(weights), old)


@pytest.mark.parametrize("ratio, advantage, surrogate, slope, clipped", [
    (1.0, 2.0, 2.0, 2.0, 0), (1.0, -2.0, -2.0, -2.0, 0), (1.1, 2.0, 2.2, 2.2, 0),
    (1.5, 2.0, 2.56, 0.0, 1),  # a good token: no more than 1 + eps_high
    (0.5, 2.0, 1.0, 1.0, 0),  # but all the way back
    (0.9, -2.0, -1.8, -1.8, 0),
    (0.5, -2.0, -1.6, 0.0, 1),  # a bad one: no less than 1 - eps_low
    (1.5, -2.0, -3.0, -3.0, 0)])
def test_the_clipped_surrogate_by_hand(ratio, advantage, surrogate, slope, clipped):
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    pack = pack_of(old, old, [advantage], [0.5])
    loss, watched = policy_loss(new, torch.zeros(1), pack, GRPOConfig())
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * surrogate) and watched["clipped"] == clipped
    assert new.grad.item() == pytest.approx(-0.5 * slope)


def test_what_is_watched_of_a_batch_by_hand(float64):
    old = torch.tensor([-1.0, -2.0, -0.5])
    new = old + torch.tensor([1.5, 0.5, 1.0]).log()
    sampler = old - torch.tensor([0.0, math.log(3.0), -math.log(2.0)])
    pack = pack_of(old, sampler, [1.0, -1.0, 0.5], [0.1, 0.2, 0.3])
    pack.reference_logprobs = new + torch.tensor([2.0, 1.0, 0.5]).log()
    config = GRPOConfig(kl=0.1)
    loss, watched = policy_loss(new, torch.tensor([0.4, 0.5, 0.6]), pack, config)
    # 1.28 clipped, trust 1; -0.8 clipped, trust 3 cut to 2; 0.5 at ratio 1, trust 1/2. And
    # k3 is 2 - log 2 - 1 at ratio 1.5, 0, and 1/2 + log 2 - 1 at ratio 1.
    terms = 0.1 * 1.5 * (1 - math.log(2)) + 0.3 * 0.5 * (math.log(2) - 0.5)
    assert loss.item() == pytest.approx(
        -(0.1 * 1.28 - 0.2 * 2 * 0.8 + 0.3 * 0.5 * 0.5) + 0.1 * terms)

    assert of_steps([(totals(loss, watched), 0.5, 0.1, 0.25)]) == pytest.approx({
        "ratio": 1.0, "clipped": 2 / 3, "kl": (0 - math.log(1.5) + math.log(2)) / 3,
        "reference_kl": 0.5 / 3, "entropy": 0.5, "advantage": 2.5 / 3,
        "gap": (math.log(2) + math.log(3)) / 3,
        "loss": loss.item(), "grad_norm": 0.5, "forgot": 0.1, "step_left": 0.25})


@pytest.mark.parametrize("switches, theirs", [
    (dict(length="sequence"), dict(loss_type="grpo")),
    (dict(length="constant"), dict(loss_type="dr_grpo")),
    (dict(length="batch", children="sum"), dict(loss_type="dapo")),
    (dict(length="sequence", kl=0.3), dict(loss_type="grpo", beta=0.3))])
def test_gradients_are_those_of_trl_on_trees_of_one_node(switches, theirs, float64):
    """Its GRPOTrainer masks what tools say, as we mask observations. Half of the ratios are
    beyond the clip."""
    trl = pytest.importorskip("trl")
    config = plain(**switches)
    trees = [made(reward, node((), n)) for reward, n in
             ((1.0, 7), (0.1, 4), (0.0, 9), (0.2, 2))]
    rows = rows_of(trees, config)
    pack = collate(rows, "cpu")
    masks = [torch.tensor(row.mask[2:]) for row in rows]  # without the prompts
    tool_BT = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    torch.manual_seed(0)
    old_BT = -torch.rand(tool_BT.shape)
    new_BT = (old_BT + 0.3 * torch.randn(tool_BT.shape)).requires_grad_()
    reference_BT = old_BT + 0.3 * torch.randn(tool_BT.shape)

    old_N, reference_N, new_N = (x[tool_BT.bool()] for x in (old_BT, reference_BT, new_BT))
    pack = replace(pack, old_logprobs=old_N, sampler_logprobs=old_N,
                   reference_logprobs=reference_N)
    policy_loss(new_N, torch.zeros(len(new_N)), pack, config)[0].backward()
    ours, new_BT.grad = new_BT.grad, None

    settings = dict(
        epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, importance_sampling_level="token",
        max_completion_length=int(LENGTH_CONSTANT), current_gradient_accumulation_steps=1,
        beta=0.0, use_vllm=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x))
    trainer = MagicMock(**settings | theirs)
    trainer.args = SimpleNamespace(  # the KL with its correction, which is the default
        delta=None, steps_per_generation=1, use_bias_correction_kl=True)
    trainer._get_per_token_logps_and_entropies.return_value = new_BT, old_BT, None
    tensors = dict(
        prompt_ids=tool_BT, prompt_mask=tool_BT, completion_ids=tool_BT, tool_mask=tool_BT,
        completion_mask=torch.ones_like(tool_BT), num_items_in_batch=tool_BT.sum(),
        old_per_token_logps=old_BT, ref_per_token_logps=reference_BT,
        advantages=torch.tensor([row.advantages[0] for row in rows]))
    trl.GRPOTrainer._compute_loss(trainer, None, tensors).backward()
    assert (ours - new_BT.grad).norm() < 1e-10 * new_BT.grad.norm()


def test_questions_are_dealt_whole_and_evenly_into_minibatches():
    trees = [made(i, group=str(i % 7)) for i in range(28)]
    parts = minibatches(trees, plain(updates=3))
    assert sorted(r.reward for part in parts for r in part) == list(range(28))
    assert [len({r.group for r in part}) for part in parts] == [3, 2, 2]
    assert minibatches(trees, plain()) == [trees]


def random_rows(n, seed=0, longest=60, alike=0.0):
    """So many begin like an earlier one up to a random place, or are equal to it."""
    rng, rows = random.Random(seed), []
    for _ in range(n):
        ids = [rng.randrange(64)]
        if rows and rng.random() < alike:
            before = rng.choice(rows).ids
            ids = before[:rng.randint(1, len(before))]
        ids = ids + [rng.randrange(64) for _ in range(rng.randint(0, longest - 1))]
        mask = [0] + [int(rng.random() < 0.5) for _ in ids[1:]]
        logprobs = [-round(4.0 * rng.random()) * m for m in mask]  # some are 0
        per_token = [rng.choice([-1.0, 0.7])] * sum(mask)
        rows.append(Sequence(ids, mask, logprobs, per_token, rng.random() / 100))
    return rows


def distinct_tokens(rows):
    """How many tokens have to be computed: equal beginnings count once."""
    return len({tuple(row.ids[:n + 1]) for row in rows for n in range(len(row.ids))})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 60, 200, 10**9])
def test_micro_batches_share_every_row_once_and_keep_the_limit(limit, ranks):
    rows = random_rows(50)
    size = PackSize(limit, 1e-3, 0.1)
    shares = [divided(rows, size, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1

    packs = [pack for share in shares for pack in share]
    assert sorted(id(row) for pack in packs for row in pack) == sorted(map(id, rows))
    for pack in packs:
        assert sum(len(row.ids) for row in pack) <= limit or len(pack) == 1


def test_the_ranks_costs_are_even_in_each_round():
    rows = random_rows(400, seed=1, longest=500)

    def cost(pack):
        return sum(len(row.ids) * (1 + 1e-3 * len(row.ids)) for row in pack)

    rounds = list(zip(*(divided(rows, PackSize(2000, 1e-3, 0.1), r, 4) for r in range(4))))
    assert len(rounds) > 5
    assert all(min(map(cost, r)) > 0.9 * max(map(cost, r)) for r in rounds)


@pytest.mark.parametrize("tries, longest", [
    (10, 13), (2, 600), pytest.param(500, 13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [{}, HYBRID])
def test_what_rows_share_is_computed_once_and_nothing_else_changes(
        tries, longest, kind, float64):
    """Loss, statistics and gradients are those of each row alone, with pi_old behind the
    policy, and with recomputation too."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**dict(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4) | kind))

    def learn(packs):
        model.zero_grad()
        sums = Counter()
        for pack in packs:
            got = model.logprobs(pack)
            before = replace(pack, old_logprobs=got[0].detach() - 0.25)
            loss, watched = policy_loss(*got, before, GRPOConfig())
            loss.backward()
            sums.update(totals(loss, watched))
        return sums, [w.grad.clone() for w in model.parameters()]

    for seed in range(tries):
        rows = random_rows(2 + seed % 7, seed, longest, alike=0.8)
        together = collate(rows, "cpu")
        packed = PackedLayout(together.ids[0].tolist(), together.lengths, "cpu")
        assert len(packed.computed) == distinct_tokens(rows)

        model.recompute_above = 0 if seed % 2 else math.inf
        want, gradients = learn([collate([row], "cpu") for row in rows])
        got, shared = learn([together])
        assert got == pytest.approx(want, rel=1e-10, abs=1e-10)
        for a, b in zip(shared, gradients):
            assert (a - b).abs().max() <= 1e-10 * max(1e-3, b.abs().max())


def test_gradients_of_many_rows_are_summed_in_float32():
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather(x, torch.tensor([0] + [1] * 1000)).sum().backward()
    assert x.grad.flatten().tolist() == [1.0, 1000.0]  # in bfloat16 it ends at 256


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("questions, shared, own", [(8, 60, 15), (3, 50, 10), (1, 9, 9)])
def test_rows_that_share_a_prompt_are_packed_together(questions, shared, own, ranks):
    rng, rows = random.Random(0), []
    for _ in range(questions):
        prompt = [rng.randrange(64) for _ in range(shared)]
        for _ in range(40):
            ids = prompt + [rng.randrange(64) for _ in range(own)]
            rows.append(Sequence(ids, [0] * shared + [1] * own, [], [1.0] * own, 1.0))
    rng.shuffle(rows)
    packs = [pack for rank in range(ranks)
             for pack in divided(rows, PackSize(820, 1e-4, 0.02), rank, ranks)]
    computed = [distinct_tokens(pack) for pack in packs]
    for pack, distinct in zip(packs, computed):
        assert distinct + 0.02 * sum(len(row.ids) for row in pack) <= 820
    again = 0 if ranks == 1 else len(packs) * shared  # so that each has as much to do
    assert sum(computed) <= 1.02 * distinct_tokens(rows) + again


def test_a_step_is_described_by_the_trees_that_did_not_fail():
    leaf = replace(node((0,), 2), kind="llm", score=0.0)
    trees = [made(0.2, replace(node((), 4, leaf), errors=[1])), made(0.8)]
    trees += [made(0.5, group="alone"), made(1.0, failed="lost")]
    for tree, score in zip(trees, (0.1, 0.3, 0.2)):
        tree.root.score = score
    row = describe(trees, credit(trees, GRPOConfig()))
    assert row["flat"] == 1 / 3  # the one without a comparison
    assert (row["reward"], row["score"]) == pytest.approx((0.5, 0.2))
    assert row["asks"] == 1 / 3
    assert (row["nodes"], row["tokens"]) == (4 / 3, 10 / 3)
    assert row["reward_std"] == pytest.approx(0.15)  # 0.3 of the group, 0 of the lone tree
    assert (row["tokens_d0"], row["tokens_d1"]) == (8 / 3, 2) and "score_d0" not in row
    assert row["failed"] == 1 and row["failures"] == {"lost": 1}
    assert row["ran"] == 5 / 6 and row["score_d1"] == 0.0  # a completion runs nothing
