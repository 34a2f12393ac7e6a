"""A server that speaks the chat-completions protocol, with faults, in a thread.

    with Stub(says="4") as server:
        API(server.url, "m")

It counts every word as a token. `log` has a row for each request.
"""
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "secret"  # that it wants


class Stub:
    """`says`: the reply to everything, or a function of its last message. `faults`:
    statuses, or "cut"; the digest of a request picks one for the first attempt, later ones
    are served. `always`: one fault for every attempt."""

    def __init__(self, says: str | Callable, faults: tuple = ("ok",), always: str = ""):
        self.says, self.faults, self.always = says, faults, always
        self.log: list[dict] = []
        self.seen: set[str] = set()
        self.lock = threading.Lock()
        handler = type("Handler", (Handler,), {"stub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> "Stub":
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault(self, raw: bytes) -> str:
        """What befalls a request; "ok" for nothing."""
        digest = hashlib.sha256(raw).hexdigest()
        first = digest not in self.seen
        self.seen.add(digest)
        if self.always:
            return self.always
        return self.faults[int(digest[:8], 16) % len(self.faults)] if first else "ok"


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        asked, stub = json.loads(raw), self.stub
        text = stub.says
        if callable(text):
            text = text(asked["messages"][-1]["content"])
        into = sum(len(m["content"].split()) for m in asked["messages"])
        with stub.lock:
            fault = stub.fault(raw)
            if self.headers["Authorization"] != f"Bearer {KEY}":
                fault = "401"
            stub.log.append({**asked, "fault": fault, "in": into, "out": len(text.split())})

        status, body = 200, {
            "choices": [{"message": {"role": "assistant", "content": text},
                         "finish_reason": "stop"}],
            "usage": {"prompt_tokens": into, "completion_tokens": len(text.split())}}
        if fault.isdecimal():
            status, body = int(fault), {"error": {"message": "no luck"}}
        sent = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "1")
        self.end_headers()
        self.wfile.write(sent[:len(sent) // 2] if fault == "cut" else sent)
