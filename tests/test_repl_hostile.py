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
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from repl import REPL, Handle, Limits, REPLError, Result, json_value

ROOT = Path(__file__).resolve().parent.parent
MARK = f"h0s{os.getpid()}-"  # in the name of every file that a case makes outside
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


def wild(name, code, expect, **options):
    """What the block after it meets is left open."""
    return case(name, code, expect, then="any", **options)


def forged(name, code):
    return case(name, code + LOOP, "protocol", seconds=5)


ASK_ON = """
def ask():
    while True: llm_query('a')
for _ in range(4): threading.Thread(target=ask, daemon=True).start()
"""


def answers(name, value, json_text, **options):
    return case(name, f"FINAL({value})", f"final {json_text}", **options)


# Runs as a block before each case: finds the private descriptor.
PREPARE = """
import ctypes, itertools, json, os, resource, signal, socket, stat, struct, subprocess, sys
import threading, time
libc = ctypes.CDLL(None, use_errno=True)
def is_socket(n):
    try: return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError: return False
fd = [n for n in map(int, os.listdir('/proc/self/fd')) if is_socket(n)][-1]
def send(kind, payload): os.write(fd, struct.pack("!Ic", len(payload), kind) + payload)
GOOD = dict(stdout="", error="", final=None, done=False, died="")
def result(**fields): send(b"D", json.dumps(dict(GOOD, **fields)).encode())
def double_fork(then):
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            then()
        os._exit(0)
    try: os.waitpid(pid, 0)
    except ChildProcessError: pass
trainer, server, port, secret, home, root = {world}
"""
# Nothing of a case marked `ns` runs if this fails.
INSIDE = "assert os.readlink('/proc/self/ns/pid') != {ours!r}, 'no process namespace'\n"

LOOP = "\nwhile True: pass"
GRANDCHILD = "double_fork(lambda: time.sleep(60)); print('left')"
STOP = """
def stop(*_): raise ZeroDivisionError
signal.signal(signal.SIGALRM, stop)
"""
# The code's own signal handlers run at any time: what is asked is that the client hears.
ANYHOW = "prints | error ZeroDivisionError | timeout | protocol | crash"
TIMER = "signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)\n"
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
    case("regex", "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", "timeout"),
    case("stop-oneself", "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "timeout"),
    case("loop-in-a-child", "if os.fork() == 0:\n  while True: pass\nos.wait()", "timeout"),
    wild("timer-raises",
         "def f(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGALRM, f)\n"
         + TIMER + "time.sleep(9)", "error KeyboardInterrupt | crash"),
    wild("profile-raises", "sys.setprofile(lambda *a: 1 / 0)",
         "error ZeroDivision | prints"),
    ns("cpu", "os.fork()" + LOOP, "crash | timeout", seconds=10, cpu_seconds=1),
]

MEMORY = [
    case("list-of-10-gb", "x = [0] * (10 << 27)", "error MemoryError"),
    wild("slow-growth", "x = []\nwhile True: x.append(' ' * 1000)",
         "error MemoryError | crash", seconds=120),
    wild("spread", SPREAD + "FINAL(x)", "timeout | error MemoryError | crash"),
    case("print-forever", "while True: print('x' * 10 ** 4)", "timeout"),
    case("print-100-mb", "print('x' * 10 ** 8)",
         "prints " + "x" * 2000 + "\n... [99998001 characters cut]"),
    case("print-past-the-capture",
         "sys.__stdout__.write('x' * 10 ** 7)\nos.write(2, b'x' * 9999)", "prints"),
    case("huge-error", "raise ValueError('x' * 10 ** 7)", "error characters cut]"),
    case("one-file", "open('f', 'w').write('x' * (9 << 20))", "error OSError"),
    case("memfd", "f = os.memfd_create('f')\nwhile True: os.write(f, bytes(1 << 20))",
         "error OSError"),
    ns("fill-the-disk", "for i in range(64): open(str(i), 'wb').write(bytes(1 << 20))",
       "error OSError"),
    ns("fill-shared-memory",
       f"for i in range(64): open(f'/dev/shm/{MARK}{{i}}', 'wb').write("
       "bytes(1 << 20))", "error Error"),
    case("many-files", "for i in itertools.count(): open(str(i), 'w')",
         "timeout | error OSError"),
    wild("deep-directories", "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
         "prints | error OSError"),
    case("locked-directory", "os.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)", "prints"),
    case("odd-file-names", "open(b'\\xff\\n', 'w'); os.symlink('/', 'l'); os.mkfifo('p')",
         "prints"),
    case("open-files", "x = []\nwhile True: x.append(open('/dev/null'))",
         "error Too many open"),
    ns("raise-the-limits", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
       "error ValueError | error PermissionError"),
]

