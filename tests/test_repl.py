"""The REPL for honest code: namespace, answers, queries, the server, the command line.

What hostile code gets is in test_repl_hostile.py.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from repl import REPL, Handle, Limits, REPLError, Result

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module", params=["off", "auto"])
def mode(request):
    """Every test runs without and with namespaces (where the kernel has them)."""
    global MODE
    MODE = request.param


@pytest.fixture(autouse=True)
def quiet():
    """A closed REPL dies a moment later: none of the tests before is still there."""
    eventually(lambda: Handle.current is None or not workers(server()), 60)


def limits(**more):
    return Limits(**{"sandbox": MODE, **more})


def run(*blocks, context="the context", on_query=None, tools="", **more):
    """The results of the blocks, in one REPL."""

    async def go():
        async with REPL(context, tools, limits(**more)) as repl:
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


def children(pid):
    return proc(pid, f"task/{pid}/children").split()


def workers(pid):
    """The server's children without its spares."""
    ours = ("repl-server", "repl-spare")
    return [p for p in children(pid) if proc(p, "comm") not in ours]


def family(pid):
    """The processes below it, as the host sees them."""
    below = workers(pid)
    return below + [p for child in below for p in family(child)]


def isolated():
    """Whether the REPLs have namespaces here."""
    return run("import os; print(os.getpid())")[0].stdout == "1\n"


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


# --- the namespace ------------------------------------------------------------------------


def test_variables_and_output():
    one, two = run("x = 1\nprint('out')\nimport sys; print('err', file=sys.stderr)",
                   "x\nprint(x); FINAL(None); print('never')")
    assert one == Result(stdout="out\nerr\n")
    assert two == Result(stdout="1\n", done=True)  # a last bare expression is not echoed


def test_variables_before_an_exception_survive_and_the_traceback_is_short():
    one, two, three, four = run(
        "def f():\n    return 1 / 0\nx = 5\nf()", "print(x)\nf()",
        "import json; json.loads('{')\nllm_query_batched(1)", "x = (")
    recursion = run("def f(): f()\nf()")[0].error
    assert "RecursionError" in recursion and "frames cut" in recursion
    assert len(recursion) < 1000
    assert two.stdout == "5\n"
    assert one.error == (
        "Traceback (most recent call last):\n"
        '  File "<repl>", line 4, in <module>\n    f()\n'
        '  File "<repl>", line 2, in f\n    return 1 / 0\n'
        "ZeroDivisionError: division by zero"
    )
    assert "line 2, in <module>\n    f()" in two.error
    assert "    return 1 / 0\n" in two.error
    assert "repl.py" not in three.error
    assert "SyntaxError" in four.error and '"<repl>"' in four.error


def test_a_traceback_shows_the_lines_of_the_block_alone():
    tools = "def helper(x):\n\n\n    return x.missing"
    error = run("y = 1\nhelper(y)", tools=tools)[0].error
    assert 'File "<repl>", line 2, in <module>\n    helper(y)\n' in error
    assert error.count("File") == 1 and "has no attribute 'missing'" in error


def test_builtins_are_put_back():
    tools = "SECRET = 7\ndef tool(): return SECRET"
    spoil = "context = FINAL = llm_query = tool = SECRET = print = None; __builtins__ = {}"
    more = "import builtins; builtins.len = None; del FINAL_VAR, rlm_query, builtins.max"
    last = "FINAL([context, len(context), tool(), max(1, 2)])"
    *_, result = run(more, spoil, "del print", last, tools=tools)
    assert result.final == ["the context", 11, 7, 2]
    assert run("globals().clear()", "FINAL(context)")[1].final == "the context"


def test_annotations_are_evaluated_in_blocks_and_not_in_tools():
    code = "from dataclasses import *\n@dataclass\nclass A:\n    x: 'int'\nFINAL(A(1))"
    assert final(code) == {"x": 1}
    assert "NameError" in run("def f(x: Unknown): pass")[0].error
    assert final("FINAL(tool(1))", tools="def tool(x: Unknown): return x") == 1


def test_show_vars():
    shown = final("x = [1, 2]\n_y = 3\ndef f(): pass\ns = 'abc'\nFINAL(SHOW_VARS())",
                  tools="made: int = 1")
    assert shown == {"x": "list, 2 items", "f": "function", "s": "str, 3 characters"}


