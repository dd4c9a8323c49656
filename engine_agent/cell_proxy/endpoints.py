"""What the proxy's two ports serve. Public: the paths of the table (`engine_agent.protocol.api_surface`) go to the
engine and nothing else of it, `/healthz` is answered here. Administration, on loopback: status for the agent, metrics,
and what it changes: the phase, and the cells that this one pairs with."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import SERVER_HEADER
from engine_agent.cell_proxy.api_paths import CELL_PATHS, form_of
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.contained import contained, contained_task
from engine_agent.cell_proxy.downstream import ClientConnection, Responder
from engine_agent.cell_proxy.exchange import Exchange
from engine_agent.cell_proxy.exposition import exposition
from engine_agent.cell_proxy.prefill_exchange import PrefillExchange
from engine_agent.cell_proxy.prefill_protocol import HANDOVER_HEADER
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.wire import LocalResponse, RequestHead, refusal_response, response_bytes
from engine_agent.protocol.metrics import CONTENT_TYPE
from engine_agent.protocol.proxy_messages import PREFIXES_PATH, Pairs
from engine_agent.protocol.states import Phase

_ENGINE_METHODS = {path: frozenset(map(str.encode, row.methods)) for path, row in CELL_PATHS.items()}
"""By the path exactly as it is written: of other spellings an engine might make one that it must not serve."""

Handler = Callable[[RequestHead, bytes], LocalResponse]


class LocalExchange:
    """One request that the proxy answers by itself: it collects the whole body, then calls the handler. Implements
    `Responder`; for small bodies and quick handlers only."""

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


class HeldAnswer(LocalExchange):
    """An answer, once there is something new to it, if the question can wait: `hold` waits for as long as the question
    says, and `answer` then gives it."""

    def __init__(
        self,
        head: RequestHead,
        client: ClientConnection,
        hold: Callable[[str], Awaitable[object]],
        answer: Callable[[str], LocalResponse],
    ) -> None:
        query = head.target.partition(b"?")[2].decode("latin-1")
        super().__init__(head, client, lambda _head, _body: answer(query))
        self._hold: Callable[[], Awaitable[object]] = lambda: hold(query)
        self._holding: asyncio.Task[None] | None = None

    def feed(self, data: bytes, *, complete: bool) -> None:
        if complete:
            self._holding = asyncio.get_running_loop().create_task(self._answer())

    def client_gone(self) -> None:
        if self._holding is not None:
            self._holding.cancel()

    @contained_task
    async def _answer(self) -> None:
        await self._hold()
        super().feed(b"", complete=True)


# --- the public port ---


def respond_public(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    """The responder for one request on the public port."""
    if (client.peer is not None and client.peer.node) or any(name == HANDOVER_HEADER for name, _ in head.headers):
        return PrefillExchange(cell, head, client)
    if head.method in _ENGINE_METHODS.get(head.path, ()):
        return Exchange(cell, head, client)
    if (head.method, head.path) == (b"GET", PREFIXES_PATH.encode()):
        return HeldAnswer(head, client, cell.cache.hold, cell.cache.answer)
    return LocalExchange(head, client, partial(_handle_public, cell))


def _handle_public(cell: Cell, head: RequestHead, body: bytes) -> LocalResponse:
    if head.path == b"/healthz":
        return _health(cell, dict(head.headers).get(SERVER_HEADER, b"").decode("latin-1"))
    form = form_of(head.path)
    if methods := _ENGINE_METHODS.get(head.path):
        allowed = ", ".join(sorted(method.decode() for method in methods))
        return refusal_response(Refusal(405, "method_not_allowed", f"the method must be {allowed}"), form)
    return refusal_response(Refusal(404, "unknown_url", "engines serve the paths of docs/api-applications.md alone"))


def _health(cell: Cell, server: str) -> LocalResponse:
    """What HAProxy asks about `server`: 200, or 503 for no, or 404 for nothing new, which it takes for a drain. Death
    wins: nothing is left to finish on a dead engine."""
    if server and server != cell.server_name:
        return refusal_response(refusals.other_start(server, cell.server_name))
    if not cell.judge.ok:
        return refusal_response(refusals.engine_unhealthy(cell.judge.reason))
    if cell.phase is not Phase.SERVE:
        return LocalResponse(404, refusal_response(refusals.draining(cell.phase)).body)
    return LocalResponse(200, b'{"ok":true}')


# --- the administration port ---


class PhaseOrder(msgspec.Struct, frozen=True):
    phase: Phase


def respond_admin(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    """The responder for one request on the administration port."""
    if (head.method, head.path) == (b"GET", b"/status"):
        return HeldAnswer(head, client, cell.watch.wait_for_change, lambda _query: _status(cell))
    return LocalExchange(head, client, partial(_handle_admin, cell))


def _handle_admin(cell: Cell, head: RequestHead, body: bytes) -> LocalResponse:
    match (head.method, head.path):
        case (b"GET", b"/metrics"):
            return LocalResponse(200, exposition(cell).encode(), CONTENT_TYPE)
        case (b"POST", b"/phase"):
            return _order_phase(cell, body)
        case (b"POST", b"/pairs"):
            return _order_pairs(cell, body)
    known = "GET /status, GET /metrics, POST /phase, POST /pairs"
    return refusal_response(Refusal(404, "not_found", f"the administration port serves {known}"))


def _status(cell: Cell) -> LocalResponse:
    return LocalResponse(200, msgspec.json.encode(cell.status()))


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
