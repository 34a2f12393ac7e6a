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
from collections.abc import Callable, Iterable
from typing import Any

from runtime.frames import json_value
from runtime.threads import in_thread

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
        try:
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        except Exception:  # an error that cannot be printed
            return {"error": type(error).__name__}

    async def run(self, tool: Callable, arguments: list, named: dict) -> dict:
        def called() -> Any:
            value = tool(*arguments, **named)
            return value if inspect.isawaitable(value) else self.reply(value)

        if inspect.iscoroutinefunction(tool):
            value = tool(*arguments, **named)
        else:
            await self.places.acquire()
            # What runs on after its time keeps its place.
            value = await in_thread(called, self.places.release)
        if not inspect.isawaitable(value):
            return value
        async with self.places:
            try:
                value = await value
            except SystemExit as error:  # it would end the event loop
                raise RuntimeError(repr(error)) from None
        return await in_thread(lambda: self.reply(value))

    def reply(self, value: Any) -> dict:
        """In a thread, as a large value takes its time: 0.7 s for a million items."""
        value = json_value(value, left=iter(range(self.most)))
        size = len(json.dumps(value))
        if size > self.most:
            return {"error": f"its value has {size} characters, the limit is {self.most}"}
        return {"value": value}
