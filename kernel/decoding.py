"""Decodes input of callers: JSON with only one meaning, and texts that PostgreSQL can store. Pure.

Invalid input is refused with its place. Reports of machines are made storable instead (kernel.sanitize)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine_agent.protocol.strict_json import DEEPEST, strict_loads

NO_TEXT = "has a character that is not text: NUL or half of a surrogate pair"

_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


class UnstorableText(ValueError):
    """`places`: the dotted paths of the texts in a value of JSON; "" is the whole."""

    def __init__(self, places: tuple[str, ...]) -> None:
        shown = ", ".join(place[:80].replace("\0", "\ufffd") for place in places[:3] if place)
        super().__init__(f"{shown or 'the value'} {NO_TEXT}")
        self.places = places


def decode_json(text: str | bytes, *, deepest: int = DEEPEST) -> Any:
    """Decodes a caller's JSON. Raises UnstorableText if a text has NUL or half of a surrogate pair. Raises ValueError
    if it is not JSON with only one meaning (`strict_loads`), or nested deeper than `deepest`."""
    value = strict_loads(text, deepest=deepest, any_text=True)
    # JSON can contain these characters only as escapes.
    is_escaped = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
    if is_escaped and (places := tuple(dict.fromkeys(unstorable_texts(value)))):
        raise UnstorableText(places)
    return value


def is_storable(text: str) -> bool:
    """Whether a text column can store this."""
    return _NO_TEXT.search(text) is None


def unstorable_texts(value: Any, path: str = "") -> Iterator[str]:
    """Yields the dotted paths of texts in a JSON value that no column can store; for a key, the path of its object."""
    if isinstance(value, str):
        if not is_storable(value):
            yield path
    elif isinstance(value, Mapping):
        yield from (path for name in value if not is_storable(name))
        for name, part in value.items():
            yield from unstorable_texts(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from unstorable_texts(part, f"{path}.{index}" if path else str(index))
