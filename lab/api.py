"""A policy behind an HTTP server that speaks the chat-completions protocol: hosted models,
vLLM, llama.cpp and the like. A request is POST URL/chat/completions with `messages`,
`max_tokens` and `temperature`; a reply has `choices` and `usage`.

What can go wrong, and what follows:
- The server is busy or broken for now (429, 408, 409, 5xx, a timeout, a cut connection, a
  reply that is not the protocol): the request is sent again after a back-off that doubles,
  or after what Retry-After says.
- It refuses a request (other 4xx) although it has served others, or serves a short one that
  is sent to find out: Refused. The model has asked for what cannot be had: that node ends,
  and its parent's code sees an error.
- It refuses the short one, too, or fails every time: APIError. That question is lost and
  counted as failed.
- Nothing that follows could succeed or be paid for (wrong key, no such model, no server, a
  budget used up): Stop. The run ends and keeps what it has.

Every reply is kept in Account.paid under a digest of its request, and is returned again if
the same request is made: a tree that is run once more pays only for what is new.

Each open request waits in a thread, since the standard library's client blocks. Left out:
streaming, logprobs. Standard library and tree.py.
"""
import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPMessage, IncompleteRead
from urllib import request
from urllib.parse import urlsplit

from runtime.threads import in_thread
from tree import Completion, Node, Refused


RETRIES = 5  # after the first attempt
BACKOFF = 0.5  # seconds before the first retry; doubled for each next one, and multiplied
#                by a draw from [0.5, 1.5), so that not all callers come back at once
LONGEST_WAIT = 60.0  # seconds, whatever Retry-After says
MAX_REPLY = 32_000_000  # bytes
PROBE = [{"role": "user", "content": "Say hello."}]  # that any server serves


class Stop(Exception):
    """Ends the run: nothing that follows could succeed, or may be paid for."""
    ends_run = True  # eval.ask raises it


class Unreachable(Stop):
    """No server, or no more for us now: others would fare alike, but it may pass."""


class APIError(Exception):
    """One request that failed for good; its question is lost."""
    final = True  # eval.ask does not run the tree again


class Unavailable(APIError):
    """A server that failed every time. It may be well again later."""


class AnyStatus(request.HTTPErrorProcessor):
    """Returns every reply as it is. No redirect is followed: it would get the key."""

    def http_response(self, asked, reply):
        return reply

    https_response = http_response


@dataclass(eq=False)
class Account:
    """What the API policies of a run have used together, and what they may use."""
    max_tokens: int | None = None  # in and out
    max_dollars: float | None = None
    at_once: int = 8  # requests
    tokens: int = 0
    dollars: float = 0.0
    retries: int = 0
    paid: dict[str, Completion] = field(default_factory=dict)
    on_paid: Callable[[str, Completion], None] = lambda name, completion: None
    held: list[tuple[int, float]] = field(default_factory=list)  # tokens and dollars that
    #                                                             open requests may take
    open: set[asyncio.Task] = field(default_factory=set)  # requests on their way
    closing: bool = False  # the run ends: nothing is asked again
    gates: tuple | None = None  # an event loop, and its gate

    def gate(self) -> asyncio.Semaphore:
        """What lets `at_once` requests through. Each event loop has one of its own."""
        loop = asyncio.get_running_loop()
        if self.gates is None or self.gates[0] is not loop:
            self.gates = loop, asyncio.Semaphore(self.at_once)
        return self.gates[1]

    async def reserve(self, tokens: int, dollars: float) -> None:
        """Set aside what a request may cost. Waits while open requests might yet leave
        enough; raises Stop if they could not."""
        while problem := self.over([*self.held, (tokens, dollars)]):
            if self.over([(tokens, dollars)]):
                raise Stop(problem)
            await asyncio.sleep(0.02)
        self.held.append((tokens, dollars))

    def over(self, requests: list[tuple[int, float]]) -> str:
        """Why requests that may take so much do not fit; "" if they do."""
        tokens, dollars = map(sum, zip(*requests))
        for used, more, most, unit in (
                (self.tokens, tokens, self.max_tokens, "tokens"),
                (self.dollars, dollars, self.max_dollars, "dollars")):
            if most is not None and used + more > most:
                return (f"the budget of {most:,} {unit} is used up: {used:,.6g} used, the "
                        f"next request may take {more:,.6g}")
        return ""

    def spend(self, completion: Completion) -> None:
        self.tokens += completion.usage["prompt"] + completion.usage["sampled"]
        self.dollars += completion.usage["dollars"] or 0.0

    async def drain(self) -> None:
        """Wait for the replies on their way: they will be paid for, so they are kept."""
        self.closing = True
        await asyncio.gather(*self.open, return_exceptions=True)


