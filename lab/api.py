"""A policy behind an HTTP server that speaks the chat-completions protocol (POST
URL/chat/completions with `messages`, `max_tokens`, `temperature`; a reply with `choices` and
`usage`): hosted models, vLLM, llama.cpp and the like.

What can go wrong, and what follows:
- busy or broken for now (429, 408, 409, 5xx, a timeout, a cut connection, a reply that is not the
  protocol): asked again after a back-off that doubles, or after what Retry-After says.
- a request that the server refuses (other 4xx), or that failed every time: APIError; that question
  is lost and counted as failed.
- nothing that follows could succeed or be paid for (wrong key, no such model, no server, a budget
  used up): Stop; the run ends and keeps what it has.

Every reply is kept in Account.paid under the key of its completion and handed out again if the
same completion is asked for: a tree that is run once more pays only for what is new.

Left out: streaming, proxies, HTTP/2, logprobs. Standard library and tree.py; no threads.
"""
import argparse
import asyncio
import hashlib
import json
import os
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tree import Completion, Node


RETRIES = 5  # after the first attempt
BACKOFF = 0.5  # seconds before the first of them, twice as many before each next one, times a draw
#                from [0.5, 1.5) so that many callers do not come back at once
LONGEST_WAIT = 60.0  # seconds, whatever Retry-After says
MAX_REPLY = 32_000_000  # bytes


class Stop(Exception):
    """Ends the run: nothing that follows could succeed, or may be paid for."""
    ends_run = True  # eval.ask raises it


class APIError(Exception):
    """One request that failed for good; that question is lost."""
    final = True  # eval.ask does not run the tree again: it was tried often enough


@dataclass(eq=False)
class Account:
    """What the API policies of a run have used together, and may use."""
    max_tokens: int | None = None  # in and out
    max_dollars: float | None = None
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))  # open requests
    tokens: int = 0
    dollars: float = 0.0
    held: dict[int, tuple[int, float]] = field(default_factory=dict)  # reserved for open requests
    open: set[asyncio.Task] = field(default_factory=set)  # requests on their way
    closing: bool = False  # the run ends: nothing is asked again
    retries: int = 0
    paid: dict[str, Completion] = field(default_factory=dict)
    on_paid: Callable[[str, Completion], None] = lambda name, completion: None

    async def reserve(self, who: int, tokens: int, dollars: float) -> None:
        """Set aside what a request may cost; waits while open requests might yet leave enough.
        Raises Stop if they could not."""
        while True:
            if problem := self.over(tokens, dollars):
                raise Stop(problem)
            held_tokens = sum(t for t, _ in self.held.values())
            held_dollars = sum(d for _, d in self.held.values())
            if not self.over(tokens + held_tokens, dollars + held_dollars):
                self.held[who] = (tokens, dollars)
                return
            await asyncio.sleep(0.02)

    def over(self, tokens: int, dollars: float) -> str:
        """Why so much more cannot be used, or ""."""
        for used, more, most, unit in ((self.tokens, tokens, self.max_tokens, "tokens"),
                                       (self.dollars, dollars, self.max_dollars, "dollars")):
            if most is not None and used + more > most:
                return (f"the budget of {most:,} {unit} is used up: {used:,.6g} used, the next "
                        f"request may take {more:,.6g}")
        return ""

    async def drain(self) -> None:
        """Wait for the replies on their way: they will be paid for, so they are kept."""
        self.closing = True
        await asyncio.gather(*self.open, return_exceptions=True)

    def keep(self, name: str, completion: Completion) -> None:
        self.spend(completion)
        self.paid[name] = completion
        self.on_paid(name, completion)

    def spend(self, completion: Completion) -> None:
        self.tokens += completion.usage["prompt"] + completion.usage["sampled"]
        self.dollars += completion.usage["dollars"] or 0.0


