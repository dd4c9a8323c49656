"""Agents' ends of sockets to the application under test, over real PostgreSQL and Valkey."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator

from engine_agent.protocol.codec import decode_down, encode
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.socket import AgentSocket
from fleet.agents.services.enrolment import agent_enrol, join_token_issue
from fleet.nodes.models import NodeReport
from kernel import clock
from tests.fleet import rows

DEADLINE_S = 60.0


@sync_to_async
def credential(node: str) -> str:
    rows.node(node, connected=False)
    token = join_token_issue(
        kind=AgentKind.NODE, subject=node, region="us-east-1", expires_at=clock.now() + timedelta(minutes=1)
    )
    return agent_enrol(token=token, kind="node", subject=node, nonce="5e" * 32, now=clock.now())


def hello(node: str = "n-a", protocol: int = PROTOCOL_VERSION, **fields: Any) -> Hello:
    stated = {"topology": ("x", "y"), "fingerprint": {"kernel": "6"}, **fields}
    return Hello(protocol=protocol, kind=AgentKind.NODE, id=node, boot_id="b", agent_version="1", **stated)


class AgentClient(ApplicationCommunicator):
    """An agent's end of a WebSocket to the application under test."""

    def __init__(self, app: AgentSocket, authorization: str) -> None:
        headers = [(b"authorization", authorization.encode())]
        super().__init__(app, {"type": "websocket", "path": "/agents/ws", "headers": headers})

    async def connect(self) -> Any:
        await self.send_input({"type": "websocket.connect"})
        return await self.receive_output(timeout=DEADLINE_S)

    async def send_message(self, frame: bytes) -> None:
        await self.send_input({"type": "websocket.receive", "text": frame.decode()})

    async def receive_message(self) -> Any:
        event = await self.receive_output(timeout=DEADLINE_S)
        assert event["type"] == "websocket.send", event
        return decode_down(event["text"])

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(timeout=DEADLINE_S)


def client_with(app: AgentSocket, secret: str) -> AgentClient:
    return AgentClient(app, f"Bearer {secret}")


@asynccontextmanager
async def connected(app: AgentSocket, node: str = "n-a") -> AsyncIterator[AgentClient]:
    client = client_with(app, await credential(node))
    assert await client.connect() == {"type": "websocket.accept"}
    await client.send_message(encode(hello(node)))
    yield client
    await client.disconnect()


async def eventually(condition: Callable[[], Any]) -> Any:
    """Poll the database until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if found := await sync_to_async(condition)():
                return found
            await asyncio.sleep(0.02)


def report_of(node: str, **columns: Any) -> Callable[[], Any]:
    return lambda: NodeReport.objects.filter(node_id=node, **columns).first()
