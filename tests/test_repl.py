"""The REPL for honest code: namespace, answers, queries, the server, the command line."""
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from repl import REPL, Handle, Limits, REPLError, Result


BOTH = pytest.mark.parametrize("mode", ["off", "auto"])  # else: what there is here


@pytest.fixture(autouse=True)
def quiet():
    """A closed REPL dies a moment later: none of the tests before is still there."""
    eventually(lambda: Handle.current is None or not family(server()), 60)


def run(*blocks, context="the context", on_query=None, tools="", **more):
    """The results of the blocks, in one REPL."""

    async def go():
        async with REPL(context, tools, Limits(**more)) as repl:
            return [await repl.execute(block, on_query) for block in blocks]

    return asyncio.run(go())


def final(block, **options):
    result = run(block, **options)[0]
    assert result.done, result
    return result.final


async def echo(kind, prompts, contexts):
    return [[kind, p, contexts and contexts[i]] for i, p in enumerate(prompts)]


def server():
    return Handle.current.process.pid


def proc(pid, file):
    """What /proc says of a process; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text().strip()
    except OSError:
        return ""


def alive(pid):
    stat = proc(pid, "stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"


def family(pid):
    """The processes below it, as the host sees them, but for the server's own."""
    below = proc(pid, f"task/{pid}/children").split()
    found = [p for p in below if proc(p, "comm") != "repl-server"]
    return found + [p for child in below for p in family(child)]


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_variables_and_output():
    one, two, three = run("x = 1\nprint('out')\nimport sys; print('err', file=sys.stderr)",
                          "x\nprint(x); FINAL(None); x = 'never'", "x")
    assert one == Result(stdout="out\nerr\n")
    assert two == Result(stdout="1\n", done=True)  # a last bare expression is not echoed
    assert three == Result(stdout="1\n")  # FINAL ended its block


def test_variables_before_an_exception_survive_and_the_traceback_is_short():
    one, two, three, four = run(
        "def f():\n    return 1 / 0\nx = 5\nf()", "print(x)\nhelper(f)", "x = 6\nyield 7",
        "print(x)\ndef g(): g()\ng()", tools="def helper(f): f()")
    assert two.stdout == four.stdout == "5\n"  # nothing of a block with a mistake runs
    assert one.error == (
        "Traceback (most recent call last):\n"
        '  File "<repl>", line 4, in <module>\n    f()\n'
        '  File "<repl>", line 2, in f\n    return 1 / 0\n'
        "ZeroDivisionError: division by zero"
    )
    assert "    helper(f)\n" in two.error and "    return 1 / 0\n" in two.error
    assert "repl.py" not in two.error and "tools" not in two.error
    assert "SyntaxError" in three.error
    assert "RecursionError" in four.error and len(four.error) < 1000
    undefined, syntax, note = run(  # of 60 characters the lines above would take all
        "contxt", "for", "e = KeyError(1)\ne.add_note('')\nraise e", output_chars=60)
    assert undefined.error.startswith("NameError: name 'contxt' is not defined")
    assert (syntax.error, note.error) == ("SyntaxError: invalid syntax", "KeyError: 1")
    [long] = run("{}['y' * 3000]", output_chars=500)
    assert "    {}['y' * 3000]\nKeyError: 'yyy" in long.error


def test_builtins_are_put_back():
    tools = "SECRET = 7\ndef tool(): return SECRET"
    spoil = "context = FINAL = llm_query = tool = SECRET = print = None; __builtins__ = {}"
    more = "import builtins; builtins.len = None; del FINAL_VAR, rlm_query, builtins.max"
    last = "FINAL([context, len(context), tool(), max(1, 2)])"
    *_, result = run(more, spoil, "globals().clear()", last, tools=tools)
    assert result.final == ["the context", 11, 7, 2]


def test_annotations_need_no_imports():
    code = "from dataclasses import *\n@dataclass\nclass A:\n    x: List[int]\n"
    assert final(code + "FINAL(A(1).x)") == 1
    assert final("FINAL(tool(1))", tools="def tool(x: Unknown): return x") == 1


def test_the_value_of_a_last_expression_is_shown_as_at_pythons_prompt():
    shown = [r.stdout for r in run("x = 2\nx + 1", "None", "'a'", "print(1)", "x = 3")]
    assert shown == ["3\n", "", "'a'\n", "1\n", ""]


@pytest.mark.parametrize("after", [
    "while 1: pass", "1 / 0", "FINAL(2)", "llm_query('x')"])
def test_final_cannot_be_swallowed(after):
    code = f"try: FINAL(1)\nexcept BaseException: pass\n{after}"
    assert run(code, seconds=30) == [Result(final=1, done=True)]


@pytest.mark.parametrize("argument, answer", [
    ("'x'", 1), ("[x, z]", [1, "two words"]), ("'z'", "two words"), ("z", "two words"),
    ("word", "word")])
def test_final_var(argument, answer):
    """The name of a variable, or the value itself, as published prompts have both."""
    before = "x = 1; z = 'two words'; word = 'w' + 'ord'"
    assert final(f"{before}; FINAL_VAR({argument})") == answer


