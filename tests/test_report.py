"""The page: escaped whatever a model writes, and it works in a real browser."""
import contextlib
import fcntl
import html.parser
import json
import os
import re
import select
import shutil
import signal
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


class Browser:
    """A headless Chromium, spoken to in the DevTools protocol over a pipe: it reads from
    descriptor 3 and writes to 4."""

    def __init__(self, folder, width=1200, height=900):
        (give, self.write), (read, take) = os.pipe(), os.pipe()
        for_browser = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (give, take)]
        flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
                 "--disable-background-networking --disable-component-update "
                 f"--disable-sync --remote-debugging-pipe --user-data-dir={folder}")
        shell = 'exec 3<&{} 4>&{} "$@"'.format(*for_browser)
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *flags.split(), "about:blank"],
            pass_fds=for_browser, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        for fd in (give, take, *for_browser):
            os.close(fd)
        self.read = os.fdopen(read, "rb")
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        targets = self("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height,
             deviceScaleFactor=1, mobile=width < 600)

    def message(self):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], 120)
            part = os.read(self.read.fileno(), 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser is gone")
            self.rest += part
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def __call__(self, method, **params):
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        raw = json.dumps(asked).encode() + b"\0"
        while raw:
            raw = raw[os.write(self.write, raw):]
        while True:
            got = self.message()
            if got.get("id") == self.number:
                assert "error" not in got, got
                return got["result"]
            self.events.append(got)

    def open(self, path):
        self("Page.navigate", url=f"file://{path}")
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message())

    def js(self, code):
        done = self("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def problems(self):
        """Errors in the console, exceptions, and requests for anything but the page."""
        self("Runtime.evaluate", expression="1")  # what came before it is reported by now
        asked = [e["params"]["request"]["url"] for e in self.events
                 if e.get("method") == "Network.requestWillBeSent"]
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [e for e in self.events if e.get("method") in bad] + asked[1:]

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.write)
        self.read.close()


@pytest.fixture
def browser(tmp_path):
    if not CHROMIUM:
        pytest.skip("no chromium here")
    started = []

    def start(page, **options):
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        started.append(Browser(tmp_path / "profile", **options))
        started[-1].open(tmp_path / "page.html")
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_in_a_browser_a_hostile_tree_opens_and_stays_text(browser):
    page = browser(hostile_page(), width=390, height=844)
    assert page.js("document.querySelectorAll('#list button').length") == 2
    page.js("document.querySelector('#list button').click()")
    page.js("for (const d of document.querySelectorAll('#tree details')) d.open = true")
    page.js("new Promise(done => setTimeout(done, 0))")
    shown = page.js("document.getElementById('tree').textContent")
    for text in EVIL[:4]:
        assert text in shown
    assert page.js("document.querySelectorAll('#tree details').length") == 4  # all nodes
    assert "1.250" in shown and "inherited advantage" in shown
    markup = "#tree img, #tree script, #tree svg"
    assert page.js(f"document.querySelectorAll('{markup}').length") == 0
    assert page.js("document.title").startswith("</script>")  # and not what it would set
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    page.js("const f = document.getElementById('filter')")
    page.js("f.selectedIndex = 1; f.onchange()")
    assert page.js("document.querySelectorAll('#list button').length") == 1
    assert page.problems() == []


def test_in_a_browser_thousands_of_nodes_are_made_only_when_opened(browser):
    trees = [tree("wide", children=4000)] + [tree("x")] * 900
    page = browser(report.page("many", {}, [], trees=[("rlm1 #0", t) for t in trees]))
    assert page.js("document.querySelectorAll('*').length") < 1000
    page.js("document.querySelector('#list button').click()")
    assert page.js("document.querySelectorAll('#tree details').length") == 201
    page.js("document.querySelector('#tree details > div:last-child > button').click()")
    assert page.js("document.querySelectorAll('#tree details').length") == 401
    page.js("const o = document.getElementById('order'); o.selectedIndex = 3; o.onchange()")
    assert "4001 nodes" in page.js("document.querySelector('#list button').textContent")
    assert page.problems() == []
