"""Trees that fork: what they share, what is sampled again, and who is judged with whom."""
import asyncio
import json
import pickle
from dataclasses import replace
from itertools import count

import pytest
from conftest import SHORT, command
from test_grpo import node, plain, rollout
from test_objectives import gradient_agrees
from test_rlm import Script, block, tiny  # `tiny` is a fixture

import train
from grpo import make_rows
from lab import fork
from rlm import RLMConfig
from tasks import Task

ROOT = [block("a = rlm_query_batched('read', ['x', 'y'])"),
        block("FINAL(a + [rlm_query('again', 'z')])")]


def sample(tokenizer, questions=2, group=4):
    """Groups of trees of a policy whose children say something else whenever asked."""
    fresh, asked = count(), []
    says = {(): ROOT, "*": lambda node: block(f"FINAL({next(fresh)})")}
    scripted = Script(says, tokenizer)

    async def policy(node, max_tokens, key):
        asked.append(key)
        return await scripted(node, max_tokens, key)

    names = [str(i) for i in range(questions) for _ in range(group)]
    tasks = [Task(name, "question", "q", "c") for name in names]
    trees = asyncio.run(fork.collect(
        tasks, policy, tokenizer, RLMConfig(max_turns=3), ("s", 0), names,
        numbers=range(10, 10 + len(names)), score=lambda task, answer: float(answer[0])))
    return trees, asked


def told(node):
    """Whether its turns were sampled, and how it ended."""
    return [turn.logprobs is not None for turn in node.turns
            if turn.role == "assistant"], node.answer


def test_a_fork_takes_over_what_does_not_depend_on_it_and_samples_the_rest(tiny):
    trees, asked = sample(tiny)
    assert [tree.group for tree in trees] == ["0"] * 4 + ["1"] * 4
    for first, *others in (trees[:4], trees[4:]):
        assert first.origin is None
        assert all(tree.origin is first.root for tree in others)
        ended = [told(n) for n in first.root.walk()]
        assert ended == [([True, True], first.root.answer), *(
            ([True], answer) for answer in first.root.answer)]
        points = set()
        for tree in others:
            told_again = [told(child)[0] for child in tree.root.children]
            # Beside a child of the first query the other one is kept, and the root's first
            # message; the last child depends on both. Before the last one all is kept.
            point = told_again.index([True])
            points.add(point)
            kept = {0: [[True], [False], [True]], 1: [[False], [True], [True]],
                    2: [[False], [False], [True]]}[point]
            assert told_again == kept
            assert told(tree.root)[0] == [False, point < 2]
            for child, was, again in zip(
                    tree.root.children, first.root.children, told_again):
                assert (child.answer == was.answer) == (again == [False])
        assert len(points) == 1  # siblings share the fork
    sampled = sum(t.logprobs is not None for tree in trees for n in tree.root.walk()
                  for t in n.turns)
    assert len(asked) == sampled  # nothing else was asked of the policy


def test_a_group_that_is_no_multiple_of_the_siblings_ends_with_fewer(tiny):
    trees, _ = sample(tiny, questions=1, group=5)
    assert [tree.origin is None for tree in trees] == [True, False, False, False, True]


def test_what_depends_on_a_node_follows_from_turns_and_queries():
    """The root asks (0,) and (1,) at once, then (2,) in the same turn, (3,) in the next."""
    root = node((), 4, node((0,), 2, node((0, 0), 2), node((0, 1), 2)), node((1,), 2),
                node((2,), 2), node((3,), 2))
    for child, asked in zip(root.children, ((0, 0), (0, 0), (0, 2), (1, 3))):
        child.asked = asked
    first = root.children[0]
    first.children[1].asked = (1, 1)

    def kept(point):
        return {n.path: turns for n, turns in fork.before(root, point)}

    all_ = float("inf")
    assert kept(root) == {}
    assert kept(root.children[1]) == {(): 1, (0,): all_, (0, 0): all_, (0, 1): all_}
    assert kept(first) == {(): 1, (1,): all_}
    assert kept(first.children[1]) == {(): 1, (0,): 2, (0, 0): all_, (1,): all_}
    assert kept(root.children[3]) == {
        (): 2, (0,): all_, (0, 0): all_, (0, 1): all_, (1,): all_, (2,): all_}


