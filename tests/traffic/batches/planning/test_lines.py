"""Validation and order of lines, and journals of outcomes through a crash."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.async_requests.planner import AttemptResponse
from traffic.batches.planning.batch import Tally
from traffic.batches.planning.lines import (
    BadLine,
    Outcome,
    error_key,
    journal_line,
    journal_outcomes,
    line_of,
    outcome_of,
    prefix_path,
    sent_body,
    unsent_outcome,
    work_line,
)

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", prompt: str = "why?", **body: Any) -> dict[str, Any]:
    whole = {"model": "m", "messages": [{"role": "user", "content": prompt}], **body}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": whole,
    }


def encoded(*lines: dict[str, Any]) -> list[bytes]:
    return [json.dumps(each).encode() for each in lines]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "url_mismatch", "url"),
        ({"body": []}, "missing_required_parameter", "body"),
        ({"body": {}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "invalid_value", "body.stream"),
        ({"body": {"model": "m", "store": True}}, "invalid_value", "body.store"),
        ({"body": {"model": "m", "background": True}}, "invalid_value", "body.background"),
    ],
)
def test_a_line_that_is_wrong_says_where(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(BadLine) as caught:
        line_of(json.dumps({**line(), **changes}).encode(), CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b'"x"', b'{"custom_id":"a","custom_id":"b"}', b"\xff", b"\xef\xbb\xbf{}", b"[" * 1000, b'{"a":NaN}'],
)
def test_what_is_no_line_of_json_is_said_so(text: bytes) -> None:
    with pytest.raises(BadLine) as caught:
        line_of(text, CHAT)
    assert caught.value.code == "invalid_json_line"


@given(st.text(max_size=50), st.text(min_size=1, max_size=50))
def test_the_path_parts_where_the_prompts_do(tail: str, other: str) -> None:
    same = "z" * 300
    one = prefix_path({"messages": [{"role": "user", "content": same + tail}]})
    two = prefix_path({"messages": [{"role": "user", "content": same + tail + other}]})
    assert one[:8] == two[:8]
    assert prefix_path({"prompt": "a"}) != prefix_path({"prompt": "b"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "text", "input"]), inner),
    )
)
def test_any_prompt_has_a_path(prompt: Any) -> None:  # fmt: skip
    assert len(prefix_path({"messages": prompt})) == 16


def test_what_is_sent_has_its_model_first() -> None:
    text = work_line(line_of(json.dumps(line("ä\t\n", "a\tb", model="m")).encode(), CHAT))
    custom_id, body = sent_body(text)
    assert (custom_id, b"\n" in text) == ("ä\t\n", False)
    assert body.startswith(b'{"model":"m",')


BODY = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'
OUTCOMES = st.lists(
    st.builds(
        lambda position, body: outcome_of(position, "id", "c", AttemptResponse(200, json.dumps({"x": body}).encode())),
        st.integers(0, 999),
        st.text(),
    ),
    max_size=8,
)


def test_an_answer_is_kept_whole_and_its_tokens_are_counted() -> None:
    outcome = outcome_of(4, "batch_req_1", "mine", AttemptResponse(200, BODY))
    assert (outcome.is_output, outcome.tally) == (True, Tally(1, 0, 7, 2, 3, 0))
    assert json.loads(outcome.text) == {
        "id": "batch_req_1",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": json.loads(BODY)},
        "error": None,
    }


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_an_answer_of_any_form_is_one_line_with_the_same_content(
    content: Any, is_ascii: bool, indent: int | None
) -> None:
    body = {"choices": content, "usage": {"completion_tokens": 2}}
    received = AttemptResponse(200, json.dumps(body, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "replace"))
    outcome = outcome_of(0, "id", "c\t", received)
    assert b"\n" not in outcome.text
    assert json.loads(outcome.text)["response"]["body"] == json.loads(received.body)
    assert json.loads(outcome.text)["custom_id"] == "c\t"
    assert outcome.tally.output_tokens == 2


def test_errors_are_distinguished_by_status_and_shape() -> None:
    refused = outcome_of(0, "i", "c", AttemptResponse(400, b'{"error":{"message":"too long","code":"length"}}'))
    assert error_key(refused.text) == ("length", "too long")
    odd = outcome_of(0, "i", "c", AttemptResponse(500, b"boom"))
    assert error_key(odd.text) == ("http_500", "boom")
    body = json.loads(odd.text)["response"]["body"]
    assert body == {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}
    silent = outcome_of(0, "i", "c", AttemptResponse(None, reason="no complete answer within 3 s"))
    assert error_key(silent.text) == ("request_timeout", "no complete answer within 3 s")
    cut = outcome_of(0, "i", "c", AttemptResponse(200, b'{"half'))
    assert not cut.is_output
    assert error_key(unsent_outcome(0, "i", "c", "batch_expired").text)[0] == "batch_expired"


@given(OUTCOMES, st.data())
def test_of_a_journal_that_was_cut_anywhere_all_whole_lines_are_read(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    written = [journal_line(outcome) for outcome in outcomes]
    whole = b"".join(written)
    cut = data.draw(st.integers(0, len(whole)))
    kept, length = 0, 0
    while kept < len(written) and length + len(written[kept]) <= cut:
        length += len(written[kept])
        kept += 1
    assert list(journal_outcomes(io.BytesIO(whole[:cut]))) == outcomes[:kept]


@given(OUTCOMES.filter(bool), st.data())
def test_nothing_that_was_damaged_is_read(outcomes: list[Outcome], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(journal_line, outcomes)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    found = list(journal_outcomes(io.BytesIO(bytes(whole))))
    assert found == outcomes[: len(found)]
    assert len(found) < len(outcomes)
