"""The API policy against servers that fail in every way they can."""
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import data_of
from eval import rlm_config
from lab import api
from lab.api import API, Account, APIError, Stop, Unavailable, Unreachable
from rlm import RLMConfig, rollout
from tasks import Task
from test_eval import command as evaluate  # noqa: F401 (a fixture)
from tree import Node, Refused, Turn

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ["429", "500", "cut", "malformed", "long"] * 2 + ["stall"] + ["ok"] * 5


class Stub:
    """A stub server in a process of its own; see lab/stub_server.py."""

    def __init__(self, folder, **settings):
        self.file = folder / "stub.json"
        self.file.write_text(json.dumps(settings))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.stub_server", self.file], cwd=ROOT, text=True,
            stdout=subprocess.PIPE)
        self.url = self.process.stdout.readline().split()[0]

    def log(self):
        path = Path(f"{self.file}.log")
        rows = path.read_text().splitlines() if path.exists() else []
        return [json.loads(row) for row in rows]

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Starts stub servers, each with a folder of its own, and ends them."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(api, "BACKOFF", 0.01)
    started = []

    def start(**settings):
        folder = tmp_path / f"stub{len(started)}"
        folder.mkdir()
        started.append(Stub(folder, **settings))
        return started[-1]
    yield start
    for server in started:
        server.stop()


def served(log):
    return [row for row in log if row["fault"] in ("ok", "long")]


# --- a whole run --------------------------------------------------------------------------


def test_faults_change_neither_the_answers_nor_what_is_paid(stub, evaluate, tmp_path):
    """Every fault: the same scores as from a faultless server, every call served once, and
    the table's tokens and dollars are the server's."""
    results = {}
    for name, plan in (("calm", ["ok"]), ("faulty", FAULTS)):
        server, out = stub(plan=plan, stall=60), tmp_path / f"{name}.json"
        message, _ = evaluate("--api", server.url, "--api-model", "m", "--methods",
                              "rlm1,direct", "--n", 12, "--json", out, "--timeout", 8,
                              "--price", "1,10,0.5")
        assert message is None
        data, log = json.loads(out.read_text()), served(server.log())
        questions = data["questions"]
        assert len(questions) == 24 and not any(q["failed"] for q in questions)
        assert sum(q["calls"] for q in questions) == len(log)  # none was paid for twice
        for field in ("in", "out"):
            assert sum(q[field] for q in questions) == sum(row[field] for row in log)
        dollars = sum((row["in"] - 1) * 1 + 0.5 + row["out"] * 10 for row in log) / 1e6
        assert sum(q["dollars"] for q in questions) == pytest.approx(dollars)
        assert {row["fault"] for row in server.log()} == set(plan)
        results[name] = {(q["method"], q["i"]): q for q in questions}
        rows = {row["method"]: row for row in data["rows"]}
        assert rows["rlm1"]["n"] == 12 and rows["rlm1"]["failed"] == 0
    for name, q in results["calm"].items():  # a reply that ran on keeps its beginning:
        other = results["faulty"][name]  # a block still runs, a plain answer has lost by it
        assert other["score"] == q["score"] or name[0] == "direct" and other["out"] > 1024


def test_a_token_budget_ends_the_run_cleanly_and_resume_pays_for_nothing_twice(
        stub, evaluate, tmp_path):
    server, out = stub(), tmp_path / "r.json"
    flags = ["--api", server.url, "--api-model", "m", "--n", 10, "--concurrency", 2,
             "--json", out]
    message, text = evaluate(*flags, "--budget-tokens", 8_000)
    used = sum(row["in"] + row["out"] for row in served(server.log()))
    assert "budget of 8,000 tokens is used up" in message and "--resume" in message
    assert 0 < used <= 8_000
    part = json.loads(out.read_text())
    assert 0 < len(part["questions"]) < 10 and "not finished" in text
    message, _ = evaluate(*flags, "--budget-tokens", 8_000, "--resume")
    assert "used up" in message  # what was spent before counts
    message, _ = evaluate(*flags, "--resume")
    complete, log = json.loads(out.read_text()), served(server.log())
    assert message is None and len(complete["questions"]) == 10
    assert sum(q["calls"] for q in complete["questions"]) == len(log)
    kept = [q for q in complete["questions"] if q in part["questions"]]
    assert kept == part["questions"]