def test_stdin_and_the_standard_descriptors():
    one, two = run("import os; os.write(1, b'x'); os.write(2, b'x'); print(os.read(0, 9))",
                   "input()")
    assert one.stdout == "b''\n" and "EOFError" in two.error


# --- answers ------------------------------------------------------------------------------


def test_final_cannot_be_swallowed():
    start = time.monotonic()
    for after in ("while 1: pass", "1 / 0", "FINAL(2)", "llm_query('x')"):
        code = f"try: FINAL(1)\nexcept BaseException: pass\n{after}"
        assert run(code, "print(5)", seconds=30) == [Result(final=1, done=True)] * 2
    assert time.monotonic() - start < 10


def test_final_in_a_thread():
    code = "import threading\nthreading.Thread(target=FINAL, args=(3,)).start()"
    assert final(code + "\nwhile True: pass") == 3


@pytest.mark.parametrize("argument, answer", [
    ("'x'", 1), ("x", 1), ("[x, z]", [1, "two words"]), ("'z'", "two words"),
    ("' x'", 1), ("'\"x\"'", 1),
    ("z", "two words"), ("word", "word"), ("'word ' + z", "word two words")])
def test_final_var(argument, answer):
    """The name of a variable, or the value itself, as published prompts have both."""
    before = "x = 1; z = 'two words'; word = 'w' + 'ord'"
    assert final(f"{before}; FINAL_VAR({argument})") == answer


def test_final_var_of_a_name_that_is_none():
    one, two = run("x = 1; z = 2; FINAL_VAR('y')", "print(x)")
    assert "NameError" in one.error and "'y'" in one.error and "x, z" in one.error
    assert two.stdout == "1\n"


@pytest.mark.parametrize("code, answer", [
    ("{'a'}", ["a"]), ("{3, 1, 2}", [1, 2, 3]), ("frozenset({'b', 1})", ["b", 1]),
    ("range(3)", [0, 1, 2]), ("{'a': 1}.keys()", ["a"]),
    ("numpy.int64(3)", 3), ("numpy.float32(0.5)", 0.5), ("numpy.bool_(True)", True),
    ("numpy.arange(2000)", list(range(2000))), ("[numpy.ones((2, 1))]", [[[1.0], [1.0]]]),
    ("Point(1, [Point(2, {3})])", {"x": 1, "y": [{"x": 2, "y": [3]}]}),
    ("collections.deque([1, 2])", [1, 2]),
    ("collections.Counter('aab')", {"a": 2, "b": 1})])
def test_a_value_is_answered_as_what_it_means(code, answer):
    before = ("import collections, numpy\nfrom dataclasses import dataclass\n"
              "@dataclass(slots=True)\nclass Point:\n    x: int\n    y: object\n")
    assert final(f"{before}FINAL({code})") == answer
    assert final(f"{before}FINAL(rlm_query('q', {code}))", on_query=echo)[2] == answer


@pytest.mark.parametrize("code", ["(i for i in 'ab')", "map(str, [1])", "iter([1])",
                                  "{'a': [zip('a', 'b')]}"])
def test_a_generator_is_refused_with_what_to_do(code):
    for call in (f"FINAL({code})", f"rlm_query('q', {code})"):
        assert "is not a value yet: make it a list" in run(call)[0].error


@pytest.mark.parametrize("code", ["10 ** 5000", "deep", "{'a': Odd()}"])
def test_what_cannot_be_said_is_refused(code):
    before = ("deep = []\nfor _ in range(5000): deep = [deep]\n"
              "class Odd:\n    def __str__(self): raise ValueError('no')\n")
    for call in (f"FINAL({code})", f"rlm_query('q', {code})"):
        assert "is no value" in run(before + call)[0].error


def test_a_draft_of_the_answer_comes_with_every_result():
    results = run("x = 1", "answer['content'] = [1, {2}]", "1 / 0",
                  "answer['content'] = ''", "answer['content'] = 'x' * 200",
                  "answer['content'] = (i for i in 'a')",
                  "answer = 5", "answer = {'content': 7}", answer_chars=100)
    drafts = [result.draft for result in results]
    assert drafts == [None, [1, [2]], [1, [2]], None, None, None, None, 7]


def test_answer_variable():
    one, two = run("answer['content'] = {'a': 1}", "answer['ready'] = True; 1 / 0")
    assert not one.done and two.done and two.final == {"a": 1}
    one, two = run("answer = 'mine'", "FINAL_VAR('answer')")
    assert two.final == "mine"


