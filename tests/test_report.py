"""The page: escaped whatever a model writes, and it works in a real browser."""
import html.parser
import json
import re
import shutil
import subprocess

import pytest

from lab import report
from tasks import Task
from tree import Node, Rollout, Turn

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = ("</script><script>document.title='PWNED'</script>",
        "<img src=x onerror=\"document.title='PWNED'\">", "<!--<script>",
        "]]>'\"&amp;&lt;b&gt;", "\u2028\u2029\x00\x1b[31m\ud800",
        "<svg/onload=document.title='PWNED'>", "javascript:document.title='PWNED'",
        "{{7*7}}${7*7}")
HOSTILE = "\n".join(EVIL)


def row(method, length, score, **more):
    return {"task": "evidence", "method": method, "length": length, "n": 8, "failed": 0,
            "score": score, "low": max(0, score - 0.1), "high": min(1, score + 0.1),
            "unanswered": 0, "seen": None, "in": 10.0, "reused": 5.0, "out": 3.0,
            "calls": 2.0, "depth": 1.0, "p50": 0.1, "p95": 0.2, "dollars": None, **more}


def tree(text, children=0):
    root = Node(answer={"a": [text]}, end="final")
    for role in ("system", "user", "assistant"):
        root.add(Turn(role, text))
    for i in range(children):
        child = Node(path=(i,), answer=text, end="turns", errors=[0])
        child.add(Turn("user", f"child {i} {text}"))
        root.children.append(child)
    return Rollout(Task("t", "evidence", text, None, [text]), "t", root, 0.5, "")


def hostile_page():
    """Everything that can come from outside is hostile."""
    first, second = tree(HOSTILE, children=3), tree("plain")
    rows = [row("rlm1", 2000, 0.9), row(HOSTILE, 2000, 0.2), row("rlm1", 8000, 0.8),
            row("rlm1-bare", 8000, 0.7)]
    pair = {"task": HOSTILE, "length": 2000, "a": HOSTILE, "b": HOSTILE, "n": 3,
            "difference": 0.1, "low": -0.1, "high": 0.3}
    return report.page(
        HOSTILE, {HOSTILE: HOSTILE}, [r | {"task": HOSTILE} for r in rows],
        trees=[(f"evidence rlm1 {HOSTILE} #0", first), ("evidence rlm1 #1", second)],
        metrics=[{"phase": "grpo", "step": i, "reward": i / 9} for i in range(9)],
        advantages={first.root: 1.25, second.root: -1.25}, differences=[pair],
        notes=[HOSTILE])


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.attributes = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.attributes |= {name for name, _ in attributes}


def test_hostile_text_adds_no_tag_no_attribute_and_ends_no_script():
    tags = Tags(hostile_page())
    assert tags.found.count("script") == 2 and "img" not in tags.found
    assert not any(name.startswith("on") for name in tags.attributes)


def test_the_data_of_the_page_are_what_was_packed():
    raw = re.search(r"id=data>(.*?)</script>", hostile_page(), re.S)[1]
    assert "<" not in raw and raw.isascii()
    data = json.loads(raw)
    assert data["trees"][0]["query"] == HOSTILE
    assert data["texts"].count(HOSTILE) == 1  # a text that repeats is stored once


def test_the_script_makes_no_markup_and_nothing_is_fetched():
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "fetch(", "XMLHttpRequest", "import("):
        assert word not in report.SCRIPT
    for word in ("<link", "url(", "@import", " src="):
        assert word not in report.STYLE + report.SCRIPT + report.TREES
    assert "default-src 'none'" in hostile_page()


def test_a_page_holds_whole_trees_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(report, "MOST_NODES", 10)
    packed = report.pack([("a", tree("x", 3))] * 5)
    assert [len(t["nodes"]) for t in packed["trees"]] == [4, 4]
    assert packed["left_out"] == 3
    assert len(report.pack([("a", tree("x", 30))] * 2)["trees"]) == 1  # one at least


