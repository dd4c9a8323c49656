"""What the families of paths share beyond `engine_agent.protocol.request_bodies`: stops, output forms, usage, events,
errors, log probabilities."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine_agent.engines.openai_http import Usage
from engine_agent.engines.sim.planning.generation_request import (
    GenerationRequest,
    OutputForm,
    Prompt,
    Stops,
    TransferParams,
    is_handed_over,
    source_of,
)
from engine_agent.engines.sim.planning.vocabulary import Ranked, ranked_tokens
from engine_agent.protocol.request_bodies import (
    BadRequest,
    ResponseFormat,
    SamplingBody,
    StructuredOutputs,
    check_stops,
)

ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
"""The schema of a JSON object if the client states none."""
_MOST_CHOICES = 1000


def request_of(body: SamplingBody, prompts: tuple[Prompt, ...], limit: int | None, **members: Any) -> GenerationRequest:
    """Returns a request with the members that chats and completions share, and `members` of its API. Raises BadRequest
    if one is wrong."""
    transfer = _transfer_of(body.kv_transfer_params)
    stops, ids = stop_texts(body.stop, "stop"), frozenset(body.stop_token_ids or ())
    options = body.stream_options
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        choices=body.n or 1,
        output_limit=limit,
        min_tokens=body.min_tokens or 0,
        exact_length=bool(body.ignore_eos) and limit is not None,
        seed=body.seed or 0,
        priority=body.priority or 0,
        stops=Stops(stops, ids, bool(body.include_stop_str_in_output)),
        form=_form_of(body),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        is_handed_over=is_handed_over(transfer),
        source=source_of(transfer),
        **members,
    )


def stop_texts(stop: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Returns the stop texts, given as one or several. Raises BadRequest (see `check_stops`)."""
    check_stops(stop, param)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _form_of(body: SamplingBody) -> OutputForm | None:
    structured = _structured_form(body.structured_outputs)
    return _response_form(body.response_format) or structured


def _response_form(given: ResponseFormat | None) -> OutputForm | None:
    if given is None or given.type == "text":
        return None
    if given.type == "structural_tag":
        raise BadRequest("`response_format` of type structural_tag is not supported by sim", param="response_format")
    if given.type == "json_object":
        return OutputForm("json", ANY_OBJECT, "response_format")
    if given.json_schema is None:
        raise BadRequest(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            param="response_format",
        )
    schema = given.json_schema.schema
    return OutputForm("json", ANY_OBJECT if schema is None else schema, "response_format")


def _structured_form(given: StructuredOutputs | None) -> OutputForm | None:
    if given is None:
        return None
    param = "structured_outputs"
    for name in ("grammar", "structural_tag"):
        if getattr(given, name) is not None:
            raise BadRequest(f"`structured_outputs.{name}` is not supported by sim", param=param)
    forms = [
        OutputForm("json", _schema_of(given.json), param) if given.json is not None else None,
        OutputForm("regex", given.regex, param) if given.regex is not None else None,
        OutputForm("choice", given.choice, param) if given.choice is not None else None,
        OutputForm("json", ANY_OBJECT, param) if given.json_object else None,
    ]
    named = [form for form in forms if form is not None]
    if len(named) > 1:
        raise BadRequest("You can only use one kind of constraints for structured outputs.", param=param)
    if given.choice is not None and not 1 <= len(given.choice) <= _MOST_CHOICES:
        raise BadRequest(f"`structured_outputs.choice` has 1 to {_MOST_CHOICES} texts", param=param)
    return named[0] if named else None


def _schema_of(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise BadRequest(f"`structured_outputs.json` is not JSON: {error}", param="structured_outputs") from error


def _transfer_of(given: dict[str, Any] | None) -> TransferParams | None:
    try:
        return None if given is None else msgspec.convert(given, TransferParams)
    except msgspec.ValidationError as error:
        raise BadRequest(f"`kv_transfer_params`: {error}", param="kv_transfer_params") from error


class AnswerWriter(Protocol):
    """Writes the answer to one request, in the form of its family. A stream is `opening`, a `token_event` for each
    token of each answer, and `closing`; any other answer is `whole`."""

    def opening(self, usage: Usage) -> bytes:
        """Returns what comes before the first token."""

    def token_event(self, answer: int, index: int) -> bytes:
        """Returns the event of the `index`th token of an answer."""

    def closing(self, usage: Usage) -> bytes:
        """Returns what follows the last token of the last answer."""

    def whole(self, usage: Usage) -> bytes:
        """Returns all answers as one body."""

    def error_event(self, status: int, message: str) -> bytes:
        """Returns the last event of a stream that failed."""


def logprob_body(ranked: Sequence[Ranked], **more: Any) -> dict[str, Any]:
    """Returns the most likely of some tokens, in OpenAI's form."""
    first = ranked[0]
    return {"token": first.text, "logprob": first.logprob, "bytes": list(first.text.encode()), **more}


def content_logprob(text: str, index: int, top: int) -> dict[str, Any]:
    """Returns a token with the `top` most likely ones in its place, as chats and responses write them."""
    ranked = ranked_tokens(text, index, max(0, top - 1))
    return logprob_body(ranked, top_logprobs=[logprob_body([one]) for one in ranked[:top]])


def model_card(name: str, created: int, max_model_len: int, base: str) -> dict[str, Any]:
    """Returns a model for GET /v1/models/{model}: the model `base`, or an adapter of it. In vLLM an adapter's `root` is
    a path and it has no `max_model_len`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "switchyard",
        "root": name,
        "parent": None if name == base else base,
        "max_model_len": max_model_len,
    }
