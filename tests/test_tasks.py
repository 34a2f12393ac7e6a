"""The interface of a task, ours or from a file; rows of a file; what the REPL's tools
return."""
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from runtime.handed_in import HandedInError
from tasks import NAMES, Task, read, reward, split
from tasks.in_repl import extract_section, get_paper_abstract, list_papers, search, word_of
from tree import Node

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ROOT / "tests" / "data" / "papers.jsonl"


# --- the list of kinds -----------------------------------------------------------------


def test_the_list_names_the_files_and_a_kind_is_imported_when_it_is_used():
    shared = {"__init__", "text", "in_repl"}
    assert {file.stem for file in (ROOT / "tasks").glob("*.py")} - shared == set(NAMES)
    code = ("import sys, tasks; tasks.load('niah')\n"
            "print(sorted(m for m in sys.modules if m.startswith('tasks.')))")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                         text=True, check=True)
    assert run.stdout.strip() == "['tasks.in_repl', 'tasks.niah', 'tasks.text']"


def test_a_free_question_has_tools_and_neither_advice_nor_scores():
    task = Task("t", "question", "q", "context")
    assert tasks.strategy("question") == ""
    assert tasks.part_score(task, "context", "x") is None
    with pytest.raises(ValueError, match="question"):
        reward(task, "x")
    assert {tasks.tools(kind) for kind in NAMES} == {tasks.tools("question")}
    for name in ("list_papers", "search", "extract_section", "get_paper_abstract"):
        assert f"- {name}(" in tasks.tools_help("question")


def test_an_unknown_kind_is_refused_and_what_a_kind_lacks_is_named():
    with pytest.raises(ValueError, match="'poetry'; there are: notes, evidence, deep"):
        tasks.load("poetry")
    task = tasks.make("deep", random.Random(0))
    with pytest.raises(ValueError, match="the task deep has no function read"):
        tasks._call("deep", "read", task)
    with pytest.raises(ValueError, match="the task deep reads no files"):
        read(PAPERS, "deep")
    with pytest.raises(ValueError, match="deep tasks have one size"):
        tasks.make("deep", random.Random(0), tokens=2_000)


# --- a task from somebody's file -------------------------------------------------------

LETTERS = '''
import math, re
import string as letters

STRATEGY = "Count."
LIMIT = 3

def count(text, letter="a"):
    """How often a letter
    occurs.

    More for people."""
    return len(re.findall(letter, text.lower()))

TOOLS = (count,)

def make(rng, tokens=None, heldout=False):
    return "How many a?", "".join(rng.choices(letters.ascii_letters, k=40)), 7

def score(task, answer):
    return float(answer == task.answer)

def oracle(task, node):
    return "```repl\\nFINAL(count(context))\\n```"

def read(row):
    return row["question"], row["text"], row["gold"]
'''


@pytest.fixture
def letters(tmp_path):
    """Writes the task above, changed, under a name that no test used before."""
    def write(old="", new="", name=f"letters_{tmp_path.name}"):
        assert old in LETTERS
        path = tmp_path / f"{name}.py"
        path.write_text(LETTERS.replace(old, new) if old else LETTERS)
        return str(path)
    return write


def test_a_file_is_a_task_like_ours(letters, tmp_path):
    path = letters()
    module = tasks.load(path)
    task = tasks.make(path, random.Random(5))
    assert task == tasks.make(task.kind, random.Random(5))
    assert tasks.load(task.kind) is module
    assert task.kind == Path(path).stem and task.id.startswith(f"{task.kind}-")
    assert reward(task, 7) == 1.0 and reward(task, 8) == 0.0
    assert tasks.part_score(task, task.context, 7) is None
    assert tasks.strategy(task.kind) == "Count."
    assert tasks.demonstrate(task, Node(), random.Random(0)) == tasks.oracle(task, Node())
    assert tasks.tools_help(task.kind) == (
        "- count(text, letter='a'): How often a letter occurs.")
    space = {}
    exec(tasks.tools(task.kind), space)  # the imports that it needs, and no others
    assert space["count"]("Banana") == 3 and "math" not in space and "letters" not in space

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "text": "t", "gold": 1}\n{"question": "q"}\n')
    wrong = rf"^{rows} line 2: .*{path} line \d+ in read.*'text'"
    with pytest.raises(ValueError, match=wrong):
        read(rows, path, strict=True)


