"""`python -m controlplane.web`: the web process. One server with two listeners: plain HTTP for people and programs,
behind a TLS proxy in production, and TLS of the fleet's own for agents (`controlplane.agent_listener`).

It decides where is listened; `controlplane.asgi` decides what is answered there."""

import argparse
import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, cast

import uvicorn
from django.db import Error

from controlplane.asgi import agents_application, application, hub
from controlplane.connection_door import ConnectionDoor, ConnectionLimits, raised_file_limit
from controlplane.dashboard.warm_up import start_warming
from controlplane.http_connections import HttpConnectionLimit, http_connections
from controlplane.processes import wait_for_database
from controlplane.secret_key import require_secret_key
from controlplane.websocket_protocol import WebSocketProtocol
from fleet.agents.consumers.limits import Lane
from kernel.addresses import is_in_networks, is_loopback
from kernel.control_hosts import SEEN_EVERY_S, control_host_left, control_host_seen, this_host

GRACE_S = 3
"""For requests under way, at the end."""
STOP_REPORT_LIMIT_S = 1.0
MAX_FRAME_BYTES = 256 * 1024
"""The agent protocol's limit (engine_agent.protocol.codec)."""

WS_PING_EVERY_S, WS_PONG_WITHIN_S = 5.0, 10.0
"""Only for clients that have sent nothing since the last ping was due. A host that lost its power does not close its
connections."""

DATE_EVERY_S = 1.0
HEAD_S = 10.0
"""For the head of a request of people and programs, from the connection or the request before it."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status for the shell."""
    from django.conf import settings

    options = _arguments(arguments, settings.SWITCHYARD_PORT, settings.SWITCHYARD_AGENT_PORT)
    require_secret_key()
    wait_for_database()
    wanted = [(options.host, options.port, "SWITCHYARD_PORT")]
    if not settings.PLAIN_LINKS:
        wanted += [(options.agent_host, options.agent_port, "SWITCHYARD_AGENT_PORT")]
    listeners = []
    for host, port, variable in wanted:
        try:
            listeners.append(_bound(host, port))
        except OSError as error:
            sys.stderr.write(f"web cannot listen on {host}:{port}: {error.strerror}; free it, or set {variable}\n")
            return 1
    WebServer(server_config(application), *listeners).run()
    return 0


class WebServer(uvicorn.Server):
    """Uvicorn's server behind two listeners. The one for agents opens once there is a certificate. If `agents` is None,
    agents use the other one."""

    def __init__(self, config: uvicorn.Config, people: socket.socket, agents: socket.socket | None = None) -> None:
        super().__init__(config)
        self._people, self._agents = people, agents
        self._listening: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Uvicorn's loop checks ten times a second whether to stop. This one waits for that, and renews the header
        `Date` once a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_EVERY_S):
                    await self._stopping.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Also called by signals, in the middle of any step of the event loop."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=[])  # none of uvicorn's own
        limits = ConnectionLimits.of_files(raised_file_limit())
        make = http_connections(self.config, self.server_state, HttpConnectionLimit(limits.http, HEAD_S))
        door = ConnectionDoor(self._people, make, limits, is_unlimited=_speaks_for_many)
        door.start(self.config.backlog)
        start_warming()
        self.servers.append(cast(Any, door))
        self._reporting = asyncio.create_task(_report_host())
        if self._agents is not None:
            from controlplane.agent_listener import listen

            config = server_config(agents_application)
            config.load()
            opened = listen(self._agents, config, self.server_state, limits, self._agents_door_opened)
            self._listening = asyncio.create_task(opened)

    def _agents_door_opened(self, door: ConnectionDoor) -> None:
        self.servers.append(cast(Any, door))
        hub.is_listener_full = lambda: door.is_full
        door.pending_hellos = lambda: hub.hello_queue.count
        hub.hello_queue.place_freed = door.admit_waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [task for task in (self._listening, self._reporting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _report_stop()
        await super().shutdown(sockets)


async def _report_host() -> None:
    """Report that this host runs, until cancelled. While the database does not answer, the report is skipped."""
    while True:
        with contextlib.suppress(Error):
            await hub.in_database(Lane.ORDERS, control_host_seen, this_host())
        await asyncio.sleep(SEEN_EVERY_S)


async def _report_stop() -> None:
    with contextlib.suppress(Error, TimeoutError):
        async with asyncio.timeout(STOP_REPORT_LIMIT_S):
            await hub.in_database(Lane.ORDERS, control_host_left, this_host())


def server_config(asgi: Any, **where: Any) -> uvicorn.Config:
    """How both listeners serve an application."""
    return uvicorn.Config(
        asgi,
        interface="asgi3",
        ws=WebSocketProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=WS_PING_EVERY_S,
        ws_ping_timeout=WS_PONG_WITHIN_S,
        access_log=False,
        lifespan="off",
        # A request that came before the answer to the last one ended would share its thread, and so leave its database
        # connection open.
        reset_contextvars=True,
        proxy_headers=False,  # whose headers count, the settings say (controlplane.asgi)
        timeout_graceful_shutdown=GRACE_S,
        log_config=None,  # its lines are ours (engine_agent.protocol.log_lines)
        log_level="warning",
        **where,
    )


def _speaks_for_many(address: str) -> bool:
    """Whether connections from there are those of many clients: of a trusted proxy, or of processes of this host."""
    from django.conf import settings

    return is_loopback(address) or is_in_networks(address, settings.TRUSTED_PROXIES)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _arguments(arguments: Sequence[str], port: int, agent_port: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m controlplane.web", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address for people and programs, plain HTTP")
    parser.add_argument("--port", type=int, default=port, help="SWITCHYARD_PORT if absent")
    parser.add_argument("--agent-host", default="127.0.0.1", help="address for agents, TLS; 0.0.0.0 for other hosts")
    parser.add_argument("--agent-port", type=int, default=agent_port, help="SWITCHYARD_AGENT_PORT if absent")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
