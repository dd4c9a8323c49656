"""Properties that make a small schema or pattern a large grammar: counts of repetitions, references that lead back to
themselves without reading anything, and long chains of references. Engines expand or follow them without a limit. Pure.
"""

import re
from collections.abc import Iterator
from typing import Any

_COUNTS = tuple(f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains"))
_PATTERNS = ("pattern", "regex", "grammar")
_CHOICES = ("anyOf", "oneOf", "allOf")
_TOKEN = re.compile(r"\\.|\{(\d*)(?:,(\d*))?\}|.", re.DOTALL)
"""Classes of characters are read like the rest: a bracket may stand in a text of a grammar, and hides nothing."""
_MOST_DIGITS = 12
"""A count with more digits is over any limit."""


def greatest_count(value: Any) -> int:
    """The greatest number of repetitions that a value with schemas and patterns asks for."""
    greatest = 0
    for part in schema_objects(value):
        for name in _COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool):
                greatest = max(greatest, int(count))
        for name in _PATTERNS:
            if isinstance(part.get(name), str):
                greatest = max(greatest, repetitions(part[name]))
        if isinstance(patterns := part.get("patternProperties"), dict):
            greatest = max(greatest, *map(repetitions, patterns), 0)
    return greatest


def repetitions(pattern: str) -> int:
    """How often a regular expression, or the text of a grammar, repeats its most repeated part: counts of groups within
    each other multiply."""
    groups, here, last, greatest = list[int](), 1, 1, 0
    for token in _TOKEN.finditer(pattern):
        match token[0]:
            case "(":
                groups.append(here)
                here = last = 1
            case ")":
                last = here
                here = max(groups.pop(), last) if groups else here
            case "*" | "+" | "?":
                pass
            case text if text.startswith("{") and len(text) > 1:
                last *= max(1, *map(_count, token.groups()))
                here = max(here, last)
                greatest = max(greatest, last)
            case _:
                last = 1
    return greatest


def _count(digits: str | None) -> int:
    digits = digits or "0"
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def has_endless_reference(root: Any) -> bool:
    """Whether a reference of this schema leads back to itself by other references and choices alone."""
    done: set[int] = set()
    for part in schema_objects(root):
        path, ahead = list[int](), [(part, False)]
        while ahead:
            node, is_left = ahead.pop()
            if is_left:
                done.add(path.pop())
            elif id(node) in path:
                return True
            elif id(node) not in done:
                path.append(id(node))
                ahead.append((node, True))
                ahead += ((each, False) for each in _led_to(root, node))
    return False


def levels_with_references(root: Any) -> int:
    """Returns an upper bound for the levels of a schema whose references are followed, each once. Compilers descend
    them recursively, on a stack that ends."""
    order = [root]
    for part in order:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        order += (each for each in inner if isinstance(each, dict | list))
    levels: dict[int, int] = {}
    for part in reversed(order):
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        levels[id(part)] = 1 + max((levels[id(each)] for each in inner if isinstance(each, dict | list)), default=0)
    names = {part["$ref"] for part in order if isinstance(part, dict) and isinstance(part.get("$ref"), str)}
    if any(name != "#" and not name.startswith("#/") for name in names):
        return len(order)  # Names of `$id` and `$anchor` are not resolved here.
    return levels[id(root)] + sum(levels.get(id(_resolved(root, name)), 0) for name in names)


def _led_to(root: Any, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = [_resolved(root, node["$ref"])] if isinstance(node.get("$ref"), str) else []
    for name in _CHOICES:
        found += node[name] if isinstance(node.get(name), list) else []
    return (each for each in found if isinstance(each, dict))


def _resolved(root: Any, reference: str) -> Any:
    place, found = reference.removeprefix("#"), root
    if place == reference:
        return None
    for part in place.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(name)) if re.fullmatch("[0-9]{1,9}", name) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def schema_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Returns every object inside a JSON value, itself included, level by level."""
    layer = [value]
    while layer := [part for part in layer if isinstance(part, dict | list)]:
        yield from (part for part in layer if isinstance(part, dict))
        layer = [inner for part in layer for inner in (part.values() if isinstance(part, dict) else part)]
