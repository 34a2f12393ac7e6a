"""Statistics, and the command line."""
import itertools
import json
import math
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

import conftest
import eval as evaluation
import tasks
from ask import RLM
from conftest import PAPERS, data_of
from tasks import Question
from training.questions import heldout_questions, read, split
from training import scores
from tree import read_trees, write_trees


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs eval.py with these arguments -> (its message or None, what it printed)."""
    def run(*args):
        message = conftest.command(evaluation, monkeypatch, *args)
        printed = capsys.readouterr()
        return printed.err if message == 2 else message, printed.out
    return run


# --- statistics ---------------------------------------------------------------------------

def record(id, score, failed="", seconds=1.0, end="final"):
    return {"id": id, "score": score, "reward": score, "failed": failed, "end": end,
            "seconds": seconds, "context": 100, "in": 2, "out": 2, "nodes": 2}


def test_lost_trees_stay_out_of_every_mean():
    records = [record("a", 1.0), record("b", 0.0, seconds=3.0, end="turns"),
               record("c", 0.0, "lost", 99), record("b", 0.0, "lost", 99)]
    row = scores.summary(records, "evidence", None, "rlm1")
    assert (row["n"], row["failed"], row["score"], row["length"]) == (2, 2, 0.5, 100)
    assert row["seconds"] == 2.0 and row["ends"] == {"final": 1, "turns": 1}
    lost = scores.summary(records[2:], "evidence", 8000, "rlm1")
    assert (lost["n"], lost["score"], lost["low"]) == (0, None, None)


def test_means_and_intervals_are_over_questions_however_many_trees_these_have():
    """More trees of a question that score alike say nothing new."""
    once = [record("a", 1.0), record("b", 0.0), record("c", 0.5)]
    more = [*once, *[record("a", 1.0)] * 9, record("c", 0.0), record("c", 1.0)]
    one, other = (scores.summary(rows, "t", 1, "m") for rows in (once, more))
    for name in ("n", "score", "low", "high"):
        assert one[name] == pytest.approx(other[name]), name


def test_the_best_of_k_is_the_closed_form_and_what_counting_gives():
    for right, n, k in itertools.product(range(5), (4, 7), (1, 2, 4)):
        table = [1.0] * right + [0.0] * (n - right)
        wrong = math.comb(n - right, k) / math.comb(n, k)
        assert scores.best_of(table, k) == pytest.approx(1 - wrong)
    rng = random.Random(0)
    for n in (1, 2, 5, 8):
        table = [rng.choice([0.0, 1.0, rng.random(), -rng.random()]) for _ in range(n)]
        for k in range(1, n + 1):
            best = [max(drawn) for drawn in itertools.combinations(table, k)]
            assert scores.best_of(table, k) == pytest.approx(np.mean(best))
    assert scores.best_of([0.0, 1.0] * 2000, 1000) == pytest.approx(1)


def test_differences_are_paired_and_skip_what_either_lost():
    """Two methods that differ by 0.1 on every question: the paired interval is a point,
    however much the questions differ. The trees of a question count with their mean."""
    rng = random.Random(0)
    base = {str(i): rng.random() * 0.8 + 0.1 for i in range(50)}
    a = [record(id, s + 0.1 + more) for id, s in base.items() for more in (-0.1, 0.1)]
    b = [record(id, s) for id, s in base.items()]
    a += [record("x", 0.0, "lost"), record("y", 1.0), record("0", 9.0, "lost")]
    b += [record("x", 1.0), record("y", 0.0, "lost")]
    rng.shuffle(b)
    cells = {("t", 1, "a"): a, ("t", 1, "b"): b, ("t", 2, "a"): [record("0", 0.0)]}
    d, = scores.differences({cell: scores.by_question(cells[cell]) for cell in cells})
    assert (d["a"], d["b"], d["n"]) == ("a", "b", 50)
    assert d["difference"] == pytest.approx(0.1)
    unseen = 3.8415 / 53.8415  # such a share of all questions may differ otherwise
    assert [d["low"], d["high"]] == pytest.approx(
        [0.1 - 1.1 * unseen, 0.1 + 0.9 * unseen], abs=1e-4)


def test_a_paired_difference_is_the_one_that_numpy_gives():
    rng = np.random.default_rng(0)
    a, b = rng.random((300, 3)), rng.random((300, 2)) * 0.9  # trees of each question
    cells = {("t", None, name): {str(i): list(row) for i, row in enumerate(table)}
             for name, table in (("a", a), ("b", b))}
    d, = scores.differences(cells)
    gaps = a.mean(1) - b.mean(1)
    mean, error = gaps.mean(), 1.96 * gaps.std() / math.sqrt(300)
    assert d["difference"] == pytest.approx(mean)
    unseen = 3.8415 / 303.8415
    low, high = mean - error, mean + error
    assert d["low"] == pytest.approx(low - unseen * (1 + low), abs=3e-3)
    assert d["high"] == pytest.approx(high + unseen * (1 - high), abs=3e-3)


@pytest.mark.parametrize("n", [8, 50])
@pytest.mark.parametrize("right, mean", [(0.5, 0.5), (0.97, 0.97), (0.8, 0.9)])
def test_an_interval_holds_the_true_mean_in_93_of_100_trials(right, mean, n):
    """Scores of 1 with the chance `right`, else 0, or anything in between for 0.8."""
    rng, held, trials = random.Random(0), 0, 300
    for _ in range(trials):
        other = rng.random if right == 0.8 else float
        low, high = scores.interval(
            [1.0 if rng.random() < right else other() for _ in range(n)])
        held += low <= mean <= high
    assert held >= 0.93 * trials
    low, high = scores.interval([0.0, 1.0] * 1000)  # of many: as of a normal distribution
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 2000 ** 0.5, rel=0.1)


# --- the command line ---------------------------------------------------------------------

def test_a_script_answers_every_kind_and_the_records_add_up(command, tmp_path):
    kinds = ["requests", "evidence"]
    message, text = command("--policy", "oracle", "--tasks", ",".join(kinds), "--lengths",
                            "2k,4000", "--n", 2, "--save", tmp_path / "trees.jsonl",
                            "--html", tmp_path / "r.html")
    trees = read_trees(tmp_path / "trees.jsonl", Question)
    assert message is None and [tree.reward for tree in trees] == [1.0] * 8
    assert len(data_of((tmp_path / "r.html").read_text())["trees"]) == 8
    table = [line.replace(",", "").split() for line in text.splitlines()[1::2]]
    assert [row[0] for row in table] == ["requests"] * 2 + ["evidence"] * 2
    assert {row[1] for row in table} == {"rlm1"}
    assert [round(int(row[2]), -3) for row in table] == [2000, 4000] * 2
    for row, i in zip(table, range(0, 8, 2)):
        pair = trees[i:i + 2]
        nodes = [node for tree in pair for node in tree.root.walk()]
        said = [t for n in nodes for t in n.messages if t.role == "assistant"]
        assert float(row[9]) == len(nodes) / 2
        assert int(row[8]) == round(sum(len(turn.text) // 4 for turn in said) / 2)
        assert pair[0].question.context is None  # its seed makes it again


def test_a_teacher_can_answer_questions_that_training_may_see(command, tmp_path):
    ids = {}
    sides = {"generated": ("train", "heldout"), "rows": ("train", "heldout", "all")}
    flags = {"generated": ["--tasks", "evidence", "--n", 12], "rows": ["--data", PAPERS]}
    for name, side in [(name, side) for name, each in sides.items() for side in each]:
        path = tmp_path / name
        assert command("--policy", "oracle", *flags[name], "--save", path,
                       "--split", side)[0] is None
        ids[name, side] = {tree.question.id for tree in read_trees(path, Question)}
    held = {question.id for question in heldout_questions(12, tasks.load("evidence"))}
    assert ids["generated", "heldout"] == held and not ids["generated", "train"] & held
    held = split(read(PAPERS, tasks.load("evidence")))[1]  # as a run splits them
    assert ids["rows", "heldout"] == {question.id for question in held}
    assert not ids["rows", "train"] & ids["rows", "heldout"]
    assert ids["rows", "train"] | ids["rows", "heldout"] == ids["rows", "all"]
    assert len(ids["rows", "all"]) == len(PAPERS.read_text().splitlines())


def test_with_a_reward_the_tasks_own_score_is_reported_beside_it(command, tmp_path):
    (tmp_path / "half.py").write_text("score = lambda task, answer, root: root.score / 2")
    message, text = command("--policy", "oracle", "--n", 2, "--save",
                            tmp_path / "trees.jsonl", "--reward", tmp_path / "half.py")
    assert message is None and text.rstrip().endswith("reward: 0.500")
    trees = read_trees(tmp_path / "trees.jsonl", Question)
    assert [(tree.reward, tree.root.score) for tree in trees] == [(0.5, 1)] * 2


def test_a_checkpoint_runs_no_code_of_its_own(command, short_run, tmp_path):
    """Its task is a file: that has to be named."""
    model = tmp_path / "model"
    shutil.copytree(short_run / "final", model)
    (model / "task.py").write_text("raise SystemExit('it ran')")
    saved = json.loads((model / "rlm.json").read_text())
    (model / "rlm.json").write_text(json.dumps(saved | {"task": str(model / "task.py")}))
    flags = "--model", model, "--data", PAPERS, "--n", 1
    assert f"is a program, {model}/task.py: name it" in command(*flags)[0]
    with pytest.raises(ValueError, match="name it"):
        RLM(model).completion("q", "c")
    assert command(*flags, "--tasks", "evidence")[0] is None
    (model / "rlm.json").write_text(json.dumps(saved | {"task": "qa"}))
    assert command(*flags)[0] is None  # of tasks that are here the rows decide


# What the n-th tree of a question scores; None: the machine loses it.
@pytest.mark.parametrize("given, kind, n", [
    ([0, 0], "all 0 100%", 2), ([1, 1], "all 1 100%", 1), ([0.5, 0.5], "else alike", 1),
    ([0, 1], "mixed 100%", 2), ([None, 1], "all 1 100%", 1), ([None, None], "", 1)])
def test_what_grpo_would_see_is_true_of_any_scores(given, kind, n, command, tmp_path):
    """And no row is wider than 100 columns, nor is there a number that is none."""
    (tmp_path / "given.py").write_text(
        "import collections, tree\n"
        f"drawn = collections.defaultdict(lambda: iter({given}))\n"
        "def score(task, answer, root):\n"
        "    value = next(drawn[task.id])\n"
        "    if value is None:\n"
        "        raise tree.Unscored('a judge who says nothing ' * 9)\n"
        "    return value\n")
    message, text = command(
        "--policy", "oracle", "--n", n, "--samples", 2, "--reward", tmp_path / "given.py",
        "--html", tmp_path / "r.html")
    trees = data_of((tmp_path / "r.html").read_text())["trees"]
    assert len({tree["group"] for tree in trees}) == n == len(trees) / 2
    assert max(map(len, text.splitlines())) <= 100 and "nan" not in text
    if not kind:
        assert "no question could be scored" in message and "GRPO" not in text
        return
    assert message is None and kind in text
    learns = n if kind.startswith("mixed") else 0
    assert f"differ in score: {learns} of {n} here" in " ".join(text.split())
    assert ("easier questions" in text) == (not learns)


def test_against_saved_trees_each_question_is_paired_with_itself(command, tmp_path):
    ask = "--policy", "oracle", "--n", 3, "--lengths", "1k,2k"
    saved = tmp_path / f"{'long' * 20}.jsonl"
    assert command(*ask, "--samples", 2, "--save", saved)[0] is None
    trees = read_trees(saved, Question)
    trees[0].root.score, trees[1].root.score = 0.5, 0.0
    first, second = trees[:2], [replace(trees[2], failed="lost"), trees[3]]
    write_trees(saved, [*trees[4:], *first, *second])
    message, text = command(*ask, "--against", saved)
    *_, shorter, longer = " ".join(text.split()).split("rlm1 minus")
    assert message is None and max(map(len, text.splitlines())) <= 100
    assert "3 questions of requests 1000: +0.250 (95 %" in shorter
    assert "3 questions of requests 2000: +0.000 (95 %" in longer


@pytest.mark.parametrize("before, now, says", [
    ([], ["--n", 3], "2 of its 2 are among the 3"),
    ([], ["--seed", 1], "0 of its 2 are among the 2"),
    (["--methods", "rlm0,rlm1"], [], "several methods")])
def test_other_questions_or_several_methods_are_nothing_to_compare_with(
        before, now, says, command, tmp_path, monkeypatch):
    """Which is said before anything is asked."""
    ask, saved = ("--policy", "oracle", "--n", 2), tmp_path / "saved.jsonl"
    assert command(*ask, *before, "--save", saved)[0] is None
    monkeypatch.delattr(evaluation, "grow")
    message, text = command(*ask, *now, "--against", saved)
    assert says in message and "\n" not in message and not text


@pytest.mark.parametrize("args, says", [
    ([], "one of --model DIR"), (["--model", "/nowhere"], "/nowhere"),
    (["--policy", "oracle", "--tasks", "chess"], "no task 'chess'"),
    (["--model", "m", "--api", "u", "--api-model", "n"], "not both"),
    (["--policy", "oracle", "--data", "f", "--lengths", "2k"], "not for --data"),
    (["--model", "m", "--samples", "2", "--temperature", "0"], "are the same"),
    (["--policy", "oracle", "--against", "/nowhere"], "/nowhere")])
def test_bad_input_gives_one_line(args, says, command):
    message, _ = command(*args)
    assert says in message and "\n" not in message.strip()
