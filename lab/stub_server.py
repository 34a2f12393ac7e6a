"""A server that speaks the chat-completions protocol, with faults: python stub_server.py FILE.

Prints its port, then serves until it is killed. It answers a question about a term like a small
model that has learnt its task, and counts every word as a token. A fault is chosen by `plan` in
the JSON object that FILE holds: a list of names, drawn from by the conversation's digest for the
first attempt at it; later attempts are served. `always`: the same fault for every attempt. Every
request is appended to FILE.log as one JSON line, after what it was answered with is decided.
"""
import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SETTINGS = json.load(open(sys.argv[1], encoding="utf-8"))
LOCK = threading.Lock()
seen = {}


def words(messages):
    return sum(len(m["content"].split()) for m in messages)


def reply(messages):
    """What the model says: code that searches for the term in quotes, or sentences."""
    system, user = messages[0]["content"], messages[min(1, len(messages) - 1)]["content"]
    term = (re.search(r'"([^"\n]+)"', user) or [None, "?"])[1]
    if SETTINGS.get("says"):
        return SETTINGS["says"]
    if "precision" in messages[0]["content"].lower() and len(messages) == 1:
        return "precision: 8\nrecall: 6"
    if "repl" not in system:
        return "\n".join(s.strip() for s in re.findall(r"The [^.\n]*\.", user) if term in s)
    if "context: dict" in user:
        return (f"```repl\nps = [p for p in context.values() if '{term}' in p]\n"
                f"FINAL(rlm_query_batched('Quote \"{term}\".', ps))\n```")
    return f"```repl\nFINAL(search(context, '{term}', 0))\n```"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(raw).hexdigest()
        asked = json.loads(raw)
        with LOCK:
            attempt = seen[digest] = seen.get(digest, 0) + 1
            plan = SETTINGS.get("plan", ["ok"])
            fault = plan[int(digest[:8], 16) % len(plan)] if attempt == 1 else "ok"
            fault = SETTINGS.get("always", fault)
            if self.headers.get("Authorization") != f"Bearer {SETTINGS.get('key', 'secret')}":
                fault = "401"
            text, messages = reply(asked["messages"]), asked["messages"]
            out = len(text.split())
            if fault == "long":
                text, out = text + " more" * 3 * asked["max_tokens"], out + 3 * asked["max_tokens"]
            with open(sys.argv[1] + ".log", "a", encoding="utf-8") as log:
                log.write(json.dumps({"digest": digest, "fault": fault, "attempt": attempt,
                                      "in": words(messages), "out": out,
                                      "model": asked["model"]}) + "\n")
        body = json.dumps({
            "choices": [{"message": {"role": "assistant", "content": text},
                         "finish_reason": "length" if fault == "long" else "stop"}],
            "usage": {"prompt_tokens": words(messages), "completion_tokens": out,
                      "prompt_tokens_details": {"cached_tokens": 1}}}).encode()
        if fault in ("ok", "long"):
            time.sleep(SETTINGS.get("delay", 0))
            self.send(200, body)
        elif fault == "stall":
            time.sleep(SETTINGS["stall"])
            self.close_connection = True
        elif fault == "cut":  # half of the reply, then the end of the connection
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:len(body) // 2])
            self.close_connection = True
        elif fault == "malformed":
            self.send(200, body[:-5])
        elif fault == "429":
            self.send(429, b'{"error": {"message": "slow down"}}', Retry_After="0.01")
        else:
            key = self.headers.get("Authorization", "")
            self.send(int(fault), json.dumps({"error": {
                "message": f"no luck\nwith {key}"}}).encode())


ThreadingHTTPServer.request_queue_size = 128  # connections that wait; 5 drops some
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
