"""Numbers about trees that metrics.jsonl has."""
from test_grpo import node, plain, rollout

import grpo
from runtime import metrics
from tree import Node, Turn


def test_the_critical_path_is_the_longest_chain_of_calls_that_wait_for_each_other():
    """The root (4 tokens) asks two children at once, then one more. Of the first two the
    longer chain counts: max(2 + 8, 5) = 10. Then 3: in all 4 + 10 + 3."""
    root = node((), 4, node((0,), 2, node((0, 0), 8)), node((1,), 5), node((2,), 3))
    root.children[2].asked = (0, 2)
    assert metrics.critical_path(root) == 17
    root.children[2].asked = (0, 0)  # all three at once
    assert metrics.critical_path(root) == 14
    api = Node()
    api.add(Turn("assistant", "x" * 40, (), ()))
    assert metrics.critical_path(api) == 10


def test_how_trees_ended_is_said_in_words():
    ends = {"final": 5, "turns": 1}
    assert metrics.shares(ends) == "final 83%, out of turns 17%"


def test_a_step_is_described_by_scores_without_the_price():
    trees = [rollout(0.5, node((), 4, node((0,), 2))), rollout(0.5)]
    trees.append(rollout(1.0, failed="lost"))
    config = plain(cost=100.0)  # 0.1 per token: the net rewards differ, the scores do not
    row = metrics.describe(trees, grpo.advantages(grpo.priced(trees, config), config))
    assert row["reward"] == 0.5 and row["flat"] == 0
    assert (row["tokens_worse"], row["tokens_better"]) == (6, 2)
    assert (row["nodes"], row["tokens"], row["critical_path"]) == (1.5, 4, 4)
    free = metrics.describe(trees, grpo.advantages(trees, plain()))
    assert free["flat"] == 1 and free["tokens_worse"] is None