@pytest.mark.parametrize("old, new, message", [
    ("def score(", "def points(", "no function score"),
    ("def make(", "make = 3\ndef made(", "no function make"),
    ("def score(", "async def score(", "score is async"),
    ("import math, re", "import maths", "line 2.*maths"),
    ("TOOLS = (count,)", "TOOLS = 'count'", "TOOLS is not a tuple of functions"),
])
def test_a_file_that_is_no_task_is_refused_when_it_is_loaded(letters, old, new, message):
    path = letters(old, new)
    with pytest.raises(HandedInError, match=f"{path}.*{message}") as error:
        tasks.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("old, new, message", [
    ("40)), 7", "40))", "line 17: make returned .* should return .*query, context, gold"),
    ('return "How many a?"', "return 3", "make returned .*query"),
    ("k=40", "k=unknown", "line 18 in make: NameError"),
    ("float(answer == task.answer)", "1.5", "line 20: score returned 1.5; .* in .0, 1"),
    ("float(answer == task.answer)", "float('nan')", "score returned nan"),
    ("float(answer == task.answer)", "None", "score returned None"),
    ("float(answer == task.answer)", "1 / (answer - 7)", "line 21 in score: ZeroDiv"),
    ('"```repl\\nFINAL(count(context))\\n```"', "None", "oracle returned None"),
])
def test_a_mistake_in_a_file_is_one_line_that_names_it(letters, old, new, message):
    path = letters(old, new)
    with pytest.raises(HandedInError, match=f"{path}.*{message}") as error:
        task = tasks.make(path, random.Random(0))
        reward(task, 7)
        tasks.oracle(task, Node())
    assert "\n" not in str(error.value)


def test_two_tasks_of_one_name_are_refused(letters, tmp_path):
    with pytest.raises(HandedInError, match="another task is called niah; rename the file"):
        tasks.load(letters(name="niah"))
    path = letters()
    tasks.load(path)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / Path(path).name
    other.write_text(LETTERS)
    with pytest.raises(HandedInError, match="rename the file"):
        tasks.load(str(other))
    with pytest.raises(HandedInError, match="no such file"):
        tasks.load(str(tmp_path / "none.py"))


# --- the tools in the REPL -------------------------------------------------------------


def random_text(rng):
    words = "tide Tide bread moon a the tidal 3.5".split()
    if rng.random() < 0.2:
        words.append("İstanbul")
    out = ""
    for _ in range(rng.randint(0, 8)):
        out += " ".join(rng.choices(words, k=rng.randint(1, 6)))
        out += rng.choice([". ", "! ", "?  ", ".\n", "\n\n", ".", ""])
    return out


@pytest.mark.parametrize("window", [0, 1, 7, 30, 10_000])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_passages_are_whole_sentences_in_order_and_joined(window, bidirectional):
    rng = random.Random(window)
    for _ in range(300):
        text, at = random_text(rng), 0
        passages = search(text, "tide", window, bidirectional)
        for passage in passages:
            start = text.index(passage, at)  # verbatim, in order, without overlap
            at = start + len(passage)
            before = text[:start].rstrip(" ")
            assert passage == passage.strip() and "tide" in passage.lower()
            assert not before or before[-1] in ".!?\n"
            assert at == len(text) or passage[-1] in ".!?" or text[at] == "\n"
        if len(text.lower()) != len(text):
            continue
        covered = "\0".join(passages).lower().count("tide")
        assert covered >= text.lower().count("tide")
        if window == 0:
            sentences = re.split(r"(?<=[.!?])(?<!\s)(?=\s)\s+|\n+", text)
            assert passages == [s.strip() for s in sentences if "tide" in s.lower()]


