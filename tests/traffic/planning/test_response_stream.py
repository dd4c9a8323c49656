"""The events of a streamed response, however they are cut into pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.response_stream import LastEvent, ResponseEvents, event_bytes

MARKS = {"id": "resp_ours", "store": True}
ENGINES = {"id": "resp_theirs", "status": "in_progress", "output": []}
TRICK = 'of a model: "response" and "type":"response.completed"\n\n'
EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "sequence_number": 0, "response": ENGINES},
    {"type": "response.output_text.delta", "sequence_number": 1, "delta": TRICK},
    {"type": "response.completed", "sequence_number": 2, "response": {**ENGINES, "status": "completed"}},
]
WIRE = b": a comment\n\n" + b"".join(map(event_bytes, EVENTS)) + b"data: [DONE]\n\n"


def passed(pieces: list[bytes]) -> tuple[list[bytes], list[LastEvent], ResponseEvents]:
    events = ResponseEvents(MARKS)
    out = [event for piece in pieces for event in events.feed(piece)]
    return (
        [part for part in out if isinstance(part, bytes)],
        [part for part in out if isinstance(part, LastEvent)],
        events,
    )


@given(st.lists(st.integers(1, len(WIRE) - 1), max_size=20))
def test_however_it_is_cut_the_same_passes(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WIRE)]
    whole, (last,), events = passed([WIRE[begin:end] for begin, end in pairwise(edges)])
    created = json.loads(whole[1].split(b"data: ")[1])
    assert created["response"] == {**ENGINES, **MARKS}
    assert [whole[0], *whole[2:]] == [b": a comment\n\n", event_bytes(EVENTS[1]), b"data: [DONE]\n\n"]
    assert last.response["id"] == "resp_theirs"
    assert json.loads(last.shown({"id": "x"}).split(b"data: ")[1]) == {**EVENTS[2], "response": {"id": "x"}}
    assert (events.rest(), events.events) == (b"", 5)


def test_lines_may_end_as_http_has_them() -> None:
    whole, last, _ = passed([event_bytes(event).replace(b"\n", b"\r\n") for event in EVENTS])
    assert (len(whole), len(last)) == (2, 1)


def test_a_response_ends_once() -> None:
    whole, last, _ = passed([event_bytes(EVENTS[2]) * 2])
    assert (len(whole), len(last)) == (1, 1)


@pytest.mark.parametrize(
    "event", [b'data: {"response": \n\n', b'data: {"type":1,"response":{}}\n\n', b'"response"\n\n']
)
def test_what_is_no_event_of_ours_passes_as_it_is(event: bytes) -> None:
    assert passed([event])[0] == [event]


def test_what_has_no_end_is_not_lost() -> None:
    whole, _, events = passed([b"data: half"])
    assert (whole, events.rest()) == ([], b"data: half")


def test_a_response_whose_stream_breaks_has_failed() -> None:
    _, _, events = passed([*map(event_bytes, EVENTS[:2]), b"data: half"])
    name, _, data = events.failure("gone").partition(b"\ndata: ")
    assert name == b"event: response.failed"
    error = {"code": "server_error", "message": "gone"}
    response = {**ENGINES, **MARKS, "status": "failed", "error": error}
    assert json.loads(data) == {"type": "response.failed", "sequence_number": 2, "response": response}


def test_a_stream_that_breaks_before_its_response_says_so() -> None:
    error = {"type": "error", "code": "server_error", "message": "gone", "param": None, "sequence_number": 0}
    assert json.loads(ResponseEvents(MARKS).failure("gone").split(b"data: ")[1]) == error


def test_a_response_that_has_ended_does_not_fail() -> None:
    _, _, events = passed([event_bytes(EVENTS[2])])
    assert events.failure("gone") == b""
