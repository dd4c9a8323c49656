"""OpenAI's stored responses under `/v1/responses` for applications. Ingresses forward these requests unchanged, so the
application is identified here by its key.

`CreateResponse` is an ASGI application in front of Django, because a request that waits for an engine would occupy a
thread there. It uses few threads for the database, before and after; in between, a stream costs one task and two
connections. If the client disconnects, the request to the ingress is cut, so the engine stops; incomplete responses are
not stored."""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path

from kernel import clock
from kernel.metrics import HTTP_REQUESTS, HTTP_SECONDS, KEPT_RESPONSES
from traffic.async_requests.services.requests import RESPONSES_PATH
from traffic.responses.models import StoredResponse
from traffic.responses.planner import (
    JsonObject,
    LastEvent,
    ResponseEvents,
    StoreSettings,
    response_not_found,
    shown_items,
)
from traffic.responses.selectors import items_of, shown_response, stored_response_of
from traffic.responses.services import (
    PassedOn,
    ResponseSubmission,
    response_begin,
    response_cancel,
    response_delete,
    response_keep,
    store_settings,
)
from traffic.routing.services.ingress_client import (
    IngressUnreachable,
    ResponseHead,
    StreamBroken,
    StreamLimits,
    ingress_stream,
)
from traffic.tenants.api import application_view, list_query, refusal_json, unknown_path
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application, application_of

PAGE, LONGEST_PAGE = 20, 100
APPLICATIONS = "applications keep and delete their own responses; they change nothing that operators run"


@application_view("GET", "DELETE", audit_exempt_as=APPLICATIONS)
def detail(request: HttpRequest, application: Application, response_id: str) -> HttpResponseBase:
    """GET: one response. DELETE: delete it."""
    now, settings = clock.now(), store_settings()
    if request.method == "DELETE":
        return JsonResponse(
            response_delete(application=application, response_id=response_id, now=now, settings=settings)
        )
    if request.GET.get("stream", "false").lower() not in {"", "0", "false"}:
        message = "a kept response cannot be streamed: retrieve it until it has ended"
        raise ApplicationRefused(400, "unsupported_value", message, "stream")
    return JsonResponse(shown_response(_stored_response(application, response_id)))


@application_view("POST", audit_exempt_as=APPLICATIONS)
def cancel(request: HttpRequest, application: Application, response_id: str) -> HttpResponseBase:
    """POST /v1/responses/ID/cancel: cancel a background response."""
    return JsonResponse(
        response_cancel(application=application, response_id=response_id, now=clock.now(), settings=store_settings())
    )


@application_view("GET", audit_exempt_as=APPLICATIONS)
def input_items(request: HttpRequest, application: Application, response_id: str) -> HttpResponseBase:
    """GET /v1/responses/ID/input_items: input of this response only, newest first."""
    stored = _stored_response(application, response_id)
    return JsonResponse(_items_page(request, shown_items(stored.id, items_of(stored))))


def _stored_response(application: Application, response_id: str) -> StoredResponse:
    stored = stored_response_of(application.tenant, response_id, clock.now(), store_settings())
    if stored is None:
        raise response_not_found(response_id)
    return stored


