"""Methods, statistics, the journal, and the command line without a server."""
import asyncio
import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import eval as evaluation
from lab import methods
import rlm
from repl import REPLError
import tasks
import train
import warmup
from lab.methods import answer, bm25, cut, flat, rlm_config, sentences
from rlm import RLMConfig
from tasks import Task
from tokenizer import Tokenizer
from tree import Completion, read_rollouts

DATA = Path(__file__).parent / "data" / "papers.jsonl"
WORDS = [w + str(i) for i in range(40) for w in ("al", "be", "ga", "de")]


def block(code):
    return f"```repl\n{code}\n```"


def ask(name, task, says, tokenizer=None, **config):
    """The tree of a method with a policy that says `says(node)`."""
    async def policy(node, max_tokens, key):
        text = says(node)
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn] if tokenizer else []
        return Completion(text, tuple(ids), (0.0,) * len(ids))
    return asyncio.run(answer(name, task, policy, tokenizer, RLMConfig(**config), ("k",)))


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.train([rlm.FULL, methods.READER, " ".join(WORDS)], 600)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a script's main with these arguments -> (its message or None, what it printed)."""
    def run(*args, module=evaluation):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
        message = None
        try:
            module.main()
        except SystemExit as stop:
            message = stop.code
        return message, capsys.readouterr().out
    return run


# --- methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", ["direct", "retrieval", "compaction"])
@pytest.mark.parametrize("size", [1, 300, 20_000])
def test_a_baseline_fills_the_window_and_never_exceeds_it(name, with_ids, size, tiny):
    text = " ".join(random.Random(size).choices(WORDS, k=size))
    task = Task("t", "question", "Where is al1?", {"a": text, "b": text[:50]})
    root, seen = ask(name, task, lambda node: "notes", tiny if with_ids else None,
                     window=400, turn_tokens=60)
    whole = flat(task.context)
    for node in root.walk():
        prompt = node.turns[:2]
        used = (sum(len(t.ids) for t in prompt) if with_ids
                else sum(len(t.text) for t in prompt) // 4)
        assert used <= 340
    if name == "direct":
        said = root.turns[1].text
        cut_ = re.search(r"first ([\d,]+) of its ([\d,]+) characters", said)
        if seen == 1:
            assert whole in said and not cut_
        else:  # the prompt says how much is missing, and only little room is wasted
            n, total = (int(v.replace(",", "")) for v in cut_.groups())
            assert (n, total) == (round(seen * len(whole)), len(whole))
            assert whole[:n] in said and used > 300
    if name == "compaction":  # every character is read, once and in order
        parts = [n.turns[1].text.partition("\nText:\n")[2] for n in root.children]
        assert "".join(parts) == whole and seen == 1
        assert ["notes" in n.turns[1].text for n in root.children] == [False] + [True] * (
            len(parts) - 1)


def test_compaction_stops_at_the_time_of_a_tree_and_says_how_much_it_read():
    task = Task("t", "question", "?", "word " * 4000)
    root, seen = ask("compaction", task, lambda node: "n", window=400, turn_tokens=60, seconds=1e-9)
    assert (root.end, root.children, seen) == ("text", [], 0)


def test_retrieval_shows_the_best_passages_in_the_order_of_the_text(tiny):
    lines = [f"Line {i} says {w}." for i, w in enumerate(random.Random(0).choices(WORDS, k=900))]
    lines[700], lines[100] = "The zyx number is 4.", "A zyx is a zyx."
    task = Task("t", "question", "What is the zyx number?", "\n".join(lines))
    root, _ = ask("retrieval", task, lambda node: "4", tiny, window=600, turn_tokens=60)
    said = root.turns[1].text
    assert 0 < said.find(lines[100]) < said.find(lines[700])


def slow_bm25(query, chunks, k1=1.5, b=0.75):
    """The formula, word by word."""
    def words(text):
        return re.findall(r"\w+", text.lower())
    mean = sum(len(words(c)) for c in chunks) / len(chunks) or 1
    scores = []
    for chunk in chunks:
        total = 0.0
        for word in sorted(set(words(query))):
            n = sum(word in words(c) for c in chunks)
            tf = words(chunk).count(word)
            idf = math.log(1 + (len(chunks) - n + 0.5) / (n + 0.5))
            total += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(words(chunk)) / mean))
        scores.append(total)
    return scores


