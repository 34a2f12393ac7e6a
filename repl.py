"""The Python REPL that a model's code runs in, as a process of its own.

    async with REPL(context, tools="", limits=Limits(seconds=60)) as repl:
        result = await repl.execute("print(1); FINAL(context[:5])", on_query=None)
        result.stdout, result.error, result.final, result.done, result.died

The client (the trainer, say) holds `REPL` objects and starts one server, a small process
without torch: it forks in 1 ms, the trainer in 40. The server forks one worker per REPL,
relays messages between the two, and keeps the clock: the client may be busy with a forward
pass, and nobody has checked the code that a worker runs.

Here: client, worker with the builtins that the code sees, and the prompt of
`python repl.py`. Elsewhere: messages (runtime/frames.py), server (runtime/repl_server.py),
isolation (runtime/sandbox.py). Left out: signal handlers of the code. One that raises while
an answer is awaited, or between two blocks, ends its own REPL.
"""

from __future__ import annotations

import builtins as python_builtins
import contextlib
import io
import json
import linecache
import os
import re
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from runtime.frames import (BUILTINS, HEADER, Result, frame, json_value,
                            read_query, read_result, take_frame)
from runtime.repl_server import Handle, REPLError
from runtime.sandbox import SET_NAME, Limits, call

# --- the client ---------------------------------------------------------------------------


