"""The WebSocket of browsers. It forwards only hints ("this cell changed"); the browser then refetches pages, which
check permissions. The session must be signed in, and the origin must be this host and port or a trusted origin of
forms. It never sends content."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

from channels.auth import AuthMiddlewareStack
from channels.generic.websocket import AsyncWebsocketConsumer
from channels.security.websocket import WebsocketDenier
from django.conf import settings
from django.http.request import validate_host
from django.urls import path

from kernel.live import BROWSERS

MOST_OF_USER = 50
"""Sockets of one user in this process; a browser opens one for each tab."""
OPEN: Counter[Any] = Counter()
"""User -> open sockets."""


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc] # channels has no types
    """One browser tab. Only signed-in users connect; messages from a tab are ignored."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        user = scope["user"].pk
        OPEN[user] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            OPEN[user] -= 1
            if not OPEN[user]:
                del OPEN[user]

    async def connect(self) -> None:
        user = self.scope["user"]
        if not user.is_authenticated or OPEN[user.pk] > MOST_OF_USER:
            await self.close()
            return
        await self.channel_layer.group_add(BROWSERS, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        await self.channel_layer.group_discard(BROWSERS, self.channel_name)

    async def live_hint(self, message: dict[str, Any]) -> None:
        """Handler of `live.hint` (kernel.live)."""
        await self.send(text_data=json.dumps({"topic": message["topic"], "key": message["key"]}))

    async def live_goodbye(self, message: dict[str, Any]) -> None:
        """Handler of `live.goodbye`: closes the socket if it belongs to this session."""
        if self.scope["session"].session_key == message["session"]:
            await self.close()


Application = Callable[[Any, Any, Any], Awaitable[None]]


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a page of `origin` (`scheme://host:port`) may open a socket at `host` (`host:port`)."""
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    try:
        page = urlsplit(origin)
        asked = urlsplit(f"{page.scheme}://{host}")
        default = {"http": 80, "https": 443}[page.scheme]
        is_same = (page.hostname, page.port or default) == (asked.hostname, asked.port or default)
    except (ValueError, KeyError):
        return False
    is_origin = bool(page.hostname) and origin == f"{page.scheme}://{page.netloc}"
    return is_origin and is_same and validate_host(page.hostname or "", settings.ALLOWED_HOSTS)


class SameOriginOnly:
    """Compares scheme, host and port. The validator of Channels compares only host names, so it accepts another service
    on the same host."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        if is_own_origin(origin, host):
            await self._application(scope, receive, send)
        else:
            await cast(Any, WebsocketDenier())(scope, receive, send)


websocket_urlpatterns = [
    path("live", cast(Any, SameOriginOnly(cast(Any, AuthMiddlewareStack(LiveConsumer.as_asgi()))))),
]
