"""The methods that a comparison needs: baselines, and rlm at other depths."""
import asyncio
import json
import math
import random
import re

import pytest

import eval as evaluation
import rlm
import tasks
from lab import methods
from lab.methods import bm25, cut, flat, sentences
from rlm import RLMConfig
from tasks import Task
from tokenizer import Tokenizer
from tree import Completion

WORDS = [start + str(i) for i in range(40) for start in ("al", "be", "ga", "de")]
QUESTION = Task("t", "question", "q", "c")


def block(code):
    return f"```repl\n{code}\n```"


def answer(name, task, says, tokenizer=None, **config):
    """(root, share of the context seen) of a method, with a policy that says says(node)."""
    async def policy(node, max_tokens, key):
        text = says(node)
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn] if tokenizer else []
        return Completion(text, tuple(ids), (0.0,) * len(ids))
    return asyncio.run(
        evaluation.answer(name, task, policy, tokenizer, RLMConfig(**config), ("k",)))


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.train([rlm.FULL, methods.READER, " ".join(WORDS)], 600)


# --- baselines ----------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", ["direct", "retrieval", "compaction"])
@pytest.mark.parametrize("size", [1, 300, 4_000])
def test_a_baseline_fills_the_window_and_never_exceeds_it(name, with_ids, size, tiny):
    text = " ".join(random.Random(size).choices(WORDS, k=size))
    task = Task("t", "question", "Where is al1?", {"a": text, "b": text[:50]})
    root, seen = answer(name, task, lambda node: "notes", tiny if with_ids else None,
                        window=400, turn_tokens=60)
    context = flat(task.context)
    for node in root.walk():
        prompt = node.turns[:2]
        used = sum(len(t.text) for t in prompt) // 4
        if with_ids:
            used = sum(len(t.ids) for t in prompt)
        assert used <= 340
    if name == "direct":
        said = root.turns[1].text
        note = re.search(r"first ([\d,]+) of its ([\d,]+) characters", said)
        if seen == 1:
            assert context in said and not note
        else:  # the prompt says how much is missing, and only little room is wasted
            n, total = (int(v.replace(",", "")) for v in note.groups())
            assert (n, total) == (round(seen * len(context)), len(context))
            assert context[:n] in said and used > 300
    if name == "compaction":  # every character is read, once and in order
        parts = [n.turns[1].text.partition("\nText:\n")[2] for n in root.children]
        assert "".join(parts) == context and seen == 1
        carried = ["notes" in n.turns[1].text for n in root.children]
        assert carried == [False] + [True] * (len(parts) - 1)


def test_compaction_reads_everything_however_busy_the_server_is():
    task = Task("t", "question", "?", "word " * 4000)
    root, seen = answer("compaction", task, lambda node: "n", window=400, turn_tokens=60,
                        seconds=1e-9)
    assert (root.end, seen) == ("text", 1.0)


def test_retrieval_shows_the_best_passages_in_the_order_of_the_text(tiny):
    words = random.Random(0).choices(WORDS, k=900)
    lines = [f"Line {i} says {word}." for i, word in enumerate(words)]
    lines[700], lines[100] = "The zyx number is 4.", "A zyx is a zyx."
    task = Task("t", "question", "What is the zyx number?", "\n".join(lines))
    root, _ = answer("retrieval", task, lambda node: "4", tiny, window=600, turn_tokens=60)
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
            norm = k1 * (1 - b + b * len(words(chunk)) / mean)
            total += idf * tf * (k1 + 1) / (tf + norm)
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


# --- rlm at other depths ------------------------------------------------------------------


def test_rlm0_cannot_call_and_is_not_told_that_it_could():
    root, _ = answer("rlm0", QUESTION, lambda node: block("FINAL(rlm_query('x', 'y'))"))
    assert root.answer.startswith("Error") and not root.children
    assert "rlm_query" not in root.turns[0].text and "delegate" not in root.turns[0].text


@pytest.mark.parametrize("name, kinds", [("rlm1", ["rlm", "rlm", "llm"]),
                                         ("rlm2", ["rlm", "rlm", "rlm", "llm"])])
def test_depth_is_what_the_name_says(name, kinds):
    def says(node):
        return "done" if node.kind == "llm" else block("FINAL(rlm_query('deeper', 'c'))")

    root, _ = answer(name, QUESTION, says)
    assert [node.kind for node in root.walk()] == kinds and root.answer == "done"


@pytest.mark.parametrize("kind", tasks.NAMES)
def test_bare_leaves_out_the_strategy_and_nothing_else(kind):
    full, bare = (
        rlm.opening(rlm.Node(), "q", "c", kind, evaluation.rlm_config(name, RLMConfig()))
        for name in ("rlm1", "rlm1-bare"))
    strategy = tasks.strategy(kind)
    assert full[0].replace(strategy, "") == bare[0] and full[1] == bare[1]
    assert strategy in full[0] and (strategy or kind == "deep")


def test_a_brief_prompt_has_no_strategy_to_leave_out():
    with pytest.raises(ValueError, match="no strategy text"):
        evaluation.rlm_config("rlm1-bare", RLMConfig(style="brief"))


def test_the_answer_to_notes_is_read_from_json_and_from_lines():
    task = tasks.make("notes", random.Random(0))
    for text in (json.dumps(task.answer), "\n".join(f"- **{name}**: {kind}" for name, kind
                                                   in task.answer.items())):
        root, _ = answer("direct", task, lambda node: f"The notes: {text}")
        assert tasks.reward(task, root.answer) == 1.0
        assert "animals, plants, tools, foods" in root.turns[1].text


def test_a_model_trained_without_children_is_not_run_with_them():
    alone = RLMConfig(max_nodes=1)
    with pytest.raises(ValueError, match="rlm1: rlm.json says max_nodes 1"):
        evaluation.rlm_config("rlm1", alone)
    assert evaluation.trained_as(alone) == "rlm0"
    assert evaluation.trained_as(RLMConfig(max_depth=2)) == "rlm2"
    full = rlm.opening(rlm.Node(), "q", "c", "notes", alone)[0]
    assert "rlm_query" not in full and tasks.strategy("notes") not in full


def test_without_ids_four_characters_count_against_the_window():
    root, _ = answer("rlm1", QUESTION, lambda node: block(f"print('{'x' * 900}')"),
                     window=1200, max_turns=50)
    assert root.end == "window" and evaluation.tokens(root) <= 1200
