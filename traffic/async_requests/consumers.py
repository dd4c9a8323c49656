"""Accepts near-real-time requests over HTTP, in front of Django: its middlewares and a thread for each request would
cost several times as much as the request. Decides nothing; `services.group_intake` does."""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any

from django.db import DatabaseError

from kernel.metrics import HTTP_REQUESTS, HTTP_SECONDS
from kernel.tracing import usable_request_id
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.group_intake import GroupIntake
from traffic.async_requests.services.intake import AsyncSubmission
from traffic.files.services.store_protocol import StoreAway
from traffic.tenants.api import APPLICATION, refusal_json
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

PREFIX = "/v1/async/"
ENDPOINTS = {f"{PREFIX}chat/completions": "/v1/chat/completions", f"{PREFIX}completions": "/v1/completions"}
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
_CLIENT_GONE = 499

log = logging.getLogger(__name__)


class AcceptAsync:
    """Serves POST of `ENDPOINTS` with a body; other requests go to `inner`. The application is identified before this
    (`controlplane.request_bodies`)."""

    def __init__(self, inner: Asgi, intake: GroupIntake | None = None, settings: AsyncSettings | None = None) -> None:
        self._inner = inner
        self._settings = settings or AsyncSettings()
        self._intake = intake or GroupIntake(self._settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None or APPLICATION not in scope:
            await self._inner(scope, receive, send)
            return
        began, status = perf_counter(), _CLIENT_GONE
        try:
            status = await self._answer(path, scope, receive, send)
        finally:
            HTTP_REQUESTS.labels("applications", "POST", str(status)).inc()
            HTTP_SECONDS.labels("applications").observe(perf_counter() - began)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> int:
        headers = {name: text.decode("latin-1") for name, text in scope["headers"]}
        own: list[tuple[str, str]] = []
        try:
            body = await _read_body(receive, self._settings.max_body_bytes)
            if body is None:
                return _CLIENT_GONE
            application: Application = scope[APPLICATION]
            shown = await self._intake.accept(application, _submission(path, body, headers))
            status, content = 202, json.dumps(shown).encode()
            own.append(("location", f"{PREFIX}{shown['id']}"))
        except ApplicationRefused as refusal:
            status = refusal.status
            own, content = refusal_json(refusal)
        except (StoreAway, DatabaseError) as error:
            log.warning("a near-real-time request cannot be stored: %s", error)
            status = 503
            own, content = refusal_json(ApplicationRefused(503, "store_away", "the control plane's store is away"))
        coded = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"x-request-id", usable_request_id(headers.get(b"x-request-id", "")).encode()),
            *((name.lower().encode(), text.encode("latin-1")) for name, text in own),
        ]
        await send({"type": "http.response.start", "status": status, "headers": coded})
        await send({"type": "http.response.body", "body": content})
        return status


def _submission(path: str, body: bytes, headers: dict[bytes, str]) -> AsyncSubmission:
    return AsyncSubmission(
        path=path,
        body=body,
        region=headers.get(b"x-switchyard-region", ""),
        limit_ms=headers.get(b"x-switchyard-deadline-ms"),
        callback_url=headers.get(b"x-switchyard-callback-url"),
        sink=headers.get(b"x-switchyard-sink"),
        idempotency_key=headers.get(b"idempotency-key"),
    )


async def _read_body(receive: Receive, most: int) -> bytes | None:
    """Returns the body, or None if the client is gone. Raises ApplicationRefused if it is too long."""
    body, more_body = b"", True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise ApplicationRefused(413, "request_too_large", f"the body is longer than {most} bytes")
        more_body = bool(message.get("more_body"))
    return body
