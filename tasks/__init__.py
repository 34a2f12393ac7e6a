"""Questions with a gold answer, how an answer is scored, and what a task brings along.

Eight kinds. All but deep are generated at any length from a seed (haystacks.py) or read from JSON
lines in the schema of their public benchmark (`load_tasks`):

    kind       gold (Task.answer)              score, in [0, 1]
    evidence   {paper id: [sentences]}         micro F1 over characters (alphaXiv/
                                               multi-paper-synthetic)
    niah       [strings]                       share of them contained, any case (RULER)
    aggregate  {"type": ..., "value": str}     exact; numbers 0.75 ** |error| (OOLONG)
    pairs      [[id, id], ...]                 F1 over unordered pairs (OOLONG-Pairs)
    copy       the text                        exact (verbatim_copy of verifiers)
    code       "A" to "D"                      exact (LongBench v2)
    hop        a short string                  exact up to case, punctuation, articles (HotpotQA's
                                               rule; BrowseComp-Plus itself asks a judge model)
    deep       [strings]                       F1 over them (of this program: it needs two levels)

Where a public rule guesses what an answer meant, the one here does not: an answer has to be the
answer, so a list of all labels, a refusal or the question scores 0. An echo of the whole context
scores 2p/(1+p) on evidence (p the gold share of its characters), 1 on copy, where it is the answer,
and 0 elsewhere. A task also brings the strategy text for the prompt, helper functions for its REPL,
and scripts that answer it: demonstrations, good and bad, for the warm-up, an oracle and a keyword
search for evaluation, and what a policy might do instead of the task (DEGENERATE).

Left out: prompts (rlm.py) and anything that runs a model. Standard library only.
"""
import ast
import bisect
import inspect
import json
import random
import re
import string
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks import haystacks
from tasks.haystacks import paper_text

KINDS = ("evidence", "niah", "aggregate", "pairs", "copy", "code", "hop")
GENERATED = (*KINDS, "deep")  # deep is of this program; the others can be read from files, too
TRAINED = ("evidence", "deep")  # those with demonstrations


@dataclass(frozen=True)
class Task:
    """A question. `answer` is the gold."""
    id: str
    kind: str  # one of GENERATED; question: free text from a user, without a gold answer
    query: str
    context: Any  # str, list[str] or dict[str, str]
    answer: Any = None


# ---------------------------------------------------------------------------------------------
# Scoring

MAX_SPANS = 2_000  # distinct strings an answer may hold; marking more could take minutes
NIAH_CHARS = 512  # of an answer that count: RULER lets a model write 128 tokens


def reward(task: Task, answer: Any) -> float:
    """The score of an answer (any JSON value), in [0, 1]. None and empty answers score exactly 0.

    Raises ValueError for a kind that has no score."""
    score = {"evidence": evidence_f1, "niah": niah_share, "aggregate": oolong_score,
             "pairs": pairs_f1, "copy": copy_exact, "code": choice_exact, "hop": hop_exact,
             "deep": deep_f1}
    if task.kind not in score:
        raise ValueError(f"no score is defined for tasks of kind {task.kind!r}")
    return float(score[task.kind](task, answer))


def evidence_f1(task: Task, answer: Any) -> float:
    """Micro F1 over characters.

    Every occurrence of every returned string is marked in every paper; precision and recall are
    taken over the union of the marked characters, summed over the papers. So an echo of the
    whole context scores 2p/(1+p) with p the gold share, and repeating a span gains nothing.
    Strings found nowhere score exactly 0.
    """
    spans = set(strings_in(answer))
    if not spans or len(spans) > MAX_SPANS:
        return 0.0
    both = returned = gold = 0
    for paper, text in task.context.items():
        marked = mark(text, spans)
        wanted = mark(text, task.answer.get(paper, ()))
        both += (int.from_bytes(marked) & int.from_bytes(wanted)).bit_count()
        returned += marked.count(1)
        gold += wanted.count(1)
    return 2 * both / (returned + gold) if both else 0.0