PROCESSES = [
    case("exit", "os._exit(3)", "crash with exit code 3"),
    case("real-time-signal", "os.kill(os.getpid(), 40); time.sleep(9)",
         "crash by signal 40", mode="off"),
    case("forks", "if (pid := os.fork()) == 0:\n"
         "  try: FINAL(1)\n  except RuntimeError: os._exit(7)\n"
         "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
         "if (pid := os.fork()) != 0: os.waitpid(pid, 0); print('parent')",
         "prints 7\nparent"),
    ns("fork-bomb", "while True: os.fork()", "timeout | error BlockingIOError | crash",
       then="any"),
    ns("fork-bomb-swallows", "while True:\n  try: os.fork()\n  except OSError: pass",
       "timeout"),
    ns("fork-bomb-new-sessions", "while True:\n  try:\n    if os.fork(): os.setsid()\n"
       "  except OSError: pass", "timeout"),
    ns("thread-bomb", "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
       "error RuntimeError | error MemoryError", then="any"),
    ns("process-bomb", "x = [subprocess.Popen(['sleep', '60']) for _ in range(99)]",
       "error BlockingIOError | error FileNotFoundError | error MemoryError"),
    case("grandchild", GRANDCHILD, "prints left"),
    case("grandchild-and-answer", GRANDCHILD + "; FINAL(1)", "final 1"),
    case("grandchild-and-loop", GRANDCHILD + LOOP, "timeout"),
    case("grandchild-and-crash", GRANDCHILD + "; os._exit(1)", "crash"),
    case("grandchild-ignores-signals", IGNORE + GRANDCHILD, "prints left"),
    ns("grandchild-runs-away", "def run():\n  while True:\n    if os.fork(): os._exit(0)\n"
       "    os.setsid(); time.sleep(0.001)\ndouble_fork(run)", "prints"),
    forged("grandchild-forges", "double_fork(lambda: (time.sleep(0.1), send(b'D', b'1')))"),
    case("shell", f"subprocess.Popen(['{MARK}', '-c', 'sleep 60; :'], executable='/bin/sh',"
         " start_new_session=True)", "prints | error FileNotFoundError"),
    case("segfault", "ctypes.string_at(0)", "crash by signal 11"),
    wild("stack-overflow", "sys.setrecursionlimit(10 ** 9)\nclass A:\n"
         "  def __getattr__(self, n): return getattr(self, n)\nA().x",
         "crash | error MemoryError"),
    case("kill-oneself", "os.kill(os.getpid(), 9); time.sleep(9)", "crash by signal 9",
         mode="off"),
    case("kill-ones-group", "os.killpg(os.getpgrp(), 9); time.sleep(9)", "crash",
         mode="off"),
    ns("kill-all", "os.kill(-1, 9); time.sleep(0.2); print(1)", "crash | prints | error",
       then="any"),
    ns("kill-the-trainer", "os.kill(trainer, 9)", "error Error"),
    ns("kill-the-server", "os.kill(server, 9)", "error Error"),
    ns("kill-every-id", "for p in range(2, 10 ** 5):\n  try: os.kill(p, 9)\n"
       "  except OSError: pass", "crash | prints", then="any"),
    ns("unmount", "print([libc.umount2(p, 2) for p in (b'/', b'/proc', b'/usr', b'/tmp')])",
       "prints [-1, -1, -1, -1]"),
    ns("remount", "print(libc.mount(0, b'/', 0, 4096 | 32, 0))", "prints -1"),
    ns("namespaces-of-its-own", "libc.unshare(0x10020000)  # a user and a mount namespace\n"
       "print(libc.mount(0, b'/', 0, 4096 | 32, 0), libc.umount2(b'/', 2))",
       "prints -1 -1"),
    ns("a-disk", f"os.mknod('{MARK}', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\n"
       f"open('{MARK}', 'rb').read(1)", "error Error"),
]

