"""What is asked and how an answer is scored: Task, and the kinds of task, one file each.

    kind         what is asked                           the score, in [0, 1]
    notes        what each note from a place is about    share of right labels
    evidence     the sentences about a term, in papers   F1 over their characters
    deep         one meaning per paragraph, two levels   F1 over the meanings
                 of children are needed to find all
    definitions  words of a class, in a dictionary       F1 over the words
    niah         a number hidden in filler (RULER)       share of the references contained
    oolong       label every line, then count (OOLONG)   exact; a number 0.75 ** |error|
    pairs        label, then pair users (OOLONG-Pairs)   F1 over unordered pairs
    code         what a call returns (LongBench v2)      exact letter
    hop          a chain of documents (BrowseComp-Plus)  exact up to case and punctuation

A kind is a module with two functions:

    make(rng, tokens=None, heldout=False) -> (query, context, gold)
    score(task, answer) -> float                in [0, 1]; `answer` is any JSON value

and, if it likes, with some of these:

    STRATEGY        text for the full prompt: how to go about it
    TOOLS           functions that travel into the REPL as source text
    TOKENS          the usual length of its context, if `make` heeds `tokens`
    TINY            fields of RLMConfig for the tiny model that is made for it
    read(row) -> (query, context, gold)         for questions from a JSON lines file
    oracle(task, node) -> str                   the next message of a perfect script
    keyword(task, node) -> str                  that of a script that only looks for a word
    demonstrate(task, node, rng) -> str         that of a script, good or bad, to learn from
    part_score(task, part, answer) -> float     a child's own score; None where it has none

Somebody's own path/to/my_task.py is used like one of ours. Where a public scoring rule
guesses what an answer meant, ours does not: a list of all labels, a refusal or the question
scores 0. Left out: prompts (rlm.py), and all that runs a model. Standard library only.
"""
import contextlib
import hashlib
import importlib
import inspect
import json
import numbers
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from runtime import handed_in
from runtime.handed_in import HandedInError
from tasks.in_repl import check_names, help_of, source
from tree import Completion, Node

NAMES = ("notes", "evidence", "deep", "definitions", "niah", "oolong", "pairs",
         "code", "hop")
CALL = re.compile(r"\b(rlm|llm)_query")  # in code: a call of the model
QUESTION = "question"  # the kind of a user's free question: no strategy, no score


def usual(data: str | None) -> str:
    """The kind where none is named: that of questions from the file `data`, or that of
    generated ones."""
    return "evidence" if data else "notes"


@dataclass(frozen=True)
class Task:
    """A question. `answer` is the gold."""
    id: str
    kind: str  # one of NAMES, the stem of a file that was loaded, or QUESTION
    query: str
    context: Any  # str, list[str] or dict[str, str]; deep has nested lists
    answer: Any = None


# ---------------------------------------------------------------------------------------
# The kinds

_files: dict[str, ModuleType] = {}  # what `load` read from files; the key is Task.kind


def load(spec: str) -> ModuleType:
    """The module of a kind: one of NAMES, or path/to/my_task.py.

    A file is run once and registered under its stem, so that Task.kind finds it again.
    Raises ValueError for an unknown name, HandedInError for a file that is no task."""
    if spec in NAMES:
        return importlib.import_module(f"tasks.{spec}")
    if spec in _files:
        return _files[spec]
    if not handed_in.is_path(spec):
        raise ValueError(f"there is no task {spec!r}; there are: {', '.join(NAMES)}, "
                         "or path/to/my_task.py")

    module = handed_in.load_file(spec)
    kind = _stem(spec)
    if kind in (*NAMES, QUESTION) or _files.get(kind, module) is not module:
        raise HandedInError(f"{spec}: another task is called {kind}; rename the file")
    for name in ("make", "score"):
        handed_in.function(module, name)  # raises HandedInError if it is not there
    if inspect.iscoroutinefunction(module.score):
        raise HandedInError(f"{spec}: score is async; a task's score is a plain function")
    if not all(map(inspect.isfunction, getattr(module, "TOOLS", ()))):
        raise HandedInError(f"{spec}: TOOLS is not a tuple of functions")
    try:
        check_names(getattr(module, "TOOLS", ()))
    except ValueError as error:
        raise HandedInError(f"{spec}: {error}") from None
    _files[kind] = module
    return module


def make(kind: str, rng: random.Random, tokens: int | None = None,
         heldout: bool = False) -> Task:
    """A generated question. `rng` decides everything, so a seed names a question.

    `tokens` is the length of the context, at four characters per token. `heldout` asks for
    what is never in training (evidence has terms for it). Raises ValueError for an unknown
    kind and for a length that it cannot have."""
    module = load(kind)
    kind = _stem(module.__file__)
    if tokens is not None and not hasattr(module, "TOKENS"):
        raise ValueError(f"{kind} tasks have one size, no number of tokens")
    made = _call(kind, "make", rng, tokens=tokens, heldout=heldout)
    return Task(f"{kind}-{rng.randrange(1 << 32):08x}", kind, *made)