def part_score(task: Task, part: Any, answer: Any) -> float | None:
    """The score of a child's answer about a part of the context, where the task can tell one:
    for a paper of evidence its F1 there, and if nothing is to be found 1 for an empty answer."""
    if task.kind != "evidence" or not isinstance(task.context, dict):
        return None
    paper = next((name for name, text in task.context.items() if text == part), None)
    if paper is None:
        return None
    gold = task.answer.get(paper)
    if not gold:
        return float(answer is not None and not any(strings_in(answer)))
    return evidence_f1(Task("", "evidence", "", {paper: part}, {paper: gold}), answer)


def niah_share(task: Task, answer: Any) -> float:
    """RULER's string_match_all: the share of the references that the answer contains, any case.
    Only its first NIAH_CHARS characters count, so an echo of the context scores 0 unless a
    needle stands at its very start (a generated one never does)."""
    text = as_line(answer)[:NIAH_CHARS].lower()
    return sum(value.lower() in text for value in task.answer) / len(task.answer)


PHRASES = ("more common than", "less common than", "same frequency as")
DATE_FORMS = ("%Y-%m-%d", "%m/%d/%Y", "%b %d, %Y", "%B %d, %Y")


def oolong_score(task: Task, answer: Any) -> float:
    """OOLONG: what follows the last colon, without * [ ] and quotes, equals the gold; a number
    scores 0.75 ** |error|; of a comparison exactly one of the three phrases occurs. The public
    parser falls back to the last word of a text without a colon, which a list of all labels can
    pass; that is left out."""
    kind, gold = task.answer["type"], task.answer["value"]
    text = as_line(answer).rpartition(":")[2].strip("*[]'\" \n.")
    if kind == "COMPARISON":
        return [p for p in PHRASES if p.rpartition(" ")[0] in text] == [gold]
    if kind == "NUMERIC":
        if not re.fullmatch(r"-?[0-9]{1,15}", text):
            return 0.0
        return 0.75 ** min(10_000, abs(int(text) - int(gold)))
    if kind == "DATE":
        return day_of(text) == day_of(gold) != ""
    return text == gold


def day_of(text: str) -> str:
    """A date in one of DATE_FORMS as YYYY-MM-DD; "" if it is in none."""
    for form in DATE_FORMS:
        try:
            return datetime.strptime(text, form).strftime("%Y-%m-%d")
        except ValueError:
            continue
    return ""


def pairs_f1(task: Task, answer: Any) -> float:
    """F1 over unordered pairs of ids, from "(id, id)" in a text or [id, id] in a list. Where the
    gold is empty only an explicit [] scores, and it scores 1. An echo has no pairs: 0. All pairs
    of users together score 2p/(1+p), with p the gold share of them."""
    found = pairs_in(answer)
    if not task.answer:
        return float(answer == [] or answer == "[]")
    gold = {frozenset(map(str, pair)) for pair in task.answer}
    return 2 * len(found & gold) / (len(found) + len(gold))


def pairs_in(answer: Any) -> set[frozenset]:
    if isinstance(answer, str):
        return {frozenset(p) for p in re.findall(r"\(\s*(\d+)\s*,\s*(\d+)\s*\)", answer)
                if p[0] != p[1]}
    found = set()
    for item in answer if isinstance(answer, list) else ():
        if isinstance(item, str):
            found |= pairs_in(item)
        elif isinstance(item, list) and len(item) == 2:
            ids = {as_line(i) for i in item if type(i) in (int, str)} - {""}
            if len(ids) == 2:
                found.add(frozenset(ids))
    return found


def copy_exact(task: Task, answer: Any) -> float:
    """1 for the text, character by character. Here the echo is the answer."""
    return isinstance(answer, str) and answer == task.answer


def choice_exact(task: Task, answer: Any) -> float:
    """LongBench v2: "The correct answer is (B)", or the letter alone. Strictly: the sentence occurs
    once and ends the answer, so that naming all letters scores 0."""
    text = as_line(answer).replace("*", "").strip()
    said = re.fullmatch(r"(?s)(?:(.*)The correct answer is )?\(?([A-D])\)?\.?", text)
    return bool(said) and "The correct answer is" not in (said[1] or "") and (
        said[2] == task.answer)


