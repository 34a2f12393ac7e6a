"""A server that speaks the chat-completions protocol, with faults, in a thread.

    with Stub(says="4") as server:
        API(server.url, "m")

It counts every word as a token. `log` has a row for each request.
"""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "secret"  # that it wants


class Stub:
    """`says`: the reply to everything. `always`: the status of every attempt, in place of
    a reply. `limit`: the name of max_tokens; without it a request is refused."""

    def __init__(self, says: str, always: str = "", limit: str = "max_tokens",
                 raw: str = ""):
        self.raw = raw  # in place of each reply
        self.says, self.always, self.limit = says, always, limit
        self.log: list[dict] = []
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


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.stub
        text = stub.says
        into = sum(len(m["content"].split()) for m in asked["messages"])
        with stub.lock:
            fault = stub.always or ("" if stub.limit in asked else "400")
            if self.headers["Authorization"] != f"Bearer {KEY}":
                fault = "401"
            stub.log.append(asked)

        status, body = 200, {
            "choices": [{"message": {"role": "assistant", "content": text},
                         "finish_reason": "stop"}],
            "usage": {"prompt_tokens": into, "completion_tokens": len(text.split())}}
        if fault:
            status, body = int(fault), {"error": {"message": f"no luck, use {stub.limit}"}}
        sent = (stub.raw or json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "1")
        self.end_headers()
        self.wfile.write(sent)
