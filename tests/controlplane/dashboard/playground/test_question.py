"""What the playground takes from a browser, and what it refuses."""

import json
from typing import Any

import pytest

from controlplane.dashboard.playground.question import LONGEST_BODY_BYTES, MOST_MESSAGES, question_in
from kernel.refusals import InvalidInput

ASKED = {"deployment": "sim-70b", "region": "us-east-1", "messages": [{"role": "user", "content": "hi"}]}


def asked(**other: Any) -> bytes:
    return json.dumps({**ASKED, **other}).encode()


def test_a_question_becomes_a_streaming_request_for_the_deployment() -> None:
    body = json.loads(question_in(asked(max_tokens=9, temperature=0)).body())
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("sim-70b", 9, 0)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["stream"]
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b" " * (LONGEST_BODY_BYTES + 1), "body"),
        (asked(deployment=""), "deployment"),
        (asked(region=7), "region"),
        (asked(messages=[]), "messages"),
        (asked(messages=[{"role": "user", "content": "x"}] * (MOST_MESSAGES + 1)), "messages"),
        (asked(messages=[{"role": "root", "content": "x"}]), "messages"),
        (asked(messages=[{"role": "assistant", "content": "x"}]), "messages"),
        (asked(messages=[{"role": "user", "content": " "}]), "content"),
        (asked(max_tokens=0), "max_tokens"),
        (asked(max_tokens=True), "max_tokens"),
        (asked(temperature=float("nan")), "temperature"),
        (asked(key="sk-other"), "key"),
        (asked(key="sw_a\r\nX-Evil: 1"), "key"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        question_in(body)
    assert refused.value.field == field
