"""A chat request of a browser, validated, and the OpenAI request for the ingress that it becomes. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel.decoding import decode_json
from kernel.refusals import InvalidInput

MAX_BODY_BYTES = 256 * 1024
MAX_MESSAGES = 100
MAX_TEXT = 65_536
MAX_TOKENS = 4096
ROLES = ("system", "user", "assistant")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`region`: where the request enters. `key` "": the internal one, where keys are required."""

    deployment: str
    region: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    temperature: float
    key: str

    def body(self) -> bytes:
        """The request for the ingress, in OpenAI's form."""
        return json.dumps(
            {
                "model": self.deployment,
                "messages": self.messages,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


def parse_chat_request(body: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        InvalidInput: it is too long, no JSON, or a field is invalid; the message names it.
    """
    if len(body) > MAX_BODY_BYTES:
        raise _invalid("body", f"this chat is longer than {MAX_BODY_BYTES // 1024} KiB; start a new chat")
    try:
        payload = decode_json(body)
    except ValueError as error:
        raise _invalid("body", f"the request must be JSON: {error}") from None
    if not isinstance(payload, dict):
        raise _invalid("body", "the request must be a JSON object")
    return ChatRequest(
        deployment=_text(payload, "deployment", MAX_NAME),
        region=_text(payload, "region", MAX_NAME),
        messages=_messages(payload.get("messages")),
        max_tokens=int(_number(payload, "max_tokens", 256, 1, MAX_TOKENS)),
        temperature=_number(payload, "temperature", 0.7, 0, 2),
        key=_key(payload.get("key", "")),
    )


def _messages(values: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_MESSAGES:
        raise _invalid("messages", f"a chat has 1 to {MAX_MESSAGES} messages; start a new chat")
    messages = []
    for one in values:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise _invalid("messages", f"each message has a role, one of {', '.join(ROLES)}")
        messages.append({"role": one["role"], "content": _text(one, "content", MAX_TEXT)})
    if messages[-1]["role"] != "user":
        raise _invalid("messages", "the last message must be the user's")
    return tuple(messages)


def _text(payload: Mapping[str, Any], name: str, longest: int) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise _invalid(name, f"{name} must be text of 1 to {longest} characters")
    return value


def _number(payload: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _invalid(name, f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


def _key(value: Any) -> str:
    """It goes into a header, so nothing but a key may pass."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise _invalid("key", "the key must be text")
    if value and not (value.startswith("sw_") and value.isascii() and value.replace("_", "").isalnum()):
        raise _invalid("key", "a Switchyard key starts with sw_ and has only letters, digits and _")
    return value


def _invalid(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, rule="valid", message=message)
