"""Statistics, the library that training uses, the journal, and the command line."""
import asyncio
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
import rlm
import tasks
from conftest import data_of
from lab import compare
from repl import REPLError
from rlm import RLMConfig
from tasks import Task
from tokenizer import Tokenizer
from tree import Completion, Node, Rollout, Turn, read_rollouts

DATA = Path(__file__).parent / "data" / "papers.jsonl"

MY_TASK = '''
def make(rng, tokens=None, heldout=False):
    low = 50 if heldout else 0
    a, b = rng.randrange(low, low + 50), rng.randrange(100)
    return f"What is {a} + {b}?", "numbers " * 40, a + b


def score(task, answer):
    return float(answer == task.answer)


def oracle(task, node):
    return f"```repl\\nFINAL({task.answer})\\n```"
'''
MY_REWARDS = '''
import asyncio


async def score(task, answer):
    await asyncio.sleep(0)
    return 0.25


def half(task, answer):
    return 0.5


def none(task, answer):
    return None


def broken(task, answer):
    return 1 / 0
'''


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs eval.py with these arguments -> (its message or None, what it printed)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
        message = None
        try:
            evaluation.main()
        except SystemExit as stop:
            message = stop.code
        return message, capsys.readouterr().out
    return run


@pytest.fixture
def tiny(short_run):
    """A checkpoint with random weights."""
    return str(short_run / "init")


def load(path):
    return json.loads(Path(path).read_text())


# --- statistics ---------------------------------------------------------------------------


def record(score, failed="", **more):
    counts = dict.fromkeys("in reused out calls nodes depth root errors".split(), 2)
    return {"score": score, "failed": failed, "end": "failed" if failed else "final",
            "answered": not failed,
            "seen": None, "seconds": 1.0, "context": 100, "dollars": None, **counts, **more}


def test_failures_stay_out_of_every_mean():
    records = [record(1.0, seconds=1.0),
               record(0.0, seconds=3.0, end="turns", answered=False),
               record(0.0, "lost", seconds=99.0, calls=50)]
    row = evaluation.summary(records, "evidence", 8000, "rlm1")
    assert (row["n"], row["failed"], row["score"], row["unanswered"]) == (2, 1, 0.5, 1)
    assert (row["p50"], row["p95"], row["calls"]) == (2.0, pytest.approx(2.9), 2.0)
    assert row["ends"] == {"final": 1, "turns": 1} and row["dollars"] is None
    lost = evaluation.summary(records[2:], "evidence", 8000, "rlm1")
    assert (lost["n"], lost["score"], lost["low"]) == (0, None, None)


def test_a_price_unknown_for_one_question_is_unknown_for_the_mean():
    known = [record(1.0, dollars=0.5), record(1.0, dollars=1.5)]
    assert evaluation.summary(known, "t", 1, "m")["dollars"] == 1.0
    assert evaluation.summary([*known, record(1.0)], "t", 1, "m")["dollars"] is None


def test_differences_are_paired_and_skip_what_either_lost():
    """Two methods that differ by 0.1 on every question: the paired interval is a point,
    however much the questions differ."""
    rng = random.Random(0)
    base = [rng.random() * 0.9 for _ in range(50)]
    a = {i: record(s + 0.1) for i, s in enumerate(base)} | {50: record(0.0, "lost")}
    b = {i: record(s) for i, s in enumerate(base)} | {50: record(1.0), 51: record(1.0)}
    cells = {("t", 1, "a"): a, ("t", 1, "b"): b, ("t", 2, "a"): {0: record(0.0)}}
    d, = evaluation.differences(cells)
    assert (d["a"], d["b"], d["n"]) == ("a", "b", 50)
    assert d["difference"] == pytest.approx(0.1)
    unseen = 3.8415 / 53.8415  # such a share of all questions may differ otherwise
    assert [d["low"], d["high"]] == pytest.approx(
        [0.1 - 1.1 * unseen, 0.1 + 0.9 * unseen], abs=1e-4)


@pytest.mark.parametrize("scores, low, high", [
    ([1.0] * 4, 0.5101, 1.0), ([0.0] * 4, 0.0, 0.4899), ([1.0], 0.2065, 1.0),
    ([1.0] * 9 + [0.0], 0.5958, 0.9821),  # Wilson's of 9 of 10
    ([0.5] * 4, 0.2551, 0.7449), ([1.0] * 128, 0.9709, 1.0)])
