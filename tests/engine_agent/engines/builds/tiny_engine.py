"""A program of engine `generic` for tests of builds: the standard library only, as it runs in a build's own Python.
It answers each prompt with the path of its interpreter, which proves what served it."""

import argparse
import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": given.alias, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        choice = {"index": 0, "text": sys.prefix, "finish_reason": "stop"}
        self._answer({"id": "1", "object": "text_completion", "choices": [choice], "usage": usage})

    def _answer(self, body: dict[str, object]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


parser = argparse.ArgumentParser()
for name in ("model", "alias", "host", "port", "context-length"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()