class REPL:
    """One Python namespace in a process of its own; an async context manager. It runs one
    block at a time.

    `context` is any JSON value. `tools` is Python source that runs first: what it defines
    belongs to the builtins. Raises REPLError if it cannot be started, even if the cause is
    in `tools` or in the size of the context. A process uses one `limits.sandbox` at a time:
    to ask for another one ends the REPLs that are open.
    """

    def __init__(self, context: Any, tools: str = "", limits: Limits = Limits()):
        self.limits = limits
        self._first: dict | None = {"context": context, "tools": tools}
        self._sock: socket.socket | None = None
        self._inbox = bytearray()
        self._over: Result | None = None  # the last result: there is no process after it

    async def __aenter__(self) -> REPL:
        await self.start()
        return self

    async def start(self) -> None:
        """Start the process; nothing the second time."""
        import asyncio  # here, as the server and its forks do without it

        if self._first is None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            self._sock, theirs = socket.socketpair()
            self._sock.setblocking(False)
            with theirs:
                Handle.request(theirs, self.limits)
            result = await self._exchange(b"S", self._first, nobody)
            if result.error:
                raise REPLError(f"the REPL did not start: {result.error}")
        except OSError as error:
            await self.aclose()
            raise REPLError(f"the REPL server cannot be reached: {error}") from error
        except BaseException:
            await self.aclose()
            raise
        self._first = None  # the context lives in the worker now

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the process, without waiting for its death. May be called twice."""
        if self._sock is not None:
            self._sock.close()  # the server sees it, and cleans up
            self._sock = None

    async def execute(self, code: str, on_query: Callable | None = None,
                      echo: bool = False) -> Result:
        """Run one block. Never raises for what the code did. With `echo` it is a single
        statement, and values of expressions are shown: for people, not for models.

        `await on_query(kind, prompts, contexts)` returns one JSON value per prompt: `kind`
        is "llm" or "rlm", `contexts` a list of JSON values or None. What on_query raises
        ends the REPL and is raised here. Raises REPLError if the server was lost or the
        REPL is closed. After FINAL or a death, further calls return that result again.
        """
        if self._over is not None:
            return self._over
        message = {"code": code, "echo": echo}
        result = await self._exchange(b"X", message, on_query or nobody)
        if result.done or result.died:
            self._over = result
            await self.aclose()  # code that catches the exception of FINAL must not run on
        return result

    async def _exchange(self, kind: bytes, message: dict, on_query: Callable) -> Result:
        """Send one frame, then answer queries until the D frame comes."""
        asked, most = 0, self.limits.queries
        try:
            await self._send(kind, message)
            while True:
                kind, data = await self._receive()
                try:
                    if kind == b"T":  # from the server, before each D
                        seconds = json.loads(data[HEADER.size:])
                        _, data = await self._receive()
                        return replace(read_result(data, self.limits), seconds=seconds)
                    query = read_query(data)
                except (ValueError, TypeError, RecursionError) as error:  # forged
                    return Result(error=f"ProtocolError: {error}", died="protocol")
                asked += len(query[1])
                if asked > most:
                    problem = f"Error: a block may ask {most} queries, this is {asked}"
                    answers = [problem] * len(query[1])
                else:
                    answers = await on_query(*query)
                await self._send(b"R", answers)
        except BaseException:  # also if cancelled: an exchange is not continued
            await self.aclose()
            raise

    async def _send(self, kind: bytes, message: Any) -> None:
        if self._sock is None:
            raise REPLError("the REPL is not open")
        try:
            data = frame(kind, message, self.limits.frame_mb)
            await self._loop.sock_sendall(self._sock, data)
        except (OSError, ValueError) as error:
            raise REPLError(f"nothing can be sent to the REPL: {error}") from error

    async def _receive(self) -> tuple[bytes, bytes]:
        """The next frame, and its kind."""
        while (found := take_frame(self._inbox, self.limits.frame_mb)) is None:
            try:
                data = await self._loop.sock_recv(self._sock, 1 << 18)
            except OSError as error:
                raise REPLError(f"the REPL server was lost: {error}") from error
            if not data:  # a worker's death is a D frame, so this is not one
                raise REPLError("the REPL server was lost, or the REPL was closed")
            self._inbox += data
        return found


async def nobody(kind: str, prompts: list, contexts: Any) -> list:
    problem = "Error: no model is attached to this REPL, so nobody answers"
    return [problem] * len(prompts)


# --- the worker ---------------------------------------------------------------------------


class Final(BaseException):
    """Ends the code after FINAL. The answer is already sent: the code may catch this."""


class Capture(io.TextIOBase):
    """stdout and stderr of a block: keeps the first characters, counts the rest."""

    encoding = "utf-8"

    def __init__(self, limit: int):
        self.parts: list[str] = []
        self.room = limit  # below 0: as many characters were cut

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self.room > 0:
            self.parts.append(text[: self.room])
        self.room -= len(text)
        return len(text)

    def text(self) -> str:
        note = f"\n... [{-self.room} characters cut]" if self.room < 0 else ""
        return "".join(self.parts) + note


class Worker:
    """The process that runs the code. Its last methods are the builtins of the code."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self.sock, self.limits, self.pid = sock, limits, os.getpid()
        self.inbox = bytearray()
        self.turn = threading.RLock()  # the code may have threads: they ask one by one
        self.open = False  # a block runs, and no result was sent for it
        self.ending = False  # its result is due: no query is sent any more
        self.blocks = 0
        # Dataclasses and pickle look for the module that defines a class.
        self.module = sys.modules["__main__"] = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.reserved: dict[str, Any] = {}
        self.python = dict(vars(python_builtins))
        self.answer = {"content": "", "ready": False}

    def loop(self) -> None:
        """Run what the client sends."""
        while True:
            kind, data = self.receive()
            self.capture = sys.stdout = sys.stderr = Capture(self.limits.output_chars)
            self.open, self.ending = True, False
            run = self.start if kind == b"S" else self.block
            error = run(**json.loads(data[HEADER.size:]))
            self.restore()
            self.done(error, draft=self.draft())

    def start(self, context: Any, tools: str) -> str:
        """Fill the namespace. Returns the error of `tools`, or ""."""
        call("prctl", SET_NAME, b"repl", 0, 0, 0)
        self.reserved = {name: getattr(self, name) for name in BUILTINS[2:]}
        self.reserved |= {"context": context, "__builtins__": python_builtins}
        self.namespace.update(self.reserved)
        # The annotations of tools are not evaluated, as those of this file are not.
        error = self.attempt(self.run, tools, "<repl tools>", False)
        self.reserved = {**self.namespace, **self.reserved}
        self.namespace["answer"] = self.answer
        return error

    def block(self, code: str, echo: bool = False) -> str:
        """Run one block. Returns its error, or ""."""
        self.blocks += 1
        name = f"<repl {self.blocks}>"  # of its own: a traceback finds the right source
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        error = self.attempt(self.run, code, name, True, "single" if echo else "exec")
        if os.getpid() != self.pid:  # the code forked, and this is the child
            os._exit(0)
        return self.attempt(self.look_at_answer) or error

    def run(self, source: str, name: str, dont_inherit: bool, mode: str = "exec") -> None:
        exec(compile(source, name, mode, dont_inherit=dont_inherit), self.namespace)

    def attempt(self, function: Callable, *arguments: Any) -> str:
        """Call it. Returns the short traceback of what it raised, even SystemExit."""
        try:
            function(*arguments)
        except Final:
            return ""
        except BaseException as error:
            text = Capture(self.limits.output_chars)
            text.write(short_traceback(error))
            return text.text()
        return ""

    def look_at_answer(self) -> None:
        answer = self.namespace.get("answer")
        if isinstance(answer, dict) and answer.get("ready"):
            self.FINAL(answer.get("content"))

    def draft(self) -> Any:
        """What `answer` holds so far; None if that is nothing, or too large."""
        with contextlib.suppress(BaseException):  # whatever the code has put there
            value = json_value(self.namespace["answer"]["content"])
            if value != "" and len(json.dumps(value)) <= self.limits.answer_chars:
                return value
        return None

    def restore(self) -> None:
        """Put back the builtins, also Python's own. `answer` belongs to the code."""
        vars(python_builtins).update(self.python)
        self.namespace.update(self.reserved)
        sys.setrecursionlimit(1000)

    def receive(self) -> tuple[bytes, bytes]:
        """The kind of the next frame, and all of it."""
        while (found := take_frame(self.inbox, self.limits.frame_mb)) is None:
            data = self.sock.recv(1 << 18)
            if not data:  # the server ended this REPL
                os._exit(0)
            self.inbox += data
        return found

    def done(self, error: str, **answer: Any) -> None:
        """Send the result of the block, unless one was sent. A query of a thread that is
        open ends first."""
        self.ending = True
        with self.turn:
            if self.open:
                result = {"stdout": self.capture.text(), "error": error, **answer}
                self.sock.sendall(frame(b"D", result, self.limits.frame_mb))
                self.open = False

    def ask(self, kind: str, prompts: list, contexts: list | None) -> list:
        if not prompts:
            return []
        self.refuse_forks()
        if contexts is not None:
            contexts = [json_value(context) for context in contexts]
        query = [kind, [str(prompt) for prompt in prompts], contexts]
        data = frame(b"Q", query, self.limits.frame_mb)
        with self.turn:
            if self.ending:  # after FINAL, or in a thread that outlived its block
                raise Final
            try:
                self.sock.sendall(data)
                _, data = self.receive()
            except BaseException:  # of a signal handler: no query may get its answer
                os._exit(1)
        return json.loads(data[HEADER.size:])

    def refuse_forks(self) -> None:
        if os.getpid() != self.pid:
            raise RuntimeError("a forked process can neither query nor answer")

    # What the code sees. The docstrings are for `help`.

    def FINAL(self, value: Any) -> None:
        """End with `value` as the answer. What JSON cannot say becomes its str.

        Raises TypeError for a generator."""
        self.refuse_forks()
        value = json_value(value)
        size = len(json.dumps(value))
        if size > self.limits.answer_chars:
            limit = f"the limit is {self.limits.answer_chars}"
            raise ValueError(f"FINAL: the answer has {size} characters as JSON, {limit}")
        self.done("", final=value, done=True)
        raise Final

    def FINAL_VAR(self, name: Any) -> None:
        """End with the value of the variable called `name` as the answer. A value that is
        no variable's name is the answer itself."""
        if not isinstance(name, str):
            self.FINAL(name)
        if name in self.namespace:
            self.FINAL(self.namespace[name])
        if not name.isidentifier() or any(name is v for v in self.namespace.values()):
            self.FINAL(name)
        known = ", ".join(list(self.SHOW_VARS())[:50]) or "none"
        raise NameError(f"FINAL_VAR: there is no variable {name!r}; there are: {known}")

    def SHOW_VARS(self) -> dict[str, str]:
        """The variables you have made: {name: type and size}."""
        shown = {}
        for name, value in list(self.namespace.items()):
            if name.startswith("_") or name in self.reserved or value is self.answer:
                continue
            shown[name] = type(value).__name__
            if type(value) in (str, bytes, list, tuple, dict, set, frozenset):
                unit = "characters" if isinstance(value, str) else "items"
                shown[name] += f", {len(value)} {unit}"
        return shown

    def llm_query(self, prompt: str) -> str:
        """Ask the model one question; it sees nothing but the prompt."""
        return self.ask("llm", [prompt], None)[0]

    def llm_query_batched(self, prompts: list[str]) -> list[str]:
        """Ask the model many questions side by side; the answers come in order."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.ask("llm", prompts, None)

    def rlm_query(self, prompt: str, context: Any = None) -> Any:
        """Start a child with a REPL of its own; without a context it gets this one's."""
        return self.ask("rlm", [prompt], None if context is None else [context])[0]

    def rlm_query_batched(self, prompts: list | str, contexts: list | None = None,
                          context_list: list | None = None) -> list:
        """Start many children; one string for `prompts` is used for every context.
        `context_list` is another name for `contexts`, which published prompts use."""
        contexts = context_list if contexts is None else contexts
        if isinstance(contexts, (str, bytes, dict)):
            raise TypeError("contexts must be a list with one context a prompt")
        contexts = None if contexts is None else list(contexts)
        count = 1 if contexts is None else len(contexts)
        prompts = [prompts] * count if isinstance(prompts, str) else list(prompts)
        if contexts is not None and len(prompts) != count:
            raise ValueError(f"{len(prompts)} prompts but {count} contexts")
        return self.ask("rlm", prompts, contexts)


