"""Trees: what a node holds, how a tree is stored, and how it is shown."""
import os
import unicodedata
from pathlib import Path

import pytest

from tasks import Question
from tree import Message, Node, Tree, printable, read_trees, render, write_trees

HOSTILE = "a\x1b[2J\x07\x00\r\x08\x9b31m\u202e\u2028\x85\x0b\x1c\x7fz\udc80"


def ragged():
    """Three levels, nodes with up to five turns, one that never spoke, one without ids."""
    root = Node(answer=["x", None, {"k": 1.5}], end="final", errors=[1])
    root.add(Message("system", "be brief"))
    root.add(Message("user", "a question \ud800 \udfff", (1, 2, 3)))
    root.add(Message("assistant", "a block", (4, 5), (-0.5, -1.25)))
    root.add(Message("user", "seen", (6,)))
    root.add(Message("assistant", "another", (7,), (-3.0,)))

    first = Node((0,), end="budget")
    first.add(Message("user", "p", (8, 9)))

    second = Node((1,), kind="llm", answer="leaf", end="text", score=0.5)
    second.add(Message("user", "p", (8,)))
    second.add(Message("assistant", "leaf \udc00", (9,), (-0.125,)))

    third = Node((2,), end="turns")
    third.add(Message("user", "p"))
    third.add(Message("assistant", "from an API", (), ()))
    third.children = [Node((2, 0), end="crash"), Node((2, 1), end="final")]

    root.children = [first, second, third]
    return root


def as_dicts(node):
    """Nodes are compared by identity, so compare their fields."""
    return {**vars(node), "children": [as_dicts(child) for child in node.children]}


def test_a_ragged_tree_survives_the_file(tmp_path):
    path = str(tmp_path / "trees.jsonl")
    question = Question("t\udc80", "evidence", "q\nq", {"p": "text"}, {"p": ["text"]})
    written = [Tree(question, "g", ragged(), 0.1 + 0.2),
               Tree(question, "h", Node(end="failed"), 0.0, "OSError('lost')")]
    write_trees(path, written)

    def fields(tree):
        return {**vars(tree), "root": as_dicts(tree.root)}

    assert list(map(fields, read_trees(path, Question))) == list(map(fields, written))
    assert Path(path).read_bytes().isascii()


def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    """Its last step, a rename, fails."""
    path = tmp_path / "trees.jsonl"
    path.write_text("old")
    monkeypatch.delattr(os, "replace")
    with pytest.raises(AttributeError):
        write_trees(str(path), [Tree({}, "g", Node(), 1.0)])
    assert path.read_text() == "old"


@pytest.mark.parametrize("bad", [b"{", b"\xff\xfe", b'{"group": "g"}'])
def test_a_line_that_is_no_tree_is_named(tmp_path, bad):
    path = tmp_path / "bad.jsonl"
    write_trees(str(path), [Tree({}, "g", Node(), 1.0)])
    path.write_bytes(path.read_bytes() + bad + b"\n")
    with pytest.raises(ValueError, match=f"^{path} line 2: .*$"):
        read_trees(str(path))


def test_what_a_model_wrote_cannot_drive_the_terminal():
    root = Node(answer=[HOSTILE, {HOSTILE: HOSTILE}], end=HOSTILE)
    root.add(Message("user", HOSTILE * 3))
    leaf = Node((0,), kind="llm", answer=HOSTILE, end="text")
    leaf.add(Message("assistant", f"{HOSTILE}\n{HOSTILE}", (1,), (0.0,)))
    root.children = [leaf]

    shown = render(root, width=1000)
    assert not {c for c in shown if unicodedata.category(c)[0] == "C" and c != "\n"}
    shown.encode()  # and no lone surrogate keeps it from being printed
    assert "\\x1b[2J" in shown
    text = "é\tß\n日本\u3000👨\u200d👩 10\u00a0000"
    assert printable(text) == text