PROTOCOL = [
    forged("write-everywhere", "for n in range(3, 4096):\n"
           "  try: os.write(n, b'x' * 100)\n  except OSError: pass\n"),
    forged("length-of-4-gb", "os.write(fd, b'\\xff' * 4 + b'D')"),
    case("half-a-frame-and-exit",
         "os.write(fd, struct.pack('!Ic', 99, b'D') + b'{'); os._exit(0)", "crash"),
    case("half-a-frame-and-return", "os.write(fd, struct.pack('!Ic', 9999, b'D') + b'{')",
         "timeout"),
    case("half-a-header", "os.write(fd, b'\\0\\0')", "protocol | timeout"),
    forged("unknown-kind", "send(b'Z', b'')"),
    forged("no-json", "send(b'D', b'{')"),
    forged("wrong-types", "result(stdout=[1])"),
    forged("deep-json", "send(b'D', b'[' * 10 ** 5)"),
    case("deep-answer", DEEP % 300 + "result(done=True, final=x)" + LOOP,
         f"protocol | final {DEEP_JSON}", seconds=5),
    forged("large-result", "result(stdout='x' * 10 ** 6)"),
    case("forged-result", "result()", "prints", then="protocol | prints"),
    case("forged-answer", "result(done=True, final=[1])" + LOOP, "final [1]"),
    case("forged-death", "result(died='timeout')", "timeout | protocol"),
    forged("forged-cause-of-death", "result(died='machine')"),
    forged("forged-query", "send(b'Q', b'[\"llm\", [1], null]')"),
    forged("answers", "send(b'R', b'[]')"),
    case("query-flood", "while True: send(b'Q', b'[\"llm\", [\"a\"], null]')",
         "protocol", seconds=5),
    case("query-and-no-reading", "send(b'Q', b'[\"llm\", [\"a\"], null]')" + LOOP,
         "timeout"),
    # The kernel counts descriptors in flight per user: a second suite may use them up.
    case("descriptors-in-a-frame", "socket.send_fds(socket.socket(fileno=os.dup(fd)), "
         "[struct.pack('!Ic', 0, b'Z')], [0] * 100)" + LOOP,
         "protocol | error Too many references", seconds=5),
    case("close-it", "os.close(fd)", "crash"),
    case("close-all", "os.closerange(0, 4096)" + LOOP, "crash", seconds=5),
    case("close-the-standard-ones", "for n in (0, 1, 2): os.close(n)", "prints"),
    case("replace-it", "os.dup2(os.open('/dev/null', os.O_RDWR), fd)",
         "crash | error Bad file"),
    case("shut-it-down", "socket.socket(fileno=os.dup(fd)).shutdown(2)", "crash"),
    case("steal-a-frame", "os.read(fd, 9)", "timeout"),
    case("no-blocking", "os.set_blocking(fd, False)", "prints", then="crash | prints 3 "),
    case("threads-ask-for-ever", ASK_ON + "FINAL(1)", "final 1", queries=100),
    case("threads-ask-for-ever-beside-a-loop", ASK_ON + "while True: pass",
         "protocol | timeout", queries=100, seconds=1),
    case("threads-ask-past-the-end", ASK_ON, "prints | protocol", queries=100,
         then="prints 3 | protocol"),
    *(wild(f"signals-end-queries{name}", STOP + "for i in range(1000):\n  try:\n"
           f"    signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + i % 100){again})\n"
           "    while True: llm_query('a')\n  except ZeroDivisionError: pass\n",
           ANYHOW, queries=10 ** 6)
      for name, again in [("", ""), ("-and-go-on", ", 1e-4")]),
    case("query-in-a-recursion", "def f(n): return llm_query(str(n)) + f(n + 1)\nf(0)",
         "error RecursionError", queries=1000),
    case("query-after-the-block", "def f(): time.sleep(0.1); llm_query('a')\n"
         "threading.Thread(target=f).start()", "prints"),
    case("query-in-a-fork",
         "if os.fork() == 0:\n  try: llm_query('a')\n  finally: os._exit(0)\n"
         "os.wait()", "prints"),
    case("query-in-a-handler",
         "signal.signal(signal.SIGALRM, lambda *_: llm_query('b'))\n" + TIMER
         + "while True: llm_query('a')", "timeout | error RecursionError | protocol"),
    case("odd-queries",
         "print(rlm_query_batched([None, b'', float('nan')], [{1}, print, '\\ud800'"
         "]))", "prints ['ok', 'ok', 'ok']"),
    wild("endless-queries", "llm_query_batched(itertools.repeat('a'))",
         "error MemoryError | crash | timeout"),
]