def test_an_interval_holds_at_the_edges(scores, low, high):
    assert evaluation.interval(scores) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("n", [4, 12, 128])
@pytest.mark.parametrize("draw", [
    lambda rng: float(rng.random() < 0.95), lambda rng: rng.random(),
    lambda rng: 1.0 if rng.random() < 0.9 else rng.random()])
def test_intervals_cover_the_mean(draw, n):
    rng = random.Random(0)
    mean = sum(draw(rng) for _ in range(20_000)) / 20_000
    found = [evaluation.interval([draw(rng) for _ in range(n)]) for _ in range(60)]
    assert sum(low <= mean <= high for low, high in found) >= 52


def test_seconds_are_a_questions_own_and_not_those_in_a_queue(monkeypatch):
    """Two requests, one after another, of 2 and 3 s; the first waited for 40 s before."""
    clock = iter([100.0, 142.0, 150.0, 153.0])
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    waits = iter([40.0, 0.0])

    async def policy(node, max_tokens, key):
        usage = {"prompt": 1, "reused": 0, "sampled": 1, "waited": next(waits)}
        return Completion("nothing", usage=usage)

    config = replace(RLMConfig(), max_turns=2)
    task = tasks.make("niah", random.Random(0))
    record, _ = asyncio.run(evaluation.ask("rlm1", task, policy, None, config, ()))
    assert record["seconds"] == 5.0


def test_seconds_of_calls_side_by_side_count_once():
    assert evaluation.covered([(5.0, 9.0), (0.0, 2.0), (1.0, 3.0), (6.0, 7.0)]) == 7.0
    assert evaluation.covered([]) == 0.0


def test_the_interval_of_a_difference_covers_it():
    hits = 0
    for seed in range(200):
        rng = random.Random(seed)
        a = {i: record(float(rng.random() < 0.6)) for i in range(60)}
        b = {i: record(float(rng.random() < 0.4)) for i in range(60)}
        d, = evaluation.differences({("t", 1, "a"): a, ("t", 1, "b"): b})
        hits += d["low"] <= 0.2 <= d["high"]
    assert 180 <= hits <= 200


# --- what training uses -------------------------------------------------------------------


def test_ranks_that_share_the_questions_get_the_row_of_one(tiny):
    """The second of two ranks; `gather` brings what the first one found."""
    tokenizer, config = Tokenizer.from_pretrained(tiny), RLMConfig.load(f"{tiny}/rlm.json")
    questions = evaluation.heldout_tasks(5)

    async def policy(node, max_tokens, key):
        task = questions[key[1]]
        return await tasks.scripted(tasks.oracle, task, tokenizer)(node, max_tokens, key)

    shares = []

    def run(mine, gather):
        row, trees = evaluation.evaluate(questions, policy, tokenizer, config, mine=mine,
                                         gather=gather)
        timed = ("p50", "p95")
        return {k: v for k, v in row.items() if k not in timed}, [t.task.id for t in trees]

    whole = run(slice(None), lambda part: shares.append(part) or [part])
    first = {i: answer for i, answer in shares[0].items() if i % 2 == 0}
    assert run(slice(1, None, 2), lambda part: [first, part]) == whole
    assert whole[1] == [task.id for task in questions]


def test_an_evaluation_that_lost_every_tree_raises(tiny):
    async def policy(node, max_tokens, key):
        raise OSError("no memory")

    tokenizer = Tokenizer.from_pretrained(tiny)
    with pytest.raises(REPLError, match="no memory"):
        evaluation.evaluate(evaluation.heldout_tasks(2), policy, tokenizer, RLMConfig())


@pytest.mark.parametrize("name, calls", [("", 2), ("final", 1), ("ends_run", 1)])
def test_an_exception_says_whether_another_try_is_of_use(name, calls):
    asked, error = [], RuntimeError("no")
    setattr(error, name or "nothing", True)

    async def policy(node, max_tokens, key):
        asked.append(key)
        raise error

    task = evaluation.heldout_tasks(1)[0]
    question = evaluation.ask("rlm1", task, policy, None, RLMConfig(), ())
    if name == "ends_run":
        with pytest.raises(RuntimeError):
            asyncio.run(question)
    else:
        record, rollout = asyncio.run(question)
        assert "no" in record["failed"] == rollout.failed and rollout.reward == 0
    assert len(asked) == calls


