"""The client of many streams: what it makes of bytes of each dialect, whole and cut."""

import json
from typing import Any

import pytest

from bench.traffic.stream_reader import Seen, StreamReader, dechunked

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USED = {"prompt_tokens": 5, "completion_tokens": 2}
STREAMS = {
    "chat": [
        event(id="a", created=1, choices=[{"delta": {"content": "x"}}]),
        event(id="a", created=1, choices=[{"delta": {"content": " y"}}]),
        event(id="a", choices=[], usage=USED) + DONE,
    ],
    "completions": [
        event(choices=[{"text": "x"}]),
        event(choices=[{"text": " y"}]),
        event(choices=[], usage=USED),
        DONE,
    ],
    "responses": [
        event(type="response.output_text.delta", item_id="i", delta="x"),
        event(type="response.output_text.delta", item_id="i", delta=" y"),
        event(type="response.incomplete", response={"usage": {"input_tokens": 5, "output_tokens": 2}}),
    ],
    "messages": [
        event(type="content_block_delta", delta={"text": "x y"}),
        event(type="message_delta", delta={}, usage={"input_tokens": 5, "output_tokens": 2}),
        event(type="message_stop"),
    ],
}


def seen(name: str, whole: bytes) -> Seen:
    return StreamReader(name, 2)._seen(whole)


@pytest.mark.parametrize("name", STREAMS)
def test_text_usage_and_end_of_each_dialect(name: str) -> None:
    whole = HEAD + b"".join(map(chunk, STREAMS[name])) + b"0\r\n\r\n"
    got = seen(name, whole)
    assert (got.text, got.usage, got.is_cut) == ("x y", (5, 2), False)
    assert (
        seen(name, whole.replace(b'"a"', b'"b"').replace(b'"i"', b'"j"').replace(b'"created": 1', b'"created": 2'))
        == got
    )
    for cut in range(len(HEAD), len(whole) - 5, 7):
        assert seen(name, whole[:cut]).is_cut, cut


def test_what_went_wrong_is_named() -> None:
    refused = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}"
    assert seen("chat", refused).error == "status 503: b'{}'"
    assert seen("chat", b"").is_cut
    marked = HEAD + chunk(b": tokens 1\n" + STREAMS["chat"][0]) + chunk(STREAMS["chat"][2]) + b"0\r\n\r\n"
    assert seen("chat", marked).error == "a mark reached the client"
    failed = HEAD + chunk(event(error={"code": "engine_died"})) + b"0\r\n\r\n"
    assert seen("chat", failed).error == "engine_died"


def test_chunks_have_any_length() -> None:
    pieces = [b"a" * length for length in (1, 15, 16, 4096)]
    assert dechunked(b"".join(map(chunk, pieces)) + b"0\r\n\r\n") == (b"".join(pieces), True)
