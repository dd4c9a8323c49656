"""What a browser may ask of the playground, checked, and the request for the ingress that it becomes. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel.refusals import InvalidInput

LONGEST_BODY_BYTES = 256 * 1024
MOST_MESSAGES = 100
LONGEST_TEXT = 65_536
MOST_TOKENS = 4096
ROLES = ("system", "user", "assistant")
LONGEST_KEY = 200


@dataclass(frozen=True, slots=True)
class Question:
    """`region`: where the request enters. `key` "": Switchyard's own, if one is required at all."""

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


def question_in(body: bytes) -> Question:
    """What the browser asks.

    Raises:
        InvalidInput: it is too long, no JSON, or a field is wrong; the text names it.
    """
    if len(body) > LONGEST_BODY_BYTES:
        raise _wrong("body", f"this chat is longer than {LONGEST_BODY_BYTES // 1024} KiB; begin a new one")
    try:
        said = json.loads(body)
    except ValueError:
        raise _wrong("body", "the request must be JSON") from None
    if not isinstance(said, dict):
        raise _wrong("body", "the request must be a JSON object")
    return Question(
        deployment=_text(said, "deployment", LONGEST_KEY),
        region=_text(said, "region", LONGEST_KEY),
        messages=_messages(said.get("messages")),
        max_tokens=int(_number(said, "max_tokens", 256, 1, MOST_TOKENS)),
        temperature=_number(said, "temperature", 0.7, 0, 2),
        key=_key(said.get("key", "")),
    )


def _messages(said: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(said, list) or not 1 <= len(said) <= MOST_MESSAGES:
        raise _wrong("messages", f"a chat has 1 to {MOST_MESSAGES} messages; begin a new one")
    found = []
    for one in said:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise _wrong("messages", f"each message has a role, one of {', '.join(ROLES)}")
        found.append({"role": one["role"], "content": _text(one, "content", LONGEST_TEXT)})
    if found[-1]["role"] != "user":
        raise _wrong("messages", "the last message must be the user's")
    return tuple(found)


def _text(said: Mapping[str, Any], name: str, longest: int) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise _wrong(name, f"{name} must be text of 1 to {longest} letters")
    return value


def _number(said: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _wrong(name, f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


def _key(value: Any) -> str:
    """It goes into a header: what is none of our keys must not get there."""
    if not isinstance(value, str) or len(value) > LONGEST_KEY:
        raise _wrong("key", "the key must be text")
    if value and not (value.startswith("sw_") and value.isascii() and value.replace("_", "").isalnum()):
        raise _wrong("key", "a key of Switchyard begins with sw_ and has letters, digits and _ only")
    return value


def _wrong(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, rule="valid", message=message)
