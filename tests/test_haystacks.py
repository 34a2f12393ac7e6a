"""What is generated is what it says: length, answer, and that the scripts find and miss it."""

import asyncio
import csv
import hashlib
import importlib
import inspect
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tasks import haystacks  # noqa: E402
import tasks  # noqa: E402
import warmup  # noqa: E402
from tasks.haystacks import LABELS, OPENERS, PAIRS, rule_of  # noqa: E402
from rlm import LEAF, RLMConfig, as_text, collect, rollout  # noqa: E402
from tasks import GENERATED, KINDS, SHORTER, keyword_script, make_task, oracle, reward  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from tree import Completion, Node, Turn  # noqa: E402


def made(kind, n=1, tokens=2_000):
    return [make_task(kind, random.Random(f"{kind} {i}"), tokens=tokens) for i in range(n)]


def play(task, script, **config):
    async def policy(node, max_tokens, key):
        return Completion(script(task, node, 0))

    return asyncio.run(rollout(task, policy, None, RLMConfig(**config)))


# --- lengths and seeds ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_has_the_tokens_asked_for(kind):
    for tokens in (2_000, 3_333, 8_000, 30_000, 100_000):
        for task in made(kind, 3, tokens):
            context = task.context
            text = context if isinstance(context, str) else "".join(context.values())
            assert 0.9 * tokens <= len(text) / 4 <= 1.1 * tokens
            if kind != "evidence" or tokens > 3_000:  # as a model without a REPL is given it
                assert 0.9 * tokens <= len(as_text(context)) / 4 <= 1.15 * tokens


def test_evidence_of_a_given_length_keeps_its_other_parameters():
    for sentences, relevant in ((1, (1, 1)), (20, (6, 6))):
        task = make_task("evidence", random.Random(1), tokens=20_000, sentences=sentences,
                         relevant=relevant)
        assert 0.9 * 80_000 <= sum(map(len, task.context.values())) <= 1.1 * 80_000
        assert len(task.answer) == relevant[0]
        assert all(text.rpartition("\n")[2].count(".") == sentences
                   for text in task.context.values())


def test_evidence_of_very_many_papers_has_its_term_nowhere_else():
    task = make_task("evidence", random.Random(2), tokens=400_000, heldout=True)
    assert len(task.context) > 2_000 and 2 <= len(task.answer) <= 4
    term = tasks.keyword(task)
    assert sum(text.count(term) for text in task.context.values()) == sum(
        map(len, task.answer.values()))
    assert reward(task, list(task.answer.values())) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_out_of_range_are_refused(kind):
    for tokens in (-1, 1, 1_999, SHORTER.get(kind, 10_000_000) + 1):
        with pytest.raises(ValueError, match=f"{kind} tasks have 2,000 to"):
            make_task(kind, random.Random(0), tokens=tokens)
    with pytest.raises(ValueError, match="there are: evidence, niah"):
        make_task("poetry", random.Random(0))


def test_without_a_length_other_kinds_have_8000_tokens():
    for kind in KINDS[1:]:
        assert make_task(kind, random.Random(3)) == make_task(kind, random.Random(3), tokens=8_000)


def digest(*args, **options):
    h = hashlib.sha256()
    for i in range(5):
        t = make_task(args[0], random.Random(i), **options)
        h.update(json.dumps([t.id, t.kind, t.query, t.context, t.answer]).encode())
    return h.hexdigest()


def test_a_seed_names_a_task_in_every_process():
    assert len({digest(kind, tokens=2_000) for kind in KINDS}) == len(KINDS)
    code = ("import hashlib, json, random\nfrom tasks import KINDS, make_task\n"
            + inspect.getsource(digest) + "print([digest(kind, tokens=2_000) for kind in KINDS])")
    for seed in "1", "2":  # of Python's own hashes, which order sets
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                             env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}, check=True)
        assert run.stdout.strip() == str([digest(kind, tokens=2_000) for kind in KINDS])
    for kind in KINDS:
        assert len({t.id for t in made(kind, 20)}) == 20
        assert len({str(t.context) for t in made(kind, 20)}) == 20