def test_a_run_that_ends_keeps_the_replies_on_their_way(
        stub, evaluate, tmp_path, monkeypatch):
    """Ctrl-C while eight slow requests are open: what the server served and what the
    journal holds are the same."""
    server, out, post, sent = stub(delay=0.5), tmp_path / "r.json", API.post, []

    def interrupt(self, body):
        sent.append(1)
        if len(sent) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return post(self, body)

    monkeypatch.setattr(API, "post", interrupt)
    # SIGINT is ignored by what a shell runs with &.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    message, _ = evaluate("--api", server.url, "--api-model", "m", "--n", 10, "--json", out)
    signal.signal(signal.SIGINT, before)
    assert "interrupted" in message
    rows = [json.loads(row) for row in Path(f"{out}.journal").read_text().splitlines()]
    paid = sum("paid" in row for row in rows)
    assert paid == len(served(server.log())) == len(sent) >= 12


def test_a_server_that_goes_away_leaves_the_finished_part(stub, evaluate, tmp_path):
    server, out = stub(), tmp_path / "r.json"
    flags = ["--api", server.url, "--api-model", "m", "--json", out]
    assert evaluate(*flags, "--n", 3)[0] is None
    finished = json.loads(out.read_text())["questions"]
    server.stop()
    message, _ = evaluate(*flags, "--n", 9, "--resume")
    assert server.url in message and "6 attempts" in message
    assert "3 of 9 questions" in message
    assert json.loads(out.read_text())["questions"] == finished


@pytest.mark.parametrize("key, says", [("wrong-key-1234", "refuses the key"),
                                       ("", "OPENAI_API_KEY is not set")])
def test_a_wrong_key_ends_the_run_and_is_written_nowhere(
        key, says, stub, evaluate, tmp_path, monkeypatch):
    server = stub()
    monkeypatch.setenv("OPENAI_API_KEY", key)
    message, text = evaluate("--api", server.url, "--api-model", "m", "--n", 40,
                             "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert says in message and "status 401" in message
    assert len(server.log()) <= 8  # nobody goes on asking
    written = message + text + "".join(p.read_text() for p in tmp_path.glob("r.*"))
    assert not key or key not in written


def test_a_model_that_never_writes_a_block_scores_zero(stub, evaluate, tmp_path):
    server = stub(says="I would rather not.")
    message, text = evaluate("--api", server.url, "--api-model", "m", "--n", 2,
                             "--json", tmp_path / "r.json")
    assert message is None and "2 of 2 gave no answer (turns 2)" in text
    row, = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["score"], row["failed"], row["calls"]) == (0, 0, 6)


def test_what_the_server_refuses_is_a_failure_and_no_score(stub, evaluate, tmp_path):
    server = stub(always="400")
    message, text = evaluate("--api", server.url, "--api-model", "m", "--n", 3,
                             "--json", tmp_path / "r.json")
    assert "no question could be scored" in message and "3 failed" in text
    row, = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["n"], row["failed"], row["score"]) == (0, 3, None)
    assert len(server.log()) == 3  # asked once each


@pytest.mark.parametrize("method, value", [
    ("rlm0", ["Error: the tree's budget of 1 nodes is used up"] * 3), ("rlm1", None)])