def taken_over(made):
    made.turns = [replace(t, logprobs=None) for t in made.turns]
    return made


def test_what_was_sampled_again_is_judged_among_its_siblings():
    """Group "g": a tree with reward 1; forked at its second child, 0 and 0.2; and a tree
    with 0.4. The group's mean is 1.6 / 4 = 0.4, that among the siblings 1.2 / 3 = 0.4."""
    first = rollout(1.0, node((), 4, node((0,), 2), node((1,), 2)))
    forks = []
    for reward in (0.0, 0.2):
        root = taken_over(node((), 4, taken_over(node((0,), 2)), node((1,), 2)))
        forks.append(replace(rollout(reward, root), origin=first.root))
    lost = replace(rollout(7.0, failed="lost"), origin=first.root)
    other = rollout(0.4, node((), 4, node((0,), 2)))
    trees, config = [first, *forks, lost, other], plain(objective="fork")
    credit = fork.fork(trees, config)
    for tree, advantage in ((first, 0.6), (other, 0.0)):
        for n in tree.root.walk():
            assert credit[n].advantages == pytest.approx([advantage] * 2)
    for tree, advantage in zip(forks, (-0.4, -0.2)):
        again = tree.root.children[1]
        assert [n for n in tree.root.walk() if n in credit] == [again]
        assert credit[again].advantages == pytest.approx([advantage] * 2)
        assert credit[again].weight == 1.0
    assert [sum(row.mask) for row in make_rows(trees, credit, config)] == [4, 2, 2, 2, 2]
    by_hand = {(0, ()): (0.6, 1), (0, (0,)): (0.6, 1 / 2), (0, (1,)): (0.6, 1 / 2),
               (1, (1,)): (-0.4, 1), (2, (1,)): (-0.2, 1)}
    assert gradient_agrees(trees, config, by_hand)
    first, *others = pickle.loads(pickle.dumps(trees))  # as ranks exchange them
    assert [tree.origin is first.root for tree in others] == [True, True, True, False]


def test_a_conversation_that_is_not_as_it_was_is_sampled_anew(tiny):
    """Code that prints something else the second time: what follows is not taken over."""
    number = count()

    def print_the_time(node):
        said = sum(turn.role == "assistant" for turn in node.turns)
        code = ["import time; print(time.time_ns())", "FINAL(rlm_query('child', 'x'))"]
        return [block(code[said])] * 2

    async def policy(node, max_tokens, key):
        says = Script({(): print_the_time, "*": block(f"FINAL({next(number)})")}, tiny)
        return await says(node, max_tokens, key)

    tasks = [Task("t", "question", "q", "c")] * 2
    first, forked = asyncio.run(fork.collect(
        tasks, policy, tiny, RLMConfig(), (), ["0"] * 2, numbers=[0, 1],
        score=lambda task, answer: 0.0))
    assert told(first.root)[0] == [True, True]
    assert told(forked.root)[0] == [False, True]


def test_a_run_with_forks_trains_on_what_the_sampler_said(short_run, tmp_path, monkeypatch):
    """Sampler and trainer agree on all that is trained; a price is in no score."""
    assert command(
        train, monkeypatch, *SHORT, "--group", 4, "--objective", "fork", "--cost", 1,
        "--model", short_run / "warmup", "--warmup-steps", 0, "--out", tmp_path) is None
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["phase"] == "grpo"]
    assert len(steps) == 2 and all(row["largest_gap"] < 1e-4 for row in steps)
    assert all(row["reward"] >= 0 and row["tokens"] > 0 for row in steps)
    assert all(row["critical_path"] > 0 for row in map(json.loads, lines)
               if row["phase"] == "eval")
