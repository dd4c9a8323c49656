"""The health of a member without an API, over HTTP on loopback: of a follower always, of a leader while its weights
arrive. `GET /health` answers 200 while it is part of a serving cell, else 503 with the reason. A long poll waits until
the state changes. Members can add pages (`page`)."""

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from time import monotonic

from engine_agent.protocol.local_servers import parse_long_poll, state_name

LOOPBACK = "127.0.0.1"


class MemberHealth:
    def __init__(self, port: int, reason: str) -> None:
        """Listens. `reason`: why it is not ready at first. Raises OSError if the port cannot be bound."""
        self._reason = reason
        self._changed = Condition()
        self.pages: dict[str, Callable[[], bytes | None]] = {}
        self._server = _Server((LOOPBACK, port), self)
        Thread(target=self._server.serve_forever, name="member-health", daemon=True).start()

    def say(self, reason: str) -> None:
        with self._changed:
            self._reason = reason
            self._changed.notify_all()

    def page(self, path: str, content: Callable[[], bytes | None]) -> None:
        """Serves JSON at this path; 404 while `content` returns None."""
        self.pages[path] = content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str) -> tuple[str, dict[str, object]]:
        """Returns why it is not ready, and the body for a request with this query, after a long poll if it asks for
        one."""
        known, for_s = parse_long_poll(query)
        began_s = monotonic()
        with self._changed:
            if known:
                self._changed.wait_for(lambda: known != state_name(self._reason), for_s)
            held_ms = (monotonic() - began_s) * 1000
            return self._reason, {"reason": self._reason, "state": state_name(self._reason), "held_ms": held_ms}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], health: MemberHealth) -> None:
        self.health = health
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 5.0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != "/health":
            content = self.server.health.pages.get(path, lambda: None)()
            missing = json.dumps({"reason": f"only GET /health is served here, not {path[:80]}"}).encode()
            self._send(HTTPStatus.NOT_FOUND if content is None else HTTPStatus.OK, content or missing)
            return
        reason, answer = self.server.health.answer(query)
        self._answer(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, answer)

    def _answer(self, status: HTTPStatus, body: dict[str, object]) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Probes come several times a second and are not logged."""
