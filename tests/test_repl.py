"""What a block of code may do, what it may not, and that neither hurts the process that asked."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from repl import REPL, Handle, Limits, REPLError, Result  # noqa: E402


@pytest.fixture(autouse=True, scope="module", params=["off", "auto"])
def mode(request):
    """Every test runs without and with namespaces (where the kernel has them)."""
    global MODE
    MODE = request.param


def limits(**more):
    return Limits(**{"sandbox": MODE, **more})


def run(*blocks, context="the context", on_query=None, tools="", **more):
    """The results of the blocks, one REPL."""

    async def go():
        async with REPL(context, tools, limits(**more)) as repl:
            return [await repl.execute(block, on_query) for block in blocks]

    return asyncio.run(go())


def final(block, **options):
    result = run(block, **options)[0]
    assert result.done, result
    return result.final


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def name(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def workers(server):
    """The server's children but for its spares."""
    return [pid for pid in children(server) if name(pid) not in ("repl-server", "repl-spare")]


def descriptors(server):
    """How many the trainer has, and the server without those of its spares, one each."""
    own, its = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), server)]
    return own, its - len(children(server)) + len(workers(server))


def directories():
    """Those of REPLs, without those of spares."""
    spares = set(children(Handle.current.process.pid))
    spares -= set(workers(Handle.current.process.pid))
    kept = set()
    for pid in spares:
        with contextlib.suppress(OSError):  # it ended meanwhile
            kept.add(os.path.basename(os.readlink(f"/proc/{pid}/cwd")))
    return sorted(set(os.listdir(Handle.current.base)) - kept)


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


async def scripted(kind, prompts, contexts):
    return [[kind, p, contexts and contexts[i]] for i, p in enumerate(prompts)]


@pytest.fixture(autouse=True)
def quiet():
    """A closed REPL dies a moment later: none of the tests before is still there."""
    eventually(lambda: Handle.current is None or not workers(Handle.current.process.pid), 60)


# --- the namespace --------------------------------------------------------------------------------


def test_variables_and_output():
    one, two = run("x = 1\nprint('out')\nimport sys; print('err', file=sys.stderr)", "x\nprint(x)")
    assert one == Result(stdout="out\nerr\n")
    assert two.stdout == "1\n"  # a last bare expression is not echoed


def test_variables_before_an_exception_survive_and_the_traceback_is_short():
    one, two = run("def f():\n    return 1 / 0\nx = 5\nf()", "print(x)\nf()")
    assert two.stdout == "5\n"
    assert one.error == (
        "Traceback (most recent call last):\n"
        '  File "<repl>", line 4, in <module>\n    f()\n'
        '  File "<repl>", line 2, in f\n    return 1 / 0\n'
        "ZeroDivisionError: division by zero"
    )
    assert "line 2, in <module>\n    f()" in two.error and "    return 1 / 0\n" in two.error
    assert "repl.py" not in run("import json; json.loads('{')\nllm_query_batched(1)")[0].error
    error = run("x = (")[0].error
    assert "SyntaxError" in error and '"<repl>"' in error


def test_recursion_is_cut():
    error = run("def f(): f()\nf()")[0].error
    assert "RecursionError" in error and "frames cut" in error and len(error) < 1000


def test_builtins_are_put_back():
    tools = "SECRET = 7\ndef tool(): return SECRET"
    spoil = "context = FINAL = llm_query = tool = SECRET = print = None; __builtins__ = {}"
    more = "import builtins; builtins.len = None; del FINAL_VAR, rlm_query, builtins.max"
    *_, last = run(more, spoil, "del print", "FINAL([context, len(context), tool(), max(1, 2)])",
                   tools=tools)
    assert last.final == ["the context", 11, 7, 2]
    assert run("globals().clear()", "FINAL(context)")[1].final == "the context"


def test_dataclasses_and_future_imports():
    code = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nFINAL(A(1))"
    assert final(code) == "A(x=1)"


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "exit()", "raise KeyboardInterrupt"])
def test_exits_are_errors(code):
    one, two = run(code, "print(1)")
    assert ("SystemExit" in one.error or "KeyboardInterrupt" in one.error) and not one.died
    assert two == Result(stdout="1\n")