def test_an_answer_too_large_is_an_error():
    one, two = run("FINAL('x' * 100)", "FINAL('x' * 98)", answer_chars=100)
    assert "ValueError: FINAL: the answer has 102 characters" in one.error and not one.done
    assert two.final == "x" * 98


# --- queries ------------------------------------------------------------------------------


@pytest.mark.parametrize("code, answer", [
    ("llm_query('a')", ["llm", "a", None]),
    ("llm_query_batched(['a', 2])", [["llm", "a", None], ["llm", "2", None]]),
    ("rlm_query('a')", ["rlm", "a", None]),
    ("rlm_query('a', {'k': ('v',)})", ["rlm", "a", {"k": ["v"]}]),
    ("rlm_query_batched('a', ['b', 'c'])", [["rlm", "a", "b"], ["rlm", "a", "c"]]),
    ("rlm_query_batched('a')", [["rlm", "a", None]]),
    ("rlm_query_batched(['a', 'b'])", [["rlm", "a", None], ["rlm", "b", None]]),
    ("[rlm_query_batched([], []), llm_query_batched([])]", [[], []]),
    ("rlm_query_batched(['a'], context_list=['b'])", [["rlm", "a", "b"]]),
])
def test_queries(code, answer):
    assert final(f"FINAL({code})", on_query=echo) == answer


def test_wrong_queries_are_errors_inside():
    async def never(*_):
        raise AssertionError("asked")

    one, two = run("rlm_query_batched(['a'], ['b', 'c'])", "rlm_query_batched('a', 'text')",
                   on_query=never)
    assert "ValueError: 1 prompts but 2 contexts" in one.error and "TypeError" in two.error


def test_queries_of_threads_run_side_by_side_and_each_gets_its_own_answer():
    """Eight threads, whose answers come in another order; the clock stands meanwhile."""
    most = 0

    async def on_query(kind, prompts, contexts):
        nonlocal most
        open_now.add(prompts[0])
        most = max(most, len(open_now))
        await asyncio.sleep(0.6 - 0.05 * int(prompts[0][:1]))
        open_now.discard(prompts[0])
        return [prompt + "!" for prompt in prompts]

    open_now = set()
    code = """
from concurrent.futures import ThreadPoolExecutor
def ask(i): return [llm_query(f"{i}{'x' * 100_000 * j}")[-3:] for j in range(3)]
with ThreadPoolExecutor(8) as pool: found = list(pool.map(ask, range(8)))
FINAL([found, llm_query("8")])
"""
    found, last = final(code, on_query=on_query, seconds=1)
    assert found == [[f"{i}!", "xx!", "xx!"] for i in range(8)] and last == "8!"
    assert most == 8


ALARM = """
import signal, threading, time
def stop(*_): raise TimeoutError("too late")
signal.signal(signalnum=signal.SIGALRM, handler=stop)
"""
IDLE = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.mark.parametrize("thread", ["", IDLE], ids=["alone", "beside a thread"])
def test_an_alarm_between_two_blocks_rings_in_the_next(thread):
    async def go():
        async with REPL("c", limits=limits()) as repl:
            code = ALARM + thread + "signal.setitimer(signal.ITIMER_REAL, 0.2)"
            assert (await repl.execute(code)).error == ""
            await asyncio.sleep(1)
            return [await repl.execute("print(3)") for _ in range(2)]

    late, after = asyncio.run(go())
    assert "TimeoutError: too late" in late.error and late.stdout == ""
    assert after.stdout == "3\n" and not after.error


READER = "threading.Thread(target=llm_query, args='a').start()"


@pytest.mark.parametrize("reader", ["", READER], ids=["this thread", "another"])
def test_an_alarm_ends_a_query_whoever_reads(reader):
    """Nobody is answered before the alarm has rung."""
    rang = asyncio.Event()

    async def on_query(kind, prompts, contexts):
        if prompts == ["late"]:
            rang.set()
        await asyncio.wait_for(rang.wait(), 20)
        return prompts

    code = f"""{ALARM}
{reader}
time.sleep(0.1)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    llm_query("b")
except TimeoutError: FINAL(llm_query("late"))
"""
    assert final(code, on_query=on_query) == "late"