class API:
    """policy(node, max_tokens, key) -> Completion without ids.

    Its usage has the `prompt`, `reused` (read from the server's cache) and `sampled` tokens
    as the server counts them; if it does not, four characters count as one. It also has
    `dollars`, None without a price. `price`: dollars per million tokens in, out, and, if it
    differs, in from the server's cache.

    Raises ValueError for a URL or key that cannot be one."""

    def __init__(self, url: str, model: str, account: Account, temperature: float = 1.0,
                 timeout: float = 600.0, price: tuple | None = None):
        parts = urlsplit(url)
        odd = parts.username or parts.query or parts.port == 0
        if parts.scheme not in ("http", "https") or not parts.hostname or odd:
            raise ValueError(f"{url!r} is no http(s)://host[:port]/path")
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not self.key.isprintable() or not self.key.isascii():
            raise ValueError("OPENAI_API_KEY holds characters that no key has")
        self.endpoint = url.rstrip("/").removesuffix("/chat/completions")
        self.endpoint += "/chat/completions"
        self.fields = {"Content-Type": "application/json", "User-Agent": "eval.py"}
        if self.key:
            self.fields["Authorization"] = f"Bearer {self.key}"
        self.opener = request.build_opener(AnyStatus)
        self.url, self.model, self.account = url, model, account
        self.temperature, self.timeout, self.price = temperature, timeout, price
        self.told = False  # that the server is silent
        self.answered = False  # has any request of this run come through?
        self.served = False  # and been answered with a completion?
        self.limit_field = "max_tokens"
        self.fixed_temperature = False  # the model takes none but its own
        self.per_character = 0.25  # tokens; raised by what the server counts

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        messages = [
            {"role": turn.role, "content": turn.text.encode("utf-8", "replace").decode()}
            for turn in node.turns]
        words = repr((self.model, self.temperature, max_tokens, key, messages))
        name = hashlib.blake2b(words.encode(), digest_size=16).hexdigest()
        if name in self.account.paid:
            self.served = True
            return self.account.paid[name]
        characters = sum(len(m["content"]) + 16 for m in messages)  # 16: a message's markup
        asked = time.monotonic()
        async with self.account.gate():
            expected = round(characters * self.per_character)
            held = (expected + max_tokens, self.cost(expected, 0, max_tokens) or 0.0)
            await self.account.reserve(*held)
            waited = time.monotonic() - asked
            task = asyncio.create_task(self.fetch(messages, max_tokens, name, held))
            self.account.open.add(task)
            done = await asyncio.shield(task)  # goes on if the run ends: see Account.drain
        self.per_character = max(self.per_character, done.usage["prompt"] / characters)
        return replace(done, usage=done.usage | {"waited": waited})

    async def fetch(self, messages: list[dict], max_tokens: int, name: str,
                    held: tuple[int, float]) -> Completion:
        """Ask, and keep what was paid for."""
        account = self.account
        try:
            done = await self.ask(messages, max_tokens, name)
            account.spend(done)
            account.paid[name] = done
            account.on_paid(name, done)
            return done
        finally:
            account.held.remove(held)
            account.open.discard(asyncio.current_task())

    def cost(self, prompt: int, reused: int, sampled: int) -> float | None:
        if self.price is None:
            return None
        fresh, out, cached = (*self.price, self.price[0])[:3]
        return ((prompt - reused) * fresh + reused * cached + sampled * out) / 1e6

    async def ask(self, messages: list[dict], max_tokens: int, name: str) -> Completion:
        """Send a request until it is answered. Raises Stop or APIError, as the top of this
        file says."""
        rng = random.Random(name)
        problem, status, asked = "", 0, 0.0
        for attempt in range(RETRIES + 1):
            wait = BACKOFF * 2 ** (attempt - 1) * (0.5 + rng.random())
            if attempt:
                if self.account.closing:
                    break
                if not (self.answered or self.told):  # a dead server takes a while
                    self.told = True
                    print(f"no answer from {self.url}, asking again", file=sys.stderr)
                self.account.retries += 1
                await asyncio.sleep(min(LONGEST_WAIT, max(wait, asked)))
            asked = 0.0
            body = {"model": self.model, "messages": messages, self.limit_field: max_tokens}
            if not self.fixed_temperature:
                body["temperature"] = self.temperature
            try:
                status, fields, raw = await self.send(body)
                self.answered = True
                if status == 200:
                    done = self.read(raw, messages, max_tokens)
                    self.served = True
                    return done
            except TimeoutError:
                status, problem = -1, f"no reply within {self.timeout:g} s"
                continue
            except (HTTPException, ValueError, RecursionError) as error:
                said = self.complaint(str(error).encode())
                status, problem = -1, f"a reply that is cut or malformed ({said})"
                continue
            except OSError as error:
                status, problem = 0, str(error) or repr(error)
                continue

            problem = f"status {status} ({self.complaint(raw)})"
            if status in (401, 402) or status == 403 and not self.served:
                says = "wants a key, and OPENAI_API_KEY is not set"
                if self.key:
                    says = "refuses the key in OPENAI_API_KEY"
                raise Stop(f"{self.url} {says}: {problem}")
            if status == 404 or 300 <= status < 400:
                raise Stop(f"{self.url} has no model {self.model!r} there: {problem}")
            if status == 400 and b"max_completion_tokens" in raw and "max_tokens" in body:
                self.limit_field = "max_completion_tokens"  # its name in newer models
            elif status == 400 and b"temperature" in raw and "temperature" in body:
                self.fixed_temperature = True
            elif status < 500 and status not in (408, 409, 429):
                serves = self.served or await self.serves()
                raise (Refused if serves else APIError)(f"{self.url}: {problem}")
            try:
                asked = float(fields.get("Retry-After", 0))
            except ValueError:  # it may be a date
                pass

        message = f"{self.url}: {problem}, after {RETRIES + 1} attempts"
        if status in (0, 429) or not self.answered:
            raise Unreachable(message)
        raise Unavailable(message)

    async def serves(self) -> bool:
        """Whether the server serves anything: a short request that none refuses."""
        body = {"model": self.model, "messages": PROBE, self.limit_field: 16}
        try:
            status, _, raw = await self.send(body)
            if status == 200:
                self.account.spend(self.read(raw, PROBE, 16))
                self.served = True
        except (OSError, HTTPException, ValueError, RecursionError):
            pass
        return self.served

    async def send(self, body: dict) -> tuple[int, HTTPMessage, bytes]:
        """`post` in a thread. Raises TimeoutError."""
        data = json.dumps(body).encode()
        async with asyncio.timeout(self.timeout):
            return await in_thread(lambda: self.post(data))

    def post(self, body: bytes) -> tuple[int, HTTPMessage, bytes]:
        """One request on a connection of its own -> status, header fields, body. Blocks."""
        asked = request.Request(self.endpoint, body, self.fields)
        end, raw = time.monotonic() + self.timeout, bytearray()
        with self.opener.open(asked, timeout=self.timeout) as reply:
            while part := reply.read1(1 << 16):
                raw += part
                if time.monotonic() > end:
                    raise TimeoutError
                if len(raw) > MAX_REPLY:
                    raise ValueError(f"more than {MAX_REPLY:,} bytes")
            if reply.length:  # of what it announced, so much is missing
                raise IncompleteRead(bytes(raw), reply.length)
        return reply.status, reply.headers, bytes(raw)

    def read(self, raw: bytes, messages: list[dict], max_tokens: int) -> Completion:
        """A reply's text and usage. Raises ValueError if it is not the protocol."""
        try:
            data = json.loads(raw)
            choice = data["choices"][0]
            text = choice["message"].get("content") or ""
            if isinstance(text, list):  # of parts
                text = "".join(part["text"] for part in text if part["type"] == "text")
            usage = {name: value for name, value in (data.get("usage") or {}).items()
                     if value is not None}
            characters = sum(len(m["content"]) for m in messages)
            prompt = usage.get("prompt_tokens", characters // 4)
            sampled = usage.get("completion_tokens", len(text) // 4)
            reused = usage.get("prompt_tokens_details", {}).get("cached_tokens") or 0
            details = usage.get("completion_tokens_details", {})
            thought = details.get("reasoning_tokens") or 0
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no chat completion: {error!r}") from None
        numbers = prompt, sampled, reused, thought
        counts = all(type(n) is int and n >= 0 for n in numbers)
        if not isinstance(text, str) or not counts:
            raise ValueError("no chat completion: text or usage of a wrong type")
        stop = "length" if choice.get("finish_reason") == "length" else "stop"
        said = sampled - thought  # a thought is paid for, but is not in the text
        if said > max_tokens:  # cut as it should have been, in proportion
            text, stop = text[:len(text) * max_tokens // said], "length"
        reused = min(reused, prompt)
        return Completion(text, stop=stop, usage={
            "prompt": prompt, "reused": reused, "sampled": sampled,
            "dollars": self.cost(prompt, reused, sampled)})

    def complaint(self, raw: bytes) -> str:
        """What a server says, in one line, and without the key if it quotes it."""
        text = raw[:1000].decode("utf-8", "replace")
        try:
            text = str(json.loads(raw)["error"]["message"])
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        if self.key:
            text = text.replace(self.key, "***")
        text = "".join(c if c.isprintable() else " " for c in text)
        return " ".join(text.split())[:200]


# ------------------------------------------------------------------------------------------
# The command line

def add_flags(add: Callable) -> None:
    """The flags of a server; `add` is add_argument of argparse."""
    add("--api", metavar="URL", help="OpenAI-compatible, as http://localhost:8000/v1")
    add("--api-model", metavar="NAME", help="its model")
    add("--price", help="dollars per million tokens IN,OUT or IN,OUT,CACHED (default: "
        "unknown)")
    add("--budget-tokens", type=int, help="end the run before the server has counted more, "
        "in and out, earlier parts of a resumed run included (default: none)")
    add("--budget-dollars", type=float, help="the same in dollars; needs --price (default: "
        "none)")
    add("--concurrency", type=int, default=8, help="requests and questions at a time "
        "(default 8)")
    add("--timeout", type=float, default=600.0, help="seconds per request (default 600)")


def from_flags(args: argparse.Namespace, model: str, account: Account) -> API:
    """The policy of these flags. Raises ValueError for a URL or a price that is none."""
    price = None
    if args.price:
        try:
            price = tuple(float(part) for part in args.price.split(","))
        except ValueError:
            price = ()
        if len(price) not in (2, 3) or not all(0 <= p < float("inf") for p in price):
            raise ValueError(f"--price {args.price}: it is IN,OUT or IN,OUT,CACHED, in "
                             "dollars per million tokens")
    return API(args.api, model or args.api_model, account, args.temperature, args.timeout,
               price)
