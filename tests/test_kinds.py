"""Each task: how it scores, that its questions are what they say, and that its
scripts find the answer, through the real REPL."""
import asyncio
import hashlib
import json
import random
import re
from dataclasses import replace
from itertools import product

import pytest

import tasks
from engine.parallel import World
from config import RLMConfig
from training.trees import collect
from tasks import NAMES, Question, checked, deep, load, make, oolong, qa, requests, score_of
from tasks.common import block
from training.scripts import script_policy, scripted
from tokenizer import Tokenizer
from tree import Node, Refused

FOUND = "Ann Lee found it in 1912. It was gold, and lay in a field."
ROW = {"question": "Who found it?", "answers": {"text": ["Ann Lee", "Lee"]},
       "context": [{"title": "a", "text": FOUND},
                   {"title": "b", "text": "Nobody saw it for a year."}]}


LINES_ROW = {"question": "Which label is the most common?", "context_window_text":
             "Date: x || User: 1 || Instance: What is a tonne?"}
GOLDS = {"LABEL": "['entity']", "NUMERIC": "[7]", "COMPARISON": "['more common than']",
         "LABELS": {"0": "entity"}}
ROWS = {"qa": [ROW], "oolong": [LINES_ROW | {"answer": answer, "answer_type": of}
                                for of, answer in GOLDS.items()]}


def made(task, n=1, tokens=2_000):
    if task in ROWS:
        return [checked("t", task, load(task).read(row)) for row in ROWS[task]]
    tokens = None if task == "deep" else tokens
    return [make(load(task), random.Random(f"{task} {i}"), tokens) for i in range(n)]


# (kind, gold, {score: answers}). Where a public rule guesses what an answer meant, ours
# does not: an answer has to be the answer, in any JSON form that holds nothing else.
SCORES = [
    # OOLONG, abertsch72/oolong src/eval/eval_helpers.py at 5c8113e and arXiv 2511.02817:
    # exact match, score(y^) = 0.75 ** |y - y^|; examples as in the tests of Ovid/shesa
    # (tests/unit/test_oolong_scoring.py)
    ("oolong", ("LABEL", "entity"), {
        1: ["Label: entity", ["entity"], "'entity'."],
        0: ["numeric value, location, human being, entity", {"answer": "entity"},
            "The most common label seems to be entity", [["entity"]]]}),
    ("oolong", ("NUMERIC", "7"), {
        1: ["Answer: 7", "Answer: **[7]**", 7], 0.75: ["Answer: 8"], 0.5625: ["Answer: 5"],
        0: ["I don't know", "6 7 8", "7.0", "about 7", "9" * 10_000]}),
    ("oolong", ("NUMERIC", "-7"), {1: [-7]}), ("oolong", ("NUMERIC", "1"), {0: [True]}),
    ("oolong", ("LABELS", {"0": "food", "4": "home"}), {
        1: [{"4": "home", "0": "food"}], 1 / 2: [{"0": "food"}, {"0": "food", "4": "x"}],
        1 / 3: [{"0": "food", "7": "home"}], 0: [{}, "food", ["food", "home"]]}),
    ("oolong", ("USER", "44106"), {
        1: ["User: 44106", "User: [44106]", 44106], 0: ["User: 99999"]}),
    ("oolong", ("DATE", "2023-01-06"), {
        1: ["Date: 01/06/2023", "Jan 6, 2023"], 0: ["Date: 06/01/2023"]}),
    # Recursive Language Models, arXiv 2512.24601, appendix B.3: "was the correct answer"
    ("oolong", ("COMPARISON", "less common than"), {
        1: ["Answer: less common than", "Answer: entity is less common than location"]}),
    ("oolong", ("COMPARISON", "more common than"), {
        0: ["more common than or less common than", "Answer: less common than"]}),
    # Evidence as in the published training run: F1 of character overlap; half of the gold
    # and as much beside it are precision 1/2 and recall 1/2
    ("evidence", {"p": ["aaaabbbbccccdddd"]}, {0.5: [["ccccddddeeeeffff"]]}),
    # What is short counts if it is gold: the alphabet is in every text. Occurrences may
    # overlap: the gold marks all 16 characters, the last answer 14 of them.
    ("evidence", {"p": ["aaa"]}, {1: ["aaa", [["\n aaa "]]], 0: [["a"], ["aaaa"]]}),
    ("evidence", {"q": ["xy" * 7]}, {1: ["xy" * 7], 14 / 15: ["yx" * 7]}),
    # SQuAD 1.1 and 2.0, evaluate-v2.0.py: F1 over tokens, the best of the alternatives
    ("qa", ["the Old Bridge", "a bridge of 1912"], {
        1: ["old bridge!", "An OLD, bridge", ["old bridge"]], 2 / 3: ["bridge"],
        4 / 5: ["1912 bridge", "old bridge fell"], 0: ["abridge"],
        1 / 2: ["stone of a bridge over it"]}),
    ("qa", ["70,000"], {1: ["70000", 70000, "$70,000.00"], 0: ["7", "70,001", [7, 0]]}),
    ("qa", ["0.5"], {1: [".5", "$.50", 0.5], 0: ["5", "0.5.5", "1" * 1_000_000 + "x"]}),
    ("qa", ["the\u2014span"], {1: ["\u2014span"]}),
    ("qa", ["A"], {1: ["A", "a."], 0: ["", "the", "B"]}),
    ("qa", ["5 days", "five"], {2 / 3: ["5", 5], 1: ["Five."]}),
    ("qa", [], {1: ["", []], 0: [None, "the texts do not say", 0]}),  # they do not say
    # Right subjects among all requests that the answer or the gold names
    ("requests", {"n1": "food", "n2": "home"}, {
        1: [{"n2": "home", "n1": "food"}], 1 / 2: [{"n1": "food"}, {
            "n1": "food", "n2": "cars"}], 1 / 3: [{"n1": "food", "n7": "home"}],
        0: [{"n1": "Food"}, {"n7": "food"}, ["food", "home"], {}, "n1: food"]}),
]