def test_a_handler_may_query_and_answer_while_a_query_is_open():
    async def on_query(kind, prompts, contexts):
        await asyncio.sleep(0.5 if prompts == ["slow"] else 0)
        return prompts

    rings = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: {})\n"
    rings += "signal.setitimer(signal.ITIMER_REAL, 0.1)\nprint(llm_query('slow'))"
    (result,) = run(rings.format("print(llm_query('quick'))"), on_query=on_query)
    assert result.stdout == "quick\nslow\n" and not result.error
    assert final(rings.format("FINAL('so far')"), on_query=on_query) == "so far"
    # A process that it forks leaves the answer to its parent.
    (result,) = run(rings.format("__import__('os').fork()"), on_query=on_query)
    assert result.stdout == "slow\n" and not result.error


def test_signals_between_two_blocks_ring_once_each_and_all_at_once():
    code = """
import os, signal, threading, time
rang = []
def stop(number, frame):
    rang.append(number)
    raise TimeoutError
def later():
    time.sleep(0.2)
    for number in 3 * [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]:
        os.kill(os.getpid(), number)
for number in signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM: signal.signal(number, stop)
threading.Thread(target=later).start()
"""

    async def go():
        async with REPL("c", limits=limits()) as repl:
            assert (await repl.execute(code)).error == ""
            await asyncio.sleep(1)
            return [await repl.execute("print(len(rang), len(set(rang)))") for _ in "ab"]

    late, after = asyncio.run(go())
    assert "TimeoutError" in late.error and after.stdout == "3 3\n"


def test_a_process_that_a_thread_forks_has_handlers_of_its_own():
    async def slow(kind, prompts, contexts):
        await asyncio.sleep(1)
        return prompts

    code = """
import os, signal, threading, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
def fork():
    child = os.fork()
    if child == 0:
        try: time.sleep(20)
        finally: os._exit(1)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended, thread = [], threading.Timer(0.2, fork)
thread.start()
llm_query("a")
thread.join()
FINAL(ended)
"""
    assert final(code, on_query=slow) == [7]


def test_a_block_ends_when_the_queries_of_its_threads_have():
    async def on_query(kind, prompts, contexts):
        await asyncio.sleep(0.3)
        asked.append(prompts)
        return prompts

    asked = []
    code = "import threading\nthreading.Thread(target=llm_query, args=('a',)).start()"
    one, two = run(f"{code}\nimport time; time.sleep(0.05)", "print(llm_query('b'))",
                   on_query=on_query)
    assert one == Result() and two.stdout == "b\n" and asked == [["a"], ["b"]]


def test_nobody_answers():
    one = run("print(llm_query_batched(['a', 'b']))")[0]
    assert one.stdout.count("Error: no model is attached to this REPL") == 2


def test_too_many_queries_are_counted_per_block():
    code = "print(len(llm_query_batched(['a'] * 3))); print(llm_query_batched([1, 2]))"
    for result in run(code, code, on_query=echo, queries=4):
        assert result.stdout.startswith("3\n['Error: a block may ask 4 queries")


def test_the_clock_stops_for_queries():
    async def slow(kind, prompts, contexts):
        await asyncio.sleep(1.2)
        return prompts

    one, two = run("print(llm_query('a'))", "llm_query('a')\nwhile True: pass",
                   on_query=slow, seconds=1)
    assert one == Result(stdout="a\n") and two.died == "timeout"


def test_a_result_says_how_long_the_block_ran_by_the_servers_clock():
    async def slow(kind, prompts, contexts):
        time.sleep(1)  # the client is busy, as with a forward pass
        return prompts

    blocks = ("import time; time.sleep(0.3)", "llm_query('x')", "1 / 0", "time.sleep(9)")
    *results, late = run(*blocks, on_query=slow, seconds=1.5)
    assert late.died == "timeout" and 1.5 <= late.seconds < 3
    assert [r.seconds >= 0.3 for r in results] == [True, False, False]
    forged = "s = FINAL.__self__.sock\ns.sendall(b'\\0\\0\\0\\1T0')"
    assert run(forged)[0].died == "protocol"  # no worker sets its own clock


