"""Answers as responses: complete ones, streams however they are cut, and errors as gRPC statuses."""

import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.grpc_gateway.infer_answers import BadAnswer, StreamedAnswer, StreamError, infer_response
from engine_agent.grpc_gateway.infer_requests import infer_call
from engine_agent.grpc_gateway.messages.open_inference_pb2 import ModelInferResponse
from engine_agent.grpc_gateway.statuses import PUSHBACK, failure_of, failure_of_event
from tests.engine_agent.grpc_gateway.grpc_calls import infer_request, texts
from tests.engine_agent.grpc_gateway.test_infer_requests import completion

USAGE = {"prompt_tokens": 4, "completion_tokens": 2}


def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def events(*chunks: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(each)}\n\n" for each in chunks]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


WHOLE = events(chunk("Hel"), chunk("lo"), chunk("", "stop"), {"choices": [], "usage": USAGE})


def test_a_complete_answer_keeps_the_order_of_its_choices() -> None:
    body = {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a", "finish_reason": "stop"}], "usage": USAGE}
    response = infer_response(infer_call(completion("x", "y", id="7"), may_stream=False), json.dumps(body).encode())
    assert (texts(response), texts(response, "finish_reason"), response.id) == (["a", "b"], ["stop", ""], "7")
    assert [list(each.shape) for each in response.outputs] == [[2], [2], [1], [1]]


def test_raw_requests_get_raw_tensors() -> None:
    body = json.dumps({"choices": [{"index": 0, "text": "hé"}], "usage": USAGE}).encode()
    response = infer_response(infer_call(completion("x", raw=True), may_stream=False), body)
    text, _, prompt_tokens, _ = response.raw_output_contents
    assert text == struct.pack("<I", 3) + "hé".encode()
    assert prompt_tokens == struct.pack("<I", 4)


def test_embeddings_are_a_matrix_and_the_answer_itself_is_an_output() -> None:
    request = completion("x", "y")
    request.outputs.add(name="embedding")
    request.outputs.add(name="response")
    body = {"data": [{"index": 0, "embedding": [1.0, 2.0]}, {"index": 1, "embedding": [3.0, 4.0]}], "usage": USAGE}
    response = infer_response(infer_call(request, may_stream=False), json.dumps(body).encode())
    assert (list(response.outputs[0].shape), list(response.outputs[0].contents.fp32_contents)) == (
        *([2, 2], [1, 2, 3, 4]),
    )
    assert json.loads(texts(response, "response")[0]) == body


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": 3}', b'{"choices": [{}]}', b"\xff", b"[" * 5000])
def test_another_form_is_not_translated(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        infer_response(infer_call(completion("x"), may_stream=False), body)


def streamed(parts: Iterable[bytes]) -> tuple[StreamedAnswer, list[ModelInferResponse | StreamError]]:
    answer = StreamedAnswer(infer_call(completion("x"), may_stream=True))
    return answer, [response for part in parts for response in answer.feed(part)]


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    answer, responses = streamed(WHOLE[one:other] for one, other in pairwise(edges))
    assert [texts(each) for each in responses] == [["Hel"], ["lo"]]
    last = answer.end()
    assert answer.is_whole
    assert (texts(last), texts(last, "finish_reason")) == ([""], ["stop"])
    assert last.parameters["triton_final_response"].bool_param
    assert {each.name: list(each.contents.uint_contents) for each in last.outputs}["num_output_tokens"] == [2]


def test_a_stream_without_its_end_is_not_whole() -> None:
    answer, _ = streamed([events(chunk("a"), done=False)])
    assert not answer.is_whole


def test_an_error_in_a_stream_is_reported() -> None:
    _, responses = streamed([events(chunk("a"), {"error": {"message": "the cell stopped", "code": "cell_lost"}})])
    (error,) = (each for each in responses if isinstance(each, StreamError))
    failure = failure_of_event(error.error)
    assert (failure.status, failure.message) == (grpc.StatusCode.UNAVAILABLE, "the cell stopped")


def test_chats_stream_their_deltas() -> None:
    answer = StreamedAnswer(infer_call(infer_request(), may_stream=True))
    delta = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hey"}, "finish_reason": None}]}
    (response,) = answer.feed(events(delta))
    assert isinstance(response, ModelInferResponse)
    assert texts(response) == ["hey"]


@pytest.mark.parametrize(
    ("http", "status"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (401, grpc.StatusCode.UNAUTHENTICATED),
        (403, grpc.StatusCode.PERMISSION_DENIED),
        (404, grpc.StatusCode.NOT_FOUND),
        (413, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (418, grpc.StatusCode.INVALID_ARGUMENT),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (503, grpc.StatusCode.UNAVAILABLE),
        (504, grpc.StatusCode.DEADLINE_EXCEEDED),
        (599, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_status_keeps_its_meaning(http: int, status: grpc.StatusCode) -> None:
    body = b'{"error": {"message": "no", "code": "why\xc3\xa9"}}'
    failure = failure_of(http, {"retry-after": "3", "x-request-id": "r"}, body)
    assert (failure.status, failure.message) == (status, "no")
    assert failure.details() == {"x-request-id": "r", "retry-after": "3", "x-switchyard-code": "why?", PUSHBACK: "3000"}


def test_an_answer_that_is_no_error_object_is_named_by_its_status() -> None:
    assert failure_of(502, {}, b"<html>").message == "the ingress answered with HTTP status 502"
