"""oolong: label every line of a list, then count (OOLONG, 2511.02817). Lists are made
(tasks/lists.py) or come from --data.

Gold is {"type": ..., "value": str, or {line: label}}. The score is the share of right
labels, 0.75 ** |error| of a number, or exact match.
"""
import re
from contextlib import suppress
from datetime import datetime

from tasks.common import as_line, block, field, share_right
from tasks.lists import TOKENS, make  # noqa: F401  of this task

READING = "Print the context. Answer with a dict that gives a label to each of its keys."
STRATEGY = """\
Labels take reading, counts take code. Give each child a few lines, as a dict {key: text}, \
and name the labels: it answers {key: label}. Join the answers with update, then filter \
and count in code. Return the answer alone, as asked for."""
FIELDS = ("question", "context_window_text", "answer", "answer_type")

# A child prints four lines at most. With one line per child, lists of 96 lines fit. Longer
# ones take more nodes (--rlm), and then fewer trees grow at once.
TINY = {"max_turns": 2, "turn_tokens": 256, "max_nodes": 97,
        "limits": {"output_chars": 400}}
AFTER_SCRIPTS = TINY | {"style": "brief", "turn_tokens": 320, "window": 1024,
                        "tree_tokens": 40_000}

PHRASES = ("more common", "less common", "same frequency")
DATE_FORMS = ("%Y-%m-%d", "%m/%d/%Y", "%b %d, %Y", "%B %d, %Y")


def score(question, answer):
    """OOLONG: what follows the last colon, without * [ ] and quotes, equals the gold. In a
    comparison exactly one of the three phrases occurs. Left out: the public fallback to a
    text's last word, which a list of all labels can pass."""
    kind, gold = question.answer["type"], question.answer["value"]
    if kind == "LABELS":
        return share_right(answer, gold)
    text = as_line(answer).rpartition(":")[2].strip("*[]'\" \n.")
    if kind == "COMPARISON":
        found = [phrase for phrase in PHRASES if phrase in text]
        return float(len(found) == 1 and gold.startswith(found[0]))
    if kind == "NUMERIC":
        number = re.fullmatch(r"-?[0-9]{1,9}", text)
        return 0.75 ** abs(int(text) - int(gold)) if number else 0.0
    if kind == "DATE":
        for form in DATE_FORMS:
            with suppress(ValueError):
                return float(str(datetime.strptime(text, form).date()) == gold)
    return float(text == gold)


def right_answer(question):
    return question.answer["value"]


def labels_of(question) -> dict[str, str]:
    """The label of each line's text, where they are known."""
    texts = re.findall("Instance: .*", question.context)
    return dict(zip(texts, question.answer.get("labels", ())))


def part_score(question, part, answer):
    """The share of right labels, for a child that was given lines as {key: text}."""
    known, answer = labels_of(question), answer if isinstance(answer, dict) else {}
    if not (part and isinstance(part, dict) and {*map(str, part.values())} <= {*known}):
        return None
    return sum(answer.get(k) == known[str(text)] for k, text in part.items()) / len(part)


def read(row):
    """`context_window_text`, `question`, `answer` ("['entity']", "[7]",
    "[datetime.date(2023, 1, 6)]"), `answer_type`: oolongbench/oolong-synth. And for scripts
    `labels`: those of the lines, in order. With the type LABELS the answer is
    {line: label}."""
    kind = field(row, "answer_type").removeprefix("ANSWER_TYPE.")
    value = field(row, "answer", dict if kind == "LABELS" else str)
    if kind != "LABELS":
        value = value.strip("[]'\"")
    if kind == "DATE":
        value = str(datetime(*map(int, re.findall("[0-9]+", value))).date())
    if kind == "NUMERIC":
        value = str(int(value))
    gold = {"type": kind, "value": value}
    if "labels" in row:
        gold["labels"] = field(row, "labels", list)
    return field(row, "question"), field(row, "context_window_text"), gold


# A root: children label some lines each. With keys a line that one leaves out shifts none.
SPLIT = """\
names = context.partition("labels: ")[2].partition(".")[0]
lines = [line.split(" || ", 2) for line in context.split("\\n") if " || " in line]
users = question.partition(" IDs ")[2].partition(".")[0].split(", ")
keys = [str(i) for i, line in enumerate(lines){some}]
parts = [{{k: lines[int(k)][2] for k in keys[i:i + {size}]}}
         for i in range(0, len(keys), {size})]
answers = {{}}
for answer in rlm_query_batched("Label each text: " + names, parts{asked}):
    if isinstance(answer, dict):
        answers.update(answer)
labels = [answers.get(k) for k in keys]
"""
NAMED = """\
named = [part.partition("'")[0] for part in question.split("label '")[1:]]
"""
ANSWERS = {  # by what its question has
    "{line: label}": "result = answers",
    "same frequency": NAMED + """\
first, second = labels.count(named[0]), labels.count(named[1])
result = 'more common than' if first > second else 'less common than'
if first == second:
    result = 'same frequency as'""",
    "which user": NAMED + """\
have = [lines[int(k)][1] for k in keys if answers.get(k) == named[0]]
result = max(have, key=have.count, default='')""",
    "label '": NAMED + "result = labels.count(named[0])",
    "least common": "result = min(names.split(', '), key=labels.count)",
    "": "result = max(names.split(', '), key=labels.count)"}


def root_code(query: str, size: int, asked: str) -> str:
    some = " if line[1][6:] in users" if " IDs " in query else ""
    lines = next(code for has, code in ANSWERS.items() if has in query)
    return SPLIT.format(some=some, size=size, asked=asked) + lines + "\nFINAL(result)"


# Good and bad scripts mixed: a root that asks about all pieces, or about the first; a child
# that reads, or guesses. "read" knows the labels of a training row.
SIZES = (1, 2, 4)  # lines of a piece
ROOT_SCRIPTS = ("", "", "", "[:1]", "[:1]")
CHILD_SCRIPTS = ("read", "read", "read", "guess", "guess")


def demonstrate(question, node, rng):
    labels = field(question.answer, "labels", list)  # else give --warmup FILE
    if not node.depth:
        pieces, script = rng.choice(SIZES), rng.choice(ROOT_SCRIPTS)
        return block(root_code(question.query, pieces, script))
    if rng.choice(CHILD_SCRIPTS) == "guess":
        return block(f"FINAL(dict.fromkeys(context, {rng.choice(labels)!r}))")
    if not node.written:
        return block("print(context)")
    known = {repr(text): label for text, label in labels_of(question).items()}
    shown = re.findall(r"'(\d+)': (.+?)(?:}$|, (?='\d+': ))", node.messages[-1].text, re.M)
    return block(f"FINAL({ {key: known[text] for key, text in shown if text in known} })")
