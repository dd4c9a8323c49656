"""Whether a JSON value satisfies a JSON schema, for the keywords that the simulator knows. It reads draft 2020-12.

`pattern` and `format` are not looked at: no text is matched against a client's expression.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class SchemaError(ValueError):
    """A JSON schema that is wrong, that nothing satisfies, or that has what the simulator does not do; the text says
    what."""


_UNKNOWN = frozenset(
    {
        *("$dynamicRef", "dependencies", "dependentRequired", "dependentSchemas", "patternProperties", "propertyNames"),
        *("contains", "maxContains", "minContains", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_ANNOTATIONS = frozenset(
    {
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples"),
        *("readOnly", "title", "writeOnly"),
    }
)
_DEEPEST = 64
_MOST_STEPS = 100_000
"""What one document may cost, some 0.2 s: parts of a schema that refer to each other twice grow without end."""

Schema = bool | Mapping[str, Any]


@dataclass
class SchemaDocument:
    """A whole schema, whose parts refer to each other. Its methods raise SchemaError for what is wrong in it, or not
    known to the simulator."""

    root: Any
    steps: int = 0

    def spend(self, steps: int) -> None:
        """Count work against what one document may cost."""
        self.steps += steps
        if self.steps > _MOST_STEPS:
            raise SchemaError("the schema is too large for sim")

    def resolved(self, schema: Any, links: int = 0) -> Schema:
        """The schema itself, `$ref` followed within the document and joined with what stands beside it."""
        self.spend(1)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"a schema is an object, not {schema!r:.60}")
        if unknown := sorted(_UNKNOWN & schema.keys()):
            raise SchemaError(f"`{unknown[0]}` is not supported by sim")
        if "$ref" not in schema:
            return schema
        if links > _DEEPEST:
            raise SchemaError("`$ref` leads round in a circle")
        target = self.resolved(self._target(schema["$ref"]), links + 1)
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        return {"allOf": [target, beside]} if beside.keys() - _ANNOTATIONS else target

    def satisfies(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Whether `value` satisfies `schema`, a part of this document."""
        if depth > _DEEPEST:
            raise SchemaError("the schema lies too deep")
        rules = self.resolved(schema)
        if isinstance(rules, bool):
            return rules
        names = types_of(rules)
        options = part(rules, "enum", list, [])
        self.spend(len(options))
        return (
            (not names or any(_TYPES[name](value) for name in names))
            and ("const" not in rules or is_same(value, rules["const"]))
            and ("enum" not in rules or any(is_same(value, one) for one in options))
            and self._combinations_hold(value, rules, depth + 1)
            and self._own_rules_hold(value, rules, depth + 1)
        )

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"`$ref` leads out of the document: {reference!r:.80}")
        found = self.root
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name[:6]) < len(found):
                found = found[int(name[:6])]
            else:
                raise SchemaError(f"`$ref` leads to nothing: {reference:.80}")
        return found

    def _combinations_hold(self, value: Any, rules: Mapping[str, Any], depth: int) -> bool:
        def fits(schema: Any) -> bool:
            return self.satisfies(value, schema, depth)

        return (
            all(map(fits, part(rules, "allOf", list, [])))
            and ("anyOf" not in rules or any(map(fits, part(rules, "anyOf", list, []))))
            and ("oneOf" not in rules or sum(map(fits, part(rules, "oneOf", list, []))) == 1)
            and ("not" not in rules or not fits(rules["not"]))
            and ("if" not in rules or fits(rules.get("then" if fits(rules["if"]) else "else", True)))
        )

    def _own_rules_hold(self, value: Any, rules: Mapping[str, Any], depth: int) -> bool:
        if isinstance(value, str):
            return _within(len(value), rules, "minLength", "maxLength")
        if isinstance(value, list):
            return self._array_holds(value, rules, depth)
        if isinstance(value, dict):
            return self._object_holds(value, rules, depth)
        return value is None or isinstance(value, bool) or _number_holds(value, rules)

    def _array_holds(self, value: list[Any], rules: Mapping[str, Any], depth: int) -> bool:
        first, rest = part(rules, "prefixItems", list, []), items_of(rules)
        self.spend(len(value) ** 2 if rules.get("uniqueItems") is True else 0)
        if rules.get("uniqueItems") is True and any(
            is_same(one, two) for i, one in enumerate(value) for two in value[:i]
        ):
            return False
        return _within(len(value), rules, "minItems", "maxItems") and all(
            self.satisfies(item, first[i] if i < len(first) else rest, depth) for i, item in enumerate(value)
        )

    def _object_holds(self, value: dict[str, Any], rules: Mapping[str, Any], depth: int) -> bool:
        properties = part(rules, "properties", dict, {})
        others = rules.get("additionalProperties", True)
        return (
            _within(len(value), rules, "minProperties", "maxProperties")
            and all(name in value for name in part(rules, "required", list, []))
            and all(self.satisfies(item, properties.get(name, others), depth) for name, item in value.items())
        )


def part(schema: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A member of a schema.

    Raises:
        SchemaError: it is of another type.
    """
    value = schema.get(name, default)
    if isinstance(value, kind):
        return value
    raise SchemaError(f"`{name}` is wrong: {value!r:.60}")


def items_of(schema: Mapping[str, Any]) -> Any:
    """The schema of items beyond `prefixItems`.

    Raises:
        SchemaError: it is a list, as older drafts had it.
    """
    if isinstance(schema.get("items"), list):
        raise SchemaError("`items` as a list is not supported by sim; its name since draft 2020-12 is `prefixItems`")
    return schema.get("items", True)


def number(schema: Mapping[str, Any], name: str) -> int | float | None:
    """A bound of a schema; None: it has none.

    Raises:
        SchemaError: it is no number.
    """
    value = schema.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise SchemaError(f"`{name}` is no number: {value!r:.60}")


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that `type` admits; none: it says nothing.

    Raises:
        SchemaError: there is no such type.
    """
    given = schema.get("type", [])
    names = tuple(given) if isinstance(given, list) else (given,)
    for name in names:
        if name not in _TYPES:
            raise SchemaError(f"`type` is wrong: {name!r:.60}")
    return names


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def is_same(one: Any, other: Any) -> bool:
    """Equal as JSON: True is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _within(size: float, rules: Mapping[str, Any], least: str, most: str) -> bool:
    low, high = number(rules, least), number(rules, most)
    return (low is None or size >= low) and (high is None or size <= high)


def _number_holds(value: float, rules: Mapping[str, Any]) -> bool:
    above, below = number(rules, "exclusiveMinimum"), number(rules, "exclusiveMaximum")
    step = number(rules, "multipleOf")
    return (
        _within(value, rules, "minimum", "maximum")
        and (above is None or value > above)
        and (below is None or value < below)
        and (step is None or is_multiple(value, step))
    )


def is_multiple(value: float, step: float) -> bool:
    """Whether `value` is a multiple of `step`, judged as floats are.

    Raises:
        SchemaError: there are no multiples of it.
    """
    if step <= 0:
        raise SchemaError(f"`multipleOf` is not positive: {step}")
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    try:
        quotient = value / step
        return quotient == int(quotient)
    except OverflowError:
        return False
