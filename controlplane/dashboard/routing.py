"""The WebSocket that browsers open. The page that opens it must be one of ours: same host and same port, or one of the
origins that forms are taken from. Its session must be signed in."""

from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

from channels.auth import AuthMiddlewareStack
from channels.security.websocket import WebsocketDenier
from django.conf import settings
from django.http.request import validate_host
from django.urls import path

from controlplane.dashboard.consumers import LiveConsumer

Application = Callable[[Any, Any, Any], Awaitable[None]]


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a page of `origin` (`scheme://host:port`) may open what was asked for at `host` (`host:port`)."""
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
    """Channels' own validator compares host names alone: whatever else listens on this machine would be one of ours."""

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
