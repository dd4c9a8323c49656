"""POST /tokenize and /detokenize: texts as tokens, and back."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from engine_agent.engines.sim.api.chat_requests import tool_texts, tools_of
from engine_agent.engines.sim.planning.generation_request import Prompt
from engine_agent.engines.sim.text.vocabulary import TokenTexts
from engine_agent.protocol.request_bodies import BadRequest, Message, TokenId, ToolField, read_body


class TokenizeBody(Struct, kw_only=True):
    """A text, or a conversation, whose tokens are those that a chat would be counted by."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[ToolField] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


_tokenize = msgspec.json.Decoder(TokenizeBody, strict=False)
_detokenize = msgspec.json.Decoder(DetokenizeBody, strict=False)


def parse_tokenize(body: bytes) -> tuple[TokenizeBody, Prompt]:
    """The body, and what is to be read.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    given = read_body(_tokenize, body)
    if given.messages is not None:
        texts = tuple(message.text() for message in given.messages)
        return given, Prompt((*tool_texts(tools_of(given.tools)), *texts), answered=texts[-1])
    if given.prompt is None:
        message = "either `prompt` or `messages` must be given"
        raise BadRequest(message, param="prompt", code="missing_required_parameter")
    return given, Prompt.of_text(given.prompt)


def tokenize_body(given: TokenizeBody, prompt: Prompt, texts: TokenTexts, max_model_len: int) -> bytes:
    """The answer of /tokenize."""
    tokens = prompt.token_texts()
    ids = texts.ids_of(tokens)
    strings = list(tokens) if given.return_token_strs else None
    said = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
    return msgspec.json.encode(said)


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """The body.

    Raises:
        BadRequest: not JSON, or a field is missing or wrong.
    """
    return read_body(_detokenize, body)
