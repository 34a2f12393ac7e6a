"""niah: one needle in filler, RULER's task (arXiv 2404.06654).

Gold is a list of strings. The score is the share of them in the answer, in any case.
"""
import re

from tasks.in_repl import PIECES, TOOLS, first_hit, script
from tasks.text import as_line, characters, field, fill, filler, make_term

STRATEGY = """\
One sentence of the context holds the answer. Search for the words of the question. \
Return the value alone."""
TOKENS = 8_000
ANSWER_CHARS = 512  # of an answer that count: RULER lets a model write 128 tokens


def make(rng, tokens=None, heldout=False):
    chars = characters(tokens, TOKENS)
    key, value = make_term(rng), str(rng.randrange(10 ** 6, 10 ** 7))
    needle = f"One of the special magic numbers for {key} is: {value}."
    text = fill(rng, filler(rng, key), chars - len(needle))
    at = rng.randrange(len(text) // 10 + 1, len(text))  # not in the first tenth
    text.insert(at, needle)
    query = f"What is the special magic number for {key} mentioned in the provided text?"
    return query, " ".join(text), [value]


def score(task, answer):
    """RULER's string_match_all over the first ANSWER_CHARS characters, so that an echo of
    the context scores 0: a generated needle never stands at its very start."""
    text = as_line(answer)[:ANSWER_CHARS].lower()
    return sum(value.lower() in text for value in task.answer) / len(task.answer)


def read(row):
    """`input` (the question is its last line), `outputs` = [strings]: RULER's files."""
    context, _, query = field(row, "input", str).strip().rpartition("\n")
    if not context.strip():
        raise ValueError("field 'input' is one line; its last line is the question")
    gold = field(row, "outputs", list)
    if not gold or not all(isinstance(value, str) and value for value in gold):
        raise ValueError("field 'outputs' is not a list of strings")
    return query.strip(), context, gold


# Runs in the REPL: children look for the needle in pieces of the context, which overlap.
def find(context, query, pieces):
    size, overlap = -(-len(context) // pieces), 200
    parts = [context[i:i + size + overlap] for i in range(0, len(context), size)]
    found = rlm_query_batched(query, parts)
    return next(value for value in found if value)


# Runs in a child's REPL.
def find_here(context, key):
    said = re.search(rf"for {key} is: (\d+)\.", context)
    return said[1] if said else None


def oracle(task, node):
    if node.depth:
        return script(find_here, re.search(r"for (\S+) mentioned", task.query)[1])
    return script(find, task.query, PIECES)


keyword = first_hit