FIVE = "One one. Two two. Three WORD three. Four four. Five five."
TIDES = "A tide came. A tide went. Quiet now. A tide came."


@pytest.mark.parametrize("text, asked, passages", [
    (FIVE, ("WoRd", 0), ["Three WORD three."]), (FIVE, ("word",), [FIVE]),
    (FIVE, ("word", 18, False), ["Three WORD three. Four four."]),
    (FIVE, ("word", 11), ["Two two. Three WORD three. Four four."]),
    (TIDES, ("tide", 0), ["A tide came.", "A tide went.", "A tide came."]),
    (TIDES, ("tide", 3), ["A tide came. A tide went.", "Quiet now. A tide came."]),
    (TIDES, ("tide", 12), [TIDES]),
    (TIDES, ("absent",), []), (TIDES, ("",), []), ("", ("word",), []), ("", ("",), []),
    # letters that change length in lower case do not shift passages
    ("İİİİ. The tide. İİ.", ("tide", 0), ["The tide."]),
    ("By İnan. The Transformer works.", ("transformer", 0), ["The Transformer works."]),
    ("By İnan. The end.", ("inan", 0), ["By İnan."]),
    ("By Inan.", ("İNAN", 0), ["By Inan."]),
    # over a dict of papers: those that have some
    ({"a": TIDES, "b": FIVE, "c": ""}, ("WORD", 0), {"b": ["Three WORD three."]}),
    ([TIDES, FIVE], ("WORD", 0), {1: ["Three WORD three."]}),
])
def test_what_a_search_finds(text, asked, passages):
    assert search(text, *asked) == passages


def test_the_other_tools_read_the_layout_of_a_paper():
    task = read(PAPERS, "evidence")[0]
    assert list_papers(task.context)[1] == ("tides-2", "The funnel at Fundy")
    assert get_paper_abstract(task.context, "tides-3") == "Notes from two enclosed seas."
    assert get_paper_abstract({"x": "no such mark"}, "x") == ""
    assert extract_section("a (b) c (d) e", "(", ")") == "(b)"
    assert extract_section("|one|two|", "|", "|") == "|one|"
    for text in ("no start)", "(no end"):
        assert extract_section(text, "(", ")") == ""


# --- questions from a file -------------------------------------------------------------


