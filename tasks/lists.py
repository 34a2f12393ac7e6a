"""Lists of OOLONG's form, made from the texts of requests.py.

A count hardly tells who reads: from guessed labels the right code scores nearly 0.5. So
most questions to train on ask for the labels themselves. All others ask for counts,
comparisons, the most common label, or the user with most of a label.
"""
from collections import Counter
from datetime import date

from tasks.common import how_many
from tasks.requests import SUBJECTS, texts_of

TOKENS = 440  # 17 lines
HEAD_TOKENS, LINE_TOKENS = 65, 22  # on average
LABELS_ASKED = 0.8  # share of questions to train on that ask for labels; 0.5 was worse

HEAD = """\
The following lines contain {} requests, one per line. Each line has a Date, a User ID, \
which may occur on several lines, and a request (Instance). Each can be categorised as one \
of {} labels: {}. The data does not provide the labels: you need to work them out.

"""
ABOVE = "In the above data, "
SOME = ("For the following question, only consider the data points of the user IDs {}. "
        "Among these, ")
MANY = "how many data points should be classified as label '{}'?"


def make(rng, tokens=None, heldout=False):
    of_lines = tokens and tokens - HEAD_TOKENS
    number = max(2, how_many(rng, 8, 32, of_lines, LINE_TOKENS))
    shares = [rng.random() for _ in SUBJECTS]  # so that some labels are more common
    labels = rng.choices([*SUBJECTS], shares, k=number)
    ids = [str(rng.randrange(10_000, 100_000)) for _ in range(2 + number // 8)]
    users, texts = rng.choices(ids, k=number), texts_of(heldout)
    lines = []
    for user, label in zip(users, labels):
        day = date(2024, rng.randint(1, 12), rng.randint(1, 28))
        text = rng.choice(texts[label])
        lines.append(f"Date: {day:%b %d, %Y} || User: {user} || Instance: {text}")
    head = HEAD.format(number, len(SUBJECTS), ", ".join(SUBJECTS))

    forms = counts_of(rng, users, labels)
    if not heldout and rng.random() < LABELS_ASKED:
        forms = [labels_of_some(rng, users, labels)]
    query, kind, value = rng.choice(forms)
    gold = {"type": kind, "value": value, "labels": labels}
    return query, head + "\n".join(lines), gold


def two_of(rng, users: list[str]) -> list[str]:
    return rng.sample(sorted({*users}), min(2, len({*users})))


def labels_of_some(rng, users: list[str], labels: list[str]) -> tuple:
    """(query, type, answer): the labels of the lines of two users."""
    chosen = two_of(rng, users)
    query = (SOME.format(", ".join(chosen)) + "give the label of each instance, as a dict "
             "{line: label}, with lines numbered from 0.")
    lines = zip(users, labels)
    return query, "LABELS", {str(i): label for i, (user, label) in enumerate(lines)
                             if user in chosen}


def counts_of(rng, users: list[str], labels: list[str]) -> list[tuple]:
    """What one can ask about counts: (query, type, answer) of each form that has one."""
    first, second = rng.sample([*SUBJECTS], 2)
    chosen, pairs = two_of(rng, users), [*zip(users, labels)]
    have = [user for user, label in pairs if label == first]
    more = labels.count(first) - labels.count(second)
    phrase = "same frequency as"
    if more:
        phrase = "more common than" if more > 0 else "less common than"
    forms = [
        (ABOVE + MANY.format(first), "NUMERIC", str(len(have))),
        (SOME.format(", ".join(chosen)) + MANY.format(first), "NUMERIC",
         str(sum(user in chosen for user in have))),
        (f"{ABOVE}is label '{first}' more common, less common, or the same frequency as "
         f"label '{second}'?", "COMPARISON", phrase),
        (ABOVE + "which of the labels is the most common?", "LABEL", most(labels)),
        (f"{ABOVE}which user has the most instances with the label '{first}'?", "USER",
         most(have))]
    return [form for form in forms if form[2]]


def most(names: list[str]) -> str:
    """The most frequent name; "" if there is none, or more than one."""
    (best, n), (_, m) = [*Counter(names).most_common(2), ("", 0), ("", 0)][:2]
    return best if n > m else ""