def test_bm25_equals_its_formula():
    for seed in range(40):
        rng = random.Random(seed)
        chunks = [" ".join(rng.choices("a B c dd é".split(), k=rng.randrange(8)))
                  for _ in range(rng.randrange(1, 9))]
        query = " ".join(rng.choices("a b C dd z É".split(), k=rng.randrange(5)))
        assert bm25(query, chunks) == pytest.approx(slow_bm25(query, chunks))


def test_cut_loses_nothing():
    for seed in range(60):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab. \n", k=rng.randrange(200)))
        size = rng.randrange(1, 30)
        parts = cut(text, size)
        assert "".join(parts) == text and all(0 < len(p) <= size for p in parts)


@pytest.mark.parametrize("text, found", [
    ('["a", "b"]', ["a", "b"]), ("- a\n2. b\n\n * c", ["a", "b", "c"]), ('"a b"', ["a b"]),
    ("", []), ("[" * 9999, ["[" * 9999]), ("1.5 mm is small", ["1.5 mm is small"])])
def test_the_strings_of_an_answer_in_prose(text, found):
    assert sentences(text) == found


def test_rlm0_cannot_call_and_is_not_told_that_it_could():
    says = block("FINAL(rlm_query('x', 'y'))")
    root, _ = ask("rlm0", Task("t", "question", "q", "c"), lambda node: says)
    assert root.answer.startswith("Error") and not root.children
    assert "rlm_query" not in root.turns[0].text and "delegate" not in root.turns[0].text


@pytest.mark.parametrize("name, kinds", [("rlm1", ["rlm", "rlm", "llm"]),
                                         ("rlm2", ["rlm", "rlm", "rlm", "llm"])])
def test_depth_is_what_the_name_says(name, kinds):
    root, _ = ask(name, Task("t", "question", "q", "c"), lambda node: "done" if node.kind == "llm"
                  else block("FINAL(rlm_query('deeper', 'c'))"))
    assert [node.kind for node in root.walk()] == kinds and root.answer == "done"


def test_bare_leaves_out_the_strategy_and_nothing_else():
    for kind in tasks.KINDS:
        full, bare = (rlm.opening(rlm.Node(), "q", "c", kind, rlm_config(name, RLMConfig()))
                      for name in ("rlm1", "rlm1-bare"))
        assert tasks.strategy(kind) and tasks.strategy(kind) in full[0]
        assert full[0].replace(tasks.strategy(kind), "") == bare[0] and full[1] == bare[1]
    with pytest.raises(ValueError, match="no strategy text"):
        rlm_config("rlm1-bare", RLMConfig(style="brief"))


def test_without_ids_four_characters_count_against_the_window():
    root, _ = ask("rlm1", Task("t", "question", "q", "c"),
                  lambda node: block(f"print('{'x' * 900}')"), window=1200, max_turns=50)
    assert root.end == "window" and evaluation.tokens(root) <= 1200


# --- statistics -----------------------------------------------------------------------------------


def record(score, failed="", **more):
    return {"score": score, "failed": failed, "end": "failed" if failed else "final", "seen": None,
            "seconds": 1.0, "context": 100, "dollars": None,
            **dict.fromkeys("in reused out calls nodes depth root errors".split(), 2),
            **more}