def reward(task: Task, answer: Any) -> float:
    """The score of an answer, in [0, 1]. Raises ValueError for a kind without a score."""
    return float(_call(task.kind, "score", task, answer))


def part_score(task: Task, part: Any, answer: Any) -> float | None:
    """The score of a child's answer about `part` of the context; None if there is none."""
    if task.kind == QUESTION or not hasattr(load(task.kind), "part_score"):
        return None
    score = _call(task.kind, "part_score", task, part, answer)
    return None if score is None else float(score)


def oracle(task: Task, node: Node) -> str:
    """The next message of a perfect policy. It may use how its questions are generated.

    Raises ValueError for a question from a file, and for a kind that has no oracle."""
    return _call(task.kind, "oracle", generated(task), node)


def generated(task: Task) -> Task:
    """The task. Raises ValueError for one of a file, which scripts do not know how to
    solve."""
    if not task.id.startswith(f"{task.kind}-"):
        raise ValueError(f"{task.id}: the oracle and the scripts know generated questions "
                         "only")
    return task


def keyword(task: Task, node: Node) -> str:
    """The next message of a script that searches for one word of the question and answers
    with what is there. Raises ValueError for a kind that has none."""
    return _call(task.kind, "keyword", task, node)


def demonstrate(task: Task, node: Node, rng: random.Random, alone: bool = False) -> str:
    """The next message of a scripted strategy, good or bad, which `rng` draws: an equal rng
    in every turn lets a node keep its strategy. Where there are none, the oracle's.

    `alone` asks for a script that calls nobody. Raises ValueError if there is none."""
    for _ in range(100):
        if hasattr(load(task.kind), "demonstrate"):
            message = _call(task.kind, "demonstrate", task, node, rng)
        else:
            message = oracle(task, node)
        if not (alone and CALL.search(message)):
            return message
    raise ValueError(f"the task {task.kind} has no script that calls nobody")


def playable(task: Task, rng: random.Random) -> Task:
    """The task, or a generated one if the kind's scripts cannot play questions of files."""
    try:
        demonstrate(task, Node(), random.Random(0))
        return task
    except ValueError:
        return make(task.kind, rng)


def _stem(path: str) -> str:
    """The name of a kind: that of its file."""
    return os.path.splitext(os.path.basename(path))[0]


def _call(kind: str, name: str, *args: Any, **named: Any) -> Any:
    """What a function of a kind returns, checked. A mistake in a handed-in file is reported
    with its file and line."""
    module = load(kind)
    if not hasattr(module, name):
        raise ValueError(f"the task {kind} has no function {name}")
    function = getattr(module, name)
    if kind not in NAMES:
        function = handed_in.function(module, name)
    value = function(*args, **named)
    if name in ("make", "read"):
        expected = "(query, context, gold): a text, then a text, list or dict"
        fits = (isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str)
                and isinstance(value[1], (str, list, dict)))
    elif name in ("score", "part_score"):
        expected = "a number in [0, 1]"
        fits = isinstance(value, numbers.Real) and 0 <= value <= 1  # which nan is not
        fits = fits or (name == "part_score" and value is None)
    else:
        expected, fits = "a message, as text", isinstance(value, str)
    if not fits:
        raise handed_in.wrong(function, expected, value)
    return value


