"""Whether one request asks for more work than its deployment's limits allow, and how many sequences it is. Pure.

Reads numbers as leniently as engines do (`"10000"` and `1e4` are 10,000), so that no spelling passes a limit. The
engine refuses values of a wrong type.

Also limits the time that an engine spends on `input` of Responses. vLLM compares an item with some thirty forms. An
item that fits is read in under 1 ms; one that fits none takes 4 to 12 ms, because each mismatch is described, on the
thread that also answers health checks: 512 of them stopped it for 6 s. So items of the common forms pass in any number,
and others in a small one."""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from engine_agent.protocol.api_surface import ApiPath, Counting
from engine_agent.protocol.request_bodies import BadRequest
from engine_agent.protocol.request_checks import RESPONSES_PATH
from engine_agent.protocol.request_limits import (
    RequestLimits,
    greatest_count,
    has_endless_reference,
    levels_with_references,
)
from engine_agent.protocol.strict_json import strict_loads

_PROMPT_USAGE = Counting.PROMPT_USAGE
_ANSWERS = ("n", "best_of")
_MOST_LEVELS = 1000
"""Levels of a schema, with references followed. Compilers descend recursively: llguidance overflows its stack at some
1,500 levels and kills the engine."""
_INPUTS = ("input", "documents", "items", "queries", "text_1", "text_2", "data_1", "data_2")
_STOPS = ("stop", "stop_sequences")
_LOGPROBS = ("top_logprobs", "prompt_logprobs", "logprobs")
_TOKEN_RULES = ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words")
_AS_TEXT = ("json", "structural_tag")
"""Members of `structured_outputs` that can be JSON in a string."""
_ROOTS: tuple[tuple[str, ...], ...] = (
    ("response_format", "json_schema", "schema"),
    ("structured_outputs", "json"),
    ("text", "format", "schema"),
    ("output_format", "schema"),
    ("output_config", "format", "schema"),
)
_TOOL_ROOTS: tuple[tuple[str, ...], ...] = (("function", "parameters"), ("parameters",), ("input_schema",))
_SCHEMAS = ("response_format", "structured_outputs", "text", "output_format", "output_config")
_LIMITED: Final = frozenset({*_STOPS, *_LOGPROBS, *_TOKEN_RULES, "tools", *_SCHEMAS})
"""Most requests have none of these members."""


def check_work(row: ApiPath, request: dict[str, Any], limits: RequestLimits) -> int:
    """Returns how many sequences a request to this path is in the engine: answers to prompts, or inputs. Raises
    BadRequest if it asks for more than a limit; the text names member, value and limit, and `code` is OpenAI's."""
    is_limited = not _LIMITED.isdisjoint(request)
    if is_limited:
        _check_members(request, limits)
    _check_length("messages", request.get("messages"), limits.inputs)
    if row.path == RESPONSES_PATH:
        check_items(request.get("input"), limits.inputs)
    if is_limited:
        _check_schemas(request, limits)
    if row.counting is _PROMPT_USAGE:
        return max(_checked_parts(member, request.get(member), limits.inputs) for member in _INPUTS)
    return check_sequences(request, limits.sequences)


def _check_members(request: dict[str, Any], limits: RequestLimits) -> None:
    for member in _STOPS:
        _check_length(member, request.get(member), limits.stops)
    for member in _LOGPROBS:
        _check_number(member, request.get(member), limits.top_logprobs)
    for member in _TOKEN_RULES:
        _check_length(member, request.get(member), limits.token_rules)
    _check_length("tools", request.get("tools"), limits.tools)


def check_sequences(request: dict[str, Any], limit: int) -> int:
    """Returns how many answers a generating request asks for. Raises BadRequest if they are more than the limit."""
    member, answers = _ANSWERS[0], 1
    for name in _ANSWERS:
        if name in request:
            _check_number(name, request[name], limit)
            if (number := _number(request[name])) > answers:
                member, answers = name, number
    prompts = _checked_parts("prompt", request.get("prompt"), limit)
    if answers * prompts > limit:
        what = f"{answers} answers to each of {prompts} prompts are {answers * prompts} sequences"
        raise _limit_exceeded(member, f"{what}. Expected at most {limit} in one request.", "integer_above_max_value")
    return answers * prompts


def _check_schemas(request: dict[str, Any], limits: RequestLimits) -> None:
    if not isinstance(request.get("structured_outputs"), dict | None):
        raise _limit_exceeded("structured_outputs", "it must be an object.", "invalid_type")
    for member, value in _schemas(request):
        size = len(msgspec.json.encode(value))
        if size > limits.schema_bytes:
            what = f"schema too long. Expected at most {limits.schema_bytes} bytes of JSON, but got {size} instead."
            raise _limit_exceeded(member, what, "string_above_max_length")
        if _depth(value) > limits.schema_depth:
            what = f"schema nested too deeply. Expected at most {limits.schema_depth} levels of objects and lists."
            raise _limit_exceeded(member, what, "invalid_value")
        if (count := greatest_count(value)) > limits.schema_counts:
            what = f"too many repetitions. Expected counts of at most {limits.schema_counts}, but got {count} instead."
            raise _limit_exceeded(member, what, "integer_above_max_value")
    for member, root in _roots(request):
        if root is None:
            continue
        if has_endless_reference(root):
            raise _limit_exceeded(member, "a $ref of its schema leads back to itself alone.", "invalid_value")
        if levels_with_references(root) > _MOST_LEVELS:
            what = f"schema nested too deeply. Expected at most {_MOST_LEVELS} levels with its references followed."
            raise _limit_exceeded(member, what, "invalid_value")
    if (tools := request.get("tools")) and (size := len(msgspec.json.encode(tools))) > limits.tools_bytes:
        what = f"tools too long. Expected at most {limits.tools_bytes} bytes of JSON, but got {size} instead."
        raise _limit_exceeded("tools", what, "string_above_max_length")