def test_failures_stay_out_of_every_mean():
    records = [record(1.0, seconds=1.0), record(0.0, seconds=3.0, end="turns"),
               record(0.0, "lost", seconds=99.0, calls=50)]
    row = evaluation.summary(records, "evidence", "rlm1", 8000)
    assert (row["n"], row["failed"], row["score"], row["unanswered"]) == (2, 1, 0.5, 1)
    assert (row["p50"], row["p95"], row["calls"]) == (2.0, pytest.approx(2.9), 2.0)
    assert row["ends"] == {"final": 1, "turns": 1} and row["dollars"] is None
    lost = evaluation.summary(records[2:], "evidence", "rlm1", 8000)
    assert (lost["n"], lost["score"], lost["low"]) == (0, None, None)
    assert "-" in evaluation.line(lost)


def test_a_price_unknown_for_one_question_is_unknown_for_the_mean():
    known = [record(1.0, dollars=0.5), record(1.0, dollars=1.5)]
    assert evaluation.summary(known, "t", "m", 1)["dollars"] == 1.0
    assert evaluation.summary([*known, record(1.0)], "t", "m", 1)["dollars"] is None


def test_differences_are_paired_and_skip_what_either_lost():
    """Two methods that differ by 0.1 on every question: the paired interval is a point, however
    much the questions differ."""
    rng = random.Random(0)
    base = [rng.random() * 0.9 for _ in range(50)]
    a = {i: record(s + 0.1) for i, s in enumerate(base)} | {50: record(0.0, "lost")}
    b = {i: record(s) for i, s in enumerate(base)} | {50: record(1.0), 51: record(1.0)}
    other = {0: record(0.0)}
    d, = evaluation.differences({("t", 1, "a"): a, ("t", 1, "b"): b, ("t", 2, "a"): other})
    assert (d["a"], d["b"], d["n"]) == ("a", "b", 50)
    for value in (d["difference"], d["low"], d["high"]):
        assert value == pytest.approx(0.1)


def test_the_interval_of_a_difference_covers_it():
    hits = 0
    for seed in range(200):
        rng = random.Random(seed)
        a = {i: record(float(rng.random() < 0.6)) for i in range(60)}
        b = {i: record(float(rng.random() < 0.4)) for i in range(60)}
        d, = evaluation.differences({("t", 1, "a"): a, ("t", 1, "b"): b})
        hits += d["low"] <= 0.2 <= d["high"]
    assert 180 <= hits <= 200


# --- the command line -----------------------------------------------------------------------------


