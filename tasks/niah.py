"""niah: one needle in filler, RULER's task (arXiv 2404.06654).

Gold is a list of strings. The score is the share of them in the answer, in any case.
"""
import re

from tasks.in_repl import TOOLS, block
from tasks.text import as_line, field, make_sentence, make_term

STRATEGY = """\
One sentence of the context holds the answer. Search for the words of the question. \
Return the value alone."""
FIELDS = ("input", "outputs")
TOKENS = 8_000
ANSWER_CHARS = 512  # of an answer that count: RULER lets a model write 128 tokens


def make(rng, tokens=None, heldout=False):
    key, value = make_term(rng, heldout=True), str(rng.randrange(10 ** 6, 10 ** 7))
    needle = f"One of the special magic numbers for {key} is: {value}."
    filler = [make_sentence(rng, make_term(rng)) for _ in range(400)]  # not about the key
    text, room = [], 4 * (tokens or TOKENS) - len(needle)
    while room > 0:
        text.append(rng.choice(filler))
        room -= len(text[-1]) + 1
    text.insert(rng.randrange(len(text) // 10 + 1, len(text)), needle)  # not at the start
    query = f"What is the special magic number for {key} mentioned in the provided text?"
    return query, " ".join(text), [value]


def score(task, answer):
    """RULER's string_match_all over the first ANSWER_CHARS characters, so that an echo of
    the context scores 0: a generated needle never stands at its very start."""
    text = as_line(answer)[:ANSWER_CHARS].lower()
    return sum(value.lower() in text for value in task.answer) / len(task.answer)


def read(row):
    """`input` (the question is its last line), `outputs` = [strings]: RULER's files."""
    context, _, query = field(row, "input").strip().rpartition("\n")
    values = field(row, "outputs", list)
    if not values or not all(isinstance(value, str) for value in values):
        raise ValueError("field 'outputs' is no list of strings")
    return query, context, values


# A root: each child looks for the needle in a piece of the context. The pieces overlap.
SPLIT = """\
size = -(-len(context) // 24)
parts = [context[i:i + size + 200] for i in range(0, len(context), size)]
found = rlm_query_batched({query!r}, parts)
FINAL(next(value for value in found if value))"""

# A child: None if its piece has no needle.
FIND = """\
import re
said = re.search(r"for {key} is: (\\d+)\\.", context)
FINAL(said[1] if said else None)"""


def oracle(task, node):
    key = re.search(r"for (\S+) mentioned", task.query)[1]
    return block((FIND if node.depth else SPLIT).format(query=task.query, key=key))
