"""The page: escaped whatever a model writes, and it works in a real browser."""
import html.parser
import json
import math
import random
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from conftest import data_of
from lab import chart, report
from tasks import Task
from tree import Node, Rollout, Turn

TEMPLATE = report.TEMPLATE
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


def tree(text, children=0, reward=0.5, group="t", end="final"):
    root = Node(answer={"a": [text]}, end=end)
    for role in ("system", "user", "assistant"):
        root.add(Turn(role, text))
    for i in range(children):
        child = Node(path=(i,), kind=text, answer=text, end=text, errors=[0])
        child.add(Turn("user", f"child {i} {text}"))
        root.children.append(child)
    return Rollout(Task("t", "evidence", text, None, [text]), group, root, reward, "")


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
        advantages={node: 1.25 for node in first.root.walk()} | {second.root: -1.25},
        differences=[pair], notes=[HOSTILE], defaults={"other": HOSTILE})


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
    data = data_of(hostile_page())
    assert data["trees"][0]["query"] == HOSTILE
    assert data["texts"].count(HOSTILE) == 1  # a text that repeats is stored once


def test_what_fills_the_template_is_not_filled_again():
    assert data_of(report.page("{{data}}", {"{{body}}": "{{title}}"}, []))["trees"] == []


def test_the_script_makes_no_markup_and_nothing_is_fetched():
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "fetch(", "XMLHttpRequest", "import(", "srcdoc", "ContextualFragment",
                 "<link", "url(", "@import", " src="):
        assert word not in report.TEMPLATE
    assert report.TEMPLATE.count("parseFromString(tree.svg") == 1  # escaped by Python
    assert report.TEMPLATE.count("parseFromString") == 1
    assert "default-src 'none'" in hostile_page()


def test_a_page_holds_whole_trees_up_to_its_limit(monkeypatch):
    trees = [("a", tree("x", 3))] * 5
    monkeypatch.setattr(report, "MOST_BYTES", 0)
    data = data_of(report.page("", {}, [], trees))
    assert len(data["trees"]) == 1 and data["left_out"] == 4  # one at least
    monkeypatch.setattr(report, "MOST_BYTES", 10_000)
    data = data_of(report.page("", {}, [], trees))
    assert len(data["trees"]) == 5 and data["left_out"] == 0


def test_neither_a_huge_question_nor_a_last_tree_breaks_the_limit(monkeypatch):
    noise = random.Random(0).randbytes(500_000).hex()
    huge = Rollout({"query": noise}, "g", Node(end="failed"), 0.0, noise)
    assert len(report.page("", {}, [], [("a", huge)])) < 200_000
    monkeypatch.setattr(report, "MOST_BYTES", 5_000)
    data = data_of(report.page("", {}, [], [("a", tree("x")), ("b", huge)]))
    assert len(data["trees"]) == 1 and data["left_out"] == 1


def test_a_page_says_how_far_its_run_is_and_in_which_units_it_counts():
    page = report.page("Run", {}, [row("rlm1", 2000, 0.5)], state="step 3 of 9 <now>")
    assert "<h1>Run</h1><p>step 3 of 9 &lt;now&gt;</p>" in page
    assert "characters / 4" in page and "Wilson" in page
    for title in ("in tok", "reused tok", "out tok", "p50 s", "p95 s"):
        assert f"<th>{title}</th>" in page and f" {title}" in report.HEAD
    assert len(report.table_line(row("rlm1", 2000, 0.5))) == len(report.HEAD)


def test_many_long_prompts_take_little_space():
    """48 trees of five conversations, with the ids of 1,500 tokens of prompt in each."""
    class Words:
        def decode(self, ids):
            return "word"

    prompt = tuple(range(1500))
    trees = []
    for i in range(48):
        nodes = [Node(path, end="final") for path in ((), (0,), (1,), (2,), (3,))]
        nodes[0].children = nodes[1:]
        for node in nodes:
            node.add(Turn("system", "You are a recursive language model. " * 150))
            node.add(Turn("user", f"question {i}", prompt))
            node.add(Turn("assistant", f"answer {i}", (i, i + 1), (-0.25, -0.125)))
        trees.append((f"#{i}", Rollout({"query": "q"}, str(i), nodes[0], 0.5)))
    assert len(report.page("", {}, [], trees, Words())) < 150_000


