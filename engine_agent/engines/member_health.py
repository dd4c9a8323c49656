"""What a member that has no API says of itself over HTTP, on loopback: a follower always, a leader while its weights
come. `GET /health` is 200 while it is part of a cell that serves, else 503 with the reason; held while nothing changes,
if the question says so. It answers nothing else but what a member adds (`page`)."""

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from time import monotonic

from engine_agent.protocol.local_servers import parse_long_poll, state_name

LOOPBACK = "127.0.0.1"


class MemberHealth:
    """The answer, and the server that gives it from the first moment of the process on."""

    def __init__(self, port: int, reason: str) -> None:
        """Listen; `reason` is why it is not ready at first.

        Raises:
            OSError: the port cannot be had.
        """
        self._reason = reason
        self._changed = Condition()
        self.pages: dict[str, Callable[[], bytes | None]] = {}
        self._server = _Server((LOOPBACK, port), self)
        Thread(target=self._server.serve_forever, name="member-health", daemon=True).start()

    def say(self, reason: str) -> None:
        """Why this member is not ready; empty: it is."""
        with self._changed:
            self._reason = reason
            self._changed.notify_all()

    def page(self, path: str, content: Callable[[], bytes | None]) -> None:
        """Answer there, too, with JSON; 404 while there is none."""
        self.pages[path] = content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str) -> tuple[str, dict[str, object]]:
        """Why it is not ready, and the whole answer to a question of this query, once it may be given."""
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
            missing = json.dumps({"reason": f"it answers GET /health, and has nothing at {path[:80]}"}).encode()
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
        """Probes come several times a second; they are not worth a line."""
