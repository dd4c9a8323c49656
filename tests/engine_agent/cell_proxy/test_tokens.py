"""Counting tokens from the bytes of an answer, whole or cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.tokens import TokenCount, is_error_event


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9,"total_tokens":11}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no"}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "live", "settled"),
    [
        ([event("a"), event("b"), DONE], 2, 2),
        ([event("a") + event("b") + DONE], 2, 2),
        ([ROLE, event("a"), DONE], 1, 1),
        ([event("a"), event("b"), USAGE, DONE], 2, 9),
        ([event("data: [DONE]"), event("\n\n"), DONE], 2, 2),
        ([event('"completion_tokens": 77'), DONE], 1, 1),
        ([event("a").replace(b"\n", b"\r\n"), event("b").replace(b"\n", b"\r\n")], 2, 2),
        ([b"data: x\n", b"\n", b"data: y", b"\n\n"], 2, 2),
        ([event("a"), ERROR], 1, 1),
        ([], 0, 0),
    ],
)
def test_events_of_a_stream_are_tokens_until_usage_says_more(pieces: list[bytes], live: int, settled: int) -> None:
    count = TokenCount(streaming=True)
    assert sum(count.add(piece) for piece in pieces) == count.tokens == live
    assert count.tokens + count.settle() == settled


@given(st.lists(st.text(max_size=20), max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_however_the_bytes_are_cut_each_event_counts_once(texts: list[str], sizes: list[int]) -> None:
    stream = b"".join(event(text) for text in texts)
    count = TokenCount(streaming=True)
    at = turn = 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        count.add(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert count.tokens == len(texts)
    assert count.at_boundary


def test_an_answer_that_is_no_stream_counts_by_its_usage_only() -> None:
    count = TokenCount(streaming=False)
    usage = {"prompt_tokens": 2, "completion_tokens": 5}
    body = json.dumps({"choices": [{"text": "a\n\nb" * 1000}], "usage": usage}).encode()
    assert count.add(body[:3000]) == count.add(body[3000:], complete=True) == 0
    assert (count.settle(), count.tokens) == (5, 0)


def test_between_events_there_is_room_for_another_and_within_one_there_is_not() -> None:
    count = TokenCount(streaming=True)
    assert count.at_boundary
    count.add(event("a"))
    assert count.at_boundary
    count.add(b"data: {")
    assert not count.at_boundary


def test_an_error_event_is_known_by_its_beginning() -> None:
    assert is_error_event(ERROR)
    assert not is_error_event(event('data: {"error"'))
    count = TokenCount(streaming=True)
    count.add(ERROR)
    assert (count.errors, count.tokens) == (1, 0)