class Letters:
    """A tokenizer."""
    def decode(self, ids):
        return "".join(map(chr, ids))


def test_tokens_carry_mask_log_probability_and_gap():
    root = Node(end="final")
    root.add(Turn("user", "ab", (97, 98)))
    root.add(Turn("assistant", "cd", (99, 100), (-0.5, float("-inf"))))
    root.add(Turn("user", "e", (101,)))
    root.add(Turn("assistant", "f", (102,), (-0.25,)))
    rollout = Rollout(Task("t", "evidence", "q", None), "t", root, 1.0)
    root.score = nan = float("nan")
    page = report.page("", {}, [], [("x #0", rollout)], Letters(), advantages={root: nan},
                       gaps={root: [0.1, 0.2, nan]})
    data = data_of(page)
    assert "NaN" not in json.dumps(data)  # which JSON.parse would refuse
    turns = data["trees"][0]["nodes"][0]["t"]
    assert [t["s"] for t in turns] == [0, 1, 0, 1]
    assert turns[1]["l"] == [-0.5, 0] and turns[1]["g"] == [0.1, 0.2]
    assert turns[3]["g"] == [0] and data["pieces"]["99"] == "c"


def test_the_page_opens_on_the_worst_interesting_tree():
    def first(*trees):
        return data_of(report.page("", {}, [], trees))["first"]

    def step(reward, group, **more):
        return "step 3 #0", tree("x", reward=reward, group=group, **more)

    # The group with the most spread, and in it the lowest; of equal ones the largest.
    flat = [step(0.0, "a"), step(0.0, "a")]
    assert first(*flat, step(0.2, "b"), step(1.0, "b"), step(0.5, "c"), step(0.9, "c")) == 2
    assert first(*flat, step(0.2, "b"), step(1.0, "b"), step(0.2, "b", children=2)) == 4
    # An evaluation: the lowest that said an answer or called somebody.
    asked = step(0.0, "b", end="turns", children=1)
    assert first(step(0.0, "a", end="turns"), step(0.5, "b"), step(0.25, "c")) == 2
    assert first(step(0.5, "a"), asked, step(0.25, "c")) == 1
    assert first(step(0.0, "a", end="turns")) == 0
    failed = Rollout({"query": ""}, "a", Node(end="failed"), 0.0, "lost")
    assert first(("x #0", failed), step(0.5, "a")) == 1
    assert first(("x #0", failed)) == 0


@pytest.mark.parametrize("answer, gold, hits, found", [
    ("plants", "plants", ["plants"], ["plants"]),
    ("It is  PLANTS.", "plants", ["PLANTS"], ["plants"]),
    ("implants", "plants", [], []),
    ({"a": "x", "b": "y"}, {"b": "y", "a": "y"}, ["y"], ["y"]),
    (["one two three", "none"], {"p": ["One two  three", "four"]},
     ["one two three"], ["One two  three"]),
    ("four, one two three", ["one two three", "four"],
     ["four", "one two three"], ["one two three", "four"]),
    ([[["om", "ad"]], "ug"], ["ad", "ug"], ["ad", "ug"], ["ad", "ug"]),
    ([[1, 2], [3, 4]], [[2, 3], [3, 4]], ["[3, 4]"], ["[3, 4]"]),
    ({"a": {"b": 7}}, {"a": {"b": 7}}, ["7"], ["7"]),
    ("", "", [], []), (None, None, [], []), (None, ["a"], [], []), (5, "5", ["5"], ["5"]),
    ("a" * 30_000, "a", [], []), (["a"] * 300,) * 4,
    ("abc " * 2400, ["abc"] * 2000, ["abc"] * 2400, ["abc"] * 2000),
])
def test_what_answer_and_gold_share_is_marked(answer, gold, hits, found):
    sides = report.marked(answer, gold)
    assert [[text for text, hit in side if hit] for side in sides] == [hits, found]
    for side, value in zip(sides, (answer, gold)):  # and nothing is lost
        shown = "".join(text for text, _ in side)
        assert all(leaf[:20_000] in shown for _, leaf in report.leaves(value))


