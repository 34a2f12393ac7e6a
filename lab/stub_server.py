"""A server that speaks the chat-completions protocol, with faults, to test lab/api.py with.

    python -m lab.stub_server FILE    prints its URL and key, then serves until Ctrl-C

It answers a question about a term like a small model that has learnt its task, and counts
every word as a token. FILE holds a JSON object:

    plan     names of faults; the digest of a conversation picks one for the first attempt
             at it, and later attempts are served (default: no faults)
    always   one fault for every attempt
    says     the same reply to everything
    refuse   a request whose last message has this in it gets the status 400
    key      the key that it wants (default "secret")
    delay    seconds before a good reply
    stall    seconds before the fault "stall" ends the connection

Each request is appended to FILE.log as a JSON line, once it is decided how it is answered.
"""
import contextlib
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from runtime import console, flags
from runtime.files import read_json

lock = threading.Lock()
attempts: dict[str, int] = {}  # by the digest of a request
settings: dict = {}


def reply(messages: list[dict]) -> str:
    """What the model says: code that searches for the term in quotes, or sentences."""
    if "says" in settings:
        return settings["says"]
    system, user = messages[0]["content"], messages[1]["content"]
    term = re.search(r'"([^"\n]+)"', user)[1]
    if "repl" not in system:
        sentences = re.findall(r"The [^.\n]*\.", user)
        return "\n".join(s.strip() for s in sentences if term in s)
    if "context: dict" in user:
        return (f"```repl\nps = [p for n, p in context.items() if '{term}' in n + p]\n"
                f"FINAL(rlm_query_batched('Quote \"{term}\".', ps))\n```")
    return f"```repl\nFINAL(search(context, '{term}', 0))\n```"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass

    def send(self, status: int, body: bytes, part: int | None = None) -> None:
        """A reply; only `part` bytes of its body, then the connection ends."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(body[:part])

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers.get("Authorization", "")
        asked, digest = json.loads(raw), hashlib.sha256(raw).hexdigest()
        text = reply(asked["messages"])
        into = sum(len(m["content"].split()) for m in asked["messages"])
        out = len(text.split())
        with lock:
            attempt = attempts[digest] = attempts.get(digest, 0) + 1
            plan = settings.get("plan", ["ok"]) if attempt == 1 else ["ok"]
            fault = settings.get("always", plan[int(digest[:8], 16) % len(plan)])
            if settings.get("refuse", "\0") in asked["messages"][-1]["content"]:
                fault = "400"
            if key != f"Bearer {settings.get('key', 'secret')}":
                fault = "401"
            if fault == "long":
                more = 3 * asked["max_tokens"]
                text, out = text + " more" * more, out + more
            with open(settings["log"], "a", encoding="utf-8") as log:
                row = {"fault": fault, "in": into, "out": out, "model": asked["model"]}
                log.write(json.dumps(row) + "\n")

        body = json.dumps({
            "choices": [{"message": {"role": "assistant", "content": text},
                         "finish_reason": "length" if fault == "long" else "stop"}],
            "usage": {"prompt_tokens": into, "completion_tokens": out,
                      "prompt_tokens_details": {"cached_tokens": 1}}}).encode()
        if fault in ("ok", "long"):
            time.sleep(settings.get("delay", 0))
            self.send(200, body)
        elif fault == "stall":
            time.sleep(settings["stall"])
        elif fault == "cut":
            self.send(200, body, part=len(body) // 2)
        elif fault == "malformed":
            self.send(200, body[:-5])
        else:
            complaint = {"error": {"message": f"no luck\nwith {key}"}}
            self.send(int(fault), json.dumps(complaint).encode())


def main() -> None:
    parser = flags.parser("A server to try --api with, and to test it.")
    parser.add_argument("file", help="a JSON object with settings, {} for none: the top of "
                        "lab/stub_server.py tells them")
    file = parser.parse_args().file
    try:
        given = read_json(file)
        if not isinstance(given, dict):
            raise ValueError(f"{file}: not a JSON object")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {console.line(error)}\n")
    settings.update(given)
    settings["log"] = file + ".log"
    ThreadingHTTPServer.request_queue_size = 128  # connections that wait; 5 drops some
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}/v1 wants the key "
          f"{settings.get('key', 'secret')} in OPENAI_API_KEY", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    console.start(main)
