"""Serializers that take their fields from columns of a table, refuse unknown fields, and name the caller.

A column states its type, bounds and help text once, in `models.py`. `RecordSerializer` shows it and `ColumnsSerializer`
accepts it; OpenAPI, command line and documents follow from these."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from django.db.models import Field, ForeignKey, JSONField, Model
from msgspec import inspect
from rest_framework import serializers
from rest_framework.request import Request

from kernel.models import Event

_Row = TypeVar("_Row", bound=Model)
_LONGEST_ACTOR = Event._meta.get_field("actor").max_length


def actor_of(request: Request) -> str:
    """Returns the caller's user name, cut to the length of event rows."""
    return request.user.get_username()[:_LONGEST_ACTOR]


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses unknown fields, so that a misspelt one is not ignored."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := sorted(set(map(str, data)) - set(self.fields))):
            allowed = ", ".join(self.fields)
            raise serializers.ValidationError(
                {name: serializers.ErrorDetail(f"unknown field; allowed: {allowed}", "unknown") for name in unknown}
            )
        return super().to_internal_value(data)


def validated(accepted: type[serializers.Serializer[Any]], fields: Any) -> dict[str, Any]:
    """Raises ValidationError for fields that the serializer refuses."""
    given = accepted(data=fields)
    given.is_valid(raise_exception=True)
    return dict(given.validated_data)


def body_of(request: Request, accepted: type[serializers.Serializer[Any]]) -> dict[str, Any]:
    """Returns the validated fields of a request's body."""
    return validated(accepted, request.data)


_ONLY_ACCEPTED = frozenset({"required", "default", "allow_blank", "max_length", "min_value", "max_value", "validators"})
"""Options of a field that restrict what it accepts, and that a field that is only shown must not have."""


def column_field(column: "Field[Any, Any]", **options: Any) -> serializers.Field[Any, Any, Any, Any]:
    """Returns the serializer field of a column: an object or a list for JSON, the name of the other row for a foreign
    key (empty: none), else the type that Django REST framework chooses. `options` override the column's."""
    kind: type[serializers.Field[Any, Any, Any, Any]]
    if isinstance(column, ForeignKey):
        kind = _NameField
        own: dict[str, Any] = {"max_length": column.target_field.max_length}
        own |= {"source": column.attname} if options.get("read_only") else {}
        own |= {"required": False, "allow_blank": True, "default": ""} if column.null else {}
    elif isinstance(column, JSONField):
        kind = serializers.DictField if column.default is dict else serializers.ListField
        own = {} if kind is serializers.DictField else {"child": serializers.CharField()}
        own["required"] = not column.has_default()
    else:
        kind, own = serializers.ModelSerializer().build_standard_field(column.name, column)
        if kind is serializers.SlugField:  # its pattern refuses the empty string, which a column may allow
            kind, own = serializers.CharField, {key: value for key, value in own.items() if key != "allow_unicode"}
    if help_text := str(column.help_text):
        own["help_text"] = help_text
    if options.get("read_only"):
        own = {name: value for name, value in own.items() if name not in _ONLY_ACCEPTED}
    return kind(**{**own, **options})


class _NameField(serializers.CharField):
    def get_attribute(self, instance: Any) -> Any:
        return super().get_attribute(instance) or ""


class RecordSerializer(serializers.ModelSerializer[_Row]):
    """Shows the columns that `Meta.fields` names with the model's types and help texts, and what the class declares."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        declared = copy.deepcopy(self._declared_fields)
        column = self.Meta.model._meta.get_field  # type: ignore[attr-defined]
        return {
            name: declared[name] if name in declared else column_field(column(name), read_only=True)
            for name in self.Meta.fields
        }


class ColumnsSerializer(StrictSerializer):
    """Accepts the columns `Meta.columns` of `Meta.model` with the model's types, bounds and help texts, and what the
    class declares."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        meta = self.Meta  # type: ignore[attr-defined]
        declared = super().get_fields()
        columns = (meta.model._meta.get_field(name) for name in meta.columns if name not in declared)
        return {column.name: column_field(column) for column in columns} | declared


def struct_fields(
    struct: type[msgspec.Struct], help_texts: Mapping[str, str], *, required: bool = True
) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
    """Returns serializer fields by the types of a struct, without those that are structs. Services check its bounds."""
    types = {field.name: inspect.type_info(field.type) for field in msgspec.structs.fields(struct)}
    return {
        name: _struct_field(kind, help_text=help_texts[name], required=required)
        for name, kind in types.items()
        if not isinstance(kind, inspect.StructType)
    }


def _struct_field(kind: inspect.Type, **options: Any) -> serializers.Field[Any, Any, Any, Any]:
    match kind:
        case inspect.Metadata(type=inner):
            return _struct_field(inner, **options)
        case inspect.UnionType(types=types):
            [inner] = [each for each in types if not isinstance(each, inspect.NoneType)]
            return _struct_field(inner, allow_null=True, **options)
        case inspect.DictType(value_type=inner):
            return serializers.DictField(child=_struct_field(inner), **options)
        case inspect.VarTupleType(item_type=inner):
            return serializers.ListField(child=_struct_field(inner), **options)
        case inspect.EnumType(cls=values):
            return serializers.ChoiceField(
                [(value.value, value.name.replace("_", " ").capitalize()) for value in values], **options
            )
        case inspect.LiteralType(values=values):
            return serializers.ChoiceField(list(values), **options)
    return _FIELDS[type(kind)](**options)


_FIELDS: dict[type[inspect.Type], type[serializers.Field[Any, Any, Any, Any]]] = {
    inspect.BoolType: serializers.BooleanField,
    inspect.FloatType: serializers.FloatField,
    inspect.IntType: serializers.IntegerField,
    inspect.StrType: serializers.CharField,
}


class WhySerializer(StrictSerializer):
    """An action's reason in the operator's words."""

    why = serializers.CharField(
        required=False, allow_blank=True, max_length=200, default="", help_text="Your reason, for the timeline."
    )
