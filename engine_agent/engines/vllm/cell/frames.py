"""How one worker call becomes one broadcast: a first frame of fixed size, and a second only for what does not fit.

A broadcast needs its size known on both sides beforehand, hence the fixed frame. Both frames carry the call's number
and a code over it and their bytes, keyed from the cell's secret, because the broadcast itself authenticates nobody:
no length is believed and nothing is unpickled before its code was right.
"""

import hashlib
import hmac
import struct

FIRST_FRAME_BYTES = 4096
"""Holds a decode step of about 60 sequences; measured by bench/executor_overhead.py."""
MAX_CALL_BYTES = 1 << 30
_HEADER = struct.Struct("!QI16s")
_NUMBER = struct.Struct("!cQI")
_CODE_BYTES = 16
CAPACITY_BYTES = FIRST_FRAME_BYTES - _HEADER.size


class BrokenStream(Exception):
    """The calls of leader and follower no longer match; the text says how. Fatal for the cell."""


class FrameWriter:
    """The leader's side: numbers and signs calls. `first` is the buffer that is broadcast."""

    def __init__(self, key: bytes) -> None:
        self.first = bytearray(FIRST_FRAME_BYTES)
        self._key = key
        self.number = 0

    def write(self, call: bytes) -> bytes:
        """Put a call into `first`; returns the second frame, empty if there is none.

        Raises:
            BrokenStream: the call is too long for any frame.
        """
        length = len(call)
        if length > MAX_CALL_BYTES:
            raise BrokenStream(f"a call of {length} bytes exceeds the limit of {MAX_CALL_BYTES}")
        self.number += 1
        head = call[:CAPACITY_BYTES]
        _HEADER.pack_into(self.first, 0, self.number, length, _code(self._key, b"1", self.number, length, head))
        self.first[_HEADER.size : _HEADER.size + len(head)] = head
        if length <= CAPACITY_BYTES:
            return b""
        rest = call[CAPACITY_BYTES:]
        return _code(self._key, b"2", self.number, length, rest) + rest


class FrameReader:
    """A follower's side: accepts calls in their order and from the leader alone."""

    def __init__(self, key: bytes) -> None:
        self.first = bytearray(FIRST_FRAME_BYTES)
        self._key = key
        self.number = 0
        self._length = 0

    def second_frame_bytes(self) -> int:
        """Size of the second frame that follows the one in `first`; 0 if none does.

        Raises:
            BrokenStream: the frame is not the leader's, or not the next one.
        """
        number, length, code = _HEADER.unpack_from(self.first)
        head = bytes(self.first[_HEADER.size : _HEADER.size + min(length, CAPACITY_BYTES)])
        if not hmac.compare_digest(code, _code(self._key, b"1", number, length, head)):
            raise BrokenStream("a frame is not the leader's: its authentication code is wrong")
        if number != self.number + 1:
            raise BrokenStream(f"desynchronised: call {self.number + 1} was next, and call {number} came")
        self.number, self._length = number, length
        return 0 if length <= CAPACITY_BYTES else length - CAPACITY_BYTES + _CODE_BYTES

    def call(self, second: bytes) -> bytes:
        """The call in `first` and its second frame.

        Raises:
            BrokenStream: the second frame is not the leader's.
        """
        head = bytes(self.first[_HEADER.size : _HEADER.size + min(self._length, CAPACITY_BYTES)])
        if not second:
            return head
        code, rest = second[:_CODE_BYTES], second[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._key, b"2", self.number, self._length, rest)):
            raise BrokenStream("a second frame is not the leader's: its authentication code is wrong")
        return head + rest


def _code(key: bytes, which: bytes, number: int, length: int, part: bytes) -> bytes:
    code = hashlib.blake2b(_NUMBER.pack(which, number, length), key=key, digest_size=_CODE_BYTES)
    code.update(part)
    return code.digest()