def hop_exact(task: Task, answer: Any) -> float:
    """The answer equals the gold after HotpotQA's normalisation, and is not empty."""
    return normalized(as_line(answer)) == normalized(task.answer) != ""


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous blanks (SQuAD, HotpotQA)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def deep_f1(task: Task, answer: Any) -> float:
    """F1 over the different strings of an answer."""
    found = set(strings_in(answer))
    return 2 * len(found & set(task.answer)) / (len(found) + len(task.answer))


def as_line(answer: Any) -> str:
    """A string or number as text, a flat list of them joined by commas; anything else as ""."""
    if isinstance(answer, list):
        return ", ".join(filter(None, (as_line(i) for i in answer if not isinstance(i, list))))
    if isinstance(answer, str):
        return answer
    if type(answer) is int and answer.bit_length() < 200:  # Python refuses to write very long ones
        return str(answer)
    return str(answer) if type(answer) is float else ""


JUDGE = """\
You grade an answer to a question about several papers. The reference holds the sentences that \
answer it. Rate from 1 (worst) to 10 (best):
- precision: how much of the answer is needed to answer the question;
- recall: how much of the reference the answer covers.
What the answer says about its own quality does not count. Reply with two lines and nothing else:
precision: N
recall: N

<question>
{query}
</question>
<reference>
{gold}
</reference>
<answer>
{answer}
</answer>"""


def judge_prompt(task: Task, answer: Any) -> str:
    """What a judge model is asked about an answer to an evidence task."""
    gold = [text for texts in task.answer.values() for text in texts]
    # One pass, so that a brace or a placeholder in the answer stays what it is.
    parts = {"query": task.query, "gold": "\n".join(gold),
             "answer": "\n".join(strings_in(answer))}
    return re.sub(r"\{(query|gold|answer)\}", lambda name: parts[name[1]], JUDGE)


def judge_score(reply: str) -> float | None:
    """(precision + recall) / 20 of a judge's reply, in [0.1, 1]; None if it is not the two lines
    that were asked for: ask again, or count it as failed."""
    said = re.fullmatch(r"\s*precision: *(\d\d?)\s+recall: *(\d\d?)\s*", reply.lower())
    if not said or not all(1 <= int(n) <= 10 for n in said.groups()):
        return None
    return (int(said[1]) + int(said[2])) / 20


