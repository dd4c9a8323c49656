"""A message to an agent that is longer than a frame: taken apart by the sender, put together by the receiver. Pure.

Parts say which message they are of, so losing, repeating or reordering them is harmless: it counts only once it is
whole and its digest is right, and a newer one takes the place of one that never became whole.
"""

import hashlib
from dataclasses import dataclass, field

from engine_agent.protocol.codec import BadMessage, TooLong, decode_down, encode, encode_unbounded
from engine_agent.protocol.ingress_messages import ApplicationTls, RoutingTable, TablePart
from engine_agent.protocol.messages import Certificate, DownMessage, Trust

PIECE_BYTES = 180 * 1024
"""Base64 makes 240 KiB of it, which leaves room for the rest of the frame."""
MAX_PARTS = 256
"""45 MiB of table; 20,000 keys take 5."""
LONG = {str(kind.__struct_config__.tag): kind for kind in (RoutingTable, ApplicationTls, Trust, Certificate)}
"""What may be longer than a frame: all keys, all certificates of a region, or revocation lists."""


def frames_of(message: DownMessage) -> tuple[bytes, ...]:
    """A message as the frames that carry it: one, or as many as a long one needs.

    Raises:
        BadMessage: it is too long, and none of `LONG` or longer than `MAX_PARTS` parts.
    """
    try:
        return (encode(message),)
    except TooLong:
        if not isinstance(message, tuple(LONG.values())):
            raise
    return tuple(encode(part) for part in _parts_of(message))


def _parts_of(message: DownMessage) -> list[TablePart]:
    whole, tag = encode_unbounded(message), str(message.__struct_config__.tag)
    pieces = [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]
    if len(pieces) > MAX_PARTS:
        raise BadMessage(f"a {tag} of {len(whole)} bytes exceeds the limit of {MAX_PARTS * PIECE_BYTES}")
    digest, revision = hashlib.sha256(whole).hexdigest(), _revision(message)
    return [TablePart(revision, digest, number, len(pieces), piece, tag) for number, piece in enumerate(pieces)]


def _revision(message: DownMessage) -> int:
    return message.revision if isinstance(message, RoutingTable) else 0


@dataclass(slots=True)
class _Pieces:
    """Of the newest message of a kind."""

    revision: int = 0
    digest: str = ""
    count: int = 0
    there: dict[int, bytes] = field(default_factory=dict)


class MessageAssembly:
    """The parts of one connection that came so far, of the newest message of each kind only."""

    def __init__(self) -> None:
        self._pieces = {tag: _Pieces() for tag in LONG}

    def take(self, part: TablePart) -> DownMessage | None:
        """Keep a part. Returns the message if this made it whole.

        Raises:
            BadMessage: the part, or the message that it made whole, cannot be one.
        """
        if part.of not in LONG:
            raise BadMessage(f"a part of {part.of[:40]!r}, which is never taken apart")
        if not (0 < part.count <= MAX_PARTS and 0 <= part.index < part.count and len(part.piece) <= PIECE_BYTES):
            raise BadMessage(
                f"part {part.index} of {part.count} with {len(part.piece)} bytes is no part of a {part.of}"
            )
        pieces = self._pieces[part.of]
        if part.revision < pieces.revision:
            return None
        if (part.revision, part.digest, part.count) != (pieces.revision, pieces.digest, pieces.count):
            pieces = self._pieces[part.of] = _Pieces(part.revision, part.digest, part.count)
        pieces.there[part.index] = part.piece
        if len(pieces.there) < part.count:
            return None
        whole = b"".join(pieces.there[number] for number in range(part.count))
        pieces.there = {}
        return _whole_message(whole, part)


def _whole_message(whole: bytes, part: TablePart) -> DownMessage:
    if hashlib.sha256(whole).hexdigest() != part.digest:
        raise BadMessage(f"the parts of {_name(part)} do not make the message that they speak of")
    message = decode_down(whole, limit_bytes=MAX_PARTS * PIECE_BYTES)
    if not isinstance(message, LONG[part.of]) or _revision(message) != part.revision:
        raise BadMessage(f"the parts of {_name(part)} make a {type(message).__name__} of another one")
    return message


def _name(part: TablePart) -> str:
    return f"revision {part.revision}" if part.revision else part.of
