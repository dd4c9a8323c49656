"""Translates inference requests of the Open Inference Protocol into requests of the ingress's HTTP API. Pure.

The tensors are those of Triton's vLLM backend (`text_input`, `sampling_parameters`, `stream`), and `messages` for
chats. Everything about sampling is checked where HTTP requests are checked: the gateway only refuses what it cannot
translate."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from engine_agent.grpc_gateway.messages.open_inference_pb2 import InferParameter, ModelInferRequest
from engine_agent.protocol.strict_json import strict_loads

MOST_PROMPTS: Final = 64
"""Prompts in one request. The ingress counts them as one request, and a cell weighs their work."""
MOST_PARAMETERS: Final = 64
MOST_TENSORS: Final = 16
LONGEST_PARAMETERS_BYTES: Final = 256 * 1024
"""Of `sampling_parameters`, which can contain a JSON schema."""


class Tensor(StrEnum):
    """Names of input and output tensors."""

    TEXT_INPUT = "text_input"
    MESSAGES = "messages"
    SAMPLING_PARAMETERS = "sampling_parameters"
    STREAM = "stream"
    EXCLUDE_INPUT = "exclude_input_in_output"
    TEXT_OUTPUT = "text_output"
    FINISH_REASON = "finish_reason"
    INPUT_TOKENS = "num_input_tokens"
    OUTPUT_TOKENS = "num_output_tokens"
    RESPONSE = "response"
    EMBEDDING = "embedding"


INPUTS: Final[Mapping[Tensor, str]] = {
    Tensor.TEXT_INPUT: "BYTES",
    Tensor.MESSAGES: "BYTES",
    Tensor.SAMPLING_PARAMETERS: "BYTES",
    Tensor.STREAM: "BOOL",
    Tensor.EXCLUDE_INPUT: "BOOL",
}
"""Input tensors and their data types."""
OUTPUTS: Final[Mapping[Tensor, str]] = {
    Tensor.TEXT_OUTPUT: "BYTES",
    Tensor.FINISH_REASON: "BYTES",
    Tensor.INPUT_TOKENS: "UINT32",
    Tensor.OUTPUT_TOKENS: "UINT32",
    Tensor.RESPONSE: "BYTES",
    Tensor.EMBEDDING: "FP32",
}
"""Output tensors and their data types. `response` and `embedding` are sent only on request."""
USUAL_OUTPUTS: Final = frozenset({Tensor.TEXT_OUTPUT, Tensor.FINISH_REASON, Tensor.INPUT_TOKENS, Tensor.OUTPUT_TOKENS})
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_OWN_MEMBERS = frozenset({"model", "stream", "stream_options", "prompt", "messages", "input"})
"""Members of the HTTP request that tensors state."""
_IGNORED_PARAMETERS = frozenset({"triton_enable_empty_final_response", "binary_data_output", "content_type"})
"""Parameters that clients send on their own and that change nothing here."""
_REFUSED_PARAMETERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), "there are no sequences: send whole prompts"),
    "priority": "the urgency of a request is its class: send x-switchyard-class as metadata",
}
_BOOL = {0: False, 1: True}


class BadInferRequest(ValueError):
    """An inference request that has no translation; the text says why and what is possible."""


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request of the HTTP API, and the form of the answer. `timeout_ms`: of the parameter `timeout`, which Triton's
    clients send in microseconds; None: no such limit. `is_raw`: tensors are sent as raw bytes, as they arrived."""

    path: str
    body: bytes
    model: str
    request_id: str
    outputs: frozenset[Tensor]
    prompts: int
    is_stream: bool
    is_raw: bool
    timeout_ms: int | None = None


