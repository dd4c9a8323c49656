"""Inference requests as HTTP requests: tensors, parameters, and what is refused with which text."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.grpc_gateway.infer_requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MOST_PROMPTS,
    USUAL_OUTPUTS,
    BadInferRequest,
    Tensor,
    infer_call,
)
from engine_agent.grpc_gateway.messages.open_inference_pb2 import ModelInferRequest
from tests.engine_agent.grpc_gateway.grpc_calls import infer_request


def completion(*texts: str, raw: bool = False, **more: Any) -> ModelInferRequest:
    request = ModelInferRequest(model_name="demo", **more)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    if raw:
        parts = [text.encode() for text in texts]
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(part)) + part for part in parts))
    else:
        tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return request


def with_tensor(request: ModelInferRequest, name: str, value: Any, datatype: str = "BYTES") -> ModelInferRequest:
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
    if datatype == "BOOL":
        tensor.contents.bool_contents.append(value)
    else:
        tensor.contents.bytes_contents.append(value if isinstance(value, bytes) else value.encode())
    return request


@pytest.mark.parametrize("raw", [False, True])
def test_prompts_become_a_completion_in_either_encoding(raw: bool) -> None:
    one, two = completion("Hi", raw=raw), completion("Hi", "Ho 🙂", raw=raw)
    call = infer_call(one, may_stream=False)
    assert (call.path, json.loads(call.body)) == (COMPLETIONS, {"prompt": "Hi", "model": "demo"})
    assert (call.is_raw, call.outputs, call.prompts) == (raw, USUAL_OUTPUTS, 1)
    assert json.loads(infer_call(two, may_stream=False).body)["prompt"] == ["Hi", "Ho 🙂"]


def test_messages_become_a_chat_with_all_members_of_both_sources() -> None:
    request = infer_request(max_tokens=9, temperature=0.5)
    with_tensor(request, "sampling_parameters", '{"stop": ["x"], "n": 2}')
    call = infer_call(request, may_stream=False)
    assert call.path == CHAT
    assert json.loads(call.body) == {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "stop": ["x"],
        "n": 2,
    }


def test_a_requested_embedding_is_one() -> None:
    request = completion("a", "b")
    request.outputs.add(name="embedding")
    call = infer_call(request, may_stream=True)
    assert (call.path, call.is_stream) == (EMBEDDINGS, False)
    assert json.loads(call.body) == {"model": "demo", "input": ["a", "b"]}


def test_a_stream_asks_for_its_counts_unless_the_request_wants_one_response() -> None:
    call = infer_call(completion("a"), may_stream=True)
    assert call.is_stream
    assert json.loads(call.body)["stream_options"] == {"include_usage": True}
    whole = infer_call(with_tensor(completion("a"), "stream", False, "BOOL"), may_stream=True)
    assert not whole.is_stream
    assert "stream" not in json.loads(whole.body)


def test_a_timeout_of_tritons_clients_is_in_microseconds() -> None:
    assert infer_call(infer_request(timeout=2_500_000), may_stream=False).timeout_ms == 2500


def test_parameters_that_clients_add_on_their_own_are_left_out() -> None:
    request = infer_request(triton_enable_empty_final_response=True)
    assert set(json.loads(infer_call(request, may_stream=True).body)) == {
        *("messages", "model", "stream", "stream_options")
    }


def _requests() -> dict[str, tuple[ModelInferRequest, str]]:
    nothing = ModelInferRequest(model_name="demo")
    shaped, typed, short = completion("a"), completion("a"), completion("a", raw=True)
    shaped.inputs[0].shape[:] = [2]
    typed.inputs[0].datatype = "FP32"
    short.raw_input_contents[0] = short.raw_input_contents[0][:-1]
    unasked = completion("a")
    unasked.outputs.add(name="logits")
    empty = infer_request()
    empty.parameters["top_k"].Clear()
    return {
        "no model": (ModelInferRequest(), "model_name is empty"),
        "a version": (completion("a", model_version="3"), "model_version must be empty"),
        "no prompt": (nothing, "neither of text_input and messages"),
        "both": (with_tensor(infer_request(), "text_input", "a"), "both of text_input and messages"),
        "twice": (with_tensor(completion("a"), "text_input", "a"), "there twice"),
        "unknown tensor": (with_tensor(completion("a"), "image", "a"), "no input tensor is called 'image'"),
        "unknown output": (unasked, "no output tensor is called 'logits'"),
        "shape": (shaped, "send the shape [1]"),
        "datatype": (typed, "it must be BYTES"),
        "cut": (short, "ends within an element of 1 bytes"),
        "no UTF-8": (with_tensor(ModelInferRequest(model_name="m"), "text_input", b"\xff"), "is not UTF-8"),
        "no JSON": (with_tensor(ModelInferRequest(model_name="m"), "messages", "[{"), "messages is not JSON"),
        "deep": (with_tensor(ModelInferRequest(model_name="m"), "messages", "[" * 9999), "messages is not JSON"),
        "two values": (
            with_tensor(ModelInferRequest(model_name="m"), "messages", '[], "model": "other"'),
            "messages is not JSON",
        ),
        "deep parameters": (
            with_tensor(completion("a"), "sampling_parameters", '{"a":' * 99 + "1" + "}" * 99),
            "nested deeper than 64",
        ),
        "long parameters": (
            with_tensor(completion("a"), "sampling_parameters", "[" + "1," * 200_000 + "1]"),
            "at most 262144",
        ),
        "no object": (with_tensor(completion("a"), "sampling_parameters", "[]"), "the text of one JSON object"),
        "stated twice": (
            with_tensor(infer_request(seed=1), "sampling_parameters", '{"seed": 2}'),
            "seed is a parameter and in sampling_parameters",
        ),
        "own member": (infer_request(prompt="x"), "prompt is no parameter"),
        "a sequence": (infer_request(sequence_id=7), "there are no sequences"),
        "a priority": (infer_request(priority=1), "x-switchyard-class"),
        "no value": (empty, "'top_k' has no value"),
        "not finite": (infer_request(top_p=float("inf")), "is no JSON number"),
        "many": (completion(*["a"] * (MOST_PROMPTS + 1)), "more than 64 elements"),
        "stream": (with_tensor(completion("a"), "stream", True, "BOOL"), "use ModelStreamInfer"),
        "echo": (with_tensor(completion("a"), "exclude_input_in_output", False, "BOOL"), "never contains the prompt"),
    }


@pytest.mark.parametrize("name", _requests())
def test_what_cannot_be_translated_is_refused_with_the_remedy(name: str) -> None:
    request, text = _requests()[name]
    with pytest.raises(BadInferRequest) as error:
        infer_call(request, may_stream=False)
    assert text in str(error.value)


def test_a_stream_has_one_prompt() -> None:
    with pytest.raises(BadInferRequest, match="one prompt and one answer"):
        infer_call(completion("a", "b"), may_stream=True)
    with pytest.raises(BadInferRequest, match="one prompt and one answer"):
        infer_call(infer_request(n=2), may_stream=True)


@given(st.binary(max_size=200))
def test_any_raw_content_is_translated_or_refused(content: bytes) -> None:
    request = completion("a", raw=True)
    request.raw_input_contents[0] = content
    try:
        call = infer_call(request, may_stream=False)
    except BadInferRequest:
        return
    assert json.loads(call.body)["prompt"] == content[4:].decode()


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.sampled_from(list(Tensor)))
def test_texts_survive_both_encodings(texts: list[str], name: Tensor) -> None:
    bodies = {infer_call(completion(*texts, raw=raw, id=name), may_stream=False).body for raw in (False, True)}
    assert len(bodies) == 1
