"""What several families of requests share, beyond `engine_agent.protocol.request_bodies`: what ends an answer, and what
form its text must have."""

from typing import Any

import msgspec

from engine_agent.engines.sim.planning.generation_request import OutputForm, Stops
from engine_agent.engines.sim.planning.handover import TransferParams
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
"""What a JSON object looks like whose schema the client leaves open."""
_MOST_CHOICES = 1000


def stops_of(body: SamplingBody) -> Stops:
    """What ends an answer early."""
    return Stops(
        stop_texts(body.stop, "stop"), frozenset(body.stop_token_ids or ()), bool(body.include_stop_str_in_output)
    )


def stop_texts(stop: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Stop texts, given as one or several.

    Raises:
        BadRequest: see `check_stops`.
    """
    check_stops(stop, param)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def form_of(body: SamplingBody) -> OutputForm | None:
    """What the text must be; None: anything.

    Raises:
        BadRequest: the fields that say so are wrong, contradict each other, or are not supported.
    """
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


def transfer_of(given: dict[str, Any] | None) -> TransferParams | None:
    """What a prefill or decode engine is told of a request.

    Raises:
        BadRequest: it is not that.
    """
    try:
        return None if given is None else msgspec.convert(given, TransferParams)
    except msgspec.ValidationError as error:
        raise BadRequest(f"`kv_transfer_params`: {error}", param="kv_transfer_params") from error
