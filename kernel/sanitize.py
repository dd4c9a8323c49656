"""Makes what came from outside storable: PostgreSQL takes no NUL, neither in text nor in jsonb, and the tail of a log
that a crash cut short is full of them. Changes nothing else. What people sent is not changed but refused, by its
place."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from django.db import DataError, IntegrityError

UNSTORABLE_ERRORS = (DataError, IntegrityError, ValueError, OverflowError, RecursionError)
"""What comes of storing a thing that no column takes: a number out of range, a text too long, a nesting too deep."""

_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
_NUL = re.compile(r"\\(?:\\|u0000)")
"""Or a backslash that is escaped itself, so that what follows it is none of these."""


def json_without_nul(encoded: bytes) -> str:
    """The same JSON with U+FFFD, the replacement character, in the place of every NUL."""
    text = encoded.decode()
    return _NUL.sub(_without_nul, text) if "\\u0000" in text else text


def _without_nul(found: re.Match[str]) -> str:
    return "\\ufffd" if found[0].endswith("0") else found[0]


def unstorable_texts(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of texts that no column takes, with a NUL or half of a surrogate, in a value of JSON; for a
    name, that of what it names a part of."""
    if isinstance(value, str):
        if _NO_TEXT.search(value):
            yield path
    elif isinstance(value, Mapping):
        yield from (path for name in value if _NO_TEXT.search(name))
        for name, part in value.items():
            yield from unstorable_texts(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from unstorable_texts(part, f"{path}.{index}" if path else str(index))
