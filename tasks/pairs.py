"""pairs: label every line, then compare users (OOLONG-Pairs of arXiv 2512.24601).

Gold is [[id, id], ...]. The score is the F1 over unordered pairs. oolong makes the lines.
"""
import re
from itertools import combinations

from tasks.in_repl import TOOLS, block
from tasks.oolong import LABEL, LABELS, SPLIT, records
from tasks.text import as_line, field

STRATEGY = """\
Every line has to be labelled by what it means, which code cannot do; comparing users is \
for code. Split the context into pieces that a child can read and give them to children \
with rlm_query_batched(question, pieces); they return one label a line, in order, check \
that as many came back, then group by user and test all pairs in code. Return the list of \
pairs [[lower id, higher id], ...]."""
TOKENS = 8_000
MOST = 100_000  # tokens: the answer grows with the context

QUERY = """\
In the above data, list all pairs of user IDs (no duplicate pairs, list lower ID first) \
where both users have at least one instance with '{a}' or '{b}'. Each question has one of \
these labels (the data does not give them: work them out from the questions): {labels}. In \
your answer, list all pairs in the format (user_id_1, user_id_2), separated by newlines."""


def make(rng, tokens=None, heldout=False):
    """The rule holds for at least one pair of users, and for at most half of them."""
    context, rows = records(rng, 4 * (tokens or TOKENS))
    users = len({user for user, _ in rows})
    while True:
        a, b = rng.sample(LABELS, 2)
        asked = sorted({user for user, label in rows if label in (a, b)})
        gold = [list(pair) for pair in combinations(asked, 2)]
        if 0 < len(gold) <= users * (users - 1) // 4:
            return QUERY.format(a=a, b=b, labels=", ".join(LABELS)), context, gold


def score(task, answer):
    """F1 over unordered pairs of ids, from "(id, id)" in a text or [id, id] in a list. If
    the gold is empty, an explicit [] scores 1 and all else 0."""
    found = pairs_in(answer)
    if not task.answer:
        return float(answer in ([], "[]"))
    gold = {frozenset(map(str, pair)) for pair in task.answer}
    return 2 * len(found & gold) / (len(found) + len(gold))


def pairs_in(answer) -> set[frozenset]:
    found = []
    for item in answer if isinstance(answer, list) else [answer]:
        if isinstance(item, str):
            found += re.findall(r"\(\s*(\d+)\s*,\s*(\d+)\s*\)", item)
        elif isinstance(item, list) and len(item) == 2:
            found.append([as_line(i) for i in item if type(i) in (int, str)])
    return {frozenset(ids) for ids in found if len({*ids} - {""}) == 2}


def read(row):
    """`context_window_text`, `question`, `answer` = a list of pairs or "(1, 2), (1, 3)".

    The files of mit-oasys/oolong-pairs hold questions and answers alone. Their context is
    that of oolongbench/oolong-synth with the dataset trec_coarse and the same length."""
    found = sorted(sorted(pair) for pair in pairs_in(field(row, "answer", str | list)))
    return field(row, "question"), field(row, "context_window_text"), found


PAIR = """\
found = {{line[28:33] for line, own in zip(lines, labels) if own in {labels}}}
FINAL([[a, b] for a in found for b in found if a < b])"""


def oracle(task, node):
    if node.depth:
        return block(LABEL)
    asked = re.findall(r"'([^']+)'", task.query)
    return block(SPLIT + PAIR.format(labels=asked))
