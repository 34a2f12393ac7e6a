"""pairs: label every line, then compare users (OOLONG-Pairs of arXiv 2512.24601).

Gold is [[id, id], ...]. The score is the F1 over unordered pairs. oolong makes the lines.
"""
import re

from tasks import generated
from tasks.in_repl import PIECES, TOOLS, asked, block, script, sentences_with, word_of
from tasks.oolong import (CHILD_SCRIPTS, DAYS, LABELS, OPENERS, ROOT_SCRIPTS, day_code,
                          digits_here, digits_of, iso_date, labelled, reading, records)
from tasks.text import as_line, characters, field, pick

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
{rule}. Each question has one of these labels (the data does not give them: work them out \
from the questions): {labels}. In your answer, list all pairs in the format (user_id_1, \
user_id_2), separated by newlines."""
HOW_MANY = ("at least one instance", "at least two instances", "exactly one instance",
            "exactly two instances")


def make(rng, tokens=None, heldout=False):
    """The rule holds for some pairs of users, at most for half."""
    chars = characters(tokens, TOKENS, MOST)
    context, rows = records(rng, chars, max(8, min(150, chars // 1000)), True)
    users = len({user for _, user, _ in rows})
    while True:
        query = QUERY.format(rule=_rule(rng), labels=", ".join(LABELS))
        gold = matching(rows, *parts_of(query))
        if 0 < len(gold) <= users * (users - 1) // 4:
            return query, context, gold


def _rule(rng) -> str:
    """In one of the shapes of the paper's queries: both users alike, perhaps with a date,
    or two users who differ."""
    a, b, c, d = rng.sample(LABELS, 4)
    shape = rng.choice(("both", "dated", "unlike"))
    if shape == "unlike":
        return (f"such that one user has {rng.choice(HOW_MANY)} with {a} and "
                f"{rng.choice(HOW_MANY)} with {b}, and the other user has "
                f"{rng.choice(HOW_MANY)} with {c}"
                + rng.choice(("", f" and {rng.choice(HOW_MANY)} with {d}")))
    rule = f"where both users have at least one instance with {a} or {b}"
    if shape == "dated":
        rule += (f", and all instances that are {a} for both users must be "
                 f"{rng.choice(('after', 'before'))} {rng.choice(DAYS)}")
    return rule


def parts_of(query: str) -> tuple:
    """(clauses of one user, clauses of the other, [label, "after" or "before", date] or
    []). A clause is ["at least" or "exactly", number, [labels]]."""
    rule = query.split("list lower ID first) ")[1].split(". Each question")[0]
    label = f"(?:{'|'.join(LABELS)})"
    clause = rf"(at least|exactly) (one|two) instances? with ({label}(?: or {label})?)"
    users = []
    for part in rule.split("and the other user"):
        users.append([[how, {"one": 1, "two": 2}[number], which.split(" or ")]
                      for how, number, which in re.findall(clause, part)])
    said = re.search(rf"that are ({label}) for both users must be (\w+) (.+)", rule)
    dated = [said[1], said[2], iso_date(said[3])] if said else []
    return users[0], users[-1], dated


# Runs in the REPL, too: the pairs that fit, each [lower ID, higher ID]. Rows as in tally.
def matching(rows, first, second, dated):
    instances = {}
    for day, user, label in rows:
        instances.setdefault(user, []).append((day, label))

    def fits(own, clauses):
        for how, number, labels in clauses:
            n = sum(label in labels for _, label in own)
            if n < number or (how == "exactly" and n != number):
                return False
        for day, label in own:
            if dated and label == dated[0]:
                if day == dated[2] or (day > dated[2]) != (dated[1] == "after"):
                    return False
        return True

    one = [user for user, own in instances.items() if fits(own, first)]
    other = [user for user, own in instances.items() if fits(own, second)]
    found = {tuple(sorted((u, v), key=int)) for u in one for v in other if u != v}
    return [list(pair) for pair in sorted(found)]


def score(task, answer):
    """F1 over unordered pairs of ids, from "(id, id)" in a text or [id, id] in a list.
    Where the gold is empty only an explicit [] scores, and it scores 1. All pairs of users
    together score 2p/(1+p), with p the gold share of them."""
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
    question = field(row, "question", str)
    gold = row.get("answer")
    found = pairs_in(gold)
    if not found and gold not in ([], "[]"):
        raise ValueError("field 'answer' is no list of pairs")
    return (question, field(row, "context_window_text", str, blank=False),
            sorted(sorted(pair) for pair in found))


# Runs in the REPL.
def pair_users(context, labels, pieces, rule):
    return matching(labelled(context, labels, pieces), *rule)


def oracle(task, node):
    if node.depth:
        return script(digits_here, list(OPENERS.values()))
    return script(pair_users, LABELS, PIECES, parts_of(task.query),
                  uses=(iso_date, labelled, matching))


def demonstrate(task, node, rng):
    """Children label lines, as for oolong; see there."""
    if node.depth:
        return digits_of(asked(node), pick(CHILD_SCRIPTS, rng))
    first, second, dated = parts_of(generated(task).query)
    name = pick(ROOT_SCRIPTS, rng)
    if name == "guess":
        return block("FINAL([])")

    def fitting(clauses):
        tests = []
        for how, number, labels in clauses:
            count = " + ".join(f"own.count({label!r})" for label in labels)
            tests.append(f"{count} {'>=' if how == 'at least' else '=='} {number}")
        return f"[user for user, own in owns.items() if {' and '.join(tests)}]"

    code = reading(name == "part") + "owns = {}\n"
    code += ("for row, kind in zip(rows, kinds):\n"
             "    owns.setdefault(int(row[1][6:]), []).append(kind)\n")
    if dated:
        label, side, when = dated
        beyond = f"{'<=' if side == 'after' else '>='} " + day_code(when)
        code += ("wrong = {int(row[1][6:]) for row, kind in zip(rows, kinds)\n"
                 f"         if kind == {label!r} and day(row) {beyond}}}\n"
                 "owns = {user: own for user, own in owns.items() if user not in wrong}\n")
    code += f"one = {fitting(first)}\nother = {fitting(second)}\n"
    code += "FINAL(list({(min(u, v), max(u, v)) for u in one for v in other if u != v}))"
    return block(code)


# Runs in the REPL: all pairs of the users whose lines have the word, a hundred at most.
def pairs_beside(context, word):
    hits = " ".join(sentences_with(context, word))
    users = sorted(set(re.findall(r"User: (\d+)", hits)), key=int)[:100]
    return [[a, b] for i, a in enumerate(users) for b in users[i + 1:]]


def keyword(task, node):
    return script(pairs_beside, word_of(task), uses=(sentences_with,))