def infer_call(request: ModelInferRequest, *, may_stream: bool) -> InferCall:
    """The HTTP request for an inference request. `may_stream`: the call can carry several responses. Raises
    BadInferRequest if there is none."""
    if not request.model_name:
        raise BadInferRequest("model_name is empty; name the model as in GET /v1/models")
    if request.model_version:
        raise BadInferRequest("model_version must be empty: the fleet chooses the version of a model")
    is_raw = bool(request.raw_input_contents)
    given = dict(_inputs(request))
    outputs = _outputs(request)
    members, timeout_ms = _members(request, given)
    is_stream = _flag(given, Tensor.STREAM, default=may_stream)
    if is_stream and not may_stream:
        raise BadInferRequest("ModelInfer has one response: use ModelStreamInfer, or set stream to false")
    if not _flag(given, Tensor.EXCLUDE_INPUT, default=True):
        raise BadInferRequest("text_output never contains the prompt: leave exclude_input_in_output out")
    path, prompts = _add_prompts(members, given, outputs)
    if path == EMBEDDINGS:
        is_stream = False
    elif is_stream:
        if prompts > 1 or members.get("n") not in (None, 1):
            raise BadInferRequest("a stream has one prompt and one answer: use ModelInfer for several")
        members |= {"stream": True, "stream_options": {"include_usage": True}}
    members["model"] = request.model_name
    try:
        body = msgspec.json.encode(members)
    except (ValueError, RecursionError) as error:
        raise BadInferRequest(f"the request is not JSON: {error}") from None
    return InferCall(path, body, request.model_name, request.id[:128], outputs, prompts, is_stream, is_raw, timeout_ms)


def _inputs(request: ModelInferRequest) -> Iterator[tuple[Tensor, list[Any]]]:
    """The elements of each input tensor."""
    raw = request.raw_input_contents
    if len(request.inputs) > MOST_TENSORS:
        raise BadInferRequest(f"{len(request.inputs)} input tensors; at most {MOST_TENSORS}")
    if raw and len(raw) != len(request.inputs):
        raise BadInferRequest(f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} input tensors")
    seen = set[str]()
    for number, tensor in enumerate(request.inputs):
        name, wanted = tensor.name, INPUTS.get(tensor.name)  # type: ignore[call-overload]
        if wanted is None:
            raise BadInferRequest(f"no input tensor is called {name[:80]!r}; there are: {', '.join(INPUTS)}")
        if name in seen:
            raise BadInferRequest(f"the input tensor {name} is there twice")
        seen.add(name)
        if tensor.datatype != wanted:
            raise BadInferRequest(f"{name} has the datatype {tensor.datatype[:40]!r}; it must be {wanted}")
        if raw:
            elements: list[Any] = _raw_elements(name, wanted, raw[number])
        elif wanted == "BYTES":
            elements = list(tensor.contents.bytes_contents[: MOST_PROMPTS + 1])
        else:
            elements = list(tensor.contents.bool_contents[: MOST_PROMPTS + 1])
        _check_shape(name, tensor.shape, len(elements))
        yield Tensor(name), elements


def _raw_elements(name: str, datatype: str, raw: bytes) -> list[Any]:
    """Elements of a raw tensor. BYTES: each element is preceded by its length in 4 bytes, little-endian."""
    if datatype == "BOOL":
        if len(raw) != 1 or raw[0] not in _BOOL:
            raise BadInferRequest(f"{name} must be one byte, 0 or 1")
        return [_BOOL[raw[0]]]
    elements, at = list[bytes](), 0
    while at < len(raw) and len(elements) <= MOST_PROMPTS:
        if at + 4 > len(raw):
            raise BadInferRequest(f"the raw content of {name} ends within the length of an element")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4 + length
        if at > len(raw):
            raise BadInferRequest(f"the raw content of {name} ends within an element of {length} bytes")
        elements.append(raw[at - length : at])
    return elements


def _check_shape(name: str, shape: Sequence[int], count: int) -> None:
    if count > MOST_PROMPTS:
        raise BadInferRequest(f"{name} has more than {MOST_PROMPTS} elements")
    if len(shape) > 4 or any(size < 0 for size in shape) or math.prod(shape) != count or not shape:
        stated = ", ".join(map(str, shape[:5]))
        raise BadInferRequest(f"{name} has the shape [{stated}] and {count} elements; send the shape [{count}]")


def _outputs(request: ModelInferRequest) -> frozenset[Tensor]:
    if len(request.outputs) > MOST_TENSORS:
        raise BadInferRequest(f"{len(request.outputs)} output tensors; at most {MOST_TENSORS}")
    wanted = set[Tensor]()
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise BadInferRequest(f"no output tensor is called {output.name[:80]!r}; there are: {', '.join(OUTPUTS)}")
        wanted.add(Tensor(output.name))
    return frozenset(wanted) or USUAL_OUTPUTS


