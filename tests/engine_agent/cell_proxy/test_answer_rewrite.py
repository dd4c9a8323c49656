"""Answers to the client: the usage event is removed from a stream, errors get the format of the path, and a stream of
Responses ends as its response did."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.answer_rewrite import AnswerRewrite, UsageHidden, answer_rewrite
from engine_agent.cell_proxy.refusal import engine_died_midway

CHAT, RESPONSES, MESSAGES = b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"
TEXT = b'data: {"choices":[{"delta":{"content":"say \\"usage\\": {}"}}]}\n\n'
WITH_NULL = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9}}\n\n'
SPACED = b'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def shown(stream: bytes, sizes: list[int]) -> bytes:
    hider, pieces, at, turn = UsageHidden(CHAT), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        pieces.append(hider.filter(stream[at : at + size], complete=at + size >= len(stream)))
        at, turn = at + size, turn + 1
    return b"".join(pieces)


@given(st.lists(st.sampled_from([TEXT, WITH_NULL]), max_size=4), st.lists(st.integers(1, 90), min_size=1))
def test_however_the_bytes_are_cut_only_the_usage_event_is_missing(events: list[bytes], sizes: list[int]) -> None:
    for usage in (USAGE, SPACED, b""):
        assert shown(b"".join(events) + usage + DONE, sizes) == b"".join(events) + DONE


def test_whole_events_pass_at_once_and_the_beginning_of_one_waits_for_its_end() -> None:
    hider = UsageHidden(CHAT)
    assert hider.filter(TEXT, complete=False) == TEXT
    assert hider.filter(TEXT + USAGE[:10], complete=False) == TEXT
    assert hider.filter(USAGE[10:], complete=False) == b""
    assert hider.filter(DONE, complete=True) == DONE


def test_a_stream_with_other_line_ends_passes_as_it_is() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\r\n\r\n'
    assert UsageHidden(CHAT).filter(event, complete=False) == event


def test_what_never_ends_is_not_held_for_ever() -> None:
    hider = UsageHidden(CHAT)
    long = b"x" * 600_000
    assert hider.filter(long, complete=False) == b""
    assert hider.filter(long, complete=False) == long + long


def test_the_end_of_a_stream_shows_what_was_held() -> None:
    assert UsageHidden(CHAT).filter(b"data: {", complete=True) == b"data: {"


def passed(rewrite: AnswerRewrite, *pieces: bytes) -> bytes:
    shown = [rewrite.filter(piece, complete=False) for piece in pieces]
    return b"".join(shown) + rewrite.filter(b"", complete=True)


def named(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def last_event(stream: bytes) -> tuple[str, Any]:
    name, _, data = stream.rstrip().rpartition(b"\n\n")[2].rpartition(b"data: ")
    return name.decode().removeprefix("event: ").strip(), json.loads(data)


VLLM_ERROR = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n'
)


def test_an_error_inside_a_stream_has_openais_form() -> None:
    for hides_usage in (True, False):
        rewrite = answer_rewrite(CHAT, streaming=True, hides_usage=hides_usage)
        _, data = last_event(passed(rewrite, TEXT, VLLM_ERROR[:20], VLLM_ERROR[20:]))
        stated = {"message": "Internal server error", "type": "server_error"}
        assert data == {"error": {**stated, "param": None, "code": "engine_internal_server_error"}}


def test_an_error_inside_a_message_has_anthropics_form() -> None:
    error = {"type": "error", "error": {"type": "internal_error", "message": "no"}}
    name, data = last_event(passed(answer_rewrite(MESSAGES, streaming=True), named(error)))
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
    assert data["error"]["message"] == "no"


def test_a_message_has_an_id_of_its_own_kind_however_its_bytes_are_cut() -> None:
    start = {"type": "message_start", "message": {"id": "chatcmpl-abc", "type": "message", "content": []}}
    stream = passed(answer_rewrite(MESSAGES, streaming=True), named(start)[:50], named(start)[50:])
    assert last_event(stream)[1]["message"]["id"] == "msg_cmpl-abc"
    whole = json.dumps({"id": "chatcmpl-abc", "content": [{"input": {"id": "chatcmpl-x"}}]}).encode()
    for cut in range(len(whole)):
        shown = passed(answer_rewrite(MESSAGES, streaming=False), whole[:cut], whole[cut:])
        assert len(shown) == len(whole)
        assert json.loads(shown) == {"id": "msg_cmpl-abc", "content": [{"input": {"id": "chatcmpl-x"}}]}


def test_a_long_answer_without_such_an_id_passes() -> None:
    whole = json.dumps({"id": "msg_1", "text": "x" * 2000}).encode()
    assert passed(answer_rewrite(MESSAGES, streaming=False), whole[:700], whole[700:]) == whole


CREATED = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "status": "in_progress"}}
DELTA = {"type": "response.output_text.delta", "sequence_number": 1, "delta": 'a "response" with "error"'}


def completed(status: str) -> dict[str, Any]:
    response = {"id": "resp_1", "status": status, "incomplete_details": {"reason": "max_output_tokens"}}
    return {"type": "response.completed", "sequence_number": 2, "response": response}


def test_a_response_at_its_limit_ends_as_incomplete() -> None:
    for status, kind in (("incomplete", "response.incomplete"), ("failed", "response.failed")):
        events = (named(CREATED), named(DELTA), named(completed(status)))
        stream = passed(answer_rewrite(RESPONSES, streaming=True), *events)
        assert stream.startswith(b"".join(events[:2])), "the others pass as they are"
        assert last_event(stream) == (kind, {**completed(status), "type": kind})


def test_a_response_that_is_complete_passes_as_it_is() -> None:
    events = b"".join(map(named, (CREATED, DELTA, completed("completed"))))
    assert passed(answer_rewrite(RESPONSES, streaming=True), events) == events


def test_an_error_of_the_engine_ends_a_response_as_failed() -> None:
    rewrite = answer_rewrite(RESPONSES, streaming=True)
    error = {"type": "error", "code": "server_error", "message": "broke", "param": None, "sequence_number": 2}
    name, data = last_event(passed(rewrite, named(CREATED), named(DELTA), named(error)))
    assert (name, data["type"], data["sequence_number"]) == ("response.failed", "response.failed", 2)
    assert (data["response"]["id"], data["response"]["status"]) == ("resp_1", "failed")
    assert data["response"]["error"] == {"code": "server_error", "message": "broke"}


def test_a_response_whose_engine_dies_ends_as_failed() -> None:
    rewrite = answer_rewrite(RESPONSES, streaming=True)
    shown = rewrite.filter(named(CREATED) + named(DELTA) + b"data: {", complete=False)
    assert shown == named(CREATED) + named(DELTA)
    name, data = last_event(rewrite.failure(engine_died_midway("gone"), at_boundary=False))
    assert (name, data["sequence_number"], data["response"]["status"]) == ("response.failed", 2, "failed")
    assert "gone" in data["response"]["error"]["message"]


def test_a_mark_between_events_has_no_number() -> None:
    rewrite = answer_rewrite(RESPONSES, streaming=True)
    mark = b": prompt 5 abcd\n\n"
    assert passed(rewrite, named(CREATED), mark) == named(CREATED) + mark
    assert last_event(rewrite.failure(engine_died_midway("gone"), at_boundary=True))[1]["sequence_number"] == 1


def test_a_stream_of_responses_that_never_began_one_ends_with_an_error() -> None:
    rewrite = answer_rewrite(RESPONSES, streaming=True)
    name, data = last_event(rewrite.failure(engine_died_midway("gone"), at_boundary=True))
    assert (name, data["type"], data["code"], data["sequence_number"]) == ("error", "error", "engine_died", 0)


def test_a_response_that_has_ended_does_not_fail() -> None:
    rewrite = answer_rewrite(RESPONSES, streaming=True)
    rewrite.filter(named(CREATED) + named(completed("completed")), complete=False)
    assert rewrite.failure(engine_died_midway("gone"), at_boundary=True) == b""
