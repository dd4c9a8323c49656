"""The engine's usage is found wherever the API puts it, in pieces of any size, and nowhere else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.usage_reader import (
    HELD_BYTES,
    MAX_VALUE_BYTES,
    JsonMember,
    TokenCount,
    TokenUsage,
    UsageReader,
    is_error_event,
)
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
    return reader.reported


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
    reported = read(
        Counting.STREAM_OPTIONS, stream + event({"choices": [], "usage": OPENAI}) + done, cuts, streaming=True
    )
    assert reported == TokenUsage(44, 2, 16)
    assert read(Counting.STREAM_OPTIONS, stream + done, cuts, streaming=True) is None


@given(st.lists(texts, max_size=4), sizes)
def test_a_stream_may_say_it_in_the_event_that_ends_its_only_choice(words: list[str], cuts: list[int]) -> None:
    """As llama.cpp's completions do. An event without choices says more."""
    stream = b"".join(chunk(word) for word in words)
    last = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": OPENAI})
    done = b"data: [DONE]\n\n"
    assert read(Counting.STREAM_OPTIONS, stream + last + done, cuts, streaming=True) == TokenUsage(44, 2, 16)
    more = event({"choices": [], "usage": {"prompt_tokens": 44, "completion_tokens": 5}})
    assert read(Counting.STREAM_OPTIONS, stream + last + more + done, cuts, streaming=True) == TokenUsage(44, 5, 0)
    going_on = event({"choices": [{"text": "", "finish_reason": None}], "usage": OPENAI})
    assert read(Counting.STREAM_OPTIONS, stream + going_on, cuts, streaming=True) is None


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


USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
words = st.sampled_from(["usage", "response", '"usage": {"prompt_tokens": 0}', "\\", '"', "{", "}]", "é\n", "a", ""])
values = st.recursive(
    st.one_of(words, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=20,
)
objects = st.dictionaries(words.filter(lambda word: word not in {"usage", "response"}), values, max_size=5)
member_sizes = st.lists(st.integers(1, 30), min_size=1)


def found(text: bytes, cuts: list[int], *path: bytes) -> Any:
    member, at, turn = JsonMember(*path), 0, 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        member.add(text[at : at + size])
        at, turn = at + size, turn + 1
    return None if member.value is None else json.loads(member.value)


def placed(around: dict[str, Any], name: str, value: Any, place: int) -> dict[str, Any]:
    members = list(around.items())
    return dict([*members[:place], (name, value), *members[place:]])


@given(objects, st.integers(0, 5), member_sizes, st.booleans(), st.sampled_from([None, 1]))
def test_wherever_it_stands_it_is_found(
    around: dict[str, Any], place: int, cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(placed(around, "usage", USAGE, place), ensure_ascii=ascii_only, indent=indent).encode()
    assert found(text, cuts, b"usage") == USAGE


@given(objects, objects, st.integers(0, 5), member_sizes)
def test_it_is_found_within_its_own_object_only(
    around: dict[str, Any], inner: dict[str, Any], place: int, cuts: list[int]
) -> None:
    nested = placed(around, "response", placed(inner, "usage", USAGE, place), place)
    text = b"event: response.completed\ndata: " + json.dumps(nested).encode() + b"\n\n"
    assert found(text, cuts, b"response", b"usage") == USAGE
    assert found(text, cuts, b"usage") is None


@given(objects, member_sizes)
def test_what_looks_like_it_is_not_taken_for_it(around: dict[str, Any], cuts: list[int]) -> None:
    assert found(json.dumps(around).encode(), cuts, b"usage") is None
    assert (
        found(json.dumps({"a": {"usage": USAGE}, "b": [{"usage": USAGE}], **around}).encode(), cuts, b"usage") is None
    )
    assert found(json.dumps([{"usage": USAGE}, around]).encode(), cuts, b"usage") is None


def test_what_is_no_object_or_too_long_is_none() -> None:
    for value in (None, 5, '{"prompt_tokens": 1}', {"a": "x" * (MAX_VALUE_BYTES + 1)}):
        assert found(json.dumps({"usage": value, "b": {}}).encode(), [7, 1000], b"usage") is None


def test_what_is_not_whole_is_none() -> None:
    assert found(b'{"usage": {"prompt_tokens": 1', [3], b"usage") is None


@given(st.binary(max_size=200), member_sizes)
def test_no_bytes_at_all_break_the_search_of_a_member(text: bytes, cuts: list[int]) -> None:
    member = JsonMember(b"usage")
    for at in range(0, len(text), cuts[0]):
        member.add(text[at : at + cuts[0]])


def token_event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9,"total_tokens":11}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no"}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "live", "settled"),
    [
        ([token_event("a"), token_event("b"), DONE], 2, 2),
        ([token_event("a") + token_event("b") + DONE], 2, 2),
        ([ROLE, token_event("a"), DONE], 1, 1),
        ([token_event("a"), token_event("b"), USAGE_EVENT, DONE], 2, 9),
        ([token_event("data: [DONE]"), token_event("\n\n"), DONE], 2, 2),
        ([token_event('"completion_tokens": 77'), DONE], 1, 1),
        ([token_event("a").replace(b"\n", b"\r\n"), token_event("b").replace(b"\n", b"\r\n")], 2, 2),
        ([b"data: x\n", b"\n", b"data: y", b"\n\n"], 2, 2),
        ([token_event("a"), ERROR], 1, 1),
        ([], 0, 0),
    ],
)
def test_events_of_a_stream_are_tokens_until_usage_says_more(pieces: list[bytes], live: int, settled: int) -> None:
    count = TokenCount(streaming=True)
    assert sum(count.add(piece) for piece in pieces) == count.tokens == live
    assert count.tokens + count.settle() == settled


@given(st.lists(st.text(max_size=20), max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_however_the_bytes_are_cut_each_event_counts_once(texts: list[str], sizes: list[int]) -> None:
    stream = b"".join(token_event(text) for text in texts)
    count = TokenCount(streaming=True)
    at = turn = 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        count.add(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert count.tokens == len(texts)
    assert count.at_boundary


def test_an_answer_that_is_no_stream_counts_by_its_usage_only() -> None:
    count = TokenCount(streaming=False)
    usage = {"prompt_tokens": 2, "completion_tokens": 5}
    body = json.dumps({"choices": [{"text": "a\n\nb" * 1000}], "usage": usage}).encode()
    assert count.add(body[:3000]) == count.add(body[3000:], complete=True) == 0
    assert (count.settle(), count.tokens) == (5, 0)


def test_between_events_there_is_room_for_another_and_within_one_there_is_not() -> None:
    count = TokenCount(streaming=True)
    assert count.at_boundary
    count.add(token_event("a"))
    assert count.at_boundary
    count.add(b"data: {")
    assert not count.at_boundary


def test_an_error_event_is_counted_wherever_a_read_has_it() -> None:
    assert is_error_event(ERROR)
    assert not is_error_event(token_event('data: {"error"'))
    for before in (b"", token_event("a") + token_event("b")):
        count = TokenCount(streaming=True)
        count.add(before + ERROR)
        assert (count.errors, count.tokens) == (1, before.count(b"\n\n"))
