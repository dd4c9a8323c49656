"""Requests and WebSockets of one client behind a trusted proxy."""

import asyncio
from typing import Any, cast

import pytest

from controlplane import connection_door
from controlplane.connection_door import ClientShare
from tests.engine_agent.fake_control_plane import eventually

pytestmark = pytest.mark.asyncio


class Slow:
    """An application that answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def answered(application: ClientShare, address: str, kind: str = "http") -> Any:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "method": "GET", "path": "/", "headers": [], "client": (address, 1)}
    await application(scope, receive, send)
    return sent[0].get("status", sent[0]["type"])


async def test_a_client_has_so_many_under_way_and_others_and_this_host_none_the_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_door, "MOST_OF_NETWORK", 2)
    slow = Slow()
    application = ClientShare(cast(Any, slow))
    addresses = ["2001:db8::1", "2001:db8::2", "127.0.0.1", "127.0.0.1", "127.0.0.1", "203.0.113.9"]
    waiting = [asyncio.create_task(answered(application, address)) for address in addresses]
    await eventually(lambda: application.under_way.total() == len(addresses))
    assert await answered(application, "2001:db8::3") == 429, "a /64 counts as one client"
    assert await answered(application, "2001:db8::3", "websocket") == "websocket.close"
    slow.may_answer.set()
    assert await asyncio.gather(*waiting) == [200] * len(addresses)
    assert not application.under_way
    assert await answered(application, "2001:db8::3") == 200
