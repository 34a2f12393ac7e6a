"""What a hostile block gets, with namespaces and without, and that nothing of it is left.

CASES is the table. All cases of a mode run side by side in one event loop, once; then each
has a test of its own. Cases marked `ns` would harm the host if they ran loose on it: they
only run where a process namespace was seen from inside. After all of them a REPL must work,
and no process, zombie, descriptor or directory may be left.
"""

import asyncio
import contextlib
import functools
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT

from repl import REPL, Handle, Limits, REPLError, Result, json_value

MARK = f"h0s{os.getpid()}-"  # in the name of a file that a case makes outside
SMALL = dict(
    seconds=20, cpu_seconds=20, memory_mb=256, output_chars=2000, file_mb=1, disk_mb=8,
    open_files=64, processes=32, answer_chars=10_000, queries=100, frame_mb=4)
TIGHT = 0.1  # seconds, for the cases that are to be ended by the clock


@dataclass
class Case:
    """`expect` and `then` are alternatives, joined by " | ", of

        timeout, crash, protocol    how it died; with TEXT, which is in its error
        error TEXT                  it lives on, and TEXT is in its error
        prints TEXT                 it lives on, without an error, and TEXT is in its output
        final JSON                  it answered
        any                         whatever, as long as the client gets a Result

    `then` is for the block `print(len("abc"), context)` after it, if the case neither died
    nor answered. `mode`: both, ns (with namespaces only) or off (only without).
    """

    name: str
    code: str
    expect: str
    mode: str = "both"
    then: str = "prints 3 "
    context: object = "c"
    limits: dict = field(default_factory=dict)


def case(name, code, expect, mode="both", then="prints 3 ", context="c", **most):
    if "timeout" in expect + then:
        most = {"seconds": TIGHT, **most}
    return Case(name, code, expect, mode, then, context, most)


def ns(name, code, expect, **options):
    return case(name, code, expect, mode="ns", **options)


def forged(name, code):
    return case(name, code + LOOP, "protocol", seconds=5)


def answers(name, value, json_text, **options):
    return case(name, f"FINAL({value})", f"final {json_text}", **options)


# Runs as a block before each case: finds the private descriptor.
PREPARE = """
import ctypes, json, os, resource, signal, socket, stat, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def is_socket(n):
    try: return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError: return False
fd = [n for n in map(int, os.listdir('/proc/self/fd')) if is_socket(n)][-1]
def send(kind, payload): os.write(fd, struct.pack("!Ic", len(payload), kind) + payload)
GOOD = dict(stdout="", error="", final=None, done=False, died="")
def result(**fields): send(b"D", json.dumps(dict(GOOD, **fields)).encode())
trainer, port, secret, root = {world}
"""
# Nothing of a case marked `ns` runs if this fails.
INSIDE = "assert os.readlink('/proc/self/ns/pid') != {ours!r}, 'no process namespace'\n"

