"""Error answers of engines, of any server, in the terms of the client's API: a sentence, a code and the wrong member.
The status stays, unless it blames the wrong side. Pure. Sources: vLLM 0.32
(`vllm/entrypoints/serve/exception_handling/`), whose codes are numbers and whose validation errors are Python's;
FastAPI (`{"detail": …}`); llama.cpp's server; text-generation-inference."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import msgspec

from engine_agent.cell_proxy.api_paths import CELL_PATHS, CHAT_PATH, form_of, prompt_member_of
from engine_agent.cell_proxy.wire import ResponseHead
from engine_agent.protocol.api_surface import CONTEXT_LENGTH_EXCEEDED, OPENAI_TYPES, Counting, ErrorForm, error_object

MAX_MESSAGE_CHARS = 2000
_MOST_PROBLEMS = 3
"""For a body with many errors, or a member that fits none of its many forms."""


@dataclass(frozen=True, slots=True)
class EngineError:
    """One error. `kind` and `code`: the engine's own; None if it has none, or only a number."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    kind: str | None = None


def read_error(path: bytes, status: int, stated: Any) -> EngineError:
    error = stated.get("error") if isinstance(stated, dict) else None
    given = error if isinstance(error, dict) else stated if isinstance(stated, dict) else {}
    read = EngineError(
        status,
        _message(given.get("message") if given else None, stated, status),
        *(_nonempty_text(given.get(name)) for name in ("code", "param", "type")),
    )
    for rule in _RULES:
        if (understood := rule(path, read)) is not None:
            read = understood
            break
    if read.code is None and read.status >= 500:
        read = replace(read, code=_code(read.status))
    return replace(read, message=read.message[:MAX_MESSAGE_CHARS])


def _message(message: Any, stated: Any, status: int) -> str:
    if message is None and isinstance(stated, dict):
        message = stated.get("detail", stated.get("error"))
    elif message is None:
        message = stated
    if isinstance(message, list):
        message = "; ".join(map(_detail, message[:_MOST_PROBLEMS]))
    text = message.strip() if isinstance(message, str) else ""
    return text or f"the engine answered {status} {_phrase(status)}"


def _detail(stated: Any) -> str:
    """One detail of FastAPI, `{"loc": ["body", "prompt"], "msg": "Field required", …}`."""
    if not isinstance(stated, dict):
        return str(stated)
    place = ".".join(str(part) for part in stated.get("loc", ()) if part != "body")
    return f"{place}: {stated.get('msg', 'is not right')}" if place else str(stated.get("msg", "is not right"))


def _nonempty_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _code(status: int) -> str:
    return "engine_" + _phrase(status).lower().replace(" ", "_").replace("-", "_")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "error"


# --- what engines say in words ---

_MESSAGES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
_RENAMED: Final[Mapping[bytes, Mapping[str, str]]] = {
    b"/v1/responses": {
        "max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "response_id": "previous_response_id"
    },
    b"/v1/messages": _MESSAGES,
    b"/v1/messages/count_tokens": _MESSAGES,
}  # fmt: skip
"""vLLM's names of members, because it turns the request into a chat, and the client's."""
_TOO_LONG = (
    *("maximum context length", "exceeds the available context size", "maximum model length"),
    *("longer than the model's context length", "should not exceed max_seq_len"),
)
_TOO_MANY_LOGPROBS = "Requested sample logprobs"
_NO_PROMPT = (
    "Cannot apply chat template to an empty conversation",
    "You must pass at least one prompt",
    "The decoder prompt cannot be empty",
)
_TEXT_ALONE = (" is not a multimodal model", "(s) may be provided in one prompt", "Unsupported chat content part type")
_PYTHON = ("object is not", "object has no", "object of type", "must be Union[", "argument of type")
"""Signs of an exception in the engine that a value of the request caused."""
_NOT_SERVED = ("Not Found", "The model does not support ", "This server does not support ")
_NO_SUCH_MODEL = ("The model `", "` does not exist")
_REPORT = re.compile(r"[0-9]+ validation errors?[ :]")
_FIRST_WORD = re.compile(r"`?([a-z][a-z0-9_]*)")
_VERBS = ("must", "cannot", "contains", "is not", "are not")
_MEMBER = re.compile(r"[a-z][a-z0-9_]*")
"""The parts of a place that a client wrote; the rest are names of types."""


