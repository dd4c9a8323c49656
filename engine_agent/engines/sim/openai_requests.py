"""What a client asks for: OpenAI request bodies, checked field by field and brought to one form. Pure."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.sim.answers import count_tokens

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat has none."""


class BadRequest(ValueError):
    """A request that cannot be served as it is. `param` names the field, `status` is the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True)
class GenerationRequest:
    """One request in the form that both endpoints share. `output_limit` None: as long as the answer naturally is.

    `prompt` is what is to be answered, `context` all that is to be read.
    """

    model: str
    prompt: str
    context: str
    prompt_tokens: int
    output_limit: int | None
    exact_length: bool
    seed: int
    priority: int
    stream: bool
    include_usage: bool


Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool | None = None


class ContentPart(Struct):
    """A part of a message; only text counts here."""

    type: str
    text: str | None = None


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None

    def text(self) -> str:
        """Its text, parts joined by spaces."""
        if isinstance(self.content, list):
            return " ".join(part.text for part in self.content if part.text)
        return self.content or ""


class _Common(Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    seed: int | None = None
    priority: int | None = None
    ignore_eos: bool | None = None


class ChatBody(_Common, kw_only=True):
    """POST /v1/chat/completions. Sampling parameters are accepted and have no effect."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


class CompletionBody(_Common, kw_only=True):
    """POST /v1/completions; the prompt is one text or one list of token ids."""

    prompt: Any


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)

B = TypeVar("B")


def parse_chat(body: bytes) -> GenerationRequest:
    """What a chat request asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    chat = _decode(_chat, body)
    texts = [message.text() for message in chat.messages]
    prompt_tokens = sum(map(count_tokens, texts))
    return _generation_request(
        chat, texts[-1], " ".join(texts), prompt_tokens, chat.max_completion_tokens or chat.max_tokens
    )


def parse_completion(body: bytes) -> GenerationRequest:
    """What a completion request asks for.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    completion = _decode(_completion, body)
    prompt, tokens = _prompt_and_tokens(completion.prompt)
    return _generation_request(completion, prompt, prompt, tokens, completion.max_tokens or _DEFAULT_COMPLETION_TOKENS)


def _generation_request(
    body: _Common, prompt: str, context: str, prompt_tokens: int, output_limit: int | None
) -> GenerationRequest:
    options = body.stream_options
    return GenerationRequest(
        model=body.model,
        prompt=prompt,
        context=context,
        prompt_tokens=prompt_tokens,
        output_limit=output_limit,
        exact_length=bool(body.ignore_eos) and output_limit is not None,
        seed=body.seed or 0,
        priority=body.priority or 0,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
    )


def _prompt_and_tokens(prompt: Any) -> tuple[str, int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, count_tokens(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return " ".join(map(str, prompt)), len(prompt)
    raise BadRequest("prompt: expected one text or one list of token ids", param="prompt")


_FIELD = re.compile(r"`\$\.(?P<path>\w+)")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def _decode(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error)) or _MISSING.search(str(error))
        raise BadRequest(str(error), param=field.group(1) if field else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
