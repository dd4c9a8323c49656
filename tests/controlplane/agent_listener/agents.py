"""Web's listener for agents on a real port, and an agent that connects to it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from asgiref.sync import sync_to_async
from django.db import connections
from uvicorn.server import ServerState

from controlplane.agent_listener import listen
from controlplane.connection_door import ConnectionDoor, ConnectionLimits
from controlplane.websocket_protocol import WebSocketProtocol
from engine_agent.node.connection import AgentConnection, ConnectionSettings
from engine_agent.node.enrolment import Enrolment
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.handlers import NodeHandler
from fleet.agents.consumers.hub import AgentHub
from fleet.agents.consumers.socket import AgentSocket
from fleet.agents.services.authority import authority_ensure
from kernel import clock
from tests.engine_agent.fake_control_plane import eventually
from tests.fleet.agents.agent_client import credential

LIMITS = ConnectionLimits()
DOORS: list[ConnectionDoor] = []
"""Those of the listener that was opened last."""
QUICK = ConnectionSettings(backoff_min_s=0.01, backoff_max_s=0.05, refused_backoff_s=0.2)


@asynccontextmanager
async def running_hub() -> AsyncIterator[AgentHub]:
    hub = AgentHub({AgentKind.NODE: NodeHandler()})
    yield hub
    await hub.stop()
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def listening_for(
    hub: AgentHub, application: Any = None, limits: ConnectionLimits = LIMITS
) -> AsyncIterator[int]:
    """The listener, with an application that knows agents' sockets only, or with another one; its port."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application or AgentSocket(hub), interface="asgi3", ws=WebSocketProtocol, lifespan="off", log_config=None
    )
    config.load()
    state = ServerState()
    servers: list[ConnectionDoor] = []
    listening = asyncio.create_task(listen(bound, config, state, limits, servers.append))
    await eventually(lambda: servers)
    DOORS[:] = servers
    try:
        yield bound.getsockname()[1]
    finally:
        listening.cancel()
        for server in servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await eventually(lambda: not state.connections)


class Agent:
    def __init__(self, home: Path, port: int, text: str) -> None:
        self.home, self.port = home, port
        (home / "credential").parent.mkdir(parents=True, exist_ok=True)
        (home / "credential").write_text(text)
        enrolment = Enrolment(f"https://127.0.0.1:{port}", AgentKind.NODE, "n-a", home)
        self.connection = AgentConnection(
            enrolment=enrolment, hello=self._hello, on_message=lambda _: None, settings=QUICK
        )
        self.identity = self.connection.identity

    def _hello(self) -> Hello:
        return Hello(protocol=PROTOCOL_VERSION, kind=AgentKind.NODE, id="n-a", boot_id="b", agent_version="1")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Agent"]:
        task = asyncio.create_task(self.connection.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def enrolled(home: Path, port: int) -> Agent:
    """One that enrolled, and knows the fleet's authorities."""
    made = Agent(home, port, await credential("n-a"))
    trust = await sync_to_async(authority_ensure)(clock.now())
    made.identity.store_trust(bundle=trust.bundle, revoked="")
    return made


def at(agent: Agent, port: int) -> Agent:
    """The same agent at another listener."""
    home = agent.identity.folder.parent
    return Agent(home, port, (home / "credential").read_text())


async def answers_whole_requests(_: Any, receive: Any, send: Any) -> None:
    """As Django does: it reads the body first."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