@pytest.mark.parametrize("task, gold, answers", SCORES, ids=lambda value: str(value)[:30])
def test_the_score_of_an_answer(task, gold, answers):
    if task == "oolong":
        gold = dict(zip(("type", "value"), gold))
    papers = {"p": "aaaabbbbccccddddeeeeffff", "q": "xyxyxyxyxyxyxyxy"}
    context = papers if task == "evidence" else "text"
    question = Question("t", task, "q", context, gold)
    for score, given in answers.items():
        for answer in given:
            assert score_of(question, answer) == pytest.approx(score, abs=1e-12), answer
            if "the Old Bridge" in gold:
                assert qa.exact(question, answer) == (score == 1)


LABELS = ["numeric value", "entity", "location", "description and abstract concept",
          "abbreviation", "human being"]
WORTHLESS = [
    None, "", " \n", [], {}, True, ", ".join(LABELS), ", ".join(LABELS[::-1]), LABELS,
    "Label: " + ", ".join(LABELS), "Answer: " + ", ".join(oolong.PHRASES), [[[]], [None]],
    list("etaoin shrdlu"), "I'm sorry, but I cannot answer this question.", float("nan"),
]


@pytest.mark.parametrize("task", NAMES)
def test_an_answer_that_holds_nothing_scores_0(task):
    for question in made(task, 10):
        advice = getattr(load(task), "STRATEGY", "")
        for answer in (*WORTHLESS, question.query, [question.query], advice):
            assert score_of(question, answer) == 0.0, (answer, question.answer)
        assert task == "evidence" or score_of(question, question.context) < 0.2  # an echo


