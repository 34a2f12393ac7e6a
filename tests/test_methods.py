"""The methods that a comparison needs: baselines, and rlm by its depth."""
import asyncio
import json
import random
import re

import pytest

import eval as evaluation
import prompts
import tasks
from baselines import methods
from baselines.methods import flat
from config import RLMConfig
from tasks import Question, evidence, requests
from tokenizer import Tokenizer
from tree import Completion

WORDS = [start + str(i) for i in range(40) for start in ("al", "be", "ga", "de")]


def answer(name, question, says, tokenizer=None, **config):
    """The root of a method's tree, with a policy that says says(node)."""
    async def policy(node, max_tokens, key):
        text = says(node)
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn] if tokenizer else []
        return Completion(text, tuple(ids), (0.0,) * len(ids), usage={})

    _, tree = asyncio.run(evaluation.answer(
        name, question, policy, tokenizer, RLMConfig(**config), ("k",), lambda *_: 0.0))
    assert not tree.failed
    return tree.root


@pytest.fixture(scope="module")
def tiny():
    return Tokenizer.train([prompts.FULL, methods.READER, " ".join(WORDS)], 600)


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", ["direct", "retrieval", "compaction"])
@pytest.mark.parametrize("size", [1, 4_000])
def test_a_baseline_fills_the_window_and_never_exceeds_it(name, with_ids, size, tiny):
    text = " ".join(random.Random(size).choices(WORDS, k=size))
    question = Question("t", "qa", "Where is al1?", {"a": text, "b": text[:50]})
    root = answer(name, question, lambda node: "notes" * (node.path != (1,)),
                  tiny if with_ids else None, window=400, turn_tokens=60)
    context = flat(question.context)
    for node in root.walk():
        prompt = node.messages[:2]
        used = sum(len(t.text) for t in prompt) // 4
        if with_ids:
            used = sum(len(t.ids) for t in prompt)
        assert used <= 340
    if name == "direct":  # the prompt says how much is missing, and only little is wasted
        said = root.messages[1].text
        note = re.search(r"first ([\d,]+) of ([\d,]+) characters", said)
        n, total = (int(v.replace(",", "")) for v in note.groups())
        assert total == len(context) and context[:n] in said
        assert n == total or used > 330
    if name == "compaction":  # every character is read; the second part has no new notes
        parts = [n.messages[1].text.partition("\nText:\n")[2] for n in root.children]
        assert "".join(parts) == context
        carried = ["notes" in n.messages[1].text for n in root.children]
        assert carried == [False] + [True] * (len(parts) - 1)


def test_retrieval_shows_the_best_passages_in_the_order_of_the_text(tiny):
    words = random.Random(0).choices(WORDS, k=900)
    lines = [f"Line {i} says {word}." for i, word in enumerate(words)]
    lines[700], lines[100] = "The zyx number is 4.", "A zyx is a zyx."
    question = Question("t", "qa", "What is the zyx number?", "\n".join(lines))
    root = answer("retrieval", question, lambda node: "4", tiny, window=600, turn_tokens=60)
    said = root.messages[1].text
    assert 0 < said.find(lines[100]) < said.find(lines[700])


def test_the_answer_to_evidence_is_its_lines_without_bullets_and_quotes():
    question = tasks.make(evidence, random.Random(0))
    said = '- a b\n2. "c d"\n\n * e\n1.5 mm is small'
    root = answer("direct", question, lambda node: said)
    assert root.answer == ["a b", "c d", "e", "1.5 mm is small"]


def test_the_answer_to_requests_is_read_from_json_and_from_lines():
    question = tasks.make(requests, random.Random(0))
    gold = question.answer
    for text in (json.dumps(gold), "\n".join(f"- **{name}**: {kind}" for name, kind
                                             in question.answer.items())):
        root = answer("direct", question, lambda node: f"The notes: {text}")
        assert tasks.score_of(question, root.answer) == 1.0
        assert "money, travel, cars, food" in root.messages[1].text