def short_traceback(error: BaseException) -> str:
    """The exception, and above it the lines of the model's own code that led there."""
    stack = traceback.extract_tb(error.__traceback__)
    own = [entry for entry in stack if re.fullmatch(r"<repl \d+>", entry.filename)]
    lines = [f'  File "<repl>", line {e.lineno}, in {e.name}\n    {e.line}' for e in own]
    if len(lines) > 8:  # a recursion says the same a thousand times
        lines = [*lines[:4], f"  ... [{len(lines) - 8} frames cut]", *lines[-4:]]
    if lines:
        lines.insert(0, "Traceback (most recent call last):")
    lines.append("".join(traceback.format_exception_only(error)).rstrip())
    return re.sub(r'(?m)^  File "<repl \d+>"', '  File "<repl>"', "\n".join(lines))


# --- the prompt ---------------------------------------------------------------------------


def main() -> int:
    """Sit in the REPL that a model's code runs in. A script that is piped in is one block.
    Left out: a model that answers the queries (rlm.py has one)."""
    import asyncio

    from rlm import describe, read_context
    from runtime import flags
    from tasks.in_repl import TOOLS, source

    parser = flags.parser("Sit in the REPL that the model sits in.")
    parser.add_argument("files", nargs="*", help="become `context`; several: {name: text}")
    parser.add_argument("--sandbox", choices=("require", "auto", "off"), default="auto",
                        help="namespaces around it (default auto: where possible)")
    args = parser.parse_args()

    with asyncio.Runner() as runner:
        try:
            context = read_context(args.files) if args.files else ""
            repl = REPL(context, source(TOOLS), Limits(sandbox=args.sandbox))
            runner.run(repl.start())
        except (OSError, REPLError) as error:
            sys.exit(f"repl.py: {error}")
        if not sys.stdin.isatty():
            result = runner.run(repl.execute(sys.stdin.read()))
            show(result)
            return int(bool(result.error))

        names = (*BUILTINS[1:], *(tool.__name__ for tool in TOOLS))
        print(f"{describe(context, 'full')}\nthere are: {', '.join(names)}\n"
              "FINAL(value), Ctrl-D or Ctrl-C ends the session")
        try:
            while True:
                result = runner.run(repl.execute(read_block(), echo=True))
                show(result)
                if result.done or result.died:
                    return int(bool(result.died))
        except (EOFError, KeyboardInterrupt):
            return 0


def read_block() -> str:
    """The lines of one statement. An empty line ends a compound one."""
    import codeop

    lines = [input(">>> ")]
    with contextlib.suppress(SyntaxError, ValueError, OverflowError):  # the REPL says so
        while codeop.compile_command("\n".join(lines), "<repl>", "single") is None:
            lines.append(input("... "))
    return "\n".join(lines) + "\n"


def show(result: Result) -> None:
    if result.stdout:
        print(result.stdout.removesuffix("\n"), flush=True)
    if result.error:
        print(result.error, file=sys.stderr)
    if result.done:
        print(result.final)


if __name__ == "__main__":
    sys.exit(main())
