"""A policy behind an HTTP server that speaks the chat-completions protocol: hosted models,
vLLM, llama.cpp and the like. The key is read from OPENAI_API_KEY.

The package `openai` sends the requests. It asks again, with a back-off, when a server is
busy or broken. What goes wrong after that:
- The server refuses this request, for its content or length (400, 413, 422): Refused. The
  model has asked for what cannot be had: that node ends, its parent's code sees an error.
- Anything else (no server, a wrong key, no such model) is a RuntimeError. It is the
  machine's failure, so the tree is lost, and counts as failed.

Left out: streaming, log-probabilities, prices.
"""
import asyncio
import os
import sys
from typing import Any

import openai

from tree import Completion, Node, Refused

REFUSALS = (400, 413, 422)


class API:
    """policy(node, max_tokens, key) -> Completion without ids.

    Its usage has the `prompt`, `reused` (read from the server's cache) and `sampled` tokens
    as the server counts them; if it does not, four characters count as one. `used` is the
    sum over all requests. `url` ends before /chat/completions, as http://localhost:8000/v1.
    A request that fails for now is sent `max_retries` more times."""

    def __init__(self, url: str, model: str, temperature: float = 1.0,
                 max_retries: int = 5):
        self.model = model
        # Newer models want another name for the limit, and take no temperature.
        self.limit = "max_tokens"
        self.options = {"temperature": temperature}
        self.server = {"base_url": url, "max_retries": max_retries,
                       "api_key": os.environ.get("OPENAI_API_KEY") or "none"}
        self.loop: asyncio.AbstractEventLoop | None = None  # the one that `client` is for
        self.client: openai.AsyncOpenAI | None = None
        self.used = {"prompt": 0, "reused": 0, "sampled": 0}
        self.told = False  # why a request was refused

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        loop = asyncio.get_running_loop()
        if self.loop is not loop:  # connections belong to an event loop
            self.loop, self.client = loop, openai.AsyncOpenAI(**self.server)
        # What a model wrote may hold broken Unicode, which no request can.
        messages = [
            {"role": turn.role, "content": turn.text.encode("utf-8", "replace").decode()}
            for turn in node.turns]
        reply = await self.ask(messages, max_tokens)

        choice = reply.choices[0]
        text = choice.message.content or ""
        usage = count(reply.usage, messages, text)
        for name, tokens in usage.items():
            self.used[name] += tokens
        stop = "length" if choice.finish_reason == "length" else "stop"
        return Completion(text, stop=stop, usage=usage)

    async def ask(self, messages: list[dict], max_tokens: int) -> Any:
        """The server's reply, a ChatCompletion of `openai`."""
        limit, options = self.limit, self.options
        try:
            return await self.client.chat.completions.create(
                model=self.model, messages=messages, **{limit: max_tokens}, **options)
        except openai.OpenAIError as error:
            if getattr(error, "status_code", None) not in REFUSALS:
                raise RuntimeError(f"{self.server['base_url']}: {error}") from None
            if "max_completion_tokens" in str(error) and limit == "max_tokens":
                self.limit = "max_completion_tokens"
            elif "temperature" in str(error) and options:
                self.options = {}
            else:
                self.tell(str(error))
                raise Refused(str(error)) from None
        return await self.ask(messages, max_tokens)

    def tell(self, why: str) -> None:
        """Print the first refusal: scores alone would not say what is wrong."""
        if not self.told:
            print(f"{self.model} refuses a request: {why:.200}", file=sys.stderr)
        self.told = True


def count(usage: Any, messages: list[dict], text: str) -> dict[str, int]:
    """Tokens by the server's count, or, where it has none, of four characters each."""
    characters = sum(len(message["content"]) for message in messages)
    details = getattr(usage, "prompt_tokens_details", None)
    prompt = getattr(usage, "prompt_tokens", None)
    sampled = getattr(usage, "completion_tokens", None)
    return {"prompt": characters // 4 if prompt is None else prompt,
            "reused": getattr(details, "cached_tokens", None) or 0,
            "sampled": len(text) // 4 if sampled is None else sampled}