def _too_long(path: bytes, error: EngineError) -> EngineError | None:
    if error.status != HTTPStatus.BAD_REQUEST or not _has(error, _TOO_LONG):
        return None
    bare = _without_suffix(error)
    # Clients of Anthropic's API recognize it by these words, because it has no codes.
    opening = "prompt is too long: " if form_of(path) is ErrorForm.ANTHROPIC else ""
    return replace(bare, message=opening + bare.message, code=CONTEXT_LENGTH_EXCEEDED, param=prompt_member_of(path))


def _no_such_model(_path: bytes, error: EngineError) -> EngineError | None:
    opening, ending = _NO_SUCH_MODEL
    if error.status != HTTPStatus.NOT_FOUND or not error.message.startswith(opening) or ending not in error.message:
        return None
    message = error.message.partition(ending)[0] + ending
    return replace(error, message=message, code="model_not_found", param="model")


def _not_served(path: bytes, error: EngineError) -> EngineError | None:
    """Another model may serve it, so the engine did not fail."""
    row = CELL_PATHS.get(path)
    if row is None or error.status not in {404, 501} or not error.message.startswith(_NOT_SERVED):
        return None
    what = f"makes no {row.what}" if row.counting is Counting.PROMPT_USAGE else "has another API"
    message = f"This model {what}, so {path.decode()} is not available for it"
    return replace(error, status=404, message=message, code="unsupported_model", param="model")


def _not_of_this_model(path: bytes, error: EngineError) -> EngineError | None:
    if "thinking_token_budget" in error.message and "reasoning" in error.message:
        param, message = "thinking", 'This model does not think: leave `thinking` out, or send {"type": "disabled"}'
    elif "--tool-call-parser" in error.message:
        param, message = "tools", "This model does not call tools: leave `tools` and `tool_choice` out"
    elif _has(error, _TEXT_ALONE):
        param, message = prompt_member_of(path), "This model takes text alone: no images, sounds, videos or files"
    else:
        return None
    return replace(error, message=message, code="unsupported_parameter", param=param)


_NOT_ENFORCED = "JSON schema contains features not supported by xgrammar"
_UNREAD_SCHEMA = "JSON schema error at "


def _not_enforced(_path: bytes, error: EngineError) -> EngineError | None:
    """A schema that vLLM's or llama.cpp's library does not support."""
    if (at := error.message.find(_UNREAD_SCHEMA)) >= 0:
        message = f"The JSON schema of `response_format` cannot be enforced, {error.message[at:]}"
        return replace(error, message=message, code="invalid_value", param="response_format")
    if _NOT_ENFORCED not in error.message:
        return None
    message = (
        "A JSON schema of the request has a keyword that this model cannot enforce: leave out `multipleOf`, "
        "`uniqueItems`, `contains`, uncommon values of `format`, `pattern` or `format` with a length, several schemas "
        "in `allOf`, and `patternProperties` or `propertyNames` with other rules for properties"
    )
    return replace(error, message=message, code="invalid_value", param=None)


_UNREAD = re.compile(r"Failed to parse (messages|tools): |'([a-z_]{1,40})' is required|(vector::_M_range_check)")
_OF_TEXT_MODELS = ("image input is not supported", "audio input is not supported")


def _unread_by_llama_cpp(path: bytes, error: EngineError) -> EngineError | None:
    """Bodies that llama.cpp cannot read, to which it answers 500: they must not count against the cell."""
    if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    if error.message.startswith(_OF_TEXT_MODELS):
        message = "This model takes text alone: no images, sounds, videos or files"
        member = prompt_member_of(path)
        return replace(error, status=400, message=message, code="unsupported_parameter", param=member, kind=None)
    if (found := _UNREAD.match(error.message)) is None:
        return None
    member = found[1] or found[2]
    text = error.message.partition("; tools = ")[0] if member else "A value of the request is out of its range"
    code = "missing_required_parameter" if found[2] else "invalid_value"
    return replace(error, status=400, message=text, code=code, param=member, kind=None)