def test_only_what_differs_from_its_default_is_in_the_open():
    shown, _, folded = report.setting_list(
        {"lr": 0.5, "seed": 0, "out": "", "config": {"depth": 1}}, {"seed": 0, "lr": 0.1}
    ).partition("<details")
    assert "lr 0.5" in shown and "seed" not in shown and "depth" not in shown
    assert "seed 0" in folded and "depth" in folded and "all 3 settings" in folded


# --- charts -------------------------------------------------------------------------------

def test_a_chart_needs_two_lengths_and_a_failed_row_is_left_out():
    lost = row("rlm1", 9000, 0.0) | dict.fromkeys(("score", "low", "high")) | {"n": 0}
    assert report.length_chart("t", [row("rlm1", 2000, 0.5), lost]) == ""
    assert ">-</td>" in report.score_table([lost]) and " - " in report.table_line(lost)
    rows = [row("rlm1", 2000, 1.0), row("rlm1", 8000, 0.0)]
    points = re.search(r'points="([\d., ]+)"', report.length_chart("t", rows))[1].split()
    assert [point.split(",")[1] for point in points] == ["28.0", "264.0"]  # 1 is on top


def test_methods_that_are_0_everywhere_are_said_and_equal_points_are_told_apart():
    rows = [row(method, length, score) for length in (2000, 8000)
            for method, score in (("rlm1", 0.5), ("rlm2", 0.5), ("direct", 0), ("rlm0", 0))]
    drawn = report.length_chart("t", rows)
    assert drawn.count("<polyline") == 2 and drawn.count(": 0 everywhere") == 2
    one, two = re.findall(r'points="([\d., ]+)"', drawn)
    assert one.split()[0].split(",")[1] != two.split()[0].split(",")[1]