def test_a_script_needs_no_model_and_answers_every_kind(command, tmp_path):
    message, _ = command("--policy", "oracle", "--tasks", ",".join(tasks.KINDS), "--lengths",
                         "2000,4000", "--n", 2, "--json", tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert message is None and len(data["questions"]) == 2 * 2 * len(tasks.KINDS)
    assert {row["score"] for row in data["rows"]} == {1.0}
    assert {row["method"] for row in data["rows"]} == {"rlm1"}


def test_root_and_children_may_be_different_scripts(command, tmp_path):
    """A root that knows and children that only look for words, and the other way round."""
    trees = {}
    for root, below in (("oracle", "keyword"), ("keyword", "oracle")):
        path = tmp_path / f"{root}.jsonl"
        assert command("--policy", root, "--children", below, "--n", 2, "--save", path)[0] is None
        trees[root] = read_rollouts(path, Task)[0].root
    assert trees["oracle"].children and not trees["keyword"].children


class Killed(BaseException):
    pass


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_anywhere_resumes_to_the_same_results_asking_only_what_is_missing(
        seed, command, tmp_path, monkeypatch):
    """The journal is cut at any byte, as a kill may leave it."""
    flags = ["--policy", "oracle", "--tasks", "niah,copy", "--lengths", "2000", "--n", 3,
             "--methods", "rlm1,rlm0"]
    whole = tmp_path / "whole.json"
    assert command(*flags, "--json", whole)[0] is None
    journal = Path(f"{whole}.journal").read_bytes()
    cut_at = random.Random(seed).randrange(journal.index(b"\n") + 1, len(journal))
    part = tmp_path / "part.json"
    Path(f"{part}.journal").write_bytes(journal[:cut_at])
    kept = {tuple(json.loads(row)["done"]) for row in journal[:cut_at].splitlines()[1:]
            if cut_at and row.endswith(b"}") and _whole(row)}
    asked, real = [], evaluation.ask

    async def note(method, task, *args, **more):
        asked.append((task.kind, method, task.id))
        return await real(method, task, *args, **more)
    monkeypatch.setattr(evaluation, "ask", note)
    assert command(*flags, "--json", part, "--resume")[0] is None
    assert len(asked) in (12 - len(kept), 13 - len(kept))  # the cut may be just before a "\n"
    assert len(set(asked)) == len(asked)

    def results(path):
        return sorted((q["task"], q["method"], q["i"], q["id"], q["score"])
                      for q in json.loads(path.read_text())["questions"])
    assert results(part) == results(whole)


def _whole(row):
    try:
        return bool(json.loads(row))
    except ValueError:
        return False


def test_an_interrupted_run_writes_what_it_has(command, tmp_path, monkeypatch):
    real, asked = evaluation.ask, []

    async def interrupted(*args, **more):
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return await real(*args, **more)
    monkeypatch.setattr(evaluation, "ask", interrupted)
    monkeypatch.setattr(evaluation, "CHARACTERS", 1)  # one question at a time
    message, _ = command("--policy", "oracle", "--n", 6, "--json", tmp_path / "r.json",
                         "--html", tmp_path / "r.html", "--save", tmp_path / "r.jsonl")
    assert "interrupted" in message and "3 of 6" in message and "--resume" in message
    assert len(json.loads((tmp_path / "r.json").read_text())["questions"]) == 3
    assert len(read_rollouts(tmp_path / "r.jsonl", Task)) == 3
    assert "not finished" in (tmp_path / "r.html").read_text()


def test_more_questions_lengths_and_methods_can_be_added_to_a_run(command, tmp_path):
    flags = ["--policy", "oracle", "--tasks", "niah", "--json", tmp_path / "r.json"]
    assert command(*flags, "--lengths", "2000", "--n", 2)[0] is None
    first = json.loads((tmp_path / "r.json").read_text())["questions"]
    assert command(*flags, "--lengths", "2000,4000", "--n", 3, "--methods", "rlm1,rlm0",
                   "--resume")[0] is None
    data = json.loads((tmp_path / "r.json").read_text())
    assert len(data["questions"]) == 12 and len(data["differences"]) == 2
    assert all(q in data["questions"] for q in first)  # with their seconds: not asked again


@pytest.mark.parametrize("args, says", [
    ([], "--model DIR is needed"),
    (["--policy", "clever"], "no policy 'clever'"),
    (["--policy", "oracle", "--methods", "rlm9"], "no method 'rlm9'; there are direct"),
    (["--policy", "oracle", "--methods", "direct"], "a script writes code"),
    (["--policy", "oracle", "--tasks", "chess"], "no task 'chess'; there are evidence"),
    (["--policy", "oracle", "--lengths", "8k"], "--lengths: '8k' is no whole number"),
    (["--policy", "oracle", "--tasks", "copy", "--lengths", "9000000"], "copy tasks have"),
    (["--policy", "oracle", "--n", "0"], "--n must be above 0"),
    (["--policy", "oracle", "--resume"], "--resume needs"),
    (["--policy", "oracle", "--data", DATA, "--n", "99"], "holds only"),
    (["--policy", "oracle", "--data", DATA], "the oracle knows"),
    (["--policy", "oracle", "--data", DATA, "--tasks", "hop"], "line 1: lacks field"),
    (["--policy", "oracle", "--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--policy", "oracle", "--data", DATA, "--lengths", "8000"], "--lengths is for generated"),
    (["--policy", "oracle", "--json", "/nowhere/r.json"], "/nowhere/r.json"),
    (["--policy", "oracle", "--html", "/nowhere/r.html"], "/nowhere/r.html"),
    (["--policy", "oracle", "--save", "/"], "cannot be written"),
    (["--policy", "oracle", "--json", "/proc/r.json"], "/proc/r.json"),
    (["--api", "http://localhost:1"], "--api-model"),
    (["--api", "localhost", "--api-model", "m"], "is no http"),
    (["--policy", "api"], "needs --api URL"),
    (["--api", "http://x", "--api-model", "m", "--budget-dollars", "1"], "needs --price"),
    (["--api", "http://x", "--api-model", "m", "--price", "cheap"], "--price cheap"),
    (["--policy", "oracle", "--judge", "m"], "--judge needs --api"),
    (["--model", "/nowhere"], "/nowhere"),
])
def test_bad_input_gives_one_line(args, says, command):
    message, _ = command(*args)
    assert isinstance(message, str) and says in message and "\n" not in message


def test_results_of_another_configuration_are_not_mixed_in(command, tmp_path):
    flags = ["--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json"]
    assert command(*flags)[0] is None
    before = Path(tmp_path / "r.json.journal").read_bytes()
    for more, says in ((["--seed", 1], "seed 0"), (["--policy", "keyword"], "'oracle'"),
                       (["--window", 500], "window"), (["--children", "keyword"], "children")):
        message, _ = command(*flags, *more, "--resume")
        assert "cannot be resumed" in message and says in message and "\n" not in message
    message, _ = command(*flags)  # nor is a journal thrown away
    assert "2 lines of an earlier run" in message and "--resume" in message
    assert Path(tmp_path / "r.json.journal").read_bytes() == before
    broken = before.replace(b'{"done"', b'{"dome"', 1)
    Path(tmp_path / "r.json.journal").write_bytes(broken)
    assert "cannot be resumed" in command(*flags, "--resume")[0]
    Path(tmp_path / "r.json.journal").write_bytes(b"what\n" + before)
    assert "line 1: not JSON" in command(*flags, "--resume")[0]


def test_a_repl_that_cannot_start_is_no_wrong_answer(command, tmp_path, monkeypatch):
    async def refuse(*args, **more):
        raise REPLError("no process left")
    monkeypatch.setattr(rlm, "rollout", refuse)
    message, text = command("--policy", "oracle", "--n", 2, "--json", tmp_path / "r.json")
    assert "no question could be scored" in message and "2 failed" in text
    assert "no process left" in text
    monkeypatch.undo()
    evaluation_args = ["eval.py", "--policy", "oracle", "--n", "2", "--json",
                       str(tmp_path / "r.json"), "--resume"]
    monkeypatch.setattr(sys, "argv", evaluation_args)
    evaluation.main()  # what failed is tried again
    row, = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["n"], row["failed"], row["score"]) == (2, 0, 1.0)


