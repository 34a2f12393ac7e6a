"""The page: whatever a model wrote stays text, and the trees are whole."""
import json
from types import SimpleNamespace

from conftest import data_of
from tasks import Task
from training import report
from tree import Node, Rollout, Turn

EVIL = ("</script><script>document.title='PWNED'</script>",
        "<img src=x onerror=\"document.title='PWNED'\">", "<!--<script>",
        "]]>'\"&amp;&lt;b&gt;", "\u2028\u2029\x00\x1b[31m\ud800", "{{data}} {{body}}")
HOSTILE = "\n".join(EVIL)


def tree(text, children=0):
    root = Node(answer={"a": [text]}, end="final")
    for role in ("system", "user", "assistant"):
        root.add(Turn(role, text))
    for i in range(children):
        child = Node(path=(i,), kind=text, answer=text, end=text, errors=[0])
        child.add(Turn("user", f"child {i} {text}"))
        root.children.append(child)
    return Rollout(Task("t", "evidence", text, None, [text]), "t", root, 0.5, "")


def test_hostile_text_adds_no_tag_and_is_in_the_data_as_it_was():
    first, second = tree(HOSTILE, children=3), tree("plain")
    page = report.page(
        HOSTILE, {HOSTILE: HOSTILE}, [],
        trees=[(f"evidence rlm1 {HOSTILE} #0", first), ("evidence rlm1 #1", second)],
        advantages={node: 1.25 for node in first.root.walk()})
    assert page.count("<script") == 2 == page.count("</script>")
    assert not any(text in page for text in EVIL if "<" in text)
    assert "default-src 'none'" in page and "innerHTML" not in page
    first, second = data_of(page)["trees"]
    root = first["nodes"][0]
    assert first["query"] == HOSTILE and second["query"] == "plain"
    assert root["turns"][2] == {"role": "assistant", "text": HOSTILE}
    assert [first["nodes"][i]["answer"] for i in root["children"]] == [HOSTILE] * 3
    assert {node["adv"] for node in first["nodes"]} == {1.25}
    assert second["nodes"][0]["adv"] is None


def test_sampled_tokens_carry_their_log_probability():
    letters = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    root = Node(end="final")
    root.add(Turn("user", "ab", (97, 98)))
    root.add(Turn("assistant", "cd", (99, 100), (-0.5, float("-inf"))))
    root.add(Turn("user", "e", (101,)))
    root.add(Turn("assistant", "f", (102,), (-0.25,)))
    rollout = Rollout(Task("t", "evidence", "q", None), "t", root, float("nan"))
    page = report.page("", {}, [], [("x #0", rollout)], letters,
                       advantages={root: float("nan")})
    data = data_of(page)
    assert "NaN" not in json.dumps(data)  # which JSON.parse would refuse
    turns = data["trees"][0]["nodes"][0]["turns"]
    assert ["tokens" in turn for turn in turns] == [False, True, False, True]
    assert turns[1]["tokens"] == [["c", -0.5], ["d", None]]
    assert turns[3]["tokens"] == [["f", -0.25]]
