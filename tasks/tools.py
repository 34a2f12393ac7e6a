"""What the REPL offers to model code beside its builtins, for all kinds of task here.

These functions travel into the REPL as source text, and their signatures and docstrings (up to
the first empty line) into the prompt. Standard library only.
"""
import bisect
import re


def list_papers(ctx):
    """[(id, title)] of a dict of papers."""
    return [(i, t.split("\n", 1)[0].removeprefix("### PAPER: ")) for i, t in ctx.items()]


def get_paper_abstract(ctx, id):
    """the abstract of one paper of a dict of papers."""
    return ctx[id].partition("<abstract>")[2].partition("</abstract>")[0]


def search(text, keyword, window=300, bidirectional=True):
    """passages around each occurrence of keyword (any case), widened to whole sentences,
    verbatim; window=0 gives just the sentences that contain it.

    `window` characters before (if bidirectional) and after it count; passages that overlap are
    joined.
    """
    low, word, passages, end = text.lower(), keyword.lower(), [], -1
    if len(low) != len(text):  # a few letters change length in lower case: positions would shift
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
    """the part from the first start to the next end, both included; "" if not there."""
    at = snippet.find(start)
    stop = snippet.find(end, at + len(start)) if at >= 0 else -1
    return snippet[at:stop + len(end)] if stop >= 0 else ""


ALL = (list_papers, get_paper_abstract, search, extract_section)