LOOP = "\nwhile True: pass"
IGNORE = """
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""
DEEP = "x = []\nfor _ in range(%d): x = [x]\n"
DEEP_JSON = json.dumps(json_value(functools.reduce(lambda x, _: [x], range(300), [])))
SPREAD = "x = 0\nfor _ in range(40): x = [x, x]\n"

TIME = [
    case("loop-ignores-signals", IGNORE + LOOP, "timeout"),
    case("stop-oneself", "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "timeout"),
    case("cpu", LOOP, "crash by signal", seconds=20, cpu_seconds=1),
]

MEMORY = [
    case("list-of-10-gb", "x = [0] * (10 << 27)", "error MemoryError"),
    case("spread", SPREAD + "FINAL(x)", "timeout | error MemoryError | crash", then="any"),
    case("print-100-mb", "print('x' * 10 ** 8)",
         "prints " + "x" * 2000 + "\n... [99998001 characters cut]"),
    case("print-past-the-capture",
         "sys.__stdout__.write('x' * 10 ** 7)\nos.write(2, b'x' * 9999)", "prints"),
    case("huge-error", "raise ValueError('x' * 10 ** 7)", "error characters cut]"),
    case("one-file", "open('f', 'w').write('x' * (9 << 20))", "error OSError"),
    ns("fill-the-disk", "for i in range(64): open(str(i), 'wb').write(bytes(1 << 20))",
       "error OSError"),
    case("locked-directory", "os.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)", "prints"),
    case("open-files", "x = []\nwhile True: x.append(open('/dev/null'))",
         "error Too many open"),
    ns("raise-the-limits", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
       "error ValueError | error PermissionError"),
]

PROCESSES = [
    case("segfault", "ctypes.string_at(0)", "crash by signal 11"),
    case("forks", "if (pid := os.fork()) == 0:\n"
         "  try: FINAL(1)\n  except RuntimeError: os._exit(7)\n"
         "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
         "if (pid := os.fork()) != 0: os.waitpid(pid, 0); print('parent')",
         "prints 7\nparent"),
    ns("fork-bomb", "while True: os.fork()", "timeout | error BlockingIOError | crash",
       then="any"),
    case("another-session", "if os.fork() == 0: os.setsid(); time.sleep(60)\nprint('left')",
         "prints left"),
    case("kill-oneself", "os.kill(os.getpid(), 9); time.sleep(9)", "crash by signal 9",
         mode="off"),
    ns("kill-oneself", "os.kill(os.getpid(), 9); print('alive')", "prints alive"),
    case("kill-ones-group", "os.killpg(os.getpgrp(), 9); time.sleep(9)", "crash",
         mode="off"),
    ns("kill-the-trainer", "os.kill(trainer, 9)", "error Error"),
    ns("namespaces-of-its-own", "libc.unshare(0x10020000)  # a user and a mount namespace\n"
       "print(libc.mount(0, b'/', 0, 4096 | 32, 0), libc.umount2(b'/', 2))",
       "prints -1 -1"),
]

PROTOCOL = [
    forged("write-everywhere", "for n in range(3, 4096):\n"
           "  try: os.write(n, b'x' * 100)\n  except OSError: pass\n"),
    forged("length-of-4-gb", "os.write(fd, b'\\xff' * 4 + b'D')"),
    case("half-a-frame-and-exit",
         "os.write(fd, struct.pack('!Ic', 99, b'D') + b'{'); os._exit(0)", "crash"),
    forged("unknown-kind", "send(b'Z', b'')"),
    forged("pretend-no-start", "send(b'S', b'1')"),
    forged("pretend-that-it-failed", "send(b'F', json.dumps(GOOD).encode())"),
    forged("no-json", "send(b'D', b'{')"),
    forged("wrong-types", "result(stdout=[1])"),
    forged("deep-json", "send(b'D', b'[' * 10 ** 5)"),
    forged("large-result", "result(stdout='x' * 10 ** 6)"),
    case("forged-result", "result()", "prints", then="protocol | prints"),
    forged("forged-cause-of-death", "result(died='machine')"),
    forged("forged-query", "send(b'Q', b'[\"llm\", [1], null]')"),
    forged("too-few-contexts", "send(b'Q', b'[\"rlm\", [\"a\", \"b\"], [1]]')"),
    case("query-flood", "while True: send(b'Q', b'[\"llm\", [\"a\"], null]')",
         "protocol", seconds=5),
    # The kernel counts descriptors in flight per user: a second suite may use them up.
    case("descriptors-in-a-frame", "socket.send_fds(socket.socket(fileno=os.dup(fd)), "
         "[struct.pack('!Ic', 0, b'Z')], [0] * 100)" + LOOP,
         "protocol | error Too many references", seconds=5),
    case("close-all", "os.closerange(0, 4096)" + LOOP, "crash", seconds=5),
    case("query-after-the-block", "def f(): time.sleep(0.1); llm_query('a')\n"
         "threading.Thread(target=f).start()", "prints"),
]

STATE = [
    case("exit-function", "exit()", "error SystemExit"),
    case("import-the-repl", "import repl", "error ModuleNotFoundError"),
    case("no-import", "import builtins; del builtins.__import__, builtins.__build_class__",
         "prints"),
    case("json-dumps", "json.dumps = lambda *a, **k: 'null'", "protocol"),
    case("recursion-limit-low", "sys.setrecursionlimit(20)",
         "prints | error RecursionError"),
    case("str-raises", "class E(Exception):\n  def __str__(self): raise E\nraise E",
         "error E"),
]

ODD = {"\ud800 \udfff": ["a\0b\0", float("nan"), None, [], "\r\n\x85\u2028" * 200]}
VALUES = [
    answers("nested", "(1, [2.5, (None, True)], {'a': b'b', 1: {3}, (2,): len})",
            """[1, [2.5, [null, true]], {"a": "b'b'", "1": [3], """
            """"(2,)": "<built-in function len>"}]"""),
    answers("odd-context", "context", json.dumps(ODD), context=ODD),
    case("deep", DEEP % 300 + "FINAL(x)", f"final {DEEP_JSON}"),
    case("large-integer", "FINAL(10 ** 5000)", "error ValueError"),
    case("cyclic", "x = [1]; x.append(x); FINAL(x)", 'final [1, "[1, [...]]"]'),
    case("str-of-value-raises",
         "class A:\n  def __str__(self): raise ValueError\nFINAL([A()])",
         "error ValueError"),
    case("answer-lies", "class D(dict): get = lambda s, k: 1 / 0\nanswer = D()",
         "error ZeroDivisionError", then="any"),
]

NEITHER = "error FileNotFoundError | error PermissionError | error OSError"
SECRETS = [
    answers("environment", "sorted(os.environ)", '["HOME", "LANG", "PATH", "TMPDIR"]'),
    answers("directory", "{os.getcwd()} == {*map(os.environ.get, ['HOME', 'TMPDIR']), "
            "__import__('tempfile').gettempdir()}", "true"),
    answers("environment-in-proc", "b'hush' in open('/proc/self/environ', 'rb').read()",
            "false"),
    answers("descriptors", "len(os.listdir('/proc/self/fd'))", "5"),
    ns("processes",
       "print([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 99])",
       "prints [] | " + NEITHER),
    ns("a-file", "print(open(secret).read())", NEITHER),
    ns("repository", "open(root + '/README.md').read()", NEITHER),
    ns("shadow", "open('/etc/shadow').read()", NEITHER),
    ns("write-to-etc", f"open('/etc/{MARK}', 'w')", NEITHER),
    ns("tcp", "socket.create_connection(('127.0.0.1', port), 5)",
       "error OSError | error Refused"),
    case("tcp-loose", "socket.create_connection(('127.0.0.1', port), 5).send(b'loose')",
         "prints", mode="off"),
]

CASES = TIME + MEMORY + PROCESSES + PROTOCOL + STATE + VALUES + SECRETS


def meets(expect, result):
    """Whether a Result is one of the alternatives."""
    for alternative in expect.split(" | "):
        kind, _, text = alternative.partition(" ")
        if kind == "any":
            return True
        if kind == "final" and result.done:
            if not text or json.dumps(result.final) == text:
                return True
        elif result.died or result.done:
            if kind == result.died and text in result.error:
                return True
        elif kind == "error" and result.error and text in result.error:
            return True
        elif kind == "prints" and not result.error and text in result.stdout:
            return True
    return False


async def ok(kind, prompts, contexts):
    await asyncio.sleep(0.002)
    return ["ok"] * len(prompts)


@contextlib.asynccontextmanager
async def a_world(mode):
    """A fresh server, a secret in the environment and in a file, somebody who listens.
    Gives the block that runs before each case, and the list of who connected."""
    Handle.stop()
    connected = []

    def connect(reader, writer):
        connected.append(writer)
        writer.close()

    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as secret:
        patch.setenv("SECRET_TOKEN", "hush")
        async with await asyncio.start_server(connect, "127.0.0.1", 0) as listener:
            async with REPL("", limits=limits_of(mode)) as repl:
                await repl.execute("")  # starts the server
            await asyncio.sleep(0.3)  # until that REPL is gone
            port = listener.sockets[0].getsockname()[1]
            prepare = PREPARE.format(world=(os.getpid(), port, secret.name, str(ROOT)))
            if mode == "require":
                prepare += INSIDE.format(ours=os.readlink("/proc/self/ns/pid"))
            yield prepare, connected


def limits_of(mode, **more):
    return Limits(**{**SMALL, **more}, sandbox=mode)


async def play(case, mode, prepare):
    """Play a case and the block after it. Returns what is wrong, or ""."""
    limits = limits_of(mode, **case.limits)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(9):  # a busy machine may take longer than TIGHT for this already
            repl = await stack.enter_async_context(REPL(case.context, limits=limits))
            ready = await repl.execute(prepare)
            if ready.died != "timeout":
                break
        assert ready == Result(), ready
        first = await repl.execute(case.code, ok)
        if not meets(case.expect, first):
            return f"expected {case.expect}, got {first}"
        if first.died or first.done:
            return ""
        then = await repl.execute('print(len("abc"), context)', ok)
        return "" if meets(case.then, then) else f"then expected {case.then}, got {then}"


def below(pid):
    """How many processes descend from it, zombies included."""
    with contextlib.suppress(OSError):  # it may end meanwhile
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return len(children) + sum(map(below, children))
    return 0


def left():
    """What may leak, as numbers and names: equal before and after."""
    server = Handle.current.process.pid
    files = [*Path("/etc").glob(f"{MARK}*")]
    if Handle.current.sandbox != "off":  # else they go when the server ends
        files += os.listdir(Handle.current.base)
    descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", server)]
    return server, descriptors, below(server), files


async def one(case, mode, prepare, places):
    """What is wrong with a case."""
    async with places:
        try:
            async with asyncio.timeout(300):
                return await play(case, mode, prepare)
        except Exception as error:  # the trainer's side must never raise for what code does
            return f"raised {error!r}"


def cases_of(mode):
    return [c for c in CASES if c.mode in ("both", "ns" if mode == "require" else "off")]


@functools.cache
def played(mode):
    """All cases of a mode, 16 at a time: what is wrong with each, and what is left."""

    async def go():
        async with a_world(mode) as (prepare, connected):
            before, places = left(), asyncio.Semaphore(16)
            cases = sorted(cases_of(mode), key=lambda c: "timeout" not in c.expect)
            wrong = await asyncio.gather(*[
                one(case, mode, prepare, places) for case in cases])
            assert not await play(answers("next", "context", '"c"'), mode, prepare)
            end = time.monotonic() + 60
            while left() != before and time.monotonic() < end:
                await asyncio.sleep(0.2)
            leaks = before, left(), len(connected)
            return {c.name: w for c, w in zip(cases, wrong)}, leaks

    try:
        return asyncio.run(go())
    except REPLError as error:  # before the first case: there are no namespaces here
        pytest.skip(str(error))


@pytest.mark.parametrize("mode, name", [
    (mode, case.name) for mode in ("require", "off") for case in cases_of(mode)])
def test_case(mode, name):
    assert not played(mode)[0][name]


@pytest.mark.parametrize("mode", ["require", "off"])
def test_nothing_is_left(mode):
    before, after, connections = played(mode)[1]
    assert after == before and connections == (mode == "off")
