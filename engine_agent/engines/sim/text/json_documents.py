"""JSON documents that satisfy a JSON schema, for structured output and for the arguments of tool calls.

A document is written from the schema and then judged by it; where the parts of a schema constrain each other so that
it does not fit, it is written again from other random numbers. What never fits is refused.
"""

import base64
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from engine_agent.engines.sim.text.answers import LEXICON
from engine_agent.engines.sim.text.json_schemas import (
    SchemaDocument,
    SchemaError,
    is_multiple,
    items_of,
    number,
    part,
    types_of,
)
from engine_agent.engines.sim.text.patterns import BadPattern, matching_text

_ATTEMPTS = 12
_MODEST_DEPTH = 4
"""From here on only what must be there is written."""
_DEEPEST = 40
_MOST_ITEMS = 200
_LONGEST_TEXT = 10_000
_USUAL_SPAN = 100


def write_document(schema: Any, source: random.Random) -> Any:
    """A value that satisfies `schema`.

    Raises:
        SchemaError: the schema is wrong, too large, has what the simulator does not know, or nothing was found that
            satisfies it.
    """
    document = SchemaDocument(schema)
    for _ in range(_ATTEMPTS):
        value = _Writer(document, source).value(schema, 0)
        if document.satisfies(value, schema):
            return value
    raise SchemaError("sim found no document that satisfies the schema")


class _Endless(SchemaError):
    """What must be there must hold itself again; somewhere above, another choice may end."""