def test_show_vars():
    shown = final("x = [1, 2]\n_y = 3\ndef f(): pass\ns = 'abc'\nFINAL(SHOW_VARS())")
    assert shown == {"x": "list, 2 items", "f": "function", "s": "str, 3 characters"}


def test_stdin_and_the_standard_descriptors():
    one, two = run("import os; os.write(1, b'x'); os.write(2, b'x'); print(os.read(0, 9))",
                   "input()")
    assert one.stdout == "b''\n" and "EOFError" in two.error


def test_contexts_and_surrogates():
    for context in ["\ud800 \U0001f600 é", ["a", "b"], {"a": "b"}, "", None]:
        assert final("FINAL(context)", context=context) == context
    assert run(r"print('\udfff')")[0].stdout == "\udfff\n"
    assert "UnicodeEncodeError" in run("x = '\udfff'")[0].error


# --- answers --------------------------------------------------------------------------------------


def test_values():
    assert final("FINAL((1, [2.5, (None, True)], {'a': 'b', 1: {3}}))") == [
        1, [2.5, [None, True]], {"a": "b", "1": "{3}"}]
    assert final("FINAL([float('nan')])")[0] != final("FINAL(float('nan'))")
    assert final("FINAL({(1, 2): object})") == {"(1, 2)": "<class 'object'>"}
    assert final("x = [1]; x.append(x); FINAL(x)") == [1, "[1, [...]]"]
    assert final("class A:\n    def __str__(self): raise ValueError\nFINAL([A()])") == [
        "<unprintable>"]
    assert final("FINAL(10 ** 5000)") == "<unprintable>" and final("FINAL(2 ** 99)") == 2**99
    deep = final("x = []\nfor _ in range(500): x = [x]\nFINAL(x)")
    assert json.dumps(deep).count("[") == 501  # 100 lists, and the rest as text


def test_final_none_and_output_before():
    assert run("print('a'); FINAL(None); print('b')")[0] == Result(stdout="a\n", done=True)


def test_final_cannot_be_swallowed():
    start = time.monotonic()
    for after in ("while 1: pass", "1 / 0", "FINAL(2)", "llm_query('x')", "import os; os._exit(1)"):
        code = f"try: FINAL(1)\nexcept BaseException: pass\n{after}"
        assert run(code, "print(5)", seconds=30) == [Result(final=1, done=True)] * 2
    assert time.monotonic() - start < 10


def test_final_in_a_thread():
    code = "import threading\nt = threading.Thread(target=FINAL, args=(3,))\nt.start(); t.join()"
    assert final(code + "\nwhile True: pass") == 3


def test_final_var():
    one, two, three, four = run("x = 1; z = 2; FINAL_VAR('y')", "FINAL_VAR(x)", "print(x)",
                                "FINAL_VAR('x')")
    assert "NameError" in one.error and "'y'" in one.error and "x, z" in one.error
    assert "FINAL takes a value" in two.error and three.stdout == "1\n"
    assert four.done and four.final == 1


def test_answer_variable():
    one, two = run("answer['content'] = {'a': 1}", "answer['ready'] = True; 1 / 0")
    assert not one.done and two.done and two.final == {"a": 1}
    one, two = run("answer = 'mine'", "FINAL_VAR('answer')")
    assert two.final == "mine"


def test_an_answer_too_large_is_an_error():
    one, two = run("FINAL('x' * 100)", "FINAL('x' * 98)", answer_chars=100)
    assert "ValueError: FINAL: the answer has 102 characters" in one.error and not one.done
    assert two.final == "x" * 98


# --- queries --------------------------------------------------------------------------------------


