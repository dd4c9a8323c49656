"""Handovers of one decode cell: its prefill cells, their load, and the results. It has a prefill cell read a prompt,
within limits. If that fails, the request continues without it."""

import asyncio
import ssl
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import cast
from urllib.parse import quote

from engine_agent.cell_proxy.admission import (
    ADAPTER_HEADER,
    CLASS_HEADER,
    DEPLOYMENT_HEADER,
    SERVER_HEADER,
    RequestMetadata,
)
from engine_agent.cell_proxy.meter import WINDOW_S, Meter, SlidingHistogram, milliseconds
from engine_agent.cell_proxy.prefill import (
    ANSWER_BYTES_MAX,
    HANDOVER_HEADER,
    QUEUE_HEADER,
    TRACE_HEADERS,
    Alone,
    BadParams,
    Candidate,
    PromptMemory,
    choose_cell,
    is_token_ids,
    prompt_for_prefill,
    read_answer,
)
from engine_agent.cell_proxy.upstream import EngineConnection, EnginePool, call
from engine_agent.cell_proxy.wire import Headers, RequestHead
from engine_agent.protocol.identity import BadName, IdentityFiles, IdentityKind, IdentityName, is_fleet_name, peer_name
from engine_agent.protocol.ingress_messages import cell_server_name
from engine_agent.protocol.load_messages import HandoverLoad
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.proxy_messages import NO_PAIRS, Pairs
from engine_agent.protocol.states import CellRole

# Connections from a decode cell's proxy to the proxy of a prefill cell: over TLS with both names checked, as between
# ingresses and cells.

IDLE_S = 30.0
"""Shorter than the time that a proxy keeps an idle connection."""
CONNECT_LIMIT_S = 2.0
"""Including the handshake, within one region. A slower cell is not used."""


class PrefillLink(EnginePool):
    """The connections to one start of a prefill cell. `identity`: this proxy's certificate; None: plain."""

    def __init__(self, cell: PrefillCell, identity: IdentityFiles | None) -> None:
        super().__init__(cell.host, cell.port, connect_timeout_s=CONNECT_LIMIT_S, idle_s=IDLE_S, on_lost=lambda: None)
        self.cell = cell
        self._identity = identity

    async def connect(self) -> EngineConnection:
        """Opens a connection, as `EnginePool` does. Raises OSError also if the other end is not the leader of this cell
        (ssl.SSLError, ConnectionError)."""
        if self._identity is None:
            return await super().connect()
        context = self._identity.client_context()
        wanted = IdentityName(_fleet_of(context), IdentityKind.NODE, self.cell.node)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            transport, connection = await loop.create_connection(
                lambda: EngineConnection(self), self.cell.host, self.cell.port, ssl=context, server_hostname=wanted.dns
            )
        try:
            shown = peer_name(cast(ssl.SSLObject, transport.get_extra_info("ssl_object")))
        except BadName as error:
            connection.abort()
            raise ConnectionError(str(error)) from error
        if shown != wanted:
            connection.abort()
            raise ConnectionError(f"{self.cell.host}:{self.cell.port} is {shown}, not {wanted}")
        return connection


def _fleet_of(context: ssl.SSLContext) -> str:
    """The trusted fleet: the organization in the names of the authorities (`kernel.authority`). Raises ConnectionError
    if there is not one."""
    found = {
        value
        for authority in context.get_ca_certs()
        for part in cast(tuple[tuple[tuple[str, str], ...], ...], authority["subject"])
        for name, value in part
        if name == "organizationName"
    }
    fleet = found.pop() if len(found) == 1 else ""
    if not is_fleet_name(fleet):
        raise ConnectionError("the bundle of authorities is not of one fleet")
    return fleet


TRANSFERS_MAX = 64
"""Handovers in flight of one decode cell, or its concurrency if that is less."""
PAUSE_AFTER_FAILURE_S = 5.0
"""How long a prefill cell gets no prompts after a failure."""
QUEUE_KNOWN_S = 1.0
"""How long a prefill cell's reported queue is used."""
_QUEUE_DIGITS_MAX = 6
MEMORY_BYTES = 512 * 1024
"""Of remembered prompts: some 130,000 tokens of text, the KV cache of the default 70B model."""


