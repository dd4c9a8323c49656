"""What a follower says of itself over HTTP, on loopback: `GET /health` is 200 while it is part of a cell that serves,
else 503 with the reason. It answers nothing else."""

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

LOOPBACK = "127.0.0.1"


class FollowerHealth:
    """The answer, and the server that gives it from the first moment of the process on."""

    def __init__(self, port: int) -> None:
        """Listen.

        Raises:
            OSError: the port cannot be had.
        """
        self.reason = "importing vLLM"
        self._server = _Server((LOOPBACK, port), self)
        Thread(target=self._server.serve_forever, name="follower-health", daemon=True).start()

    def say(self, reason: str) -> None:
        """Why this member is not ready; empty: it is."""
        self.reason = reason


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], health: FollowerHealth) -> None:
        self.health = health
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 5.0

    def do_GET(self) -> None:
        reason = self.server.health.reason
        if self.path != "/health":
            self._answer(HTTPStatus.NOT_FOUND, {"reason": "a follower answers GET /health only"})
        elif reason:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"reason": reason})
        else:
            self._answer(HTTPStatus.OK, {})

    def _answer(self, status: HTTPStatus, body: dict[str, str]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Probes come several times a second; they are not worth a line."""
