"""The part of a stream that the application has, to cut it from the same answer by another ingress. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from switchyard_client.answers import BrokenOff, Event

_PLAIN_TYPES: Final = frozenset({
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed", "response.incomplete",
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
    "message_stop", "ping",
})  # fmt: skip
_PLAIN_PARTS: Final = frozenset({"text", "text_delta", "message", "output_text"})
_PLAIN_MEMBERS: Final = frozenset({"role", "content"})


class Resumption:
    """Follows one stream and its repeats. Only a stream whose events are the text of one answer can be repeated: other
    events, such as those of a tool call, may be divided differently."""

    def __init__(self) -> None:
        self.can_repeat = True
        self._text = ""
        self._after = 0
        """Events without text since the last text."""
        self._ahead = 0
        """Characters that the repeat still has to give before its events are new."""
        self._dropped = 0
        """Events without text that the repeat still has to give after those."""

    def repeat(self) -> None:
        """The next event is the first one of a repeat."""
        self._ahead, self._dropped = len(self._text), self._after

    def fresh(self, event: Event) -> Event | None:
        """Returns the new part of an event; None if the application has all of it. Raises BrokenOff if the repeat is
        another answer."""
        self.can_repeat = self.can_repeat and _is_plain(event.json)
        text = event.text
        if self._ahead:
            return self._cut(event, text)
        if self._dropped and not text:
            self._dropped -= 1
            return None
        self._dropped = 0
        self._note(text)
        return event

    def _cut(self, event: Event, text: str) -> Event | None:
        at = len(self._text) - self._ahead
        shown, new = text[: self._ahead], text[self._ahead :]
        if self._text[at : at + len(shown)] != shown:
            self.can_repeat = False
            raise BrokenOff("the stream broke off, and its repeat is another answer")
        self._ahead -= len(shown)
        if not new:
            return None
        self._dropped = 0
        self._note(new)
        return Event(event.name, _with_text(event.json, new))

    def _note(self, text: str) -> None:
        self._text += text
        self._after = 0 if text else self._after + 1


def _is_plain(body: Mapping[str, Any]) -> bool:
    if (kind := body.get("type")) is not None:
        parts = [body.get(name) for name in ("delta", "content_block", "item", "part")]
        types = {str(part.get("type", "text")) for part in parts if isinstance(part, Mapping)}
        return kind in _PLAIN_TYPES and types <= _PLAIN_PARTS
    for choice in body.get("choices") or ():
        members = {name for name, value in (choice.get("delta") or {}).items() if value}
        if choice.get("index") or choice.get("logprobs") or not members <= _PLAIN_MEMBERS:
            return False
    return True


def _with_text(body: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The event with another text, in the member from which `Event.text` reads it."""
    for choice in body.get("choices") or ():
        delta = choice.get("delta")
        changed = {**choice, "text": text} if delta is None else {**choice, "delta": {**delta, "content": text}}
        return {**body, "choices": [changed]}
    delta = body["delta"]
    return {**body, "delta": text if isinstance(delta, str) else {**delta, "text": text}}
