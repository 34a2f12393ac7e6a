"""Functions that run in a REPL: they travel there as source text.

TOOLS is what a kind here offers to model code beside the REPL's builtins. Signatures and
docstrings (up to the first empty line) go into the prompt.

What an oracle or a keyword script does is written as plain functions, too. In the REPL they
find its builtins (rlm_query, ...) as free names; here nobody calls them.
"""
import ast
import bisect
import builtins
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable

from runtime.frames import BUILTINS


def list_papers(ctx):
    """[(id, title)] of a dict of papers."""
    return [(i, t.split("\n", 1)[0].removeprefix("### PAPER: ")) for i, t in ctx.items()]


def get_paper_abstract(ctx, id):
    """The abstract of one paper of a dict of papers."""
    return ctx[id].partition("<abstract>")[2].partition("</abstract>")[0]


def search(text, keyword, window=300, bidirectional=True):
    """Passages around each occurrence of keyword (any case), widened to whole sentences,
    verbatim; window=0 gives just the sentences that contain it. Of a dict of papers: a
    dict, with the passages of those papers that have some.

    `window` characters before (if bidirectional) and after it count; passages that overlap
    are joined. A list of papers is a dict of their numbers."""
    if isinstance(text, list):
        text = dict(enumerate(text))
    if isinstance(text, dict):
        found = {i: search(t, keyword, window, bidirectional) for i, t in text.items()}
        return {i: passages for i, passages in found.items() if passages}
    low, word = text.lower(), keyword.lower()
    if len(low + word) != len(text + keyword):  # a letter became two: each alone instead
        low, word = ("".join(c.lower()[0] for c in part) for part in (text, keyword))
    ends = [m.end() for m in re.finditer(r"[.!?]\s+|\n+", text)]
    stops = [0, *ends, len(text)]
    passages, end = [], -1

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
    """The part from the first start to the next end, both included; "" if not there."""
    at = snippet.find(start)
    stop = snippet.find(end, at + len(start)) if at >= 0 else -1
    return snippet[at:stop + len(end)] if stop >= 0 else ""


TOOLS = (list_papers, get_paper_abstract, search, extract_section)


# ---------------------------------------------------------------------------------------
# Tools of any file

def check_names(tools: Iterable[Callable]) -> None:
    """Raises ValueError for a tool without a name that code can call, or with a name that
    is taken."""
    taken = {*BUILTINS, *PURE, *dir(builtins)}  # others need them
    for tool in tools:
        name = getattr(tool, "__name__", "")
        if not callable(tool) or not name.isidentifier():
            raise ValueError(f"{tool!r} is no tool: code needs a name to call it by")
        if name in taken:
            raise ValueError(f"a tool cannot be called {name}: that name is taken")
        taken.add(name)


def help_of(tools: Iterable[Callable]) -> str:
    """One line per tool for the prompt: its signature and the start of its docstring."""
    lines = []
    for tool in tools:
        about = (inspect.getdoc(tool) or "").split("\n\n")[0]
        about = " ".join(about.split())
        lines.append(f"- {tool.__name__}{inspect.signature(tool)}: {about}")
    return "\n".join(lines)


# What a tool may import and still travel. Whoever reads files or asks a network wants those
# of the caller's process.
PURE = set("bisect collections copy csv datetime decimal difflib fractions functools heapq "
           "itertools json math operator random re statistics string textwrap typing "
           "unicodedata".split())
NOT_PURE = {"open", "input", "eval", "exec", "compile", "globals", "__import__"}


def can_travel(tools: tuple[Callable, ...]) -> tuple[Callable, ...]:
    """The tools whose source can stand alone: functions that need nothing but their
    arguments, Python's builtins and PURE modules, and other such tools."""
    needed = {}
    for tool in tools:
        if inspect.isfunction(tool) and tool.__name__ == tool.__code__.co_name:
            try:
                needed[tool] = free_names(tool)
            except (OSError, TypeError, SyntaxError, KeyError):  # its source is not there
                pass
    while True:
        names = {tool.__name__ for tool in needed}
        alone = {tool: free for tool, free in needed.items() if free <= names}
        if len(alone) == len(needed):
            return tuple(alone)
        needed = alone