def _schemas(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((member, request[member]) for member in _SCHEMAS if isinstance(request.get(member), dict))
    outputs = request.get("structured_outputs")
    outputs = outputs if isinstance(outputs, dict) else {}
    for name in _AS_TEXT:
        if isinstance(outputs.get(name), str):
            yield f"structured_outputs.{name}", _decoded(f"structured_outputs.{name}", outputs[name])
    tools = request.get("tools")
    yield from ((f"tools[{at}]", tool) for at, tool in enumerate(tools if isinstance(tools, list) else ()))


def _roots(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for path in _ROOTS:
        yield path[0], _member_at(request, path)
    outputs = request.get("structured_outputs")
    if isinstance(outputs, dict) and isinstance(outputs.get("json"), str):
        yield "structured_outputs.json", _decoded("structured_outputs.json", outputs["json"])
    tools = request.get("tools")
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        for path in _TOOL_ROOTS:
            yield f"tools[{at}]", _member_at(tool, path)


def _member_at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _decoded(member: str, text: str) -> Any:
    try:
        return strict_loads(text)
    except ValueError as error:
        raise _limit_exceeded(member, f"not JSON with one meaning: {error}", "invalid_value") from None


def _depth(value: Any) -> int:
    layer, depth = [value], 0
    while layer := [part for part in layer if isinstance(part, dict | list)]:
        depth += 1
        layer = [inner for part in layer for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def _check_number(member: str, value: Any, limit: int) -> None:
    if (number := _number(value)) > limit:
        what = f"integer above maximum value. Expected a value <= {limit}, but got {number} instead."
        raise _limit_exceeded(member, what, "integer_above_max_value")


def _check_length(member: str, value: Any, limit: int) -> None:
    if isinstance(value, dict) and len(value) > limit:
        what = f"too many properties. Expected an object with at most {limit} properties, but got {len(value)} instead."
        raise _limit_exceeded(member, what, "object_above_max_properties")
    if isinstance(value, list) and len(value) > limit:
        raise _too_long(member, len(value), limit)


def _limit_exceeded(member: str, what: str, code: str) -> BadRequest:
    return BadRequest(f"Invalid '{member}': {what}", member, code=code)


def _too_long(member: str, length: int, limit: int) -> BadRequest:
    what = f"Expected an array with maximum length {limit}, but got an array with length {length} instead."
    return _limit_exceeded(member, f"array too long. {what}", "array_above_max_length")


def _checked_parts(member: str, value: Any, limit: int) -> int:
    """The number of texts, or lists of token ids, in a member that can be one of these or a list of them."""
    if not isinstance(value, list) or all(type(each) is int for each in value):
        return 1
    if len(value) > limit:
        raise _too_long(member, len(value), limit)
    return len(value)


def _number(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and isfinite(value) else 0


MOST_OTHERS: Final = 32
"""Items of forms other than those below: 0.4 s at most."""
Status = Literal["in_progress", "completed", "incomplete"]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class InputText(Struct, tag="input_text", forbid_unknown_fields=True):
    text: str


class OutputText(Struct, tag="output_text", forbid_unknown_fields=True, kw_only=True):
    text: str
    annotations: Nothing
    logprobs: Nothing = []


class SummaryText(Struct, tag="summary_text", forbid_unknown_fields=True):
    text: str


class ReasoningText(Struct, tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    type: Literal["message"] = "message"


class Answered(Struct, forbid_unknown_fields=True):
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status
    type: Literal["message"]


class Called(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: Status = "completed"


class Returned(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str = ""
    status: Status = "completed"


class Reasoned(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


FORMS: Final[dict[str, tuple[type[Struct], ...]]] = {
    "message": (InputMessage, Answered),
    "function_call": (Called,),
    "function_call_output": (Returned,),
    "reasoning": (Reasoned,),
}


def check_items(items: Any, most: int) -> None:
    """Raises BadRequest if there are more than `most` items, or more than `MOST_OTHERS` of another form than
    `FORMS`."""
    if not isinstance(items, list):
        return
    if len(items) > most:
        what = f"Expected an array with maximum length {most}, but got an array with length {len(items)} instead."
        raise BadRequest(f"Invalid 'input': array too long. {what}", "input", code="array_above_max_length")
    others = 0
    for at, item in enumerate(items):
        others += not has_known_form(item)
        if others > MOST_OTHERS:
            what = f"Expected at most {MOST_OTHERS} items besides {', '.join(FORMS)}, with the members of these alone."
            raise BadRequest(f"Invalid 'input[{at}]': {what}", f"input[{at}]", code="invalid_value")


def has_known_form(item: Any) -> bool:
    """Whether an engine parses the item without comparing it with many forms."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return isinstance(kind, str) and any(_fits(item, form) for form in FORMS.get(kind, ()))


def _fits(item: Any, form: type[Struct]) -> bool:
    try:
        msgspec.convert(item, form)
    except msgspec.ValidationError:
        return False
    return True
