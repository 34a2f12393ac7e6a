"""A policy behind an HTTP server that speaks the chat-completions protocol: hosted models,
vLLM, llama.cpp and the like. The key is read from OPENAI_API_KEY.

    python ask.py --api http://localhost:8000/v1 --api-model NAME "What is it about?" FILE

The package `openai` sends the requests, and sends them again when a server is busy or
broken. Where the server refuses one for its content or length (400, 413, 422), that node
ends, and the code of its parent sees an error. If it is the root's first request, the tree
counts as failed. Anything else (no server, a wrong key, no such model) is the machine's
failure: the tree has failed, too.

Left out: streaming, log-probabilities, prices, and models that refuse `temperature`
or `top_p`.
"""
import os
from dataclasses import asdict

import openai

from tree import Completion, Lost, Node, Refused, Sampling, printable
from util import MISREAD

REFUSALS = (400, 413, 422)
NEWER = "max_completion_tokens"  # the name of max_tokens for newer models


class API:
    """policy(node, max_tokens, key) -> Completion without ids. `url` ends before
    /chat/completions, as http://localhost:8000/v1."""

    def __init__(self, url: str, model: str, sampling: Sampling = Sampling(),
                 max_retries: int = 5):
        self.model, self.sampling = model, asdict(sampling)
        self.server = {"base_url": url, "max_retries": max_retries,
                       "api_key": os.environ.get("OPENAI_API_KEY") or "none"}
        self.limit = "max_tokens"  # or NEWER, once a server asks for it

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        # What a model wrote may hold broken Unicode, which no request can.
        messages = [{"role": message.role,
                     "content": message.text.encode("utf-8", "replace").decode()}
                    for message in node.conversation]
        limit = self.limit
        try:
            async with openai.AsyncOpenAI(**self.server) as client:
                reply = await client.chat.completions.create(
                    model=self.model, messages=messages, **self.sampling,
                    **{limit: max_tokens})
            choice, used = reply.choices[0], reply.usage
            usage = {"prompt": used.prompt_tokens, "sampled": used.completion_tokens}
            if not all(type(n) is int and 0 <= n < 10 ** 9 for n in usage.values()):
                raise ValueError(f"usage {usage}")
            return Completion(choice.message.content or "", usage=usage)
        except MISREAD as error:
            why = f"a reply that cannot be used, {error!r:.200}"
            raise Lost(f"{self.server['base_url']}: {why}") from None
        except openai.OpenAIError as error:
            status, message = getattr(error, "status_code", None), printable(str(error))
            if status == 400 and limit != NEWER and NEWER in str(error):
                self.limit = NEWER
                return await self(node, max_tokens, key)
            if status not in REFUSALS:
                raise Lost(f"{self.server['base_url']}: {message}") from None
            raise Refused(message) from None
