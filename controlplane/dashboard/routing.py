"""The WebSocket that browsers open. Its origin must be one of ALLOWED_HOSTS, its session signed in."""

from channels.auth import AuthMiddlewareStack
from channels.security.websocket import AllowedHostsOriginValidator
from django.urls import path

from controlplane.dashboard.consumers import LiveConsumer

websocket_urlpatterns = [
    path("live", AllowedHostsOriginValidator(AuthMiddlewareStack(LiveConsumer.as_asgi()))),
]