def _no_prompt(path: bytes, error: EngineError) -> EngineError | None:
    if not error.message.startswith(_NO_PROMPT):
        return None
    param = prompt_member_of(path)
    return replace(error, message=f"`{param}` must not be empty", code="invalid_value", param=param)


def _report(path: bytes, error: EngineError) -> EngineError | None:
    """A body that does not fit the schema: a sentence per place, and the code of the first."""
    found = list(_problems(path, error.message)) if _REPORT.match(error.message) else []
    if not found:
        return None
    kind, place, text = first = max(found, key=_aptness)
    sentences = list(dict.fromkeys(_sentence(place, text) for _, place, text in (first, *found)))
    param = _member_of(place) or _member_of(_parameter_path(error.param or "")) or _first_word(text)
    return replace(error, message="; ".join(sentences[:_MOST_PROBLEMS]), code=_code_of(kind), param=param)


def _aptness(problem: tuple[str, str, str]) -> tuple[bool, int]:
    """For a member with several forms: the error of the closest form, which has the right type, or the deepest
    error."""
    kind, place, _ = problem
    return kind in {"too_long", "too_short"}, place.count(".") + place.count("[")


def _problems(path: bytes, report: str) -> Iterator[tuple[str, str, str]]:
    """For each line of a report: pydantic's type of the error, its place, and its text. FastAPI writes them in Python's
    notation, `{'type': 'missing', 'loc': 'body.n', 'msg': 'Field required', …}`. For a part of the prompt they are
    text: the place on one line, and `  Field required [type=missing, …]` on the next."""
    before = ""
    for line in report.split("\n"):
        if line.startswith("  {'type': "):
            kind, place, text = (_quoted(line, name) for name in ("type", "loc", "msg"))
            yield kind, _parameter_path(place), _unprefixed(text)
        elif line.startswith("  ") and " [type=" in line:
            text, _, rest = line.strip().partition(" [type=")
            place = f"{prompt_member_of(path)}[…].content{_names(before)}"
            yield rest.partition(",")[0].rstrip("]"), place, _unprefixed(text)
        before = line


def _quoted(line: str, name: str) -> str:
    at = line.find(f"'{name}': ") + len(name) + 4
    quote = line[at : at + 1]
    ends = [end for end in (line.find(f"{quote}, '", at + 1), line.find(f"{quote}}}", at + 1)) if end >= 0]
    return line[at + 1 : min(ends, default=len(line))].replace("\\'", "'")


def _unprefixed(text: str) -> str:
    return text.removeprefix("Value error, ")


def _sentence(place: str, text: str) -> str:
    if not place:
        return text
    return f"Missing required parameter: `{place}`" if text == "Field required" else f"`{place}`: {text}"


def _parameter_path(stated: str) -> str:
    """`body.messages.0.content` as `messages[0].content`. Empty for a place without a name, which is in the text."""
    names = _names(stated.removeprefix("body."))
    return "" if stated == "body" or names.startswith("[") else names.removeprefix(".")


def _names(stated: str) -> str:
    parts = [part for part in stated.split(".") if _MEMBER.fullmatch(part) or part.isdecimal()]
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def _member_of(place: str) -> str | None:
    return re.split(r"[.\[]", place)[0] or None


def _first_word(text: str) -> str | None:
    """The member at the beginning of a sentence, such as "n must be at least 1"."""
    subject, _, rest = text.partition(" ")
    found = _FIRST_WORD.match(subject)
    return found[1] if found is not None and rest.startswith(_VERBS) else None