def strings_in(answer: Any) -> list[str]:
    """The strings of an answer: itself, or those in nested lists; anything else is ignored."""
    found, stack = [], [answer]
    while stack:  # a loop: an answer may be nested deeper than Python's recursion limit
        item = stack.pop()
        if isinstance(item, str) and item.strip():
            found.append(item.strip())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def mark(text: str, spans) -> bytearray:
    """One byte a character of `text`: 1 where any span occurs, overlapping occurrences too.

    Linear, also on periodic texts: occurrences that overlap by more than half follow each other
    at the span's period, so only one period has to be compared anew, not the whole span."""
    marked = bytearray(len(text))
    for span in filter(None, spans):
        period = span.find(span[:(len(span) + 1) // 2], 1)
        if period < 0 or span[period:] != span[:-period]:
            period = len(span)  # or no less than half of it
        at, again = text.find(span), span[-period:]
        while at >= 0:
            end = at + len(span)
            while text.startswith(again, end):
                end += period
            marked[at:end] = b"\x01" * (end - at)
            at = text.find(span, end - period + 1)
    return marked


# ---------------------------------------------------------------------------------------------
# What the REPL of a task offers: these functions travel into it as source text

def list_papers(ctx):
    """[(id, title)] of a dict of papers."""
    return [(i, t.split("\n", 1)[0].removeprefix("### PAPER: ")) for i, t in ctx.items()]


def search(text, keyword, window=300, bidirectional=True):
    """Passages around each occurrence of keyword (any case), as verbatim substrings of text.

    `window` characters before (if bidirectional) and after it, widened to whole sentences;
    passages that overlap are joined. window=0 gives just the sentences that contain it.
    """
    low, word, passages, end = text.lower(), keyword.lower(), [], -1
    if len(low) != len(text):  # a few letters change length in lower case: positions would shift
        low, word = text, keyword
    stops = [0] + [m.end() for m in re.finditer(r"[.!?]\s+|\n+", text)] + [len(text)]
    at = low.find(word) if word else -1
    while at >= 0:
        left = max(0, at - window) if bidirectional else at
        right = min(len(text), at + len(word) + window)
        start = stops[bisect.bisect_right(stops, left, hi=len(stops) - 1) - 1]
        stop = stops[bisect.bisect_left(stops, right)]
        if start < end:
            passages[-1][1] = stop
        else:
            passages.append([start, stop])
        end = stop
        at = low.find(word, at + 1)
    return [text[a:b].strip() for a, b in passages]


def extract_section(snippet, start, end):
    """From the first `start` in snippet to the next `end`, both included; "" if not there."""
    at = snippet.find(start)
    stop = snippet.find(end, at + len(start)) if at >= 0 else -1
    return snippet[at:stop + len(end)] if stop >= 0 else ""


def get_paper_abstract(ctx, id):
    """The abstract of one paper of a dict of papers."""
    return ctx[id].partition("<abstract>")[2].partition("</abstract>")[0]


TOOLS = "import bisect, re\n\n" + "\n\n".join(
    inspect.getsource(f) for f in (list_papers, search, extract_section, get_paper_abstract))

TOOLS_HELP = """\
- list_papers(ctx) -> [(id, title)]; get_paper_abstract(ctx, id) -> str
- search(text, keyword, window=300, bidirectional=True) -> passages around each occurrence of \
keyword, widened to whole sentences, verbatim; window=0 gives just the sentences that contain it
- extract_section(snippet, start, end) -> the part from start to end, both included"""

STRATEGY = """\
The context is a dict {paper id: text}. Return the sentences that answer the question, verbatim, \
as a list of strings; they are scored by the characters they share with the gold sentences, so \
leave out everything else.
1. List the papers, and search them for the words of the question and for synonyms, to find the \
few that matter. Reading all of them yourself would not fit into your window.
2. Give each promising paper to a child: rlm_query_batched(question, [context[i] for i in ids]). \
A child sees one paper as its context (a str), searches it, reads the passages, and returns the \
exact sentences as a list of strings copied from the text, or [] if there are none.
3. Drop strings that are errors, join the lists, and call FINAL with them."""

_PIECES = ("Split the context into pieces that a child can read and give them to children with "
           "rlm_query_batched(question, pieces); ")
STRATEGIES = {
    "evidence": STRATEGY,
    "niah": "One sentence of the context holds the answer. Search for the words of the question. "
            "Return the value alone.",
    "aggregate": "Every line has to be labelled by what it means, which code cannot do, and then "
                 f"counted, which code does best. {_PIECES}they return one label a line, in "
                 "order, check that as many came back, then filter by user and date and count in "
                 "code. Return the number, label, user or phrase in the form asked for, alone.",
    "pairs": "Every line has to be labelled by what it means, which code cannot do; comparing "
             f"users is for code. {_PIECES}they return one label a line, in order, check that "
             "as many came back, then group by user and test all pairs in code. Return the list of "
             "pairs [[lower id, higher id], ...].",
    "copy": "The answer is the context itself: call FINAL with it, unchanged. Do not print it.",
    "code": "The context is a dict {path: source}. Find the function, follow its imports from "
            "file to file, and work the value out; a child can read a long file for you. Return "
            "the letter alone.",
    "hop": "The context is a dict {id: document}. No document holds the whole answer: search for "
           "the first clue, let children read the documents found and return the name that leads "
           "on, search for that, and so on. Return the final name alone."}


def strategy(kind: str) -> str:
    """The advice in the full prompt for tasks of this kind; "" where there is none."""
    return STRATEGIES.get(kind, "")


# ---------------------------------------------------------------------------------------------
# Generated tasks

LENGTHS = (2_000, 10_000_000)  # tokens, at four characters each
SHORTER = {"pairs": 100_000, "copy": 100_000}  # whose answers grow with the context


def make_task(kind: str, rng: random.Random, *, tokens: int | None = None, heldout: bool = False,
              papers: int = 12, relevant: tuple[int, int] = (2, 4), sentences: int = 7) -> Task:
    """A generated question; `rng` decides everything, so a seed names a task.

    `tokens` is the length of the context, at four characters a token (8,000 if not given; evidence
    then has so many `papers`, `relevant` to the question, of so many `sentences`). `heldout`
    takes the terms of evidence from the fifth that is never in training; deep is trained on, too,
    and has one size; the other kinds are for evaluation only. Raises ValueError for an unknown
    kind or a length out of range."""
    if kind not in GENERATED:
        raise ValueError(f"no generated tasks of kind {kind!r}; there are: {', '.join(GENERATED)}")
    if kind == "deep":
        if tokens is not None:
            raise ValueError("deep tasks have one size, no number of tokens")
        name, query, context, gold = haystacks.deep(rng)
        return Task(f"deep-{name}-{rng.randrange(1 << 32):08x}", kind, query, context, gold)
    if tokens is None and kind != "evidence":
        tokens = 8_000
    most = SHORTER.get(kind, LENGTHS[1])
    if tokens is not None and not LENGTHS[0] <= tokens <= most:
        raise ValueError(f"{kind} tasks have {LENGTHS[0]:,} to {most:,} tokens, not {tokens:,}")
    if kind == "evidence":
        if tokens:
            papers = round(4 * tokens / haystacks.paper_chars(sentences))
        made = haystacks.evidence(rng, heldout, papers, relevant, sentences)
    else:
        made = haystacks.MAKE[kind](rng, 4 * tokens)
    name, query, context, gold = made
    return Task(f"{kind}-{name}-{rng.randrange(1 << 32):08x}", kind, query, context, gold)


# ---------------------------------------------------------------------------------------------
# Tasks from a file

def load_tasks(path: str, kind: str = "evidence") -> list[Task]:
    """Tasks from JSON lines in the schema of the kind's public benchmark; more fields may be there.

    evidence   `question`, `papers` = [{paperId, title, abstract, text}],
               `evidence` = [{paperId, selections: [{text}]}]
    niah       `input` (the question is its last line), `outputs` = [strings]: RULER's files
    aggregate  `context_window_text`, `question`, `answer` ("['entity']", "[7]",
               "[datetime.date(2023, 1, 6)]"), `answer_type`: oolongbench/oolong-synth
    pairs      the same without `answer_type`, `answer` being a list of pairs or "(1, 2), (1, 3)"
               (OOLONG-Pairs publishes queries over OOLONG's contexts, and no file)
    copy       `prompt` = [{role, content}] with <text>...</text> in the last, `answer`:
               verbatim_copy of verifiers
    code       `question`, `choice_A` to `choice_D`, `answer`, `context`: THUDM/LongBench-v2
    hop        `query`, `answer`, `gold_docs`, `evidence_docs`, `negative_docs` =
               [{docid, text}]: Tevatron/browsecomp-plus, decrypted

    Raises FileNotFoundError, or ValueError naming the line and the field that is wrong."""
    if kind not in KINDS:
        raise ValueError(f"no tasks of kind {kind!r}; there are: {', '.join(KINDS)}")
    read = {"evidence": _read_evidence, "niah": _read_niah, "aggregate": _read_aggregate,
            "pairs": _read_pairs, "copy": _read_copy, "code": _read_code, "hop": _read_hop}[kind]
    tasks = []
    with open(path, "rb") as file:  # bytes: a line that is no UTF-8 is named as well
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error})") from None
            query, context, gold = read(row, where)
            tasks.append(Task(f"row-{number}", kind, query, context, gold))
    if not tasks:
        raise ValueError(f"{path}: holds no questions")
    return tasks


