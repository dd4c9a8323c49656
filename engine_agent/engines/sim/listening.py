"""The process's HTTP listeners: one uvicorn server on one or two ports, each with an application of its own.

It leaves signals to the process and logs no requests.
"""

import asyncio
import math
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress

import uvicorn

from engine_agent.engines.sim.asgi import App, Receive, Scope, Send
from engine_agent.engines.sim.settings import Endpoint

_KEEP_ALIVE_S = 75
"""Longer than a proxy keeps an idle connection to us, so that it never sends into one that we are closing."""
_BACKLOG = 2048
_DATE_EVERY_S = 1.0


class PortTaken(Exception):
    """A port cannot be listened on; the text says which, and why."""


class HttpListeners:
    """Listens from `start` on; `serve` answers until `stop`."""

    def __init__(self, apps: Mapping[Endpoint, App]) -> None:
        """Applications by where they listen.

        Raises:
            PortTaken: an address cannot be bound.
        """
        self._apps = {endpoint.port: app for endpoint, app in apps.items()}
        self._sockets = [bind_port(endpoint) for endpoint in apps]
        self._server = _Server(
            uvicorn.Config(
                self._dispatch,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                log_level="critical",
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def serve(self) -> None:
        """Answer requests until `stop`, then until those in flight are answered."""
        await self._server.serve(self._sockets)

    def stop(self, grace_s: float) -> None:
        """Accept no connection any more; responses not written after `grace_s` seconds are cut off."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        self._server.stopping.set()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[scope["server"][1]](scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether to stop; this one only renews the header `Date`."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_EVERY_S):
                    await self.stopping.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: the process decides what they mean."""
        yield


def bind_port(endpoint: Endpoint) -> socket.socket:
    """A socket bound to an address, not listening yet.

    Raises:
        PortTaken: it is in use, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((endpoint.host, endpoint.port))
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {endpoint}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
