"""A streamed answer is read whole, however it is cut, and its figures count from the question."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controlplane.chat_stream import AnswerReader


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


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
def test_it_does_not_matter_how_the_bytes_are_cut(cuts: list[int]) -> None:
    reader, text = AnswerReader(0), ""
    edges = [0, *sorted(cuts), len(WHOLE)]
    for begin, end in pairwise(edges):
        text += "".join(reader.feed(WHOLE[begin:end], 1))
    assert (text, reader.finish, reader.is_done, reader.error) == ("One, zwölf", "stop", True, "")


def test_figures_count_from_the_question() -> None:
    reader = AnswerReader(10.0)
    assert reader.figures()["ttft_ms"] is None
    for at, piece in ((10.25, token("a")), (11.25, token("b")), (12.25, token("c"))):
        assert list(reader.feed(piece, at))
    figures = reader.figures()
    assert (figures["ttft_ms"], figures["took_ms"], figures["tokens"]) == (250.0, 2250.0, 3)
    assert figures["tokens_per_s"] == 1.0


def test_the_engine_counts_better_than_pieces_do() -> None:
    reader = AnswerReader(0)
    list(reader.feed(WHOLE, 1))
    assert reader.figures()["tokens"] == 5


def test_an_error_in_the_middle_is_told() -> None:
    reader = AnswerReader(0)
    list(reader.feed(token("a") + event(error={"message": "the engine died"}), 1))
    assert (reader.error, reader.is_done) == ("the engine died", False)


def test_nonsense_is_passed_over() -> None:
    reader = AnswerReader(0)
    nonsense = b": ping\n\ndata: {\n\ndata: 7\n\n" + event(choices=["x", {"delta": 3}])
    assert list(reader.feed(nonsense, 1)) == []
    assert reader.error == ""
