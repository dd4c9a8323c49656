"""A routing table that is longer than a frame: taken apart by the sender, put together by the receiver. Pure.

Parts say which table they are of, so losing, repeating or reordering them is harmless: a table counts only once it is
whole and its digest is right, and a newer one takes the place of one that never became whole.
"""

import hashlib

from engine_agent.protocol.codec import BadMessage, TooLong, decode_down, encode, encode_unbounded
from engine_agent.protocol.ingress_messages import RoutingTable, TablePart
from engine_agent.protocol.messages import DownMessage

PIECE_BYTES = 180 * 1024
"""Base64 makes 240 KiB of it, which leaves room for the rest of the frame."""
MAX_PARTS = 256
"""45 MiB of table; 20,000 keys take 5."""


def frames_of(message: DownMessage) -> tuple[bytes, ...]:
    """A message as the frames that carry it: one, or as many as a long routing table needs.

    Raises:
        BadMessage: it is too long, and no table or longer than `MAX_PARTS` parts.
    """
    try:
        return (encode(message),)
    except TooLong:
        if not isinstance(message, RoutingTable):
            raise
    return tuple(encode(part) for part in _parts_of(message))


def _parts_of(table: RoutingTable) -> list[TablePart]:
    whole = encode_unbounded(table)
    pieces = [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]
    if len(pieces) > MAX_PARTS:
        raise BadMessage(f"a routing table of {len(whole)} bytes exceeds the limit of {MAX_PARTS * PIECE_BYTES}")
    digest = hashlib.sha256(whole).hexdigest()
    return [TablePart(table.revision, digest, number, len(pieces), piece) for number, piece in enumerate(pieces)]


class TableAssembly:
    """The parts of one connection that came so far, of the newest table only."""

    def __init__(self) -> None:
        self._revision = 0
        self._digest = ""
        self._count = 0
        self._pieces: dict[int, bytes] = {}

    def take(self, part: TablePart) -> RoutingTable | None:
        """Keep a part. Returns the table if this made it whole.

        Raises:
            BadMessage: the part, or the table that it made whole, cannot be one.
        """
        if not (0 < part.count <= MAX_PARTS and 0 <= part.index < part.count and len(part.piece) <= PIECE_BYTES):
            raise BadMessage(f"part {part.index} of {part.count} with {len(part.piece)} bytes is no part of a table")
        if part.revision < self._revision:
            return None
        if (part.revision, part.digest, part.count) != (self._revision, self._digest, self._count):
            self._revision, self._digest, self._count = part.revision, part.digest, part.count
            self._pieces = {}
        self._pieces[part.index] = part.piece
        if len(self._pieces) < part.count:
            return None
        whole = b"".join(self._pieces[number] for number in range(part.count))
        self._pieces = {}
        return _whole_table(whole, part)


def _whole_table(whole: bytes, part: TablePart) -> RoutingTable:
    if hashlib.sha256(whole).hexdigest() != part.digest:
        raise BadMessage(f"the parts of revision {part.revision} do not make the table that they speak of")
    table = decode_down(whole, limit_bytes=MAX_PARTS * PIECE_BYTES)
    if not isinstance(table, RoutingTable) or table.revision != part.revision:
        raise BadMessage(f"the parts of revision {part.revision} make a {type(table).__name__} of another one")
    return table