class _Writer:
    def __init__(self, document: SchemaDocument, source: random.Random) -> None:
        self._document = document
        self._source = source
        self._by_type: Mapping[str, Callable[[Mapping[str, Any], int], Any]] = {
            "null": lambda _rules, _depth: None,
            "boolean": lambda _rules, _depth: self._source.random() < 0.5,
            "integer": lambda rules, _depth: self._number(rules, whole=True),
            "number": lambda rules, _depth: self._number(rules, whole=False),
            "string": lambda rules, _depth: self._text(rules),
            "array": self._array,
            "object": self._object,
        }

    def value(self, schema: Any, depth: int) -> Any:
        """One value. Its parts fit each other only by chance where several schemas apply at once."""
        if depth > _DEEPEST:
            raise _Endless("the schema has no end: what it requires requires itself again")
        rules = self._document.resolved(schema)
        if rules is False:
            raise SchemaError("the schema `false` admits nothing")
        if rules is True or not rules:
            return self._words(2)
        rules = self._merged(rules, depth)
        if "const" in rules:
            return rules["const"]
        if "enum" in rules:
            return self._option(rules)
        for name in ("anyOf", "oneOf"):
            if name in rules:
                return self._one_of(rules, name, depth)
        return self._by_type[self._kind(rules)](rules, depth)

    def _merged(self, rules: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """The rules with those of `allOf`, member by member; properties and what is required come together."""
        parts = part(rules, "allOf", list, [])
        merged = {name: value for name, value in rules.items() if name != "allOf"}
        for one in parts:
            more = self._document.resolved(one)
            if isinstance(more, bool):
                continue
            if depth > _DEEPEST:
                raise _Endless("the schema has no end: `allOf` holds itself again")
            for name, value in self._merged(more, depth + 1).items():
                merged[name] = _joined(name, merged[name], value) if name in merged else value
        return merged

    def _option(self, rules: Mapping[str, Any]) -> Any:
        options = part(rules, "enum", list, [])
        own = {name: value for name, value in rules.items() if name != "enum"}
        self._document.spend(len(options))
        fitting = [one for one in options if self._document.satisfies(one, own)]
        if not fitting:
            raise SchemaError("nothing in `enum` satisfies the schema")
        return self._source.choice(fitting)

    def _one_of(self, rules: Mapping[str, Any], name: str, depth: int) -> Any:
        beside = {key: value for key, value in rules.items() if key != name}
        options = self._source.sample(part(rules, name, list, []), k=len(rules[name]))
        if depth >= _MODEST_DEPTH:
            # Those that refer to nothing end soonest.
            options.sort(key=lambda option: isinstance(option, Mapping) and not _is_flat(option))
        ended: SchemaError = SchemaError(f"`{name}` admits nothing")
        for option in options:
            try:
                return self.value({"allOf": [beside, option]}, depth + 1)
            except _Endless as error:
                ended = error
        raise ended

    def _kind(self, rules: Mapping[str, Any]) -> str:
        names = types_of(rules)
        if names:
            simple = [name for name in names if name not in {"array", "object"}]
            return self._source.choice(simple if simple and self._source.random() < 0.5 else names)
        for kind, keywords in _KEYWORDS.items():
            if not keywords.isdisjoint(rules):
                return kind
        return "string"

    def _number(self, rules: Mapping[str, Any], *, whole: bool) -> int | float:
        low, high = _bounds(rules, whole=whole)
        step = number(rules, "multipleOf")
        if step is not None:
            return self._multiple(low, high, step, whole=whole)
        if whole:
            return self._source.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
        for digits in (2, 6, 12):
            value = round(self._source.uniform(low, high), digits)
            if low <= value <= high and value not in {rules.get("exclusiveMinimum"), rules.get("exclusiveMaximum")}:
                return value
        return (low + high) / 2

    def _multiple(self, low: float, high: float, step: float, *, whole: bool) -> int | float:
        is_multiple(0, step)
        try:
            first = math.ceil(low / step)
            last = max(first, math.floor(high / step))
            for _ in range(_ATTEMPTS):
                value = self._source.randint(first, last) * step
                rounded = math.floor(value)
                if value == rounded or not whole:
                    value = rounded if value == rounded else value
                    if is_multiple(value, step):
                        return value
            return first * step
        except OverflowError as error:
            raise SchemaError("`multipleOf` is too fine for these bounds") from error

    def _text(self, rules: Mapping[str, Any]) -> str:
        least, most = number(rules, "minLength") or 0, number(rules, "maxLength")
        if least > _LONGEST_TEXT:
            raise SchemaError(f"`minLength` is {least}: sim writes texts of at most {_LONGEST_TEXT} letters")
        if "pattern" in rules:
            return self._patterned(part(rules, "pattern", str, ""), least, most)
        if rules.get("format") in _FORMATS:
            return _FORMATS[rules["format"]](self._source)
        text = self._words(self._source.randint(1, 3))
        while len(text) < least:
            text += f" {self._words(4)}"
        wanted = len(text) if most is None else int(most)
        return text[: max(wanted, 0)] if len(text) > wanted or least == most else text

    def _patterned(self, pattern: str, least: float, most: float | None) -> str:
        text = ""
        try:
            for _ in range(_ATTEMPTS):
                text = matching_text(pattern, self._source)
                if len(text) >= least and (most is None or len(text) <= most):
                    break
        except BadPattern as error:
            raise SchemaError(f"`pattern`: {error}") from error
        return text

    def _array(self, rules: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = part(rules, "prefixItems", list, []), items_of(rules)
        least, most = int(number(rules, "minItems") or 0), number(rules, "maxItems")
        if least > _MOST_ITEMS:
            raise SchemaError(f"`minItems` is {least}: sim writes at most {_MOST_ITEMS} items")
        usual = max(least, len(first) if first else self._source.randint(1, 3))
        wanted = least if depth >= _MODEST_DEPTH or (rest is False and not first) else usual
        wanted = min(wanted, _MOST_ITEMS if most is None else int(most))
        items: list[Any] = []
        for index in range(wanted):
            try:
                item = self.value(first[index] if index < len(first) else rest, depth + 1)
                for _ in range(_ATTEMPTS if rules.get("uniqueItems") is True and item in items else 0):
                    item = self.value(first[index] if index < len(first) else rest, depth + 1)
                    if item not in items:
                        break
            except _Endless:
                if index < least:
                    raise
                break
            if rules.get("uniqueItems") is not True or item not in items:
                items.append(item)
        return items

    def _object(self, rules: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = part(rules, "properties", dict, {})
        required = part(rules, "required", list, [])
        least, most = number(rules, "minProperties") or 0, number(rules, "maxProperties")
        others = rules.get("additionalProperties", True)
        written: dict[str, Any] = {}
        for name in (*properties, *(name for name in required if name not in properties)):
            if not isinstance(name, str):
                raise SchemaError(f"`required` is wrong: {required!r:.60}")
            is_wanted = depth < _MODEST_DEPTH and self._source.random() < 0.7
            has_room = most is None or len(written) < most - len(set(required) - written.keys())
            if name not in required and not (has_room and (is_wanted or len(written) < least)):
                continue
            try:
                written[name] = self.value(properties.get(name, others), depth + 1)
            except _Endless:
                if name in required:
                    raise
        self._add_others(written, others, least if properties or depth else max(least, 1), depth)
        return written

    def _add_others(self, written: dict[str, Any], others: Any, least: float, depth: int) -> None:
        """Names of its own, where the schema wants more of them than it names."""
        if others is False:
            return
        if least > _MOST_ITEMS:
            raise SchemaError(f"`minProperties` is {least}: sim writes at most {_MOST_ITEMS}")
        for name in (*LEXICON, *LEXICON):
            if len(written) >= least:
                return
            written.setdefault(name if name not in written else f"{name}_{len(written)}", self.value(others, depth + 1))

    def _words(self, count: int) -> str:
        return " ".join(self._source.choices(LEXICON, k=count))


_KEYWORDS = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
"""What tells the type of a value where `type` does not."""


def _joined(name: str, one: Any, other: Any) -> Any:
    """What two schemas say under the same name, as one; where they cannot be joined, the later, and then the judge
    decides."""
    if name == "properties" and isinstance(one, dict) and isinstance(other, dict):
        both = {key: {"allOf": [one[key], other[key]]} for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if name == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(key for key in other if key not in one)]
    if name in {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}:
        return max(one, other) if isinstance(one, int | float) and isinstance(other, int | float) else other
    if name in {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}:
        return min(one, other) if isinstance(one, int | float) and isinstance(other, int | float) else other
    if name in {"items", "additionalProperties"}:
        return {"allOf": [one, other]}
    if name == "enum" and isinstance(one, list) and isinstance(other, list):
        return [key for key in one if key in other]
    if name == "pattern" and one != other:
        raise SchemaError("two `pattern` for one text are not supported by sim")
    return other


def _is_flat(option: Mapping[str, Any]) -> bool:
    return option.get("type") in {"null", "boolean", "integer", "number", "string"} or "const" in option


def _bounds(rules: Mapping[str, Any], *, whole: bool) -> tuple[float, float]:
    lows = [number(rules, "minimum"), number(rules, "exclusiveMinimum")]
    highs = [number(rules, "maximum"), number(rules, "exclusiveMaximum")]
    if whole:
        lows[1] = None if lows[1] is None else math.floor(lows[1]) + 1
        highs[1] = None if highs[1] is None else math.ceil(highs[1]) - 1
    high = min((bound for bound in highs if bound is not None), default=None)
    usual_low = 0 if high is None or high >= 0 else high - _USUAL_SPAN
    low = max((bound for bound in lows if bound is not None), default=usual_low)
    return low, low + _USUAL_SPAN if high is None else max(low, high)


def _date(source: random.Random) -> str:
    return f"20{source.randint(10, 39)}-{source.randint(1, 12):02}-{source.randint(1, 28):02}"


def _time(source: random.Random) -> str:
    return f"{source.randint(0, 23):02}:{source.randint(0, 59):02}:{source.randint(0, 59):02}Z"


def _uuid(source: random.Random) -> str:
    text = f"{source.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


_FORMATS: Mapping[str, Callable[[random.Random], str]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda source: f"{_date(source)}T{_time(source)}",
    "duration": lambda source: f"PT{source.randint(1, 59)}M",
    "email": lambda source: f"{source.choice(LEXICON)}@example.com",
    "hostname": lambda source: f"{source.choice(LEXICON)}.example.com",
    "ipv4": lambda source: f"192.0.2.{source.randint(1, 254)}",
    "ipv6": lambda source: f"2001:db8::{source.randint(1, 9999):x}",
    "uri": lambda source: f"https://example.com/{source.choice(LEXICON)}",
    "uuid": _uuid,
    "byte": lambda source: base64.b64encode(source.choice(LEXICON).encode()).decode(),
}
