"""What tasks need of the REPL: the tools of model code, and code as a model's message.

The prompt gets the signatures of TOOLS and their docstrings (up to the first empty line).
The REPL gets their source. So a tool imports in its own body what it uses.
"""
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable


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

    A list of papers is treated as the dict {number: text}. Passages that overlap are
    joined."""
    import bisect
    import re

    if isinstance(text, list):
        text = dict(enumerate(text))
    if isinstance(text, dict):
        found = {i: search(t, keyword, window, bidirectional) for i, t in text.items()}
        return {i: passages for i, passages in found.items() if passages}
    if not keyword:
        return []
    stops = [0, *(m.end() for m in re.finditer(r"[.!?]\s+|\n+", text)), len(text)]
    passages, end = [], -1

    for match in re.finditer(re.escape(keyword), text, re.IGNORECASE):
        left = max(0, match.start() - window) if bidirectional else match.start()
        right = min(len(text), match.end() + window)
        start = stops[bisect.bisect_right(stops, left, hi=len(stops) - 1) - 1]
        stop = stops[bisect.bisect_left(stops, right)]
        if start < end:
            passages[-1][1] = stop
        else:
            passages.append([start, stop])
        end = stop
    return [text[a:b].strip() for a, b in passages]


def extract_section(snippet, start, end):
    """The part from the first start to the next end, both included; "" if not there."""
    at = snippet.find(start)
    stop = snippet.find(end, at + len(start)) if at >= 0 else -1
    return snippet[at:stop + len(end)] if stop >= 0 else ""


TOOLS = (list_papers, get_paper_abstract, search, extract_section)


def help_of(tools: Iterable[Callable]) -> str:
    """One line per tool for the prompt: its signature and the start of its docstring."""
    lines = []
    for tool in tools:
        about = (inspect.getdoc(tool) or "").split("\n\n")[0]
        about = " ".join(about.split())
        lines.append(f"- {tool.__name__}{inspect.signature(tool)}: {about}")
    return "\n".join(lines)


@functools.cache
def source(tools: tuple[Callable, ...]) -> str:
    """The text that defines the tools."""
    return "\n".join(textwrap.dedent(inspect.getsource(tool)) for tool in tools)


def block(code: str) -> str:
    """Code as the message of a model."""
    return f"```repl\n{code}\n```"


def word_of(question) -> str:
    """The first quoted word of the question that may stand in code, else its longest word
    that the context contains."""
    for quoted in re.findall(r'"([^"\n]+)"', question.query):
        if not {"'", "\\"} & set(quoted):
            return quoted
    text = str(question.context)
    words = sorted(re.findall(r"\w+", question.query), key=len, reverse=True) or ["the"]
    return next((word for word in words if word in text), words[0])
