"""Bytes <-> messages, with limits. The only place that knows the wire format (JSON, one message per frame)."""

from typing import TypeVar

import msgspec

from engine_agent.protocol.messages import DownMessage, UpMessage

MAX_FRAME_BYTES = 256 * 1024

_encoder = msgspec.json.Encoder()
_up: "msgspec.json.Decoder[UpMessage]" = msgspec.json.Decoder(UpMessage)
_down: "msgspec.json.Decoder[DownMessage]" = msgspec.json.Decoder(DownMessage)

M = TypeVar("M")


class BadMessage(ValueError):
    """A frame that is no message of this protocol; the text says where and why."""


def encode(message: UpMessage | DownMessage) -> bytes:
    """Encode one message.

    Raises:
        BadMessage: the frame would exceed `MAX_FRAME_BYTES`.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise BadMessage(f"frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def decode_up(frame: bytes | str) -> UpMessage:
    """Decode a frame from an agent.

    Raises:
        BadMessage: too long, not JSON, or not a message of the protocol.
    """
    return _decode(_up, frame)


def decode_down(frame: bytes | str) -> DownMessage:
    """Decode a frame from the control plane.

    Raises:
        BadMessage: too long, not JSON, or not a message of the protocol.
    """
    return _decode(_down, frame)


def _decode(decoder: "msgspec.json.Decoder[M]", frame: bytes | str) -> M:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadMessage(f"frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
