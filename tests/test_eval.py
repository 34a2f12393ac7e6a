"""Statistics, and the command line that resumes."""
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

import conftest
import eval as evaluation
import rlm
import tasks
from conftest import data_of
from repl import REPLError
from tasks import Task
from tasks.questions import heldout_tasks
from training.run import State
from training import scores
from tree import Node, Rollout, read_rollouts

DATA = Path(__file__).parent / "data" / "papers.jsonl"


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs eval.py with these arguments -> (its message or None, what it printed)."""
    def run(*args):
        message = conftest.command(evaluation, monkeypatch, *args)
        printed = capsys.readouterr()
        return printed.err if message == 2 else message, printed.out
    return run


def answers(path):
    """The lines of a file of --out, without the one of the settings."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()[1:]]


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
    a = {i: record(s + 0.1) for i, s in enumerate(base)} | {50: record(0.0, "lost")}
    b = {i: record(s) for i, s in enumerate(base)} | {50: record(1.0), 51: record(1.0)}
    cells = {("t", 1, "a"): a, ("t", 1, "b"): b, ("t", 2, "a"): {0: record(0.0)}}
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


# --- the command line ---------------------------------------------------------------------

def test_a_script_answers_every_kind_and_the_records_add_up(command, tmp_path):
    kinds = [name for name in tasks.NAMES if name not in ("deep", "qa")]
    message, text = command("--policy", "oracle", "--tasks", ",".join(kinds), "--lengths",
                            "2k,4000", "--n", 2, "--out", tmp_path / "r.jsonl",
                            "--save", tmp_path / "trees.jsonl")
    found = answers(tmp_path / "r.jsonl")
    assert message is None and [row["score"] for row in found] == [1.0] * 4 * len(kinds)
    table = [line.split() for line in text.splitlines()[1:]]
    lengths = [int(line[2].replace(",", "")) for line in table]
    assert [round(length, -3) for length in lengths] == [2000, 4000] * len(kinds)
    assert {line[1] for line in table} == {"rlm1"}
    # --save lists the trees in the order of the questions, --out as they end.
    found.sort(key=lambda row: (kinds.index(row["name"][0]), *row["name"][1:]))
    for row, tree in zip(found, read_rollouts(tmp_path / "trees.jsonl", Task), strict=True):
        nodes = list(tree.root.walk())
        said = [t for n in nodes for t in n.turns if t.role == "assistant"]
        assert (row["id"], row["nodes"]) == (tree.task.id, len(nodes))
        assert row["out"] == sum(len(turn.text) // 4 for turn in said)
        assert tree.task.context is None  # its seed makes it again


def test_a_teacher_can_answer_questions_that_training_may_see(command, tmp_path):
    ids = {}
    for split in ("train", "heldout"):
        for name, flags in (("generated", ["--tasks", "evidence", "--n", 12]),
                            ("rows", ["--data", DATA])):
            path = tmp_path / name
            assert command("--policy", "oracle", *flags, "--save", path,
                           "--split", split)[0] is None
            ids[name, split] = {r.task.id for r in read_rollouts(path, Task)}
    held = {task.id for task in heldout_tasks(12, tasks.load("evidence"))}
    assert ids["generated", "heldout"] == held and not ids["generated", "train"] & held
    assert not ids["rows", "train"] & ids["rows", "heldout"]
    every = ids["rows", "train"] | ids["rows", "heldout"]
    assert len(every) == len(DATA.read_text().splitlines())


def test_with_a_reward_the_tasks_own_score_is_reported_beside_it(command, tmp_path):
    (tmp_path / "half.py").write_text("score = lambda task, answer, root: root.score / 2")
    flags = ["--policy", "oracle", "--n", 2, "--out", tmp_path / "r.jsonl"]
    message, text = command(*flags, "--reward", tmp_path / "half.py")
    assert message is None and text.splitlines()[1].endswith("  own score 1.000")
    assert [(r["score"], r["own"]) for r in answers(tmp_path / "r.jsonl")] == [(0.5, 1)] * 2


def test_the_line_of_training_has_the_tasks_own_score(capsys):
    task = Task("t", "notes", "q", "context")
    rollout = Rollout(task, "0", Node(end="final", score=0.75), 0.5)
    run = SimpleNamespace(config=SimpleNamespace(seed=0), rlm_config=rlm.RLMConfig(),
                          state=State(), log=lambda row: None)
    scores.evaluate(run, lambda *_: [rollout], "validation", [task])
    assert "validation: score 0.500 (the task's own 0.750)  [" in capsys.readouterr().out


# --- a second start -----------------------------------------------------------------------

FLAGS = ["--policy", "oracle", "--tasks", "evidence,oolong", "--lengths", "2000", "--n", 3,
         "--methods", "rlm1,rlm0"]


def test_a_run_killed_anywhere_asks_only_what_is_missing_and_has_the_same_results(
        command, tmp_path, monkeypatch):
    """The file is cut at any byte, as a kill may leave it."""
    complete, part = tmp_path / "complete.jsonl", tmp_path / "part.jsonl"
    assert command(*FLAGS, "--out", complete)[0] is None
    whole = complete.read_bytes()
    cut_at = random.Random(0).randrange(whole.index(b"\n") + 1, len(whole))
    part.write_bytes(whole[:cut_at])
    kept = whole[:cut_at].count(b"\n") - 1

    asked, real = [], evaluation.answer

    async def note(method, task, *args, **more):
        asked.append((task.kind, method, task.id))
        return await real(method, task, *args, **more)

    monkeypatch.setattr(evaluation, "answer", note)
    assert command(*FLAGS, "--out", part, "--html", tmp_path / "r.html")[0] is None
    assert len(asked) == 12 - kept == len(set(asked))
    assert len(data_of((tmp_path / "r.html").read_text())["trees"]) == 12

    def results(path):
        return sorted((row["name"], row["id"], row["score"]) for row in answers(path))

    assert results(part) == results(complete)


def test_the_file_of_another_command_is_refused_and_left_as_it_is(command, tmp_path):
    path = tmp_path / "r.jsonl"
    assert command("--policy", "oracle", "--n", 1, "--out", path)[0] is None
    before = path.read_bytes()
    message, _ = command("--policy", "oracle", "--n", 2, "--out", path)
    assert "written by another command" in message and "\n" not in message
    assert path.read_bytes() == before


def test_a_repl_that_cannot_start_is_no_wrong_answer(command, tmp_path, monkeypatch):
    async def refuse(*args, **more):
        raise REPLError("no process left")

    flags = ["--policy", "oracle", "--n", 2, "--out", tmp_path / "r.jsonl",
             "--html", tmp_path / "r.html"]
    with monkeypatch.context() as patch:
        patch.setattr(rlm, "rollout", refuse)
        message, text = command(*flags)
    assert "no question could be scored" in message
    assert text.splitlines()[1].split()[:5] == ["notes", "rlm1", "-", "0", "2"]
    assert "failed: REPLError('no process left')" in text
    message, text = command(*flags)  # what failed is asked again
    assert message is None and text.splitlines()[1].split()[3:6] == ["2", "0", "1.000"]


@pytest.mark.parametrize("args, says", [
    ([], "needs --model DIR"), (["--model", "/nowhere"], "/nowhere"),
    (["--policy", "oracle", "--tasks", "chess"], "no task 'chess'"),
    (["--policy", "oracle", "--tasks", __file__], "test_eval.py has no function oracle"),
    (["--model", "m", "--api", "u", "--api-model", "n"], "not allowed with"),
    (["--policy", "oracle", "--api", "u", "--api-model", "n"], "asks no server"),
    (["--policy", "oracle", "--out", __file__], "was not written by")])
def test_bad_input_gives_one_line(args, says, command):
    message, _ = command(*args)
    assert says in message and "\n" not in message.strip()
