"""A real HTTP server that webhooks may call, with the received messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from asgiref.sync import async_to_sync

from fleet.webhooks.planner import WebhookSettings
from fleet.webhooks.services import WebhookSender

Answer = Callable[[BaseHTTPRequestHandler], None]


def answering(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@dataclass
class Receiver:
    port: int
    answer: Answer = field(default_factory=lambda: answering(204))
    heard: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"


@contextmanager
def receiver() -> Iterator[Receiver]:
    known: list[Receiver] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known[0].heard.append((self.path, dict(self.headers), body))
            known[0].answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # default: five; on a busy machine the kernel resets further connections

    server = Server(("127.0.0.1", 0), Handler)
    known.append(Receiver(server.server_address[1]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield known[0]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def deliveries_send(*, now: datetime, settings: WebhookSettings) -> int:
    """One pass of a sender, until its attempts end. Returns their number."""

    async def send() -> int:
        sender = WebhookSender(settings, lambda: now)
        begun = await sender.step()
        await sender.idle()
        return begun

    return async_to_sync(send)()
