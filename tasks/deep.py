"""deep: a question that needs two levels of children, in one size, for the tiny model.

Gold is a list of words. The score is the F1 over the different strings of an answer.

The context is nested lists: two papers, each with two sections of two paragraphs. One word
of each paragraph is in DICTIONARY, and the question asks for the eight meanings. The
dictionary is not in the context, and too long to be written as code. All words look alike,
and none occurs twice. So every paragraph has to be read. The window (TINY) holds just one.
"""
import random
from dataclasses import replace
from itertools import product

from tasks.common import CODAS, ONSETS, VOWELS, block, pick, strings_in

# A node has one message. It has room for one call, to at most two children.
TINY = {"max_depth": 2, "max_turns": 1, "turn_tokens": 24, "window": 64, "max_nodes": 15,
        "limits": {"queries": 2}}

WORDS = ["".join(letters) for letters in product(ONSETS, VOWELS, CODAS)]
WORDS = random.Random(0).sample(WORDS, 240)
MEANINGS = random.Random(1).sample([v + o for v in VOWELS for o in ONSETS], 60)
DICTIONARY = dict(zip(WORDS, MEANINGS))


def make(rng, tokens=None, heldout=False):
    known = rng.sample(list(DICTIONARY), 8)
    others = iter(rng.sample(WORDS[len(DICTIONARY):], 19 * 8))
    parts = []
    for word in known:
        words = [next(others) for _ in range(19)]
        words.insert(rng.randrange(20), word)
        parts.append(" ".join(words))
    while len(parts) > 2:
        parts = [parts[i:i + 2] for i in range(0, len(parts), 2)]
    return "Translate all.", parts, [DICTIONARY[word] for word in known]


def score(question, answer):
    found = set(strings_in(answer))
    return 2 * len(found & set(question.answer)) / (len(found) + len(question.answer))


def part_score(question, part, answer):
    """For a child that was given a part: its F1 there."""
    words = " ".join(strings_in(part)).split()
    gold = [DICTIONARY[word] for word in words if word in DICTIONARY]
    return score(replace(question, answer=gold), answer) if gold else None


READS = 0.6  # share of plain completions that answer right
# Scripts for nodes with a REPL: (share, code). "each" asks a child about every part.
NODE_SCRIPTS = {
    "each": (0.55, "FINAL(rlm_query_batched('Translate.', context))"),
    "firsts": (0.2, "FINAL(rlm_query_batched('Translate.', [c[0] for c in context]))"),
    "one": (0.1, "FINAL(rlm_query('Translate.', context[0]))"),
    "alone": (0.05, "FINAL(context)"),
    "forget": (0.1, "print(len(context))"),
}


def demonstrate(question, node, rng):
    if node.kind == "llm":
        return translate(node) if rng.random() < READS else "none"
    return block(NODE_SCRIPTS[pick(NODE_SCRIPTS, rng)][1])


def translate(node) -> str:
    """The meaning of the known word in the paragraph that a plain completion was given."""
    known = [word for word in node.messages[1].text.split() if word in DICTIONARY]
    return DICTIONARY[known[0]] if known else "none"


def oracle(question, node):
    return translate(node) if node.kind == "llm" else block(NODE_SCRIPTS["each"][1])
