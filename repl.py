"""The Python REPL that a model's code runs in. Each REPL is a separate process.

    async with REPL(context, tools="", limits=Limits(seconds=60)) as repl:
        result = await repl.execute("print(1); FINAL(context[:5])")
        result.stdout, result.error, result.final, result.done, result.died

The client (the trainer, for example) starts one server, a small process without torch. The
server forks one worker per REPL, relays messages, and keeps the clock: the client may be
busy with a forward pass. Here are the client, the worker and the builtins of the code; in
sandbox the messages (protocol.py), the server (server.py), the isolation (isolation.py).

Left out: two blocks at a time in one REPL, and protection of the code's signal handlers. A
handler that raises while an answer is awaited, or between two blocks, ends its own REPL.
Tried: to fork the trainer takes 40 ms, to fork the nursery 1 ms. Handlers that were held
back during a query made runaway recursions hang.
"""
from __future__ import annotations

import ast
import builtins as python_builtins
import contextlib
import io
import json
import linecache
import os
import re
import resource
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sandbox.isolation import DESCRIPTORS, Limits
from sandbox.protocol import (HEADER, Result, frame, json_value, read_query, read_result,
                              take_frame)
from sandbox.server import Handle, REPLError

# The server's program. It hands the worker over, as sandbox knows nothing of this file.
SERVER = "import repl, sandbox.server as server; server.main(repl.Worker)"


REPL_BYTES = 6 << 20  # the memory that one REPL uses


def trees_at_once(nodes: int) -> int:
    """How many trees of at most `nodes` nodes may grow at once: a REPL takes two open files
    in the server and its memory, and a parent keeps its REPL while it waits. 64 trees of 65
    nodes took all of 23 GiB."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] % 2**64  # -1 is infinity
    by_files = (min(DESCRIPTORS, hard) - 256) // 2  # 256 for other files
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(by_files, memory // 2 // REPL_BYTES) // nodes)


async def no_model(kind: str, prompts: list, contexts: Any) -> list:
    return ["Error: this REPL has no model that could answer"] * len(prompts)


class REPL:
    """A Python namespace in a separate process, which starts with the first block.

    `context` is any JSON value, `question` what the node was asked: code may change it.
    `tools` is Python source that runs first; its names become builtins. All open REPLs have
    the same `limits.sandbox`: another one ends them.
    """

    def __init__(self, context: Any, tools: str = "", limits: Limits = Limits(),
                 question: str = ""):
        self.limits = limits
        self._first: dict | None = {
            "context": context, "tools": tools, "question": question}
        self._sock: socket.socket | None = None
        self._inbox = bytearray()

    async def __aenter__(self) -> REPL:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the process, without waiting for its death."""
        self._close()

    def _close(self) -> None:
        self._first = None
        if self._sock is not None:
            self._sock.close()  # the server sees this and kills the worker
            self._sock = None

    async def execute(self, code: str, on_query: Callable | None = None) -> Result:
        """Run one block. Errors of the code are in the result. After FINAL the
        REPL is to be closed at once: code that catches its exception would run on.

        `await on_query(kind=, prompts=, contexts=)` returns one JSON value per prompt:
        `kind` is "llm" or "rlm", `contexts` a list of JSON values or None. What it raises
        closes the REPL and is raised here. Raises REPLError if the process cannot be
        started (also if `tools` raises), if the server is lost, and if the REPL is closed.
        A context that does not fit into its memory is no error: the result has died of
        "memory"."""
        import asyncio  # not above: the server imports this file, and does without asyncio

        self._loop = asyncio.get_running_loop()
        start, self._first = self._first, None  # the context will live in the worker
        messages = [(b"X", {"code": code})]
        if start is not None:
            self._connect()
            messages.insert(0, (b"S", start))
        count, most, answer = 0, self.limits.queries, on_query or no_model
        try:
            await self._send(*messages)
            while True:
                kind, data = await self._receive()
                try:
                    if kind == b"T":  # from the server; the result is the next frame
                        seconds = json.loads(data[HEADER.size:])
                        kind, data = await self._receive()
                        result = read_result(data, self.limits)
                        if kind == b"F" and "MemoryError" in result.error:
                            result = replace(result, died="memory")
                        elif kind == b"F":
                            raise REPLError(f"the REPL did not start: {result.error}")
                        return replace(result, seconds=seconds)
                    query = read_query(data)
                except (ValueError, TypeError, RecursionError) as error:  # forged
                    return Result(error=f"ProtocolError: {error}", died="protocol")
                asked = len(query["prompts"])
                count += asked
                if count > most:
                    problem = f"Error: a block may ask {most} queries, this is {count}"
                    answers = [problem] * asked
                else:
                    answers = await answer(**query)
                await self._send((b"R", answers))
        except BaseException:  # cancelling too: the rest of an exchange would be misread
            self._close()
            raise

    def _connect(self) -> None:
        try:
            self._sock, theirs = socket.socketpair()
            self._sock.setblocking(False)
            with theirs:
                Handle.request(theirs, self.limits, SERVER)
        except OSError as error:
            raise REPLError(f"the REPL server cannot be reached: {error}") from error

    async def _send(self, *messages: tuple[bytes, Any]) -> None:
        if self._sock is None:
            raise REPLError("the REPL is not open")
        try:
            data = b"".join(frame(*message, self.limits.frame_mb) for message in messages)
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise REPLError("the REPL server was lost") from error
        except ValueError as error:
            raise REPLError(f"this cannot be sent to the REPL: {error}") from error

    async def _receive(self) -> tuple[bytes, bytes]:
        """The kind of the next frame, and the whole frame."""
        while (found := take_frame(self._inbox, self.limits.frame_mb)) is None:
            data = b""
            with contextlib.suppress(OSError):
                data = await self._loop.sock_recv(self._sock, 1 << 18)
            if not data:  # the death of a worker is a D frame of the server
                raise REPLError("the REPL server was lost")
            self._inbox += data
        return found


