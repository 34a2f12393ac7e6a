"""oolong: label every line, then count (OOLONG, arXiv 2511.02817).

Gold is {"type": ..., "value": str}. The score is exact match; a number scores 0.75 **
|error|.

The labels of generated lines follow from how a question begins, so that a script can know
them; a model has to read. pairs.py asks other questions about such lines.
"""
import ast
import re
from collections import Counter
from contextlib import suppress
from datetime import datetime

from tasks import Task, generated
from tasks.in_repl import PIECES, TOOLS, asked, block, first_hit, script
from tasks.text import (ADJECTIVES, NOUNS, POOL, as_line, characters, field, how_many_fit,
                        make_term, pick)

STRATEGY = """\
Every line has to be labelled by what it means, which code cannot do, and then counted, \
which code does best. Split the context into pieces that a child can read and give them \
to children with rlm_query_batched(question, pieces); they return one label a line, in \
order, check that as many came back, then filter by user and date and count in code. \
Return the number, label, user or phrase in the form asked for, alone."""
TOKENS = 8_000

OPENERS = {  # how a question of each label begins
    "numeric value": ("How many people saw", "How far away is", "How old is",
                      "What year saw", "How much did they pay for"),
    "entity": ("What animal is named after", "What instrument measures",
               "Which colour marks", "What metal is used in", "Which language describes"),
    "location": ("Where is", "Which city keeps", "What country is known for",
                 "Which river crosses", "On what island lies"),
    "description and abstract concept": (
        "Why is there", "How do you make", "What caused", "What is the meaning of",
        "How does one explain"),
    "abbreviation": (
        "What is the acronym for", "What does one abbreviate as BTR in",
        "What do the letters KPS mean in", "What is the short form of",
        "What is the full name of the GDF in"),
    "human being": ("Who discovered", "Who was the first to see", "Which inventor made",
                    "What painter is known for", "Whose assistant wrote down"),
}
LABELS = list(OPENERS)
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
DAYS = [f"{month} {day:02}, {year}" for year in (2023, 2024) for month in MONTHS
        for day in range(1, 29)]
HEAD = """\
The following lines contain general-knowledge questions, one per line. Each line has a \
date, a user ID, which may occur on several lines, and a question whose answer is one of \
these 6 labels: {labels}. The data does not give the labels: work them out from the \
questions. Calculate exactly, do not estimate.

"""


