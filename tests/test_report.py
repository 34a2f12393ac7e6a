"""The page: whatever a model wrote stays text, the trees are whole, and in a browser the
page draws them without an error. Not tested without a browser (Debian: chromium)."""
import json
import re
import shutil
import subprocess
from html import unescape
from types import SimpleNamespace

import pytest

from conftest import data_of
from tasks import Question
from training import report
from tree import Message, Node, Tree

EVIL = ("</script><script>document.title='PWNED'</script>",
        "<img src=x onerror=\"document.title='PWNED'\">", "<!--<script>",
        "]]>'\"&amp;&lt;b&gt;", "\u2028\u2029\x00\x1b[31m\ud800", "{{data}} {{body}}")
HOSTILE = "\n".join(EVIL)
LETTERS = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def tree(text, children=0, reward=0.5, group="t", failed=""):
    root = Node(answer={"a": [text]}, end="final")
    for role in ("system", "user", "assistant", "user", "assistant"):
        root.add(Message(role, text))
    for i in range(children):
        child = Node((i,), kind=text, answer=text, end=text, errors=[0], asked_in=i % 2)
        child.add(Message("user", f"child {i} {text}"))
        root.children.append(child)
    return Tree(Question("t", "evidence", text, None, [text]), group, root, reward, failed)


def test_hostile_text_adds_no_tag_and_is_in_the_data_as_it_was():
    first, second = tree(HOSTILE, children=3), tree("plain")
    trees = [(f"evidence rlm1 {HOSTILE} #0", first), ("evidence rlm1 #1", second)]
    packed = report.of_trees(trees, advantages={first.root: 1.25})
    page = report.page(HOSTILE, {HOSTILE: HOSTILE}, HOSTILE, {HOSTILE: packed})
    assert page.count("<script") == 2 == page.count("</script>")
    assert not any(text in page for text in EVIL if "<" in text)
    assert "default-src 'none'" in page and "innerHTML" not in page
    first, second = data_of(page)["trees"]
    root = first["nodes"][0]
    assert first["query"] == HOSTILE and second["query"] == "plain"
    assert root["messages"][2] == {"role": "assistant", "text": HOSTILE}
    assert [first["nodes"][i]["answer"] for i in root["children"]] == [HOSTILE] * 3
    assert [node["adv"] for node in first["nodes"]] == [1.25, None, None, None]


def test_sampled_tokens_carry_their_log_probability():
    root = Node(end="final")
    root.add(Message("user", "ab", (97, 98)))
    root.add(Message("assistant", "cd", (99, 100), (-0.5, -7.0)))
    root.add(Message("user", "e", (101,)))
    root.add(Message("assistant", "f", (102,), (-0.25,)))
    tree = Tree(Question("t", "evidence", "q", None), "t", root, 1.0)
    packed = report.of_trees([("x #0", tree)], LETTERS)
    data = data_of(report.page("", {}, "", {"": packed}))
    messages = data["trees"][0]["nodes"][0]["messages"]
    assert ["tokens" in message for message in messages] == [False, True, False, True]
    assert messages[1]["tokens"] == [["c", -0.5], ["d", -7.0]]
    assert messages[3]["tokens"] == [["f", -0.25]]


# --- in a browser -------------------------------------------------------------------------

# What is added to the page's script: it notes all that goes wrong, then presses and types.
NOTE = """'use strict';
const problems = [], seen = {problems};
for (const kind of ['error', 'unhandledrejection', 'securitypolicyviolation'])
  addEventListener(kind, e => problems.push(`${kind} ${e.message ?? e.reason}`));
"""
DRIVE = """
const names = () => [...document.querySelectorAll('button')].map(
  button => button.querySelector('div').textContent);
const drawn = () => new Promise(done => setTimeout(done, 100));  // details open later
start().then(async () => {
  await drawn();
  seen.first = names();
  seen.opened = document.querySelector('.opened').textContent;
  $('search').value = 'CHILD 1';
  $('search').oninput();
  seen.search = names();
  document.querySelector('button').click();
  await drawn();
  seen.above = [...document.querySelectorAll('details details')].map(
    child => child.previousElementSibling.className);
  $('search').value = '';
  const chart = document.querySelector('figure svg');
  const {left, width} = chart.getBoundingClientRect();
  const at = {bubbles: true, clientX: left + width * 0.75};  // at step 2 of 3
  chart.dispatchEvent(new MouseEvent('click', at));
  await drawn();
  document.querySelector('button').click();
  await drawn();
  seen.shaded = document.querySelectorAll('pre .rare').length;
  seen.step = $('step').value;
  seen.earlier = names();
  seen.figure = $('curves').querySelector('figure').textContent;
  seen.dashes = document.querySelectorAll('.shortened').length;
  seen.images = document.images.length;
  seen.title = document.title;
}).catch(error => problems.push(error.stack)).then(() =>
  document.documentElement.replaceChildren(el('pre', JSON.stringify(seen), 'seen')));
</script>"""


@pytest.mark.skipif(not BROWSER, reason="there is no browser")
def test_a_browser_draws_it_and_runs_nothing_that_a_model_wrote(
        tmp_path, monkeypatch):
    monkeypatch.setattr(report, "TEMPLATE", report.TEMPLATE.replace(
        "'use strict';", NOTE).replace("start();\n</script>", DRIVE))
    trees = [("right", tree("r", reward=1.0)), ("half", tree("h", children=2)),
             ("evil", tree(HOSTILE, children=1, reward=0.0, group="u")),
             ("gone", tree("g", reward=0.0, group="u", failed=f"OSError({HOSTILE})"))]
    tokens = Node(end="final")
    tokens.add(Message("assistant", "abc", (97, 98, 99), (0.0, -2.0, -3.0)))
    early = Tree(Question("t", "requests", "q", None), "t", tokens, 1.0)
    metrics = [{"phase": "grpo", "step": step, "reward": step / 4, "gap": 2e-7,
                "step_left": 0.25 if step == 2 else 1.0} for step in (1, 2, 3)]
    metrics.append({"phase": "eval", "name": "validation", "step": 2, "score": 0.75})
    page = report.page(HOSTILE, {}, HOSTILE, {
        2: report.of_trees([("early", early)], LETTERS, {tokens: -1.0}),
        3: report.of_trees(
            trees, LETTERS, {node: 0.5 for node in trees[1][1].root.walk()})},
        metrics)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--virtual-time-budget=5000", f"--user-data-dir={tmp_path}/profile",
         f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120)
    seen = re.search('<pre class="seen">(.*)</pre>', shown.stdout, re.DOTALL)
    assert seen, shown.stderr
    seen = json.loads(unescape(seen[1]))

    assert seen["problems"] == [] and seen["images"] == 0 and seen["title"] != "PWNED"
    # The question with the lowest mean is first, and in it what was lost.
    assert seen["first"] == ["gone", "evil", "half", "right"]
    assert EVIL[0] in seen["opened"] and EVIL[1] in seen["opened"]
    assert seen["search"] == ["half"]
    assert seen["above"] == ["assistant"] * 2  # each child is below the message that asked
    # A click at the second step of a curve shows its trees, its value and its mark.
    assert seen["step"] == "step 2" and seen["earlier"] == ["early"]
    assert "0.5, validation 0.75 at step 2" in " ".join(seen["figure"].split())
    assert seen["dashes"] == 2 and seen["shaded"] == 2