def test_a_request_that_the_server_refuses_is_an_error_in_its_slot(stub, method, value):
    """A thinking model's root asks three leaves; the server refuses the second. A text of
    100,000 letters of three bytes each is not even sent."""
    code = ("a = llm_query_batched(['good', 'BAD', 'good'])\n"
            "FINAL([a, llm_query('\u8a9e' * 100_000)])")
    server = stub(says=f"<think>\nFINAL(0)?\n</think>\n```repl\n{code}\n```", refuse="BAD")
    policy = API(server.url, "m", Account())
    task = Task("t", "question", "What is it?", "the context")
    config = rlm_config(method, RLMConfig())
    root = asyncio.run(rollout(task, policy, None, config))
    answers, long = root.answer
    if value:
        assert answers == value and len(server.log()) == 1
        return
    assert answers[0] == answers[2] and answers[0].startswith("```repl")  # no thought
    assert answers[1] == ("Error: the call ended without an answer (the model's server "
                          "refuses the request)")
    assert "prompt and context have 75" in long
    assert [row["fault"] for row in server.log()].count("400") == 1  # not asked again
    assert [node.end for node in root.children] == ["text", "refused", "text"]


def test_a_server_that_serves_nothing_refuses_for_everybody(stub):
    """Of one that has served nothing yet a short request tells."""
    task = Task("t", "question", "the question", "the context")
    server = stub(says="x", refuse="e")
    with pytest.raises(APIError, match="status 400"):
        asyncio.run(rollout(task, API(server.url, "m", Account()), None, RLMConfig()))
    server = stub(says="x", refuse="question")
    account = Account()
    root = asyncio.run(rollout(task, API(server.url, "m", account), None, RLMConfig()))
    assert root.end == "refused" and account.tokens == 3  # "Say hello." and "x"


def test_a_resumed_run_refuses_what_the_first_one_refused(stub):
    server = stub(says="x", refuse="BAD")
    first = Account()

    async def go(account, *texts):
        policy = API(server.url, "m", account)
        return [await policy(node(text), 5, ()) for text in texts]

    asyncio.run(go(first, "good"))
    asked = len(server.log())
    again = Account(paid=first.paid)
    with pytest.raises(Refused):
        asyncio.run(go(again, "good", "BAD"))
    assert len(server.log()) == asked + 1 and again.tokens == 0


