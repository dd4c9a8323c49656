"""Chat requests that the playground accepts, and those that it refuses."""

import json
from typing import Any

import pytest

from controlplane.dashboard.playground import MAX_BODY_BYTES, MAX_MESSAGES, MAX_PARAMETERS, parse_chat_request
from kernel.refusals import InvalidInput

BODY = {"deployment": "sim-70b", "region": "us-east-1", "messages": [{"role": "user", "content": "hi"}]}


def body(**other: Any) -> bytes:
    return json.dumps({**BODY, **other}).encode()


def test_a_chat_request_becomes_a_streaming_request_for_the_deployment() -> None:
    sent = json.loads(parse_chat_request(body(max_tokens=9, temperature=0)).body())
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("sim-70b", 9, 0)
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert sent["stream"]
    assert sent["stream_options"] == {"include_usage": True}


def test_parameters_are_members_of_the_request() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    sent = json.loads(parse_chat_request(body(parameters=json.dumps({"top_p": 0.9, "tools": tools}))).body())
    assert (sent["top_p"], sent["tools"], sent["temperature"]) == (0.9, tools, 0.7)


@pytest.mark.parametrize(
    ("request_body", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b" " * (MAX_BODY_BYTES + 1), "body"),
        (body(deployment=""), "deployment"),
        (body(region=7), "region"),
        (body(messages=[]), "messages"),
        (body(messages=[{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)), "messages"),
        (body(messages=[{"role": "root", "content": "x"}]), "messages"),
        (body(messages=[{"role": "assistant", "content": "x"}]), "messages"),
        (body(messages=[{"role": "user", "content": " "}]), "content"),
        (body(max_tokens=0), "max_tokens"),
        (body(max_tokens=True), "max_tokens"),
        (body(temperature=float("nan")), "body"),
        (body()[:-1] + b',"region":"us-west-2"}', "body"),
        (body(key="sk-other"), "key"),
        (body(parameters={"top_p": 1}), "parameters"),
        (body(parameters="["), "parameters"),
        (body(parameters="[1]"), "parameters"),
        (body(parameters='{"top_p": 1, "top_p": 2}'), "parameters"),
        (body(parameters='{"x": ' + "[" * 5000 + "]" * 5000 + "}"), "parameters"),
        (body(parameters='{"messages": []}'), "parameters"),
        (body(parameters=" " * (MAX_PARAMETERS + 1)), "parameters"),
        (body(key="sw_a\r\nX-Evil: 1"), "key"),
    ],
)
def test_the_invalid_field_is_named(request_body: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_chat_request(request_body)
    assert refused.value.field == field
