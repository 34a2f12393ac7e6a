"""Functions of the caller that the code of a tree calls in the caller's own process.

    RLM("DIR").completion(question, context, tools=[look_up, database.query])

The code gets what a tool returns, as JSON has it. What a tool raises is raised in the code,
as RuntimeError. A call counts as a query of its block, and its seconds as those of the
tree's code. It has to return in time: what runs on is left alone in its thread, and keeps
one of AT_ONCE places.

Arguments come from code that nobody has checked. Which tools travel to the REPL as source
text instead, tasks/in_repl.py says.
"""
import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from runtime.frames import json_value

AT_ONCE = 16  # calls that run at a time; others wait


class HostTools:
    """Tools by their names. `seconds`: of a call; `most`: characters of a value in JSON."""

    def __init__(self, tools: Iterable[Callable], seconds: float, most: int):
        self.tools = {tool.__name__: tool for tool in tools}
        self.seconds, self.most = seconds, most
        self.places = asyncio.Semaphore(AT_ONCE)

    async def call(self, name: str, arguments: list, named: dict) -> dict:
        """{"value": what the tool returned} or {"error": why not}. Never raises for what a
        tool does."""
        tool = self.tools.get(name)
        if tool is None:
            return {"error": "there is no such tool"}
        # A task of its own: whatever the tool does to it, this one goes on.
        running = asyncio.create_task(self.run(tool, arguments, named))
        try:
            await asyncio.wait([running], timeout=self.seconds)
        finally:
            running.cancel()
        if not running.done():
            return {"error": f"no answer within {self.seconds:g} s"}
        if running.cancelled():
            return {"error": "the call was cancelled"}
        error = running.exception()
        if error is None:
            return running.result()
        return {"error": f"{type(error).__name__}: {error}"[:500]}

    async def run(self, tool: Callable, arguments: list, named: dict) -> dict:
        if inspect.iscoroutinefunction(tool):
            value = tool(*arguments, **named)
        else:
            await self.places.acquire()
            value = await self.in_thread(tool, arguments, named)
        if inspect.isawaitable(value):
            try:
                value = await value
            except SystemExit as error:  # it would end the event loop
                raise RuntimeError(repr(error)) from None
        value = json_value(value)
        size = len(json.dumps(value))
        if size > self.most:
            return {"error": f"its value has {size} characters, the limit is {self.most}"}
        return {"value": value}

    async def in_thread(self, tool: Callable, arguments: list, named: dict) -> Any:
        """Call it in a thread of its own. Python does not wait for that when it ends."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finish(value: Any, error: Exception | None) -> None:
            self.places.release()
            if done.cancelled():  # too late
                return
            if error:
                done.set_exception(error)
            else:
                done.set_result(value)

        def run() -> None:
            value, error = None, None
            try:
                value = tool(*arguments, **named)
            except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as raised:
                error = RuntimeError(repr(raised))  # these mean something else to a future
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(finish, value, error)
            except RuntimeError:  # the loop has ended
                pass

        threading.Thread(target=run, daemon=True).start()
        return await done
