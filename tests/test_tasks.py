"""How an answer is scored, what the task's helpers return, and what a file may hold."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tasks import haystacks  # noqa: E402
import tasks  # noqa: E402
from tasks.haystacks import SYLLABLES, make_term  # noqa: E402
from tasks import (MAX_SPANS, Task, demonstrate, extract_section,  # noqa: E402
                   get_paper_abstract, keyword, list_papers, load_tasks, make_task, mark, reward,
                   search, split, strings_in)
from tree import Node, Turn  # noqa: E402

PAPERS = ROOT / "tests" / "data" / "papers.jsonl"


def evidence(context, gold):
    return Task("t", "evidence", "q", context, gold)


def generated(n=5, **options):
    return [make_task("evidence", random.Random(i), **options) for i in range(n)]


def share(task):
    """The gold characters and all characters of a task's context."""
    gold = sum(sum(mark(text, task.answer.get(p, ()))) for p, text in task.context.items())
    return gold, sum(map(len, task.context.values()))


# --- scoring --------------------------------------------------------------------------------------


def marks(context, spans_of):
    """The slow reference: every (paper, position) that any occurrence of any span covers."""
    return {(paper, at + k) for paper, text in context.items() for span in spans_of(paper)
            for at in range(len(text) - len(span) + 1) if text[at:at + len(span)] == span
            for k in range(len(span))}


def slow_reward(task, answer):
    wanted = marks(task.context, lambda paper: task.answer.get(paper, ()))
    returned = marks(task.context, lambda paper: [s.strip() for s in answer if s.strip()])
    both = len(wanted & returned)
    return 2 * both / (len(wanted) + len(returned)) if both else 0.0


@pytest.mark.parametrize("alphabet", ["ab", "abc. ", "a"])
def test_reward_agrees_with_a_set_of_marked_positions(alphabet):
    rng, scores = random.Random(alphabet), []

    def word(most):
        return "".join(rng.choices(alphabet, k=rng.randint(1, most)))

    for _ in range(500):
        context = {f"p{i}": word(40) for i in range(rng.randint(1, 3))}
        gold = {}
        for paper, text in context.items():
            at = rng.randrange(len(text))
            if span := text[at:at + rng.randint(1, 9)].strip():
                gold[paper] = [span]
        answer = [word(6) for _ in range(rng.randint(0, 4))]
        answer += [t[2:30] for t in context.values() if rng.random() < 0.3]
        task = evidence(context, gold)
        scores.append(reward(task, answer))
        assert scores[-1] == pytest.approx(slow_reward(task, answer), abs=1e-12)
    assert max(scores) == 1.0 and len(set(scores)) > (1 if alphabet == "a" else 50)


@pytest.mark.parametrize("answer", [
    None, 0, 1, -2.5, float("nan"), True, False, "", " \n\t", [], [[]], [[], [None, 3, [True]]],
    ["", " "], "found nowhere", ["found nowhere", ["nor this"]], {"p": "gold here"}],
    ids=repr)
def test_worthless_answers_score_exactly_0(answer):
    task = evidence({"p": "some gold here. True 1 0 None [] nothing -2.5"}, {"p": ["gold here"]})
    assert reward(task, answer) == 0.0 and type(reward(task, answer)) is float
    assert reward(task, "gold here") == 1.0


def test_the_exact_gold_scores_1_in_any_nesting_and_with_blanks_around():
    for task in [*generated(), *load_tasks(PAPERS)]:
        gold = list(task.answer.values())
        assert reward(task, gold) == 1.0
        assert reward(task, [[[s]] for sentences in gold for s in sentences]) == 1.0
        assert reward(task, tuple(f"\n {s} " for sentences in gold for s in sentences)) == 1.0


def test_an_echo_of_everything_scores_2p_over_1_plus_p():
    for task in [*generated(), *load_tasks(PAPERS)]:
        gold, size = share(task)
        p = gold / size
        # Blanks at a paper's ends do not count as returned, and none has any.
        assert all(text == text.strip() for text in task.context.values())
        assert reward(task, list(task.context.values())) == pytest.approx(2 * p / (1 + p))
        assert reward(task, list(task.context.values())) < 0.5


def test_no_choice_of_whole_papers_beats_the_gold():
    for task in generated(papers=6, relevant=(2, 3)):
        texts = list(task.context.values())
        for choice in range(1, 1 << len(texts)):
            papers = [text for i, text in enumerate(texts) if choice >> i & 1]
            assert reward(task, papers) < 1.0
            assert reward(task, [papers, list(task.answer.values())]) < 1.0


def test_repeating_and_nesting_spans_gains_nothing():
    task = evidence({"p": "the gold is here, and the rest is not"}, {"p": ["gold is here"]})
    once = reward(task, ["gold is", "the rest"])
    assert 0 < once < 1
    assert reward(task, ["gold is", "the rest", "gold is", ["gold is", ["the rest"]]]) == once
    assert reward(task, ["gold is", "gold", "is", "old i", "the rest"]) < once  # "is" hits "this"
    assert reward(task, ["gold is", "gold", "old i", "the rest"]) == once


def test_overlapping_occurrences_are_marked():
    assert bytes(mark("baaab", ["aa"])) == b"\0\1\1\1\0"
    assert bytes(mark("xababax", ["aba"])) == b"\0\1\1\1\1\1\0"
    assert bytes(mark("abaXabaaba", ["aba"])) == b"\1\1\1\0\1\1\1\1\1\1"
    assert reward(evidence({"p": "baaab"}, {"p": ["aaa"]}), "aa") == 1.0


