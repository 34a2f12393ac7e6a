"""oolong: label every line, then count (OOLONG, arXiv 2511.02817).

Gold is {"type": ..., "value": str}. The score is exact match; a number scores 0.75 **
|error|. How a generated question begins decides its label, so that a script knows it. A
model has to read.
"""
import ast
import re
from collections import Counter
from contextlib import suppress
from datetime import datetime

from tasks.in_repl import TOOLS, block
from tasks.text import ADJECTIVES, NOUNS, as_line, field

STRATEGY = """\
Every line has to be labelled by what it means, which code cannot do, and then counted, \
which code does best. Give pieces that a child can read to children with \
rlm_query_batched(question, pieces); they return one label a line, in order. Check that as \
many came back, then filter and count in code. Return the answer alone, as asked for."""
FIELDS = ("question", "context_window_text", "answer", "answer_type")
TOKENS = 8_000

OPENERS = {  # how a question of each label begins
    "numeric value": ("How many people saw", "How far away is"),
    "entity": ("What animal is named after", "What instrument measures"),
    "location": ("Where is", "Which city keeps"),
    "description and abstract concept": ("Why is there", "How do you make"),
    "abbreviation": ("What is the acronym for", "What is the short form of"),
    "human being": ("Who discovered", "Which inventor made"),
}
LABELS = list(OPENERS)
HEAD = f"""\
The following lines contain general-knowledge questions, one per line. Each line has a \
date, a user ID, which may occur on several lines, and a question whose answer is one of \
these 6 labels: {', '.join(LABELS)}. The data does not give the labels: work them out.

"""
COUNT = ("In the above data, how many data points should be classified as label '{}'? Give "
         "your final answer in the form 'Answer: number'.")
COMPARE = ("In the above data, which of the labels is the most common? Give your final "
           "answer in the form 'Label: answer', where answer is one of the labels.")


def records(rng, chars: int):
    """(context, rows): a row (user, label) per line. A user asks about two labels."""
    users = max(8, min(150, chars // 1000))
    ids = [str(number) for number in rng.sample(range(10_000, 100_000), users)]
    own = {user: rng.sample(LABELS, 2) for user in ids}
    lines, rows, room = [], [], chars - len(HEAD)
    while room > 0:
        user = rng.choice(ids)
        label = rng.choice(own[user])
        question = f"{rng.choice(OPENERS[label])} the {rng.choice(ADJECTIVES)}"
        lines.append(f"Date: Sep {rng.randint(10, 28)}, 2023 || User: {user} || "
                     f"Instance: {question} {rng.choice(NOUNS)}?")
        rows.append((user, label))
        room -= len(lines[-1]) + 1
    return HEAD + "\n".join(lines), rows


def make(rng, tokens=None, heldout=False):
    context, rows = records(rng, 4 * (tokens or TOKENS))
    labels = [label for _, label in rows]
    (first, most), (_, next_most) = Counter(labels).most_common(2)
    if most > next_most and rng.random() < 0.5:
        return COMPARE, context, {"type": "LABEL", "value": first}
    label = rng.choice(LABELS)
    gold = {"type": "NUMERIC", "value": str(labels.count(label))}
    return COUNT.format(label), context, gold


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
        return 0.75 ** min(999, abs(int(text) - int(gold))) if number else 0.0
    if kind == "DATE":
        for form in DATE_FORMS:
            with suppress(ValueError):
                return float(str(datetime.strptime(text, form).date()) == gold)
    return float(text == gold)


def right_answer(task):
    return task.answer["value"]


def read(row):
    """`context_window_text`, `question`, `answer` ("['entity']", "[7]",
    "[datetime.date(2023, 1, 6)]"), `answer_type`: oolongbench/oolong-synth."""
    kind = field(row, "answer_type").removeprefix("ANSWER_TYPE.")
    text = field(row, "answer").replace("datetime.date", "")
    value = ast.literal_eval(text)[0]
    if kind == "DATE":
        value = datetime(*value).date()
    if kind == "NUMERIC":
        value = int(value)
    gold = {"type": kind, "value": str(value)}
    return field(row, "question"), field(row, "context_window_text"), gold


# A root: each child labels the lines of one piece.
SPLIT = """\
lines = [line for line in context.split("\\n") if line.startswith("Date: ")]
size = -(-len(lines) // 24)
parts = ["\\n".join(lines[i:i + size]) for i in range(0, len(lines), size)]
labels = sum(rlm_query_batched("List the label of each line.", parts), [])
"""

# A child.
LABEL = f"""\
openers = {OPENERS}
FINAL([label for line in context.split("\\n") for label, starts in openers.items()
       if line.partition("Instance: ")[2].startswith(starts)])"""


def oracle(task, node):
    if node.depth:
        return block(LABEL)
    label = re.search(r"label '([^']+)'", task.query)
    if label:
        return block(f"{SPLIT}FINAL(labels.count('{label[1]}'))")
    return block(f"{SPLIT}FINAL(max(set(labels), key=labels.count))")
