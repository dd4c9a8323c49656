"""The two ports of a proxy. Public: the paths of `engine_agent.protocol.api_surface` go to the engine, and no others;
`/healthz` is answered here. Administration, on loopback: status, metrics, samples of requests, phase and pairs."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import time
from urllib.parse import parse_qs

import msgspec

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import SERVER_HEADER
from engine_agent.cell_proxy.api_paths import CELL_PATHS, form_of
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.downstream import ClientConnection, Responder, contained, contained_task
from engine_agent.cell_proxy.exchange import Exchange, ingress_of
from engine_agent.cell_proxy.exposition import exposition
from engine_agent.cell_proxy.prefill import HANDOVER_HEADER
from engine_agent.cell_proxy.prefill_exchange import PrefillExchange
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.wire import LocalResponse, RequestHead, refusal_response, response_bytes
from engine_agent.protocol.metrics import CONTENT_TYPE
from engine_agent.protocol.proxy_messages import PREFIXES_PATH, HealthAnswer, Pairs
from engine_agent.protocol.states import Phase

_ENGINE_METHODS = {path: frozenset(map(str.encode, row.methods)) for path, row in CELL_PATHS.items()}
"""Exact spellings only: an engine could resolve another spelling to a path that it must not serve."""

Handler = Callable[[RequestHead, bytes], LocalResponse]


class LocalExchange:
    """One request that the proxy answers itself: collects the whole body, then calls the handler. Implements
    `Responder`. Only for small bodies and quick handlers."""

    def __init__(self, head: RequestHead, client: ClientConnection, handler: Handler) -> None:
        self._head = head
        self._client = client
        self._handler = handler
        self._body = b""

    @contained
    def feed(self, data: bytes, *, complete: bool) -> None:
        self._body += data
        if complete:
            self._send(self._handler(self._head, self._body))

    def refuse(self, refusal: Refusal) -> None:
        self._send(refusal_response(refusal))

    def client_gone(self) -> None: ...

    def download_paused(self) -> None: ...

    def download_resumed(self) -> None: ...

    def crashed(self, error: Exception) -> None:
        self._send(refusal_response(refusals.proxy_failed()))

    def _send(self, response: LocalResponse) -> None:
        keep_alive = self._client.may_keep_alive()
        wire = response_bytes(response, keep_alive=keep_alive)
        self._client.write(wire.removesuffix(response.body) if self._head.method == b"HEAD" else wire)
        self._client.answered(keep_alive=keep_alive)


class LongPollAnswer(LocalExchange):
    """A long poll: `wait` returns when the answer has changed or the time in the query is over, and `answer` then makes
    it."""

    def __init__(
        self,
        head: RequestHead,
        client: ClientConnection,
        wait: Callable[[str], Awaitable[object]],
        answer: Callable[[str], LocalResponse],
    ) -> None:
        query = head.target.partition(b"?")[2].decode("latin-1")
        super().__init__(head, client, lambda _head, _body: answer(query))
        self._wait: Callable[[], Awaitable[object]] = lambda: wait(query)
        self._waiting: asyncio.Task[None] | None = None

    def feed(self, data: bytes, *, complete: bool) -> None:
        if complete:
            self._waiting = asyncio.get_running_loop().create_task(self._answer())

    def client_gone(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    @contained_task
    async def _answer(self) -> None:
        await self._wait()
        super().feed(b"", complete=True)


# --- the public port ---


def respond_public(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    if (client.peer is not None and client.peer.node) or HANDOVER_HEADER in head.named:
        return PrefillExchange(cell, head, client)
    if head.method in _ENGINE_METHODS.get(head.path, ()):
        return Exchange(cell, head, client)
    if (head.method, head.path) == (b"GET", PREFIXES_PATH.encode()):
        return LongPollAnswer(head, client, cell.cache.wait_for_change, cell.cache.answer)
    return LocalExchange(head, client, partial(_handle_public, cell, ingress_of(head, client)))


def _handle_public(cell: Cell, ingress: str, head: RequestHead, body: bytes) -> LocalResponse:
    if head.path == b"/healthz":
        return _health(cell, head.named.get(SERVER_HEADER, b"").decode("latin-1"), ingress)
    form = form_of(head.path)
    if methods := _ENGINE_METHODS.get(head.path):
        allowed = ", ".join(sorted(method.decode() for method in methods))
        return refusal_response(Refusal(405, "method_not_allowed", f"the method must be {allowed}"), form)
    return refusal_response(Refusal(404, "unknown_url", "engines serve the paths of docs/api-applications.md alone"))


def _health(cell: Cell, server: str, ingress: str) -> LocalResponse:
    """The answer to HAProxy's health check of `server`, and to its agent: 200, 503 (down) or 404 (draining). A dead
    engine is down even while it drains: it cannot finish any request. A healthy cell adds its load."""
    if server and server != cell.server_name:
        return refusal_response(refusals.other_start(server, cell.server_name))
    if not cell.health.ok:
        return refusal_response(refusals.engine_unhealthy(cell.health.reason))
    if cell.phase is not Phase.SERVE:
        return LocalResponse(404, refusal_response(refusals.draining(cell.phase)).body)
    return LocalResponse(200, msgspec.json.encode(HealthAnswer(ok=True, load=cell.load_for(ingress))))


# --- the administration port ---


class PhaseOrder(msgspec.Struct, frozen=True):
    phase: Phase


def respond_admin(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    if (head.method, head.path) == (b"GET", b"/status"):
        return LongPollAnswer(head, client, cell.watch.wait_for_change, lambda _query: _status(cell))
    return LocalExchange(head, client, partial(_handle_admin, cell))


def _handle_admin(cell: Cell, head: RequestHead, body: bytes) -> LocalResponse:
    match (head.method, head.path):
        case (b"GET", b"/metrics"):
            return LocalResponse(200, exposition(cell).encode(), CONTENT_TYPE)
        case (b"GET", b"/requests"):
            return _closed_windows(cell, head)
        case (b"POST", b"/phase"):
            return _order_phase(cell, body)
        case (b"POST", b"/pairs"):
            return _order_pairs(cell, body)
    known = "GET /status, GET /metrics, GET /requests, POST /phase, POST /pairs"
    return refusal_response(Refusal(404, "not_found", f"the administration port serves {known}"))


def _status(cell: Cell) -> LocalResponse:
    return LocalResponse(200, msgspec.json.encode(cell.status()))


def _closed_windows(cell: Cell, head: RequestHead) -> LocalResponse:
    stated = parse_qs(head.target.partition(b"?")[2].decode("latin-1")).get("after", ["0"])[0]
    after = int(stated) if stated.isdecimal() and len(stated) < 16 else 0
    return LocalResponse(200, msgspec.json.encode(cell.samples.closed(time(), after)))


def _order_phase(cell: Cell, body: bytes) -> LocalResponse:
    try:
        phase = msgspec.json.decode(body, type=PhaseOrder).phase
    except msgspec.DecodeError as error:
        return _bad_phase(str(error))
    if phase is Phase.STOP:
        return _bad_phase("to stop a proxy, send it SIGTERM")
    if cell.phase is Phase.STOP:
        return refusal_response(Refusal(409, "stopping", "this proxy is stopping and takes no other phase"))
    cell.enter_phase(phase)
    return _status(cell)


def _order_pairs(cell: Cell, body: bytes) -> LocalResponse:
    try:
        cell.pair(msgspec.json.decode(body, type=Pairs))
    except msgspec.DecodeError as error:
        return refusal_response(Refusal(400, "bad_pairs", f"the body names no pairs: {error}"))
    return _status(cell)


def _bad_phase(reason: str) -> LocalResponse:
    message = f'the body must be {{"phase": "serve"}} or {{"phase": "drain"}}: {reason}'
    return refusal_response(Refusal(400, "bad_phase", message))