def free_names(function: Callable) -> set[str]:
    """The names that a function needs and that neither itself, nor Python's builtins, nor
    imports of PURE modules define."""
    definition = definition_of(function)
    # Where its file has its own `sum`, that is what it means.
    used, known = set(), set(dir(builtins)) - NOT_PURE - function.__globals__.keys()
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            known.add(node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            used |= {f"global {name}" for name in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            used |= {f"import {name}" for name in modules_of(node, node.names) - PURE}
            known |= {(name.asname or name.name).split(".")[0] for name in node.names}
    for statement in imports_of(function):
        statement.names = [name for name in statement.names
                           if modules_of(statement, [name]) <= PURE]
        known |= {(name.asname or name.name).split(".")[0] for name in statement.names}
    outside = [*definition.args.defaults, *filter(None, definition.args.kw_defaults)]
    for default in outside:  # evaluated where it has no imports yet
        if not isinstance(default, ast.Constant):
            used.add("a default that is no constant")
    return used - known


def definition_of(function: Callable) -> ast.FunctionDef:
    """The syntax tree of a function that is defined plainly, without its annotations.
    Raises TypeError for a method, a lambda, an async or a decorated function."""
    text = inspect.getsource(function)
    statement = ast.parse(text).body[0] if text.startswith("def ") else None
    if not isinstance(statement, ast.FunctionDef) or hasattr(function, "__wrapped__"):
        raise TypeError("no plain function")
    for node in ast.walk(statement):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return statement


def modules_of(statement: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> set[str]:
    """The modules of names of an import, by their first names; "." for a relative one."""
    if isinstance(statement, ast.Import):
        return {name.name.split(".")[0] for name in names}
    return {"." if statement.level else statement.module.split(".")[0]}


def travelling(functions: tuple[Callable, ...]) -> str:
    """The source of tools that can travel. Each imports inside of itself what it uses, so
    that nobody's names meet another's."""
    texts = []
    for function in functions:
        definition = definition_of(function)
        used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
        for statement in imports_of(function):
            statement.names = [name for name in statement.names
                               if (name.asname or name.name).split(".")[0] in used]
            if statement.names and modules_of(statement, statement.names) <= PURE:
                definition.body.insert(0, statement)
        texts.append(ast.unparse(definition))
    return "\n".join(texts)


def imports_of(function: Callable) -> list:
    """The import statements of the file that a function is from."""
    whole_file = inspect.getsource(sys.modules[function.__module__])
    return [statement for statement in ast.parse(whole_file).body
            if isinstance(statement, ast.Import)
            or isinstance(statement, ast.ImportFrom) and statement.module != "__future__"]


# ---------------------------------------------------------------------------------------
# Messages

PIECES = 24  # children of one batch


@functools.cache
def source(functions: tuple[Callable, ...]) -> str:
    """The source text of functions, after the imports of their files that they use."""
    imports, bodies = [], []
    brought = {function.__name__ for function in functions}
    for function in functions:
        body = inspect.getsource(function)
        bodies.append(body)
        used = {n.id for n in ast.walk(ast.parse(body)) if isinstance(n, ast.Name)}
        used -= brought
        for statement in imports_of(function):
            statement.names = [name for name in statement.names
                               if (name.asname or name.name).split(".")[0] in used]
            if statement.names and ast.unparse(statement) not in imports:
                imports.append(ast.unparse(statement))
    return "\n".join([*imports, *bodies])


def block(code: str) -> str:
    """Code as the message of a model."""
    return f"```repl\n{code}\n```"


def script(function: Callable, *args, uses: tuple[Callable, ...] = ()) -> str:
    """The message that answers with function(context, *args) and brings its source along,
    and that of the functions that it uses."""
    call = ", ".join(["context", *map(repr, args)])
    return block(f"{source((*uses, function))}\nFINAL({function.__name__}({call}))")


def asked(node) -> str:
    """What a node was asked: its first user message."""
    return next((turn.text for turn in node.turns if turn.role == "user"), "")


def word_of(task) -> str:
    """The word in quotes in the question; else its longest that occurs in the context."""
    quoted = re.search(r'"([^"\n]+)"', task.query)
    if quoted:
        return quoted[1]
    text = " ".join(texts_of(task.context))
    words = sorted(re.findall(r"\w+", task.query), key=len, reverse=True)
    return next((w for w in words if w in text), words[0] if words else "the")


def texts_of(context):
    """The texts of a context, however deep its lists and dicts are."""
    if isinstance(context, str):
        return [context]
    parts = context.values() if isinstance(context, dict) else context
    return [text for part in parts for text in texts_of(part)]


def sentences_with(context, word):
    texts = [context] if isinstance(context, str) else list(context.values())
    return [hit for text in texts if word in text for hit in search(text, word, 0)]


def first_with(context, word):
    texts = dict(enumerate(texts_of(context)))
    return next(iter(sentences_with(texts, word)), "")


def first_hit(task, node) -> str:
    """A keyword script: the first sentence with a word of the question."""
    return script(first_with, word_of(task), uses=(texts_of, sentences_with))
