"""The browsers' WebSocket: who may listen, and that hints arrive over the real channel layer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.layers import get_channel_layer
from channels.routing import URLRouter
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from controlplane.asgi import routes
from controlplane.dashboard import routing
from controlplane.dashboard.routing import websocket_urlpatterns
from kernel import live
from kernel.live import BROWSERS
from tests.controlplane.dashboard.clients import signed_in

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]

ORIGIN = "http://testserver"
TIMEOUT_S = 60.0


untyped: Any = ApplicationCommunicator


@pytest_asyncio.fixture(autouse=True)
async def _connections() -> AsyncIterator[None]:
    """The thread that reads sessions keeps a connection, which would keep the test database."""
    yield
    await sync_to_async(connections.close_all)()


class Tab:
    """A browser tab with the client's session that opens /live."""

    def __init__(self, client: Client, origin: str | None = ORIGIN) -> None:
        cookie = client.cookies.get(settings.SESSION_COOKIE_NAME)
        headers = [(b"cookie", f"{settings.SESSION_COOKIE_NAME}={cookie.value}".encode())] if cookie else []
        headers += [(b"host", b"testserver")] + ([(b"origin", origin.encode())] if origin else [])
        scope = {"type": "websocket", "path": "/live", "query_string": b"", "headers": headers, "subprotocols": []}
        self._wire: Any = untyped(URLRouter(websocket_urlpatterns), scope)

    async def opens(self) -> bool:
        """Whether the server accepts the connection."""
        await self._wire.send_input({"type": "websocket.connect"})
        answer = await self._wire.receive_output(TIMEOUT_S)
        return bool(answer["type"] == "websocket.accept")

    async def hint(self) -> Any:
        return json.loads((await self._wire.receive_output(TIMEOUT_S))["text"])

    async def is_closed(self) -> bool:
        return bool((await self._wire.receive_output(TIMEOUT_S))["type"] == "websocket.close")

    async def sends(self, text: str) -> None:
        await self._wire.send_input({"type": "websocket.receive", "text": text})

    async def closes(self) -> None:
        await self._wire.send_input({"type": "websocket.disconnect", "code": 1001})
        await self._wire.wait(TIMEOUT_S)


async def test_a_stranger_is_refused() -> None:
    assert not await Tab(Client()).opens()


@pytest.mark.parametrize(
    "origin",
    [
        "http://elsewhere.example",
        "http://testserver:9000",
        "https://testserver:8443",
        "ftp://testserver",
        "http://testserver/",
        "null",
        None,
    ],
)
async def test_a_page_of_another_origin_is_refused(origin: str | None) -> None:
    assert not await Tab(await sync_to_async(signed_in)(), origin).opens()


async def test_a_hint_reaches_every_tab_and_says_no_more_than_where_to_look() -> None:
    client = await sync_to_async(signed_in)()
    tabs = [Tab(client), Tab(client)]
    assert [await each.opens() for each in tabs] == [True, True]
    await sync_to_async(live.push)("cells", "sim-70b-us-east-1-1")
    for each in tabs:
        assert await each.hint() == {"topic": "cells", "key": "sim-70b-us-east-1-1"}
        await each.closes()


async def test_what_a_tab_sends_is_ignored() -> None:
    one = Tab(await sync_to_async(signed_in)())
    assert await one.opens()
    await one.sends('{"type": "live.hint"}')
    await get_channel_layer().group_send(BROWSERS, {"type": "live.hint", "topic": "events", "key": ""})
    assert (await one.hint())["topic"] == "events"
    await one.closes()


async def test_a_session_that_is_ended_takes_its_tabs_along_and_no_other() -> None:
    client, other = await sync_to_async(signed_in)(), await sync_to_async(signed_in)()
    ended, stays = Tab(client), Tab(other)
    assert [await ended.opens(), await stays.opens()] == [True, True]
    key = client.cookies[settings.SESSION_COOKIE_NAME].value
    await sync_to_async(live.push_goodbye)(key)
    assert await ended.is_closed()
    await sync_to_async(live.push)("cells")
    assert await stays.hint() == {"topic": "cells", "key": ""}
    await stays.closes()


async def test_one_user_has_so_many_tabs_and_another_none_the_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_OF_USER", 2)
    client, other = await sync_to_async(signed_in)(), Client()
    await other.aforce_login(await User.objects.acreate(username="viewer"))
    tabs = [Tab(client), Tab(client)]
    assert [await each.opens() for each in tabs] == [True, True]
    assert not await Tab(client).opens()
    theirs = Tab(other)
    assert await theirs.opens()
    await tabs.pop().closes()
    again = Tab(client)
    assert await again.opens()
    for each in (*tabs, again, theirs):
        await each.closes()


async def test_a_path_that_is_no_sockets_is_refused_without_an_exception() -> None:
    wire: Any = untyped(routes, {"type": "websocket", "path": "/nothing", "query_string": b"", "headers": []})
    await wire.send_input({"type": "websocket.connect"})
    assert (await wire.receive_output(TIMEOUT_S))["type"] == "websocket.close"
    await wire.send_input({"type": "websocket.disconnect", "code": 1006})
    await wire.wait(TIMEOUT_S)