STATE = [
    case("exit-function", "exit()", "error SystemExit"),
    case("interrupt", "raise KeyboardInterrupt", "error KeyboardInterrupt"),
    case("surrogates-printed", r"print('\udfff')", "prints \udfff\n"),
    case("surrogates-in-the-code", "x = '\udfff'", "error UnicodeEncodeError"),
    case("import-the-repl", "import repl", "error ModuleNotFoundError"),
    case("import-the-server", "import sandbox.server", "error ModuleNotFoundError"),
    answers("modules",
            "sorted({'torch', 'repl', 'sandbox', 'util', 'asyncio'} & {*sys.modules})",
            "[]"),
    case("no-import", "import builtins; del builtins.__import__, builtins.__build_class__",
         "prints"),
    case("builtins-that-lie", "import builtins; builtins.isinstance = lambda *_: True\n"
         "builtins.BaseException = builtins.Exception = ValueError", "prints"),
    case("no-modules", "sys.modules.clear()", "prints"),
    case("json-dumps", "json.dumps = lambda *a, **k: 'null'", "protocol"),
    case("json-loads", "json.loads = None", "prints", then="crash"),
    case("getpid-lies", "os.getpid = lambda: 1 << 20", "crash"),
    case("the-worker",
         "import gc\nw = next(o for o in gc.get_objects() if type(o).__name__ == "
         "'Worker')\nw.capture.room = 10 ** 8; print('x' * 10 ** 6)", "protocol"),
    case("no-stdout", "sys.stdout = sys.stderr = None; print(1)", "prints"),
    case("stdout-raises",
         "class O:\n  def write(self, s): raise OSError('w')\nsys.stdout = O()\n"
         "print(1)", "error OSError: w"),
    case("recursion-limit-low", "sys.setrecursionlimit(20)",
         "prints | error RecursionError"),
    wild("recursion-limit-high", "sys.setrecursionlimit(2 ** 31 - 1)\ndef f(): f()\nf()",
         "error MemoryError | crash | timeout"),
    case("str-raises", "class E(Exception):\n  def __str__(self): raise E\nraise E",
         "error E"),
    case("str-loops",
         "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
         "timeout"),
]