FIRST, SECOND = list(deep.DICTIONARY)[:2]
ONE, TWO = deep.DICTIONARY[FIRST], deep.DICTIONARY[SECOND]
TONNE, TOM = "Instance: What is a tonne?", "Instance: Who was 'Tom', \"T\"?"
PARTS = {  # (context, gold): (part, answer, score of a child that was given the part)
    "evidence": ({"a": "some gold", "b": "nothing"}, {"a": ["gold"]}, [
        ("some gold", "gold", 1.0), ("some gold", None, 0.0), ("nothing", [], 1.0),
        ("nothing", "nothing", 0.0), ("nothing", None, 0.0), ("other text", "gold", None)]),
    "qa": ({}, ["Ann Lee"], [
        ("by Ann Lee.", "Ann Lee", 1.0), ("by Ann Lee.", "", 0.0), ("Annlee", "", 1.0),
        ("by Ann Leeds", "", 1.0), ("Annlee", "Lee", 0.0), ("Annlee", None, 0.0),
        (["Ann Lee"], "Ann Lee", None)]),
    "deep": ([], [], [
        ([FIRST, SECOND], [ONE, TWO], 1.0), ([FIRST, SECOND], ONE, 2 / 3),
        (f"x {FIRST} x", [ONE, TWO], 2 / 3), (FIRST, None, 0.0), ("none", [ONE], None),
        (None, [ONE], None)]),
    "oolong": (f"Date: x || User: 1 || {TONNE}\nDate: y || User: 2 || {TOM}", {
        "labels": ["entity", "human being"]}, [
        ({"0": TONNE, "1": TOM}, {"0": "entity", "1": "human being"}, 1.0),
        ({"1": TOM}, {"0": "human being"}, 0.0), ({"1": TOM}, None, 0.0),
        ({"0": TONNE, "1": TOM}, {"1": "human being", "7": "entity"}, 0.5),
        ({"0": "other"}, {"0": "entity"}, None), ({"0": [TOM]}, {}, None),
        (TONNE, "entity", None), ({}, {}, None)]),
    "requests": ({"n": "set a 4 minute timer"}, {}, [
        ("set a 4 minute timer", "phone", 1.0), ("set a 4 minute timer", "food", 0.0),
        ("x", "", None)]),
}


@pytest.mark.parametrize("task", PARTS)
def test_a_child_is_scored_on_the_part_that_it_was_given(task):
    context, gold, cases = PARTS[task]
    question = Question("t", task, 'List the words of class "animal".', context, gold)
    for part, answer, score in cases:
        given = tasks.task_of(question).part_score(question, part, answer)
        assert given == pytest.approx(score)


@pytest.mark.parametrize("task, digest", [
    ("requests", "7001386323faed4a"), ("evidence", "4e3f159824cba832"),
    ("deep", "f4c9eac93f50e663")])
def test_questions_are_what_they_were(task, digest):
    """A seed names a question, in every run."""
    lengths = {"deep": (None,)}.get(task)
    questions = []
    for seed, heldout in product(range(10), (False, True)):
        for tokens in lengths or (None, 4 * load(task).TOKENS):
            question = make(load(task), random.Random(seed), tokens, heldout)
            questions.append([question.query, question.context, question.answer])
    assert hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16] == digest


def test_gold_of_requests_is_what_people_labelled_and_the_texts_of_splits_are_apart():
    texts = {False: set(), "validation": set(), True: set()}
    for seed, tokens, heldout in product(range(60), (None, 2_000), texts):
        question = make(requests, random.Random(seed), tokens, heldout)
        texts[heldout].update(question.context.values())
        for name, text in question.context.items():
            assert (name in question.answer) == (f'"{name.split()[0]}"' in question.query)
            subject = requests.SUBJECT[text]
            assert question.answer.get(name, subject) == subject
        assert score_of(question, question.answer) == 1.0
    assert all(len(part) > 1000 for part in texts.values())
    assert sum(map(len, texts.values())) == len(set().union(*texts.values()))


@pytest.mark.parametrize("context, answer, gold", [
    ("one text", "a", ["a"]), (["one", "two"], ["a", "b"], ["a", "b"]), ("", 18, ["18"]),
    ({"t": "one"}, {"text": ["a"]}, ["a"]), ([{"title": "t", "text": "one"}], 1.5, ["1.5"]),
    ("one", None, []), ("one", "", []), ("one", {"text": []}, [])])
def test_rows_of_questions_in_many_forms(context, answer, gold):
    for name in ("answer", "answers"):
        row = {"question": "q", "context": context, name: answer}
        titled = isinstance(context, list) and isinstance(context[0], dict)
        assert qa.read(row) == ("q", ["t\none"] if titled else context, gold)


