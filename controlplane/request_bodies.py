"""Bodies of requests, before any application reads them.

The caller's key is checked before a byte is read. A body has a maximum length and a minimum rate, so it is complete in
bounded time. While it arrives it counts only in the share of its tenant, or of its network where there is no key. An
upload takes one of the places of uploads, and a response one of the streams, when its body is complete. The application
spools what it receives (Django: to a temporary file), within one budget of bytes."""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any
from weakref import WeakValueDictionary

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, connections

from accounts.selectors import token_by_text
from controlplane.observability.middleware import count_request
from controlplane.refused_requests import RequestRefused, refuse
from engine_agent.protocol.engine_builds import MOST_PART_BYTES
from kernel import clock
from kernel.addresses import client_network, is_loopback
from traffic.async_requests.services.requests import RESPONSES_PATH
from traffic.files.api import FILES_PATH
from traffic.files.services.files import file_settings
from traffic.responses.api import TENANT
from traffic.responses.services import store_settings
from traffic.tenants.api import APPLICATION
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application, application_of

AGENT_ONLY_PATHS = ("/agents/", "/join")
INGRESS_PATHS = ("/v1/async/", "/v1/responses", "/v1/usage", "/v1/files", "/v1/batches")
"""Of applications: ingresses forward them over the connection that agents use."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
REFUSED = b"agents connect to the port for agents (SWITCHYARD_AGENT_PORT), over TLS\n"
UNKNOWN = b"this port is for agents\n"


class PathsOf:
    """An ASGI application that serves these paths of another one alone, or all but these."""

    def __init__(self, inner: Any, prefixes: tuple[str, ...], *, are_served: bool) -> None:
        self._inner = inner
        self._prefixes = prefixes
        self._are_served = are_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Decoded already. The router of WebSockets takes off all slashes before it looks.
        path = "/" + scope.get("path", "").lstrip("/")
        if path.startswith(self._prefixes) == self._are_served or scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, send)
            return
        body = UNKNOWN if self._are_served else REFUSED
        kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": f"{kind}.start", "status": 404, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})


class OverShare(Exception):
    """No room now. `is_of_all`: the room of all callers is used up, not only the caller's share."""

    def __init__(self, message: str, *, is_of_all: bool) -> None:
        super().__init__(message)
        self.is_of_all = is_of_all


@dataclass(slots=True)
class BodyShares:
    """Counts the arriving bodies of one process, and the bytes of bodies until their requests end."""

    most_bytes: int
    most_bytes_of_one: int
    most_bodies: int = 256
    most_bodies_of_one: int = 32
    _bodies: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)

    def begin(self, owner: str, *, has_share: bool) -> None:
        """Count one more arriving body, until `whole`. Raises OverShare if there is no room."""
        if has_share and self._bodies[owner] >= self.most_bodies_of_one:
            raise OverShare(f"{self.most_bodies_of_one} of your requests are still arriving", is_of_all=False)
        if self._bodies.total() >= self.most_bodies:
            raise OverShare(f"{self.most_bodies} requests are still arriving; try again shortly", is_of_all=True)
        self._bodies[owner] += 1

    def add(self, owner: str, size: int, *, has_share: bool) -> None:
        """Count the bytes of a piece that arrived, until `forget`. Raises OverShare if there is no room."""
        if has_share and self._bytes[owner] + size > self.most_bytes_of_one:
            message = f"your requests under way have {self.most_bytes_of_one} bytes together; try again when one ended"
            raise OverShare(message, is_of_all=False)
        if self._bytes.total() + size > self.most_bytes:
            message = f"all requests under way have {self.most_bytes} bytes together; try again shortly"
            raise OverShare(message, is_of_all=True)
        self._bytes[owner] += size

    def whole(self, owner: str) -> None:
        _less(self._bodies, owner, 1)

    def forget(self, owner: str, size: int) -> None:
        _less(self._bytes, owner, size)


def _less(counted: Counter[str], owner: str, by: int) -> None:
    counted[owner] -= by
    if counted[owner] <= 0:
        del counted[owner]


