"""oolong: label every line, then count (OOLONG, 2511.02817). Rows come from --data alone.

Gold is {"type": ..., "value": str}. The score is exact match; a number scores 0.75 **
|error|.
"""
import re
from contextlib import suppress
from datetime import datetime

from tasks.in_repl import block, search
from tasks.text import as_line, field

STRATEGY = """\
Every line has to be labelled by what it means, which code cannot do, and then counted, \
which code does best. Give pieces that a child can read to children with \
rlm_query_batched(question, pieces); they return one label a line, in order. Check that as \
many came back, then filter and count in code. Return the answer alone, as asked for."""
TOOLS = (search,)
FIELDS = ("question", "context_window_text", "answer", "answer_type")

LABELS = ["numeric value", "entity", "location", "description and abstract concept",
          "abbreviation", "human being"]
PHRASES = ("more common", "less common", "same frequency")
DATE_FORMS = ("%Y-%m-%d", "%m/%d/%Y", "%b %d, %Y", "%B %d, %Y")


def score(task, answer):
    """OOLONG: what follows the last colon, without * [ ] and quotes, equals the gold. In a
    comparison exactly one of the three phrases occurs. Left out: the public fallback to
    the last word of a text without a colon, which a list of all labels can pass."""
    kind, gold = task.answer["type"], task.answer["value"]
    text = as_line(answer).rpartition(":")[2].strip("*[]'\" \n.")
    if kind == "COMPARISON":
        said = [phrase for phrase in PHRASES if phrase in text]
        return float(len(said) == 1 and gold.startswith(said[0]))
    if kind == "NUMERIC":
        number = re.fullmatch(r"-?[0-9]{1,9}", text)
        return 0.75 ** abs(int(text) - int(gold)) if number else 0.0
    if kind == "DATE":
        for form in DATE_FORMS:
            with suppress(ValueError):
                return float(str(datetime.strptime(text, form).date()) == gold)
    return float(text == gold)


def right_answer(task):
    return task.answer["value"]


def labels_of(task) -> dict[str, str]:
    """The label of each question of the context, where they are known."""
    lines = [line for line in task.context.split("\n") if line.startswith("Date: ")]
    texts = [line.partition("Instance: ")[2] for line in lines]
    return dict(zip(texts, task.answer.get("labels", ())))


def read(row):
    """`context_window_text`, `question`, `answer` ("['entity']", "[7]",
    "[datetime.date(2023, 1, 6)]"), `answer_type`: oolongbench/oolong-synth. Scripts for a
    cold start need `labels`, too: those of the lines, in order."""
    kind = field(row, "answer_type").removeprefix("ANSWER_TYPE.")
    value = field(row, "answer").strip("[]'\"")
    if kind == "DATE":
        value = datetime(*map(int, re.findall("[0-9]+", value))).date()
    if kind == "NUMERIC":
        value = int(value)
    gold = {"type": kind, "value": str(value)}
    if "labels" in row:
        gold["labels"] = field(row, "labels", list)
    return field(row, "question"), field(row, "context_window_text"), gold


# --- scripts ------------------------------------------------------------------------------

# A root: children label the lines of one piece each.
SPLIT = """\
lines = [line.split(" || ") for line in context.split("\\n") if line.startswith("Date: ")]
{filter}texts = [line[2].removeprefix("Instance: ") for line in lines]
parts = ["\\n".join(texts[i:i + {size}]) for i in range(0, len(texts), {size})]
labels = sum(rlm_query_batched("Label each line.", parts{some}), [])
"""
COMPARED = """\
first, second = labels.count({!r}), labels.count({!r})
FINAL("more common than" if first > second else
      "less common than" if first < second else "same frequency as")"""
USERS = """\
users = [line[1] for line, label in zip(lines, labels) if label == {!r}]
FINAL(max(users, key=users.count, default=""))"""


def root_code(query: str, size: int, some: str) -> str:
    """Code for questions about counts, and about the user with most of a label. Left out:
    how often a user occurs, two users compared, dates, other labels than these."""
    named = re.findall(r"label '([^']+)'", query)
    users = re.search(r"(?:user IDs|users with IDs) ([0-9, ]+)", query)
    only = ""
    if users:
        ids = re.findall("[0-9]+", users[1])
        only = f"lines = [line for line in lines if line[1][6:] in {ids}]\n"
    code = SPLIT.format(filter=only, size=size, some=some)
    if len(named) == 2:
        return code + COMPARED.format(*named)
    if named and "which user" in query:
        return code + USERS.format(*named)
    if named:
        return code + f"FINAL(labels.count({named[0]!r}))"
    best = "min" if "least" in query else "max"
    return code + f"FINAL({best}({LABELS}, key=labels.count))"


# Good and bad scripts with their shares: a root that asks about all pieces, or about the
# first; a child that reads, or guesses. "read" knows the labels of a training row.
ROOT_SCRIPTS = {"": 0.6, "[:1]": 0.4}
CHILD_SCRIPTS = {"read": 0.6, "guess": 0.4}
SIZES = (1, 2, 4)  # lines of a piece


def demonstrate(task, node, rng):
    if "labels" not in task.answer:
        raise ValueError("scripts of oolong need the field 'labels' in each row; else give "
                         "--warmup FILE, or --warmup-steps 0")
    if not node.depth:
        some, = rng.choices([*ROOT_SCRIPTS], ROOT_SCRIPTS.values())
        return block(root_code(task.query, rng.choice(SIZES), some))
    name, = rng.choices([*CHILD_SCRIPTS], CHILD_SCRIPTS.values())
    if name == "guess":
        return block(f"FINAL([{rng.choice(LABELS)!r}] * len(context.split('\\n')))")
    if not node.written:
        return block("print(context)")
    known = labels_of(task)
    shown = [line for line in node.turns[-1].text.split("\n") if line in known]
    return block(f"FINAL({[known[line] for line in shown]})")
