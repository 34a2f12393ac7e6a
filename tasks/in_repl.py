"""Functions that run in a REPL: they travel there as source text.

TOOLS is what a kind here offers to model code beside the REPL's builtins. Signatures and
docstrings (up to the first empty line) go into the prompt.

What an oracle or a keyword script does is written as plain functions, too. In the REPL they
find its builtins (rlm_query, ...) as free names; here nobody calls them.
"""
import ast
import bisect
import functools
import inspect
import re
import sys
from collections.abc import Callable


def list_papers(ctx):
    """[(id, title)] of a dict of papers."""
    return [(i, t.split("\n", 1)[0].removeprefix("### PAPER: ")) for i, t in ctx.items()]


def get_paper_abstract(ctx, id):
    """The abstract of one paper of a dict of papers."""
    return ctx[id].partition("<abstract>")[2].partition("</abstract>")[0]


def search(text, keyword, window=300, bidirectional=True):
    """Passages around each occurrence of keyword (any case), widened to whole sentences,
    verbatim; window=0 gives just the sentences that contain it.

    `window` characters before (if bidirectional) and after it count; passages that overlap
    are joined."""
    low, word, passages, end = text.lower(), keyword.lower(), [], -1
    if len(low) != len(text):  # some letters change length: positions would shift
        low, word = text, keyword
    ends = [m.end() for m in re.finditer(r"[.!?]\s+|\n+", text)]
    stops = [0, *ends, len(text)]

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
        whole_file = inspect.getsource(sys.modules[function.__module__])
        for statement in ast.parse(whole_file).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
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
    text = task.context
    text = text if isinstance(text, str) else " ".join(text.values())
    words = sorted(re.findall(r"\w+", task.query), key=len, reverse=True)
    return next((w for w in words if w in text), words[0] if words else "the")


def sentences_with(context, word):
    texts = [context] if isinstance(context, str) else list(context.values())
    return [hit for text in texts if word in text for hit in search(text, word, 0)]


def first_with(context, word):
    return next(iter(sentences_with(context, word)), "")


def first_hit(task, node) -> str:
    """A keyword script: the first sentence with a word of the question."""
    return script(first_with, word_of(task), uses=(sentences_with,))
