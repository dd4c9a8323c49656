"""Reads JSON that strangers send, so that every reader of the same text finds the same in it. Pure.

JSON leaves open what two members of one name mean (RFC 8259, 4): HAProxy takes the first, Python the last. What is
checked by one reader and acted on by another must not have two meanings, so here such a text is none at all.
`json.loads` is for what we wrote ourselves.
"""

import json
from math import isfinite
from typing import Any, NoReturn

DEEPEST = 200
"""Of objects and lists within each other. Far above every request, and below what recursion over the value can take."""


def strict_loads(text: str | bytes, *, deepest: int = DEEPEST) -> Any:
    """The value that a JSON text states.

    Raises:
        ValueError: it is no JSON in UTF-8, names a member twice, has a number that is none (NaN, Infinity, 1e999), or
            is nested deeper than `deepest`; the text says which.
    """
    try:
        text = text if isinstance(text, str) else text.decode()  # json.loads would guess at other encodings
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {deepest} levels") from None
    _check_depth(value, deepest)
    return value


def _distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(members)
    if len(by_name) == len(members):
        return by_name
    seen: set[str] = set()
    twice = next(name for name, _ in members if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise ValueError(f"the member {twice[:80]!r} is there twice: name each member once")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _check_depth(value: Any, deepest: int) -> None:
    layer, depth = [value], 0
    while layer := [part for part in layer if isinstance(part, dict | list)]:
        depth += 1
        if depth > deepest:
            raise ValueError(f"nested deeper than {deepest} levels")
        layer = [inner for part in layer for inner in (part.values() if isinstance(part, dict) else part)]