def _items_page(request: HttpRequest, items: list[dict[str, Any]]) -> JsonObject:
    query = list_query(request, usual=PAGE, most=LONGEST_PAGE)
    ordered = items[::-1] if query.descending else items
    if query.after:
        places = [place for place, item in enumerate(ordered) if item["id"] == query.after]
        if not places:
            message = "`after` must be the ID of an item of this response"
            raise ApplicationRefused(400, "invalid_value", message, "after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }


urlpatterns = [
    path("<str:response_id>", detail, name="response"),
    path("<str:response_id>/cancel", cancel, name="response-cancel"),
    path("<str:response_id>/input_items", input_items, name="response-input-items"),
    path(
        "<path:rest>",
        unknown_path("/v1/responses/ID, …/cancel and …/input_items", audit_exempt_as=APPLICATIONS),
        name="response-unknown-path",
    ),
]


Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")

TENANT = "switchyard.tenant"
"""Scope entry with the tenant of the request's key, checked before its body was read (controlplane.request_bodies)."""
KEEP_LIMIT_S = 10.0
"""Limits the application's wait for the end of its response if the database is slow."""
THREADS = 4
"""Threads per process that query the database."""
SHOWN_HEADERS = ("content-type", "retry-after", "x-request-id", "x-switchyard-cell", "x-switchyard-region",
                 "x-switchyard-ingress", "x-switchyard-deployment", "x-switchyard-prompt-tokens",
                 "x-switchyard-completion-tokens")  # fmt: skip
COUNTED, LATER = ("x-switchyard-stored", "counted"), ("x-switchyard-stored", "later")
"""Sent to the ingress: whether the request's tokens were counted there already, or count when it is sent."""
JSON = ("content-type", "application/json")

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The application has closed its connection."""


class CreateResponse:
    """Serves POST /v1/responses; other requests go to `inner`."""

    def __init__(self, inner: Asgi, limits: StreamLimits | None = None) -> None:
        self._inner = inner
        self._limits = limits
        self._running: Counter[str] = Counter()
        """By tenant: requests that are read but not answered."""
        self._threads = ThreadPoolExecutor(THREADS, "responses")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != RESPONSES_PATH:
            await self._inner(scope, receive, send)
            return
        began, response = perf_counter(), _Response(send)
        try:
            await self._answer_application(scope, receive, response)
        except ClientGone:
            response.status = response.status or 499
        finally:
            HTTP_REQUESTS.labels("applications", "POST", str(response.status or 500)).inc()
            HTTP_SECONDS.labels("applications").observe(perf_counter() - began)

    async def _answer_application(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        settings = store_settings()
        try:
            submission = await _read_submission(scope, receive)
            with self._place_of(scope.get(TENANT, ""), settings):
                begun = await self._in_thread(partial(_begin_response, submission, settings))
                if not isinstance(begun, PassedOn):
                    await response.whole(200, [JSON, LATER], json.dumps(begun).encode())
                    return
                await self._while_connected(self._pass_on(begun, response, settings), receive)
        except ApplicationRefused as refusal:
            headers, body = refusal_json(refusal)
            await response.whole(refusal.status, [JSON, *headers], body)
        except DatabaseError as error:
            log.warning("the database does not answer: %s", error)
            headers, body = refusal_json(ApplicationRefused(503, "store_away", "the store of responses is unavailable"))
            await response.whole(503, [JSON, *headers], body)

    @contextlib.contextmanager
    def _place_of(self, tenant: str, settings: StoreSettings) -> Iterator[None]:
        """Takes one of the shared places and one of the tenant's, once the body is read. Raises ApplicationRefused if
        none is free."""
        if self._running.total() >= settings.max_streams:
            message = f"{settings.max_streams} responses are in progress; retry shortly"
            raise ApplicationRefused(503, "too_many_streams", message)
        most = settings.max_streams_per_tenant
        if self._running[tenant] >= most:
            message = f"{most} responses are in progress for you already; retry after one has ended"
            raise ApplicationRefused(429, "rate_limit_exceeded", message)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            self._running += Counter()  # drops tenants without requests

    @staticmethod
    async def _while_connected(work: Any, receive: Receive) -> None:
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _pass_on(self, passed: PassedOn, response: "_Response", settings: StoreSettings) -> None:
        limits = self._limits or StreamLimits(
            first_s=900.0, silent_s=600.0, whole_s=3600.0, max_bytes=settings.max_answer_bytes
        )
        try:
            async with aclosing(_from_an_ingress(passed, limits)) as parts:
                head = await anext(parts)
                if not isinstance(head, ResponseHead):
                    raise TypeError("a stream begins with its head")
                is_events = head.headers.get("content-type", "").startswith("text/event-stream")
                if head.status == 200 and is_events:
                    await self._answer_stream(passed, head, parts, response)
                else:
                    await self._answer_whole(passed, head, parts, response)
        except StreamBroken as broken:
            if response.status is None:
                headers, body = refusal_json(ApplicationRefused(502, "ingress_failed", str(broken)))
                await response.whole(502, [JSON, COUNTED, *headers], body)
            else:
                await response.more(response.events.failure(str(broken)))
                await response.end()

    async def _answer_whole(
        self, passed: PassedOn, head: ResponseHead, parts: AsyncGenerator[ResponseHead | bytes, None], to: "_Response"
    ) -> None:
        body = b"".join([part async for part in parts if isinstance(part, bytes)])
        if head.status == 200:
            try:
                answer = json.loads(body)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise StreamBroken("the engine's response is no JSON object")
            body = json.dumps(await self._stored_object(passed, answer), separators=(",", ":")).encode()
        await to.whole(head.status, [*_forwarded_headers(head), COUNTED], body)

    async def _answer_stream(
        self, passed: PassedOn, head: ResponseHead, parts: AsyncGenerator[ResponseHead | bytes, None], to: "_Response"
    ) -> None:
        events = to.events = ResponseEvents(passed.marks(is_kept=passed.request.is_kept))
        await to.begin(head.status, [*_forwarded_headers(head), COUNTED, ("x-accel-buffering", "no")])
        async for part in parts:
            for event in events.feed(part) if isinstance(part, bytes) else ():
                await to.more(
                    event.shown(await self._stored_object(passed, event.response))
                    if isinstance(event, LastEvent)
                    else event
                )
        await to.more(events.rest())
        await to.end()

    async def _stored_object(self, passed: PassedOn, answer: JsonObject) -> JsonObject:
        """Returns the stored response as shown, which says if it could not be stored."""
        is_kept = passed.request.is_kept
        shown = {**answer, **passed.marks(is_kept=is_kept)}
        if not is_kept:
            return shown
        keeping = partial(_store_response, passed, shown)
        try:
            async with asyncio.timeout(KEEP_LIMIT_S):
                await self._in_thread(keeping)
        except (DatabaseError, TimeoutError) as error:
            log.warning("a response of %s could not be kept: %s", passed.application.tenant or "no tenant", error)
            KEPT_RESPONSES.labels("lost").inc()
            return {**shown, "store": False}
        KEPT_RESPONSES.labels("kept").inc()
        return shown

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def fresh() -> T:
            try:
                return work()
            finally:
                connections.close_all()  # back to the pool that web's threads share

        return await sync_to_async(fresh, thread_sensitive=False, executor=self._threads)()


class _Response:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.events = ResponseEvents({})
        """Set for streams."""

    async def whole(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        await self.begin(status, [*headers, ("content-length", str(len(body)))])
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status = status
        coded = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": coded})

    async def more(self, piece: bytes) -> None:
        if piece:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def _begin_response(submission: ResponseSubmission, settings: StoreSettings) -> PassedOn | JsonObject:
    now = clock.now()
    application = application_of(submission.headers.get("authorization", ""), now)
    return response_begin(application=application, submission=submission, now=now, settings=settings)


def _store_response(passed: PassedOn, shown: JsonObject) -> None:
    response_keep(passed=passed, answer=shown, now=clock.now())


async def _from_an_ingress(passed: PassedOn, limits: StreamLimits) -> AsyncGenerator[ResponseHead | bytes, None]:
    reason = "its region has no ingress"
    for ingress in passed.ingresses:
        try:
            stream = ingress_stream(ingress, RESPONSES_PATH, passed.body, passed.headers, limits)
            async with aclosing(stream) as parts:
                async for part in parts:
                    yield part
            return
        except IngressUnreachable as unreachable:
            reason = str(unreachable)
    raise StreamBroken(reason)


async def _read_submission(scope: Scope, receive: Receive) -> ResponseSubmission:
    headers = {name.decode("latin-1").lower(): text.decode("latin-1") for name, text in scope["headers"]}
    body, more_body = bytearray(), True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more_body = bool(message.get("more_body"))
    return ResponseSubmission(bytes(body), headers, headers.get("x-switchyard-region", ""))


async def _wait_for_disconnect(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


def _forwarded_headers(head: ResponseHead) -> list[tuple[str, str]]:
    found: Mapping[str, str] = head.headers
    return [(name, found[name]) for name in SHOWN_HEADERS if name in found]
