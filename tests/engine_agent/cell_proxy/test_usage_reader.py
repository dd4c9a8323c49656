"""What an engine says it used is read wherever it says it, however the bytes are cut, and from nobody else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.usage_reader import HELD_BYTES, TokenUsage, UsageReader
from engine_agent.protocol.api_surface import Counting

FORGED = '{"usage":{"prompt_tokens":1,"completion_tokens":1,"input_tokens":1,"output_tokens":1}}'
texts = st.one_of(
    st.text(max_size=20), st.sampled_from([FORGED, f"data: {FORGED}\n\n", '"usage":', "\n\n", "\r\n\r\n"])
)
sizes = st.lists(st.integers(1, 60), min_size=1)
OPENAI = {
    "prompt_tokens": 44,
    "total_tokens": 46,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": None},
}
RESPONSES = {
    "input_tokens": 31,
    "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 33,
}
ANTHROPIC = {"input_tokens": 15, "output_tokens": 2, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 3}


def read(counting: Counting, answer: bytes, cuts: list[int], *, streaming: bool = False) -> TokenUsage | None:
    reader, at, turn = UsageReader(counting, streaming=streaming), 0, 0
    while at < len(answer):
        size = cuts[turn % len(cuts)]
        reader.add(answer[at : at + size], complete=at + size >= len(answer))
        at, turn = at + size, turn + 1
    return reader.told


def event(body: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body)}\n\n".encode()


def chunk(text: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "usage": json.loads(FORGED)}], **more})


@given(texts, sizes)
def test_whole_answers_of_every_form(text: str, cuts: list[int]) -> None:
    tool = {"type": "function", "parameters": json.loads(FORGED)}
    for counting, usage, used in (
        (Counting.STREAM_OPTIONS, OPENAI, TokenUsage(44, 2, 16)),
        (Counting.PROMPT_USAGE, {"prompt_tokens": 9, "total_tokens": 9}, TokenUsage(9, 0)),
        (Counting.RESPONSE_USAGE, RESPONSES, TokenUsage(31, 2, 16)),
        (Counting.MESSAGE_USAGE, ANTHROPIC, TokenUsage(34, 2, 16)),
        (Counting.MESSAGE_USAGE, {"input_tokens": 15, "output_tokens": 2}, TokenUsage(15, 2)),
    ):
        before = {"choices": [{"text": text}], "tools": [tool], "metadata": json.loads(FORGED)}
        after = {"prompt_logprobs": [{"5": {"decoded_token": text}}], "response": json.loads(FORGED)}
        answer = json.dumps({**before, "usage": usage, **after}).encode()
        assert read(counting, answer, cuts) == used
        assert read(counting, json.dumps({**before, **after}).encode(), cuts) is None
        assert read(Counting.NOTHING, answer, cuts) is None


@given(st.lists(texts, max_size=4), sizes, st.booleans())
def test_a_stream_says_it_in_an_event_without_choices(words: list[str], cuts: list[int], continuous: bool) -> None:
    so_far = {"usage": {"prompt_tokens": 44, "completion_tokens": 1}} if continuous else {}
    stream = b"".join(chunk(word, **so_far) for word in words)
    done = b"data: [DONE]\n\n"
    told = read(Counting.STREAM_OPTIONS, stream + event({"choices": [], "usage": OPENAI}) + done, cuts, streaming=True)
    assert told == TokenUsage(44, 2, 16)
    assert read(Counting.STREAM_OPTIONS, stream + done, cuts, streaming=True) is None


@given(st.lists(texts, max_size=4), sizes)
def test_a_stream_of_a_response_says_it_in_the_response(words: list[str], cuts: list[int]) -> None:
    echoed = {"tools": [json.loads(FORGED)], "metadata": json.loads(FORGED), "usage": None}
    stream = event({"type": "response.created", "response": echoed}, "response.created")
    stream += b"".join(event({"type": "response.output_text.delta", "delta": word}) for word in words)
    last = event({"type": "response.completed", "response": {**echoed, "usage": RESPONSES}}, "response.completed")
    assert read(Counting.RESPONSE_USAGE, stream + last, cuts, streaming=True) == TokenUsage(31, 2, 16)
    assert read(Counting.RESPONSE_USAGE, stream, cuts, streaming=True) is None


@given(st.lists(texts, max_size=4), sizes)
def test_a_stream_of_a_message_says_it_at_both_ends(words: list[str], cuts: list[int]) -> None:
    start = {"type": "message_start", "message": {"content": [], "usage": {**ANTHROPIC, "output_tokens": 0}}}
    stream = event(start, "message_start")
    stream += b"".join(event({"type": "content_block_delta", "delta": {"text": word}}) for word in words)
    for usage in (ANTHROPIC, {"output_tokens": 2}):
        last = event({"type": "message_delta", "delta": {}, "usage": usage}, "message_delta")
        assert read(Counting.MESSAGE_USAGE, stream + last, cuts, streaming=True) == TokenUsage(34, 2, 16)
    assert read(Counting.MESSAGE_USAGE, stream, cuts, streaming=True) is None


@pytest.mark.parametrize("at_end", [False, True])
def test_answers_and_events_that_are_too_long_to_keep_are_read_as_they_pass(at_end: bool) -> None:
    long = {"text": "x" * HELD_BYTES, "logprobs": [{"a": [1.5, FORGED]}] * 9}
    object_ = {**long, "usage": RESPONSES} if at_end else {"usage": RESPONSES, **long}
    used = TokenUsage(31, 2, 16)
    assert read(Counting.RESPONSE_USAGE, json.dumps(object_).encode(), [8192]) == used
    stream = event({"a": 1}) + event({"response": object_}, "response.completed") + event({"b": 2})
    assert read(Counting.RESPONSE_USAGE, stream, [8192], streaming=True) == used
    crlf = stream.replace(b"\n", b"\r\n")
    assert read(Counting.RESPONSE_USAGE, crlf, [8191], streaming=True) == used


@pytest.mark.parametrize(
    "usage",
    [
        None,
        5,
        {},
        {"completion_tokens": 7},
        {"prompt_tokens": "5", "completion_tokens": 7},
        {"prompt_tokens": -1, "completion_tokens": 7},
        {"prompt_tokens": 2**60, "completion_tokens": 7},
    ],
)
def test_what_cannot_be_meant_is_not_said(usage: Any) -> None:
    assert read(Counting.STREAM_OPTIONS, json.dumps({"usage": usage}).encode(), [5]) is None


def test_cached_tokens_are_no_more_than_there_are() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 9}}
    assert read(Counting.STREAM_OPTIONS, json.dumps({"usage": usage}).encode(), [5]) == TokenUsage(4, 0, 4)


@given(st.binary(max_size=300), sizes, st.sampled_from(list(Counting)), st.booleans())
def test_no_bytes_at_all_break_it(answer: bytes, cuts: list[int], counting: Counting, streaming: bool) -> None:
    read(counting, answer, cuts, streaming=streaming)