def test_queries():
    def ask(code):
        return final(f"FINAL({code})", on_query=scripted)

    assert ask("llm_query('a')") == ["llm", "a", None]
    assert ask("llm_query_batched(['a', 2])") == [["llm", "a", None], ["llm", "2", None]]
    assert ask("rlm_query('a')") == ["rlm", "a", None]
    assert ask("rlm_query('a', {'k': ('v',)})") == ["rlm", "a", {"k": ["v"]}]
    assert ask("rlm_query_batched('a', ['b', 'c'])") == [["rlm", "a", "b"], ["rlm", "a", "c"]]
    assert ask("rlm_query_batched('a')") == [["rlm", "a", None]]
    assert ask("rlm_query_batched(['a', 'b'])") == [["rlm", "a", None], ["rlm", "b", None]]
    assert ask("[rlm_query_batched([], []), llm_query_batched([])]") == [[], []]


def test_wrong_queries_are_errors_inside():
    async def never(*_):
        raise AssertionError("asked")

    one, two = run("rlm_query_batched(['a'], ['b', 'c'])", "rlm_query_batched('a', 'text')",
                   on_query=never)
    assert "ValueError: 1 prompts but 2 contexts" in one.error and "TypeError" in two.error


def test_nobody_answers():
    one = run("print(llm_query_batched(['a', 'b']))")[0]
    assert one.stdout.count("Error: no model answers queries here") == 2


def test_too_many_queries():
    code = "print(len(llm_query_batched('ab' 'c'.split() * 3))); print(llm_query_batched([1, 2]))"
    for result in run(code, code, on_query=scripted, queries=4):  # counted a block
        assert result.stdout.startswith("3\n['Error: a block may ask 4 queries")


