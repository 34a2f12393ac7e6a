"""Statistics, and the command line."""
import json
import random
import shutil

import pytest

import conftest
import eval as evaluation
import tasks
from ask import RLM
from conftest import PAPERS, data_of
from repl import REPLError
from tasks import Task
from tasks.questions import heldout_tasks, read, split
from training import scores
from tree import read_rollouts


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs eval.py with these arguments -> (its message or None, what it printed)."""
    def run(*args):
        message = conftest.command(evaluation, monkeypatch, *args)
        printed = capsys.readouterr()
        return printed.err if message == 2 else message, printed.out
    return run


# --- statistics ---------------------------------------------------------------------------

def record(score, failed="", seconds=1.0, end="final"):
    return {"score": score, "failed": failed, "end": end, "seconds": seconds,
            "context": 100, "in": 2, "out": 2, "nodes": 2}


def test_failures_stay_out_of_every_mean():
    records = [record(1.0), record(0.0, seconds=3.0, end="turns"), record(0.0, "lost", 99)]
    row = scores.summary(records, "evidence", None, "rlm1")
    assert (row["n"], row["failed"], row["score"], row["length"]) == (2, 1, 0.5, 100)
    assert row["seconds"] == 2.0 and row["ends"] == {"final": 1, "turns": 1}
    lost = scores.summary(records[2:], "evidence", 8000, "rlm1")
    assert (lost["n"], lost["score"], lost["low"]) == (0, None, None)


def test_differences_are_paired_and_skip_what_either_lost():
    """Two methods that differ by 0.1 on every question: the paired interval is a point,
    however much the questions differ."""
    rng = random.Random(0)
    base = [rng.random() * 0.9 for _ in range(50)]
    a = [*(record(s + 0.1) for s in base), record(0.0, "lost"), record(1.0)]
    b = [*(record(s) for s in base), record(1.0), record(0.0, "lost")]
    cells = {("t", 1, "a"): a, ("t", 1, "b"): b, ("t", 2, "a"): [record(0.0)]}
    d, = scores.differences(cells)
    assert (d["a"], d["b"], d["n"]) == ("a", "b", 50)
    assert d["difference"] == pytest.approx(0.1)
    unseen = 3.8415 / 53.8415  # such a share of all questions may differ otherwise
    assert [d["low"], d["high"]] == pytest.approx(
        [0.1 - 1.1 * unseen, 0.1 + 0.9 * unseen], abs=1e-4)


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
    trees = read_rollouts(tmp_path / "trees.jsonl", Task)
    assert message is None and [tree.reward for tree in trees] == [1.0] * 8
    assert len(data_of((tmp_path / "r.html").read_text())["trees"]) == 8
    table = [line.replace(",", "").split() for line in text.splitlines()[1:]]
    assert [row[0] for row in table] == ["requests"] * 2 + ["evidence"] * 2
    assert {row[1] for row in table} == {"rlm1"}
    assert [round(int(row[2]), -3) for row in table] == [2000, 4000] * 2
    for row, i in zip(table, range(0, 8, 2)):
        pair = trees[i:i + 2]
        nodes = [node for tree in pair for node in tree.root.walk()]
        said = [t for n in nodes for t in n.turns if t.role == "assistant"]
        assert float(row[10]) == len(nodes) / 2
        assert int(row[9]) == round(sum(len(turn.text) // 4 for turn in said) / 2)
        assert pair[0].task.context is None  # its seed makes it again


def test_a_teacher_can_answer_questions_that_training_may_see(command, tmp_path):
    ids = {}
    for side in ("train", "heldout"):
        for name, flags in (("generated", ["--tasks", "evidence", "--n", 12]),
                            ("rows", ["--data", PAPERS])):
            path = tmp_path / name
            assert command("--policy", "oracle", *flags, "--save", path,
                           "--split", side)[0] is None
            ids[name, side] = {r.task.id for r in read_rollouts(path, Task)}
    held = {task.id for task in heldout_tasks(12, tasks.load("evidence"))}
    assert ids["generated", "heldout"] == held and not ids["generated", "train"] & held
    held = split(read(PAPERS, tasks.load("evidence")))[1]  # as a run splits them
    assert ids["rows", "heldout"] == {task.id for task in held}
    assert not ids["rows", "train"] & ids["rows", "heldout"]
    every = ids["rows", "train"] | ids["rows", "heldout"]
    assert len(every) == len(PAPERS.read_text().splitlines())


def test_with_a_reward_the_tasks_own_score_is_reported_beside_it(command, tmp_path):
    (tmp_path / "half.py").write_text("score = lambda task, answer, root: root.score / 2")
    message, text = command("--policy", "oracle", "--n", 2, "--save",
                            tmp_path / "trees.jsonl", "--reward", tmp_path / "half.py")
    assert message is None and text.splitlines()[1].endswith("  own score 1.000")
    trees = read_rollouts(tmp_path / "trees.jsonl", Task)
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


def test_a_repl_that_cannot_start_is_no_wrong_answer(command, monkeypatch):
    keys = []

    async def refuse(task, policy, tokenizer, config, key):
        keys.append(key)
        raise REPLError("no process left")

    monkeypatch.setattr(evaluation, "rollout", refuse)
    message, text = command("--policy", "oracle", "--n", 2)
    assert "no question could be scored" in message
    assert text.splitlines()[1].split()[:5] == ["requests", "rlm1", "-", "0", "2"]
    assert "failed: REPLError('no process left')" in text
    assert len(keys) == 4 and len(set(keys)) == 2  # each question is tried twice


@pytest.mark.parametrize("args, says", [
    ([], "one of --model DIR"), (["--model", "/nowhere"], "/nowhere"),
    (["--policy", "oracle", "--tasks", "chess"], "no task 'chess'"),
    (["--policy", "oracle", "--tasks", __file__], "test_eval.py has no function oracle"),
    (["--model", "m", "--api", "u", "--api-model", "n"], "not both"),
    (["--policy", "oracle", "--api", "u", "--api-model", "n"], "asks no server"),
    (["--policy", "oracle", "--data", "f", "--lengths", "2k"], "not for --data")])
def test_bad_input_gives_one_line(args, says, command):
    message, _ = command(*args)
    assert says in message and "\n" not in message.strip()