def test_a_server_is_asked_about_files_and_the_tree_is_shown(stub, tmp_path):
    code = "answer['content'] = context[:4]\nprint('\x1b[2Jseen')"
    server = stub(says=f"```repl\n{code}\n```")
    (tmp_path / "a.txt").write_text("What is in the file")
    flags = ["--api", server.url, "--api-model", "m", "--trace", "?", tmp_path / "a.txt"]
    done = subprocess.run([sys.executable, "rlm.py", *flags], cwd=ROOT, text=True,
                          capture_output=True)
    words = sum(row["out"] for row in server.log())
    assert words and f"┌ root  (6 turns, {words} sampled tokens)" in done.stdout
    done = subprocess.run(
        [sys.executable, "rlm.py", "--api", server.url, "--api-model", "m", "--stream",
         "--html", tmp_path / "tree.html", "The question?", tmp_path / "a.txt"],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\nWhat\n"), done
    assert "no FINAL (out of turns)" in done.stderr and done.stderr.count("\n") == 1
    assert "root · The question?" in done.stdout and "root » ```repl" in done.stdout
    assert done.stdout.count("root · REPL output:") == 5 and "\x1b" not in done.stdout
    page = (tmp_path / "tree.html").read_text()
    texts = "".join(data_of(page)["texts"])
    assert "The question?" in page and "\x1b[2Jseen" in texts

    for flags, says in ((("--api", server.url), "--api-model NAME"),
                        (("--api", server.url, "--api-model", "m", "--html",
                          tmp_path / "none/x.html"), "no such folder"),
                        (("--api", "ftp://h", "--api-model", "m"), "ftp://h")):
        done = subprocess.run(
            [sys.executable, "rlm.py", *flags, "q", "README.md"], cwd=ROOT,
            capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == "" and says in done.stderr
        assert done.stderr.count("\n") == 1


def test_no_answer_is_one_line_that_says_where_to_look(stub):
    done = subprocess.run(
        [sys.executable, "rlm.py", "--api", stub(says="1").url, "--api-model", "m", "q",
         "README.md"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", "rlm.py: no answer: out of turns (--trace shows the turns)\n")


def test_of_a_dead_server_it_is_said_once_that_it_is_asked_again(stub, capsys):
    server = stub()
    server.stop()
    policy = API(server.url, "m", Account())
    for _ in range(2):
        node = Node(turns=[Turn("user", "q")])
        with pytest.raises(Unreachable):
            asyncio.run(policy(node, 8, ()))
    assert capsys.readouterr().err == f"no answer from {server.url}, asking again\n"


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_a_stub_server_says_what_is_wrong_in_one_line(text, tmp_path):
    file = tmp_path / "stub.json"
    if text:
        file.write_text(text)
    done = subprocess.run([sys.executable, "-m", "lab.stub_server", file], cwd=ROOT,
                          text=True, capture_output=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and str(file) in done.stderr


def test_what_a_model_thinks_is_kept_apart_from_its_text():
    message = {"content": "hi", "reasoning_content": "```repl\nFINAL(0)\n```"}
    (done,), _ = ask([http({"choices": [{"message": message}]})])
    assert done.text == "hi"


def test_root_and_children_may_be_different_models(stub, evaluate, tmp_path):
    server = stub()
    message, text = evaluate("--api", server.url, "--api-model", "big", "--children",
                             "api:small", "--n", 2, "--json", tmp_path / "r.json")
    assert message is None
    data = json.loads((tmp_path / "r.json").read_text())
    models = [row["model"] for row in server.log()]
    assert models.count("big") == 2
    assert models.count("small") == sum(q["nodes"] - 1 for q in data["questions"]) > 0


# --- one request --------------------------------------------------------------------------


def node(text="hello"):
    n = Node()
    n.add(Turn("system", "be brief"))
    n.add(Turn("user", text))
    return n


GOOD = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def http(body, status="200 OK", head=""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def chunked(body, size=9):
    parts = [body[i:i + size] for i in range(0, len(body), size)]
    return (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"".join(b"%x;note=1\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n")


def ask(replies, times=1, **options):
    """Ask a server that sends these replies, one after another, and the last of them from
    then on -> (the completions or exceptions, the bodies that it got)."""
    got = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        got.append(json.loads(await reader.readexactly(size)))
        writer.write(replies[min(len(got), len(replies)) - 1])
        await writer.drain()
        writer.close()

    async def go():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        policy = API(url, "m", options.pop("account", None) or Account(), **options)
        try:
            return await asyncio.gather(
                *(policy(node(f"question {i}"), 5, (i,)) for i in range(times)),
                return_exceptions=True)
        finally:
            server.close()
    return asyncio.run(go()), got


@pytest.mark.parametrize("usage, sampled, dollars", [
    (None, 0, 0.0), ({"prompt_tokens": None, "completion_tokens": 2}, 2, 2.0),
    ({"prompt_tokens": 7, "completion_tokens": 3000,
      "completion_tokens_details": {"reasoning_tokens": 2996}}, 3000, 3000.0)])
def test_what_a_server_counts(usage, sampled, dollars):
    """A thought is paid for; what was said is not cut for it. `None` is no number."""
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    choices = [{"message": {"content": content}, "finish_reason": "stop"}]
    (done,), _ = ask([http({"choices": choices, "usage": usage})], price=(0.0, 1e6))
    assert (done.text, done.stop) == ("hi", "stop")
    assert (done.usage["sampled"], done.usage["dollars"]) == (sampled, dollars)


def test_a_model_that_takes_no_temperature_is_asked_without(monkeypatch):
    monkeypatch.setattr(api, "BACKOFF", 1e-4)
    refusal = http({"error": {"message": "Unsupported value: 'temperature'"}}, "400 No")
    (done,), got = ask([refusal, http(GOOD)])
    assert done.text == "hi" and ["temperature" in body for body in got] == [True, False]


def test_a_server_that_serves_may_forbid_one_request(stub):
    (one, two), _ = ask([http(GOOD), http({}, "403 No")], times=2,
                        account=Account(at_once=1))
    assert one.text == "hi" and isinstance(two, Refused)


def test_nobody_waits_for_a_reply_that_drips_or_never_comes():
    """The program ends at once, and a reply has to be whole in time."""
    code = '''
import asyncio, sys, time
from lab.api import API, Account, APIError
from tree import Node, Refused, Turn

async def drip(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    while True:
        writer.write(b" ")
        await asyncio.sleep(0.1)

async def go():
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    policy = API(url, "m", Account(), timeout=60)
    node = Node(kind="llm")
    node.add(Turn("user", "x"))
    try:
        await asyncio.wait_for(policy(node, 5, ()), 0.5)
    except TimeoutError:
        print("given up")
    server.close()
    sys.stdout.flush()

asyncio.run(go())
'''
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          text=True, timeout=30)
    assert done.stdout == "given up\n", done


@pytest.mark.parametrize("raw", [
    http(GOOD), chunked(json.dumps(GOOD).encode()),
    b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(GOOD).encode()],
    ids=["length", "chunked", "end"])
def test_the_three_ways_to_send_a_body(raw):
    (done,), got = ask([raw])
    assert (done.text, done.ids, done.stop) == ("hi", (), "stop")
    assert done.usage.pop("waited") >= 0
    assert done.usage == {"prompt": 7, "reused": 0, "sampled": 2, "dollars": None}
    assert got == [{"model": "m", "temperature": 1.0, "max_tokens": 5, "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "question 0"}]}]


@pytest.mark.parametrize("raw", [
    b"", b"\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 banana\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"x" * 100_000,
    b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
    http(b"\xff\xfe"), http(b"[" * 100_000), http([]), http({}), http({"choices": []}),
    http({"choices": [{"message": {"content": 5}}]}),
    http({"error": {"message": "busy"}}),
    http({**GOOD, "usage": {"prompt_tokens": "many"}}),
    http({**GOOD, "usage": {"prompt_tokens": -1}}), http({**GOOD, "usage": [1]}),
    http(GOOD, "503 Busy"),
    http(GOOD, "429 Slow", "Retry-After: Fri, 1 Jan 2027 00:00:00 GMT\r\n"),
], ids=range(23))
def test_every_broken_reply_is_asked_for_again(raw, monkeypatch):
    monkeypatch.setattr(api, "BACKOFF", 1e-4)
    account = Account()
    (done,), got = ask([raw, raw, http(GOOD)], account=account)
    assert done.text == "hi" and len(got) == 3 and account.retries == 2
    assert account.tokens == 9  # one reply was paid for


def test_back_off_doubles_and_heeds_retry_after(monkeypatch):
    waits, sleep = [], asyncio.sleep

    async def note(seconds):
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(api.asyncio, "sleep", note)
    busy = http({}, "500 No")
    (done,), _ = ask([busy, busy, busy, http({}, "429 Slow", "Retry-After: 30\r\n"),
                      http({}, "429 Slow", "Retry-After: 9999\r\n"), http(GOOD)])
    assert done.text == "hi"
    for i, wait in enumerate(waits[:3]):
        assert 0.5 * 2 ** i * 0.5 <= wait <= 0.5 * 2 ** i * 1.5
    assert waits[3:] == [30, api.LONGEST_WAIT]


@pytest.mark.parametrize("raw, error, says", [
    (http({}, "500 No"), Unavailable, "status 500"),
    (http({}, "429 Slow"), Unreachable, "status 429"),
    (http({"error": {"message": "too\nlong"}}, "400 Bad"), APIError, "too long"),
    (http({}, "404 None"), Stop, "no model 'm'"), (http({}, "302 Found"), Stop, "302"),
    (http({}, "403 No"), Stop, "wants a key"),
    (b"", Unreachable, "6 attempts"),  # one that never says anything is as good as none
])
def test_what_lasts_is_raised(raw, error, says, monkeypatch):
    monkeypatch.setattr(api, "BACKOFF", 1e-4)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (raised,), _ = ask([raw])
    assert type(raised) is error and says in str(raised) and "\n" not in str(raised)


def test_a_reply_longer_than_asked_is_cut_and_paid_in_full():
    long = {"choices": [{"message": {"content": "abcdefghij" * 2}}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 20}}
    account = Account()
    (done,), _ = ask([http(long)], account=account)
    assert (done.text, done.stop, done.usage["sampled"]) == ("abcde", "length", 20)
    assert account.tokens == 27


def test_newer_models_name_the_limit_differently():
    refuse = http({"error": {"message": "use 'max_completion_tokens' instead"}}, "400 Bad")
    (done,), got = ask([refuse, http(GOOD)])
    assert done.text == "hi" and got[1]["max_completion_tokens"] == 5
    assert "max_tokens" not in got[1]


def test_the_price_of_fresh_and_cached_tokens():
    usage = {"prompt_tokens": 1000, "completion_tokens": 5,
             "prompt_tokens_details": {"cached_tokens": 600}}
    (done,), _ = ask([http({**GOOD, "usage": usage})], price=(2.0, 8.0, 0.5))
    assert done.usage["reused"] == 600
    assert done.usage["dollars"] == pytest.approx((400 * 2 + 600 * 0.5 + 5 * 8) / 1e6)


def test_no_more_requests_at_a_time_than_allowed():
    at_once, most = 0, 0

    async def serve(reader, writer):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(http(GOOD))
        at_once -= 1
        writer.close()

    async def go():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        account = Account(at_once=3)  # two models share it
        await asyncio.gather(*(API(url, name, account)(node(), 5, (i,))
                               for i in range(10) for name in "ab"))
        server.close()
    asyncio.run(go())
    assert most <= 3


@pytest.mark.parametrize("limits", [{"max_tokens": 100}, {"max_dollars": 100e-6}])
def test_what_is_reserved_is_never_promised_twice(limits):
    """Many requests against a budget for a few: the sum of what was let through fits."""
    account = Account(**limits)
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    results, got = ask([http({**GOOD, "usage": usage})], times=20, account=account,
                       price=(1.0, 1.0))
    stopped = [r for r in results if isinstance(r, Stop)]
    assert account.tokens == 15 * (20 - len(stopped)) <= 100
    assert stopped and not account.held
    assert len(got) == 20 - len(stopped) >= 5


def test_a_reply_that_was_paid_for_is_handed_out_again():
    account = Account()
    (first,), _ = ask([http(GOOD)], account=account)
    kept = list(account.paid.values())
    again, got = ask([http({}, "500 No")], account=Account(paid=dict(account.paid)))
    assert again == kept and not got
    assert (first.text, first.usage["sampled"]) == (kept[0].text, kept[0].usage["sampled"])


@pytest.mark.parametrize("url, key, says", [
    ("localhost:8000", "", "is no http"), ("ftp://x/v1", "", "is no http"),
    ("http://", "", "is no http"), ("http://me:pw@host/v1", "", "is no http"),
    ("http://host/v1?a=b", "", "is no http"), ("http://host:99999", "", "[Pp]ort"),
    ("http://host", "a\r\nX-Evil: 1", "OPENAI_API_KEY")])  # it would smuggle a header in
def test_a_url_or_key_that_cannot_be_one_is_refused(url, key, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match=says):
        API(url, "m", Account())


def test_a_redirect_is_not_followed_and_a_proxy_is_used(monkeypatch):
    """The key goes to the server that was named, by the way that the machine names."""
    answers = [http({}, "307 Away", "Location: http://elsewhere.invalid/\r\n")]
    (raised,), got = ask(answers)
    assert isinstance(raised, Stop) and len(got) == 1 and "307" in str(raised)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(api, "BACKOFF", 1e-4)
    (raised,), got = ask([http(GOOD)])
    assert isinstance(raised, Stop) and not got
