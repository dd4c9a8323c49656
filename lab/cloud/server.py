"""The whole World, with all its handlers, on a port of the loopback. Import it from here."""

import contextlib
import threading
from collections.abc import Iterator
from socketserver import BaseServer

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from lab.cloud import account, ec2_describe, ec2_launch, ecs, entry, stack
from lab.cloud.world import World

__all__ = ["World", "account", "ec2_describe", "ec2_launch", "ecs", "entry", "serve", "stack"]


ENDS_WITHIN_S = 0.02
"""How often a server checks whether to stop. The default of 0.5 s would delay every test."""


class QuietRequests(MotoRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Of a call there is a `Made`."""


@contextlib.contextmanager
def serve(world: World, port: int = 0) -> Iterator[str]:
    server = make_server("127.0.0.1", port, world, threaded=True, request_handler=QuietRequests)
    world.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        with serving(server, "cloud", ENDS_WITHIN_S):
            yield world.endpoint
    finally:
        world.forget()


@contextlib.contextmanager
def serving(server: BaseServer, name: str, ends_within_s: float = 0.05) -> Iterator[None]:
    """Serve by a thread of this process, and close the server's socket at the end."""
    thread = threading.Thread(target=server.serve_forever, args=[ends_within_s], name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
