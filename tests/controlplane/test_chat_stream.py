"""A streamed completion is parsed completely, however its bytes are split, and its figures count from the request."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controlplane.chat_stream import ChatStreamParser


def event(**payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": text}, "finish_reason": finish}])


WHOLE = (
    event(choices=[{"delta": {"role": "assistant"}}])
    + token("One, ")
    + token("zwölf")
    + token("", "stop")
    + event(choices=[], usage={"completion_tokens": 5})
    + b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_it_does_not_matter_how_the_bytes_are_split(cuts: list[int]) -> None:
    parser, text = ChatStreamParser(0), ""
    edges = [0, *sorted(cuts), len(WHOLE)]
    for begin, end in pairwise(edges):
        text += "".join(parser.feed(WHOLE[begin:end], 1))
    assert (text, parser.finish, parser.is_done, parser.error) == ("One, zwölf", "stop", True, "")


def test_figures_count_from_the_request() -> None:
    parser = ChatStreamParser(10.0)
    assert parser.figures()["ttft_ms"] is None
    for at, piece in ((10.25, token("a")), (11.25, token("b")), (12.25, token("c"))):
        assert list(parser.feed(piece, at))
    figures = parser.figures()
    assert (figures["ttft_ms"], figures["took_ms"], figures["tokens"]) == (250.0, 2250.0, 3)
    assert figures["tokens_per_s"] == 1.0


def test_the_engines_token_count_wins_over_chunks() -> None:
    parser = ChatStreamParser(0)
    list(parser.feed(WHOLE, 1))
    assert parser.figures()["tokens"] == 5


def test_an_error_in_the_middle_is_reported() -> None:
    parser = ChatStreamParser(0)
    list(parser.feed(token("a") + event(error={"message": "the engine died"}), 1))
    assert (parser.error, parser.is_done) == ("the engine died", False)


def test_nonsense_is_skipped() -> None:
    parser = ChatStreamParser(0)
    nonsense = b": ping\n\ndata: {\n\ndata: 7\n\n" + event(choices=["x", {"delta": 3}])
    assert list(parser.feed(nonsense, 1)) == []
    assert parser.error == ""