PAPER = {"paperId": "p", "title": "T", "abstract": "A", "text": "Some text. More."}
ROWS = {  # a row of each schema, and what becomes of it: (row, query, context, gold)
    "evidence": ({"question": "Why?", "papers": [PAPER], "evidence": [
                  {"paperId": "p", "selections": [{"text": " Some text."}]}]}, "Why?",
                 {"p": "### PAPER: T\n<abstract>A</abstract>\nSome text. More."},
                 {"p": ["Some text."]}),
    # a data point of RULER as in Moenupa/VTCBench data/README.md
    "niah": ({"index": 2169, "input": "A special magic number is hidden within the "
              "following text.\nSome text.\nWhat is the special magic number for "
              "jittery-hospital mentioned in the provided text?", "outputs": ["5437923"]},
             "What is the special magic number for jittery-hospital mentioned in the "
             "provided text?", "A special magic number is hidden within the following "
             "text.\nSome text.", ["5437923"]),
    "oolong": ({"id": 810080042, "context_window_text": "Date: Sep 06, 2023 || User: 14512 "
                "|| Instance: What is a tonne ?", "question": "Which?", "answer":
                "['incorrect']", "answer_type": "ANSWER_TYPE.LABEL"}, "Which?",
               "Date: Sep 06, 2023 || User: 14512 || Instance: What is a tonne ?",
               {"type": "LABEL", "value": "incorrect"}),
    "pairs": ({"question": "Which pairs?", "context_window_text": "text",
               "answer": "(22740, 35839), (52032, 35839)"}, "Which pairs?", "text",
              [["22740", "35839"], ["35839", "52032"]]),
    "code": ({"_id": "1", "domain": "Code Repository Understanding", "question": "Which?",
              "choice_A": "Alpha", "choice_B": "Beta", "choice_C": "Gamma",
              "choice_D": "Delta", "answer": "B", "context": "fixture context"},
             "Which?\n(A) Alpha\n(B) Beta\n(C) Gamma\n(D) Delta\nAnswer with the letter.",
             "fixture context", "B"),
    "hop": ({"query_id": "769", "query": "Who?", "answer": "Jo", "gold_docs": [
             {"docid": "9", "text": "x"}], "evidence_docs": [{"docid": "9", "text": "x"}],
             "negative_docs": [{"docid": "10", "text": "y", "url": "u"}]},
            "Who?", {"10": "y", "9": "x"}, "Jo"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_the_public_schema_of_each_kind_is_read(tmp_path, kind):
    row, query, context, gold = ROWS[kind]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task, = read(tmp_path / "rows.jsonl", kind)
    assert task == Task("row-1", kind, query, context, gold)
    assert list(task.context) == list(context)  # and in this order
    assert tasks.keyword(task, Node())
    right = {"oolong": "incorrect", "evidence": ["Some text."]}.get(kind, gold)
    assert reward(task, right) == 1.0 and reward(task, query) == reward(task, None) == 0.0
    with pytest.raises(ValueError, match="row-1: the oracle and the scripts know"):
        tasks.oracle(task, Node())


def test_scripts_that_cannot_play_a_row_play_a_generated_question(tmp_path):
    rows = {kind: Task("row-1", kind, query, context, gold)
            for kind, (_, query, context, gold) in ROWS.items()}
    played = {kind: tasks.playable(task, random.Random(0)) for kind, task in rows.items()}
    assert played["evidence"] is rows["evidence"]
    for kind in {*rows} - {"evidence"}:
        assert played[kind].id.startswith(f"{kind}-") and played[kind].kind == kind
        assert played[kind] == tasks.make(kind, random.Random(0))


@pytest.mark.parametrize("text, kind, value", [
    ("[7]", "NUMERIC", "7"), ("['more common than']", "COMPARISON", "more common than"),
    ("[datetime.date(2023, 1, 6)]", "DATE", "2023-01-06"), ("[44106]", "USER", "44106"),
    ("['October 2022']", "MONTH_YEAR", "October 2022"),
])
def test_answers_of_oolong_are_python_literals(tmp_path, text, kind, value):
    row = ROWS["oolong"][0] | {"answer": text, "answer_type": f"ANSWER_TYPE.{kind}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task, = read(tmp_path / "rows.jsonl", "oolong")
    assert task.answer == {"type": kind, "value": value} and reward(task, value) == 1.0


def selection(text, of="p"):
    return {"evidence": [{"paperId": of, "selections": [{"text": text}]}]}


@pytest.mark.parametrize("kind, changes, field", [
    ("evidence", {"question": ...}, "question"), ("evidence", {"question": 3}, "question"),
    ("evidence", {"papers": {"p": "x"}}, "papers"), ("evidence", {"papers": []}, "papers"),
    ("evidence", {"papers": [PAPER | {"text": None}]}, "text"),
    ("evidence", {"papers": ["x"]}, "paperId"),
    ("evidence", {"papers": [PAPER] * 2}, "paperId"),
    ("evidence", {"papers": [dict.fromkeys(PAPER, " ")]}, "papers"),
    ("evidence", {"evidence": []}, "evidence"),
    ("evidence", {"evidence": [{"paperId": "p", "selections": []}]}, "evidence"),
    ("evidence", {"evidence": [{"paperId": "p"}]}, "selections"),
    ("evidence", selection("Some text.", of="q"), "paperId"),
    ("evidence", selection("Somé text."), "text"), ("evidence", selection(" "), "text"),
    ("evidence", {"evidence": [{"paperId": "p", "selections": ["Some text."]}]}, "text"),
    ("niah", {"input": "one line"}, "input"), ("niah", {"outputs": "54"}, "outputs"),
    ("niah", {"outputs": []}, "outputs"), ("niah", {"outputs": [5]}, "outputs"),
    ("niah", {"outputs": [""]}, "outputs"),
    ("oolong", {"answer": "entity"}, "answer"), ("oolong", {"answer": "[]"}, "answer"),
    ("oolong", {"answer": "['']"}, "answer"), ("oolong", {"answer": 7}, "answer"),
    ("oolong", {"answer": "__import__('os')"}, "answer"),
    ("oolong", {"answer": "[" * 10_000}, "answer"),
    ("oolong", {"answer": "[datetime.date(2023, 13, 1)]", "answer_type": "DATE"}, "answer"),
    ("oolong", {"answer": "['x']", "answer_type": "NUMERIC"}, "answer"),
    ("oolong", {"answer": "['x']", "answer_type": "COMPARISON"}, "answer"),
    ("oolong", {"answer_type": "ANSWER_TYPE.MOOD"}, "answer_type"),
    ("oolong", {"context_window_text": " "}, "context_window_text"),
    ("pairs", {"answer": "none"}, "answer"), ("pairs", {"answer": {"1": 2}}, "answer"),
    ("code", {"choice_C": ...}, "choice_C"), ("code", {"answer": "E"}, "answer"),
    ("code", {"answer": "AB"}, "answer"), ("code", {"context": ""}, "context"),
    ("hop", {"answer": ""}, "answer"), ("hop", {"gold_docs": ["9"]}, "docid"),
    ("hop", {"gold_docs": [{"docid": "9", "text": ""}]}, "text"),
    ("hop", {"gold_docs": [], "evidence_docs": [], "negative_docs": []}, "gold_docs"),
], ids=lambda value: str(value)[:40])
def test_a_bad_row_is_one_line_that_names_line_and_field(
        tmp_path, kind, changes, field, capsys):
    path = tmp_path / "rows.jsonl"
    good = ROWS[kind][0]
    bad = {key: value for key, value in (good | changes).items() if value is not ...}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(ValueError) as error:
        read(path, kind, strict=True)
    message = str(error.value)
    assert message.startswith(f"{path} line 3") and f"'{field}'" in message
    assert "\n" not in message and len(message) < 400
    assert [task.id for task in read(path, kind)] == ["row-1"]
    said = capsys.readouterr().out
    assert f"{path}: 1 of 2 rows left out" in said
    assert message.removeprefix(str(path)) in said


def test_a_file_that_is_one_json_list_is_read_row_by_row(tmp_path):
    """As OOLONG-Pairs is published, once its context is in it."""
    rows = [{"id": "1", "question": "Which pairs?", "answer": ["(12, 3)", "(3, 4)"],
             "type": "list_of_answers", "context_window_text": "Date: ..."}, {"id": "2"}]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows, indent=1))
    [question] = tasks.read(str(path), "pairs")
    assert question.answer == [["12", "3"], ["3", "4"]] and question.id == "row-1"
    assert tasks.reward(question, [[4, 3], [12, 3]]) == 1.0
    with pytest.raises(ValueError, match="pairs.json line 2"):
        tasks.read(str(path), "pairs", strict=True)
    path.write_text("[1, 2]\n" + json.dumps(rows[0]))  # lines, of which one is a list
    assert len(tasks.read(str(path), "pairs")) == 1


@pytest.mark.parametrize("line", [b"[]", b"7", b"null", b'"x"', b"{}", b"{", b"\xff\xfe{}",
                                  b"[" * 99_999])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    for kind in ROWS:
        wrong = "rows.jsonl line 1: (not JSON|lacks field)"
        with pytest.raises(ValueError, match=wrong) as error:
            read(path, kind, strict=True)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
        with pytest.raises(ValueError, match="none of its 1 rows can be used.* line 1: "):
            read(path, kind)


def test_bad_rows_are_left_out_counted_and_the_first_ones_named(tmp_path, capsys):
    good = ROWS["evidence"][0]
    rows = [good, good | {"evidence": []}, good | selection("Never written."), good]
    rows += [good | {"question": 3}] * 8
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [task.id for task in read(path, "evidence")] == ["row-1", "row-4"]
    first, *named, last = capsys.readouterr().out.splitlines()
    assert "10 of 12 rows left out" in first and "--strict" in first
    assert "line 2: field 'evidence' is empty" in named[0]
    assert "line 3: evidence[0]: field 'text'" in named[1] and len(named) == 5
    assert "5 more" in last


@pytest.mark.parametrize("paper, quoted", [
    ("A line\nbroken here.", "A line\r\nbroken here."),
    ("A line\r\nbroken here.", "A line\nbroken here."),
    ("A line\u2028broken here.", "A line broken here."),
    ("A line broken here.", "A line\n  broken\u00a0here."),
    ("A line\u00a0broken\u2029 here.", "A line broken here.\u2028")])
def test_a_selection_may_have_other_line_breaks_than_its_paper(tmp_path, paper, quoted):
    """The gold is then what the paper says: that is what an answer can quote."""
    row = ROWS["evidence"][0] | {"papers": [PAPER | {"text": f"Before. {paper} After."}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | selection(quoted)))
    task, = read(path, "evidence", strict=True)
    assert task.answer == {"p": [paper]} and reward(task, [paper]) == 1.0


def test_a_file_without_rows_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="rows.jsonl: holds no questions"):
        read(path, "evidence")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl", "evidence")