def _read_evidence(row: Any, where: str) -> tuple:
    question = _get(row, "question", str, where)
    context, gold, words = {}, {}, ""
    for i, paper in enumerate(_get(row, "papers", list, where)):
        at = f"{where}, papers[{i}]"
        name, title, abstract, text = (_get(paper, k, str, at)
                                       for k in ("paperId", "title", "abstract", "text"))
        if name in context:
            raise ValueError(f"{at}: field 'paperId' repeats {name!r}")
        context[name] = paper_text(title, abstract, text)
        words += title + abstract + text
    if not words.strip():
        raise ValueError(f"{where}: field 'papers' is empty: the context would be empty")
    for i, entry in enumerate(_get(row, "evidence", list, where)):
        at = f"{where}, evidence[{i}]"
        name = _get(entry, "paperId", str, at)
        if name not in context:
            raise ValueError(f"{at}: field 'paperId' names {name!r}, which is not in 'papers'")
        for j, selection in enumerate(_get(entry, "selections", list, at)):
            text = _get(selection, "text", str, f"{at}, selections[{j}]").strip()
            if not text or text not in context[name]:
                raise ValueError(f"{at}, selections[{j}]: field 'text' does not occur in paper "
                                 f"{name!r}: {text[:60]!r}")
            gold.setdefault(name, []).append(text)
    if not gold:
        raise ValueError(f"{where}: field 'evidence' is empty: nothing could score")
    return question, context, gold