def scripted(script: Callable, task: Task, tokenizer):
    """The policy that writes what script(task, node) returns, cut like a model's message.
    Without a tokenizer four characters count as a token."""
    async def policy(node: Node, max_tokens: int, key: tuple) -> Completion:
        try:
            text = script(task, node)
        except Exception as error:
            error.ends_run = True  # a bug of ours, and no failure of the machine
            raise
        if getattr(tokenizer, "opens_thought", False):
            text = "</think>\n\n" + text  # else it would be taken for a thought
        ids = (*tokenizer.encode(text), tokenizer.end_of_turn) if tokenizer else ()
        stop, sampled = "stop", len(ids) or len(text) // 4
        if sampled > max_tokens:
            stop, sampled, ids = "length", max_tokens, ids[:max_tokens]
            text = tokenizer.decode(ids) if tokenizer else text[:4 * max_tokens]
        size = sum(len(turn.ids) or len(turn.text) // 4 for turn in node.turns)
        usage = {"prompt": size, "reused": 0, "sampled": sampled}
        return Completion(text, ids, (0.0,) * len(ids), stop, usage)
    return policy


# ---------------------------------------------------------------------------------------
# What a kind adds to the prompt and to the REPL

def strategy(kind: str) -> str:
    """The advice in the full prompt; "" where there is none."""
    return "" if kind == QUESTION else getattr(load(kind), "STRATEGY", "")


def tools(kind: str) -> str:
    """Source text of the functions that the REPL offers, with the imports they need."""
    return source(tools_of(kind))


def tools_help(kind: str) -> str:
    """One line per tool for the prompt: its signature and the start of its docstring."""
    return help_of(tools_of(kind))


def tools_of(kind: str) -> tuple[Callable, ...]:
    """The functions that the REPL offers for a kind."""
    kind = "evidence" if kind == QUESTION else kind
    return tuple(getattr(load(kind), "TOOLS", ()))


# ---------------------------------------------------------------------------------------
# Questions from a file

NAMED = 5  # rows that were left out whose line and field are printed


def read(path: str, kind: str, strict: bool = False) -> list[Task]:
    """The questions of a JSON lines file, in the schema that the kind's `read` says. A file
    that is one JSON list of rows is read as well.

    Rows that cannot be used are left out, counted and printed. Raises FileNotFoundError;
    ValueError if no row is left, or if `strict` at the first that cannot be used. It names
    the line and the wrong field."""
    module = load(kind)
    kind = _stem(module.__file__)
    if not hasattr(module, "read"):
        raise ValueError(f"the task {kind} reads no files: it has no function read")
    questions, problems = [], []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            made = _call(kind, "read", _parsed(line))
            questions.append(Task(f"row-{number}", kind, *made))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            if strict:
                raise ValueError(f"{path} {problems[0]}") from None

    rows = len(questions) + len(problems)
    if not rows:
        raise ValueError(f"{path}: holds no questions")
    if not questions:
        raise ValueError(f"{path}: none of its {rows} rows can be used; {problems[0]}")
    if problems:
        print(f"{path}: {len(problems)} of {rows} rows left out (--strict refuses them)")
        for problem in problems[:NAMED]:
            print(f"  {problem}")
        if len(problems) > NAMED:
            print(f"  and {len(problems) - NAMED} more")
    return questions


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a file. If the file is one JSON list, each of its rows as a line."""
    with open(path, "rb") as file:  # bytes: a line that is no UTF-8 is named as well
        if file.read(64).lstrip().startswith(b"["):
            with contextlib.suppress(ValueError, RecursionError):  # else line by line
                file.seek(0)
                if rows := json.load(file):
                    yield from (json.dumps(row).encode() for row in rows)
                    return
        file.seek(0)
        yield from file


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def split(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    """(training, held out): shuffled with seed 42, a fifth, at most 128, is held out.

    Questions that share a text, directly or through others, are on one side: what is held
    out was not read in training. Where that is impossible it is printed."""
    if len(tasks) < 2:
        raise ValueError("one question cannot be split into training and held-out ones; "
                         "at least 2 are needed")
    shuffled = random.Random(42).sample(tasks, len(tasks))
    wanted = min(128, max(1, len(tasks) // 5))
    groups = _sharing(shuffled)
    held: set[int] = set()
    for group in groups:
        if len(held) + len(group) <= wanted:
            held.update(group)
    if not held and len(groups) > 1:
        held.update(min(groups, key=len))
    if not held:
        print("all questions share a text, so training reads those of the held-out ones")
        held.update(range(wanted))
    elif len(held) < wanted:
        print(f"{len(held)} questions are held out, not {wanted}: the others share a text "
              "with too many")
    return ([task for i, task in enumerate(shuffled) if i not in held],
            [task for i, task in enumerate(shuffled) if i in held])


def _sharing(tasks: list[Task]) -> list[list[int]]:
    """The places of the tasks, in groups: tasks of two groups have no text in common.

    The texts of a task are the documents of a dict, else its whole context. They are
    compared without regard to line breaks."""
    group_of = list(range(len(tasks)))  # a place in the same group, or itself at the root

    def root(i: int) -> int:
        while group_of[i] != i:
            group_of[i] = group_of[group_of[i]]
            i = group_of[i]
        return i

    first: dict[bytes, int] = {}  # text, as a digest -> the first task that has it
    for i, task in enumerate(tasks):
        context = task.context
        for text in context.values() if isinstance(context, dict) else [context]:
            if not isinstance(text, str):
                text = json.dumps(text)
            words = " ".join(text.split()).encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(words, digest_size=16).digest()
            group_of[root(i)] = root(first.setdefault(digest, i))

    groups: dict[int, list[int]] = {}
    for i in range(len(tasks)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())