def test_the_scripts_of_qa_find_some_answers_and_miss_others():
    """In the real REPL, for each form of a context. A root without children reads."""
    texts = {"a": "The lock was built by Ann Lee in 1912.", "b": "Tom saw the river rise."}
    rewards = []
    for context in (texts, [*texts.values()], "\n\n".join(texts.values())):
        tasks_ = [Question(f"{i}", "qa", "Who built the lock?", context, ["Ann Lee"])
                  for i in range(24)]
        policy = script_policy(tasks_, None, 0, alone=False)
        trees = asyncio.run(collect(tasks_, policy, None, RLMConfig(max_turns=3)))
        assert not any(node.errors for tree in trees for node in tree.root.walk())
        rewards += [tree.reward for tree in trees]
    assert rewards.count(1.0) > 18 and sum(score_of < 0.5 for score_of in rewards) > 18
    alone = script_policy(tasks_, None, 0, alone=True)
    trees = asyncio.run(collect(tasks_, alone, None, RLMConfig(max_nodes=1)))
    assert [tree.reward for tree in trees] == [1.0] * 24
    with pytest.raises(Refused):  # one that is nowhere to be read
        qa.demonstrate(Question("t", "qa", "What is 6 * 7?", "", ["42"]), Node(), random)


@pytest.mark.parametrize("style", ["full", "brief"])
def test_a_script_of_qa_takes_no_answer_from_the_question(style):
    """Which is repeated behind what was printed."""
    def answers(text):
        question = Question("t", "qa", "Was it Ann Lee or Tom?", {"a": text}, ["Ann Lee"])
        policy = script_policy([question] * 40, None, 0, alone=False)
        trees = asyncio.run(
            collect([question], policy, None, RLMConfig(style=style), group=40))
        return {child.answer for tree in trees for child in tree.root.children}

    echo, lines = "The river rose.", "FAQ\n1/2 cup\nThe question: who?\nann lee"
    assert answers(echo) == {"", echo}
    assert answers(lines) == {"Ann Lee", "ann lee", lines}  # read, its sentence, the echo


@pytest.mark.parametrize("query", [
    'What does "the model\'s loss" say?', 'Which "a\\" is it?',
    'Is "it\'s" or "plain" used?'])
def test_scripts_of_evidence_can_hold_what_a_question_quotes(query):
    context = {"p": "the model's loss. A plain word."}
    question = Question("t", "evidence", query, context, {})
    policy = script_policy([question] * 30, None, 0, alone=False)
    trees = asyncio.run(collect([question], policy, None, RLMConfig(), group=30))
    assert not any("SyntaxError" in turn.text for tree in trees
                   for node in tree.root.walk() for turn in node.messages)


HEAD = "These are of 4 labels: numeric value, human being, location, entity. The lines:"
LINES = """\
11111 location: Where is Rome?
22222 human being: Who was Ann?
11111 human being: Who was Tom?
22222 location: Where is Oslo?
22222 numeric value: How far is it?
22222 human being: Who was Eva?"""
FORMS = {  # a question of OOLONG: its gold
    "how many data points should be classified as label 'human being'?": ("NUMERIC", "3"),
    "only consider the data points of the user IDs 11111, 33333. Among these, how many "
    "data points should be classified as label 'location'?": ("NUMERIC", "1"),
    "is label 'location' more common, less common, or the same frequency as label 'human "
    "being'?": ("COMPARISON", "less common than"),
    "which user has the most instances with the label 'human being'?": ("USER", "22222"),
    "which of the labels is the most common?": ("LABEL", "human being"),
    "which of the labels is the least common?": ("LABEL", "entity"),
    "in the users' data, how many data points have the label 'location'?": ("NUMERIC", "2"),
}


def test_rows_of_oolong_have_the_answers_of_their_types():
    for question, answer in zip(made("oolong"), GOLDS.values(), strict=True):
        assert score_of(question, answer) == score_of(question, question.answer["value"])
        assert score_of(question, answer) == 1.0