CONTEXTS = {
    "surrogates": "\ud800 \udfff", "nul": "a\0b\0", "odd-keys": {"\ud800": ["\0"]},
    "nan": float("nan"), "empty": [], "none": None, "lines": "\r\n\x85\u2028" * 200,
    "deep": functools.reduce(lambda x, _: [x], range(90)),
}
VALUES = [
    answers("nested", "(1, [2.5, (None, True)], {'a': 'b', 1: {3}})",
            '[1, [2.5, [null, true]], {"a": "b", "1": [3]}]'),
    answers("class", "{(1, 2): object}", '{"(1, 2)": "<class \'object\'>"}'),
    answers("integer-that-fits", "2 ** 99", str(2**99)),
    case("deep-300", DEEP % 300 + "FINAL(x)", f"final {DEEP_JSON}"),
    answers("nan", "[float('nan'), float('inf'), 1e308 * 10]", "[NaN, Infinity, Infinity]"),
    answers("bytes", "b'\\xff\\0'", json.dumps(r"b'\xff\x00'")),
    answers("surrogates", "{'\\ud800': '\\udfff\\0'}", '{"\\ud800": "\\udfff\\u0000"}'),
    answers("keys", "{1: 'a', '1': 'b', None: 'c', (2,): 'd'}",
            '{"1": "b", "None": "c", "(2,)": "d"}'),
    case("large-integer", "FINAL(10 ** 5000)", "error ValueError"),
    case("cyclic", "x = [1]; x.append(x); FINAL(x)", 'final [1, "[1, [...]]"]'),
    case("cyclic-dict", "x = {}; x['x'] = x; FINAL(x)", 'final {"x": "{\'x\': {...}}"}'),
    wild("deep", DEEP % 10 ** 5 + "FINAL(x)",
         "error TypeError | error RecursionError | final"),
    case("str-of-value-raises",
         "class A:\n  def __str__(self): raise ValueError\nFINAL([A()])",
         "error ValueError"),
    case("str-of-value-exits", "class A:\n  def __str__(self): sys.exit()\nFINAL([A()])",
         "error SystemExit"),
    case("str-of-value-answers", "class A:\n  def __str__(self): FINAL(1)\nFINAL([A()])",
         "final 1"),
    case("lying-int", "class I(int): bit_length = lambda s: 1\nFINAL(I(10 ** 5000))",
         "error ValueError"),
    wild("lying-str", "class S(str): __getitem__ = lambda s, k: 'x' * 10 ** 6\n"
         "sys.stdout.write(S('a'))", "protocol | prints | crash"),
    case("lying-dict", "class D(dict): items = lambda s: itertools.count()\nFINAL(D(a=1))",
         "error TypeError"),
    wild("endless-list",
         "class L(list): __iter__ = lambda s: itertools.repeat(1)\nFINAL(L([1]))",
         "timeout | error MemoryError | crash"),
    wild("answer-lies", "class D(dict): get = lambda s, k: 1 / 0\nanswer = D()",
         "error ZeroDivisionError"),
    *[case(f"context-{name}", "FINAL(context)", f"final {json.dumps(value)}", context=value)
      for name, value in CONTEXTS.items()],
]