def test_split_is_disjoint_complete_and_the_same_every_time():
    for n in (2, 3, 10, 700):
        every = [Task(str(i), "evidence", "q", {}, {}) for i in range(n)]
        train, held = split(every)
        assert sorted(t.id for t in train + held) == sorted(t.id for t in every)
        assert len(held) == min(128, max(1, n // 5)) and train
        assert (train, held) == split(every)
    assert [t.id for t in train] != sorted((t.id for t in train), key=int)  # shuffled
    for few in ([], every[:1]):
        with pytest.raises(ValueError, match="at least 2"):
            split(few)


def test_rows_that_share_a_paper_are_on_one_side_of_the_split():
    def row(i, *papers):
        return Task(str(i), "evidence", "q", {f"{i}-{p}": f"text of {p}" for p in papers})

    # Rows 0 to 3 are one chain of shared papers, of which the ends share none.
    chain = [row(i, i, i + 1) for i in range(4)]
    pairs = [row(i, 100 + i // 2) for i in range(10, 30)]
    train, held = split(chain + pairs)
    assert len(held) == 4 and len(train) == 20

    def texts(tasks):
        return {text for task in tasks for text in task.context.values()}

    assert not texts(train) & texts(held)
    same = [Task(str(i), "code", "q", "one\ntext" if i < 5 else "one text", "A")
            for i in range(10)]
    assert {t.id for t in split([*same, row(99, 99)])[1]} == {"99"}  # the only other one


def test_rows_that_all_share_papers_are_split_all_the_same_and_it_is_said(capsys):
    every = [Task(str(i), "evidence", "q", {"p": "the same"}, {}) for i in range(10)]
    train, held = split(every)
    assert len(held) == 2 and len(train) == 8
    assert "share a text" in capsys.readouterr().out


def test_the_word_is_quoted_or_the_longest_of_the_question_that_occurs():
    context = {"p": "on harbours and tides"}
    for query, word in (('What of "sand bars"?', "sand bars"), ("Nothing", "Nothing"),
                        ("Extraordinary tides in harbours", "harbours"), ("?", "the")):
        assert word_of(Task("t", "evidence", query, context)) == word