def test_tokens_carry_mask_log_probability_and_gap():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    root = Node(end="final")
    root.add(Turn("user", "ab", (97, 98)))
    root.add(Turn("assistant", "cd", (99, 100), (-0.5, float("-inf"))))
    root.add(Turn("user", "e", (101,)))
    root.add(Turn("assistant", "f", (102,), (-0.25,)))
    rollout = Rollout(Task("t", "evidence", "q", None), "t", root, 1.0)
    packed = report.pack([("x #0", rollout)], Letters(), gaps={root: [0.1, 0.2, 0.3]})
    turns = packed["trees"][0]["nodes"][0]["t"]
    assert [t["s"] for t in turns] == [0, 1, 0, 1]
    assert turns[1]["l"] == [-0.5, 0] and turns[1]["g"] == [0.1, 0.2]
    assert turns[3]["g"] == [0.3] and packed["pieces"][99] == "c"


def test_a_chart_needs_two_lengths_and_a_failed_row_is_left_out():
    lost = row("rlm1", 9000, 0.0) | dict.fromkeys(("score", "low", "high")) | {"n": 0}
    assert report.length_chart("t", [row("rlm1", 2000, 0.5), lost]) == ""
    assert "<td>-</td>" in report.score_table([lost]) and " - " in report.table_line(lost)
    rows = [row("rlm1", 2000, 1.0), row("rlm1", 8000, 0.0)]
    points = re.search(r'points="([\d., ]+)"', report.length_chart("t", rows))[1].split()
    assert [point.split(",")[1] for point in points] == ["14.0", "250.0"]  # 1 is on top


# --- in a browser -------------------------------------------------------------------------


WATCH = """
const seen = {problems: []};
onerror = message => { seen.problems.push(message); };
document.addEventListener('securitypolicyviolation', event => {
  seen.problems.push(event.blockedURI);
});
const count = what => document.querySelectorAll(what).length;
const click = what => document.querySelector(what).click();
const settled = () => new Promise(done => setTimeout(done, 50));
"""
TELL = """
steps().catch(onerror).then(
  () => document.documentElement.replaceChildren(el('pre', JSON.stringify(seen))));
"""


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """Opens a page in a headless Chromium and runs `steps` as a part of the page's script,
    the only one that its policy allows. Returns what they put into `seen`."""
    if not CHROMIUM:
        pytest.skip("no chromium here")

    def run(make, steps, size="1200,900"):
        ours = f"{WATCH}async function steps() {{{steps}}}{TELL}"
        monkeypatch.setattr(report, "SCRIPT", report.SCRIPT + ours)
        path = tmp_path / "page.html"
        path.write_text(make(), encoding="utf-8")
        dom = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}",
             "--virtual-time-budget=10000", f"file://{path}"],
            capture_output=True, timeout=120).stdout.decode()
        found = re.search("<pre.*?>(.*?)</pre>", dom, re.S)[1]
        return json.loads(html.unescape(found))
    return run


def test_in_a_browser_a_hostile_tree_opens_and_stays_text(browser):
    seen = browser(hostile_page, """
        seen.listed = count('#list button');
        click('#list button');
        await settled();
        for (const d of document.querySelectorAll('#tree details')) d.open = true;
        await settled();
        for (const flip of document.querySelectorAll('.turn b button')) flip.click();
        seen.text = $('tree').textContent;
        seen.nodes = count('#tree details');
        seen.markup = count('#tree img, #tree script, #tree svg');
        seen.title = document.title;
        seen.fits = document.documentElement.scrollWidth <= innerWidth;
        $('filter').selectedIndex = 1;
        $('filter').onchange();
        seen.filtered = count('#list button');""", size="390,844")
    assert all(text in seen["text"] for text in EVIL[:4])
    assert "1.250" in seen["text"] and "inherited advantage" in seen["text"]
    assert seen["title"].startswith("</script>")  # and not what it would set
    assert (seen["listed"], seen["filtered"], seen["nodes"]) == (2, 1, 4)
    assert (seen["markup"], seen["fits"], seen["problems"]) == (0, True, [])


def test_in_a_browser_thousands_of_nodes_are_made_only_when_opened(browser):
    trees = [("rlm1 #0", t) for t in [tree("wide", children=4000)] + [tree("x")] * 900]
    seen = browser(lambda: report.page("many", {}, [], trees=trees), """
        seen.elements = count('*');
        click('#list button');
        await settled();
        seen.nodes = [count('#tree details')];
        click('#tree details > div:last-child > button');
        seen.nodes.push(count('#tree details'));
        $('order').selectedIndex = 3;
        $('order').onchange();
        seen.first = $('list').textContent;""")
    assert seen["elements"] < 1000 and seen["nodes"] == [201, 401]
    assert "4001 nodes" in seen["first"][:60] and seen["problems"] == []