def test_a_value_is_answered_as_what_it_means():
    means = {
        "{3, 1, 2}": [1, 2, 3], "frozenset({'b', 1})": ["b", 1], "range(3)": [0, 1, 2],
        "{'a': 1}.keys()": ["a"], "numpy.int64(3)": 3, "numpy.bool_(True)": True,
        "numpy.arange(2000)": list(range(2000)), "[numpy.ones((2, 1))]": [[[1.0], [1.0]]],
        "collections.deque([1, 2])": [1, 2],
        "collections.Counter('aab')": {"a": 2, "b": 1}}
    code = (f"import collections, numpy\nvalues = [{', '.join(means)}]\n"
            "FINAL([values, [one[2] for one in rlm_query_batched('q', values)]])")
    assert final(code, on_query=echo) == [[*means.values()]] * 2


def test_what_is_wrong_is_an_error_inside():
    async def never(*_):
        raise AssertionError("asked")

    wrong = {
        "FINAL(i for i in 'ab')": "is not a value yet: make it a list",
        "FINAL({'a': [zip('a', 'b')]})": "is not a value yet: make it a list",
        "rlm_query('q', map(str, [1]))": "is not a value yet: make it a list",
        "FINAL('x' * 100)": "ValueError: FINAL: the answer has 102 characters",
        "rlm_query_batched(['a'], ['b', 'c'])": "ValueError: 1 prompts but 2 contexts",
        "rlm_query_batched('a', 'text')": "TypeError",
        "FINAL_VAR('y')": "NameError: FINAL_VAR: there is no variable 'y'",
        "input()": "EOFError"}
    *results, last = run("x = 1", *wrong, "FINAL('x' * 98)", on_query=never,
                         answer_chars=100)
    for result, error in zip(results[1:], wrong.values(), strict=True):
        assert error in result.error and not result.done
    assert last.final == "x" * 98


def test_a_draft_of_the_answer_comes_with_every_result():
    results = run("x = 1", "answer['content'] = [1, {2}]", "1 / 0",
                  "answer['content'] = 'x' * 200", "answer = 5", "answer = {'content': 7}",
                  "answer['ready'] = True; 1 / 0", answer_chars=100)
    drafts = [result.draft for result in results[:-1]]
    assert drafts == [None, [1, [2]], [1, [2]], None, None, 7]
    assert [result.done for result in results] == [False] * 6 + [True]
    assert results[-1].final == 7


def test_queries():
    answers = {
        "llm_query('a')": ["llm", "a", None],
        "llm_query_batched(['a', 2])": [["llm", "a", None], ["llm", "2", None]],
        "rlm_query('a', {'k': ('v',)})": ["rlm", "a", {"k": ["v"]}],
        "rlm_query_batched('a', ['b', 'c'])": [["rlm", "a", "b"], ["rlm", "a", "c"]],
        "rlm_query_batched(['a', 'b'])": [["rlm", "a", None], ["rlm", "b", None]],
        "rlm_query_batched([], [])": [], "llm_query_batched([])": []}
    assert final(f"FINAL([{', '.join(answers)}])", on_query=echo) == [*answers.values()]


def test_queries_of_threads_take_turns_and_each_gets_its_own_answer():
    async def on_query(kind, prompts, contexts):
        await asyncio.sleep(0.05)
        return [prompt + "!" for prompt in prompts]

    code = ("from concurrent.futures import ThreadPoolExecutor; import threading\n"
            "print(list(ThreadPoolExecutor(4).map(llm_query, 'abcdef')))\n"
            "threading.Thread(target=llm_query, args='g').start()")
    one, two = run(code, "FINAL(llm_query('h'))", on_query=on_query)
    assert one.stdout == f"{[c + '!' for c in 'abcdef']}\n" and two.final == "h!"


def test_queries_that_are_too_many_or_that_nobody_answers_are_error_strings():
    assert "Error: this REPL has no model" in final("FINAL(llm_query('a'))")
    code = "print(len(llm_query_batched(['a'] * 3))); print(llm_query_batched([1, 2]))"
    for result in run(code, code, on_query=echo, queries=4):
        assert result.stdout.startswith("3\n['Error: a block may ask 4 queries")


def test_the_clock_is_the_servers_and_stops_for_queries():
    async def slow(kind, prompts, contexts):
        if prompts == ["slow"]:
            time.sleep(1.2)  # the client is busy, as with a forward pass
        return prompts

    asks, loops = "print(llm_query('slow'))", "llm_query('a')\nwhile True: pass"
    one, late = run(asks, loops, on_query=slow, seconds=0.1)
    assert one == Result(stdout="slow\n")  # a tenth of 1.2 s would be too much
    assert late.died == "timeout" and 0.1 <= late.seconds < 1
    forged = "s = FINAL.__self__.worker.sock\ns.sendall(b'\\0\\0\\0\\1T0')"
    assert run(forged)[0].died == "protocol"  # no worker sets its own clock