def test_marking_periodic_texts_agrees_with_the_definition():
    rng = random.Random(0)
    for _ in range(3000):
        unit = "".join(rng.choices("ab", k=rng.randint(1, 4)))
        text = "".join(rng.choice(("a", "b", unit * rng.randint(1, 5))) for _ in range(6))
        span = (unit * 5)[:rng.randint(1, 3 * len(unit))]
        wanted = {at for _, at in marks({0: text}, lambda _: [span])}
        assert {i for i, m in enumerate(mark(text, [span])) if m} == wanted, (text, span)


def test_every_occurrence_in_every_paper_counts_as_returned():
    context = {"a": "gold. noise. gold.", "b": "gold. other"}
    task = evidence(context, {"a": ["gold."]})
    returned, both = 15, 10  # twice in a, where both are gold, and once in b
    assert reward(task, "gold.") == pytest.approx(2 * both / (returned + 10))


def test_gold_is_only_looked_for_in_its_own_paper():
    task = evidence({"a": "same text", "b": "same text"}, {"a": ["same text"]})
    assert reward(task, "same text") == pytest.approx(2 / 3)


def test_too_many_distinct_strings_score_0():
    text = " ".join(f"w{i}." for i in range(MAX_SPANS + 1))
    words = text.split()
    task = evidence({"p": text}, {"p": [text]})
    assert reward(task, words[:MAX_SPANS]) > 0.5
    assert reward(task, words[:MAX_SPANS] * 3) > 0.5  # the same strings again are no new ones
    assert reward(task, words) == 0.0


def test_a_deeply_nested_answer_is_scored():
    answer = "gold"
    for _ in range(100_000):
        answer = [answer]
    assert strings_in(answer) == ["gold"]
    assert reward(evidence({"p": "all gold"}, {"p": ["gold"]}), answer) == 1.0
    while isinstance(answer, list):  # take it apart: freeing it whole may recurse
        answer = answer[0]