@pytest.mark.parametrize("most, depth", [(1, 0), (3, 2), (8, 2), (8, 7)])
def test_places_are_given_to_the_deepest_first_and_nobody_waits_for_ever(most, depth):
    """Trees of more REPLs than there are places; every parent holds its own."""
    from runtime.places import Places

    places, held, peak = Places(most), 0, 0

    async def grow(level):
        nonlocal held, peak
        await places.take(depth - level)
        held += 1
        peak = max(peak, held)
        try:
            await asyncio.sleep(0)
            if level < depth:
                await asyncio.gather(*(grow(level + 1) for _ in range(2)))
        finally:
            held -= 1
            places.give()

    async def go():
        trees = [asyncio.create_task(grow(0)) for _ in range(20)]
        await asyncio.sleep(0.001)
        trees[0].cancel()  # gives back what it had, and waits for nothing
        done = await asyncio.wait_for(asyncio.gather(*trees, return_exceptions=True), 60)
        assert sum(isinstance(d, asyncio.CancelledError) for d in done) <= 1
        with pytest.raises(OSError, match="ulimit -n"):
            await places.take(most)

    asyncio.run(go())
    assert peak == most and places.free == most and not held


def test_a_failing_query_is_the_machines_failure():
    async def fails(*_):
        raise OSError("no such model")

    async def too_few(*_):
        return []

    with pytest.raises(OSError, match="no such model"):
        run("try: llm_query('a')\nexcept BaseException: pass", on_query=fails)
    with pytest.raises(ValueError, match="0 answers to 1 prompts"):
        run("llm_query('a')", on_query=too_few)


def test_large_values():
    async def contexts_back(kind, prompts, contexts):
        return contexts

    text = "é" * (4 << 20)
    code = "FINAL(len(rlm_query('', context)))"
    assert final(code, context=text, on_query=contexts_back) == len(text)


# --- the clock, and the server ------------------------------------------------------------


def test_a_deadline_holds_while_the_event_loop_is_blocked():
    fork = "import os\nif os.fork() == 0:\n  while True: pass\nllm_query('')"
    forever = "\nwhile True:\n  try:\n    while True: pass\n  except BaseException: pass"
    pids = []

    async def note(kind, prompts, contexts):
        pids.extend(family(server()))
        assert len(pids) == 2 and all(map(alive, pids))  # the clock stands still
        return [""]

    async def go():
        async with REPL("", limits=limits(seconds=1)) as repl:
            block = asyncio.create_task(repl.execute(fork + forever, note))
            while not pids:
                assert not block.done(), block
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            eventually(lambda: not any(map(alive, pids)), 60)  # blocks like a forward pass
            result = await block
            assert result.died == "timeout" and "more than 1 s" in result.error
            assert await repl.execute("print(1)") == result

    asyncio.run(go())


def test_spares_are_used_replaced_and_follow_the_limits():
    def spares(files=99):
        """Those made for so many open files; others that were ended may not be gone yet."""
        pids = set(children(server())) - set(workers(server()))
        line = rf"Max open files +{files} "
        return {pid for pid in pids if re.search(line, proc(pid, "limits"))}

    def asked(files):
        code = "import resource as r\nFINAL(r.getrlimit(r.RLIMIT_NOFILE)[0])"
        return final(code, open_files=files)

    asked(99)
    eventually(lambda: len(spares()) == 8)
    before = spares()
    assert asked(99) == 99
    eventually(lambda: len(spares()) == 8)
    assert len(spares() & before) == 7  # one was used, and one made in its place
    for pid in map(int, spares()):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(spares()) == 8 and not spares() & before)
    assert asked(98) == 98  # none of those made for 99
    eventually(lambda: len(spares(98)) == 8 and not spares(99))


def test_a_worker_that_dies_while_its_context_arrives():
    async def go():
        with pytest.raises(REPLError, match="did not start.*(MemoryError|ended)"):
            await REPL("x" * (60 << 20), limits=limits(memory_mb=90)).__aenter__()
        async with REPL("y", limits=limits()) as repl:
            assert (await repl.execute("FINAL(context)")).final == "y"

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_start_that_fails_is_the_machines_failure():
    with pytest.raises(REPLError, match="ZeroDivisionError"):
        run(tools="1 / 0")
    with pytest.raises(REPLError, match="the limit is 1"):
        run(context="x" * (2 << 20), frame_mb=1)
    with pytest.raises(ValueError, match="not require, auto or off"):
        Limits(sandbox="on")


def test_a_slow_reader_blocks_nobody():
    async def go():
        async with REPL("", limits=limits()) as slow, REPL("", limits=limits()) as other:
            await slow._send(b"X", {"code": "llm_query('x' * (20 << 20))"})  # never read
            await asyncio.sleep(0.3)
            assert (await asyncio.wait_for(other.execute("FINAL(1)"), 60)).final == 1

    asyncio.run(go())


