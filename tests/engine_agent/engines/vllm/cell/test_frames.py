"""A call becomes one frame of fixed size, or two, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.vllm.cell.frames import (
    CAPACITY_BYTES,
    FIRST_FRAME_BYTES,
    BrokenStream,
    FrameReader,
    FrameWriter,
)

KEY = b"k" * 32


def passed(writer: FrameWriter, reader: FrameReader, call: bytes) -> bytes:
    """What arrives of a call."""
    second = writer.write(call)
    reader.first[:] = writer.first
    assert reader.second_frame_bytes() == len(second)
    return reader.call(second)


@given(st.lists(st.integers(0, 3 * CAPACITY_BYTES), min_size=1, max_size=5))
def test_calls_of_any_length_arrive_as_they_were(lengths: list[int]) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    for length in lengths:
        call = bytes(index % 251 for index in range(length))
        assert passed(writer, reader, call) == call
        assert len(writer.first) == FIRST_FRAME_BYTES


@pytest.mark.parametrize(("length", "second_bytes"), [(CAPACITY_BYTES, 0), (CAPACITY_BYTES + 1, 17)])
def test_a_second_frame_carries_only_what_does_not_fit(length: int, second_bytes: int) -> None:
    assert len(FrameWriter(KEY).write(bytes(length))) == second_bytes


def test_a_lost_call_is_a_named_desynchronisation() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    assert passed(writer, reader, b"1") == b"1"
    writer.write(b"2")
    with pytest.raises(BrokenStream, match="desynchronised: call 2 was next, and call 3 came"):
        passed(writer, reader, b"3")


def test_a_call_cannot_be_repeated() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    passed(writer, reader, b"1")
    with pytest.raises(BrokenStream, match="call 2 was next, and call 1 came"):
        reader.second_frame_bytes()


@pytest.mark.parametrize("at", [0, 8, 12, 28, 28 + 99], ids=["number", "length", "code", "head", "tail"])
def test_no_bit_of_a_frame_can_be_changed(at: int) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    writer.write(b"x" * 100)
    reader.first[:] = writer.first
    reader.first[at] ^= 1
    with pytest.raises(BrokenStream, match="not the leader's"):
        reader.second_frame_bytes()


def test_no_bit_of_a_second_frame_can_be_changed() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    second = bytearray(writer.write(b"x" * (CAPACITY_BYTES + 10)))
    reader.first[:] = writer.first
    reader.second_frame_bytes()
    second[-1] ^= 1
    with pytest.raises(BrokenStream, match="second frame is not the leader's"):
        reader.call(bytes(second))


def test_a_frame_under_another_key_is_refused() -> None:
    with pytest.raises(BrokenStream, match="not the leader's"):
        passed(FrameWriter(b"other" * 6), FrameReader(KEY), b"pickle")
