"""The whole World, with all its handlers, on a port of the loopback. Import it from here."""

import contextlib
import threading
from collections.abc import Iterator

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from lab.cloud import account, ec2_describe, ec2_launch, entry, stack
from lab.cloud.world import World

__all__ = ["World", "account", "ec2_describe", "ec2_launch", "entry", "serve", "stack"]


ENDS_WITHIN_S = 0.02
"""How often a server checks whether to stop. The default of 0.5 s would delay every test."""


class QuietRequests(MotoRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Of a call there is a `Made`."""


@contextlib.contextmanager
def serve(world: World, port: int = 0) -> Iterator[str]:
    """The World on a port of the loopback, by a thread of this process; yields its URL."""
    server = make_server("127.0.0.1", port, world, threaded=True, request_handler=QuietRequests)
    thread = threading.Thread(target=server.serve_forever, args=[ENDS_WITHIN_S], name="cloud", daemon=True)
    thread.start()
    world.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield world.endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        world.forget()