def test_held_out_questions_of_several_times_the_length():
    """Around four and sixteen times, and no two with the same number of documents."""
    for times in (4, 16):
        longer = evaluation.heldout_tasks(30, times=times)
        usual = tasks.load("notes").TOKENS
        sizes = [len("".join(task.context.values())) / 4 / usual / times for task in longer]
        assert 0.7 < min(sizes) < 0.9 < sum(sizes) / 30 < 1.1 < max(sizes) < 1.3
        assert len({len(task.context) for task in longer}) > 20
    with pytest.raises(ValueError, match="deep tasks have one size"):
        evaluation.heldout_tasks(1, "deep", times=4)
    with pytest.raises(ValueError, match="100,000 tokens"):  # train.py leaves these out
        evaluation.heldout_tasks(9, "pairs", times=16)


# --- the command line ---------------------------------------------------------------------


def test_a_script_needs_no_model_and_answers_every_kind(command, tmp_path):
    kinds = [name for name in tasks.NAMES if name not in ("deep", "definitions")]
    message, _ = command("--policy", "oracle", "--tasks", ",".join(kinds), "--lengths",
                         "2000,4000", "--n", 2, "--json", tmp_path / "r.json")
    data = load(tmp_path / "r.json")
    assert message is None and len(data["questions"]) == 2 * 2 * len(kinds)
    assert {row["score"] for row in data["rows"]} == {1.0}
    assert {row["method"] for row in data["rows"]} == {"rlm1"}


