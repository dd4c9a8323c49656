"""Bodies of chats and completions with the types and ranges of vLLM's members. The simulator answers by these, and the
control plane checks near-real-time requests by them. Pure. Source: the request models of vLLM 0.32 and its
`SamplingParams._verify_args`; tests compare both with one table (tests/engine_agent/engines/request_table.py). JSON is
read as leniently as in vLLM: a number may be a text."""

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Answers = Annotated[int, Meta(ge=1, le=128)]
"""`n`: OpenAI's limit."""
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopK = Annotated[int, Meta(ge=-1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(gt=0)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
STOPS_AT_MOST = 4
MOST_LOGPROBS = 20
"""vLLM's default of `--max-logprobs`, and OpenAI's limit."""


class Modality(StrEnum):
    """Content of a message in addition to text."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


MODALITY_OF_PART: Mapping[str, Modality] = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_embeds"), Modality.IMAGE),
    **dict.fromkeys(("audio_url", "input_audio"), Modality.AUDIO),
    "video_url": Modality.VIDEO,
}
"""Type of a part -> its modality, over all APIs."""
_MEDIA = frozenset({*MODALITY_OF_PART, "file", "document"})
_TEXTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_MAY_HAVE_NO_CONTENT = frozenset({"assistant", "function"})

B = TypeVar("B")


class BadRequest(ValueError):
    """A request that cannot be served. `param` names the member, `status` is the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class SharedMembers(Struct, kw_only=True):
    """Members with the same type and meaning on every path. An engine may fail at values outside these ranges."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    user: str | None = None


class SamplingMembers(SharedMembers, kw_only=True):
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    n: Seed | None = None
    max_tokens: Seed | None = None
    max_completion_tokens: Seed | None = None
    max_output_tokens: Seed | None = None
    min_tokens: Seed | None = None
    prompt_logprobs: Seed | None = None
    top_logprobs: Seed | None = None
    truncate_prompt_tokens: Seed | None = None
    thinking_token_budget: Seed | None = None
    stop_token_ids: list[Seed] | None = None
    allowed_token_ids: list[Seed] | None = None
    bad_words: list[str] | None = None


class EngineMembers(SharedMembers, kw_only=True):
    """Members that chats, completions and responses share."""

    model: str
    stream: bool | None = None
    top_k: TopK | None = None
    priority: Seed | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Salt | None = None


class StreamOptions(Struct):
    """`include_usage` requests a last chunk with the token counts, `continuous_usage_stats` counts in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaField(Struct):
    name: str
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaField | None = None


class StructuredOutputs(Struct):
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Any = None
    json_object: bool | None = None
    structural_tag: Any = None


class SamplingBody(EngineMembers, kw_only=True):
    """Members that chats and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: NotNegative | None = None
    n: Answers | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ContentPart(Struct):
    type: str
    text: str | UnsetType | None = UNSET
    image_url: Any = None


class CalledFunction(Struct):
    """An earlier call, as the client sends it back."""

    name: str
    arguments: str = ""


class ToolCall(Struct):
    function: CalledFunction | None = None


class Message(Struct):
    role: str
    content: str | list[ContentPart] | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | None = None

    def text(self) -> str:
        """Returns its text, parts joined by spaces, followed by its calls."""
        calls = [f"{call.function.name} {call.function.arguments}" for call in self.tool_calls or () if call.function]
        if isinstance(self.content, list):
            return " ".join([*(part.text for part in self.content if part.text), *calls])
        return " ".join([*([self.content] if self.content else []), *calls])


class FunctionField(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(Struct):
    function: FunctionField
    type: Literal["function"] = "function"


class ChoiceFunction(Struct):
    name: str


class NamedChoice(Struct):
    """`tool_choice` as an object."""

    function: ChoiceFunction
    type: Literal["function"] = "function"


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class CompletionBody(SamplingBody, kw_only=True):
    """`prompt` is a text, a list of texts, of token ids or of lists of token ids."""

    prompt: Any = None
    n: Answers = 1
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None


_chat = msgspec.json.Decoder(ChatBody, strict=False)
_completion = msgspec.json.Decoder(CompletionBody, strict=False)


def check_body(path: str, body: bytes) -> None:
    """Checks the body of a chat or completion, by its path. Raises BadRequest if it is not JSON, or a member is missing
    or wrong."""
    if path == "/v1/chat/completions":
        check_chat(read_body(_chat, body), frozenset(Modality))  # the cell knows which of them its version serves
    elif path == "/v1/completions":
        check_completion(read_body(_completion, body))


def read_body(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    """Raises BadRequest if the body is not JSON, or a member is missing or wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _bad_member(str(error)) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deep", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error


def check_sampling_members(request: Mapping[str, Any]) -> None:
    """Checks `SamplingMembers` of a request for any path. Raises BadRequest if one has a wrong type, or is out of its
    range."""
    try:
        msgspec.convert(request, SamplingMembers, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_member(str(error)) from None


_PLACE = re.compile(r" - at `\$\.?(?P<place>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def _bad_member(message: str) -> BadRequest:
    """Returns a sentence about the member instead of msgspec's message."""
    found, missing = _PLACE.search(message), _MISSING.match(message)
    place = found["place"].replace("[...]", "") if found else ""
    text = message[: found.start()] if found else message
    if missing:
        place = f"{place}.{missing['name']}".removeprefix(".")
        code, text = "missing_required_parameter", f"Missing required parameter: `{place}`"
    else:
        code = "invalid_type" if ", got `" in text else "invalid_value"
        text = f"`{place}`: {text[:1].lower()}{text[1:]}" if place else text
    return BadRequest(text, re.split(r"[.\[]", place)[0] or None, code=code)


def check_chat(chat: ChatBody, modalities: Collection[str] = ()) -> None:
    """Checks what types alone do not express. Raises BadRequest if a value conflicts with another, or has no
    meaning. `modalities`: those that the model takes in addition to text."""
    check_sampling(chat)
    param = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    check_limit(chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens, param)
    for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs"):
        if getattr(chat, name) is not None:
            raise BadRequest(f"`{name}` is not available for this model", param=name, code="unsupported_parameter")
    if not chat.messages:
        raise BadRequest("`messages` must not be empty", param="messages")
    for number, message in enumerate(chat.messages):
        if message.content is None and message.role not in _MAY_HAVE_NO_CONTENT:
            text = f"`messages[{number}].content`: expected a text or a list of parts, got null"
            raise BadRequest(text, param="messages", code="invalid_type")
        check_parts(message.content, "messages", modalities)
    if chat.top_logprobs and not chat.logprobs:
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    check_logprobs(chat.top_logprobs or 0, "top_logprobs")


def check_completion(completion: CompletionBody) -> None:
    """Raises BadRequest as for `check_chat`."""
    check_sampling(completion)
    for name in ("suffix", "prompt_embeds"):
        if getattr(completion, name) is not None:
            code = "unsupported_parameter" if name == "prompt_embeds" else None
            raise BadRequest(f"`{name}` is not available for this model", param=name, code=code)
    if completion.logprobs is not None:
        check_logprobs(completion.logprobs, "logprobs")
    check_prompt(completion.prompt, "prompt")
    if not (completion.echo and completion.max_tokens == 0):
        check_limit(completion.max_tokens, "max_tokens")


def check_sampling(body: SamplingBody) -> None:
    """Checks the members that chats and completions share. Raises BadRequest as for `check_chat`."""
    options = body.stream_options
    if options is not None and options != StreamOptions() and not body.stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.temperature == 0 and (body.n or 1) > 1:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {body.n}.", param="n")
    check_stops(body.stop, "stop")
    check_bias(body.logit_bias)
    limit = body.max_tokens
    if limit is not None and (body.min_tokens or 0) > max(limit, 0):
        raise BadRequest(f"min_tokens must be at most max_tokens, {limit}, got {body.min_tokens}", param="min_tokens")
    if body.structured_outputs == StructuredOutputs():
        raise BadRequest("You must use one kind of structured outputs constraint", param="structured_outputs")
    if body.prompt_logprobs is not None:
        check_logprobs(body.prompt_logprobs, "prompt_logprobs")
        if body.stream and body.prompt_logprobs > 0:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")


def check_limit(tokens: int | None, param: str) -> None:
    """Raises BadRequest if the answer could have no token at all."""
    if tokens is not None and tokens < 1:
        raise BadRequest(f"{param} must be at least 1, got {tokens}.", param=param)


def check_logprobs(count: int, param: str) -> None:
    """Raises BadRequest if more log probabilities are requested than engines return."""
    if not 0 <= count <= MOST_LOGPROBS:
        raise BadRequest(f"`{param}` must be 0 to {MOST_LOGPROBS}, got {count}", param=param)


def check_stops(stop: str | list[str] | None, param: str) -> None:
    """Raises BadRequest if a stop text is empty, or there are more than OpenAI's API allows."""
    texts = [stop] if isinstance(stop, str) else stop or []
    if "" in texts:
        raise BadRequest(f"`{param}` cannot contain an empty string.", param=param)
    if len(texts) > STOPS_AT_MOST:
        raise BadRequest(f"`{param}` has at most {STOPS_AT_MOST} texts, got {len(texts)}", param=param)


def check_bias(given: dict[str, float] | None) -> None:
    """Raises BadRequest if a name is not a token id."""
    if any(re.fullmatch("[0-9]{1,19}", name) is None for name in given or ()):
        raise BadRequest("`logit_bias`: each name must be a token id", param="logit_bias")


def check_parts(content: Any, param: str, modalities: Collection[str] = ()) -> None:
    """Raises BadRequest if a part of a message is neither a text nor of these modalities."""
    for part in content if isinstance(content, list) else ():
        if part.type == "image_url" and not isinstance(part.image_url, dict):
            message = f"`{param}` has a part of type image_url without an object `image_url`"
            raise BadRequest(message, param=param, code="invalid_type")
        if MODALITY_OF_PART.get(part.type) in modalities:
            continue
        if part.type in _MEDIA:
            raise part_not_taken(part.type, param, modalities)
        if part.type not in _TEXTS:
            raise BadRequest(f"`{param}` has a part of type {part.type!r:.60}, which is unknown", param=param)
        if part.type == "text" and not isinstance(part.text, str):
            code = "missing_required_parameter" if part.text is UNSET else "invalid_type"
            raise BadRequest(f"`{param}` has a part of type text without a text", param=param, code=code)


def part_not_taken(kind: str, param: str, modalities: Collection[str]) -> BadRequest:
    """The refusal of a part that the model does not take."""
    taken = f"text and {', '.join(sorted(modalities))}" if modalities else "text alone"
    message = f"This model takes {taken}: `{param}` has a part of type {kind}"
    return BadRequest(message, param=param, code="unsupported_parameter")


def check_prompt(given: Any, param: str) -> None:
    """Raises BadRequest if it is not a text, token ids or a list of either, or one of them is empty."""
    if given in (None, "", []):
        raise BadRequest(f"`{param}` must not be empty", param=param)
    listed = given if isinstance(given, list) else [given]
    is_list_of = (_all(str, listed), isinstance(given, list) and _are_ids(listed), _all(list, listed))
    if not any(is_list_of) or (is_list_of[2] and not all(_are_ids(one) for one in listed)):
        text = f"`{param}`: expected a text, a list of texts, a list of token ids or a list of such lists"
        raise BadRequest(text, param=param, code="invalid_value" if _has_low_ids(given) else "invalid_type")
    if any(one in ("", []) for one in listed):
        raise BadRequest(f"`{param}` must not be empty", param=param)


def _all(kind: type, listed: list[Any]) -> bool:
    return all(isinstance(one, kind) for one in listed)


def _are_ids(given: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**63 for one in given)


def _has_low_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int for one in given)
