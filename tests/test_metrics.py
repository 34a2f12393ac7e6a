"""Numbers about trees that metrics.jsonl has."""
import pytest
from test_grpo import node, rollout

from grpo import GRPOConfig, credit
from training import metrics


def test_a_step_is_described_by_the_trees_that_did_not_fail():
    trees = [rollout(0.2, node((), 4, node((0,), 2))), rollout(0.8)]
    trees += [rollout(0.5, group="alone"), rollout(1.0, failed="lost")]
    row = metrics.describe(trees, credit(trees, GRPOConfig()))
    assert row["reward"] == 0.5 and row["flat"] == 1 / 3  # the one without a comparison
    assert (row["nodes"], row["tokens"]) == (4 / 3, 10 / 3)
    assert row["reward_std"] == pytest.approx(0.15)  # 0.3 of the group, 0 of the lone tree
    assert (row["tokens_d0"], row["tokens_d1"]) == (8 / 3, 2) and "score_d1" not in row
    assert row["failed"] == 1 and row["failures"] == {"lost": 1}
