"""Numbers about trees that metrics.jsonl has."""
import pytest

from test_grpo import node, rollout

from runtime import metrics


def test_a_step_is_described_by_the_trees_that_did_not_fail():
    trees = [rollout(0.2, node((), 4, node((0,), 2))), rollout(0.8)]
    trees.append(rollout(1.0, failed="lost"))
    row = metrics.describe(trees)
    assert row["reward"] == 0.5 and row["flat"] == 0 and "score" not in row
    assert (row["nodes"], row["tokens"]) == (1.5, 4)
    assert row["failed"] == 1 and row["failures"] == {"lost": 1}
    trees[0].root.score, trees[1].root.score = 0.4, 0.8
    assert metrics.describe(trees)["score"] == pytest.approx(0.6)
    equal = [rollout(0.5), rollout(0.5)]
    assert metrics.describe(equal)["flat"] == 1