def test_queries_from_threads():
    code = ("from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "FINAL(list(Pool(8).map(llm_query, 'abcdefgh')))")
    assert final(code, on_query=scripted) == [["llm", c, None] for c in "abcdefgh"]


def test_the_clock_stops_for_queries():
    async def slow(kind, prompts, contexts):
        await asyncio.sleep(2.2)
        return prompts

    one, two = run("print(llm_query('a'))", "llm_query('a')\nwhile True: pass", on_query=slow,
                   seconds=2)
    assert one == Result(stdout="a\n") and two.died == "timeout"


def test_a_failing_query_is_the_machines_failure():
    async def fails(*_):
        raise OSError("no such model")

    async def too_few(*_):
        return []

    with pytest.raises(OSError, match="no such model"):
        run("try: llm_query('a')\nexcept BaseException: pass", on_query=fails)
    with pytest.raises(ValueError, match="0 answers to 1 prompts"):
        run("llm_query('a')", on_query=too_few)


# --- limits ---------------------------------------------------------------------------------------


def test_a_deadline_holds_while_the_event_loop_is_blocked():
    loop_forever = "\nwhile True:\n  try:\n    while True: pass\n  except BaseException: pass"

    async def go():
        async with REPL("", limits=limits(seconds=1)) as repl:
            code = "import os\nif os.fork() == 0:\n  while True: pass\nllm_query('')"
            pids = []

            async def note(kind, prompts, contexts):
                pids.extend(family(Handle.current.process.pid))
                assert len(pids) == 2 and all(map(alive, pids))  # the clock stands still
                return [""]

            block = asyncio.create_task(repl.execute(code + loop_forever, note))
            while not pids:
                assert not block.done(), block
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            eventually(lambda: not any(map(alive, pids)), 60)  # blocks like a forward pass
            result = await block
            assert result.died == "timeout" and "more than 1 s" in result.error
            assert await repl.execute("print(1)") == result

    asyncio.run(go())


def test_output_is_cut():
    one, two = run("for i in range(1000): print('x' * 100_000)", "print(1)", output_chars=50)
    assert one.stdout == "x" * 50 + "\n... [100000950 characters cut]" and two.stdout == "1\n"
    assert len(run("raise ValueError('x' * 10 ** 7)", output_chars=200)[0].error) < 300


def test_memory_and_files():
    one, two = run("x = bytearray(10 ** 9)", "open('f', 'w').write('x' * (3 << 20))",
                   memory_mb=500, file_mb=1)
    assert "MemoryError" in one.error or one.died == "crash"
    assert "OSError" in two.error
    hog = "x = []\nwhile True: x.append(' ' * 1000)"
    result = run(hog, memory_mb=200)[0]
    assert "MemoryError" in result.error or result.died == "crash"


FORGE = """
import json, os, stat, struct
def is_socket(fd):
    try: return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError: return False
fd, = [fd for fd in range(3, 4096) if is_socket(fd)]
def send(kind, payload): os.write(fd, struct.pack("!Ic", len(payload), kind) + payload)
"""


@pytest.mark.parametrize("code, how", [
    ("import os; os._exit(3)", "exit code 3"),
    ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ("import ctypes; ctypes.string_at(0)", "signal 11"),
    ("import os; os.kill(os.getpid(), 40)", "signal 40"),
    (FORGE + "os.close(fd)", ""),
])
def test_crashes(code, how):
    if "os.kill" in code and isolated():
        pytest.skip("the first process of a namespace cannot signal itself to death")
    one, two = run(code, "print(1)")
    assert one.died == "crash" and how in one.error and one == two and not one.done


GOOD = '{"stdout": "", "error": "", "final": null, "done": false, "died": ""}'


@pytest.mark.parametrize("attack", [
    "send(b'D', b'not json')", "send(b'D', b'[]')", "send(b'D', b'{\"stdout\": 5}')",
    "send(b'D', b'[' * 100000)", "send(b'Z', b'')", "send(b'R', b'[]')", "send(b'X', b'{}')",
    "send(b'Q', b'[\"rm\", [\"a\"], null]')", "send(b'Q', b'[\"llm\", [1], null]')",
    "send(b'Q', b'[\"rlm\", [\"a\"], [1, 2]]')", "send(b'Q', b'{}'); send(b'Q', b'{}')",
    "os.write(fd, b'\\xff' * 5)", "os.write(fd, b'\\xff' * 500)", "send(b'Q', b'\\xff\\xfe')",
    "send(b'D', (GOOD.replace('\"\"', '\"' + 'x' * 10 ** 5 + '\"', 1)).encode())",
])
def test_forged_frames(attack):
    code = f"GOOD = {GOOD!r}\n{FORGE}\n{attack}\nwhile True: pass"
    result = run(code, seconds=5, answer_chars=1000, output_chars=100, on_query=scripted)[0]
    assert result.died == "protocol", result


def test_a_forged_result_harms_its_own_repl_only():
    code = f"{FORGE}\nsend(b'D', {GOOD.encode()!r})"  # and the honest one comes out of turn
    one, two = run(code, "import time; time.sleep(1)")
    assert one == Result() and two.died in ("protocol", "")


def test_forks_of_the_code_are_not_the_repl():
    code = """
import os
if (pid := os.fork()) == 0:
    try: FINAL("child")
    except RuntimeError: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if (pid := os.fork()) != 0: os.waitpid(pid, 0); print("parent")
"""
    assert run(code)[0] == Result(stdout="7\nparent\n")


# --- what surrounds it ----------------------------------------------------------------------------


def test_nothing_is_inherited(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    Handle.stop()
    with open("/etc/hostname"):
        code = "import os, sys\nFINAL([dict(os.environ), os.listdir('/proc/self/fd'), os.getcwd(), "
        environment, descriptors, cwd, modules = final(
            code + "[m for m in ('torch', 'repl') if m in sys.modules]])"
        )
    assert set(environment) == {"PATH", "LANG", "HOME", "TMPDIR"}
    assert environment["HOME"] == environment["TMPDIR"] == cwd
    assert len(descriptors) == 5 and modules == []  # 0, 1, 2, the socket, and listdir's own


def test_the_directory_is_its_own_and_goes():
    one, two, three = run("import os; print(os.getcwd())", "os.mkdir('a'); open('a/b', 'w')",
                          "import tempfile; print(tempfile.gettempdir())")
    assert one.stdout == three.stdout and not two.error
    assert not os.path.exists(one.stdout.strip()) or not isolated()
    eventually(lambda: directories() == [])


def test_many_at_once_and_nothing_is_left():
    run("")
    server = Handle.current.process.pid

    def rested():
        """All spares are made, and none of others is left: two looks say the same."""
        first = len(children(server)), descriptors(server)
        time.sleep(0.1)
        return first[0] == 8 and not workers(server) and first[1] == descriptors(server)

    eventually(rested, 60)
    before = descriptors(server)

    async def one(i):
        async with REPL(str(i), limits=limits()) as repl:
            codes = ["FINAL(llm_query(context))", "1 / 0", "while True: pass", "print(context)"]
            seconds = 20 if i % 4 != 2 else 0.3
            return i, await asyncio.wait_for(repl.execute(codes[i % 4], scripted), seconds)

    async def go():
        return await asyncio.gather(*map(one, range(100)), return_exceptions=True)

    done = [r for r in asyncio.run(go()) if isinstance(r, tuple)]
    assert len(done) == 75
    assert all(r.final == ["llm", str(i), None] for i, r in done if i % 4 == 0)
    assert all(r.stdout == f"{i}\n" for i, r in done if i % 4 == 3)
    eventually(lambda: not workers(server) and descriptors(server) == before)
    assert Handle.current.process.pid == server
    eventually(lambda: directories() == [])


def test_spares_are_used_replaced_and_follow_the_limits():
    def spares(files=99):
        """Those made for so many open files; others that were ended may not be gone yet."""
        found = set()
        for pid in set(children(server)) - set(workers(server)):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if re.search(rf"Max open files +{files} ", Path(f"/proc/{pid}/limits").read_text()):
                    found.add(pid)
        return found

    async def go(**more):
        async with REPL("", limits=limits(**more)) as repl:
            result = await repl.execute("import resource as r\nFINAL(r.getrlimit(r.RLIMIT_NOFILE))")
            return result.final[0]

    asyncio.run(go(open_files=99))
    server = Handle.current.process.pid
    eventually(lambda: len(spares()) == 8)
    before = spares()
    assert asyncio.run(go(open_files=99)) == 99
    eventually(lambda: len(spares()) == 8)
    assert len(spares() & before) == 7  # one was used, and one made in its place
    for pid in map(int, spares()):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(spares()) == 8 and not spares() & before)
    assert asyncio.run(go(open_files=98)) == 98  # none of those made for 99
    eventually(lambda: len(spares(98)) == 8 and not spares(99))


def test_a_worker_that_dies_while_its_context_arrives():
    async def go():
        with pytest.raises(REPLError, match="did not start.*MemoryError|did not start.*ended"):
            await REPL("x" * (60 << 20), limits=limits(memory_mb=90)).__aenter__()
        async with REPL("y", limits=limits()) as repl:
            assert (await repl.execute("FINAL(context)")).final == "y"

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_slow_reader_blocks_nobody():
    async def go():
        async with REPL("", limits=limits()) as slow, REPL("", limits=limits()) as other:
            await slow._send(b"X", {"code": "llm_query('x' * (20 << 20))"})  # and nobody reads it
            await asyncio.sleep(0.3)
            assert (await asyncio.wait_for(other.execute("FINAL(1)"), 60)).final == 1

    asyncio.run(go())


def test_large_values():
    async def echo(kind, prompts, contexts):
        return contexts

    text = "é" * (4 << 20)
    assert final("FINAL(len(rlm_query('', context)))", context=text, on_query=echo) == len(text)
    one, two = run("llm_query('x' * (2 << 20))", "print(1)", frame_mb=1)
    assert "the limit is 1" in one.error and two.stdout == "1\n"
    with pytest.raises(REPLError, match="the limit is 1"):
        run(context="x" * (2 << 20), frame_mb=1)


def test_a_start_that_fails_is_the_machines_failure():
    with pytest.raises(REPLError, match="ZeroDivisionError"):
        run(tools="1 / 0")
    with pytest.raises(REPLError, match="did not start"):
        run(context="x" * (100 << 20), memory_mb=150)


def test_a_lost_server():
    async def go():
        async with REPL("", limits=limits()) as repl:
            code = ("import os\nfor _ in range(2):\n  if os.fork() == 0:\n    while True: pass\n"
                    "llm_query('')\nwhile True: pass")
            block = asyncio.create_task(repl.execute(code, note))
            while not pids:
                await asyncio.sleep(0.01)
            os.kill(Handle.current.process.pid, signal.SIGKILL)
            with pytest.raises(REPLError, match="lost"):
                await block
            with pytest.raises(REPLError):
                await repl.execute("print(1)")
        eventually(lambda: not any(map(alive, pids if together else pids[:1])))
        for pid in filter(alive, pids):
            os.kill(int(pid), signal.SIGKILL)
        async with REPL("again", limits=limits()) as repl:
            assert (await repl.execute("FINAL(context)")).final == "again"

    async def note(kind, prompts, contexts):
        pids.extend(family(Handle.current.process.pid))
        return prompts

    pids, together = [], isolated()
    asyncio.run(go())


def test_cancelling_and_closing():
    async def go():
        repl = await REPL("", limits=limits()).__aenter__()
        await repl.execute("")
        pid, = workers(Handle.current.process.pid)
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


SCRIPT = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from repl import REPL, Handle, Limits
async def go():
    async with REPL("", limits=Limits(sandbox={mode!r})) as repl:
        return Handle.current.process.pid
first = asyncio.run(go())
if os.fork() == 0:
    print(first, asyncio.run(go()), Handle.current.base, flush=True)
    Handle.stop()
    os._exit(0)
os.wait()
print(asyncio.run(go()) == first, Handle.current.base, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_forks_and_the_end_of_the_trainer(end):
    script = SCRIPT.format(root=str(ROOT), end=end, mode=MODE)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], text=True,
                          capture_output=True)
    first, other, base, same, second = done.stdout.split()
    assert first != other and same == "True" and not done.stderr
    eventually(lambda: not alive(first) and not alive(other))
    eventually(lambda: not os.path.exists(base) and not os.path.exists(second))


