"""The page: escaped whatever a model writes, and it works in a real browser."""
import contextlib
import html.parser
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from lab import report
from tasks import Task
from tree import Node, Rollout, Turn

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = ("</script><script>document.title='PWNED'</script>", "<img src=x onerror=\"document.title="
        "'PWNED'\">", "<!--<script>", "]]>'\"&amp;&lt;b&gt;", "\u2028\u2029\x00\x1b[31m\ud800",
        "<svg/onload=document.title='PWNED'>", "javascript:document.title='PWNED'", "{{7*7}}${7*7}")
HOSTILE = "\n".join(EVIL)


def row(method, length, score, **more):
    return {"task": "evidence", "method": method, "length": length, "n": 8, "failed": 0,
            "score": score, "low": max(0, score - 0.1), "high": min(1, score + 0.1),
            "unanswered": 0, "seen": None, "in": 10.0, "reused": 5.0, "out": 3.0, "calls": 2.0,
            "nodes": 2.0, "depth": 1.0, "root": 9.0, "errors": 0.0, "p50": 0.1, "p95": 0.2,
            "dollars": None, "ends": {}, **more}


def tree(text, children=0, deep=0):
    root = Node(answer={"a": [text]}, end="final")
    for turn in (Turn("system", text), Turn("user", text), Turn("assistant", text)):
        root.add(turn)
    for i in range(children):
        child = Node(path=(i,), answer=text, end="turns", errors=[0])
        child.add(Turn("user", f"child {i} {text}"))
        root.children.append(child)
    return Rollout(Task("t", "evidence", text, None, [text]), "t", root, 0.5, "")


def hostile_page():
    """Everything that can come from outside is hostile."""
    rollouts = [tree(HOSTILE, children=3), tree("plain")]
    packed = report.pack(rollouts, [f"evidence rlm1 {HOSTILE} #0", "evidence rlm1 #1"],
                         advantages=[1.25, -1.25])
    rows = [row("rlm1", 2000, 0.9, task=HOSTILE), row(HOSTILE, 2000, 0.2, task=HOSTILE),
            row("rlm1", 8000, 0.8, task=HOSTILE), row("rlm1-bare", 8000, 0.7, task=HOSTILE)]
    pair = {"task": HOSTILE, "length": 2000, "a": HOSTILE, "b": HOSTILE, "n": 3,
            "difference": 0.1, "low": -0.1, "high": 0.3}
    return report.page(HOSTILE, {HOSTILE: HOSTILE}, rows, [pair],
                       [{"phase": "grpo", "step": i, "reward": i / 9} for i in range(9)], packed,
                       [HOSTILE])


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
    page = hostile_page()
    raw = re.search(r'<script type="application/json" id=data>(.*?)</script>', page, re.S)[1]
    assert "<" not in raw and raw.isascii()
    data = json.loads(raw)
    assert data["trees"][0]["query"] == HOSTILE and HOSTILE in data["texts"]
    assert data["texts"].count(HOSTILE) == 1  # a text that repeats is stored once


def test_the_script_makes_no_markup_and_nothing_is_fetched():
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "fetch(", "XMLHttpRequest", "import("):
        assert word not in report.SCRIPT
    page = hostile_page().replace(HOSTILE, "")
    for word in ("<link", "url(", "@import", " src="):
        assert word not in report.STYLE + report.SCRIPT + report.TREES
    assert "default-src 'none'" in page


def test_a_page_holds_whole_trees_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(report, "MOST_NODES", 10)
    packed = report.pack([tree("x", 3)] * 5, list("abcde"))
    assert [len(t["nodes"]) for t in packed["trees"]] == [4, 4] and packed["left_out"] == 3
    assert len(report.pack([tree("x", 30)] * 2, list("ab"))["trees"]) == 1  # one at least


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
    packed = report.pack([rollout], ["x #0"], Letters(), gaps={root: [0.1, 0.2, 0.3]})
    turns = packed["trees"][0]["nodes"][0]["t"]
    assert [t["s"] for t in turns] == [0, 1, 0, 1]
    assert turns[1]["l"] == [-0.5, 0] and turns[1]["g"] == [0.1, 0.2] and turns[3]["g"] == [0.3]
    assert packed["pieces"][99] == "c"