class FairPlaces:
    """A number of places, and a maximum for each owner. A request without a place waits its turn; an owner with many
    requests waits for its own places and delays no other owner."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._all = asyncio.Semaphore(most)
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, owner: str, *, has_share: bool, within_s: float) -> AsyncIterator[None]:
        """Raises OverShare if none became free in time."""
        own = self._owners.setdefault(owner, asyncio.Semaphore(self._most_of_one if has_share else self._most))
        until = asyncio.get_running_loop().time() + within_s
        await _acquired(own, until, f"{self._most_of_one} of your files are being stored", is_of_all=False)
        try:
            message = f"{self._most} files are being stored; try again shortly"
            await _acquired(self._all, until, message, is_of_all=True)
            try:
                yield
            finally:
                self._all.release()
        finally:
            own.release()


async def _acquired(places: asyncio.Semaphore, until: float, message: str, *, is_of_all: bool) -> None:
    try:
        async with asyncio.timeout_at(until):
            await places.acquire()
    except TimeoutError:
        raise OverShare(message, is_of_all=is_of_all) from None


KEY_KEPT_S = 1.0
MOST_KEYS = 4096
KEY_THREADS = 4
Find = Callable[[str], Awaitable[Application]]


class KnownApplications:
    """Remembers the application of a key for a second, so that one with thousands of requests costs one query. A
    revoked key is refused within that second; ingresses take as long.

    For one event loop. Only a digest of each key is kept, and only of valid ones. `find` reads the application of an
    Authorization header; by default in a thread."""

    def __init__(self, find: Find | None = None) -> None:
        self._threads = ThreadPoolExecutor(KEY_THREADS, "keys")
        self._find = find or self._find_in_thread
        self._known: dict[bytes, tuple[float, asyncio.Future[Application]]] = {}

    async def of(self, authorization: str) -> Application:
        """Returns the application of this Authorization header. Raises UnknownApplication, or DatabaseError."""
        digest, now_s = hashlib.sha256(authorization.encode()).digest(), monotonic()
        until_s, finding = self._known.get(digest, (0.0, None))
        if finding is None or now_s >= until_s:
            self._forget(now_s)
            finding = asyncio.ensure_future(self._find(authorization))
            self._known[digest] = now_s + KEY_KEPT_S, finding
        if finding.done() and not finding.exception():
            return finding.result()
        try:
            return await asyncio.shield(finding)  # other requests may wait for it
        except Exception:
            self._known.pop(digest, None)
            raise

    def _forget(self, now_s: float) -> None:
        if len(self._known) >= MOST_KEYS:
            self._known = {key: known for key, known in self._known.items() if now_s < known[0]}
        if len(self._known) >= MOST_KEYS:
            self._known.clear()

    async def _find_in_thread(self, authorization: str) -> Application:
        def find() -> Application:
            try:
                return application_of(authorization, clock.now())
            finally:
                connections.close_all()

        return await sync_to_async(find, thread_sensitive=False, executor=self._threads)()


OTHER_BYTES = 4 * 1024 * 1024
"""Of a body that is neither a file nor a response. Who reads one takes less; this ends one that states no length."""
FORM_BYTES = 64 * 1024
BUILD_PART_PATH = re.compile(r"/api/v1/engine-build-uploads/[^/]+/part/?")
"""A part may have 65 MiB, if the caller shows a valid token before it."""
THREADS = 2
GRACE_S = 10.0
LEAST_BYTES_PER_S = 32 * 1024
"""After `GRACE_S`, of the whole body so far: 200 MiB have 1 h 47 min, 1 MiB has 42 s."""
WAITING_FOR_PLACE_S = 30.0
DISCONNECT = {"type": "http.disconnect"}


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant or network in whose share a body counts. Processes of this host have no limit: they could take its
    files and ports anyway, and a proxy that no setting names sends the requests of all its clients."""

    name: str
    tenant: str = ""
    has_share: bool = True