def _read_niah(row: Any, where: str) -> tuple:
    context, _, query = _get(row, "input", str, where).strip().rpartition("\n")
    if not context.strip():
        raise ValueError(f"{where}: field 'input' is one line; its last line is the question")
    gold = _get(row, "outputs", list, where)
    if not gold or not all(isinstance(value, str) and value for value in gold):
        raise ValueError(f"{where}: field 'outputs' is not a list of strings")
    return query.strip(), context, gold


ANSWER_TYPES = ("LABEL", "NUMERIC", "COMPARISON", "USER", "DATE", "MONTH_YEAR")


def _read_aggregate(row: Any, where: str) -> tuple:
    kind = _get(row, "answer_type", str, where).removeprefix("ANSWER_TYPE.")
    if kind not in ANSWER_TYPES:
        raise ValueError(f"{where}: field 'answer_type' is none of {', '.join(ANSWER_TYPES)}")
    text = _get(row, "answer", str, where)
    day = re.fullmatch(r"\[datetime\.date\((\d+), (\d+), (\d+)\)\]", text)
    try:
        value = "{}-{:0>2}-{:0>2}".format(*day.groups()) if day else str(ast.literal_eval(text)[0])
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        raise ValueError(f"{where}: field 'answer' is not a list of one value: {text[:60]!r}"
                         ) from None
    if (kind == "NUMERIC" and not re.fullmatch(r"-?[0-9]{1,15}", value)
            or kind == "DATE" and not day_of(value)
            or kind == "COMPARISON" and value not in PHRASES or not value):
        raise ValueError(f"{where}: field 'answer' is no {kind}: {value[:60]!r}")
    return (_get(row, "question", str, where), _text(row, "context_window_text", where),
            {"type": kind, "value": value})


def _read_pairs(row: Any, where: str) -> tuple:
    gold = row.get("answer") if isinstance(row, dict) else None
    found = pairs_in(gold)
    if not found and gold not in ([], "[]"):
        raise ValueError(f"{where}: field 'answer' is no list of pairs")
    return (_get(row, "question", str, where), _text(row, "context_window_text", where),
            sorted(sorted(pair) for pair in found))


def _read_copy(row: Any, where: str) -> tuple:
    messages = _get(row, "prompt", list, where)
    content = _get(messages[-1] if messages else {}, "content", str, f"{where}, prompt[-1]")
    text = content.partition("\n<text>")[2].rpartition("</text>")[0]
    if not text or text != _get(row, "answer", str, where):
        raise ValueError(f"{where}: field 'answer' is not what stands between <text> and </text> "
                         "in 'prompt'")
    return haystacks.COPY, text, text


