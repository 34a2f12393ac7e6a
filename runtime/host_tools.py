"""Functions of the caller that the code of a tree calls in the caller's own process.

    RLM("DIR").completion(question, context, tools=[look_up, database.query])

The code gets what a tool returns, as JSON has it. What a tool raises is raised in the code,
as RuntimeError. A call counts as a query of its block, and has to return in time: what runs
on is left alone in its thread, and with LEFT_ALONE of those no tool is called any more.

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

LEFT_ALONE = 16  # calls that did not return in time


class HostTools:
    """Tools by their names. `seconds`: of a call; `most`: characters of a value in JSON."""

    def __init__(self, tools: Iterable[Callable], seconds: float, most: int):
        self.tools = {tool.__name__: tool for tool in tools}
        self.seconds, self.most = seconds, most
        self.late = 0  # calls that did not return in time, and have not returned since

    async def call(self, name: str, arguments: list, named: dict) -> dict:
        """{"value": what the tool returned} or {"error": why not}. Never raises for what a
        tool does."""
        tool = self.tools.get(name)
        if tool is None:
            return {"error": "there is no such tool"}
        if self.late >= LEFT_ALONE:
            return {"error": f"{self.late} calls of tools have not returned yet"}
        try:
            async with asyncio.timeout(self.seconds):
                if inspect.iscoroutinefunction(tool):
                    value = await tool(*arguments, **named)
                else:
                    value = await self.in_thread(tool, arguments, named)
            value = json_value(value)
            size = len(json.dumps(value))
        except TimeoutError:
            return {"error": f"no answer within {self.seconds:g} s"}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        if size > self.most:
            return {"error": f"its value has {size} characters, the limit is {self.most}"}
        return {"value": value}

    async def in_thread(self, tool: Callable, arguments: list, named: dict) -> Any:
        """Call it in a thread of its own. Python does not wait for that when it ends."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finish(value: Any, error: Exception | None) -> None:
            if done.cancelled():
                self.late -= 1
            elif error:
                done.set_exception(error)
            else:
                done.set_result(value)

        def run() -> None:
            value, error = None, None
            try:
                value = tool(*arguments, **named)
            except Exception as raised:
                error = raised
            except BaseException as raised:  # SystemExit, say
                error = RuntimeError(repr(raised))
            try:
                loop.call_soon_threadsafe(finish, value, error)
            except RuntimeError:  # the loop has ended
                pass

        threading.Thread(target=run, daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self.late += 1
            raise
