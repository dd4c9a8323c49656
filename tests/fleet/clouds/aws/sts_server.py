"""An STS that answers what a test wants."""

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ANSWER = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
    "<Arn>{arn}</Arn><UserId>AROA:i</UserId><Account>123456789012</Account></GetCallerIdentityResult>"
    "</GetCallerIdentityResponse>"
)
REFUSAL = "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"


@dataclass
class Sts:
    """Answers with a status, headers and a body, and records the requests. `before` runs before each answer. `drips`:
    sends its body one byte at a time while a client reads."""

    url: str
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None
    drips: bool = False
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def knows(self, arn: str) -> None:
        """Answers every signature with this identity."""
        self.status, self.body = 200, ANSWER.format(arn=arn).encode()

    def refuses(self, code: str, status: int = 403) -> None:
        self.status, self.body = status, REFUSAL.format(code=code).encode()


@contextlib.contextmanager
def answering() -> Iterator[Sts]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sts.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
            sts.before()
            self.send_response(sts.status)
            for name, value in sts.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client gave up
                self.wfile.write(sts.body)
                while sts.drips:
                    self.wfile.write(b" ")
                    time.sleep(0.05)  # always within a socket's time-out

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    sts = Sts(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield sts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