@dataclass
class _Known:
    link: PrefillLink
    outstanding: int = 0
    reported: int = 0
    reported_at: float = float("-inf")
    paused_until: float = float("-inf")
    engine: str = ""
    """The last id of its engine."""

    def candidate(self, now: float) -> Candidate:
        reported = self.reported if now - self.reported_at < QUEUE_KNOWN_S else 0
        return Candidate(self.link.cell, max(self.outstanding, reported), now < self.paused_until)


@dataclass
class HandoverCounts:
    handed_over: int = 0
    in_flight: int = 0
    alone: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    prefills: int = 0
    prefill_tokens: int = 0
    recomputed: int = 0
    """Counted by the decode engine: prompts that it could not fetch from a prefill engine, and read itself."""
    prefill: SlidingHistogram = field(default_factory=lambda: SlidingHistogram(WINDOW_S))
    transfer: SlidingHistogram = field(default_factory=lambda: SlidingHistogram(WINDOW_S))


class Handovers:
    """The handovers of one cell. `limit_s`: how long a prefill cell may take for one prompt."""

    def __init__(
        self, role: CellRole, kv_layout: str, meter: Meter, identity: Path | None, *, transfers_max: int, limit_s: float
    ) -> None:
        self.role = role
        self.kv_layout = kv_layout
        self.limit_s = limit_s
        self.pairs = NO_PAIRS
        self.counts = HandoverCounts()
        self._meter = meter
        self._identity = IdentityFiles(identity) if identity is not None else None
        self._transfers_max = min(TRANSFERS_MAX, transfers_max)
        self._cells: dict[tuple[str, int], _Known] = {}
        self._memory = PromptMemory(MEMORY_BYTES)

    def pair(self, pairs: Pairs) -> None:
        """Uses these pairs from now on. Requests in flight continue."""
        self.pairs = pairs
        known, self._cells = self._cells, {}
        for cell in pairs.prefill_cells:
            key = (cell.cell, cell.generation)
            is_same = key in known and known[key].link.cell == cell
            self._cells[key] = known.pop(key) if is_same else _Known(PrefillLink(cell, self._identity))
        for gone in known.values():
            gone.link.close()

    def sweep(self, now: float) -> None:
        for each in self._cells.values():
            each.link.sweep(now)

    def close(self) -> None:
        for each in self._cells.values():
            each.link.close()

    def begin(self, head: RequestHead, body: bytes, metadata: RequestMetadata) -> "Handover | None":
        if self.role is not CellRole.DECODE:
            return None
        chosen = self._choose(head, body, metadata)
        if isinstance(chosen, Alone):
            self.counts.alone[chosen] += 1
            return None
        return Handover(self, chosen, head, body, metadata)

    def _choose(self, head: RequestHead, body: bytes, metadata: RequestMetadata) -> _Known | Alone:
        least = self.pairs.prefill_from_tokens
        if self._meter.tokens_of_long(len(body)) < least:
            return Alone.SHORT
        prompt = prompt_for_prefill(head.path, body)
        if prompt is None:
            return Alone.UNSUPPORTED
        known_bytes = self._memory.known_bytes(metadata.tenant, prompt)
        self._memory.add(metadata.tenant, prompt)
        tokens = prompt.count(b",") + 1 if is_token_ids(prompt) else self._meter.tokens_of_long(len(prompt))
        if tokens < least:
            return Alone.SHORT
        if tokens * (1 - known_bytes / len(prompt)) < least:
            return Alone.CACHED
        if self.counts.in_flight >= self._transfers_max:
            return Alone.FULL
        now = monotonic()
        cell = choose_cell((each.candidate(now) for each in self._cells.values()), self.kv_layout)
        return cell if isinstance(cell, Alone) else self._cells[cell.cell, cell.generation]

    def is_id_of_another(self, engine: str, cell: _Known) -> bool:
        """Whether another cell's engine has this id. A decode engine identifies engines by it alone, and would read the
        other one's memory."""
        return any(each.engine == engine for each in self._cells.values() if each is not cell)

    def load(self, now: float) -> HandoverLoad | None:
        """The reported counts; None for a cell that does whole requests."""
        if self.role is CellRole.MIXED:
            return None
        counts = self.counts
        fallbacks = dict(counts.fallbacks)
        if counts.recomputed:
            fallbacks["recompute"] = counts.recomputed
        return HandoverLoad(
            handovers_total=counts.handed_over,
            in_flight=counts.in_flight,
            alone=dict(counts.alone),
            fallbacks=fallbacks,
            prefill_p50_ms=milliseconds(counts.prefill.quantile(now, 0.50)),
            prefill_p99_ms=milliseconds(counts.prefill.quantile(now, 0.99)),
            transfer_p50_ms=milliseconds(counts.transfer.quantile(now, 0.50)),
            transfer_p99_ms=milliseconds(counts.transfer.quantile(now, 0.99)),
            prefills_total=counts.prefills,
            prefill_tokens_total=counts.prefill_tokens,
        )