class RequestBodies:
    """The ASGI application in front of all others."""

    def __init__(self, inner: Asgi, applications: KnownApplications | None = None) -> None:
        self._inner = inner
        self._threads = ThreadPoolExecutor(THREADS, "tokens")
        self._applications = applications or KnownApplications()
        self.shares = BodyShares(most_bytes=16 * settings.FILE_MAX_BYTES, most_bytes_of_one=4 * settings.FILE_MAX_BYTES)
        bounds = file_settings()
        self.uploads = FairPlaces(bounds.uploads_at_once, bounds.uploads_at_once_per_tenant)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._inner(scope, receive, send)
            return
        began = perf_counter()
        try:
            await self._with_body(scope, receive, send)
        except (RequestRefused, ApplicationRefused) as refusal:
            await refuse(scope, refusal, send)
            count_request(scope["path"], scope["method"], refusal.status, perf_counter() - began)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = _most_bytes(scope)
        if _is_build_part(scope) and await self._is_signed_in(scope):
            most = MOST_PART_BYTES
        too_long = RequestRefused(413, "request_too_large", f"the body is longer than {most} bytes")
        if _is_upload(scope):
            too_long = RequestRefused(413, "file_too_large", f"the form is longer than {most} bytes", "file")
        if _stated_length(scope) > most:
            raise too_long
        owner = await self._owner(scope)
        scope[TENANT] = owner.tenant
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async with AsyncExitStack() as held:
            body = _Body(receive, most, too_long, owner, self.shares)
            held.callback(body.end)
            if _is_upload(scope):
                body.then = lambda: held.enter_async_context(self._place_of(owner))
            await self._inner(scope, body, answer)
        if body.refusal is not None and not has_begun:
            raise body.refusal

    def _place_of(self, owner: Owner) -> Any:
        return self.uploads.taken(owner.name, has_share=owner.has_share, within_s=WAITING_FOR_PLACE_S)

    async def _is_signed_in(self, scope: Scope) -> bool:
        """Whether the request shows an API token that is valid now."""
        shown = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, text = shown.partition(" ")

        def is_valid() -> bool:
            try:
                token = token_by_text(text.strip())
                return token is not None and token.refusal(clock.now()) is None
            finally:
                connections.close_all()

        if scheme.casefold() != "bearer":
            return False
        try:
            return await sync_to_async(is_valid, thread_sensitive=False, executor=self._threads)()
        except DatabaseError:
            return False

    async def _owner(self, scope: Scope) -> Owner:
        address = (scope.get("client") or ("",))[0]
        network = Owner(f"network {client_network(address)}", has_share=not is_loopback(address))
        if not scope["path"].startswith(INGRESS_PATHS):
            return network
        shown = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        try:
            application = scope[APPLICATION] = await self._applications.of(shown)
        except DatabaseError:
            raise ApplicationRefused(503, "store_away", "the control plane's database is away for now") from None
        tenant = application.tenant
        return Owner(f"tenant {tenant}", tenant) if tenant else network


class _Body:
    """What the application receives. A refused body becomes a disconnect, so the application sends nothing."""

    def __init__(self, receive: Receive, most: int, too_long: RequestRefused, owner: Owner, shares: BodyShares) -> None:
        self._receive, self._most, self._too_long = receive, most, too_long
        self._owner, self._shares = owner, shares
        self._began: float | None = None
        self._bytes = 0
        self._is_coming = False
        self.then: Callable[[], Awaitable[Any]] | None = None
        """Awaited once the body is whole, before the application has the last of it."""
        self.refusal: RequestRefused | None = None

    async def __call__(self) -> Message:
        if self.refusal is not None:
            return dict(DISCONNECT)
        if self._began is not None and not self._is_coming:
            return await self._receive()  # whether the client leaves
        try:
            return await self._next()
        except RequestRefused as refusal:
            self.refusal = refusal
        except OverShare as over:
            self.refusal = RequestRefused(*_OVER[over.is_of_all], str(over))
        except TimeoutError:
            message = (
                f"the body came too slowly: it has {GRACE_S:g} s, and a second more for each {LEAST_BYTES_PER_S} bytes"
            )
            self.refusal = RequestRefused(408, "request_timeout", message)
        self.end()
        return dict(DISCONNECT)

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._began is None:
            self._began = loop.time()
            self._shares.begin(self._owner.name, has_share=self._owner.has_share)
            self._is_coming = True
        async with asyncio.timeout_at(self._began + GRACE_S + self._bytes / LEAST_BYTES_PER_S):
            message = await self._receive()
        size = len(message.get("body", b""))
        if self._bytes + size > self._most:
            raise self._too_long
        self._shares.add(self._owner.name, size, has_share=self._owner.has_share)
        self._bytes += size
        if not message.get("more_body"):
            self._is_coming = False
            self._shares.whole(self._owner.name)
            if self.then is not None and message["type"] == "http.request":
                await self.then()
        return message

    def end(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self._shares.whole(self._owner.name)
        self._shares.forget(self._owner.name, self._bytes)
        self._bytes = 0


_OVER = {False: (429, "rate_limit_exceeded"), True: (503, "too_many_uploads")}


def _is_upload(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"] == FILES_PATH)


def _is_build_part(scope: Scope) -> bool:
    return bool(scope["method"] == "PUT" and BUILD_PART_PATH.fullmatch(scope["path"]))


def _most_bytes(scope: Scope) -> int:
    if _is_upload(scope):
        return file_settings().max_bytes + FORM_BYTES
    if scope["method"] == "POST" and scope["path"] == RESPONSES_PATH:
        return store_settings().max_body_bytes
    return OTHER_BYTES


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and text != b"0") for name, text in scope["headers"]
    )


def _stated_length(scope: Scope) -> int:
    text = dict(scope["headers"]).get(b"content-length", b"")
    return int(text[:20]) if text.isdigit() else 0
