"""Strong ETags of single objects, and what `If-Match` and `If-None-Match` say about them. Pure.

A tag has two halves: a digest of what was laid down or decided, and one of the whole representation, measurements too.
The tag as a whole changes with every byte, so it is strong. `If-Match` compares the first half only: a load that was
measured anew is no reason to refuse a write.
"""

import hashlib
from collections.abc import Set
from typing import Any

from rest_framework.renderers import JSONRenderer

SHOWN = frozenset({"retrieve", "partial_update", "update"})
"""Actions whose answer is the object itself, as it is read."""
_HALF = 20
"""Hexadecimal digits: 80 bits, far beyond chance."""


def etag_of(representation: Any, measured: Set[str] = frozenset()) -> str:
    """The tag, in its quotes. `measured`: names of fields, at any depth, that only say what was measured."""
    return f'"{_digest(_without(representation, measured))}-{_digest(representation)}"'


def is_named(present: str, header: str) -> bool:
    """`If-None-Match`: whether the header names this very representation. Weak comparison, as RFC 9110 has it."""
    return header.strip() == "*" or present in (tag.removeprefix("W/") for tag in _tags(header))


def permits(present: str, header: str) -> bool:
    """`If-Match`: whether a write may go on. Weak tags never match."""
    return header.strip() == "*" or _state(present) in map(_state, _tags(header))


def _tags(header: str) -> list[str]:
    return [tag.strip() for tag in header.split(",")]


def _state(tag: str) -> str:
    return tag.partition("-")[0]


def _digest(document: Any) -> str:
    return hashlib.sha256(JSONRenderer().render(document)).hexdigest()[:_HALF]


def _without(document: Any, names: Set[str]) -> Any:
    if isinstance(document, dict):
        return {name: _without(value, names) for name, value in document.items() if name not in names}
    return [_without(item, names) for item in document] if isinstance(document, list) else document