def test_counts_of_a_question_add_up(command, tmp_path):
    command("--policy", "oracle", "--tasks", "niah", "--lengths", "2000", "--n", 2,
            "--json", tmp_path / "r.json", "--save", tmp_path / "r.jsonl")
    questions = load(tmp_path / "r.json")["questions"]
    assert [q["task"] for q in questions] == ["niah"] * 2
    for q, r in zip(questions, read_rollouts(tmp_path / "r.jsonl", Task)):
        nodes = list(r.root.walk())
        said = [t for n in nodes for t in n.turns if t.role == "assistant"]
        assert (q["id"], q["nodes"], q["calls"]) == (r.task.id, len(nodes), len(said))
        assert q["out"] == sum(len(t.text) // 4 for t in said)
        assert q["depth"] == max(n.depth for n in nodes) and q["score"] == r.reward
        assert r.task.context is None  # its seed makes it again


def test_a_model_answers_and_its_page_has_the_gaps_of_its_tokens(command, tiny, tmp_path):
    message, text = command("--model", tiny, "--n", 2, "--html", tmp_path / "r.html")
    assert message is None and "2 of 2 gave no answer" in text
    page = (tmp_path / "r.html").read_text()
    assert "temperature" not in page.partition("<details")[0]  # it is as usual
    root = data_of(page)["trees"][0]["nodes"][0]
    gaps = [gap for turn in root["t"] for gap in turn.get("g", ())]
    assert gaps and max(map(abs, gaps)) < 1e-3


def test_saved_trees_encode_to_the_ids_of_their_rollout(command, tmp_path, tiny):
    """A teacher in the student's harness: the saved text encodes to the rollout's ids."""
    assert command("--policy", "oracle", "--model", tiny, "--n", 4,
                   "--save", tmp_path / "t.jsonl")[0] is None
    tokenizer = Tokenizer.from_pretrained(tiny)
    for r in read_rollouts(tmp_path / "t.jsonl", Task):
        before = [(n.ids, n.mask) for n in r.root.walk()]
        for node in r.root.walk():
            bare = [replace(t, ids=(), logprobs=t.logprobs and ()) for t in node.turns]
            node.turns = tokenizer.encode_turns(bare)
        assert [(n.ids, n.mask) for n in r.root.walk()] == before
        assert any(sum(n.mask) for n in r.root.walk())


def test_a_teacher_can_answer_questions_that_training_may_see(command, tmp_path):
    def terms(questions):
        return {re.search('"(.*?)"', task.query)[1] for task in questions}

    held = terms(evaluation.heldout_tasks(128, "evidence"))
    for split, path in (("train", tmp_path / "a"), ("heldout", tmp_path / "b")):
        assert command("--policy", "oracle", "--tasks", "evidence", "--n", 12,
                       "--save", path, "--split", split)[0] is None
        found = terms(r.task for r in read_rollouts(path, Task))
        assert found <= held if split == "heldout" else not found & held
    names = []
    for split in ("train", "heldout"):
        path = tmp_path / f"{split}.jsonl"
        assert command("--policy", "keyword", "--data", DATA, "--split", split,
                       "--save", path)[0] is None
        names.append({r.task.id for r in read_rollouts(path, Task)})
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == len(DATA.read_text().splitlines())
    # Without --split it is those that training kept apart, and that is said.
    for flags, found in ((), names[1]), (("--split", "all"), names[0] | names[1]):
        path = tmp_path / f"rows{len(flags)}.jsonl"
        message, said = command("--policy", "keyword", "--data", DATA, "--save", path,
                                *flags)
        assert message is None
        assert {r.task.id for r in read_rollouts(path, Task)} == found
        assert ("the 1 held-out rows of 6" in said) == (not flags)


# --- files of others ----------------------------------------------------------------------


def test_a_task_from_a_file_is_evaluated_with_its_own_oracle(command, tmp_path):
    (tmp_path / "sums_of_two.py").write_text(MY_TASK)
    task = tmp_path / "sums_of_two.py"
    message, _ = command("--policy", "oracle", "--tasks", f"{task},niah", "--n", 3,
                         "--json", tmp_path / "r.json")
    rows = load(tmp_path / "r.json")["rows"]
    assert message is None
    scores = [(row["task"], row["score"]) for row in rows]
    assert scores == [("sums_of_two", 1), ("niah", 1)]
    made = evaluation.heldout_tasks(3, str(task))
    assert [q["id"] for q in load(tmp_path / "r.json")["questions"]][:3] == [
        question.id for question in made]  # the held-out questions of training
    message, _ = command("--policy", "keyword", "--tasks", task)
    assert "has no function keyword" in message


@pytest.mark.parametrize("name, score", [("", 0.25), (":half", 0.5)])
def test_a_reward_from_a_file_scores_in_place_of_the_task(name, score, command, tmp_path):
    (tmp_path / "rewards.py").write_text(MY_REWARDS)
    assert command("--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json",
                   "--reward", f"{tmp_path / 'rewards.py'}{name}")[0] is None
    assert load(tmp_path / "r.json")["rows"][0]["score"] == score
    message, _ = command("--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json",
                         "--resume")
    assert "line 1: cannot be resumed: it was made with files" in message


@pytest.mark.parametrize("name, says", [(":none", "returned None"),
                                        (":broken", "in broken: ZeroDivisionError")])
def test_a_mistake_in_a_reward_ends_the_run_and_names_the_file(name, says, command,
                                                               tmp_path):
    (tmp_path / "rewards.py").write_text(MY_REWARDS)
    message, _ = command("--policy", "oracle", "--n", 2, "--reward",
                         f"{tmp_path / 'rewards.py'}{name}")
    assert "rewards.py line" in message and says in message and "\n" not in message


def test_lengths_may_be_written_short_and_mean_the_same_everywhere(command, tiny, tmp_path):
    """The table's length is characters / 4: for a script, a model and in training."""
    path = tmp_path / "r.json"
    assert command("--policy", "oracle", "--tasks", "niah", "--lengths", "2k,4000",
                   "--n", 1, "--json", path)[0] is None
    assert [round(row["length"], -2) for row in load(path)["rows"]] == [2000, 4000]
    lengths = []
    for who in (["--policy", "oracle"], ["--policy", "oracle", "--model", tiny]):
        assert command(*who, "--n", 3, "--json", tmp_path / f"{len(who)}.json")[0] is None
        lengths += [row["length"] for row in load(tmp_path / f"{len(who)}.json")["rows"]]
    tokenizer, config = Tokenizer.from_pretrained(tiny), RLMConfig.load(f"{tiny}/rlm.json")
    questions = evaluation.heldout_tasks(3)

    async def policy(node, max_tokens, key):
        return await tasks.scripted(tasks.oracle, questions[key[1]], tokenizer)(
            node, max_tokens, key)

    row, _ = evaluation.evaluate(questions, policy, tokenizer, config)
    assert lengths == [row["length"]] * 2
    characters = [len(json.dumps(task.context)) for task in questions]
    assert row["length"] == pytest.approx(sum(characters) / 12, abs=1)


def test_the_keyword_search_answers_every_kind_also_deep(command, tmp_path):
    message, text = command("--policy", "keyword", "--tasks", "deep,niah", "--n", 2,
                            "--json", tmp_path / "r.json")
    assert message is None
    assert [(row["failed"], row["score"]) for row in load(tmp_path / "r.json")["rows"]] == [
        (0, 0.0), (0, 1.0)]


def test_a_script_that_crashes_is_no_failure_of_the_machine(command, monkeypatch):
    def broken(task, node):
        return [][0]

    monkeypatch.setattr("tasks.niah.keyword", broken)
    with pytest.raises(IndexError):
        command("--policy", "keyword", "--tasks", "niah", "--n", 2)


# --- the journal --------------------------------------------------------------------------


def is_json(line):
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_anywhere_resumes_to_the_same_results_asking_only_what_is_missing(
        seed, command, tmp_path, monkeypatch):
    """The journal is cut at any byte, as a kill may leave it."""
    flags = ["--policy", "oracle", "--tasks", "niah,code", "--lengths", "2000", "--n", 3,
             "--methods", "rlm1,rlm0"]
    complete, part = tmp_path / "complete.json", tmp_path / "part.json"
    assert command(*flags, "--json", complete)[0] is None
    journal = Path(f"{complete}.journal").read_bytes()
    cut_at = random.Random(seed).randrange(journal.index(b"\n") + 1, len(journal))
    Path(f"{part}.journal").write_bytes(journal[:cut_at])
    kept = {tuple(json.loads(row)["done"])
            for row in journal[:cut_at].splitlines()[1:] if is_json(row)}

    asked, real = [], evaluation.ask

    async def note(method, task, *args, **more):
        asked.append((task.kind, method, task.id))
        return await real(method, task, *args, **more)

    monkeypatch.setattr(evaluation, "ask", note)
    assert command(*flags, "--json", part, "--resume")[0] is None
    assert len(asked) in (12 - len(kept), 13 - len(kept))  # the cut may be before a "\n"
    assert len(set(asked)) == len(asked)

    def results(path):
        return sorted((q["task"], q["method"], q["i"], q["id"], q["score"])
                      for q in load(path)["questions"])

    assert results(part) == results(complete)


def test_an_interrupted_run_writes_what_it_has(command, tmp_path, monkeypatch):
    real, asked = evaluation.ask, []

    async def interrupted(*args, **more):
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return await real(*args, **more)

    monkeypatch.setattr(evaluation, "ask", interrupted)
    monkeypatch.setattr(compare, "CHARACTERS", 1)  # one question at a time
    message, _ = command("--policy", "oracle", "--n", 6, "--json", tmp_path / "r.json",
                         "--html", tmp_path / "r.html", "--save", tmp_path / "r.jsonl")
    assert "interrupted" in message and "3 of 6" in message and "--resume" in message
    assert len(load(tmp_path / "r.json")["questions"]) == 3
    assert len(read_rollouts(tmp_path / "r.jsonl", Task)) == 3
    assert "not finished" in (tmp_path / "r.html").read_text()


def test_more_questions_lengths_and_methods_can_be_added_to_a_run(command, tmp_path):
    flags = ["--policy", "oracle", "--tasks", "niah", "--json", tmp_path / "r.json"]
    assert command(*flags, "--lengths", "2000", "--n", 2)[0] is None
    first = load(tmp_path / "r.json")["questions"]
    assert command(*flags, "--lengths", "2000,4000", "--n", 3, "--methods", "rlm1,rlm0",
                   "--resume")[0] is None
    data = load(tmp_path / "r.json")
    assert len(data["questions"]) == 12 and len(data["differences"]) == 2
    assert all(q in data["questions"] for q in first)  # with their seconds: not asked again


def test_results_of_another_configuration_are_not_mixed_in(command, tmp_path):
    flags = ["--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json"]
    path = tmp_path / "r.json.journal"
    assert command(*flags)[0] is None
    before = path.read_bytes()
    for more, says in (("--seed 1", "seed 0"), ("--policy keyword", "'oracle'"),
                       ("--window 500", "window"), ("--children keyword", "children")):
        message, _ = command(*flags, *more.split(), "--resume")
        assert "cannot be resumed" in message and says in message and "\n" not in message
    message, _ = command(*flags)  # nor is a journal thrown away
    assert "2 lines of an earlier run" in message and "--resume" in message
    assert path.read_bytes() == before

    path.write_bytes(before.replace(b'{"done"', b'{"dome"', 1))
    assert "cannot be resumed" in command(*flags, "--resume")[0]
    path.write_bytes(b"what\n" + before)
    assert "line 1: cannot be resumed" in command(*flags, "--resume")[0]


def test_a_repl_that_cannot_start_is_no_wrong_answer(command, tmp_path, monkeypatch):
    async def refuse(*args, **more):
        raise REPLError("no process left")

    flags = ["--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json"]
    with monkeypatch.context() as patch:
        patch.setattr(rlm, "rollout", refuse)
        message, text = command(*flags)
    assert "no question could be scored" in message and "2 failed" in text
    assert "no process left" in text
    assert command(*flags, "--resume")[0] is None  # what failed is tried again
    row, = load(tmp_path / "r.json")["rows"]
    assert (row["n"], row["failed"], row["score"]) == (2, 0, 1.0)


# --- bad input ----------------------------------------------------------------------------

ORACLE = ["--policy", "oracle"]
FILE = [*ORACLE, "--data", DATA]


@pytest.mark.parametrize("args, says", [
    ([], "--model DIR is needed"),
    (["--policy", "clever"], "no policy 'clever'"),
    ([*ORACLE, "--methods", "rlm9"], "no method 'rlm9'; there are direct"),
    ([*ORACLE, "--methods", "direct"], "a script writes code"),
    ([*ORACLE, "--tasks", "chess"], "no task 'chess'; there are: notes, evidence"),
    ([*ORACLE, "--tasks", "chess.py"], "chess.py: no such file"),
    ([*ORACLE, "--tasks", "deep", "--lengths", "2000"], "deep tasks have one size"),
    ([*ORACLE, "--lengths", "8x"], "--lengths 8x: it is whole numbers, as 8000,128k,1m"),
    ([*ORACLE, "--json", "r.json", "--resume"], "r.json.journal: there is nothing"),
    ([*ORACLE, "--tasks", "pairs", "--lengths", "90000000"], "1,000 to 100,000 tokens"),
    ([*ORACLE, "--n", "0"], "--n must be above 0"),
    ([*ORACLE, "--resume"], "--resume needs"),
    ([*ORACLE, "--reward", "/nowhere.py"], "/nowhere.py: no such file"),
    (["--policy", "keyword", "--data", DATA, "--split", "all", "--n", "99"], "holds only"),
    (["--policy", "keyword", "--data", DATA, "--n", "2"], "holds only 1"),
    ([*ORACLE, "--split", "all"], "--split all is for --data"),
    (FILE, "the oracle knows"),
    ([*FILE, "--lengths", "8000"], "--lengths is for generated"),
    (["--policy", "keyword", "--data", DATA, "--tasks", "hop"], "line 1: lacks field"),
    (["--policy", "keyword", "--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ([*ORACLE, "--json", "/nowhere/r.json"], "/nowhere/r.json"),
    ([*ORACLE, "--html", "/nowhere/r.html"], "/nowhere/r.html"),
    ([*ORACLE, "--save", "/"], "cannot be written"),
    ([*ORACLE, "--json", "/proc/r.json"], "/proc/r.json"),
    (["--api", "http://localhost:1"], "--api-model"),
    (["--api", "localhost", "--api-model", "m"], "is no http"),
    (["--policy", "api"], "needs --api URL"),
    (["--policy", "keyword", "--data", DATA, "--tasks", "hop,niah"], "of one kind"),
    ([*ORACLE, "--api", "http://x", "--api-model", "m"], "neither root nor children"),
    (["--api", "http://x", "--api-model", "m", "--budget-dollars", "1"], "needs --price"),
    (["--api", "http://x", "--api-model", "m", "--price", "cheap"], "--price cheap"),
    (["--model", "/nowhere"], "/nowhere"),
])
def test_bad_input_gives_one_line(args, says, command):
    message, _ = command(*args)
    assert isinstance(message, str) and says in message and "\n" not in message


def test_the_gaps_of_a_small_model_are_computed_with_one_thread():
    seen = []

    class Model:
        device = "cpu"

        def parameters(self):
            return [torch.zeros(3)]

        def logprobs(self, ids, mask):
            seen.append(torch.get_num_threads())
            return torch.tensor([-1.5]), None

    root = Node()
    root.add(Turn("user", "q", (1, 2)))
    root.add(Turn("assistant", "a", (3,), (-1.0,)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        gaps = evaluation.gaps(Model(), [Rollout(None, "", root, 1.0)])
        assert gaps == {root: [-0.5]} and seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