def test_the_evidence_that_training_sees_is_what_it_was():
    """A digest of 200 tasks taken before there were other kinds."""
    h = hashlib.sha256()
    for i in range(40):
        for options in ({}, {"heldout": True}, {"papers": 1, "relevant": (1, 1), "sentences": 1},
                        {"papers": 48}, {"papers": 3, "relevant": (5, 9)}):
            t = make_task("evidence", random.Random(i), **options)
            h.update(json.dumps([t.id, t.kind, t.query, t.context, t.answer]).encode())
    assert h.hexdigest() == "fbbd25b5ccbebe87060e365fd72903ccf60bd79294085f95c4cd855b9420d3cc"


# --- the answers, found again the slow way --------------------------------------------------------


def test_the_needle_occurs_once_and_not_where_an_echo_would_show_it():
    for task in made("niah", 30) + made("niah", 3, 50_000):
        key = re.search(r"for (\S+) mentioned", task.query)[1]
        assert task.context.count(key) == 1 == task.context.count(task.answer[0])
        assert f"One of the special magic numbers for {key} is: {task.answer[0]}." in task.context
        assert task.context.index(key) > tasks.NIAH_CHARS
        assert re.fullmatch(r"[1-9]\d{6}", task.answer[0])
    places = [t.context.index("special magic") / len(t.context) for t in made("niah", 60)]
    assert min(places) < 0.3 and max(places) > 0.8


def read_lines(task):
    """[(year, month, day), user, label] of each line, labelled by how its question begins."""
    months = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
    rows = []
    for line in task.context.split("\n\n", 1)[1].splitlines():
        day, user, question = re.fullmatch(
            r"Date: (\w{3} \d\d, \d{4}) \|\| User: (\d{5}) \|\| Instance: (.+\?)", line).groups()
        labels = [label for label, starts in OPENERS.items() if question.startswith(starts)]
        assert len(labels) == 1, question
        rows.append(((int(day[8:]), months.index(day[:3]) + 1, int(day[4:6])), user, labels[0]))
    return rows


def slow_day(text):
    months = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
    return int(text[-4:]), months.index(text[:3]) + 1, int(text[4:6])


def test_aggregates_are_what_a_recount_finds():
    forms, scopes = Counter(), Counter()
    for task in made("aggregate", 150):
        rows, query, value = read_lines(task), task.query, task.answer["value"]
        if "user IDs" in query:
            chosen = set(re.findall(r"\d{5}", query))
            assert len(chosen) == 3
            rows = [r for r in rows if r[1] in chosen]
        elif "both included" in query:
            first, last = map(slow_day, re.findall(r"\w{3} \d\d, \d{4}", query))
            rows = [r for r in rows if first <= r[0] <= last]
        scopes["users" if "user IDs" in query else "dates" if "both included" in query else ""] += 1
        counts = {label: sum(r[2] == label for r in rows) for label in LABELS}
        form = task.id.split("-")[1]
        forms[form] += 1
        asked = re.findall(r"label '([^']+)'", query)
        if form in ("most", "least"):
            best = (max if form == "most" else min)(counts.values())
            assert [label for label in LABELS if counts[label] == best] == [value]
        elif form == "count":
            assert value == str(counts[asked[0]])
        elif form == "compare":
            a, b = counts[asked[0]], counts[asked[1]]
            assert value == {1: "more common than", 0: "same frequency as",
                             -1: "less common than"}[(a > b) - (a < b)]
        else:
            names = ("January February March April May June July August September October "
                     "November December").split()
            of = Counter(r[1] if form == "user" else f"{names[r[0][1] - 1]} {r[0][0]}"
                         for r in rows if r[2] == asked[0])
            assert [k for k, n in of.items() if n == max(of.values())] == [value]
        assert reward(task, value) == 1.0
    assert min(forms.values()) > 5 and len(forms) == 6 and len(scopes) == 3