# --- teacher rollouts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    some = [tasks.make_task("evidence", random.Random(i)) for i in range(24)]
    return warmup.make_tiny(str(tmp_path_factory.mktemp("tiny") / "init"), 0, some)


def test_saved_trees_encode_to_the_ids_of_their_rollout(command, tmp_path, tiny_model):
    """A teacher in the student's harness: encoding the saved text gives the rollout's own ids."""
    assert command("--policy", "oracle", "--model", tiny_model, "--n", 6,
                   "--save", tmp_path / "t.jsonl")[0] is None
    tokenizer = Tokenizer.from_pretrained(tiny_model)
    for r in read_rollouts(tmp_path / "t.jsonl", Task):
        before = [(n.ids, n.mask) for n in r.root.walk()]
        for node in r.root.walk():
            node.turns = [replace(t, ids=(), logprobs=t.logprobs and ()) for t in node.turns]
        rlm.encode_tree(r.root, tokenizer)
        assert [(n.ids, n.mask) for n in r.root.walk()] == before
        assert any(sum(n.mask) for n in r.root.walk())


def test_the_warm_up_takes_trees_without_errors_and_above_a_score(command, tmp_path, tiny_model,
                                                                  capsys):
    path, bad = tmp_path / "t.jsonl", tmp_path / "bad.jsonl"
    command("--policy", "oracle", "--model", tiny_model, "--n", 6, "--save", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["reward"] = 0.4
    lines[1]["root"]["children"][0]["errors"] = 1
    lines[2]["failed"] = "lost"
    lines[3]["root"]["end"] = "turns"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = Tokenizer.from_pretrained(tiny_model)
    kept = warmup.teacher_trees(str(path), 0.5, tokenizer)
    assert [r.task.id for r in kept] == [line["task"]["id"] for line in lines[4:]]
    with pytest.raises(ValueError, match="none of its 6 trees"):
        warmup.teacher_trees(str(path), 1.0, tokenizer)
    for line in ({}, lines[4] | {"reward": "1"}, lines[4] | {"reward": math.inf}):
        bad.write_text(json.dumps(line))
        with pytest.raises(ValueError, match="line 1: not a rollout"):
            warmup.teacher_trees(str(bad), 0.0, tokenizer)


def test_a_teacher_can_answer_questions_that_training_may_see(command, tmp_path):
    held = {tasks.keyword(t) for t in evaluation.heldout_tasks(128)}
    for split, path in (("train", tmp_path / "a"), (None, tmp_path / "b")):
        assert command("--policy", "oracle", "--n", 12, "--save", path,
                       *(["--split", split] if split else []))[0] is None
        terms = {tasks.keyword(r.task) for r in read_rollouts(path, Task)}
        assert not terms & held if split else terms <= held
    rows = DATA.read_text().splitlines()
    names = []
    for split in ("train", "heldout"):
        assert command("--policy", "keyword", "--data", DATA, "--split", split, "--save",
                       tmp_path / f"{split}.jsonl")[0] is None
        names.append({r.task.id for r in read_rollouts(tmp_path / f"{split}.jsonl", Task)})
    assert not names[0] & names[1] and len(names[0] | names[1]) == len(rows)


def test_train_warms_up_on_saved_trees_and_leaves_a_report(command, tmp_path, tiny_model):
    command("--policy", "oracle", "--model", tiny_model, "--n", 4, "--save", tmp_path / "t.jsonl")
    flags = ("--warmup-steps 2 --warmup-rows 4 --steps 1 --questions 1 --group 2 --heldout 1"
             " --out").split()
    message, text = command(*flags, tmp_path / "run", "--model", tiny_model, "--warmup",
                            tmp_path / "t.jsonl", module=train)
    assert message is None and "4 of 4 trees are fit" in text and "4 saved trees" in text
    page = (tmp_path / "run" / "report.html").read_text()
    data = json.loads(re.search(r'id=data>(.*?)</script>', page, re.S)[1])
    assert len(data["trees"]) == 2 and all(t["adv"] is not None for t in data["trees"])
    assert any("g" in turn for t in data["trees"] for n in t["nodes"] for turn in n["t"])
    assert "heldout_final" in page
    message, _ = command(*flags, tmp_path / "run2", "--model", tiny_model, "--warmup",
                         "/nowhere.jsonl", module=train)
    assert "/nowhere.jsonl" in message and "\n" not in message


def test_counts_of_a_question_add_up(command, tmp_path):
    command("--policy", "oracle", "--tasks", "niah", "--lengths", "2000", "--n", 2, "--json",
            tmp_path / "r.json", "--save", tmp_path / "r.jsonl")
    data = json.loads((tmp_path / "r.json").read_text())
    for q, r in zip(data["questions"], read_rollouts(tmp_path / "r.jsonl", Task)):
        nodes = list(r.root.walk())
        said = [t for n in nodes for t in n.turns if t.role == "assistant"]
        assert (q["id"], q["nodes"], q["calls"]) == (r.task.id, len(nodes), len(said))
        assert q["out"] == sum(len(t.text) // 4 for t in said)
        assert q["depth"] == max(n.depth for n in nodes) and q["score"] == r.reward
        assert r.task.context is None  # its seed makes it again
    assert Counter(q["task"] for q in data["questions"]) == {"niah": 2}
