"""Parsing of requests, bodies for engines, and events of streams cut at any byte."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.responses.planner import (
    LastEvent,
    ResponseEvents,
    ResponseState,
    StoreSettings,
    Turn,
    begun_response,
    check_previous,
    ended_response,
    engine_body,
    event_bytes,
    parse_request,
    shown_items,
    state_of,
)
from traffic.tenants.planner import ApplicationRefused

SETTINGS = StoreSettings()
ID = "resp_" + "0" * 32


def parsed(**members: Any) -> Any:
    return parse_request(json.dumps({"model": "m", "input": "hi", **members}).encode(), SETTINGS)


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ({}, False),
        ({"store": False}, False),
        ({"store": True}, True),
        ({"background": True}, True),
        ({"previous_response_id": ID}, True),
        ({"previous_response_id": ID, "store": False}, False),
        ({"background": False, "previous_response_id": None, "store": None}, False),
    ],
)
def test_what_is_kept_is_what_says_so_or_needs_it(members: dict[str, Any], kept: bool) -> None:
    assert parsed(**members).is_kept is kept


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"model":"m","input":"x","store":true,"store":false}', 400, None),
        (b'{"model":"m","input":"x","previous_response_id":"a","previous_response_id":"b"}', 400, None),
        (b'{"input":"x"}', 400, "model"),
        (b'{"model":"m"}', 400, "input"),
        (b'{"model":"m","input":["x"]}', 400, "input"),
        (b'{"model":"m","input":"x","store":"yes"}', 400, "store"),
        (b'{"model":"m","input":"x","background":1}', 400, "background"),
        (b'{"model":"m","input":"x","previous_response_id":7}', 400, "previous_response_id"),
        (b'{"model":"m","input":"x","previous_response_id":""}', 400, "previous_response_id"),
        (b'{"model":"m","input":"x","conversation":"conv_1"}', 400, "conversation"),
        (b'{"model":"m","input":"x","background":true,"store":false}', 400, "store"),
        (b'{"model":"m","input":"x","background":true,"stream":true}', 400, "stream"),
        (b'{"model":"m","input":"' + b"x" * SETTINGS.max_body_bytes + b'"}', 413, None),
    ],
)
def test_what_has_no_one_meaning_is_refused_by_name(body: bytes, status: int, param: str | None) -> None:
    with pytest.raises(ApplicationRefused) as caught:
        parse_request(body, SETTINGS)
    assert (caught.value.status, caught.value.param) == (status, param)


def test_an_engine_gets_all_turns_and_nothing_that_it_does_not_know() -> None:
    request = parsed(previous_response_id=ID, store=True, stream=True, temperature=0.5, instructions="be brief")
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]}
    sent = json.loads(engine_body(request, [Turn(({"role": "user", "content": "1+1"},), (answer,))], SETTINGS))
    assert sent == {
        "model": "m",
        "instructions": "be brief",
        "temperature": 0.5,
        "stream": True,
        "store": False,
        "input": [{"role": "user", "content": "1+1"}, answer, {"type": "message", "role": "user", "content": "hi"}],
    }
    assert next(iter(sent)) == "model"


def test_an_engine_gets_an_input_without_turns_before_it_as_it_is() -> None:
    sent = json.loads(engine_body(parsed(background=True, metadata={"a": "b"}), (), SETTINGS))
    assert sent == {"model": "m", "input": "hi", "metadata": {"a": "b"}, "store": False}


def test_all_turns_together_have_a_bound() -> None:
    turn = Turn(({"role": "user", "content": "x" * 600_000},), ())
    engine_body(parsed(), [turn], SETTINGS)
    with pytest.raises(ApplicationRefused, match="longer than 1048576 bytes") as caught:
        engine_body(parsed(), [turn, turn], SETTINGS)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("state", ResponseState)
def test_only_what_has_an_output_is_followed(state: ResponseState) -> None:
    if state in {ResponseState.COMPLETED, ResponseState.INCOMPLETE}:
        check_previous(ID, state, 1, SETTINGS)
        return
    with pytest.raises(ApplicationRefused, match=f"is {state}"):
        check_previous(ID, state, 1, SETTINGS)


def test_a_chain_has_a_longest() -> None:
    check_previous(ID, ResponseState.COMPLETED, SETTINGS.max_turns - 1, SETTINGS)
    with pytest.raises(ApplicationRefused, match="256 turns"):
        check_previous(ID, ResponseState.COMPLETED, SETTINGS.max_turns, SETTINGS)


def test_a_response_that_ended_is_the_engines_under_its_own_name() -> None:
    begun = begun_response(ID, parsed(background=True, previous_response_id=ID), 7)
    engines = {"id": "resp_of_engine", "created_at": 9, "status": "incomplete", "output": [], "store": False}
    ended = ended_response(begun, ResponseState.INCOMPLETE, "", engines)
    assert ended == {
        **engines,
        "id": ID,
        "created_at": 7,
        "previous_response_id": ID,
        "background": True,
        "store": True,
    }


@pytest.mark.parametrize(
    ("state", "error"),
    [(ResponseState.FAILED, {"code": "server_error", "message": "why"}), (ResponseState.CANCELLED, None)],
)
def test_a_response_without_an_answer_says_how_it_ended(state: ResponseState, error: Any) -> None:
    ended = ended_response(begun_response(ID, parsed(background=True), 7), state, "why")
    assert (ended["status"], ended["error"], ended["output"]) == (state.value, error, [])


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"status": "incomplete"}, ResponseState.INCOMPLETE),
        ({"status": "failed"}, ResponseState.FAILED),
        ({"status": "queued"}, ResponseState.COMPLETED),
        ({"status": ["completed"]}, ResponseState.COMPLETED),
        ({}, ResponseState.COMPLETED),
        (None, ResponseState.COMPLETED),
    ],
)
def test_an_engines_answer_has_ended_whatever_it_says(answer: Any, state: ResponseState) -> None:
    assert state_of(answer) is state


def test_items_are_listed_with_ids_of_their_own_and_content_in_parts() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "again"}]},
    ]
    shown = shown_items(ID, items)
    assert [item["content"][0]["type"] for item in (*shown[:2], shown[3])] == [
        "input_text",
        "output_text",
        "input_text",
    ]
    assert shown[3]["id"] == "msg_1"
    assert len({item["id"] for item in shown}) == 4
    assert shown == shown_items(ID, items)
    assert "content" not in shown[2]


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