def test_pairs_are_those_that_fit_the_rule():
    kinds = Counter()
    for task in made("pairs", 40):
        first, second, dated = rule_of(task.query)
        kinds[task.id.split("-")[1]] += 1
        rows = read_lines(task)

        def fits(user, clauses, dated=dated, rows=rows):
            own = [r for r in rows if r[1] == user]
            for how, number, labels in clauses:
                n = len([r for r in own if r[2] in labels])
                if (how == "exactly" and n != number) or (how == "at least" and n < number):
                    return False
            days = ["%04d-%02d-%02d" % r[0] for r in own if dated and r[2] == dated[0]]
            return all(d > dated[2] if dated[1] == "after" else d < dated[2] for d in days)

        users = sorted({r[1] for r in rows})
        wanted = [[a, b] for a, b in combinations(users, 2)
                  if fits(a, first) and fits(b, second) or fits(b, first) and fits(a, second)]
        assert task.answer == wanted and wanted
        assert len(wanted) <= len(users) * (len(users) - 1) / 4
        assert reward(task, wanted) == 1.0
    assert len(kinds) == 3


@pytest.mark.parametrize("rule, wanted", [
    ("where both users have at least one instance with numeric value or location",
     ([["at least", 1, ["numeric value", "location"]]],) * 2 + ([],)),
    ("where both users have at least one instance with entity or location, and all instances that "
     "are location for both users must be after Apr 10, 2023",
     ([["at least", 1, ["entity", "location"]]],) * 2 + (["location", "after", "2023-04-10"],)),
    ("such that one user has at least two instances with location and at least one instance with "
     "entity, and the other user has exactly one instance with description and abstract concept "
     "and exactly one instance with abbreviation",
     ([["at least", 2, ["location"]], ["at least", 1, ["entity"]]],
      [["exactly", 1, ["description and abstract concept"]], ["exactly", 1, ["abbreviation"]]],
      []))])
def test_rules_of_the_papers_three_shapes_are_read(rule, wanted):
    """Tasks 1, 9 and 19 of arXiv 2512.24601, appendix, but for articles and the form of dates."""
    assert rule_of(PAIRS.format(rule=rule, labels=", ".join(LABELS))) == wanted


def test_a_text_to_copy_is_whole():
    forms = Counter()
    for task in made("copy", 30):
        form = task.id.split("-")[1]
        forms[form] += 1
        assert task.answer == task.context == task.context.strip()
        if form == "json":
            assert all(len(json.loads(line)) == 6 for line in task.context.splitlines())
        elif form == "csv":
            assert {len(row) for row in csv.reader(task.context.splitlines())} == {6}
        elif form == "code":
            compile(task.context, "text", "exec")
    assert len(forms) == 4


def test_the_code_returns_what_the_right_choice_says(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for i, task in enumerate(made("code", 8)):
        package = tmp_path / f"case{i}"
        for path, source in task.context.items():
            file = package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source.replace("from src.", f"from case{i}.src."))
        importlib.invalidate_caches()
        name, x, path = re.search(r"`(\w+)\((\d+)\)` in (\S+)", task.query).groups()
        module = importlib.import_module(f"case{i}." + path[:-3].replace("/", "."))
        value = getattr(module, name)(int(x))
        choices = dict(re.findall(r"\(([A-D])\) (\d+)", task.query))
        assert len(set(choices.values())) == 4 and choices[task.answer] == str(value)
    assert {t.answer for t in made("code", 30)} == set("ABCD")


def test_the_hops_lead_to_one_city_and_no_document_holds_two_of_them():
    for task in made("hop", 20) + made("hop", 2, 60_000):
        job, town = re.search(r"was a (\w+) born in (\w+) studied", task.query).groups()
        texts = list(task.context.values())
        start = [t for t in texts if f"was a {job} born in {town} in" in t]
        assert len(start) == 1
        teacher = re.search(r"studied with (\w+ \w+)\.", start[0])[1]
        middle = [t for t in texts if t.startswith(f"{teacher} was a ")]
        institute = re.search(r"directed the (\w+) Institute", middle[0])[1]
        end = [t for t in texts if f"The {institute} Institute stands in {task.answer}." in t]
        assert len(middle) == len(end) == 1 and start[0] not in (middle[0], end[0])
        assert task.answer not in start[0] and town not in end[0]
        assert task.answer not in task.query and teacher not in task.query