def records(rng, chars: int, users: int, own_labels: bool):
    """(context, rows): rows are (date as YYYY-MM-DD, user, label), one per line.

    With `own_labels` a user asks mostly about two labels and seldom about a third, so that
    users differ. Otherwise all users draw alike from labels of different frequency."""
    terms = [make_term(rng) for _ in range(40)]
    pool = {}
    for label, openers in OPENERS.items():
        pool[label] = [f"{opener} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} of "
                       f"{rng.choice(terms)}?"
                       for opener in openers for _ in range(POOL // 30)]
    head = HEAD.format(labels=", ".join(rng.sample(LABELS, 6)))

    ids = rng.sample(range(10_000, 100_000), users)
    n = (chars - len(head)) // 80 + 20  # more than fit
    who = rng.choices(ids, [1 / (3 + i) for i in range(users)], k=n)
    if own_labels:
        own = {user: rng.sample(LABELS, 3) for user in ids}
        labels = [rng.choices(own[user], (8, 3, 0.4))[0] for user in who]
    else:
        labels = rng.choices(LABELS, [rng.uniform(1, 3) for _ in LABELS], k=n)
    days = rng.choices(DAYS, k=n)
    which = rng.choices(range(len(pool[LABELS[0]])), k=n)

    lines = [f"Date: {day} || User: {user} || Instance: {pool[label][question]}"
             for day, user, label, question in zip(days, who, labels, which)]
    lines = lines[:how_many_fit(lines, chars - len(head))]
    rows = [(iso_date(day), str(user), label)
            for _, day, user, label in zip(lines, days, who, labels)]
    return head + "\n".join(lines), rows


# Runs in the REPL, too: 'Jan 06, 2023' as '2023-01-06'.
def iso_date(day):
    months = "JanFebMarAprMayJunJulAugSepOctNovDec"
    return f"{day[8:]}-{months.index(day[:3]) // 3 + 1:02}-{day[4:6]}"


FORMS = {  # form: type of the answer, what is asked, the form of the answer
    "most": ("LABEL", "which of the labels is the most common?",
             "'Label: answer', where answer is one of the labels."),
    "least": ("LABEL", "which of the labels is the least common?",
              "'Label: answer', where answer is one of the labels."),
    "count": ("NUMERIC", "how many data points should be classified as label '{a}'?",
              "'Answer: number'."),
    "compare": ("COMPARISON", "is label '{a}' more common, less common, or the same "
                "frequency as label '{b}'?", "'Answer: {a} is [X] {b}', where [X] is "
                "'more common than', 'less common than', or 'same frequency as'."),
    "user": ("USER", "which user has the most instances with the label '{a}'?",
             "'User: [X]', where [X] is the user ID."),
    "month": ("MONTH_YEAR", "in which month do instances with the label '{a}' occur most "
              "often?", "'Answer: [X]', where [X] is the month and the year, for example "
              "'January 2023'."),
}
ONLY = "For the following question, only consider the instances"


def make(rng, tokens=None, heldout=False):
    chars = characters(tokens, TOKENS)
    context, rows = records(rng, chars, max(8, min(300, chars // 4000)), False)
    while True:  # until the question has one answer
        form = rng.choice(list(FORMS))
        a, b = rng.sample(LABELS, 2)
        scope, head = rng.choice(("all", "users", "dates")), "In the above data"
        if scope == "users":
            counts = Counter(user for _, user, _ in rows)
            chosen = rng.sample([user for user, _ in counts.most_common(8)], 3)
            head = f"{ONLY} of the user IDs {', '.join(chosen)}. Among them"
        elif scope == "dates":
            first, last = sorted(rng.sample(range(len(DAYS)), 2))
            days = f"between {DAYS[first]} and {DAYS[last]}"
            head = f"{ONLY} {days}, both included. Among them"
        answer_type, asked, said = FORMS[form]
        question = f"{head}, {asked} Give your final answer in the form {said}"
        query = question.format(a=a, b=b)
        value = tally(rows, *parts_of(query))
        if value is not None:
            return query, context, {"type": answer_type, "value": value}


def parts_of(query: str) -> tuple:
    """(form, labels, users, dates) of a generated question; empty where it does not say."""
    form = next(f for f, (_, asked, _) in FORMS.items() if asked.partition("{")[0] in query)
    users = re.search(r"user IDs ([\d, ]+)\.", query)
    days = re.findall(r"(?:between|and) (\w{3} \d\d, \d{4})", query)
    return (form, re.findall(r"label '([^']+)'", query),
            users[1].split(", ") if users else [], [iso_date(day) for day in days])


# Runs in the REPL, too: the answer over rows (date, user, label); None if two answers tie.
def tally(rows, form, labels, users, dates):
    if users:
        rows = [row for row in rows if row[1] in users]
    if dates:
        rows = [row for row in rows if dates[0] <= row[0] <= dates[1]]
    counts = Counter(row[2] for row in rows)
    if form == "count":
        return str(counts[labels[0]])
    if form == "compare":
        more = counts[labels[0]] - counts[labels[1]]
        if more == 0:
            return "same frequency as"
        return "more common than" if more > 0 else "less common than"

    if form == "user":
        counts = Counter(row[1] for row in rows if row[2] == labels[0])
    if form == "month":
        counts = Counter(row[0][:7] for row in rows if row[2] == labels[0])
    ranked = counts.most_common()
    if form == "least":  # all six occur, or more than one occurs never
        ranked = ranked[::-1] if len(ranked) == 6 else []
    tie = len(ranked) > 1 and ranked[0][1] == ranked[1][1]
    if not ranked or tie:
        return None
    if form != "month":
        return ranked[0][0]
    names = ("January February March April May June July August September October November "
             "December").split()
    year, month = ranked[0][0].split("-")
    return f"{names[int(month) - 1]} {year}"


PHRASES = ("more common than", "less common than", "same frequency as")
DATE_FORMS = ("%Y-%m-%d", "%m/%d/%Y", "%b %d, %Y", "%B %d, %Y")


def score(task, answer):
    """OOLONG: what follows the last colon, without * [ ] and quotes, equals the gold. Of a
    comparison, exactly one of the three phrases occurs. Left out: the public fallback to
    the last word of a text without a colon, which a list of all labels can pass."""
    kind, gold = task.answer["type"], task.answer["value"]
    text = as_line(answer).rpartition(":")[2].strip("*[]'\" \n.")
    if kind == "COMPARISON":
        return float([p for p in PHRASES if p.rpartition(" ")[0] in text] == [gold])
    if kind == "NUMERIC":
        if not re.fullmatch(r"-?[0-9]{1,15}", text):
            return 0.0
        return 0.75 ** min(10_000, abs(int(text) - int(gold)))
    if kind == "DATE":
        text = day_of(text)
    return float(text == gold)


def day_of(text: str) -> str:
    """A date in one of DATE_FORMS as YYYY-MM-DD; "" if it is in none."""
    for form in DATE_FORMS:
        with suppress(ValueError):
            return datetime.strptime(text, form).strftime("%Y-%m-%d")
    return ""


ANSWER_TYPES = ("LABEL", "NUMERIC", "COMPARISON", "USER", "DATE", "MONTH_YEAR")


def read(row):
    """`context_window_text`, `question`, `answer` ("['entity']", "[7]",
    "[datetime.date(2023, 1, 6)]"), `answer_type`: oolongbench/oolong-synth."""
    kind = field(row, "answer_type", str).removeprefix("ANSWER_TYPE.")
    if kind not in ANSWER_TYPES:
        raise ValueError(f"field 'answer_type' is none of {', '.join(ANSWER_TYPES)}")
    text = field(row, "answer", str)
    day = re.fullmatch(r"\[datetime\.date\((\d+), (\d+), (\d+)\)\]", text)
    try:
        value = "-".join(day.groups()) if day else str(ast.literal_eval(text)[0])
    except Exception:  # what literal_eval raises is many things
        raise ValueError(f"field 'answer' is no list of a value: {text[:60]!r}") from None
    value = day_of(value) if kind == "DATE" else value

    gold = {"type": kind, "value": value}
    if not value or score(Task("", "oolong", "", "", gold), value) < 1:
        raise ValueError(f"field 'answer' is no {kind}: {text[:60]!r}")
    context = field(row, "context_window_text", str, blank=False)
    return field(row, "question", str), context, gold


# Runs in the REPL: rows (date, user, label). Children give one digit per line, the number
# of its label.
def labelled(context, labels, pieces):
    lines = [line for line in context.split("\n") if line.startswith("Date: ")]
    size = -(-len(lines) // pieces)
    parts = ["\n".join(lines[i:i + size]) for i in range(0, len(lines), size)]
    ask = "For each line the number of its label, one digit a line, no spaces: "
    ask += ", ".join(f"{i} {label}" for i, label in enumerate(labels))
    digits = "".join(rlm_query_batched(ask, parts))
    assert len(digits) == len(lines)
    days = {day: iso_date(day) for day in {line[6:18] for line in lines}}
    return [(days[line[6:18]], line[28:33], labels[int(digit)])
            for line, digit in zip(lines, digits)]


# Runs in a child's REPL: each group of the pattern has the openers of one label.
def digits_here(context, openers):
    starts = "|".join(f"({'|'.join(group)})" for group in openers)
    found = re.finditer(rf"\|\| Instance: (?:{starts})", context)
    return "".join(str(opener.lastindex - 1) for opener in found)


# Runs in the REPL.
def count_lines(context, labels, pieces, question):
    return tally(labelled(context, labels, pieces), *question)


def oracle(task, node):
    if node.depth:
        return script(digits_here, list(OPENERS.values()))
    return script(count_lines, LABELS, PIECES, parts_of(task.query),
                  uses=(iso_date, labelled, tally))


# --- scripts to learn from --------------------------------------------------------------

# Shares of good and bad strategies. Only read with read is right: which is which is for the
# reinforcement to find out.
ROOT_SCRIPTS = {"read": 0.6, "part": 0.25, "guess": 0.15}
CHILD_SCRIPTS = {"read": 0.6, "same": 0.2, "short": 0.2}
CHILDREN = 16  # at most, of a root that reads

READ = """\
from datetime import datetime as date
day = lambda row: date.strptime(row[0], "Date: %b %d, %Y")
labels = {labels}
rows = [line.split(" || ") for line in context.split("\\n") if line[:6] == "Date: "]
{scope}n = len(rows) // {children} + 1
pages = [rows[i:i + n] for i in range(0, len(rows), n)]{part}
ask = "One digit per line, no spaces: " + str(dict(enumerate(labels)))
texts = ["\\n".join([ask] + [row[2] for row in page]) for page in pages]
digits = "".join(llm_query_batched(texts))
kinds = [labels[int(digit)] for digit in digits]
"""
COUNT = {  # form: what is done with rows and kinds
    "most": "FINAL(max(set(kinds), key=kinds.count))",
    "least": "FINAL(min(set(kinds), key=kinds.count))",
    "count": "FINAL(kinds.count({a!r}))",
    "compare": "more = kinds.count({a!r}) - kinds.count({b!r})\n"
               'word = "more" if more > 0 else "less"\n'
               'FINAL(f"{{word}} common than" if more else "same frequency as")',
    "user": "users = [row[1][6:] for row, kind in zip(rows, kinds) if kind == {a!r}]\n"
            "FINAL(max(set(users), key=users.count))",
    "month": 'months = [day(row).strftime("%B %Y") for row, kind in zip(rows, kinds) '
             "if kind == {a!r}]\nFINAL(max(set(months), key=months.count))",
}
GUESS = {"most": LABELS[0], "least": LABELS[0], "count": 20, "compare": PHRASES[0],
         "user": "", "month": "January 2023"}


def demonstrate(task, node, rng):
    """Children are given lines in their prompt, and answer with one digit for each."""
    if node.depth:
        return digits_of(asked(node), pick(CHILD_SCRIPTS, rng))
    form, labels, users, dates = parts_of(generated(task).query)
    name = pick(ROOT_SCRIPTS, rng)
    if name == "guess":
        return block(f"FINAL({GUESS[form]!r})")
    scope = ""
    if users:
        scope = f"rows = [row for row in rows if row[1][6:] in {users}]\n"
    if dates:
        first, last = map(day_code, dates)
        scope = f"rows = [row for row in rows if {first} <= day(row) <= {last}]\n"
    a, b = [*labels, "", ""][:2]
    return block(reading(name == "part", scope) + COUNT[form].format(a=a, b=b))


def reading(part: bool, scope: str = "") -> str:
    """Code that has children label the rows in `scope`, or a first part of them."""
    first = ""
    if part:
        first = "[:1]\nrows = rows[:n]"
    return READ.format(labels=LABELS, scope=scope, children=CHILDREN, part=first)


def day_code(iso: str) -> str:
    year, month, day = map(int, iso.split("-"))
    return f"date({year}, {month}, {day})"


def digits_of(text: str, name: str) -> str:
    """The numbers of the labels of lines: all, the first one for each, or too few."""
    openers = [(opener, str(i)) for i, group in enumerate(OPENERS.values())
               for opener in group]
    lines = [line.removeprefix("Instance: ") for line in text.split("\n")]
    digits = [digit for line in lines for opener, digit in openers
              if line.startswith(opener)]
    if name == "same":
        digits = digits[:1] * len(digits)
    if name == "short":
        digits = digits[:-1]
    return "".join(digits)


keyword = first_hit