def _read_code(row: Any, where: str) -> tuple:
    letter = _get(row, "answer", str, where)
    if letter not in ("A", "B", "C", "D"):
        raise ValueError(f"{where}: field 'answer' is not A, B, C or D")
    choices = "\n".join(f"({c}) {_get(row, f'choice_{c}', str, where)}" for c in "ABCD")
    return (f"{_get(row, 'question', str, where)}\n{choices}\nAnswer with the letter.",
            _text(row, "context", where), letter)


def _read_hop(row: Any, where: str) -> tuple:
    context = {}
    for field in ("gold_docs", "evidence_docs", "negative_docs"):
        for i, document in enumerate(_get(row, field, list, where)):
            at = f"{where}, {field}[{i}]"
            name = _get(document, "docid", str, at)
            context[name] = _text(document, "text", at)
    if not context:
        raise ValueError(f"{where}: field 'gold_docs' and the others are empty: no context")
    answer = _text(row, "answer", where)
    return _get(row, "query", str, where), dict(sorted(context.items())), answer  # gold not first


def _text(row: Any, field: str, where: str) -> str:
    text = _get(row, field, str, where)
    if not text.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    return text


def _get(row: Any, field: str, kind: type, where: str) -> Any:
    if not isinstance(row, dict) or field not in row:
        raise ValueError(f"{where}: lacks field {field!r}")
    if not isinstance(row[field], kind):
        raise ValueError(f"{where}: field {field!r} is not a {kind.__name__}")
    return row[field]


