"""Translates answers of the ingress's HTTP API into responses of the Open Inference Protocol. Pure."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from engine_agent.grpc_gateway.infer_requests import CHAT, EMBEDDINGS, OUTPUTS, InferCall, Tensor
from engine_agent.grpc_gateway.messages.open_inference_pb2 import InferParameter, ModelInferResponse

FINAL: Final = "triton_final_response"
"""Parameter of the last response to a request in a stream, as in Triton."""
LONGEST_EVENT_BYTES: Final = 8 * 1024 * 1024
_DONE = b"[DONE]"
_WRONG_FORM = (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError)


class BadAnswer(Exception):
    """An answer of a cell that is not in the form of its path."""


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that a stream ended with, in place of further tokens."""

    error: Mapping[str, Any]


@dataclass(slots=True)
class _Generated:
    """What was generated since the last response."""

    text: str = ""
    finish_reason: str = ""
    chunks: list[Any] = field(default_factory=list)


def infer_response(call: InferCall, body: bytes) -> ModelInferResponse:
    """The response for a complete answer. Raises BadAnswer if it is not in the form of the path."""
    try:
        answer = msgspec.json.decode(body)
        if call.path == EMBEDDINGS:
            return _embeddings(call, answer, body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        texts = [_text_of(call, choice) for choice in choices]
        reasons = [choice.get("finish_reason") or "" for choice in choices]
        tensors = _Tensors(call)
        tensors.add(Tensor.TEXT_OUTPUT, texts)
        tensors.add(Tensor.FINISH_REASON, reasons)
        tensors.add_usage(answer.get("usage"))
        tensors.add(Tensor.RESPONSE, [body])
    except (
        msgspec.DecodeError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        struct.error,
        RecursionError,
    ) as error:
        raise BadAnswer(f"{type(error).__name__}: {error}") from None
    return tensors.response


class StreamedAnswer:
    """Turns the events of one streamed answer into responses. `feed` takes bytes as they arrive; `end` returns the
    final response, which has the counts of tokens and the parameter `triton_final_response`."""

    def __init__(self, call: InferCall) -> None:
        self._call = call
        self._buffer = b""
        self._kept = _Generated()
        self._usage: Any = None
        self._is_done = False

    @property
    def is_whole(self) -> bool:
        """Whether the stream ended as it should."""
        return self._is_done

    def feed(self, data: bytes) -> Iterator[ModelInferResponse | StreamError]:
        """Responses for the events that `data` completes. An event that says why the answer ended is kept for the final
        response. Raises BadAnswer for an event in another form."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        if len(self._buffer) > LONGEST_EVENT_BYTES:
            raise BadAnswer(f"an event of more than {LONGEST_EVENT_BYTES} bytes")
        for event in events:
            payload = event.removeprefix(b"data:").strip()
            if not event.startswith(b"data:"):
                continue
            if payload == _DONE:
                self._is_done = True
                continue
            yield from self._event(payload)

    def end(self) -> ModelInferResponse:
        response = self._response(self._kept, is_final=True)
        response.parameters[FINAL].bool_param = True
        return response

    def _event(self, payload: bytes) -> Iterator[ModelInferResponse | StreamError]:
        try:
            chunk = msgspec.json.decode(payload)
            if isinstance(chunk.get("error"), dict):
                yield StreamError(chunk["error"])
                return
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk["choices"]:
                self._kept.text += _text_of(self._call, choice)
                self._kept.finish_reason = choice.get("finish_reason") or self._kept.finish_reason
            self._kept.chunks.append(payload)
        except _WRONG_FORM as error:
            raise BadAnswer(f"{type(error).__name__}: {error}") from None
        if self._kept.finish_reason or not chunk["choices"]:
            return
        if self._kept.text or Tensor.RESPONSE in self._call.outputs:
            yield self._response(self._kept, is_final=False)
            self._kept = _Generated()

    def _response(self, generated: _Generated, *, is_final: bool) -> ModelInferResponse:
        tensors = _Tensors(self._call)
        tensors.add(Tensor.TEXT_OUTPUT, [generated.text])
        tensors.add(Tensor.FINISH_REASON, [generated.finish_reason])
        tensors.add(Tensor.RESPONSE, generated.chunks)
        if is_final:
            tensors.add_usage(self._usage)
        return tensors.response


class _Tensors:
    """Collects the requested output tensors of one response, in the encoding of the request."""

    def __init__(self, call: InferCall) -> None:
        self._call = call
        self.response = ModelInferResponse(model_name=call.model, id=call.request_id)

    def add(self, name: Tensor, elements: Sequence[str | bytes]) -> None:
        if name not in self._call.outputs:
            return
        encoded = [element.encode() if isinstance(element, str) else element for element in elements]
        output = self._output(name, [len(encoded)])
        if self._call.is_raw:
            raw = b"".join(part for element in encoded for part in (struct.pack("<I", len(element)), element))
            self.response.raw_output_contents.append(raw)
        else:
            output.contents.bytes_contents.extend(encoded)

    def add_usage(self, usage: Any) -> None:
        counts = usage if isinstance(usage, dict) else {}
        for name, member in (
            (Tensor.INPUT_TOKENS, "prompt_tokens"),
            (Tensor.OUTPUT_TOKENS, "completion_tokens"),
        ):
            if name not in self._call.outputs or not isinstance(counts.get(member), int):
                continue
            output = self._output(name, [1])
            if self._call.is_raw:
                self.response.raw_output_contents.append(struct.pack("<I", counts[member]))
            else:
                output.contents.uint_contents.append(counts[member])

    def add_vectors(self, vectors: Sequence[Sequence[float]]) -> None:
        width = len(vectors[0])
        if any(len(vector) != width for vector in vectors):
            raise BadAnswer("vectors of different lengths")
        output = self._output(Tensor.EMBEDDING, [len(vectors), width])
        flat = [number for vector in vectors for number in vector]
        if self._call.is_raw:
            self.response.raw_output_contents.append(struct.pack(f"<{len(flat)}f", *flat))
        else:
            output.contents.fp32_contents.extend(flat)

    def _output(self, name: Tensor, shape: Sequence[int]) -> ModelInferResponse.InferOutputTensor:
        return self.response.outputs.add(name=name, datatype=OUTPUTS[name], shape=shape)


def _embeddings(call: InferCall, answer: Any, body: bytes) -> ModelInferResponse:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    tensors = _Tensors(call)
    tensors.add_vectors([row["embedding"] for row in rows])
    tensors.add_usage(answer.get("usage"))
    tensors.add(Tensor.RESPONSE, [body])
    return tensors.response


def _text_of(call: InferCall, choice: Mapping[str, Any]) -> str:
    if call.path != CHAT:
        return str(choice.get("text") or "")
    message = choice.get("delta") if call.is_stream else choice.get("message")
    return str((message or {}).get("content") or "")


def failed_parameters(status: str, details: Mapping[str, str]) -> dict[str, InferParameter]:
    """Parameters of the response to a failed request of a stream: the gRPC status by name, and its details."""
    return {name: InferParameter(string_param=text) for name, text in {"status": status, **details}.items()}