NEITHER = "error FileNotFoundError | error PermissionError | error OSError"
SECRETS = [
    answers("environment", "sorted(os.environ)", '["HOME", "LANG", "PATH", "TMPDIR"]'),
    answers("directory", "{os.getcwd()} == {*map(os.environ.get, ['HOME', 'TMPDIR']), "
            "__import__('tempfile').gettempdir()}", "true"),
    answers("environment-in-proc", "b'hush' in open('/proc/self/environ', 'rb').read()",
            "false"),
    ns("processes",
       "print([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 99])",
       "prints [] | " + NEITHER),
    ns("environment-of-the-trainer", "open(f'/proc/{trainer}/environ').read()", NEITHER),
    ns("memory-of-the-server", "open(f'/proc/{server}/mem').read(1)", NEITHER),
    ns("environment-of-init", "print('hush' in open('/proc/1/environ').read())",
       "prints False | " + NEITHER),
    ns("home",
       "print([f for f in os.listdir(home) if f'{home}/{f}/' not in sys.base_prefix])",
       "prints [] | " + NEITHER),
    ns("a-file", "print(open(secret).read())", NEITHER),
    ns("checkpoints", "open(root + '/README.md').read()", NEITHER),
    ns("shadow", "open('/etc/shadow').read()", NEITHER),
    ns("write-to-etc", f"open('/etc/{MARK}', 'w')", NEITHER),
    ns("tcp", "socket.create_connection(('127.0.0.1', port), 5)",
       "error OSError | error Refused"),
    case("tcp-loose", "socket.create_connection(('127.0.0.1', port), 5).send(b'loose')",
         "prints", mode="off"),
    ns("abstract-socket", f"socket.socket(socket.AF_UNIX).connect('\\0{MARK}' + str(port))",
       "error Error"),
    answers("descriptors", "len(os.listdir('/proc/self/fd'))", "5"),
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


@dataclass
class World:
    """What cases may attack or look for, and what they must not reach."""

    mode: str
    port: int
    secret: str
    connections: int = 0

    def prepare(self):
        places = (os.getpid(), Handle.current.process.pid, self.port, self.secret,
                  os.path.expanduser("~"), str(ROOT))
        inside = INSIDE.format(ours=os.readlink("/proc/self/ns/pid"))
        return PREPARE.format(world=places) + inside * (self.mode == "require")

    def connected(self, reader, writer):
        self.connections += 1
        writer.close()


@contextlib.asynccontextmanager
async def a_world(mode, tmp_path):
    """A fresh server, a secret in the environment and in a file, somebody who listens."""
    Handle.stop()
    secret = tmp_path / "secret"
    secret.write_text("hush")
    os.environ["SECRET_TOKEN"] = "hush"
    world = World(mode, 0, str(secret))
    try:
        listener = await asyncio.start_server(world.connected, "127.0.0.1", 0)
        async with listener:
            world.port = listener.sockets[0].getsockname()[1]
            with socket.socket(socket.AF_UNIX) as abstract:
                abstract.bind(f"\0{MARK}{world.port}")
                abstract.listen()
                async with REPL("", limits=limits_of(mode)) as repl:
                    await repl.execute("")  # starts the server
                await asyncio.sleep(0.3)  # until that REPL is gone
                yield world
    finally:
        del os.environ["SECRET_TOKEN"]


def limits_of(mode, **more):
    return Limits(**{**SMALL, **more}, sandbox=mode)


async def play(case, world):
    """Play a case and the block after it. Returns what is wrong, or ""."""
    limits = limits_of(world.mode, **case.limits)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(9):  # a busy machine may take longer than TIGHT for this already
            repl = await stack.enter_async_context(REPL(case.context, limits=limits))
            ready = await repl.execute(world.prepare())
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
    files = [path for place in ("/tmp", "/dev/shm", "/etc", sys.prefix, ROOT)
             for path in Path(place).glob(f"{MARK}*")]
    if Handle.current.sandbox != "off":  # else they go when the server ends
        files += os.listdir(Handle.current.base)
    descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", server)]
    return server, descriptors, below(server), files


async def eventually(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.2)


async def one(case, world, places):
    """What is wrong with a case."""
    async with places:
        try:
            async with asyncio.timeout(300):
                return await play(case, world)
        except Exception as error:  # the trainer's side must never raise for what code does
            return f"raised {error!r}"


def cases_of(mode):
    return [c for c in CASES if c.mode in ("both", "ns" if mode == "require" else "off")]


@functools.cache
def played(mode, tmp_path):
    """All cases of a mode, 16 at a time: what is wrong with each, and what is left."""

    async def go():
        async with a_world(mode, tmp_path) as world:
            before, places = left(), asyncio.Semaphore(16)
            cases = sorted(cases_of(mode), key=lambda c: "timeout" not in c.expect)
            wrong = await asyncio.gather(*[one(case, world, places) for case in cases])
            assert not await one(answers("next", "context", '"c"'), world, places)
            await eventually(lambda: left() == before)
            leaks = before, left(), world.connections
            return {c.name: w for c, w in zip(cases, wrong)}, leaks

    try:
        return asyncio.run(go())
    except REPLError as error:  # before the first case: there are no namespaces here
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("mode, name", [
    (mode, case.name) for mode in ("require", "off") for case in cases_of(mode)])
def test_case(mode, name, place):
    assert not played(mode, place)[0][name]


@pytest.mark.parametrize("mode", ["require", "off"])
def test_nothing_is_left(mode, place):
    before, after, connections = played(mode, place)[1]
    assert after == before and connections == (mode == "off")
