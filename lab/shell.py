"""The prompt of repl.py: sit in the REPL that a model's code runs in.

People get what a model does not: the values of expressions, line editing with a history,
and Ctrl-C, which ends a block and keeps the variables. A script that is piped in is one
block. Left out: a model that answers the queries (rlm.py has one).
"""
import asyncio
import atexit
import codeop
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlm
import tasks
from repl import REPL
from runtime import flags
from runtime.frames import BUILTINS, Result
from runtime.repl_server import Handle, REPLError
from runtime.sandbox import Limits


# Runs in the REPL, first: Ctrl-C ends a block, and nothing between two blocks.
STOPPABLE = """
def _stoppable():
    import signal

    def stop(number, frame):
        while frame:
            if frame.f_code.co_filename.startswith("<repl "):
                raise KeyboardInterrupt
            frame = frame.f_back

    signal.signal(signal.SIGINT, stop)

_stoppable()
del _stoppable
"""


NAMES = "print(*globals(), *dir(__builtins__), *__import__('keyword').kwlist)"


def main() -> int:
    parser = flags.parser("Sit in the REPL that the model sits in.")
    add = parser.add_argument
    add("file", nargs="*", help="becomes `context`; several: {name: text}")
    add("--task", default=tasks.QUESTION, help="a kind of questions, or path/to/file.py: "
        "its tools are there (default: those of a question to rlm.py)")
    add("--seconds", type=float, default=60.0, help="wall clock per block (default 60)")
    add("--sandbox", choices=("require", "auto", "off"), default="auto",
        help="namespaces around it (default auto: where possible)")
    args = parser.parse_args()
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds is {args.seconds:g}; it has to be a number above 0")

    try:
        texts = {name: Path(name).read_text("utf-8", "replace") for name in args.file}
        tools = tasks.tools(args.task)
    except OSError as error:
        parser.exit(2, f"repl.py: cannot read {error.filename}: {error.strerror}\n")
    except ValueError as error:
        parser.exit(2, f"repl.py: {error}\n")
    context = texts if len(texts) > 1 else next(iter(texts.values()), "")
    limits = Limits(seconds=args.seconds, sandbox=args.sandbox)

    # Lines are read outside of the event loop, so that Ctrl-C interrupts at once.
    with asyncio.Runner() as runner:
        try:
            repl = REPL(context, tools + STOPPABLE, limits)
            runner.run(repl.start())
            if sys.stdin.isatty():
                print(banner(context, args.task))
                return converse(runner, repl)
            script = sys.stdin.buffer.read().decode("utf-8", "replace")
            result = runner.run(repl.execute(script))
            show(result)
            return int(bool(result.error))
        except REPLError as error:
            sys.exit(f"repl.py: {error}")
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130


def banner(context: Any, kind: str) -> str:
    tools = ", ".join(tool.__name__ for tool in tasks.tools_of(kind)) or "none"
    return (f"Python {sys.version.split()[0]}, as a model's code has it; here no model "
            f"answers queries\n{rlm.describe(context, 'full')}\n"
            f"builtins: {', '.join(BUILTINS[1:])}\n"
            f"tools: {tools}; help(NAME) tells more\n"
            "Ctrl-C ends a block; FINAL(value), exit() or Ctrl-D the session")


def converse(runner: asyncio.Runner, repl: REPL) -> int:
    """Blocks from the keyboard, until one ends the REPL. Returns the exit status."""
    remember(lambda: runner.run(repl.execute(NAMES)).stdout.split())
    at_prompt = True

    def stop(*_: Any) -> None:
        if at_prompt:
            raise KeyboardInterrupt
        Handle.interrupt()

    signal.signal(signal.SIGINT, stop)
    while True:
        try:
            at_prompt = True
            code = read_block()
            at_prompt = False
        except KeyboardInterrupt:  # the lines so far are given up
            print("\nKeyboardInterrupt")
            continue
        if code is None or code.strip() in ("exit", "exit()", "quit", "quit()"):
            return 0
        result = runner.run(repl.execute(code + "\n", echo=True))
        show(result)
        if result.done or result.died:
            return int(bool(result.died))


def read_block() -> str | None:
    """The lines of one statement; None at the end. An empty line ends a compound one."""
    lines: list[str] = []
    with contextlib.suppress(EOFError, SyntaxError, ValueError, OverflowError):
        lines.append(input(">>> "))  # if it is wrong, the REPL will say how
        while codeop.compile_command("\n".join(lines), "<repl>", "single") is None:
            lines.append(input("... "))
    return "\n".join(lines) if lines else None


def show(result: Result) -> None:
    if result.stdout:
        print(result.stdout.removesuffix("\n"), flush=True)
    if result.error:
        print(result.error, file=sys.stderr)
    if result.done:
        print(result.final)


def remember(names: Callable[[], list[str]]) -> None:
    """Line editing. The Tab key completes `names()`. The history is in the user's folder
    of states, if there is a home."""
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return
    found: list[str] = []

    def complete(text: str, number: int) -> str | None:
        if not text:  # an indentation
            return ("\t", None)[number]
        if number == 0:
            found[:] = sorted({name for name in names() if name.startswith(text)})
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    home = Path.home()
    if not home.is_dir():
        return
    folder = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state")
    file = folder / "rlm-repl-history"
    with contextlib.suppress(OSError):  # it may be read-only
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        readline.read_history_file(file)
        readline.set_history_length(1000)
        atexit.register(readline.write_history_file, file)