def test_ticks_are_round_numbers_around_the_values():
    assert report.ticks(0, 0.997) == [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1]
    assert report.ticks(0, 0.498) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert report.ticks(1, 46, 6) == [0, 10, 20, 30, 40, 50]
    assert report.ticks(-3, 4) == [-4, -2, 0, 2, 4]
    assert report.ticks(0, 0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    for high in (3e-7, 1.01, 7.3, 99, 12_345):
        found = report.ticks(0, high)
        assert found[0] == 0 and found[-1] >= high and 3 <= len(found) <= 6


def test_the_reward_has_its_held_out_points_and_axes_have_names():
    metrics = [{"phase": "grpo", "step": i, "reward": i / 9, "gap": 1e-7 * i}
               for i in range(1, 9)]
    metrics += [{"phase": "eval", "name": name, "step": step, "score": 0.25, "low": 0.2,
                 "high": 0.3, "n": 8}
                for name, step in (("heldout_warmup", 0), ("heldout_now", 4),
                                   ("heldout_final", 8), ("heldout_4x", 8))]
    metrics.append({"phase": "warmup", "step": 1, "loss": 3.0})
    drawn = report.curve("reward", metrics)
    assert drawn.count("<circle") == 4 and "held out, step 4: 0.250 [0.200, 0.300]" in drawn
    assert "held out, 4x as long" in drawn
    assert ">step of GRPO<" in drawn and ">mean reward<" in drawn
    assert "<circle" not in report.curve("gap", metrics)
    assert report.curve("entropy", metrics) == ""


# --- the drawing of a tree ----------------------------------------------------------------

def boxes(drawn):
    """The boxes of a drawing, which is XML: {href: (title, label, x, width, fill)}."""
    space = "{http://www.w3.org/2000/svg}"
    found = {}
    for link in ElementTree.fromstring(drawn).iter(f"{space}a"):
        title, rect, text = link
        found[link.get("href")] = (title.text, text.text, float(rect.get("x")),
                                   float(rect.get("width")), rect.get("fill"))
    return found


def test_a_drawing_has_depth_tokens_and_advantage_of_every_node():
    root = Node(end="final", answer={"a": 1})
    root.add(Turn("assistant", "", (1,) * 40, (-0.1,) * 40))
    for i, advantage in enumerate((-1.0, 1.0)):
        root.children.append(Node((i,), end=("final", "turns")[i], answer="plants"))
        root.children[i].add(Turn("assistant", "", (1,) * 10, (-0.1,) * 10))
    first, second = root.children
    drawn = boxes(chart.tree(root, {first: -1.0, second: 1.0}, 1.0))
    assert list(drawn) == ["#n0", "#n1", "#n2"]  # in the order of the Tab key
    (_, name, x, width, fill), one, two = drawn.values()
    assert name == 'root {"a": 1}' and fill == chart.GREY and width > 3 * one[3]
    assert one[1:3] == ("0 plants", x + chart.COLUMN) and two[1] == "1 ✗ turns plants"
    assert one[4] == chart.COLOURS[1] and two[4] == chart.COLOURS[0]
    assert "10 sampled tokens" in one[0] and "advantage -1.00" in one[0]


def test_a_hostile_tree_is_drawn_as_text():
    for text, nodes in ((HOSTILE, 4), ("\ufffe\uffff", 1)):
        drawn = chart.tree(tree(text, nodes - 1).root)
        assert len(boxes(drawn)) == nodes
        assert "<img" not in drawn and "<script" not in drawn


def test_a_wide_tree_stays_readable():
    drawn = chart.tree(tree("x", 40).root)
    height = float(ElementTree.fromstring(drawn).get("viewBox").split()[3])
    assert len(boxes(drawn)) == 41 and height / 40 >= 20
    assert "more</text>" not in drawn
    drawn = chart.tree(tree("x", 4000).root)
    assert len(boxes(drawn)) == chart.MOST_CHILDREN + 1 and "… 3,952 more" in drawn


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
steps().catch(onerror).then(() => parent.postMessage(JSON.stringify(seen), '*'));
"""
# A window of Chromium is at least 500 wide; a frame is as wide as it is told to be.
FRAME = """<!doctype html><iframe src="page.html" width=%s height=%s></iframe><pre></pre>
<script>
onmessage = event => { document.querySelector('pre').textContent = event.data; };
</script>"""


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """Opens a page in a headless Chromium and runs `steps` as a part of the page's script,
    the only one that its policy allows. Returns what they put into `seen`."""
    if not CHROMIUM:
        pytest.skip("no chromium here")

    def run(make, steps, width=1200, height=900):
        ours = f"{WATCH}async function steps() {{await started;{steps}}}{TELL}"
        end = "</script></html>"
        monkeypatch.setattr(report, "TEMPLATE", TEMPLATE.replace(end, ours + end))
        path = tmp_path / "page.html"
        path.write_text(make(), encoding="utf-8")
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME % (width, height))
        dom = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}",
             f"--window-size={width + 50},{height + 50}",
             "--virtual-time-budget=10000", f"file://{frame}"],
            capture_output=True, timeout=120).stdout.decode()
        found = re.search("<pre.*?>(.*?)</pre>", dom, re.S)[1]
        return json.loads(html.unescape(found))
    return run


def test_in_a_browser_a_hostile_tree_is_open_and_stays_text(browser):
    seen = browser(hostile_page, """
        seen.shown = $('tree').textContent.includes('root');
        seen.listed = count('#list button');
        seen.drawn = count('#tree svg a');
        for (const d of document.querySelectorAll('#tree details')) d.open = true;
        await settled();
        for (const flip of document.querySelectorAll('.turn b button')) flip.click();
        seen.text = $('tree').textContent;
        seen.nodes = count('#tree details');
        seen.markup = count('#tree img, #tree script') +
          count('#tree svg *:not(a, rect, path, text, title)');
        seen.title = document.title;
        seen.fits = document.documentElement.scrollWidth <= innerWidth;
        $('kind').selectedIndex = 1;
        $('filters').oninput();
        seen.filtered = count('#list button');""", width=390, height=844)
    assert all(text in seen["text"] for text in EVIL[:4])
    assert "1.250" in seen["text"] and "inherited advantage" in seen["text"]
    assert seen["title"].startswith("</script>")  # and not what it would set
    assert (seen["listed"], seen["filtered"], seen["nodes"], seen["drawn"]) == (2, 1, 4, 4)
    assert seen["shown"] and seen["fits"]
    assert (seen["markup"], seen["problems"]) == (0, [])


def test_in_a_browser_thousands_of_nodes_are_made_only_when_opened(browser):
    trees = [("rlm1 #0", t) for t in [tree("wide", children=4000)] + [tree("x")] * 900]
    seen = browser(lambda: report.page("many", {}, [], trees=trees), """
        seen.elements = count('*');
        seen.nodes = [count('#tree details')];
        click('#tree details > div:last-child > button');
        seen.nodes.push(count('#tree details'));
        $('order').selectedIndex = 3;
        $('filters').oninput();
        seen.first = $('list').textContent;""")
    assert seen["elements"] < 2000 and seen["nodes"] == [201, 401]
    assert "nodes 4001" in seen["first"][:60] and seen["problems"] == []


def test_in_a_browser_a_box_leads_to_its_turns_by_mouse_and_by_key(browser):
    root = tree("root").root
    root.children = [Node((0,), end="final"), Node((1,), end="final")]
    root.children[1].children = [Node((1, 0), end="final")]
    root.children[1].children[0].add(Turn("user", "the deepest question"))
    found = Rollout({"query": "q"}, "g", root, 0.5)
    seen = browser(lambda: report.page("", {}, [], trees=[("x #0", found)]), """
        const text = () => $('tree').textContent.includes('the deepest question');
        seen.before = text();
        const box = document.querySelector('#tree a[href="#n3"]');
        box.focus();
        seen.focused = document.activeElement === box;  // Enter clicks what has the focus
        box.dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true}));
        seen.after = text() && $('n3').open && $('n2').open;
        seen.at = document.activeElement === $('n3').firstChild;""")
    assert seen == {"problems": [], "before": False, "focused": True, "after": True,
                    "at": True}


def test_in_a_browser_a_question_without_gold_has_no_score_and_no_list(browser):
    asked = Rollout({"query": "q"}, "", tree("x").root, math.nan)
    seen = browser(lambda: report.page("", {}, [], trees=[("the tree", asked)]), """
        seen.text = $('trees').innerText;
        seen.listed = count('#list button');
        seen.width = $('tree').offsetWidth / $('trees').offsetWidth;""")
    assert "the tree · final" in seen["text"] and seen["problems"] == []
    for word in ("reward", "gold", "null", "sorted by", "1 of 1"):
        assert word not in seen["text"]
    assert (seen["listed"], seen["width"]) == (0, 1)


def test_in_a_browser_filters_say_how_many_trees_are_left(browser):
    trees = [("step 1 #0", tree("a", 2, reward=0.0, end="turns")),
             ("step 1 #1", tree("b", reward=0.5)), ("step 1 #2", tree("c", 2, reward=1.0)),
             ("held out #0", Rollout({"query": "d"}, "d", Node(end="failed"), 0.0, "lost"))]
    seen = browser(lambda: report.page("", {}, [], trees=trees), """
        const set = (name, value) => {
          for (const field of document.querySelectorAll('#filters select'))
            field.selectedIndex = 0;
          $('from').value = $('to').value = '';
          if (name) $(name).value = value;
          $('filters').oninput();
          seen[name + value] = $('count').textContent;
        };
        set('', ''); set('from', 0.5); set('to', 0.4); set('depth', 1); set('end', 'turns');
        set('errors', 'without'); set('errors', 'lost by the machine');
        set('kind', 'held out');
        $('kind').value = 'step 1';
        $('to').value = 0.9;
        $('filters').oninput();
        seen.both = $('count').textContent;""")
    assert seen.pop("problems") == []
    assert {name: int(says.split(" of 4 ")[0]) for name, says in seen.items()} == {
        "": 4, "from0.5": 2, "to0.4": 2, "depth1": 2, "endturns": 1, "errorswithout": 2,
        "errorslost by the machine": 1, "kindheld out": 1, "both": 2}


@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser_nothing_is_cut(browser, width):
    wide = tree("A long answer without any end " * 20, children=40)
    rows = [row("rlm1-bare", length, 0.9, task="heldout_warmup", dollars=0.1234,
                reused=123_456.0, **{"in": 1_234_567.0}) for length in (2000, 32_000)]
    settings = {"out": "x" * 500}
    seen = browser(lambda: report.page("", settings, rows, [("step 1 #0", wide)]), """
        seen.width = innerWidth;
        seen.cut = [...document.querySelectorAll('main *')]
          .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
          .map(e => e.outerHTML.slice(0, 60));""", width=width)
    assert seen == {"problems": [], "width": width, "cut": []}
