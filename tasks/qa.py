"""qa: a person's question about texts, as in SQuAD. Rows come from --data alone.

A row has `question`, `context` and `answer` or `answers`. The context is a text, a list or
a dict of texts, or a list of {"title", "text"}; it may be empty, as in school mathematics,
for which there are no scripts.
The gold is a list of alternatives; none of them means that the texts do not say.

The score is SQuAD's (1606.05250): the largest F1 over the tokens of the answer and of an
alternative, without case, punctuation and articles. Two numbers are compared as numbers.
`--reward tasks/qa.py:exact` is its exact match.
"""
import json
import re
import string
from collections import Counter

from tasks.common import ALONE, LETTERS, Example, as_line, block, field, pick, search
from tree import Refused

READING = """\
The answer is a name, a number or a few words copied from the context: the shortest text \
that answers the question, without a sentence around it. If the context does not say it, \
the answer is "" and nothing else."""
STRATEGY = f"""\
Reading everything yourself would not fit into your window. Find the few texts that may \
say the answer with code, by words of the question and by synonyms, and give each of them \
to a child. Answer with the best of their answers. If there is nothing to read, calculate.
{READING}"""
EXAMPLE = Example(
    query="In the letters of the context, for how many days has it rained?",
    context=LETTERS,
    code=f"""\
parts = [text for text in context.values() if "days" in text]
answers = rlm_query_batched(question + "{ALONE}", parts)
FINAL(next((answer for answer in answers if answer), ""))""",
    part=LETTERS["Rome 2"],
    answer="nine")
TOOLS = (search,)
FIELDS = ("question", "context")


def read(row):
    texts = row.get("context")
    if isinstance(texts, list) and all(isinstance(text, dict) for text in texts):
        texts = [f"{field(text, 'title')}\n{field(text, 'text')}" for text in texts]
    inside = texts.values() if isinstance(texts, dict) else texts
    if not isinstance(texts, (str, list, dict)) or not all(
            isinstance(text, str) for text in inside):
        raise ValueError("field 'context' is no text, and no list or dict of texts")

    if "answers" not in row and "answer" not in row:
        raise ValueError("field 'answer' is missing")
    answer = row.get("answers")
    if answer is None:  # two files that were joined have both fields
        answer = row.get("answer")
    if isinstance(answer, dict):  # SQuAD on the hub
        answer = field(answer, "text", list)
    gold = answer if isinstance(answer, list) else [answer]
    gold = [as_line(one) for one in gold if one not in (None, "")]
    if not all(gold):
        raise ValueError("field 'answer' is no text, no number and no list of them")
    return field(row, "question"), texts, gold


def plain(text: str) -> str:
    return "".join(c for c in text.lower() if c not in string.punctuation)


def tokens(text: str) -> list[str]:
    """SQuAD's normalisation. But of an article alone, as of a choice "A", nothing goes."""
    text = plain(text)
    return re.sub(r"\b(a|an|the)\b", " ", text).split() or text.split()


def number(text: str) -> float | None:
    """What a text says that is a number, in whatever currency."""
    text = text.lstrip(" $€£").rstrip(" $€£%.").replace(",", "")
    digits = re.fullmatch(r"[-+]?(?:[0-9]*\.)?[0-9]+", text)
    return float(digits[0]) if digits else None


def f1(answer: str, gold: str) -> float:
    if number(answer) is not None and number(gold) is not None:
        return float(number(answer) == number(gold))
    given, wanted = Counter(tokens(answer)), Counter(tokens(gold))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * (given & wanted).total() / (given.total() + wanted.total())


def best(rule, answer, golds: list[str]) -> float:
    """The largest rule(answer, gold). Where there is no gold, the answer is to be empty."""
    if type(answer) not in (str, int, float, list):
        return 0.0
    return max(float(rule(as_line(answer), gold)) for gold in golds or [""])


def score(question, answer):
    return best(f1, answer, question.answer)


def exact(question, answer, root=None):
    """SQuAD's exact match."""
    return best(lambda given, gold: tokens(given) == tokens(gold), answer, question.answer)


def right_answer(question):
    return question.answer[0] if question.answer else ""


def says(part: str, gold: list[str]) -> bool:
    """Whether a text has one of the alternatives, word by word."""
    inside = f" {' '.join(tokens(part))}  {' '.join(plain(part).split())} "
    return any(f" {' '.join(tokens(one))} " in inside for one in gold)


def part_score(question, part, answer):
    """For a child that was given one text. If it does not say the answer, "" scores 1."""
    if not isinstance(part, str):
        return None
    return best(f1, answer, question.answer if says(part, question.answer) else [])


# Good and bad scripts with their shares. "rank" with children that "read" is right, and a
# root that must do without children reads one text itself. "read" and "sentence" know the
# gold of a training row. No root quotes a whole text: that earns a little F1 each time, and
# a model of 135M learnt to do nothing else.
TEXTS = {dict: "list(context.values())", list: "context", str: "context.split('\\n\\n')"}
RANK = """\
words = {{w for w in question.lower().replace("?", " ").split() if len(w) > 3}}
texts = sorted({texts}, key=lambda text: -sum(w in text.lower() for w in words))
"""
ASK = "answers = rlm_query_batched(question, texts[:{number}])\n"
JOIN = 'FINAL(next((answer for answer in answers if answer), ""))'
ROOT_SCRIPTS = {
    "rank": (0.65, RANK + ASK.format(number=2) + JOIN),
    "first": (0.3, "texts = {texts}\n" + ASK.format(number=1) + JOIN),
    "read": (0.05, RANK + "print(texts[0])"),
}
CHILD_SCRIPTS = {"read": 0.6, "sentence": 0.25, "echo": 0.15}


def demonstrate(question, node, rng):
    if not question.context:  # one that knows the gold would teach to guess
        raise Refused("a question without a context has no script to learn from")
    if node.depth:
        name, = rng.choices([*CHILD_SCRIPTS], CHILD_SCRIPTS.values())
        code = "FINAL(context)" if name == "echo" else "print(context)"
    else:
        name = pick(ROOT_SCRIPTS, rng)
        _, code = ROOT_SCRIPTS[name]
        code = code.format(texts=TEXTS[type(question.context)])
    if not node.written or name not in ("read", "sentence"):
        return block(code)
    # What was printed. Behind it is the question, which may hold the gold, too.
    text = node.messages[-1].text.rpartition(question.query[:100])[0].rpartition("\n")[0]
    found = [gold for gold in question.answer if says(text, [gold])]
    if found and name == "sentence":
        found = search(text, found[0], 0) or found
    return block(f"FINAL({json.dumps(found[0] if found else '', ensure_ascii=False)})")
