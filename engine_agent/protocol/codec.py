"""Bytes <-> messages, with limits: JSON, one message per frame. A longer message is split into parts. A part names its
message, so parts may be lost, repeated or reordered: the message counts only when it is complete and its digest is
right. A newer message replaces an incomplete one."""

import hashlib
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine_agent.protocol.ingress_messages import ApplicationTls, RoutingTable, TablePart
from engine_agent.protocol.messages import (
    SIGNATURE_CHARS_MAX,
    SUMMARY_CHARS_MAX,
    Certificate,
    DownMessage,
    Fault,
    Trust,
    UpMessage,
)

MAX_FRAME_BYTES = 256 * 1024
FAULT_BYTES_MAX = 32 * 1024
"""Twice the size of the last lines of a log."""

_encoder = msgspec.json.Encoder()
_up: "msgspec.json.Decoder[UpMessage]" = msgspec.json.Decoder(UpMessage)
_down: "msgspec.json.Decoder[DownMessage]" = msgspec.json.Decoder(DownMessage)

M = TypeVar("M")


class BadMessage(ValueError):
    """A frame that is not a message of this protocol; the text names the place and the reason."""


class TooLong(BadMessage):
    """A message that does not fit into one frame."""


def encode(message: UpMessage | DownMessage) -> bytes:
    """Raises TooLong if the frame would exceed `MAX_FRAME_BYTES`."""
    frame = encode_unbounded(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise _too_long(frame, MAX_FRAME_BYTES)
    return frame


def encode_unbounded(message: UpMessage | DownMessage) -> bytes:
    """Encodes a message of any length, to be split into parts."""
    return _encoder.encode(message)


def bounded_fault(fault: Fault) -> Fault:
    """Returns the fault within the limits of the protocol. Evidence that is too long is replaced by its size."""
    short = Fault(fault.signature[:SIGNATURE_CHARS_MAX], fault.summary[:SUMMARY_CHARS_MAX], fault.evidence)
    size = len(_encoder.encode(short))
    if size <= FAULT_BYTES_MAX:
        return short
    return Fault(short.signature, short.summary, {"evidence_left_out_bytes": size})


def decode_up(frame: bytes | str) -> UpMessage:
    """Decodes a frame from an agent. Raises BadMessage if it is too long, not JSON, or not a message of the
    protocol."""
    return _decode(_up, frame, MAX_FRAME_BYTES)


def decode_down(frame: bytes | str, *, limit_bytes: int = MAX_FRAME_BYTES) -> DownMessage:
    """Decodes a frame from the control plane. `limit_bytes` is higher only for messages joined from parts. Raises
    BadMessage if it is too long, not JSON, or not a message of the protocol."""
    return _decode(_down, frame, limit_bytes)


def _decode(decoder: "msgspec.json.Decoder[M]", frame: bytes | str, limit_bytes: int) -> M:
    if len(frame) > limit_bytes:
        raise _too_long(frame, limit_bytes)
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error


def _too_long(frame: bytes | str, limit_bytes: int) -> TooLong:
    return TooLong(f"frame of {len(frame)} bytes exceeds the limit of {limit_bytes}")


PIECE_BYTES = 180 * 1024
"""240 KiB in Base64, which leaves room for the rest of the frame."""
MAX_PARTS = 256
"""45 MiB of table; 20,000 keys take 5 MiB."""
LONG = {str(kind.__struct_config__.tag): kind for kind in (RoutingTable, ApplicationTls, Trust, Certificate)}
"""Messages that may be longer than a frame: all keys, all certificates of a region, or revocation lists."""


def frames_of(message: DownMessage) -> tuple[bytes, ...]:
    """Returns the frames that carry a message: one, or as many as a long message needs. Raises BadMessage if the
    message is too long and not of a kind in `LONG`, or needs more than `MAX_PARTS` parts."""
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
    """The parts of the newest message of a kind."""

    revision: int = 0
    digest: str = ""
    count: int = 0
    received: dict[int, bytes] = field(default_factory=dict)


class MessageAssembly:
    """Collects the parts that arrived over one connection, of the newest message of each kind."""

    def __init__(self) -> None:
        self._pieces = {tag: _Pieces() for tag in LONG}

    def take(self, part: TablePart) -> DownMessage | None:
        """Adds a part. Returns the message if it is complete now. Raises BadMessage if the part or the complete message
        is invalid."""
        if part.of not in LONG:
            raise BadMessage(f"a part of {part.of[:40]!r}, which is never split")
        if not (0 < part.count <= MAX_PARTS and 0 <= part.index < part.count and len(part.piece) <= PIECE_BYTES):
            raise BadMessage(
                f"part {part.index} of {part.count} with {len(part.piece)} bytes is not a part of a {part.of}"
            )
        pieces = self._pieces[part.of]
        if part.revision < pieces.revision:
            return None
        if (part.revision, part.digest, part.count) != (pieces.revision, pieces.digest, pieces.count):
            pieces = self._pieces[part.of] = _Pieces(part.revision, part.digest, part.count)
        pieces.received[part.index] = part.piece
        if len(pieces.received) < part.count:
            return None
        whole = b"".join(pieces.received[number] for number in range(part.count))
        pieces.received = {}
        return _whole_message(whole, part)


def _whole_message(whole: bytes, part: TablePart) -> DownMessage:
    if hashlib.sha256(whole).hexdigest() != part.digest:
        raise BadMessage(f"the parts of {_name(part)} do not have the digest of their message")
    message = decode_down(whole, limit_bytes=MAX_PARTS * PIECE_BYTES)
    if not isinstance(message, LONG[part.of]) or _revision(message) != part.revision:
        raise BadMessage(f"the parts of {_name(part)} form a different {type(message).__name__}")
    return message


def _name(part: TablePart) -> str:
    return f"revision {part.revision}" if part.revision else part.of
