"""The bytes of a request on its way through the relay: as it came, with the request for marks, and repeated with the
tokens that its client has. Pure."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from engine_agent.cell_proxy.rewrite import with_members
from engine_agent.cell_proxy.wire import Headers, RequestHead, ResponseHead
from engine_agent.protocol.continuation import (
    AVOIDED_HEADER,
    CONTINUATION_HEADER,
    CONTINUATION_MEMBER,
    COUNTED_HEADER,
    REPLAYED_HEADER,
    SERVER_HEADER,
    VERSION_HEADER,
)

ATTEMPT_HEADER: Final = b"x-switchyard-attempt"
"""The name under which HAProxy counts the attempts of a request. Each repeat has another one."""
BODY_DIGEST_HEADER: Final = b"x-switchyard-body"
POOL_HEADER: Final = b"x-switchyard-pool"
DEPLOYMENT_HEADER: Final = b"x-switchyard-deployment"
"""On an answer: the deployment whose cell gave it."""
_CONNECTION: Final = frozenset(
    {b"connection", b"content-length", b"expect", b"keep-alive", b"proxy-connection", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade"}
)
_OWN: Final = frozenset({CONTINUATION_HEADER, REPLAYED_HEADER, COUNTED_HEADER, AVOIDED_HEADER, VERSION_HEADER})
_FOR_THE_RELAY: Final = frozenset({VERSION_HEADER, SERVER_HEADER})


@dataclass(frozen=True, slots=True)
class Repeat:
    """The additions to a request that is repeated. `pool`, `version` and `avoided`: where it may go. `counted`: as
    `COUNTED_HEADER`."""

    number: int
    version: bytes
    pool: bytes = b""
    avoided: tuple[bytes, ...] = ()
    prompt: bytes = b""
    groups: tuple[tuple[int, ...], ...] | list[list[int]] = ()
    counted: int | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.groups))


def first_request(head: RequestHead, body: bytes, *, marked: bool) -> bytes:
    return _request(head, head.headers, [(CONTINUATION_HEADER, b"on")] if marked else [], body)


def repeated_request(head: RequestHead, body: bytes, repeat: Repeat) -> bytes:
    """The request with a further member, and headers that lead it to another cell that answers alike."""
    member = {"prompt": repeat.prompt.decode("latin-1"), "groups": repeat.groups}
    body = with_members(body, b'"%b":%b' % (CONTINUATION_MEMBER.encode(), msgspec.json.encode(member)))
    named = dict(head.headers)
    own = [(CONTINUATION_HEADER, b"on"), (REPLAYED_HEADER, b"%d" % repeat.tokens), (VERSION_HEADER, repeat.version)]
    if repeat.counted is not None:
        own.append((COUNTED_HEADER, b"%d" % repeat.counted))
    if repeat.avoided:
        own.append((AVOIDED_HEADER, b",".join(repeat.avoided)))
    replaced = {ATTEMPT_HEADER, BODY_DIGEST_HEADER}
    if ATTEMPT_HEADER in named:
        own.append((ATTEMPT_HEADER, (b"%b-%d" % (named[ATTEMPT_HEADER][:40], repeat.number))))
    if BODY_DIGEST_HEADER in named:
        own.append((BODY_DIGEST_HEADER, hashlib.sha256(body).hexdigest().encode()))
    if repeat.pool:
        replaced.add(POOL_HEADER)
        own.append((POOL_HEADER, b"pool." + repeat.pool))
    return _request(head, (pair for pair in head.headers if pair[0] not in replaced), own, body)


def _request(head: RequestHead, headers: Iterable[tuple[bytes, bytes]], own: Headers, body: bytes) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\n" % (head.method, head.target)]
    lines += [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in _CONNECTION and pair[0] not in _OWN]
    lines += [b"%b: %b\r\n" % pair for pair in own]
    lines.append(b"content-length: %d\r\n\r\n" % len(body))
    lines.append(body)
    return b"".join(lines)


def response_opening(response: ResponseHead, framing: Headers, *, keep_alive: bool) -> bytes:
    """The head that the client gets: that of the cell, with the relay's framing."""
    dropped = _CONNECTION | _FOR_THE_RELAY
    lines = [b"HTTP/1.1 %d %b\r\n" % (response.status, response.reason)]
    lines += [b"%b: %b\r\n" % pair for pair in response.headers if pair[0] not in dropped]
    lines += [b"%b: %b\r\n" % pair for pair in framing]
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines)
