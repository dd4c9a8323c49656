"""One request of the proxy itself, whose answer is read whole, with limits on time and length: what probes, counts of
tokens and handovers use. Not for clients' answers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_agent.cell_proxy.upload import Upload
from engine_agent.cell_proxy.upstream import EngineConnection, EnginePool, UpstreamFault
from engine_agent.cell_proxy.wire import Headers, RequestHead, ResponseHead

_MAX_ANSWER_BYTES = 64 * 1024
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class CallResponse:
    status: int
    body: bytes
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


class CallFailed(ConnectionError):
    """The engine cannot be reached or gave no proper answer; the text says which."""


class _Collector:
    """Implements `Receiver`: gathers one answer."""

    def __init__(self, future: "asyncio.Future[CallResponse]", max_bytes: int) -> None:
        self._future = future
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        if head is not None:
            self._status, self._headers = head.status, dict(head.headers)
        self._body += body
        if self._future.done():
            return
        if complete:
            self._future.set_result(CallResponse(self._status, bytes(self._body), self._headers))
        elif len(self._body) > self._max_bytes:
            self._future.set_exception(CallFailed(f"an answer of more than {self._max_bytes} bytes"))

    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        if not self._future.done():
            self._future.set_exception(CallFailed(f"connection {fault}: {reason}"))


async def call(
    pool: EnginePool,
    method: bytes,
    target: bytes,
    body: bytes | None,
    timeout_s: float,
    *,
    max_bytes: int = _MAX_ANSWER_BYTES,
    own: Headers | None = None,
    request_id: bytes = b"probe",
) -> CallResponse:
    """Send one request and wait for its whole answer, of `max_bytes` at most. `own` are headers that it has.

    Raises:
        TimeoutError: no whole answer within `timeout_s`.
        OSError: refused or broken (`CallFailed`).
    """
    headers = [*([] if body is None else [_JSON]), *(own or ())]
    length = None if body is None else len(body)
    head = RequestHead(method, target, [], True, True, length, False, False, request_id)
    async with asyncio.timeout(timeout_s):
        while (connection := pool.take()) is not None:
            try:
                return await _send(connection, pool, head, headers, body, max_bytes)
            except CallFailed:
                continue  # it had been closed while idle; a fresh one will tell what is wrong
        return await _send(await pool.connect(), pool, head, headers, body, max_bytes)


async def _send(
    connection: EngineConnection, pool: EnginePool, head: RequestHead, own: Headers, body: bytes | None, max_bytes: int
) -> CallResponse:
    upload = Upload(head, repeat_limit_bytes=0)
    upload.headers = own
    upload.add(body or b"", complete=True)
    future: asyncio.Future[CallResponse] = asyncio.get_running_loop().create_future()
    connection.receiver = _Collector(future, max_bytes)
    connection.write(upload.opening(pool.host_header))
    try:
        response = await future
    except BaseException:
        connection.abort()
        raise
    connection.release()
    return response
