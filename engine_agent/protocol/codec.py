"""Bytes <-> messages, with limits. The only place that knows the wire format (JSON, one message per frame)."""

from typing import TypeVar

import msgspec

from engine_agent.protocol.messages import SIGNATURE_CHARS_MAX, SUMMARY_CHARS_MAX, DownMessage, Fault, UpMessage

MAX_FRAME_BYTES = 256 * 1024
FAULT_BYTES_MAX = 32 * 1024
"""Twice what the last lines of a log take."""

_encoder = msgspec.json.Encoder()
_up: "msgspec.json.Decoder[UpMessage]" = msgspec.json.Decoder(UpMessage)
_down: "msgspec.json.Decoder[DownMessage]" = msgspec.json.Decoder(DownMessage)

M = TypeVar("M")


class BadMessage(ValueError):
    """A frame that is no message of this protocol; the text says where and why."""


class TooLong(BadMessage):
    """A message that does not fit into a frame."""


def encode(message: UpMessage | DownMessage) -> bytes:
    """Encode one message.

    Raises:
        TooLong: the frame would exceed `MAX_FRAME_BYTES`.
    """
    frame = encode_unbounded(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise _too_long(frame, MAX_FRAME_BYTES)
    return frame


def encode_unbounded(message: UpMessage | DownMessage) -> bytes:
    """Encode one message that is to be taken apart, however long it is."""
    return _encoder.encode(message)


def bounded_fault(fault: Fault) -> Fault:
    """The fault within the limits of the protocol: evidence that is too long is left out whole, and that is said."""
    short = Fault(fault.signature[:SIGNATURE_CHARS_MAX], fault.summary[:SUMMARY_CHARS_MAX], fault.evidence)
    size = len(_encoder.encode(short))
    if size <= FAULT_BYTES_MAX:
        return short
    return Fault(short.signature, short.summary, {"evidence_left_out_bytes": size})


def decode_up(frame: bytes | str) -> UpMessage:
    """Decode a frame from an agent.

    Raises:
        BadMessage: too long, not JSON, or not a message of the protocol.
    """
    return _decode(_up, frame, MAX_FRAME_BYTES)


def decode_down(frame: bytes | str, *, limit_bytes: int = MAX_FRAME_BYTES) -> DownMessage:
    """Decode a frame from the control plane. `limit_bytes` is another one only for what parts made whole.

    Raises:
        BadMessage: too long, not JSON, or not a message of the protocol.
    """
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