@pytest.mark.parametrize("unit", ["a", "ab", "abcabcd"])
def test_periodic_text_is_marked_in_linear_time(unit):
    text = unit * (1_000_000 // len(unit))
    span = text[:len(text) // 2]
    task = evidence({"p": text}, {"p": [span]})
    assert reward(task, [span]) == 1.0  # comparing anew at each position would take minutes
    assert sum(mark(text + "!" + text, [span, text])) == 2 * len(text)


def test_other_kinds_of_task_have_no_score():
    with pytest.raises(ValueError, match="question"):
        reward(Task("t", "question", "q", "context"), "x")


# Worked examples of the public scoring rules: (kind, gold, answer, score), under their source.
PUBLIC = [
    # RULER, arXiv 2404.06654, table 2: S-NIAH, MK-NIAH, MV-NIAH, MQ-NIAH
    ("niah", ["12345"], "12345", 1.0),
    ("niah", ["12345"], "The special magic number for long-context mentioned in the provided text "
     "is 12345.", 1.0),
    ("niah", ["12345"], "54321", 0.0),
    ("niah", ["12345", "54321"], "12345 54321", 1.0),
    # RULER, scripts/eval/synthetic/constants.py, string_match_all: sum of (1.0 if r.lower() in
    # pred.lower()) / len(ref); four of five references are 0.8, as its users report
    ("niah", ["VARA", "VARB", "VARC", "VARD", "VARE"], "vara, varb, varc and vard", 0.8),
    # OOLONG, abertsch72/oolong src/eval/eval_helpers.py at 5c8113e and arXiv 2511.02817: exact
    # match, score(y^) = 0.75 ** |y - y^|; examples as in the tests of Ovid/shesa
    # (tests/unit/test_oolong_scoring.py)
    ("aggregate", ("LABEL", "human being"), "Label: human being", 1.0),
    ("aggregate", ("LABEL", "human being"), "Label: description and abstract concept", 0.0),
    ("aggregate", ("COMPARISON", "less common than"), "Answer: less common than", 1.0),
    ("aggregate", ("LABEL", "incorrect"), "Label: incorrect", 1.0),
    ("aggregate", ("NUMERIC", "7"), "Answer: 7", 1.0),
    ("aggregate", ("NUMERIC", "7"), "Answer: 8", 0.75),
    ("aggregate", ("NUMERIC", "7"), "Answer: 5", 0.75 ** 2),
    ("aggregate", ("NUMERIC", "7"), "Answer: **[7]**", 1.0),
    ("aggregate", ("NUMERIC", "7"), "I don't know", 0.0),
    ("aggregate", ("USER", "44106"), "User: 44106", 1.0),
    ("aggregate", ("USER", "44106"), "User: [44106]", 1.0),
    ("aggregate", ("USER", "44106"), "User: 99999", 0.0),
    ("aggregate", ("MONTH_YEAR", "October 2022"), "Answer: October 2022", 1.0),
    ("aggregate", ("DATE", "2023-01-06"), "Date: 01/06/2023", 1.0),
    ("aggregate", ("DATE", "2023-01-06"), "Date: 06/01/2023", 0.0),
    # Recursive Language Models, arXiv 2512.24601, appendix B.3: "was the correct answer"
    ("aggregate", ("COMPARISON", "less common than"),
     "Answer: description and abstract concept is less common than numeric value", 1.0),
    ("aggregate", ("COMPARISON", "more common than"),
     "Answer: description and abstract concept is less common than numeric value", 0.0),
    # OOLONG-Pairs, the same, appendix B.2: "if the answer is the Instance ID pairs (22740, 35839)
    # and (35839, 52032), you should return '(22740, 35839), (35839, 52032)'. If there is no
    # answer, return an empty list []"; "We report F1 scores over the answer"
    ("pairs", [["22740", "35839"], ["35839", "52032"]], "(22740, 35839), (35839, 52032)", 1.0),
    ("pairs", [["22740", "35839"], ["35839", "52032"]], "(22740, 35839)\n(22740, 52032)", 0.5),
    ("pairs", [["22740", "35839"], ["35839", "52032"]], "(35839, 22740)", 2 / 3),
    ("pairs", [], "[]", 1.0),
    ("pairs", [["22740", "35839"]], "[]", 0.0),
    # verbatim_copy of PrimeIntellect-ai/verifiers, outputs/evals/.../00e07679/results.jsonl,
    # example 0 (its first lines): exact_match 1.0
    ("copy", "be6f4634-f2c5-2b86-c1b3-32a536ef94e7\nSEZ6-AJ24-73WH",
     "be6f4634-f2c5-2b86-c1b3-32a536ef94e7\nSEZ6-AJ24-73WH", 1.0),
    ("copy", "be6f4634-f2c5-2b86-c1b3-32a536ef94e7\nSEZ6-AJ24-73WH",
     "be6f4634-f2c5-2b86-c1b3-32a536ef94e7 SEZ6-AJ24-73WH", 0.0),
    # LongBench v2, THUDM/LongBench pred.py, extract_answer: '*' is dropped, then "The correct
    # answer is (X)" or "The correct answer is X"
    ("code", "C", "The correct answer is (C).", 1.0),
    ("code", "C", "The correct answer is C.", 1.0),
    ("code", "A", "The correct answer is (**A**).", 1.0),
    ("code", "B", "I think it's option B but I'm unsure.", 0.0),
    ("code", "B", "No answer here.", 0.0),
    # SQuAD's and HotpotQA's normalisation, from google-research/text-to-text-transfer-transformer,
    # t5/evaluation/qa_utils_test.py, test_normalize_squad
    ("hop", "needs alot of normalization\u2018", "`Needs\tA_LOT of the 'normalization'.\"\u2018",
     1.0),
    ("hop", "needs no normalization", "needs no normalization", 1.0),
    # ... and of HotpotQA's "What government position was held by the woman who portrayed Corliss
    # Archer in the film Kiss and Tell?"
    ("hop", "Chief of Protocol", "the chief of protocol.", 1.0),
    ("hop", "Chief of Protocol", "Chief of Staff", 0.0),
    # Evidence as in the published training run: F1 of character overlap; half of the gold and as
    # much beside it are precision 1/2 and recall 1/2
    ("evidence", {"p": ["abcd"]}, ["cdef"], 0.5),
]


def with_gold(kind, gold):
    if kind == "aggregate":
        gold = dict(zip(("type", "value"), gold))
    return Task("t", kind, "q", {"p": "abcdef"} if kind == "evidence" else "text", gold)


@pytest.mark.parametrize("kind, gold, answer, score", PUBLIC, ids=lambda value: str(value)[:30])
def test_public_scoring_rules_on_their_own_examples(kind, gold, answer, score):
    assert reward(with_gold(kind, gold), answer) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("kind, gold, answer", [
    # where the public parsers guess and this one does not
    ("aggregate", ("LABEL", "entity"), "numeric value, location, human being, entity"),
    ("aggregate", ("LABEL", "entity"), "The most common label seems to be entity"),
    ("aggregate", ("COMPARISON", "more common than"), "more common than or less common than"),
    ("aggregate", ("NUMERIC", "7"), "6 7 8"), ("aggregate", ("NUMERIC", "7"), "7.0"),
    ("aggregate", ("NUMERIC", "7"), "about 7"), ("aggregate", ("NUMERIC", "7"), "9" * 10_000),
    ("aggregate", ("NUMERIC", "7"), "1" * 15), ("aggregate", ("NUMERIC", "1"), True),
    ("aggregate", ("LABEL", "entity"), {"answer": "entity"}),
    ("aggregate", ("LABEL", "entity"), [["entity"]]),
    ("pairs", [["1", "2"]], "1, 2"), ("pairs", [["1", "2"]], [1, 2]),
    ("pairs", [["1", "2"]], [[1, 2, 3]]), ("pairs", [["1", "2"]], [[1.0, 2.0]]),
    ("pairs", [["1", "2"]], {"1": "2"}), ("pairs", [["1", "2"]], [[["1", "2"]]]),
    ("pairs", [], ""), ("pairs", [], None), ("pairs", [], "I found none"), ("pairs", [], "(1, 2)"),
    ("copy", "text", " text"), ("copy", "text", ["text"]), ("copy", "5", 5),
    ("code", "B", "A, B, C, D"), ("code", "B", "AB"), ("code", "B", "b"), ("code", "B", "E"),
    ("code", "B", ["A", "B"]), ("code", "B", "The correct answer is A. The correct answer is (B)"),
    ("code", "B", "The correct answer is (B) or (C)"),
    ("code", "B", "The correct answer is (A) (B) (C) (D)"),
    ("hop", "Tofar", "Tofar or Belrun"), ("hop", "Tofar", ["Tofar", "Belrun"]),
    ("hop", "the", "a"), ("hop", "Tofar", "the city of Tofar"),
    ("niah", ["12345"], "1" * 512 + "12345")], ids=lambda value: str(value)[:30])
def test_an_answer_that_says_more_than_the_answer_scores_0(kind, gold, answer):
    assert reward(with_gold(kind, gold), answer) == 0.0


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_numbers_that_python_refuses_to_write_score_0(kind):
    task = make_task(kind, random.Random(0), tokens=2_000)
    for answer in (10 ** 5_000, [10 ** 5_000], [[10 ** 5_000, 1]], [[1, -10 ** 5_000]],
                   float("inf"), float("nan"), [float("nan")] * 2):
        assert reward(task, answer) == 0.0


@pytest.mark.parametrize("kind, gold, answer", [
    ("aggregate", ("NUMERIC", "7"), 7), ("aggregate", ("NUMERIC", "-7"), -7),
    ("aggregate", ("LABEL", "entity"), ["entity"]), ("aggregate", ("LABEL", "entity"), "'entity'."),
    ("aggregate", ("USER", "44106"), 44106), ("aggregate", ("DATE", "2023-01-06"), "Jan 06, 2023"),
    ("pairs", [["1", "2"]], [[2, 1], ["1", "2"], "(1, 2)"]), ("pairs", [], []),
    ("code", "B", "B"), ("code", "B", " (B)\n"), ("code", "B", "B."),
    ("code", "B", "It calls g.\nThe correct answer is (B)"),
    ("niah", ["12345"], 12345), ("niah", ["1", "2"], [1, "2"]),
    ("hop", "Tofar", ["Tofar"]), ("hop", "1984", 1984)], ids=lambda value: str(value)[:30])
def test_the_answer_alone_scores_1_in_any_json_form_that_holds_nothing_else(kind, gold, answer):
    assert reward(with_gold(kind, gold), answer) == 1.0


LABELS = haystacks.LABELS
WORTHLESS = {
    "none": None, "empty": "", "blank": " \n", "empty list": [], "empty dict": {}, "yes": True,
    "every label": ", ".join(LABELS), "every label, the last first": ", ".join(LABELS[::-1]),
    "labels": LABELS, "Label: every label": "Label: " + ", ".join(LABELS),
    "every phrase": "Answer: " + ", ".join(tasks.PHRASES), "every letter": "A, B, C, D",
    "letters": list("ABCD"), "every letter said": "The correct answer is (A), (B), (C) or (D)",
    "refusal": "I'm sorry, but I cannot answer this question.", "unknown": "I don't know",
    "no data": "There is not enough information in the context to answer.",
    "an error": "Error: the call ended without an answer (out of turns)", "nested": [[[]], [None]]}


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_answers_that_hold_nothing_score_0_on_every_kind(kind):
    for i in range(25):
        task = make_task(kind, random.Random(i), tokens=2_000)
        for name, answer in WORTHLESS.items():
            assert reward(task, answer) == 0.0, (name, task.answer)
        assert reward(task, task.query) == 0.0, task.query
        assert reward(task, [task.query]) == 0.0
        assert reward(task, tasks.strategy(kind)) == 0.0


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_an_echo_of_the_context_scores_what_is_stated(kind):
    """evidence: 2p/(1+p), p the gold share of the characters. copy: 1, for the echo is the answer.
    All others: 0."""
    for i in range(10):
        task = make_task(kind, random.Random(i), tokens=2_000)
        whole = task.context if isinstance(task.context, str) else "\n".join(
            task.context.values())
        wanted = {"copy": 1.0}.get(kind, 0.0)
        assert reward(task, whole) == wanted
        if kind == "evidence":
            gold, size = share(task)
            assert reward(task, list(task.context.values())) == pytest.approx(
                2 * gold / (size + gold))
        elif isinstance(task.context, dict):
            assert reward(task, list(task.context.values())) == 0.0
            assert reward(task, list(task.context)) == 0.0  # every name of a document


def test_all_pairs_of_users_score_2p_over_1_plus_p_and_at_most_two_thirds():
    for i in range(10):
        task = make_task("pairs", random.Random(i), tokens=2_000)
        users = sorted(set(re.findall(r"User: (\d+)", task.context)))
        every = [[a, b] for a in users for b in users if a < b]
        p = len(task.answer) / len(every)
        assert reward(task, every) == pytest.approx(2 * p / (1 + p)) and p <= 0.5
        assert reward(task, "\n".join(f"({b}, {a})" for a, b in task.answer)) == 1.0


def test_a_judge_is_asked_once_and_read_strictly():
    task = evidence({"p": "some gold here"}, {"p": ["gold {answer}", "x"]})
    prompt = tasks.judge_prompt(task, [["an answer {gold}"], None])
    assert "<reference>\ngold {answer}\nx\n</reference>" in prompt
    assert "<answer>\nan answer {gold}\n</answer>" in prompt
    for reply, score in (("precision: 10\nrecall: 10", 1.0), ("Precision: 1\nRecall: 1\n", 0.1),
                         ("precision: 7\nrecall: 4", 0.55)):
        assert tasks.judge_score(reply) == pytest.approx(score)
    for reply in ("", "precision: 11\nrecall: 1", "precision: 0\nrecall: 5", "10 and 10",
                  "precision: 9\nrecall: 9\nprecision: 1\nrecall: 1", "precision: 9.5\nrecall: 9",
                  "recall: 9\nprecision: 9", "I rate it precision: 9\nrecall: 9", "precision: 9",
                  f"precision: {'9' * 5_000}\nrecall: 9"):
        assert tasks.judge_score(reply) is None


def test_every_kind_has_advice_and_free_questions_have_none():
    assert len({tasks.strategy(kind) for kind in tasks.KINDS}) == len(tasks.KINDS) == 7
    assert tasks.strategy("evidence") == tasks.STRATEGY and tasks.strategy("question") == ""
    assert all("FINAL" in tasks.strategy(k) or "eturn" in tasks.strategy(k) for k in tasks.KINDS)


# --- generated tasks ------------------------------------------------------------------------------


def test_a_seed_names_a_task():
    assert generated() == generated()
    assert len({t.query for t in generated(20)}) > 15
    assert len({t.id for t in generated(20)}) == 20


@pytest.mark.parametrize("heldout", [False, True])
def test_gold_is_exactly_the_sentences_that_contain_the_term(heldout):
    for task in generated(30, heldout=heldout):
        term = keyword(task)
        assert task.query == f'Quote all on "{term}".'
        assert 2 <= len(task.answer) <= 4 and len(task.context) == 12
        for paper, text in task.context.items():
            body = text.rpartition("\n")[2]
            found = [s for s in re.split(r"(?<=\.) ", body) if term in s]
            assert sorted(found) == sorted(task.answer.get(paper, []))
            assert text.count(term) == len(found)  # not in title or abstract either


def test_training_and_held_out_terms_are_disjoint():
    assert len(set(SYLLABLES)) == 60
    rng = random.Random(0)
    train, held = ({make_term(rng, h) for _ in range(20_000)} for h in (False, True))
    assert not train & held
    assert len(train) > 2000 and len(held) > 600
    for task in generated(20, heldout=True):  # all their papers, not only the question
        assert not set(re.findall(r"\w{3}-\w{3}", str(task))) & train


def test_sizes_are_parameters():
    for papers, relevant, sentences in ((1, (1, 1), 1), (3, (1, 2), 2), (40, (5, 5), 20)):
        for i in range(30):
            task = make_task("evidence", random.Random(i), papers=papers, relevant=relevant,
                             sentences=sentences)
            assert len(task.context) == papers
            assert relevant[0] <= len(task.answer) <= relevant[1]
            assert all(text.rpartition("\n")[2].count(".") == sentences
                       for text in task.context.values())
            assert reward(task, list(task.answer.values())) == 1.0


def test_more_relevant_papers_than_papers_means_all():
    assert len(make_task("evidence", random.Random(0), papers=2, relevant=(5, 9)).answer) == 2


def test_one_paper_never_runs_out_of_other_terms(monkeypatch):
    terms = iter(["same", "same", "same", "x", "y", "z"])
    monkeypatch.setattr(haystacks, "make_term", lambda rng, heldout: next(terms))
    task = make_task("evidence", random.Random(0), papers=1, relevant=(1, 1))
    assert keyword(task) == "same" and len(task.context) == 1


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="poetry"):
        make_task("poetry", random.Random(0))


@pytest.mark.parametrize("root, child, score", [
    ("filter", "exact", 1.0), ("all", "exact", 1.0), ("forget", "exact", 0.0)])
def test_the_right_demonstration_scores_1(root, child, score, monkeypatch):
    """The scripts, run as plain Python with the helpers, give what their names say."""
    monkeypatch.setattr(tasks, "ROOT_SCRIPTS", {root: 1})
    monkeypatch.setattr(tasks, "CHILD_SCRIPTS", {child: 1})
    monkeypatch.setattr(tasks, "LOOK_FIRST", 0)

    def play(task, node, context):
        answer = []
        code = demonstrate(task, node, 0).removeprefix("```repl\n").removesuffix("\n```")
        ask = lambda prompt, parts: [play(task, Node((0,)), part) for part in parts]  # noqa: E731
        exec(code, {"context": context, "FINAL": answer.append, "search": search,
                    "rlm_query_batched": ask, "print": lambda *_: None})
        return answer[0] if answer else None

    for task in generated():
        assert reward(task, play(task, Node(), task.context)) == score


def test_a_node_keeps_its_script_and_looks_at_most_once():
    task, looked = generated(1)[0], 0
    for seed in range(200):
        node = Node()
        first = demonstrate(task, node, seed)
        assert first == demonstrate(task, node, seed)
        node.add(Turn("assistant", first))
        then = demonstrate(task, node, seed)
        looked += first == "```repl\nprint(len(context))\n```"
        assert then == first or "print(len(context))" in first
    assert 20 < looked < 80


# --- the helpers in the REPL ----------------------------------------------------------------------


def random_text(rng):
    words = "tide Tide bread moon a the tidal İstanbul 3.5".split() if rng.random() < 0.2 else (
        "tide Tide bread moon a the tidal 3.5".split())
    out = ""
    for _ in range(rng.randint(0, 8)):
        out += " ".join(rng.choices(words, k=rng.randint(1, 6)))
        out += rng.choice([". ", "! ", "?  ", ".\n", "\n\n", ".", ""])
    return out


def sentences_of(text):
    return [part for part in re.split(r"(?<=[.!?])(?<!\s)(?=\s)\s+|\n+", text)
            if part and part.strip()]


def test_a_window_of_0_gives_exactly_the_sentences_with_the_word():
    text = ("The tide rose. Nobody saw it! Was the TIDE late?\nA heading on tides\n\n"
            "No. A tide, a tide and a tide. End")
    assert search(text, "tide", 0) == [
        "The tide rose.", "Was the TIDE late?", "A heading on tides", "A tide, a tide and a tide."]
    for task in generated(10):
        for paper, context in task.context.items():
            assert search(context, keyword(task), window=0) == sorted(
                task.answer.get(paper, []), key=context.index)
    rng = random.Random(0)
    for _ in range(500):
        text = random_text(rng)
        if len(text.lower()) == len(text):
            assert search(text, "tide", 0) == [
                s.strip() for s in sentences_of(text) if "tide" in s.lower()], text


@pytest.mark.parametrize("window", [0, 1, 7, 30, 10_000])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_passages_are_whole_sentences_in_order_joined_where_they_overlap(window, bidirectional):
    rng = random.Random(window)
    for _ in range(300):
        text, at = random_text(rng), 0
        passages = search(text, "tide", window, bidirectional)
        ends = {0, len(text)} | {m.start() for m in re.finditer(r"\s+", text)}
        for passage in passages:
            assert passage and passage == passage.strip()
            start = text.index(passage, at)  # verbatim, in order, without overlap
            at = start + len(passage)
            before = text[:start].rstrip(" ")
            assert not before or before[-1] in ".!?\n"
            assert at == len(text) or passage[-1] in ".!?" or text[at] == "\n"
            assert at in ends
            assert "tide" in passage.lower()
        covered = "\0".join(passages).lower().count("tide")
        if len(text.lower()) == len(text):
            assert covered >= text.lower().count("tide")


def test_the_window_reaches_to_both_sides_or_only_forward():
    text = "One one. Two two. Three WORD three. Four four. Five five."
    at, end = text.index("WORD"), text.index("WORD") + 4
    assert search(text, "word", 0) == ["Three WORD three."]
    back, forward = at - text.index("two."), text.index("four.") - end + 1
    assert search(text, "word", forward, bidirectional=False) == ["Three WORD three. Four four."]
    assert search(text, "word", back) == ["Two two. Three WORD three. Four four."]
    assert search(text, "word") == search(text, "word", 300) == [text]
    assert search(text, "WoRd", 0) == ["Three WORD three."]


def test_neighbouring_passages_stay_apart_and_overlapping_ones_are_joined():
    text = "A tide came. A tide went. Quiet now. A tide came."
    assert search(text, "tide", 0) == ["A tide came.", "A tide went.", "A tide came."]
    assert search(text, "tide", 3) == ["A tide came. A tide went.", "Quiet now. A tide came."]
    assert search(text, "tide", 12) == [text]


def test_search_for_nothing_or_in_nothing_finds_nothing():
    assert search("Some text.", "") == search("", "word") == search("", "") == []
    assert search("Some text.", "absent") == []


def test_letters_that_change_length_in_lower_case_do_not_shift_passages():
    text = "İİİİ. The tide. İİ."
    assert search(text, "tide", 0) == ["The tide."]


def test_the_other_helpers_read_the_layout_of_a_paper():
    task = load_tasks(PAPERS)[0]
    assert list_papers(task.context)[1] == ("tides-2", "The funnel at Fundy")
    assert get_paper_abstract(task.context, "tides-3") == "Notes from two enclosed seas."
    assert get_paper_abstract({"x": "no such mark"}, "x") == ""
    assert extract_section("a (b) c (d) e", "(", ")") == "(b)"
    assert extract_section("|one|two|", "|", "|") == "|one|"
    assert extract_section("no start)", "(", ")") == extract_section("(no end", "(", ")") == ""


def test_the_helpers_work_from_their_source_alone():
    """Which is how they come into the REPL."""
    space = {}
    exec(tasks.TOOLS, space)
    for name in ("list_papers", "search", "extract_section", "get_paper_abstract"):
        assert callable(space[name]) and f"{name}(" in tasks.TOOLS_HELP
    assert space["search"]("A b. C d.", "c", 0) == ["C d."]


# --- tasks from a file ----------------------------------------------------------------------------


def test_the_published_schema_is_read():
    rows = [json.loads(line) for line in PAPERS.read_text(encoding="utf-8").splitlines()]
    loaded = load_tasks(PAPERS)
    assert len(loaded) == len(rows) == 6
    assert len({t.id for t in loaded}) == 6
    for task, row in zip(loaded, rows):
        assert (task.kind, task.query) == ("evidence", row["question"])
        assert list(task.context) == [p["paperId"] for p in row["papers"]]
        for p in row["papers"]:
            assert task.context[p["paperId"]] == (
                f"### PAPER: {p['title']}\n<abstract>{p['abstract']}</abstract>\n{p['text']}")
        assert task.answer == {e["paperId"]: [s["text"] for s in e["selections"]]
                               for e in row["evidence"]}
        assert 3 <= len(row["papers"]) <= 5 and task.answer


def paper(**changes):
    whole = {"paperId": "p", "title": "T", "abstract": "A", "text": "Some text. More."}
    return {k: v for k, v in (whole | changes).items() if v is not ...}


def row(**changes):
    whole = {"question": "Why?", "papers": [paper()],
             "evidence": [{"paperId": "p", "selections": [{"text": "Some text."}]}]}
    return {k: v for k, v in (whole | changes).items() if v is not ...}


def selections(*texts, of="p"):
    return [{"paperId": of, "selections": [{"text": t} for t in texts]}]


@pytest.mark.parametrize("bad, field", [
    (b"{not json", "not JSON"), (b"\xff\xfe{}", "not JSON"), (b"[" * 100_000, "not JSON"),
    ([1], "'question'"), (7, "'question'"),
    (row(question=...), "'question'"), (row(question=3), "'question'"),
    (row(papers=...), "'papers'"), (row(papers={"p": "x"}), "'papers'"),
    (row(papers=[paper(text=...)]), "'text'"), (row(papers=[paper(text=None)]), "'text'"),
    (row(papers=[paper(paperId=4)]), "'paperId'"), (row(papers=["text"]), "'paperId'"),
    (row(papers=[]), "'papers'"),
    (row(papers=[paper(title="", abstract=" ", text="\n")]), "'papers'"),
    (row(evidence=...), "'evidence'"), (row(evidence=[]), "'evidence'"),
    (row(evidence=[{"paperId": "p", "selections": []}]), "'evidence'"),
    (row(evidence="Some text."), "'evidence'"),
    (row(evidence=[{"paperId": "p"}]), "'selections'"),
    (row(evidence=selections("Some text.", of="q")), "'paperId'"),
    (row(evidence=selections("Some text.", "Somé text.")), "'text'"),
    (row(evidence=selections("")), "'text'"), (row(evidence=selections(" ")), "'text'"),
    (row(evidence=[{"paperId": "p", "selections": ["Some text."]}]), "'text'")],
    ids=lambda value: str(value)[:50])
def test_a_bad_row_is_one_line_that_names_line_and_field(tmp_path, bad, field):
    path = tmp_path / "rows.jsonl"
    line = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    path.write_bytes(json.dumps(row()).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError) as error:
        load_tasks(path)
    message = str(error.value)
    assert message.startswith(f"{path} line 3") and field in message and "\n" not in message
    assert len(message) < 400


ROWS = {  # a row of each schema, and what becomes of it: (row, query, context, gold)
    # a data point of RULER as in Moenupa/VTCBench data/README.md
    "niah": ({"index": 2169, "input": "A special magic number is hidden within the following text."
              "\nSome text.\nWhat is the special magic number for jittery-hospital mentioned in "
              "the provided text?", "outputs": ["5437923"], "length": 8177,
              "length_w_model_temp": 8177, "token_position_answer": 569},
             "What is the special magic number for jittery-hospital mentioned in the provided "
             "text?", "A special magic number is hidden within the following text.\nSome text.",
             ["5437923"]),
    "aggregate": ({"id": 810080042, "context_window_text": "Date: Sep 06, 2023 || User: 14512 || "
                   "Instance: What is a tonne ?", "question": "Which?", "answer": "['incorrect']",
                   "answer_type": "ANSWER_TYPE.LABEL", "task": "TASK_TYPE.MOST_FREQ"}, "Which?",
                  "Date: Sep 06, 2023 || User: 14512 || Instance: What is a tonne ?",
                  {"type": "LABEL", "value": "incorrect"}),
    "pairs": ({"question": "Which pairs?", "context_window_text": "text",
               "answer": "(22740, 35839), (52032, 35839)"}, "Which pairs?", "text",
              [["22740", "35839"], ["35839", "52032"]]),
    "copy": ({"example_id": 0, "prompt": [{"role": "user", "content": "Copy the text contained "
              "within the <text> tags exactly:\n\n<text>SEZ6\nAJ24</text>\n\n<env_tips>tips"
              "</env_tips>"}], "answer": "SEZ6\nAJ24"}, haystacks.COPY, "SEZ6\nAJ24",
             "SEZ6\nAJ24"),
    "code": ({"_id": "1", "domain": "Code Repository Understanding", "question": "Which?",
              "choice_A": "Alpha", "choice_B": "Beta", "choice_C": "Gamma", "choice_D": "Delta",
              "answer": "B", "context": "fixture context"},
             "Which?\n(A) Alpha\n(B) Beta\n(C) Gamma\n(D) Delta\nAnswer with the letter.",
             "fixture context", "B"),
    "hop": ({"query_id": "769", "query": "Who?", "answer": "Jo", "gold_docs": [
             {"docid": "9", "text": "x"}], "evidence_docs": [{"docid": "9", "text": "x"}],
             "negative_docs": [{"docid": "10", "text": "y", "url": "u"}]},
            "Who?", {"10": "y", "9": "x"}, "Jo")}


@pytest.mark.parametrize("kind", ROWS)
def test_the_public_schema_of_each_kind_is_read(tmp_path, kind):
    row, query, context, gold = ROWS[kind]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task, = load_tasks(tmp_path / "rows.jsonl", kind)
    assert task == Task("row-1", kind, query, context, gold)
    assert list(task.context) == list(context)  # and in this order
    assert keyword(task) and tasks.keyword_script(task, Node())
    right = gold["value"] if kind == "aggregate" else gold
    assert reward(task, right) == 1.0 and reward(task, query) == reward(task, None) == 0.0


@pytest.mark.parametrize("text, kind, value", [
    ("[7]", "NUMERIC", "7"), ("['more common than']", "COMPARISON", "more common than"),
    ("[datetime.date(2023, 1, 6)]", "DATE", "2023-01-06"), ("[44106]", "USER", "44106"),
    ("['October 2022']", "MONTH_YEAR", "October 2022")])
def test_answers_of_oolong_are_python_literals(tmp_path, text, kind, value):
    row = ROWS["aggregate"][0] | {"answer": text, "answer_type": f"ANSWER_TYPE.{kind}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task, = load_tasks(tmp_path / "rows.jsonl", "aggregate")
    assert task.answer == {"type": kind, "value": value} and reward(task, value) == 1.0


@pytest.mark.parametrize("kind, changes, field", [
    ("niah", {"input": ...}, "'input'"), ("niah", {"input": "one line"}, "'input'"),
    ("niah", {"input": 3}, "'input'"), ("niah", {"outputs": "5437923"}, "'outputs'"),
    ("niah", {"outputs": []}, "'outputs'"), ("niah", {"outputs": [5]}, "'outputs'"),
    ("niah", {"outputs": [""]}, "'outputs'"),
    ("aggregate", {"question": ...}, "'question'"),
    ("aggregate", {"answer": "entity"}, "'answer'"), ("aggregate", {"answer": "[]"}, "'answer'"),
    ("aggregate", {"answer": 7}, "'answer'"),
    ("aggregate", {"answer": "__import__('os')"}, "'answer'"),
    ("aggregate", {"answer": "[" * 10_000}, "'answer'"),
    ("aggregate", {"answer": "[datetime.date(2023, 13, 1)]", "answer_type": "DATE"}, "'answer'"),
    ("aggregate", {"answer": "['x']", "answer_type": "NUMERIC"}, "'answer'"),
    ("aggregate", {"answer_type": "ANSWER_TYPE.MOOD"}, "'answer_type'"),
    ("aggregate", {"context_window_text": " "}, "'context_window_text'"),
    ("pairs", {"answer": ...}, "'answer'"), ("pairs", {"answer": "none"}, "'answer'"),
    ("pairs", {"answer": {"1": 2}}, "'answer'"), ("pairs", {"answer": [1, 2]}, "'answer'"),
    ("pairs", {"context_window_text": None}, "'context_window_text'"),
    ("copy", {"prompt": []}, "'content'"), ("copy", {"prompt": "text"}, "'prompt'"),
    ("copy", {"prompt": [{"content": "no tags"}]}, "'answer'"),
    ("copy", {"answer": ...}, "'answer'"), ("copy", {"answer": "SEZ6 AJ24"}, "'answer'"),
    ("code", {"choice_C": ...}, "'choice_C'"), ("code", {"answer": "E"}, "'answer'"),
    ("code", {"answer": "AB"}, "'answer'"), ("code", {"context": ""}, "'context'"),
    ("code", {"question": None}, "'question'"),
    ("hop", {"query": ...}, "'query'"), ("hop", {"answer": ""}, "'answer'"),
    ("hop", {"negative_docs": ...}, "'negative_docs'"), ("hop", {"gold_docs": ["9"]}, "'docid'"),
    ("hop", {"gold_docs": [{"docid": 9, "text": "x"}]}, "'docid'"),
    ("hop", {"gold_docs": [{"docid": "9", "text": ""}]}, "'text'"),
    ("hop", {"gold_docs": [], "evidence_docs": [], "negative_docs": []}, "'gold_docs'")],
    ids=lambda value: str(value)[:40])
def test_a_bad_row_of_any_kind_names_line_and_field(tmp_path, kind, changes, field):
    path = tmp_path / "rows.jsonl"
    whole = ROWS[kind][0]
    bad = {k: v for k, v in (whole | changes).items() if v is not ...}
    path.write_text(json.dumps(whole) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(ValueError) as error:
        load_tasks(path, kind)
    message = str(error.value)
    assert message.startswith(f"{path} line 3") and field in message and "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("kind", tasks.KINDS)
@pytest.mark.parametrize("line", [b"[]", b"7", b"null", b'"x"', b"{}", b"{", b"\xff",
                                  b"[" * 99_999])
def test_lines_that_are_no_objects_are_named_for_every_kind(tmp_path, kind, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line)
    with pytest.raises(ValueError, match="rows.jsonl line 1") as error:
        load_tasks(path, kind)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="poetry.*there are: evidence, niah"):
        load_tasks(tmp_path / "rows.jsonl", "poetry")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="rows.jsonl: holds no questions"):
        load_tasks(path)
    with pytest.raises(FileNotFoundError):
        load_tasks(tmp_path / "none.jsonl")


def test_split_is_disjoint_complete_and_the_same_every_time():
    for n in (2, 3, 10, 700):
        all_tasks = [Task(str(i), "evidence", "q", {}, {}) for i in range(n)]
        train, held = split(all_tasks)
        assert sorted(t.id for t in train + held) == sorted(t.id for t in all_tasks)
        assert len(held) == min(128, max(1, n // 5)) and train
        assert (train, held) == split(all_tasks)
    assert [t.id for t in train] != sorted((t.id for t in train), key=int)  # shuffled
    for few in ([], all_tasks[:1]):
        with pytest.raises(ValueError, match="at least 2"):
            split(few)


def test_keyword_is_quoted_or_the_longest_word_of_the_question_that_occurs():
    context = {"p": "on harbours and tides"}
    assert keyword(Task("t", "evidence", 'What of "sand bars"?', context)) == "sand bars"
    assert keyword(Task("t", "evidence", "Extraordinary tides in harbours", context)) == "harbours"
    assert keyword(Task("t", "evidence", "Nothing", context)) == "Nothing"
    assert keyword(Task("t", "evidence", "?", context)) == "the"