def _members(request: ModelInferRequest, given: Mapping[Tensor, list[Any]]) -> tuple[dict[str, Any], int | None]:
    """Members of the HTTP request that parameters and `sampling_parameters` state, and the limit of `timeout`."""
    if len(request.parameters) > MOST_PARAMETERS:
        raise BadInferRequest(f"{len(request.parameters)} parameters; at most {MOST_PARAMETERS}")
    members, timeout_ms = dict[str, Any](), None
    for name in sorted(request.parameters):
        value = _value(name, request.parameters[name])
        if reason := _REFUSED_PARAMETERS.get(name):
            raise BadInferRequest(f"the parameter {name} is not supported: {reason}")
        if name == "timeout":
            timeout_ms = _timeout_ms(value)
        elif name not in _IGNORED_PARAMETERS:
            members[name] = value
    if texts := given.get(Tensor.SAMPLING_PARAMETERS):
        stated = _object(Tensor.SAMPLING_PARAMETERS, texts)
        if both := sorted(stated.keys() & members.keys()):
            raise BadInferRequest(f"{both[0]} is a parameter and in sampling_parameters: state it once")
        members |= stated
    if own := sorted(members.keys() & _OWN_MEMBERS):
        raise BadInferRequest(f"{own[0]} is no parameter: it follows from model_name and the input tensors")
    return members, timeout_ms


def _object(name: Tensor, texts: list[Any]) -> dict[str, Any]:
    text = _one_text(name, texts)
    if len(text) > LONGEST_PARAMETERS_BYTES:
        raise BadInferRequest(f"{name} has {len(text)} bytes; at most {LONGEST_PARAMETERS_BYTES}")
    try:
        stated = strict_loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInferRequest(f"{name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(stated, dict):
        raise BadInferRequest(f"{name} must be the text of one JSON object")
    return stated


def _value(name: str, parameter: InferParameter) -> bool | int | float | str:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise BadInferRequest(f"the parameter {name[:80]!r} has no value")
    value: bool | int | float | str = getattr(parameter, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInferRequest(f"the parameter {name[:80]!r} is {value}, which is no JSON number")
    return value


def _timeout_ms(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadInferRequest("timeout must be a positive whole number of microseconds")
    return max(1, value // 1000)


def _add_prompts(
    members: dict[str, Any], given: Mapping[Tensor, list[Any]], outputs: frozenset[Tensor]
) -> tuple[str, int]:
    """Adds the prompts to the members; returns the path and the number of prompts."""
    has_text, has_messages = Tensor.TEXT_INPUT in given, Tensor.MESSAGES in given
    if has_text == has_messages:
        both = "both" if has_text else "neither"
        raise BadInferRequest(f"the request has {both} of text_input and messages; it needs one of them")
    if has_messages:
        if Tensor.EMBEDDING in outputs:
            raise BadInferRequest("embedding is an output for text_input only")
        members["messages"] = _raw_json(Tensor.MESSAGES, given[Tensor.MESSAGES])
        return CHAT, 1
    texts = [_text(Tensor.TEXT_INPUT, number, text) for number, text in enumerate(given[Tensor.TEXT_INPUT])]
    if not texts:
        raise BadInferRequest("text_input has no element")
    if Tensor.EMBEDDING in outputs:
        if outputs & {Tensor.TEXT_OUTPUT, Tensor.FINISH_REASON, Tensor.OUTPUT_TOKENS}:
            raise BadInferRequest("embedding cannot be requested together with generated text")
        members["input"] = texts
        return EMBEDDINGS, len(texts)
    members["prompt"] = texts[0] if len(texts) == 1 else texts
    return COMPLETIONS, len(texts)


def _one_text(name: Tensor, texts: list[Any]) -> bytes:
    if len(texts) != 1:
        raise BadInferRequest(f"{name} must have one element, a JSON text")
    return bytes(texts[0])


def _raw_json(name: Tensor, texts: list[Any]) -> msgspec.Raw:
    """The text as it is, once it is known to be one JSON value. What the ingress and the cell refuse in it, they refuse
    as over HTTP; reading it here as well would hold up other calls."""
    try:
        return msgspec.json.decode(_one_text(name, texts), type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInferRequest(f"{name} is not JSON: {str(error)[:200]}") from None


def _text(name: Tensor, number: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadInferRequest(f"element {number} of {name} is not UTF-8: {error}") from None


def _flag(given: Mapping[Tensor, list[Any]], name: Tensor, *, default: bool) -> bool:
    elements = given.get(name)
    if elements is None:
        return default
    if len(elements) != 1:
        raise BadInferRequest(f"{name} must have one element")
    return bool(elements[0])