class Final(BaseException):
    """Ends the code after FINAL. The answer is already sent: the code may catch this."""


def cut(text: str, size: int, why: str = "") -> str:
    """The first `size` characters, and how many are missing, if any are."""
    if len(text) <= size:
        return text
    return f"{text[:size]}\n... [{len(text) - size} characters cut{why}]"


class Capture(io.StringIO):
    """stdout and stderr of a block: keeps the first characters, counts the rest."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit
        self.empty()

    def empty(self) -> None:
        self.seek(0)
        self.truncate()
        self.room = self.limit  # below 0: the number of characters that were cut

    def write(self, text: str) -> int:
        super().write(text[: max(0, self.room)])
        self.room -= len(text)
        return len(text)

    def close(self) -> None:
        """Nothing: code that closes its stdout may print all the same."""

    def text(self) -> str:
        note = f"\n... [{-self.room} characters cut]" if self.room < 0 else ""
        return self.getvalue() + note


class Worker:
    """The process that runs the code: its namespace, and its socket to the server."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self.sock, self.limits, self.pid = sock, limits, os.getpid()
        self.inbox = bytearray()
        self.lock = threading.RLock()  # the code may have threads: one query at a time
        self.open = False  # a block runs, and its result is not sent yet
        self.ending = False  # its result is due: no further query is sent
        self.blocks = 0
        # Dataclasses and pickle look up the module that defines a class.
        sys.modules["__main__"] = types.ModuleType("__main__")
        self.namespace = vars(sys.modules["__main__"])
        self.builtins = Builtins(self)
        self.capture = Capture(limits.output_chars)
        self.answer = {"content": "", "ready": False}

    def loop(self) -> None:
        """Run what the client sends."""
        sys.stdout = sys.stderr = self.capture  # one for all: loggers keep it
        try:
            self.run(self.start)
        except MemoryError:
            most = self.limits.memory_mb
            error = f"MemoryError: memory_mb {most} cannot hold the context"
            self.sock.sendall(self.frame(b"S", error))
        while True:
            self.run(self.block)

    def run(self, handle: Callable) -> None:
        """Wait for a frame, and call `handle` with what it says."""
        _, data = self.receive()
        self.capture.empty()
        self.open, self.ending = True, False
        handle(**json.loads(data[HEADER.size:]))

    def start(self, context: Any, tools: str, question: str) -> None:
        """Fill the namespace."""
        self.reserved = {name: getattr(self.builtins, name) for name in BUILTINS}
        self.reserved |= {"context": context, "__builtins__": python_builtins}
        self.namespace.update(self.reserved)
        error = ""
        if tools:
            error = self.attempt(self.execute, tools, "<repl tools>")
            self.restore()
        self.reserved = {**self.namespace, **self.reserved}
        self.namespace["answer"] = self.answer
        if question:
            self.namespace["question"] = question
        self.sock.sendall(self.frame(b"S", error))

    def block(self, code: str) -> None:
        """Run one block."""
        self.blocks += 1
        name = f"<repl {self.blocks}>"  # a new name per block: tracebacks find its source
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        error = self.attempt(self.execute, code, name)
        error = self.attempt(self.look_at_answer) or error
        if self.open:  # otherwise FINAL has sent the result, and this process ends
            self.restore()
            self.done(error, draft=self.draft())

    def execute(self, source: str, name: str) -> None:
        # Annotations are not evaluated: the `from __future__` of this file holds here too.
        tree = compile(source, name, "exec", ast.PyCF_ONLY_AST)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
            last = compile(last, name, "eval")  # before anything runs: it may be wrong
        exec(compile(tree, name, "exec"), self.namespace)
        if last:
            value = eval(last, self.namespace)
            if value is not None:
                print(repr(value))  # as at Python's own prompt

    def attempt(self, function: Callable, *arguments: Any) -> str:
        """Call it. Returns the short traceback of any exception, even SystemExit."""
        try:
            function(*arguments)
        except Final:
            return ""
        except BaseException as error:
            return short_traceback(error, self.limits.output_chars)
        return ""

    def look_at_answer(self) -> None:
        answer = self.namespace.get("answer")
        if isinstance(answer, dict) and answer.get("ready"):
            self.builtins.FINAL(answer.get("content"))

    def draft(self) -> Any:
        """What answer["content"] holds so far. None if it is empty or too large."""
        with contextlib.suppress(BaseException):  # the code may have put anything there
            value = json_value(self.namespace["answer"]["content"])
            if value != "" and len(json.dumps(value)) <= self.limits.answer_chars:
                return value
        return None

    def restore(self) -> None:
        """Put back the builtins, also Python's own. `answer` belongs to the code."""
        vars(python_builtins).update(PYTHON)
        self.namespace.update(self.reserved)
        sys.setrecursionlimit(1000)

    def receive(self) -> tuple[bytes, bytes]:
        """The kind of the next frame, and the whole frame."""
        while (found := take_frame(self.inbox, self.limits.frame_mb)) is None:
            data = self.sock.recv(1 << 18)
            if not data:  # the server ended this REPL
                os._exit(0)
            self.inbox += data
        return found

    def done(self, error: str, **answer: Any) -> None:
        """Send the result of the block, unless it was sent. An open query ends first."""
        self.ending = True
        with self.lock:
            if self.open:
                result = {"stdout": self.capture.text(), "error": error, **answer}
                self.sock.sendall(self.frame(b"D", result))
                self.open = False

    def query(self, kind: str, prompts: list, contexts: list | None) -> list:
        """Send a query and wait for its answers, one per prompt."""
        if not prompts:
            return []
        if contexts is not None:
            contexts = [json_value(context) for context in contexts]
        data = self.frame(b"Q", [kind, [str(prompt) for prompt in prompts], contexts])
        with self.lock:
            if self.ending:  # after FINAL, or in a thread that outlived its block
                raise Final
            try:
                self.sock.sendall(data)
                _, data = self.receive()
            except BaseException:  # a signal handler of the code raised it
                os._exit(1)  # otherwise the next query would get this answer
        return json.loads(data[HEADER.size:])

    def frame(self, kind: bytes, message: Any) -> bytes:
        if os.getpid() != self.pid:  # the code forked, and this is the child
            raise RuntimeError("a forked process can neither query nor answer")
        return frame(kind, message, self.limits.frame_mb)


