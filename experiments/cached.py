"""REPLs whose results are remembered: code that ran once, on the same context and with the
same answers to its calls, gives the same again without a process."""
import json

from repl import REPL, Limits, Result

known: dict[tuple, tuple] = {}  # what code did next: asked, or ended


class Cached:
    def __init__(self, context, tools: str, limits: Limits, question: str):
        self.given = context, tools, limits, question
        self.state = json.dumps(context), question
        self.before: list[tuple] = []  # (code, answers) of blocks that need not run yet
        self.real: REPL | None = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        if self.real:
            self.real._close()

    async def execute(self, code: str, on_query) -> Result:
        state, answers = (*self.state, code), []
        while state in known:
            step = known[state]
            if isinstance(step, Result):
                self.state = state
                self.before.append((code, answers))
                return step
            answers.append(await on_query(*step))
            state = *state, json.dumps(answers[-1])
        self.real = self.real or REPL(*self.given)
        for earlier, told in self.before:
            await self.real.execute(earlier, feed(told))
        self.before = []
        left, here = list(answers), state

        async def asked(kind, prompts, contexts):
            nonlocal here
            if left:
                return left.pop(0)
            known[here] = kind, prompts, contexts
            values = await on_query(kind, prompts, contexts)
            here = *here, json.dumps(values)
            return values

        result = await self.real.execute(code, asked)
        known[here], self.state = result, here
        return result


def feed(answers: list):
    left = list(answers)

    async def asked(*_):
        return left.pop(0)
    return asked
