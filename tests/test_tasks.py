"""The interface of a task, ours or from a file; rows of a file; what the REPL's tools
return."""
import asyncio
import json
import random
import re
import traceback
import types
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PAPERS

import tasks
import util
from tasks import Question, evidence, score_of
from tasks.common import help_of, search, source
from tasks.evidence import extract_section, get_paper_abstract, list_papers
from training.questions import Questions, read, split
from training.scripts import script_policy
from tree import Node


LETTERS = '''
import string

def count(text, letter="a"):
    """How often a letter
    occurs.

    More for people."""
    import re
    return len(re.findall(letter, text.lower()))

TOOLS = (count,)

def make(rng, tokens=None, heldout=False):
    return "How many a?", "".join(rng.choices(string.ascii_letters, k=40)), 7

async def score(task, answer):
    return float(1 / answer == 1 / task.answer)

def oracle(task, node):
    return "```repl\\nFINAL(count(context))\\n```"
'''


@pytest.fixture
def letters(tmp_path):
    """The task above, under a name that no test used before."""
    path = tmp_path / f"letters_{tmp_path.name}.py"
    path.write_text(LETTERS)
    return str(path)


def test_a_file_is_a_task_like_ours(letters):
    task = tasks.load(letters)
    question = tasks.make(task, random.Random(5))
    assert tasks.task_of(question) is tasks.load(letters) is task
    name = Path(letters).stem
    assert question.task == name and question.id.startswith(f"{name}-")
    assert score_of(question, 7) == 1.0 and score_of(question, 8) == 0.0
    policy = script_policy([question], None, 0, alone=True)
    said = asyncio.run(policy(Node(), 100, (0, (), 0))).text
    assert said == task.oracle(question, Node())
    assert help_of(task.TOOLS) == "- count(text, letter='a'): How often a letter occurs."
    space = {}
    exec(source(task.TOOLS), space)
    assert space["count"]("Banana") == 3


def test_an_oracle_plays_generated_questions_and_scripts_those_of_a_file(letters):
    for task, played in ((letters, "letters"), ("evidence", "row")):
        questions = Questions(tasks.load(task), heldout=1)
        questions.rows = [Question("row-1", "", "q", {}, {})]
        assert questions.draw("warmup", 0).id.startswith(played)
        assert questions.draw("grpo", 0) is questions.rows[0]
    questions.rows = [Question(str(i), "", "q", {}, {}) for i in range(9)]
    epochs = [[questions.draw("grpo", 9 * epoch + i).id for i in range(9)]
              for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(str, range(9)))


def test_a_node_keeps_its_strategy(monkeypatch):
    monkeypatch.setattr(
        evidence, "demonstrate", lambda question, node, rng: f"{rng.random()}")
    policy = script_policy([Question("t", "evidence", "q", {}, {})], None, 0, alone=False)
    a, again, b, c = (asyncio.run(policy(Node(), 100, (0, path, turn))).text
                      for path, turn in (((), 0), ((), 1), ((0,), 0), ((1,), 0)))
    assert a == again and len({a, b, c}) == 3