# --- the scripts, through the real REPL -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_scores_1_with_a_short_transcript(kind):
    for task in [*made(kind, 3), *made(kind, 1, 40_000)]:
        root = play(task, oracle)
        assert not any(n.errors for n in root.walk()) and root.end == "final"
        assert reward(task, root.answer) == 1.0
        assert sum(len(t.text) for t in root.turns) / 4 < 4_000
        assert max(len(t.text) for n in root.walk() for t in n.turns) / 4 < RLMConfig().turn_tokens
        assert kind == "copy" or {n.depth for n in root.walk()} == {0, 1}  # it delegates
        assert all(n.end == "final" for n in root.walk())


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_looks_neither_at_the_gold_nor_at_the_context(kind):
    task = made(kind)[0]
    blind = replace(task, answer=None, context=None)
    assert oracle(task, Node()) == oracle(blind, Node())
    child = Node(path=(0,), turns=[Turn("user", "What does f add? Label. Which person?")])
    if kind != "copy":  # its root asks nobody
        assert oracle(task, child) == oracle(blind, child)


def test_the_oracle_refuses_questions_that_nobody_generated():
    with pytest.raises(ValueError, match="row-1: the oracle knows generated questions only"):
        oracle(replace(made("hop")[0], id="row-1"), Node())


@pytest.mark.parametrize("kind", KINDS)
def test_the_keyword_search_is_a_floor(kind):
    """One search suffices where the answer stands beside a word of the question, not elsewhere."""
    scores = []
    for task in made(kind, 6):
        root = play(task, keyword_script)
        assert root.end == "final" and not root.children and not root.errors
        scores.append(reward(task, root.answer))
    if kind in ("evidence", "niah"):
        assert scores == [1.0] * 6
    else:
        assert sum(scores) / 6 < 0.6


# --- deep: what one level can reach, and two ------------------------------------------------------


def test_a_deep_question_asks_for_one_word_of_every_paragraph():
    assert len(set(haystacks.DICTIONARY.values())) == len(haystacks.DICTIONARY) == 60
    for i in range(50):
        task = make_task("deep", random.Random(i))
        words = [p.split() for paper in task.context for section in paper for p in section]
        assert len(words) == 8 and all(len(w) == 20 for w in words)
        assert len({w for part in words for w in part}) == 160  # counting them tells nothing
        known = [[haystacks.DICTIONARY[w] for w in part if w in haystacks.DICTIONARY]
                 for part in words]
        assert known == [[meaning] for meaning in task.answer]
        assert not set(task.answer) & set(str(task.context).split())
    with pytest.raises(ValueError, match="one size"):
        make_task("deep", random.Random(0), tokens=2_000)


@pytest.fixture(scope="module")
def deep_tokenizer(tmp_path_factory):
    some = [make_task("deep", random.Random(f"tokenizer {i}")) for i in range(48)]
    path = warmup.make_tiny(str(tmp_path_factory.mktemp("deep") / "init"), 0, some, "deep")
    return Tokenizer.from_pretrained(path)


def deep_score(tokenizer, depth, names):
    """The mean score where a node at depth d with a REPL follows names[d] and completions read
    without a mistake; and the trees."""
    questions = [make_task("deep", random.Random(f"ceiling {i}")) for i in range(4)]

    async def policy(node, max_tokens, key):
        text = tasks._deep(node, "right" if node.kind == "llm" else names[node.depth])
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn]
        assert len(ids) <= max_tokens, text
        return Completion(text, tuple(ids), (0.0,) * len(ids))

    config = replace(warmup.TINY_DEEP, max_depth=depth)
    trees = asyncio.run(collect(questions, policy, tokenizer, config))
    return sum(r.reward for r in trees) / len(trees), trees


