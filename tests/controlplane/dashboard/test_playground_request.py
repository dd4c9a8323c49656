"""Chat requests that the playground accepts, and those that it refuses."""

import base64
import json
from typing import Any

import pytest

from controlplane.dashboard.playground import (
    MAX_BODY_BYTES,
    MAX_IMAGE_BYTES,
    MAX_MESSAGES,
    MAX_PARAMETERS,
    parse_chat_request,
)
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


PNG = b"\x89PNG\r\n\x1a\n"


def with_image(url: str, role: str = "user") -> bytes:
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return body(messages=[{"role": role, "content": parts}, *BODY["messages"]])


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def test_an_image_is_sent_as_a_part_of_its_message() -> None:
    chat = parse_chat_request(with_image(data_url(PNG)))
    assert chat.has_images
    assert json.loads(chat.body())["messages"][0]["content"][1]["image_url"]["url"] == data_url(PNG)
    assert not parse_chat_request(body()).has_images


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/", "must be a file of type png"),
        ("file:///etc/passwd", "must be a file of type png"),
        (data_url(PNG, "svg+xml"), "must be a file of type png"),
        (data_url(b"<svg>", "png"), "not a png file"),
        (data_url(PNG)[:-3] + "A", "not valid base64"),
        (data_url(PNG + bytes(MAX_IMAGE_BYTES)), "the limit is 1,048,576"),
    ],
)
def test_only_small_images_of_known_types_are_sent(url: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        parse_chat_request(with_image(url))


@pytest.mark.parametrize(
    "content", [[], [7], [{"type": "text"}], [{"type": "image_url"}], [{"type": "text", "text": "x"}] * 9]
)
def test_odd_parts_are_refused(content: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_chat_request(body(messages=[{"role": "user", "content": content}]))
    with pytest.raises(InvalidInput, match="only the user's messages"):
        parse_chat_request(with_image(data_url(PNG), role="system"))