def test_the_fields_of_rows_choose_the_task_and_bad_rows_are_counted(tmp_path, capsys):
    """Thirteen rows: six questions, a paper, and six that nobody can read."""
    rows = [{"question": f"q{i}", "context": f"a {i}", "answer": "a"} for i in range(6)]
    rows += [json.loads(PAPERS.read_text().splitlines()[0])]
    rows += [{"question": "q", "context": 5, "answer": "a"}, {"question": "q"}, 7,
             {"question": "q", "context": "c"},
             {"question": None, "context": "c", "answer": 1},
             {"question": " ", "context": "c", "answer": "a"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = tasks.load("", str(path))
    assert tasks.name_of(task) == "qa" and len(read(str(path), task)) == 6
    said = capsys.readouterr().out
    assert "so the task is qa" in said and "7 of 13 rows left out" in said
    for both in ({"answer": "a", "answers": None}, {"answer": None, "answers": ["a"]}):
        assert task.read({"question": "q", "context": "c", **both})[2] == ["a"]
    path.write_text('{"text": "x"}')
    with pytest.raises(ValueError, match="qa: question, context"):
        tasks.load("", str(path))


def test_a_mistake_in_a_file_ends_in_that_file(letters):
    with pytest.raises(ZeroDivisionError) as caught:
        score_of(tasks.make(tasks.load(letters), random.Random(0)), 0)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == letters
    assert util.is_theirs(caught.value)
    assert not util.is_theirs(ZeroDivisionError())


FIVE = "One one. Two two. Three WORD three. Four four. Five five."
TIDES = "A tide came. A tide went. Quiet now. A tide came."


@pytest.mark.parametrize("text, asked, passages", [
    (FIVE, ("WoRd", 0), ["Three WORD three."]), (FIVE, ("word",), [FIVE]),
    (FIVE, ("word", 18, False), ["Three WORD three. Four four."]),
    (FIVE, ("word", 11), ["Two two. Three WORD three. Four four."]),
    (TIDES, ("tide", 0), ["A tide came.", "A tide went.", "A tide came."]),
    (TIDES, ("tide", 3), ["A tide came. A tide went.", "Quiet now. A tide came."]),
    (TIDES, ("absent",), []), (TIDES, ("",), []), ("", ("word",), []),
    # letters that change length in lower case do not shift passages
    ("İİİİ. The tide. İİ.", ("tide", 0), ["The tide."]),
    # over a dict of papers: those that have some
    ({"a": TIDES, "b": FIVE, "c": ""}, ("WORD", 0), {"b": ["Three WORD three."]}),
    ([TIDES, FIVE], ("WORD", 0), {1: ["Three WORD three."]}),
])
def test_what_a_search_finds(text, asked, passages):
    assert search(text, *asked) == passages


def test_the_other_tools_read_the_layout_of_a_paper():
    question = read(PAPERS, evidence)[0]
    assert list_papers(question.context)[1] == ("tides-2", "The funnel at Fundy")
    abstract = get_paper_abstract(question.context, "tides-3")
    assert abstract == "Notes from two enclosed seas."
    assert get_paper_abstract({"x": "no such mark"}, "x") == ""
    assert extract_section("a (b) c (d) e", "(", ")") == "(b)"
    assert extract_section("(no end", "(", ")") == ""


PAPER = {"paperId": "p", "title": "T", "abstract": "A", "text": "Some text. More."}
ROWS = {  # a row of each schema, and what becomes of it: (row, query, context, gold)
    "evidence": ({"question": "Why?", "papers": [PAPER], "evidence": [
                  {"paperId": "p", "selections": [{"text": " Some text."}]}]}, "Why?",
                 {"p": "### PAPER: T\n<abstract>A</abstract>\nSome text. More."},
                 {"p": ["Some text."]}),
    "oolong": ({"id": 810080042, "context_window_text": "Date: Sep 06, 2023 || User: 14512 "
                "|| Instance: What is a tonne ?", "question": "Which?", "answer":
                "[datetime.date(2023, 1, 6)]", "answer_type": "ANSWER_TYPE.DATE"}, "Which?",
               "Date: Sep 06, 2023 || User: 14512 || Instance: What is a tonne ?",
               {"type": "DATE", "value": "2023-01-06"}),
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("task", ROWS)
def test_the_public_schema_of_each_kind_is_read(tmp_path, task):
    row, query, context, gold = ROWS[task]
    question, = read(write(tmp_path / "rows.jsonl", row), tasks.load(task))
    assert question == Question(question.id, task, query, context, gold)
    right = {"oolong": "2023-01-06", "evidence": ["Some text."]}.get(task, gold)
    assert score_of(question, right) == 1.0
    assert score_of(question, query) == score_of(question, None) == 0.0


def selection(text, of="p"):
    return {"evidence": [{"paperId": of, "selections": [{"text": text}]}]}


@pytest.mark.parametrize("task, changes, field", [
    ("evidence", {"question": 3}, "question"), ("evidence", {"evidence": []}, "evidence"),
    ("evidence", selection("Some text.", of="q"), "paperId"),
    ("evidence", selection("Somé text."), "text"), ("oolong", {"answer": 5}, "answer")],
    ids=lambda value: str(value)[:40])
def test_a_bad_row_is_left_out_and_its_line_and_field_are_named(
        tmp_path, task, changes, field, capsys):
    good = ROWS[task][0]
    path = write(tmp_path / "rows.jsonl", good, good | changes)
    assert len(read(path, tasks.load(task))) == 1
    first, named = capsys.readouterr().out.splitlines()
    assert first == f"{path}: 1 of 2 rows left out"
    assert "line 2: " in named and f"'{field}'" in named
    with pytest.raises(ValueError, match="rows.jsonl: no row can be used"):
        read(write(path, changes), tasks.load(task))


def test_papers_and_evidence_may_be_json_in_a_string(tmp_path):
    row = ROWS["evidence"][0]
    packed = row | {name: json.dumps(row[name]) for name in ("papers", "evidence")}
    one, two = read(write(tmp_path / "rows.jsonl", row, packed), evidence)
    assert (one.context, one.answer) == (two.context, two.answer)


@pytest.mark.parametrize("made", [
    None, ("q", "c"), ("q", "c", "gold", 4), (1, "c", "gold"), ("q", None, "gold"),
    ("q", "c", {"a set"})])
def test_what_a_users_file_returns_is_checked(made):
    task = types.SimpleNamespace(__file__="mine.py", make=lambda *a, **b: made)
    with pytest.raises(ValueError, match="^mine: "):
        tasks.make(task, random.Random(0))


@pytest.mark.parametrize("paper, quoted", [
    ("A line\r\nbroken here.", "A line\nbroken here."),
    ("A line\u2028broken here.", "A line broken here."),
    ("A line broken here.", "A line\n  broken\u00a0here.")])
def test_a_selection_may_have_other_line_breaks_than_its_paper(tmp_path, paper, quoted):
    """The gold is then what the paper says: that is what an answer can quote."""
    row = ROWS["evidence"][0] | {"papers": [PAPER | {"text": f"Before. {paper} After."}]}
    question, = read(write(tmp_path / "rows.jsonl", row | selection(quoted)), evidence)
    assert question.answer == {"p": [paper]} and score_of(question, [paper]) == 1.0


def test_split_is_disjoint_complete_and_the_same_every_time():
    for n in (2, 3, 10, 700):
        every = [Question(str(i), "evidence", f"q{i}", {}, {}) for i in range(n)]
        train, held = split(every)
        assert sorted(t.id for t in train + held) == sorted(t.id for t in every)
        assert len(held) == min(128, max(1, n // 5)) and train
        assert (train, held) == split(every) and all(split(every, 128))
    assert [t.id for t in train] != sorted((t.id for t in train), key=int)  # shuffled
    for few in ([], every[:1]):
        with pytest.raises(ValueError, match="nothing can be held out"):
            split(few)


@pytest.mark.parametrize("text_of, count, apart", [
    (lambda i: i // 3, 127, 127), (lambda i: max(i, 899), 100, 100),
    (lambda i: max(i, 989), 128, 10), (lambda i: i % 2, 128, 0), (lambda i: 0, 128, 0)])
def test_a_split_loses_no_row_and_says_what_shares_texts(text_of, count, apart, capsys):
    rows = [Question(str(i), "qa", "q", f"text {text_of(i)}", []) for i in range(1000)]
    for wanted in (0, 128):
        train, held = split(rows, wanted)
        assert len(held) == count and len(train) == 1000 - count
        texts = {question.context for question in train}
        assert sum(question.context not in texts for question in held) == apart
        said = [int(number) for number in re.findall(r"\d+", capsys.readouterr().out)]
        assert said == ([apart, 128, count - apart] if apart < 128 else [])


def test_rows_that_share_a_paper_are_on_one_side_of_the_split():
    def row(i, *papers):
        return Question(str(i), "evidence", "q", {
            f"{i}-{p}": "\n" * (i % 2) + f"text of {p}" for p in papers})

    # Rows 0 to 3 are one chain of shared papers, of which the ends share none.
    chain = [row(i, i, i + 1) for i in range(4)]
    pairs = [row(i, 100 + i // 2) for i in range(10, 30)]
    train, held = split(chain + pairs)
    assert len(held) == 4 and len(train) == 20

    def texts(tasks):
        return {text.strip() for question in tasks for text in question.context.values()}

    assert not texts(train) & texts(held)
    lists = [replace(question, context=[*question.context.values()])
             for question in chain + pairs]
    assert [t.id for t in split(lists)[1]] == [t.id for t in held]  # whatever holds them


@pytest.mark.parametrize("empty", ["", [], {"a": " "}])
def test_where_there_is_no_text_the_same_question_is_on_one_side_of_the_split(empty):
    rows = [Question(str(i), "qa", f"What is {i % 30}\n+  1?", empty, [])
            for i in range(100)]
    train, held = split(rows)
    asked, kept = ({question.query for question in side} for side in (train, held))
    assert not asked & kept
    assert 16 < len(held) <= 20
