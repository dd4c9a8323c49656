"""Parses JSON from untrusted senders so that every reader of the same text finds the same content. Pure. JSON does not
define duplicate members (RFC 8259, 4): HAProxy takes the first, Python the last. It limits neither depth nor numbers
nor the characters of names. This module rejects text on which readers can disagree or that a reader cannot handle. It
checks the shape before anything recursive reads the text. `json.loads` is for JSON that we wrote."""

import json
import re
from math import isfinite
from typing import Any, Final, NoReturn

DEEPEST: Final = 64
"""Levels of objects and lists. OpenAI's structured outputs allow schemas of 10 levels, about 25 levels of JSON in a
request. Parsers of engines and of HAProxy recurse, and Python's stops at 1,000."""
LONGEST_NAME_CHARS: Final = 1024
"""The longest names in requests are properties of a schema."""
MOST_CONTAINERS: Final = 50_000
"""Objects and lists in one text. Each costs a reader about 0.5 µs; a chat of 10,000 messages has 30,000."""
MOST_VALUES: Final = 1_000_000
"""Values in one text: a prompt of a million token ids."""
_BRACKET = re.compile(r"[\[{\]}]")
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_CHARS_PER_NUMBER = 32
"""Checking a number costs as much as searching so many characters for a long one."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUL = "\\u0000"


def strict_loads(text: str | bytes, *, deepest: int = DEEPEST, any_text: bool = False) -> Any:
    """Parses a JSON text. `any_text`: accepts NULs in names and halves of surrogate pairs, for callers that report
    their place.

    Raises:
        ValueError: the text is not JSON in UTF-8; has a duplicate member, a name that is too long or has a NUL, half of
            a
        surrogate pair, NaN, Infinity or a number over 64 bits; is nested deeper than `deepest`; or has too many values.
            The message names the problem."""
    text = _checked_text(text) if isinstance(text, str) else text.decode()  # json.loads would guess other encodings
    commas = text.count(",")
    if text.count("{") + text.count("[") > deepest or commas >= MOST_VALUES:
        _check_shape(_without_strings(text), deepest)  # count again without the characters in strings
    has_few_numbers = commas * _CHARS_PER_NUMBER < len(text)
    value = (_LONG_NUMBERS if has_few_numbers or _LONG_NUMBER.search(text) else _DECODER).decode(text)
    if any_text or "\\u" not in text:
        return value
    if _SURROGATE.search(text):
        _checked_text(json.dumps(value, ensure_ascii=False))
    if _NUL in text:
        _check_names(value)
    return value


def _without_strings(text: str) -> str:
    """Text that is not JSON is cut wrongly only after its first backslash outside a string, where a reader stops."""
    return "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not a character") from None
    return text


def _check_shape(marks: str, deepest: int) -> None:
    """`marks`: the text without its strings."""
    depth = containers = 0
    for bracket in _BRACKET.finditer(marks):
        is_opening = bracket[0] in "[{"
        depth += 1 if is_opening else -1
        containers += is_opening
        if depth > deepest:
            raise ValueError(f"nested deeper than {deepest} levels")
        if containers > MOST_CONTAINERS:
            raise ValueError(f"more than {MOST_CONTAINERS} objects and lists")
    if marks.count(",") >= MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")


def _checked_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(members)
    if len(by_name) != len(members):
        seen: set[str] = set()
        twice = next(name for name, _ in members if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the member {twice[:80]!r} is there twice; name each member once")
    if by_name and len(longest := max(by_name, key=len)) > LONGEST_NAME_CHARS:
        raise ValueError(f"the member {longest[:80]!r}… has a name of more than {LONGEST_NAME_CHARS} characters")
    return by_name


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _checked_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"the number {text[:40]} has more than 64 bits")
    return int(text)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_checked_object, parse_constant=_no_number, parse_float=_finite)
_LONG_NUMBERS: Final = json.JSONDecoder(
    object_pairs_hook=_checked_object, parse_constant=_no_number, parse_float=_finite, parse_int=_checked_int
)


def _check_names(value: Any) -> None:
    layer = [value]
    while layer := [part for part in layer if isinstance(part, dict | list)]:
        for part in layer:
            if isinstance(part, dict) and any("\0" in name for name in part):
                name = next(name for name in part if "\0" in name)
                raise ValueError(f"the member {name[:80]!r} has a NUL in its name")
        layer = [inner for part in layer for inner in (part.values() if isinstance(part, dict) else part)]