def test_a_chart_needs_two_lengths_and_a_failed_row_is_left_out():
    assert report.length_chart("t", [row("rlm1", 2000, 0.5)]) == ""
    lost = row("rlm1", 9000, 0.0, n=0)
    lost.update(score=None, low=None, high=None)
    assert report.length_chart("t", [row("rlm1", 2000, 0.5), lost]) == ""
    assert "–" in report.score_table([lost])
    drawn = report.length_chart("t", [row("rlm1", 2000, 1.0), row("rlm1", 8000, 0.0)])
    points = re.search(r'polyline points="([\d., ]+)"', drawn)[1].split()
    assert [point.split(",")[1] for point in points] == ["14.0", "250.0"]  # 1 on top, 0 below


# --- in a browser ---------------------------------------------------------------------------------


class Browser:
    """A headless Chromium, spoken to in the DevTools protocol over a pipe."""

    def __init__(self, width=1200, height=900, dark=False):
        self.folder = tempfile.mkdtemp()
        to_read, write = os.pipe()
        read, to_write = os.pipe()
        give = "import os, sys; fds = [os.dup(os.dup(os.dup(int(n)))) for n in sys.argv[1:3]]; " \
               "os.dup2(fds[0], 3); os.dup2(fds[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
        flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
                 "--disable-background-networking --disable-component-update --disable-sync "
                 "--hide-scrollbars --remote-debugging-pipe").split()
        self.process = subprocess.Popen(  # it reads from descriptor 3 and writes to 4
            [sys.executable, "-c", give, str(to_read), str(to_write), CHROMIUM, *flags,
             f"--user-data-dir={self.folder}", "about:blank"], pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(to_read)
        os.close(to_write)
        self.write, self.read = write, os.fdopen(read, "rb")
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=target["targetId"],
                            flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height,
             deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

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
        """Errors in the console, exceptions, and requests for anything but the page itself."""
        self("Runtime.evaluate", expression="1")  # what came before it has been reported by now
        asked = [e["params"]["request"]["url"] for e in self.events
                 if e.get("method") == "Network.requestWillBeSent"]
        return [e for e in self.events if e.get("method") in (
            "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")] + asked[1:]

    def screenshot(self, path):
        import base64
        height = self.js("document.documentElement.scrollHeight")
        width = self.js("innerWidth")
        shot = self("Page.captureScreenshot", captureBeyondViewport=True, clip={
            "x": 0, "y": 0, "width": width, "height": min(height, 6000), "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.write)
        self.read.close()
        for _ in range(50):  # its helpers still write for a moment
            shutil.rmtree(self.folder, ignore_errors=True)
            if not os.path.exists(self.folder):
                return
            time.sleep(0.1)


@pytest.fixture
def browser():
    if not CHROMIUM:
        pytest.skip("no chromium here")
    started = []

    def start(**options):
        started.append(Browser(**options))
        return started[-1]
    yield start
    for one in started:
        one.close()


def test_in_a_browser_a_hostile_tree_opens_and_stays_text(browser, tmp_path):
    (tmp_path / "page.html").write_text(hostile_page(), encoding="utf-8")
    page = browser(width=390, height=844)
    page.open(tmp_path / "page.html")
    assert page.js("document.querySelectorAll('#list button').length") == 2
    page.js("document.querySelector('#list button').click()")
    page.js("for (const d of document.querySelectorAll('#tree details')) d.open = true")
    page.js("new Promise(done => setTimeout(done, 0))")
    shown = page.js("document.getElementById('tree').textContent")
    for text in EVIL[:4]:
        assert text in shown
    assert page.js("document.querySelectorAll('#tree details').length") == 4  # root and children
    assert "1.250" in shown and "inherited advantage" in shown
    assert page.js("document.querySelectorAll('#tree img, #tree script, #tree svg').length") == 0
    assert page.js("document.title").startswith("</script>")  # and not what it would set
    assert page.js("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    assert page.problems() == []


def test_in_a_browser_thousands_of_nodes_are_made_only_when_opened(browser, tmp_path):
    packed = report.pack([tree("wide", children=4000)] + [tree("x")] * 900,
                         [f"evidence rlm1 #{i}" for i in range(901)])
    assert len(packed["trees"]) == 901
    (tmp_path / "page.html").write_text(report.page("many", {}, [], trees=packed))
    page = browser()
    page.open(tmp_path / "page.html")
    assert page.js("document.querySelectorAll('*').length") < 1000
    page.js("document.querySelector('#list button').click()")
    assert page.js("document.querySelectorAll('#tree details').length") == 201
    page.js("document.querySelector('#tree details > div:last-child > button').click()")
    assert page.js("document.querySelectorAll('#tree details').length") == 401
    page.js("const o = document.getElementById('order'); o.selectedIndex = 3; o.onchange()")
    assert "4001 nodes" in page.js("document.querySelector('#list button').textContent")
    assert page.problems() == []