REFUSED = """
import asyncio, sys
sys.path.insert(0, {root!r})
from repl import REPL, Handle, Limits, REPLError
async def start(mode):
    try:
        async with REPL("it runs", limits=Limits(sandbox=mode)) as repl:
            return (await repl.execute("FINAL(context)")).final
    except REPLError as error:
        return error
async def go():
    print(await start("auto"), await start("auto"), sep="\\n")
    Handle.stop()
    print(await start("auto"), await start("require"), await start("off"), sep="\\n")
asyncio.run(go())
"""


def test_where_the_kernel_refuses():
    code = REFUSED.format(root=str(ROOT))
    inside = "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\" -c \"$1\""
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", inside, sys.executable, code], text=True,
                          capture_output=True)
    if "unshare" in done.stderr and not done.stdout:
        pytest.skip("no user namespaces here")
    *good, required, off = done.stdout.splitlines()
    assert good == ["it runs"] * 3 and off == "it runs"
    assert "no namespaces" in required and "did not start" in required
    assert len(done.stderr.splitlines()) == 1 and "the sandbox has no namespaces" in done.stderr


# --- for people -----------------------------------------------------------------------------------


def command(*args, stdin=""):
    return subprocess.run([sys.executable, ROOT / "repl.py", *args], input=stdin, text=True,
                          capture_output=True, timeout=30, start_new_session=True)


def test_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world")
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    typed = "def f():\n    return 2\n\nprint(f())\n1 / 0\nx = )\nFINAL(context)\nprint('never')\n"
    done = command(a, stdin=typed)
    assert (done.returncode, done.stdout) == (0, "2\nhello\n")
    assert "ZeroDivisionError" in done.stderr and "SyntaxError" in done.stderr
    done = command(a, b, stdin="for k in context:\n  print(context[k])")
    assert (done.returncode, done.stdout) == (0, "hello\nworld\n")
    done = command(a, "--seconds", "0.2", stdin="while True: pass\n\n")
    assert done.returncode == 1 and "TimeoutError" in done.stderr
    assert command(stdin="text").returncode == 0
    done = command(str(tmp_path / "none.txt"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "none.txt" in done.stderr


def test_imports_are_of_the_standard_library():
    code = "import sys, repl; print([m for m in ('torch', 'numpy', 'rlm') if m in sys.modules])"
    with contextlib.chdir(ROOT):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