def test_a_lost_server():
    code = ("import os\nfor _ in range(2):\n  if os.fork() == 0:\n    while True: pass\n"
            "llm_query('')\nwhile True: pass")
    pids, together = [], isolated()

    async def note(kind, prompts, contexts):
        pids.extend(family(server()))
        return prompts

    async def go():
        async with REPL("", limits=limits()) as repl:
            block = asyncio.create_task(repl.execute(code, note))
            while not pids:
                await asyncio.sleep(0.01)
            os.kill(server(), signal.SIGKILL)
            with pytest.raises(REPLError, match="lost"):
                await block
            with pytest.raises(REPLError):
                await repl.execute("print(1)")
        eventually(lambda: not any(map(alive, pids if together else pids[:1])))
        for pid in filter(alive, pids):
            os.kill(int(pid), signal.SIGKILL)
        async with REPL("again", limits=limits()) as repl:
            assert (await repl.execute("FINAL(context)")).final == "again"

    asyncio.run(go())


def test_cancelling_and_closing():
    async def go():
        repl = await REPL("", limits=limits()).__aenter__()
        await repl.execute("")
        pid, = workers(server())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(repl.execute("while True: pass"), 0.2)
        eventually(lambda: not alive(pid))
        await repl.aclose()
        await repl.aclose()
        with pytest.raises(REPLError):
            await repl.execute("")

        async with REPL("", limits=limits()) as repl:  # closed by another task
            block = asyncio.create_task(repl.execute("while True: pass"))
            await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="one block at a time"):
                await repl.execute("")
            await repl.aclose()
            with pytest.raises(REPLError):
                await asyncio.wait_for(block, 5)

    asyncio.run(go())


# --- other processes ----------------------------------------------------------------------

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
FORKS = START + """
def server():
    assert asyncio.run(start({mode!r})) == "it runs"
    return Handle.current.process.pid
first = server()
if os.fork() == 0:
    print(first, server(), Handle.current.base, flush=True)
    Handle.stop()
    os._exit(0)
os.wait()
print(server() == first, Handle.current.base, flush=True)
{end}
"""
REFUSED = START + """
async def go():
    print(await start("auto"), await start("auto"), sep="\\n")
    Handle.stop()
    print(await start("auto"), await start("require"), await start("off"), sep="\\n")
asyncio.run(go())
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_forks_and_the_end_of_the_client(end):
    command = [sys.executable, "-W", "error", "-c", FORKS.format(end=end, mode=MODE)]
    done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT)
    first, other, base, same, second = done.stdout.split()
    assert first != other and same == "True" and not done.stderr
    eventually(lambda: not alive(first) and not alive(other))
    eventually(lambda: not os.path.exists(base) and not os.path.exists(second))


def test_the_first_repl_raises_the_limit_of_open_files_as_far_as_it_may():
    code = START + ("import resource as r\nhard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
                    "r.setrlimit(r.RLIMIT_NOFILE, (99, hard))\nasyncio.run(start('off'))\n"
                    "print(r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard))")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          cwd=ROOT)
    assert done.stdout == "True\n", done.stderr


def test_where_the_kernel_refuses():
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "-Ur", "sh", "-c", inside, sys.executable, REFUSED]
    done = subprocess.run(command, text=True, capture_output=True, cwd=ROOT)
    if "unshare" in done.stderr and not done.stdout:
        pytest.skip("no user namespaces here")
    *good, required, off = done.stdout.splitlines()
    assert good == ["it runs"] * 3 and off == "it runs"
    assert "no namespaces" in required and "did not start" in required
    assert len(done.stderr.splitlines()) == 1  # it is said once
    assert "the sandbox has no namespaces" in done.stderr


def test_packages_of_an_environment_that_only_its_owner_may_enter(tmp_path):
    """As `mktemp -d` makes directories: root's workers have other user ids."""
    venv.create(tmp_path / "mine", symlinks=True)
    site = next((tmp_path / "mine").glob("lib/python*/site-packages"))
    (site / "only_here.py").write_text("x = 5")
    (tmp_path / "mine").chmod(0o700)
    done = subprocess.run([tmp_path / "mine/bin/python", ROOT / "repl.py"], text=True,
                          input="import only_here\nFINAL(only_here.x)", capture_output=True)
    assert (done.stdout, done.stderr) == ("5\n", "")
