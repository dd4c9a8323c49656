"""Where HTTP, browsers' WebSockets and agents' WebSockets part ways."""

import gc
import os
from importlib import import_module
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
os.environ.setdefault("SWITCHYARD_DATABASE_POOL", "32")

from django.core.asgi import get_asgi_application

from controlplane.secret_key import require_secret_key

require_secret_key()  # before all that takes its time to load
http_application = get_asgi_application()  # loads the apps; what follows needs them

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.security.websocket import WebsocketDenier  # noqa: E402
from django.conf import settings  # noqa: E402
from django.urls import path, re_path  # noqa: E402
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware  # noqa: E402

from controlplane.api.change_feed import ChangeFeed  # noqa: E402
from controlplane.api.watch_middleware import WatchMiddleware  # noqa: E402
from controlplane.borders import TextRequest  # noqa: E402
from controlplane.connection_door import ClientShare  # noqa: E402
from controlplane.dashboard.routing import websocket_urlpatterns  # noqa: E402
from controlplane.request_bodies import AGENT_ONLY_PATHS, INGRESS_PATHS, PathsOf, RequestBodies  # noqa: E402
from engine_agent.protocol.states import AgentKind  # noqa: E402
from fleet.agents.consumers.handlers import MachineHandler, NodeHandler  # noqa: E402
from fleet.agents.consumers.hub import AgentHub  # noqa: E402
from fleet.agents.consumers.socket import AgentSocket  # noqa: E402
from traffic.async_requests.consumers import AcceptAsync  # noqa: E402
from traffic.responses.api import CreateResponse  # noqa: E402
from traffic.routing.consumers import IngressHandler  # noqa: E402

cast(Any, http_application).request_class = TextRequest

hub = AgentHub(
    {AgentKind.NODE: NodeHandler(), AgentKind.INGRESS: IngressHandler(), AgentKind.MACHINE: MachineHandler()}
)

routes = ProtocolTypeRouter(
    {
        "http": RequestBodies(
            AcceptAsync(CreateResponse(cast(Any, WatchMiddleware(cast(Any, http_application), ChangeFeed())))),
        ),
        "websocket": URLRouter(
            [
                path("agents/ws", cast(Any, AgentSocket(hub))),
                *websocket_urlpatterns,
                re_path(
                    "", cast(Any, WebsocketDenier.as_asgi())
                ),  # else every unknown path leaves a traceback in the log
            ]
        ),
    }
)

plain_routes = routes if settings.PLAIN_LINKS else PathsOf(routes, AGENT_ONLY_PATHS, are_served=False)
application = (
    ProxyHeadersMiddleware(cast(Any, ClientShare(cast(Any, plain_routes))), settings.TRUSTED_PROXIES)
    if settings.TRUSTED_PROXIES
    else plain_routes
)
"""For browsers and API clients. Uvicorn trusts proxy headers of every process on this host by default; web turns that
off."""
agents_application = PathsOf(routes, (*AGENT_ONLY_PATHS, *INGRESS_PATHS), are_served=True)
"""For agents, over TLS, and for requests that ingresses forward."""

import_module(settings.ROOT_URLCONF)  # every view, so that no first request waits for it
gc.freeze()  # imported objects are never freed; scanning them in each collection would pause every request