class Handover:
    """The handover of one request. `cached_tokens`: prompt tokens in the prefill cell's cache; None if no cell read
    it."""

    def __init__(
        self, handovers: Handovers, known: _Known, head: RequestHead, body: bytes, metadata: RequestMetadata
    ) -> None:
        self.cached_tokens: int | None = None
        self._handovers = handovers
        self._known = known
        self._head = head
        self._body = body
        self._metadata = metadata
        self._read_at: float | None = None
        self._is_over = False
        handovers.counts.in_flight += 1

    async def read(self) -> bytes:
        """Has the prompt read. Returns the members, as JSON text, for its request to the decode engine: empty if that
        has to read the prompt."""
        known, counts = self._known, self._handovers.counts
        known.outstanding += 1
        began = monotonic()
        try:
            members = await self._call()
        except _FellBack as error:
            counts.fallbacks[error.reason] += 1
            if error.is_cells_fault:
                known.paused_until = monotonic() + PAUSE_AFTER_FAILURE_S
            return b""
        finally:
            known.outstanding -= 1
        self._body = b""
        self._read_at = monotonic()
        counts.handed_over += 1
        counts.prefill.record(self._read_at, self._read_at - began)
        return members

    async def _call(self) -> bytes:
        """Raises _FellBack if the prefill cell did not read it."""
        cell, limit_s = self._known.link.cell, self._handovers.limit_s
        try:
            response = await call(
                *(self._known.link, b"POST", self._head.target, self._body, limit_s),
                max_bytes=ANSWER_BYTES_MAX,
                own=self._headers(cell),
                request_id=self._head.request_id,
            )
        except TimeoutError as error:
            raise _FellBack("slow") from error
        except OSError as error:
            raise _FellBack("unreachable") from error
        reported = response.headers.get(QUEUE_HEADER, b"")
        if reported.isdigit() and len(reported) <= _QUEUE_DIGITS_MAX:
            self._known.reported, self._known.reported_at = int(reported), monotonic()
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            is_busy = self._known.reported >= cell.max_concurrency
            raise _FellBack("busy" if is_busy else "refused", is_cells_fault=not is_busy)
        if response.status != HTTPStatus.OK:  # it can be the prompt's fault: a failing cell answers 503
            raise _FellBack("failed", is_cells_fault=False)
        try:
            elsewhere = read_answer(response.body, cell)
        except BadParams as error:
            raise _FellBack("bad_params") from error
        if self._handovers.is_id_of_another(elsewhere.engine, self._known):
            raise _FellBack("bad_params")
        self._known.engine = elsewhere.engine
        self.cached_tokens = elsewhere.cached_tokens
        return elsewhere.members

    def _headers(self, cell: PrefillCell) -> Headers:
        """Headers for the prefill proxy. They do not identify the client."""
        metadata = self._metadata
        return [
            (HANDOVER_HEADER, quote(self._handovers.kv_layout).encode()),
            (SERVER_HEADER, cell_server_name(cell.cell, cell.generation).encode()),
            (CLASS_HEADER, metadata.serving_class.encode()),
            *([(DEPLOYMENT_HEADER, b"1")] if metadata.is_routed else ()),
            *([(ADAPTER_HEADER, quote(metadata.adapter).encode())] if metadata.adapter else ()),
            *(pair for pair in self._head.headers if pair[0] in TRACE_HEADERS),
        ]

    def answered(self) -> None:
        if self._read_at is not None:
            now = monotonic()
            self._handovers.counts.transfer.record(now, now - self._read_at)
            self._read_at = None
        self.close()

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._handovers.counts.in_flight -= 1


class _FellBack(Exception):
    """A prefill cell did not read a prompt. `is_cells_fault`: it would not read the next one either."""

    def __init__(self, reason: str, *, is_cells_fault: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_cells_fault = is_cells_fault