def test_one_level_reaches_half_of_a_deep_question_and_two_all(deep_tokenizer):
    """Every pair of scripts with one level, the right one with two, in the limits of training."""
    one = {names: deep_score(deep_tokenizer, 1, names)[0]
           for names in product(tasks.DEEP_SCRIPTS, repeat=2)}
    assert max(one.values()) == pytest.approx(2 / 3)  # precision 1, recall 1/2
    assert [n for n, s in one.items() if s > 0.6] == [("each", "firsts"), ("firsts", "each")]
    assert one["each", "each"] == 0.0  # a section is refused: it fits into no window
    two, trees = deep_score(deep_tokenizer, 2, ("each",) * 3)
    assert two == 1.0
    for tree in trees:
        nodes = list(tree.root.walk())
        assert len(nodes) == warmup.TINY_DEEP.max_nodes
        assert max(len(n.ids) for n in nodes) < warmup.TINY_DEEP.window


def test_no_limit_of_a_deep_tree_leaves_room_for_more(deep_tokenizer):
    """Why one level cannot reach more: a message holds one call, which may ask two; a plain
    completion holds one paragraph; what is printed is never seen."""
    config, encode = warmup.TINY_DEEP, deep_tokenizer.encode
    assert config.max_turns == 1 and config.limits.queries == 2
    ask = "rlm_query_batched('Translate.',context[0])"
    assert len(encode(f"```repl\nx={ask}\nFINAL([x,{ask}])\n```")) > config.turn_tokens
    for i in range(20):
        first, second = make_task("deep", random.Random(i)).context[0][0]
        one, both = (len(deep_tokenizer.open(LEAF, f"Translate.\n\n{text}"))
                     for text in (first, f"{first} {second}"))
        assert one + 3 <= config.window < both


# --- what a policy might do instead ---------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATED)
def test_nothing_degenerate_beats_the_honest_script(kind):
    """Through the real REPL, in trees of at most eight nodes; on copy the echo is the answer."""
    questions = made(kind, 2) if kind != "deep" else [
        make_task(kind, random.Random(i)) for i in range(2)]
    depth = 2 if kind == "deep" else 1
    honest = [reward(t, play(t, oracle, max_depth=depth).answer) for t in questions]
    assert honest == [1.0] * 2
    for name in tasks.DEGENERATE:
        roots = [play(t, lambda task, node, seed: tasks.degenerate_script(name, task, node),
                      max_depth=depth, max_nodes=8, max_turns=3) for t in questions]
        scores = [reward(t, r.answer) for t, r in zip(questions, roots)]
        assert sum(scores) / 2 <= (1.0 if (kind, name) == ("copy", "echo") else 0.5), name
        for task, root in zip(questions, roots):
            assert tasks.degenerate(task, root) == name
            assert len(list(root.walk())) <= 8


@pytest.mark.parametrize("kind", GENERATED)
def test_no_constant_answer_pays(kind):
    """Any one answer to all questions of a kind: a letter is right in a quarter of them."""
    questions = made(kind, 12) if kind != "deep" else [
        make_task(kind, random.Random(i)) for i in range(12)]
    constants = ["The", "A", "e", " of ", "0", "1", "Answer: 1", "[]", [], [[]], LABELS[0],
                 "Answer: more common than", "January 2023", *map(list, combinations("ABCD", 2)),
                 *(t.answer for t in questions[:2])]
    for answer in constants:
        assert sum(reward(t, answer) for t in questions[2:]) / 10 <= 0.6, answer


def test_the_honest_script_is_not_called_degenerate():
    for kind in GENERATED:
        task = make_task(kind, random.Random(1))
        root = play(task, oracle, max_depth=2)
        assert tasks.degenerate(task, root) == ("echo" if kind == "copy" else "")


@pytest.mark.slow
def test_the_ceiling_at_10_million_tokens():
    """Score, transcript, memory and time of every kind; it exits with an error if one is missed."""
    subprocess.run([sys.executable, ROOT / "tests" / "ceiling.py"], check=True)
