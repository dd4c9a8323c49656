"""Changes typed structs with bounds (`msgspec.Meta`) by user input: validates each field, and describes the first error
in a sentence with the field, its value and the rule. Pure."""

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

S = TypeVar("S", bound=msgspec.Struct)


OTHER_RULES = {inspect.BoolType: "true or false", inspect.NoneType: "null", inspect.DictType: "an object"}
"""Rules by type; other types state theirs in the description of their `msgspec.Meta`."""


class InvalidField(ValueError):
    """A value that breaks a rule. `field` is the dotted path; the text has path, value and rule."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def struct_changed(base: S, stated: Mapping[str, Any], *, path: str) -> S:
    """Returns `base` with the stated fields changed. Nested structs are changed field by field, other values replaced.

    `path` is the name of `base` in messages; fields of a nested struct are `struct.field`. Raises InvalidField for an
    unknown field, or a value of the wrong type or outside its bounds."""
    return _changed(base, stated, path, prefix="")


def _changed(base: S, stated: Any, path: str, prefix: str) -> S:
    if not isinstance(stated, Mapping):
        raise InvalidField(path, f"{path} is {stated!r}; it must be an object")
    types = _field_types(type(base))
    for name in stated:
        if name not in types:
            raise InvalidField(f"{prefix}{name}", f"there is no {prefix}{name}; there are: {', '.join(types)}")
    changes = {name: _value(prefix + name, value, types[name], getattr(base, name)) for name, value in stated.items()}
    return msgspec.structs.replace(base, **changes)


@cache
def _field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _value(path: str, value: Any, kind: Any, before: Any) -> Any:
    if isinstance(before, msgspec.Struct):
        return _changed(before, value, path, prefix=f"{path}.")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _refusal(path, value, kind) from None


def _refusal(path: str, value: Any, kind: Any) -> InvalidField:
    """Returns the error of a value, or of the first wrong entry of an object."""
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        entry_kind = get_args(kind)[1]
        for key, entry in value.items():
            try:
                msgspec.convert(entry, entry_kind)
            except msgspec.ValidationError:
                return _refusal(f"{path}.{key}", entry, entry_kind)
    return InvalidField(path, f"{path} is {value!r}; it must be {_rule(inspect.type_info(kind))}")


def _rule(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            rule = str(schema["description"]) if schema and "description" in schema else _rule(inner)
        case inspect.UnionType(types=types):
            rule = ", or ".join(map(_rule, types))
        case inspect.EnumType(cls=choices):
            rule = " or ".join(str(choice.value) for choice in choices)
        case inspect.LiteralType(values=values):
            rule = " or ".join(map(str, values))
        case inspect.IntType(ge=low, le=high):
            rule = f"a whole number from {low} to {high}"
        case inspect.FloatType(ge=low, le=high):
            rule = f"a number from {low:g} to {high:g}"
        case _:
            rule = OTHER_RULES[type(kind)]
    return rule