def test_a_busy_machine_ends_no_block_and_sleeping_ends_one_late():
    """Each of 8 blocks needs half of its seconds, of a machine with fewer cores."""
    busy = "import time\nwhile time.process_time() < 0.2: pass\nFINAL(1)"

    async def one(code, seconds):
        async with REPL("", limits=Limits(seconds=seconds)) as repl:
            return await repl.execute(code)

    async def go():
        many = [one(busy, 0.4) for _ in range(8)]
        return await asyncio.gather(*many, one("import time; time.sleep(99)", 0.1))

    *results, slept = asyncio.run(go())
    assert [r.final for r in results] == [1] * 8
    assert all(0.1 < r.seconds < 0.4 for r in results)
    assert slept.died == "timeout" and 0.1 <= slept.seconds < 1


def test_processes_of_a_block_count_together_and_those_of_its_threads():
    """Else these blocks would end without a timeout."""
    fork = ("import os, time\nif os.fork() == 0:\n"
            "  while time.process_time() < 1.5: pass\n  os._exit(0)\nos.wait()")
    busy = "import time\nwhile time.process_time() < 1.5: pass"
    thread = ("import subprocess, sys, threading\n"
              f"run = lambda: subprocess.run([sys.executable, '-c', {busy!r}])\n"
              "t = threading.Thread(target=run); t.start(); t.join()")
    for code in (fork, thread):
        assert run(code, seconds=0.5)[0].died == "timeout"


@BOTH
def test_a_deadline_holds_while_the_event_loop_is_blocked(mode):
    fork = "import os\nif os.fork() == 0:\n  while True: pass\nllm_query('')"
    forever = "\nwhile True:\n  try:\n    while True: pass\n  except BaseException: pass"
    pids = []

    async def note(kind, prompts, contexts):
        pids.extend(family(server()))
        assert len(pids) == 2 and all(map(alive, pids))  # the clock stands still
        return [""]

    async def go():
        async with REPL("", limits=Limits(seconds=0.4, sandbox=mode)) as repl:
            block = asyncio.create_task(repl.execute(fork + forever, note))
            while not pids:
                assert not block.done(), block
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            eventually(lambda: not any(map(alive, pids)), 60)  # blocks like a forward pass
            result = await block
            assert result.died == "timeout" and "more than 0.4 s" in result.error

    asyncio.run(go())


def test_a_start_that_fails_is_the_machines_failure():
    with pytest.raises(REPLError, match="ZeroDivisionError"):
        run("", tools="1 / 0")
    with pytest.raises(REPLError, match="the limit is 1 MB"):
        run("", context="x" * (2 << 20), frame_mb=1)


@BOTH
def test_a_lost_server_is_replaced_by_one_that_prints_sets_alike(mode):
    pids, letters = [], "print({*'abcdefghij'})"

    async def note(kind, prompts, contexts):
        pids.extend(family(server()))
        os.kill(server(), signal.SIGKILL)
        return prompts

    async def go():
        async with REPL("", limits=Limits(sandbox=mode)) as repl:
            printed = await repl.execute(letters)
            with pytest.raises(REPLError, match="lost"):
                await repl.execute("llm_query('')\nwhile True: pass", note)
            with pytest.raises(REPLError):
                await repl.execute("print(1)")
        eventually(lambda: not any(map(alive, pids)))
        async with REPL("again", limits=Limits(sandbox=mode)) as repl:
            assert await repl.execute(letters) == printed
            assert (await repl.execute("FINAL(context)")).final == "again"

    asyncio.run(go())


def test_cancelling_and_closing():
    async def go():
        async with REPL("") as repl, REPL("") as unused:
            await repl.execute("")
            pid, = family(server())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(repl.execute("while True: pass"), 0.2)
            eventually(lambda: not alive(pid))
        for closed in (repl, unused):
            with pytest.raises(REPLError, match="not open"):
                await closed.execute("")

    asyncio.run(go())


START = """
import asyncio, os
from repl import REPL, Handle, Limits, REPLError
async def start(mode):
    try:
        async with REPL("it runs", limits=Limits(sandbox=mode)) as repl:
            return (await repl.execute("FINAL(context)")).final
    except REPLError as error:
        return error
"""
REFUSED = START + """
async def go():
    print(await start("auto"), await start("require"), await start("off"), sep="\\n")
asyncio.run(go())
"""
KILLED = START + """
asyncio.run(start("off"))
print(Handle.current.process.pid, Handle.current.base, flush=True)
os.kill(os.getpid(), 9)
"""


def program(*command, **more):
    return subprocess.run(command, text=True, capture_output=True, cwd=ROOT, **more)


def test_where_the_kernel_refuses():
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    done = program("unshare", "-Ur", "sh", "-c", inside, sys.executable, REFUSED)
    if "unshare" in done.stderr and not done.stdout:
        pytest.skip("no user namespaces here")
    auto, required, off = done.stdout.splitlines()
    assert auto == off == "it runs" and "lost" in required
    assert done.stderr.count("the sandbox has no namespaces") == 2  # it says why


def test_the_end_of_the_client_ends_its_server():
    pid, base = program(sys.executable, "-c", KILLED).stdout.split()
    eventually(lambda: not alive(pid) and not os.path.exists(base))