class Builtins:
    """The functions of the code: every public method, with its docstring for `help`. A new
    one is added here, and in the prompt (prompts.py)."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def FINAL(self, value: Any) -> None:
        """End with `value` as the answer. What JSON cannot say becomes its str."""
        value = json_value(value)
        size, most = len(json.dumps(value)), self.worker.limits.answer_chars
        if size > most:
            problem = f"the answer has {size} characters as JSON, the limit is {most}"
            raise ValueError(f"FINAL: {problem}")
        self.worker.done("", final=value, done=True)
        raise Final

    def FINAL_VAR(self, name: Any) -> None:
        """End with the variable called `name` as the answer, or else with `name` itself."""
        variables = self.worker.namespace
        if not isinstance(name, str):
            self.FINAL(name)
        if name in variables:
            self.FINAL(variables[name])
        if not name.isidentifier() or any(name is v for v in variables.values()):
            self.FINAL(name)
        raise NameError(f"FINAL_VAR: there is no variable {name!r}")

    def llm_query(self, prompt: str) -> str:
        """Ask the model one question; it sees nothing but the prompt."""
        return self.worker.query("llm", [prompt], None)[0]

    def llm_query_batched(self, prompts: list[str]) -> list[str]:
        """Ask the model many questions side by side; the answers come in order."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.worker.query("llm", prompts, None)

    def rlm_query(self, prompt: str, context: Any = None) -> Any:
        """Start a child with its own REPL; without a context it gets this one's."""
        contexts = None if context is None else [context]
        return self.worker.query("rlm", [prompt], contexts)[0]

    def rlm_query_batched(self, prompts: list | str, contexts: list | None = None) -> list:
        """Start many children; one string for `prompts` is used for every context."""
        if isinstance(contexts, (str, bytes, dict)):
            raise TypeError("contexts must be a list with one context per prompt")
        contexts = None if contexts is None else list(contexts)
        count = 1 if contexts is None else len(contexts)
        prompts = [prompts] * count if isinstance(prompts, str) else list(prompts)
        if contexts is not None and len(prompts) != count:
            raise ValueError(f"{len(prompts)} prompts but {count} contexts")
        return self.worker.query("rlm", prompts, contexts)


PYTHON = dict(vars(python_builtins))  # as it was before any code ran
BUILTINS = [name for name in vars(Builtins) if not name.startswith("_")]


def short_traceback(error: BaseException, most: int) -> str:
    """The exception, and above it the lines of the model's own code that led there: not if
    they would take more than half of `most` characters, and the rest be cut."""
    stack = traceback.extract_tb(error.__traceback__)
    own = [entry for entry in stack if re.fullmatch(r"<repl \d+>", entry.filename)]
    lines = [f'  File "<repl>", line {e.lineno}, in {e.name}\n    {e.line}' for e in own]
    if len(lines) > 8:  # a recursion says the same a thousand times
        lines = [*lines[:4], f"  ... [{len(lines) - 8} frames cut]", *lines[-4:]]
    if lines:
        lines.insert(0, "Traceback (most recent call last):")
    exception = traceback.format_exception_only(error)  # of wrong syntax also where it is
    message = next((line for line in exception if not line.startswith("  ")), "").rstrip()
    shown = "\n".join([*lines, "".join(exception).rstrip()])
    if len(shown) > most and 2 * shown.find(message) > most:
        shown = message
    return cut(re.sub(r'(?m)^  File "<repl \d+>"', '  File "<repl>"', shown), most)
