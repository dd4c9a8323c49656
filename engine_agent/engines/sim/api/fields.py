"""What several families of requests share: fields, how a body is read, and how a wrong one is named."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.sim.planning.generation_request import BadRequest, OutputForm, Stops
from engine_agent.engines.sim.planning.handover import TransferParams
from engine_agent.engines.sim.text.logprobs import MOST_LOGPROBS

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Answers = Annotated[int, Meta(ge=1, le=128)]
"""`n`: OpenAI's limit."""
ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
"""What a JSON object looks like whose schema the client leaves open."""
_MOST_CHOICES = 1000

B = TypeVar("B")


class StreamOptions(Struct):
    """`include_usage` asks for a last chunk with the token counts, `continuous_usage_stats` for counts in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaField(Struct):
    """`response_format.json_schema`."""

    name: str
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`, of chats and completions."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaField | None = None


class StructuredOutputs(Struct):
    """vLLM's own `structured_outputs`."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Any = None
    json_object: bool | None = None
    structural_tag: Any = None


class Sampling(Struct, kw_only=True):
    """What chats and completions share. Temperatures and penalties are accepted and have no effect."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NotNegative | None = None
    min_tokens: NotNegative | None = None
    n: Answers | None = None
    best_of: Any = None
    use_beam_search: bool | None = None
    seed: Seed | None = None
    priority: Seed | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: TransferParams | None = None
    guided_json: Any = None
    guided_choice: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None


def read_body(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    """A body as its struct.

    Raises:
        BadRequest: it is not JSON, or a field is missing or wrong.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), param=_field_of(str(error))) from error
    except RecursionError as error:
        raise BadRequest("the body lies too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


_FIELD = re.compile(r"`\$\.(\w+)")
_MISSING = re.compile(r"missing required field `(\w+)`")


def _field_of(message: str) -> str | None:
    field = _FIELD.search(message) or _MISSING.search(message)
    return field.group(1) if field else None


def check_sampling(body: Sampling) -> None:
    """Refuse, by name, what no engine or this one does not do.

    Raises:
        BadRequest: see there.
    """
    if body.best_of is not None and body.best_of != 1:
        raise BadRequest("`best_of` is not supported: vLLM has dropped it", param="best_of")
    if body.use_beam_search:
        raise BadRequest("`use_beam_search` is not supported by sim", param="use_beam_search")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    limit = body.max_tokens
    if limit is not None and (body.min_tokens or 0) > limit:
        raise BadRequest(f"min_tokens must be at most max_tokens, {limit}, got {body.min_tokens}", param="min_tokens")
    if body.prompt_logprobs is not None:
        check_logprobs(body.prompt_logprobs, "prompt_logprobs")
        if body.stream and body.prompt_logprobs > 0:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")


def check_logprobs(count: int, param: str) -> None:
    """Refuse more log probabilities than there are.

    Raises:
        BadRequest: see there.
    """
    if not 0 <= count <= MOST_LOGPROBS:
        raise BadRequest(f"`{param}` must be 0 to {MOST_LOGPROBS}, got {count}", param=param)


def stops_of(body: Sampling) -> Stops:
    """What ends an answer early.

    Raises:
        BadRequest: a stop text is empty.
    """
    return Stops(
        stop_texts(body.stop, "stop"), frozenset(body.stop_token_ids or ()), bool(body.include_stop_str_in_output)
    )


def stop_texts(stop: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Stop texts, given as one or several.

    Raises:
        BadRequest: one is empty.
    """
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in texts:
        raise BadRequest(f"`{param}` cannot contain an empty string.", param=param)
    return texts


def form_of(body: Sampling) -> OutputForm | None:
    """What the text must be; None: anything.

    Raises:
        BadRequest: the fields that say so are wrong, contradict each other, or are not supported.
    """
    for name in ("guided_json", "guided_choice", "guided_regex", "guided_grammar"):
        if getattr(body, name) is not None:
            raise BadRequest(
                f"`{name}` is not supported: vLLM has dropped it and would not constrain the answer; "
                "use `structured_outputs` or `response_format`",
                param=name,
            )
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