def _code_of(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    if kind == "json_invalid":
        return "invalid_json"
    return "invalid_type" if kind.endswith(("_type", "_parsing", "_from_float")) else "invalid_value"


def _without_suffix(error: EngineError) -> EngineError:
    """Removes the suffix of vLLM's own validation errors, ` (parameter=n, value=0)`."""
    at = max(error.message.rfind(" (parameter="), error.message.rfind(" (value="))
    if at < 0 or not error.message.endswith(")"):
        return error
    stated = error.message[at:-1].removeprefix(" (parameter=").partition(",")[0]
    param = None if stated.startswith(" (value=") else stated
    return replace(error, message=error.message[:at], param=error.param or param)


def _has(error: EngineError, texts: tuple[str, ...]) -> bool:
    return any(text in error.message for text in texts)


def _switched_off(_path: bytes, error: EngineError) -> EngineError | None:
    """Features of an engine that its command line enables, which the client cannot choose."""
    if not _has_flag(error.message):
        return None
    bare = _without_suffix(error)
    param = bare.param or _first_word(bare.message) or ("chat_template" if "Chat template" in bare.message else None)
    kept = " ".join(each for each in _sentences(bare.message) if not _has_flag(each))
    message = kept or f"`{param or 'a member of the request'}` is not available for this model"
    return replace(bare, message=message, code="unsupported_parameter", param=param)


def _sentences(text: str) -> list[str]:
    first, *others = text.split(". ")
    return [first + "." * bool(others), *(each + "." * (number < len(others)) for number, each in enumerate(others, 1))]


def _has_flag(text: str) -> bool:
    words = (word.strip("`'\"(),.") for word in text.split())
    return any(word.startswith("--") and len(word) > 4 for word in words)


def _value(path: bytes, error: EngineError) -> EngineError | None:
    """A value out of its range, or in conflict with another."""
    if error.code is not None or not 400 <= error.status < 500:
        return None
    bare = _without_suffix(error)
    if _has(bare, _PYTHON):
        message = "A value of the request has a type that the engine cannot use: compare it with the API's reference"
        return replace(bare, message=message, code="invalid_type", param=None)
    param = _member_of(_parameter_path(bare.param or "")) or _first_word(bare.message)
    if param is None and "structured outputs" in bare.message:
        param = "structured_outputs"
    if bare.message.endswith("}"):
        bare = replace(bare, message=bare.message.partition(": {'")[0])
    if param == "logprobs" and bare.message.startswith(_TOO_MANY_LOGPROBS) and path == CHAT_PATH:
        param = "top_logprobs"
    renamed = _RENAMED.get(path, {}).get(param or "")
    if param is not None and renamed is not None:
        bare, param = replace(bare, message=re.sub(rf"\b{param}\b", renamed, bare.message)), renamed
    code = "invalid_type" if bare.message.endswith("must be an integer.") else "invalid_value"
    return replace(bare, code=None if param is None else code, param=param)


_RULES: Final[tuple[Callable[[bytes, EngineError], EngineError | None], ...]] = (
    _unread_by_llama_cpp,
    _too_long,
    _no_such_model,
    _not_served,
    _not_of_this_model,
    _not_enforced,
    _no_prompt,
    _report,
    _switched_off,
    _value,
)


MAX_HELD_BYTES = 256 * 1024
"""Maximum of an error answer that is parsed. FastAPI's repeats the request. Of a longer one only the status is kept."""


class ErrorAnswer:
    """One error answer of an engine to a request for `path`, kept until it is complete."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._buffer = b""

    def add(self, piece: bytes) -> None:
        if len(self._buffer) <= MAX_HELD_BYTES:
            self._buffer += piece

    def in_form(self, head: ResponseHead) -> tuple[ResponseHead, bytes]:
        error = read_error(self._path, head.status, _stated(self._buffer))
        body = b"" if head.bodiless else error_in_form(self._path, error)
        described = {b"content-type", b"content-encoding"}
        headers = [pair for pair in head.headers if pair[0] not in described]
        headers.append((b"content-type", b"application/json"))
        reason = head.reason if error.status == head.status else HTTPStatus(error.status).phrase.encode()
        return ResponseHead(error.status, reason, headers, len(body), chunked=False, is_stream=False), body


def error_in_form(path: bytes, error: EngineError) -> bytes:
    kind = error.kind if error.kind in OPENAI_TYPES else None
    stated = error_object(form_of(path), error.status, error.message, code=error.code, param=error.param, kind=kind)
    return msgspec.json.encode(stated)


def _stated(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if len(body) <= MAX_HELD_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode("utf-8", "replace")