def test_the_scripts_of_oolong_answer_the_forms_that_they_know(monkeypatch):
    """Of rows, and of all lists that are made: to train on and held out."""
    lines = [re.match(r"(\d+) (.*?): (.*)", line) for line in LINES.split("\n")]
    text = "\n".join(f"Date: x || User: {m[1]} || Instance: {m[3]}" for m in lines)
    asked = []
    for query, (task, value) in FORMS.items():
        gold = {"type": task, "value": value, "labels": [m[2] for m in lines]}
        asked += [Question(query, "oolong", query, f"{HEAD}\n{text}", gold)] * 6
    lists = [make(oolong, random.Random(i), heldout=i % 2 == 0) for i in range(60)]
    forms = {(i % 2, each.answer["type"]) for i, each in enumerate(lists)}
    assert {of for trained, of in forms if not trained} == {*GOLDS, "USER"} - {"LABELS"}
    assert (1, "LABELS") in forms

    def rewards(asked):
        policy = script_policy(asked, None, 0, alone=False)
        trees = asyncio.run(collect(asked, policy, None, RLMConfig(max_turns=3)))
        assert not any(node.errors for tree in trees for node in tree.root.walk())
        return [tree.reward for tree in trees]

    assert 6 < rewards(asked).count(1.0) < 40  # good and bad ones are mixed
    monkeypatch.setattr(oolong, "ROOT_SCRIPTS", ("",))
    monkeypatch.setattr(oolong, "CHILD_SCRIPTS", ("read",))
    assert rewards(asked + lists) == [1.0] * 102


def test_the_tiny_model_has_room_for_the_scripts_of_lists(monkeypatch):
    from training import setup

    monkeypatch.setattr(oolong, "ROOT_SCRIPTS", ("",))
    monkeypatch.setattr(oolong, "CHILD_SCRIPTS", ("read",))
    limits, tokenizer = setup.tiny_rlm(oolong), None
    lists = [make(oolong, random.Random(i), heldout=i % 2 == 0) for i in range(40)]
    for _ in range(2):  # at last as the model writes them
        trees = setup.scripted_trees(lists, tokenizer, limits, "tokenizer", World())
        texts = [f"{turn.role}\n{turn.text}" for tree in trees for node in tree.root.walk()
                 for turn in node.messages]
        tokenizer = Tokenizer.train(texts, setup.TINY_VOCABULARY)
    assert all(tree.reward == 1.0 for tree in trees)


def test_one_level_reaches_half_of_a_deep_question_and_two_all():
    """Every pair of scripts with one level, the right one with two, in the tiny model's
    limits, where completions read without a mistake."""
    from training import setup

    config = setup.tiny_rlm(tasks.load("deep"))
    trees = setup.scripted_trees(made("deep", 32), None, config, "tokenizer", World())
    texts = [f"{turn.role}\n{turn.text}" for tree in trees for node in tree.root.walk()
             for turn in node.messages]
    tokenizer = Tokenizer.train(texts, setup.TINY_VOCABULARY)
    questions = made("deep", 2)

    def play_each(depth, *names):
        def script(node, key):
            if node.kind == "llm":
                return deep.translate(node)
            return block(deep.NODE_SCRIPTS[names[node.depth]][1])

        limits, policy = replace(config, max_depth=depth), scripted(script, tokenizer)
        trees = asyncio.run(collect(questions, policy, tokenizer, limits))
        return trees, sum(tree.reward for tree in trees) / len(trees)

    one = {names: play_each(1, *names)[1] for names in product(deep.NODE_SCRIPTS, repeat=2)}
    assert max(one.values()) == pytest.approx(2 / 3)  # precision 1, recall 1/2
    best = [names for names, score in one.items() if score > 0.6]
    assert best == [("each", "firsts"), ("firsts", "each")]
    assert one["each", "each"] == 0.0  # a section is refused: it fits into no window
    trees, two = play_each(2, "each", "each", "each")
    assert two == 1.0
    for tree in trees:
        nodes = list(tree.root.walk())
        assert len(nodes) == config.max_nodes == 15
        assert max(len(n.ids) for n in nodes) < config.window
