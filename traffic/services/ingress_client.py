"""Sends requests to an ingress over HTTP/1.1, within bounds, and takes the response whole or as a stream. It reports
what happened and decides nothing. Cancelling one cuts its connection, and with that the engine of the cell stops.

It comes in where other regions' ingresses do, by TLS with the control plane's certificate, and checks that it is the
ingress which it means.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import httpx
from django.conf import settings

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.protocol.ports import hop_port
from traffic.planning.async_request import AttemptResponse
from traffic.planning.key import sender_key_text
from traffic.planning.routing import IngressAddress

CONNECT_LIMIT_S = 3.0
ANSWER_ROOM_S = 2.0
"""A cell answers at the deadline of a request; its answer needs time to arrive."""
T = TypeVar("T")
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Where links are plain. Loading the usual authorities for each client would cost some 300 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedWork:
    """One attempt of work that was accepted earlier. `key` is its id, or empty. `left_s`: until its deadline."""

    id: str
    region: str
    path: str
    body: bytes
    serving_class: str
    key: str
    left_s: float
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`first_s`: until the response begins, queueing included; `silent_s`: between two pieces of it; `whole_s`: all."""

    first_s: float = 60.0
    silent_s: float = 30.0
    whole_s: float = 300.0
    max_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers, whose names are in lower case."""

    status: int
    headers: Mapping[str, str]


class StreamBroken(Exception):
    """No whole response; the text says why."""


class IngressUnreachable(StreamBroken):
    pass


class NoIdentity(Exception):
    """This host has no certificate of the control plane, or one that cannot be read."""


async def accepted_work_send(
    work: AcceptedWork, addresses: Mapping[str, Sequence[IngressAddress]], attempt: int
) -> AttemptResponse:
    """Send it to an ingress of its region; each attempt uses the next one. Never raises if an ingress fails."""
    ingresses = addresses.get(work.region, ())
    if not ingresses:
        return AttemptResponse(None, sent=False, reason=f"region {work.region} has no ingress")
    headers = {
        "X-Switchyard-Class": work.serving_class,
        "X-Switchyard-Deadline-Ms": str(max(1, int(work.left_s * 1000))),
        "X-Request-Id": work.id,
    }
    if work.key:
        headers["Authorization"] = f"Bearer {sender_key_text(work.key, settings.SECRET_KEY)}"
    return await ingress_post(
        ingresses[attempt % len(ingresses)],
        work.path,
        work.body,
        headers,
        limit_s=max(0.0, work.left_s) + ANSWER_ROOM_S,
        max_bytes=work.max_answer_bytes,
    )


async def ingress_post(
    ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str], *, limit_s: float, max_bytes: int
) -> AttemptResponse:
    """POST a JSON body and wait for the whole response. Never raises for what the other side does."""
    try:
        async with asyncio.timeout(limit_s), _client(min(CONNECT_LIMIT_S, limit_s)) as client:
            response = await client.send(_post(ingress, path, body, headers), stream=True)
            return await _whole(response, max_bytes)
    except (httpx.ConnectError, httpx.ConnectTimeout, NoIdentity) as error:
        return AttemptResponse(None, sent=False, reason=_unreachable(ingress, error))
    except TimeoutError:
        return AttemptResponse(None, reason=f"no whole answer within {limit_s:.3g} s")
    except httpx.TransportError as error:
        return AttemptResponse(None, reason=_broken(error))


async def ingress_stream(
    ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str], limits: StreamLimits
) -> AsyncGenerator[ResponseHead | bytes, None]:
    """POST a JSON body. The head comes first, then the body in pieces.

    Raises:
        IngressUnreachable: nothing was sent.
        StreamBroken: the ingress is silent for too long, or breaks off.
    """
    try:
        async with _client(CONNECT_LIMIT_S) as client:
            request = _post(ingress, path, body, headers)
            async with aclosing(_parts(client, request, limits)) as parts:
                async for part in parts:
                    yield part
    except (httpx.ConnectError, httpx.ConnectTimeout, NoIdentity) as error:
        raise IngressUnreachable(_unreachable(ingress, error)) from None
    except httpx.TransportError as error:
        raise StreamBroken(_broken(error)) from None


async def _whole(response: httpx.Response, max_bytes: int) -> AttemptResponse:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            return AttemptResponse(None, reason=f"the answer is longer than {max_bytes} bytes")
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after[:6]) if retry_after.isascii() and retry_after.isdigit() else None
    return AttemptResponse(response.status_code, bytes(body), retry_after_s=retry_after_s)


async def _parts(
    client: httpx.AsyncClient, request: httpx.Request, limits: StreamLimits
) -> AsyncGenerator[ResponseHead | bytes, None]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + limits.whole_s
    # Not one timeout around it all: it would end whoever reads this, in the middle of something else.
    response = await _within(min(limits.first_s, limits.whole_s), client.send(request, stream=True))
    async with aclosing(response):
        yield ResponseHead(response.status_code, dict(response.headers))
        pieces, read_bytes = response.aiter_raw(), 0
        while piece := await _within(min(limits.silent_s, ends_at - clock()), anext(pieces, b"")):
            read_bytes += len(piece)
            if read_bytes > limits.max_bytes:
                raise StreamBroken(f"the answer is longer than {limits.max_bytes} bytes")
            yield piece


async def _within(limit_s: float, step: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await step
    except TimeoutError:
        raise StreamBroken(f"nothing more came within {max(0.0, limit_s):.3g} s") from None


def _client(connect_s: float) -> httpx.AsyncClient:
    """
    Raises:
        NoIdentity: web, which makes it, has never run with this home.
    """
    context = _NO_AUTHORITIES if settings.PLAIN_LINKS else own_identity().read()[1]
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=connect_s), trust_env=False, verify=context)


def _post(ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
    """Built by hand, so that none of the client's own headers (Accept-Encoding, User-Agent) reaches an engine."""
    scheme, port, extensions = "http", ingress.port, {}
    if not settings.PLAIN_LINKS:
        scheme, port = "https", hop_port(ingress.port)
        # Also the name that must stand in its certificate.
        extensions["sni_hostname"] = IdentityName(own_identity().read()[0], IdentityKind.INGRESS, ingress.id).dns
    url = httpx.URL(scheme=scheme, host=ingress.address, port=port, raw_path=path.encode("ascii"))
    fixed = {"Content-Type": "application/json", "Connection": "close"}
    stated = httpx.Headers({**headers, **fixed}, encoding="latin-1")
    return httpx.Request("POST", url, headers=stated, content=body, extensions=extensions)


class OwnIdentity:
    """The control plane's certificate on this host, which web keeps in this folder."""

    def __init__(self, folder: Path) -> None:
        self._identity = Identity(folder)
        self._known: tuple[object, tuple[str, ssl.SSLContext]] | None = None

    def read(self) -> tuple[str, ssl.SSLContext]:
        """The fleet's name, and what shows the certificate; read again when a file has changed.

        Raises:
            NoIdentity: it cannot be read.
        """
        stamp = self._identity.stamp()
        if self._known is None or self._known[0] != stamp:
            try:
                self._known = (stamp, (self._identity.fleet(), self._identity.client_context()))
            except (OSError, ValueError) as error:
                raise NoIdentity(str(error)) from error
        return self._known[1]


@cache
def own_identity() -> OwnIdentity:
    return OwnIdentity(settings.SWITCHYARD_HOME / "control")


def _unreachable(ingress: IngressAddress, error: Exception) -> str:
    where = f"the ingress {ingress.id} at {ingress.address}:{ingress.port}"
    return f"{where} cannot be reached: {str(error) or type(error).__name__}"


def _broken(error: httpx.TransportError) -> str:
    return f"the answer broke off: {str(error) or type(error).__name__}"