class API:
    """policy(node, max_tokens, key) -> Completion without ids; usage has `prompt`, `reused` (read
    from the server's cache) and `sampled` tokens as the server counts them (four characters count
    as one if it does not), and `dollars` (None without a price).

    `price`: dollars for a million tokens in, out, and, if it differs, in from the server's cache.
    Raises ValueError for a URL or key that cannot be one."""

    def __init__(self, url: str, model: str, account: Account, temperature: float = 1.0,
                 timeout: float = 600.0, price: tuple | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError(f"{url!r} is no http(s)://host[:port]/path")
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not self.key.isprintable() or not self.key.isascii():
            raise ValueError("OPENAI_API_KEY holds characters that no key has")
        path = parts.path.rstrip("/")
        self.path = path if path.endswith("/chat/completions") else path + "/chat/completions"
        self.host, self.tls = parts.hostname, None
        self.port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        if parts.scheme == "https":
            self.tls = ssl.create_default_context()
        self.url, self.model, self.account = url, model, account
        self.temperature, self.timeout, self.price = temperature, timeout, price
        self.answered = False  # has any request of this run come through?
        self.limit_field = "max_tokens"
        self.per_character = 0.25  # tokens; raised by what the server counts

    async def __call__(self, node: Node, max_tokens: int, key: tuple) -> Completion:
        messages = [{"role": t.role, "content": t.text.encode("utf-8", "replace").decode()}
                    for t in node.turns]
        name = hashlib.blake2b(repr((self.model, self.temperature, max_tokens, key,
                                     messages)).encode(), digest_size=16).hexdigest()
        if name in self.account.paid:
            return self.account.paid[name]
        characters = sum(len(m["content"]) + 16 for m in messages)  # 16: a message's markup
        async with self.account.gate:
            expected = round(characters * self.per_character)
            await self.account.reserve(id(messages), expected + max_tokens,
                                       self.cost(expected, 0, max_tokens) or 0.0)
            task = asyncio.create_task(self.fetch(messages, max_tokens, name))
            self.account.open.add(task)
            done = await asyncio.shield(task)  # goes on if the run ends: see Account.drain
        self.per_character = max(self.per_character, done.usage["prompt"] / characters)
        return done

    async def fetch(self, messages: list[dict], max_tokens: int, name: str) -> Completion:
        try:
            done = await self.ask(messages, max_tokens, name)
            self.account.keep(name, done)
            return done
        finally:
            del self.account.held[id(messages)]
            self.account.open.discard(asyncio.current_task())

    def cost(self, prompt: int, reused: int, sampled: int) -> float | None:
        if self.price is None:
            return None
        fresh, out, cached = (*self.price, self.price[0])[:3]
        return ((prompt - reused) * fresh + reused * cached + sampled * out) / 1e6

    async def ask(self, messages: list[dict], max_tokens: int, name: str) -> Completion:
        """Send a request until it is answered; see the module's docstring for what can go wrong."""
        rng, problem, status, wait, asked = random.Random(name), "", 0, 0.0, 0.0
        for attempt in range(RETRIES + 1):
            if attempt:
                if self.account.closing:
                    break
                self.account.retries += 1
                await asyncio.sleep(min(LONGEST_WAIT, max(wait, asked)))
            wait, asked = BACKOFF * 2 ** attempt * (0.5 + rng.random()), 0.0
            body = {"model": self.model, "messages": messages, "temperature": self.temperature,
                    self.limit_field: max_tokens}
            try:
                async with asyncio.timeout(self.timeout):
                    status, fields, raw = await self.post(json.dumps(body).encode())
                self.answered = True
                if status == 200:
                    return self.read(raw, messages, max_tokens)
            except TimeoutError:
                status, problem = -1, f"no reply within {self.timeout:g} s"
                continue
            except OSError as error:
                status, problem = 0, str(error) or repr(error)
                continue
            except (EOFError, ValueError, asyncio.LimitOverrunError, RecursionError) as error:
                status, problem = -1, f"a reply that is cut or malformed ({error!s:.100})"
                continue
            problem = f"status {status} ({self.complaint(raw)})"
            if status in (401, 402, 403):
                raise Stop(f"{self.url} refuses the key in OPENAI_API_KEY: {problem}"
                           if self.key else f"{self.url} wants a key; OPENAI_API_KEY is not set: "
                           f"{problem}")
            if status == 404 or 300 <= status < 400:
                raise Stop(f"{self.url} has no model {self.model!r} there: {problem}")
            if status == 400 and b"max_completion_tokens" in raw and body.get("max_tokens"):
                self.limit_field = "max_completion_tokens"  # what newer hosted models call it
            elif status < 500 and status not in (408, 409, 429):
                raise APIError(f"{self.url}: {problem}")
            try:
                asked = float(fields.get("retry-after", 0))
            except ValueError:  # it may be a date
                pass
        message = f"{self.url}: {problem}, after {RETRIES + 1} attempts"
        if status == 0 or status == 429 or not self.answered:
            raise Stop(message)  # no server, or no more for us: the next question would fare alike
        raise APIError(message)

    async def post(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own -> status, header fields, body."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
        try:
            host = f"[{self.host}]" if ":" in self.host else self.host
            secret = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
            writer.write(f"POST {self.path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{secret}"
                         f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                         "Accept: application/json\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split(" ")[1]) if " " in lines[0] else 0
            if not 200 <= status < 600:
                raise ValueError(f"not HTTP: {lines[0]!r:.60}")
            fields = {name.strip().lower(): value.strip() for name, _, value in
                      (line.partition(":") for line in lines[1:])}
            return status, fields, await self.body(reader, fields)
        finally:
            writer.close()

    async def body(self, reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
        if "chunked" in fields.get("transfer-encoding", "").lower():
            parts, total = [], 0
            while size := int((await reader.readline()).split(b";")[0], 16):
                total += self.checked(size)
                self.checked(total)
                parts.append(await reader.readexactly(size))
                await reader.readexactly(2)
            return b"".join(parts)
        if "content-length" in fields:
            return await reader.readexactly(self.checked(int(fields["content-length"])))
        raw = b""
        while part := await reader.read(1 << 16):
            raw += part
            self.checked(len(raw))
        return raw

    def checked(self, size: int) -> int:
        if not 0 <= size <= MAX_REPLY:
            raise ValueError(f"a body of {size} bytes")
        return size

    def read(self, raw: bytes, messages: list[dict], max_tokens: int) -> Completion:
        """A reply's text and usage. Raises ValueError if it is not the protocol."""
        try:
            data = json.loads(raw)
            choice = data["choices"][0]
            text = choice["message"].get("content") or ""
            usage = data.get("usage") or {}
            prompt = usage.get("prompt_tokens", sum(len(m["content"]) for m in messages) // 4)
            sampled = usage.get("completion_tokens", len(text) // 4)
            reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no chat completion: {error!r}") from None
        if not isinstance(text, str) or not all(
                type(n) is int and n >= 0 for n in (prompt, sampled, reused)):
            raise ValueError("no chat completion: text or usage of a wrong type")
        stop = "length" if choice.get("finish_reason") == "length" else "stop"
        if sampled > max_tokens:  # paid for, but cut as it should have been, in proportion
            text, stop = text[:len(text) * max_tokens // sampled], "length"
        return Completion(text, stop=stop, usage={
            "prompt": prompt, "reused": min(reused, prompt), "sampled": sampled,
            "dollars": self.cost(prompt, min(reused, prompt), sampled)})

    def complaint(self, raw: bytes) -> str:
        """What an error's body says, in one line and without the key, should it be quoted."""
        text = " ".join(raw[:1000].decode("utf-8", "replace").split())
        try:
            text = json.loads(raw)["error"]["message"]
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        text = str(text).replace(self.key, "***") if self.key else str(text)
        return "".join(c if c.isprintable() else " " for c in text)[:200]


# ------------------------------------------------------------------------------------------
# The command line

def add_flags(group) -> None:
    """Adds the flags of a server to a group of argparse."""
    add = group.add_argument
    add("--api", metavar="URL", help="OpenAI-compatible server, as http://localhost:8000/v1")
    add("--api-model", metavar="NAME", help="its model")
    add("--price", help="dollars per million tokens IN,OUT or IN,OUT,CACHED (default: unknown)")
    add("--budget-tokens", type=int, help="end the run before the server has counted more, in "
        "and out, earlier parts of a resumed run included (default: none)")
    add("--budget-dollars", type=float, help="the same in dollars; needs --price (default: "
        "none)")
    add("--concurrency", type=int, default=8, help="requests and questions at a time with "
        "--api (default 8)")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default 600)")


def from_flags(args: argparse.Namespace, model: str, account: Account) -> API:
    """The policy of these flags. Raises ValueError for a URL or a price that is none."""
    price = None
    if args.price:
        try:
            price = tuple(float(part) for part in args.price.split(","))
        except ValueError:
            price = ()
        if len(price) not in (2, 3) or not all(0 <= p < float("inf") for p in price):
            raise ValueError(f"--price {args.price}: it is IN,OUT or IN,OUT,CACHED, in dollars "
                             "per million tokens")
    return API(args.api, model or args.api_model, account, args.temperature, args.timeout, price)