def split(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    """(training, held out): after a shuffle with seed 42, a fifth, at most 128, is held out."""
    if len(tasks) < 2:
        raise ValueError("one question cannot be split into training and held-out ones; "
                         "at least 2 are needed")
    shuffled = random.Random(42).sample(tasks, len(tasks))
    n = min(128, max(1, len(tasks) // 5))
    return shuffled[n:], shuffled[:n]


# ---------------------------------------------------------------------------------------------
# Scripted demonstrations for the warm-up: good and bad strategies, mixed on purpose

ROOT_SCRIPTS = {"filter": 0.3, "all": 0.2, "one": 0.2, "alone": 0.15, "forget": 0.15}
CHILD_SCRIPTS = {"exact": 0.3, "whole": 0.35, "first": 0.35}
DEEP_SCRIPTS = {"each": 0.55, "firsts": 0.2, "one": 0.1, "alone": 0.05, "forget": 0.1}
LEAF_SCRIPTS = {"right": 0.6, "none": 0.4}
LOOK_FIRST = 0.25  # share of scripts that print something first and act in the next turn


def demonstrate(task: Task, node, seed) -> str:
    """The assistant message of a scripted strategy for the node's next turn.

    The strategy is drawn from (seed, node.path) alone, so a node keeps it over its turns. Roots:
    filter (the papers that contain the word go to children), all (every paper does), one (the
    first hit only), alone (return whole papers, ask nobody), forget (never call FINAL).
    Children: exact (the sentences with the word), whole (the paper), first (its first sentence).
    Only filter with exact is right; which is which is for the reinforcement to find out.
    """
    rng = random.Random(f"{seed} {node.path}")
    if task.kind == "deep":
        scripts = LEAF_SCRIPTS if node.kind == "llm" else DEEP_SCRIPTS
    else:
        scripts = CHILD_SCRIPTS if node.depth else ROOT_SCRIPTS
    name = rng.choices(list(scripts), scripts.values())[0]
    if task.kind == "deep":
        return _deep(node, name)
    look = rng.random() < LOOK_FIRST
    turn = sum(t.role == "assistant" for t in node.turns)
    if look and turn == 0:
        return _block("print(context[:40])" if node.depth else "print(len(context))")
    word = keyword(task)
    hits = f'ps = [p for p in context.values() if "{word}" in p]\n'
    ask = f"""'Quote "{word}".'"""
    return _block({
        "filter": hits + f"FINAL(rlm_query_batched({ask}, ps))",
        "all": f"FINAL(rlm_query_batched({ask}, list(context.values())))",
        "one": hits + f"FINAL(rlm_query({ask}, ps[0]))",
        "alone": hits + "FINAL(ps)",
        "forget": hits + "print(len(ps))",
        "exact": f'FINAL(search(context, "{word}", 0))',
        "whole": "FINAL(context)",
        "first": 'FINAL(context.split("\\n")[-1].split(". ")[0])',
    }[name])


def _deep(node, name: str) -> str:
    """The message of a script for a task of kind deep. Nodes with a REPL: each (a child for every
    part), firsts (one for the first part of every part), one (only the first part), alone (all of
    the context), forget (never call FINAL). Plain completions read a paragraph: right (the meaning
    of its word) or none."""
    if node.kind == "llm":
        known = [w for w in node.turns[1].text.split() if w in haystacks.DICTIONARY]
        return haystacks.DICTIONARY[known[0]] if known and name == "right" else "none"
    return _block({
        "each": "FINAL(rlm_query_batched('Translate.', context))",
        "firsts": "FINAL(rlm_query_batched('Translate.', [c[0] for c in context]))",
        "one": "FINAL(rlm_query('Translate.', context[0]))",
        "alone": "FINAL(context)",
        "forget": "print(len(context))",
    }[name])


def keyword(task: Task) -> str:
    """The word in quotes in the question; else its longest word that occurs in the context."""
    quoted = re.search(r'"([^"\n]+)"', task.query)
    if quoted:
        return quoted[1]
    text = task.context if isinstance(task.context, str) else " ".join(task.context.values())
    words = sorted(re.findall(r"\w+", task.query), key=len, reverse=True)
    return next((w for w in words if w in text), words[0] if words else "the")


def oracle(task: Task, node, seed=0) -> str:
    """The assistant message of a perfect policy for the node's next turn: the ceiling. It uses how
    its question was generated. Raises ValueError for tasks from a file."""
    if not task.id.startswith(f"{task.kind}-"):
        raise ValueError(f"{task.id}: the oracle knows generated questions only")
    if task.kind == "deep":
        return _deep(node, "right" if node.kind == "llm" else "each")
    asked = next((t.text for t in node.turns if t.role == "user"), "")
    return _block(haystacks.oracle_code(task.kind, task.query, asked, node.depth))


def keyword_script(task: Task, node, seed=0) -> str:
    """The assistant message of the floor: find one word of the question, answer with what is
    found there; nobody is asked, nothing is counted."""
    return _block(haystacks.keyword_code(task.kind, task.query, keyword(task)))


# ---------------------------------------------------------------------------------------------
# What a policy may do instead of the task

DEGENERATE = ("echo", "flood", "constant", "endless", "at_once")


def degenerate_script(name: str, task: Task, node) -> str:
    """The message of a node that does the same whatever it was asked: return its context, ask
    more children than the tree may have, say a constant, never end, or end with nothing."""
    whole = "list(context.values())" if isinstance(task.context, dict) and not node.path else (
        "context")
    return _block({"echo": f"FINAL({whole})",
                   "flood": "FINAL(rlm_query_batched(['Go.'] * 99))",
                   "constant": "FINAL('The')",
                   "endless": "print(len(context))",
                   "at_once": "FINAL('')"}[name])


def degenerate(task: Task, root) -> str:
    """Which of DEGENERATE a finished tree is, however it came about; "" for none of them.

    echo: the answer holds the whole context. flood: more than three children, all opened with the
    same words. constant, at_once: nobody asked and the context never named, with an answer or
    with none. endless: no message calls FINAL."""
    said = [turn.text for turn in root.turns if turn.role == "assistant"]
    if not any("FINAL" in text for text in said):
        return "endless"
    texts = list(task.context.values()) if isinstance(task.context, dict) else task.context
    found = set(strings_in(root.answer))
    if found.issuperset(strings_in(texts)):
        return "echo"
    if len(root.children) > 3 and len({c.turns[1].text for c in root.children}) == 1:
        return "flood"
    if root.end != "final" or root.children or any("context" in text for text in said):
        return ""
    return "constant" if found else "at_once"


def _block(code: str) -> str:
    return f"```repl\n{code}\n```"
