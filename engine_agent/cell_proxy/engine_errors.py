"""Reads what an engine states of an error, whatever server it is: a sentence, a code and the member that is wrong, in
the terms of a client that never heard of the engine. Pure.

Sources: vLLM 0.32 (`vllm/entrypoints/serve/exception_handling/`), whose codes are numbers and whose validation errors
are Python's; FastAPI (`{"detail": …}`); llama.cpp's server; text-generation-inference.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from engine_agent.cell_proxy.api_paths import CELL_PATHS, CHAT_PATH, form_of, prompt_member_of
from engine_agent.protocol.api_surface import CONTEXT_LENGTH_EXCEEDED, Counting, ErrorForm

MAX_MESSAGE_CHARS = 2000
_MOST_PROBLEMS = 3
"""Of a body that is wrong in many places, or fits none of the many forms that one member may have."""


@dataclass(frozen=True, slots=True)
class EngineError:
    """One error. `kind` and `code`: the engine's own words for them; None: it has none, or only a number."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    kind: str | None = None


def read_error(path: bytes, status: int, stated: Any) -> EngineError:
    """An error that an engine stated as JSON, or as text, to a request for this path."""
    error = stated.get("error") if isinstance(stated, dict) else None
    given = error if isinstance(error, dict) else stated if isinstance(stated, dict) else {}
    read = EngineError(
        status,
        _message(given.get("message") if given else None, stated, status),
        *(_text(given.get(name)) for name in ("code", "param", "type")),
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
    """One of FastAPI's, `{"loc": ["body", "prompt"], "msg": "Field required", …}`."""
    if not isinstance(stated, dict):
        return str(stated)
    place = ".".join(str(part) for part in stated.get("loc", ()) if part != "body")
    return f"{place}: {stated.get('msg', 'is not right')}" if place else str(stated.get("msg", "is not right"))


def _text(value: Any) -> str | None:
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
"""Members as vLLM names them, which makes a chat of the request, and as the client does."""
_TOO_LONG = ("maximum context length", "exceeds the available context size", "maximum model length")
_TOO_MANY_LOGPROBS = "Requested sample logprobs"
_NO_PROMPT = (
    "Cannot apply chat template to an empty conversation",
    "You must pass at least one prompt",
    "The decoder prompt cannot be empty",
)
_TEXT_ALONE = (" is not a multimodal model", "(s) may be provided in one prompt", "Unsupported chat content part type")
_PYTHON = ("object is not", "object has no", "object of type", "must be Union[", "argument of type")
"""Of an exception in the engine, which a value of the request caused."""
_NOT_SERVED = ("Not Found", "The model does not support ", "This server does not support ")
_NO_SUCH_MODEL = ("The model `", "` does not exist")
_REPORT = re.compile(r"[0-9]+ validation errors?[ :]")
_FIRST_WORD = re.compile(r"`?([a-z][a-z0-9_]*)")
_VERBS = ("must", "cannot", "contains", "is not", "are not")
_MEMBER = re.compile(r"[a-z][a-z0-9_]*")
"""Of a place, what a client wrote; the rest are names of types."""


def _too_long(path: bytes, error: EngineError) -> EngineError | None:
    if error.status != HTTPStatus.BAD_REQUEST or not _has(error, _TOO_LONG):
        return None
    bare = _without_suffix(error)
    # Clients of Anthropic's API know it by these words, for it has no codes.
    opening = "prompt is too long: " if form_of(path) is ErrorForm.ANTHROPIC else ""
    return replace(bare, message=opening + bare.message, code=CONTEXT_LENGTH_EXCEEDED, param=prompt_member_of(path))


def _no_such_model(_path: bytes, error: EngineError) -> EngineError | None:
    opening, ending = _NO_SUCH_MODEL
    if error.status != HTTPStatus.NOT_FOUND or not error.message.startswith(opening) or ending not in error.message:
        return None
    message = error.message.partition(ending)[0] + ending
    return replace(error, message=message, code="model_not_found", param="model")


def _not_served(path: bytes, error: EngineError) -> EngineError | None:
    """Another model may serve it, so the engine has not failed."""
    row = CELL_PATHS.get(path)
    if row is None or error.status not in {404, 501} or not error.message.startswith(_NOT_SERVED):
        return None
    what = f"makes no {row.what}" if row.counting is Counting.PROMPT_USAGE else "has another API"
    message = f"This model {what}, so {path.decode()} is not available for it"
    return replace(error, status=404, message=message, code="unsupported_model", param="model")


def _not_of_this_model(path: bytes, error: EngineError) -> EngineError | None:
    """What a version of the model, or its options, would have to be another for."""
    if "thinking_token_budget" in error.message and "reasoning" in error.message:
        param, message = "thinking", 'This model does not think: leave `thinking` out, or send {"type": "disabled"}'
    elif "--tool-call-parser" in error.message:
        param, message = "tools", "This model does not call tools: leave `tools` and `tool_choice` out"
    elif _has(error, _TEXT_ALONE):
        param, message = prompt_member_of(path), "This model takes text alone: no images, sounds, videos or files"
    else:
        return None
    return replace(error, message=message, code="unsupported_parameter", param=param)


def _no_prompt(path: bytes, error: EngineError) -> EngineError | None:
    if not error.message.startswith(_NO_PROMPT):
        return None
    param = prompt_member_of(path)
    return replace(error, message=f"`{param}` must not be empty", code="invalid_value", param=param)


def _report(path: bytes, error: EngineError) -> EngineError | None:
    """A body that does not fit: a sentence for each place, and the code of the first."""
    found = list(_problems(path, error.message)) if _REPORT.match(error.message) else []
    if not found:
        return None
    kind, place, text = first = max(found, key=_aptness)
    sentences = list(dict.fromkeys(_sentence(place, text) for _, place, text in (first, *found)))
    param = _member_of(place) or _member_of(_place(error.param or "")) or _first_word(text)
    return replace(error, message="; ".join(sentences[:_MOST_PROBLEMS]), code=_code_of(kind), param=param)


def _aptness(problem: tuple[str, str, str]) -> tuple[bool, int]:
    """Of a member that may have several forms, what is wrong with the one that came closest: it has the right type, or
    the problem is deepest inside."""
    kind, place, _ = problem
    return kind in {"too_long", "too_short"}, place.count(".") + place.count("[")


def _problems(path: bytes, report: str) -> Iterator[tuple[str, str, str]]:
    """For each line of a report pydantic's type of a problem, its place, and its text. FastAPI writes them in Python's
    notation, `{'type': 'missing', 'loc': 'body.n', 'msg': 'Field required', …}`; of a part of the prompt they are text:
    the place on one line, and `  Field required [type=missing, …]` on the next.
    """
    before = ""
    for line in report.split("\n"):
        if line.startswith("  {'type': "):
            kind, place, text = (_quoted(line, name) for name in ("type", "loc", "msg"))
            yield kind, _place(place), _unprefixed(text)
        elif line.startswith("  ") and " [type=" in line:
            text, _, rest = line.strip().partition(" [type=")
            place = f"{prompt_member_of(path)}[…].content{_names(before)}"
            yield rest.partition(",")[0].rstrip("]"), place, _unprefixed(text)
        before = line


def _quoted(line: str, name: str) -> str:
    """The text under a name of a dictionary in Python's notation."""
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


def _place(stated: str) -> str:
    """`body.messages.0.content` as `messages[0].content`. A place without a name is in the text itself."""
    names = _names(stated.removeprefix("body."))
    return "" if stated == "body" or names.startswith("[") else names.removeprefix(".")


def _names(stated: str) -> str:
    parts = [part for part in stated.split(".") if _MEMBER.fullmatch(part) or part.isdecimal()]
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def _member_of(place: str) -> str | None:
    return re.split(r"[.\[]", place)[0] or None


def _first_word(text: str) -> str | None:
    """The member that a sentence begins with, such as of "n must be at least 1"."""
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
    """Without what vLLM adds to the text of its own validation errors, ` (parameter=n, value=0)`."""
    at = max(error.message.rfind(" (parameter="), error.message.rfind(" (value="))
    if at < 0 or not error.message.endswith(")"):
        return error
    stated = error.message[at:-1].removeprefix(" (parameter=").partition(",")[0]
    param = None if stated.startswith(" (value=") else stated
    return replace(error, message=error.message[:at], param=error.param or param)


def _has(error: EngineError, texts: tuple[str, ...]) -> bool:
    return any(text in error.message for text in texts)


def _switched_off(_path: bytes, error: EngineError) -> EngineError | None:
    """What an engine would do if it was started in another way, which is not for the client to choose."""
    if not _has_flag(error.message):
        return None
    bare = _without_suffix(error)
    param = bare.param or _first_word(bare.message) or ("chat_template" if "Chat template" in bare.message else None)
    kept = " ".join(each for each in _sentences(bare.message) if not _has_flag(each))
    message = kept or f"`{param or 'a member of the request'}` is not available for this model"
    return replace(bare, message=message, code="unsupported_parameter", param=param)


def _sentences(text: str) -> list[str]:
    """Split after full stops: a name such as `a.b` is no end."""
    first, *others = text.split(". ")
    return [first + "." * bool(others), *(each + "." * (number < len(others)) for number, each in enumerate(others, 1))]


def _has_flag(text: str) -> bool:
    """Whether it names one of the command line that the engine was started with."""
    words = (word.strip("`'\"(),.") for word in text.split())
    return any(word.startswith("--") and len(word) > 4 for word in words)


def _value(path: bytes, error: EngineError) -> EngineError | None:
    """A value that is out of its range, or does not go with another."""
    if error.code is not None or not 400 <= error.status < 500:
        return None
    bare = _without_suffix(error)
    if _has(bare, _PYTHON):
        message = "A value of the request has a type that the engine cannot use: compare it with the API's reference"
        return replace(bare, message=message, code="invalid_type", param=None)
    param = _member_of(_place(bare.param or "")) or _first_word(bare.message)
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
    _too_long,
    _no_such_model,
    _not_served,
    _not_of_this_model,
    _no_prompt,
    _report,
    _switched_off,
    _value,
)
