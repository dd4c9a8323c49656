"""One prompt that a prefill cell reads for a decode cell: checks the sender, has the engine generate one token, and
returns the place of the prompt. It is no client's request and counts for no tenant."""

import asyncio
from http import HTTPStatus
from time import monotonic, time
from urllib.parse import unquote

import msgspec

from engine_agent.cell_proxy import admission
from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import BadHeader, RequestMetadata, read_metadata
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.downstream import ClientConnection, contained, contained_task
from engine_agent.cell_proxy.prefill import (
    ANSWER_BYTES_MAX,
    HANDOVER_HEADER,
    PROMPT_MEMBERS,
    QUEUE_HEADER,
    TRACE_HEADERS,
    BadParams,
    EnginePrefill,
    PrefillAnswer,
    prefill_members,
    prompt_for_prefill,
    read_engine_answer,
)
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.rewrite import PRIORITIES, BadBody, rewrite_body, with_members
from engine_agent.cell_proxy.upstream import call
from engine_agent.cell_proxy.wire import (
    ENGINE_PRIORITY_HEADER,
    Headers,
    LocalResponse,
    RequestHead,
    refusal_response,
    response_bytes,
)
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.states import CellRole


class PrefillExchange:
    """Implements `Responder` for the decode cell's side, and `InFlight`."""

    def __init__(self, cell: Cell, head: RequestHead, client: ClientConnection) -> None:
        self._cell = cell
        self._head = head
        self._client = client
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    # --- Responder ---

    @contained
    def feed(self, data: bytes, *, complete: bool) -> None:
        self._body.append(data)
        if complete and not self._ended:
            self._start(b"".join(self._body))

    def refuse(self, refusal: Refusal) -> None:
        self._answer(refusal_response(refusal))

    def client_gone(self) -> None:
        self._finish()

    def download_paused(self) -> None: ...

    def download_resumed(self) -> None: ...

    def crashed(self, error: Exception) -> None:
        self.refuse(refusals.proxy_failed())

    # --- InFlight ---

    def check(self, now: float) -> None:
        """The call has its own limit."""

    def cut(self, refusal: Refusal) -> None:
        self.refuse(refusal)

    @property
    def is_leaving(self) -> bool:
        return False

    def leave(self) -> None: ...

    # --- what it does ---

    def _start(self, body: bytes) -> None:
        try:
            metadata = read_metadata(self._head.named, time())
            if (refusal := self._refusal(metadata)) is not None:
                raise _Refused(refusal)
            sent = with_members(body, self._members(body, metadata))
        except (BadHeader, _Refused) as error:
            self.refuse(error.refusal)
            return
        self._cell.enter(self)
        self._task = asyncio.get_running_loop().create_task(self._read(sent, metadata))

    def _refusal(self, metadata: RequestMetadata) -> Refusal | None:
        return self._who_may_not() or self._why_not_here(metadata) or self._why_not_now(metadata)

    def _who_may_not(self) -> Refusal | None:
        cell, peer = self._cell, self._client.peer
        if cell.settings.cell_role is not CellRole.PREFILL:
            return refusals.no_prefill_cell(cell.settings.cell_role)
        if cell.settings.identity is None or (peer is not None and peer.node in cell.handovers.pairs.decode_nodes):
            return None
        return refusals.prefill_forbidden(f"node {peer.node}" if peer is not None and peer.node else "an ingress")

    def _why_not_here(self, metadata: RequestMetadata) -> Refusal | None:
        cell = self._cell
        layout = unquote(self._head.named.get(HANDOVER_HEADER, b"").decode("latin-1"))
        if layout != cell.settings.kv_layout:
            return refusals.other_layout(layout, cell.settings.kv_layout)
        if metadata.server and metadata.server != cell.server_name:
            return refusals.other_start(metadata.server, cell.server_name)
        if metadata.adapter and metadata.adapter not in cell.settings.adapters:
            return refusals.adapter_not_here(metadata.adapter)
        return None

    def _why_not_now(self, metadata: RequestMetadata) -> Refusal | None:
        """There is no queue here: the decode cell can read the prompt itself."""
        cell = self._cell
        return admission.refuse(
            metadata.serving_class,
            phase=cell.phase,
            healthy=cell.health.ok,
            reason=cell.health.reason,
            in_flight=len(cell.in_flight),
            limit=cell.settings.max_concurrency,
        )

    def _members(self, body: bytes, metadata: RequestMetadata) -> bytes:
        """The members to append to the request. Raises _Refused if it is no request that is handed over."""
        settings = self._cell.settings
        priority = PRIORITIES[metadata.serving_class] if settings.priorities else None
        model = (metadata.adapter or settings.model) if metadata.is_routed else None
        try:
            rewrite = rewrite_body(self._head.path, body, priority, model)
        except BadRequest as error:
            raise _Refused(refusals.bad_member(error)) from None
        except BadBody as error:
            raise _Refused(refusals.bad_body(str(error))) from None
        if prompt_for_prefill(self._head.path, body) is None:
            paths = ", ".join(path.decode() for path in PROMPT_MEMBERS)
            raise _Refused(refusals.not_handed_over(paths))
        return b",".join(filter(None, (rewrite.members, prefill_members(self._head.path))))

    @contained_task
    async def _read(self, body: bytes, metadata: RequestMetadata) -> None:
        cell, probes, began = self._cell, self._cell.meter.probes, monotonic()
        probes.begun += 1
        probes.running += 1
        is_known = False
        try:
            response = await call(
                *(cell.pool, b"POST", self._head.target, body, cell.settings.prefill_timeout_s),
                max_bytes=ANSWER_BYTES_MAX,
                own=self._headers(metadata),
                request_id=self._head.request_id,
            )
            is_known = response.status != HTTPStatus.OK
            if response.status != HTTPStatus.OK:
                answer = refusal_response(refusals.prefill_failed(f"the engine answered {response.status}"))
            else:
                prefill = read_engine_answer(response.body)
                is_known = True
                answer = self._note_read(prefill, monotonic() - began)
        except (OSError, BadParams) as error:
            cell.request_probe()
            answer = refusal_response(refusals.prefill_failed(str(error) or "no answer in time"))
        finally:
            probes.running -= 1
            probes.unknown += not is_known
        self._task = None
        self._answer(answer)

    def _note_read(self, prefill: EnginePrefill, took_s: float) -> LocalResponse:
        probes, counts = self._cell.meter.probes, self._cell.handovers.counts
        probes.prompt_tokens += prefill.prompt_tokens
        probes.completion_tokens += prefill.completion_tokens
        counts.prefills += 1
        counts.prefill_tokens += prefill.prompt_tokens
        counts.prefill.record(monotonic(), took_s)
        if prefill.params is None:
            return refusal_response(refusals.prefill_failed("the engine does not keep it"))
        answer = PrefillAnswer(prefill.params, prefill.prompt_tokens, prefill.cached_tokens)
        return LocalResponse(200, msgspec.json.encode(answer))

    def _headers(self, metadata: RequestMetadata) -> Headers:
        priority = PRIORITIES[metadata.serving_class] if self._cell.settings.priorities else 0
        traced = [pair for pair in self._head.headers if pair[0] in TRACE_HEADERS]
        return [*traced, (ENGINE_PRIORITY_HEADER, b"%d" % priority)] if priority else traced

    def _answer(self, answer: LocalResponse) -> None:
        if self._ended:
            return
        self._finish()
        keep_alive = self._client.may_keep_alive()
        own = [(QUEUE_HEADER, b"%d" % len(self._cell.in_flight)), (b"x-request-id", self._head.request_id)]
        self._client.write(response_bytes(answer, own, keep_alive=keep_alive))
        self._client.answered(keep_alive=keep_alive)

    def _finish(self) -> None:
        self._ended = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._cell.leave(self)


class _Refused(Exception):
    """A prompt that is not read here; `refusal` is the response."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
