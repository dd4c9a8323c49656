"""Cursor pages `{next, previous, results}`: a list that changes while it is read never repeats or skips rows. A cursor
has the last row's values in the list's order, with the primary key last, so that ties do not matter. Cursors are
signed, and others are rejected without a database query."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core import signing
from django.db.models import F, Model, Q
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import remove_query_param, replace_query_param
from rest_framework.views import APIView

from controlplane.api.filters import MOST_FIELDS, query_parameter

NEXT = "http://127.0.0.1:8000/api/v1/events?cursor=eyJkIjoibiJ9%3A1vMxyz%3Aabc"
_SALT = "controlplane.api.pagination"


@dataclass(frozen=True, slots=True)
class Key:
    """A column to order by. If it is nullable, rows without a value come last."""

    column: str
    descends: bool
    nullable: bool = False


class CursorPages(BasePagination):
    """Orders by `?ordering=`, else by the view's `page_order`; ties by the primary key."""

    page_size = 100
    page_size_query_param = "page_size"
    cursor_query_param = "cursor"
    max_page_size = 1000

    def paginate_queryset(self, queryset: Any, request: Request, view: APIView | None = None) -> list[Any] | None:
        size, keys = self.get_page_size(request), _keys(request, view, queryset.model)
        cursor = _read_cursor(request, keys)
        back = cursor is not None and cursor["b"]
        rows = queryset.order_by(*(_order(key, back) for key in keys))
        if cursor is not None:
            rows = rows.filter(_rows_after(keys, _typed(cursor["v"]), back))
        fetched = list(rows[: size + 1])
        more, page = len(fetched) > size, fetched[:size]
        if back:
            page.reverse()
        self._url = request.build_absolute_uri()
        self._next = self._previous = None
        if page and (more or back):
            self._next = _cursor(keys, page[-1], back=False)
        if page and (more if back else cursor is not None):
            self._previous = _cursor(keys, page[0], back=True)
        return page

    def get_paginated_response(self, data: Any) -> Response:
        return Response({"next": self._link(self._next), "previous": self._link(self._previous), "results": data})

    def _link(self, cursor: str | None) -> str | None:
        if cursor is None:
            return None
        return replace_query_param(remove_query_param(self._url, self.cursor_query_param), "cursor", cursor)

    def get_page_size(self, request: Request) -> int:
        text = request.query_params.get("page_size")
        if text is None:
            return self.page_size
        if not text.isdecimal() or not 1 <= int(text[:5]) <= self.max_page_size:
            message = f"must be a whole number from 1 to {self.max_page_size}, and is {text[:20]!r}"
            raise ValidationError({"page_size": [ErrorDetail(message, "range")]})
        return int(text)

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        link = {"type": ["string", "null"], "format": "uri"}
        return {
            "type": "object",
            "required": ["next", "previous", "results"],
            "properties": {
                "next": {**link, "description": "The following page; null on the last.", "example": NEXT},
                "previous": {**link, "description": "The previous page; null on the first.", "example": None},
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: APIView) -> list[dict[str, Any]]:
        size = {"type": "integer", "minimum": 1, "maximum": self.max_page_size, "default": self.page_size}
        where = "Position of the page. Use the links `next` and `previous` instead of building one."
        return [
            query_parameter(self.cursor_query_param, where, {"type": "string"}),
            query_parameter(self.page_size_query_param, "Results per page.", size),
        ]


def _keys(request: Request, view: Any, model: type[Model]) -> tuple[Key, ...]:
    """The requested order, or that of the view, made total by the primary key."""
    fields = getattr(view, "ordering_fields", ())
    ordering = request.query_params.get("ordering")
    if ordering is None or not fields:
        order = getattr(view, "page_order", "pk")
        return _total([Key(order.removeprefix("-"), order.startswith("-"))])
    names = ordering.split(",")
    unknown = [name for name in names if name.removeprefix("-") not in fields]
    if unknown:
        message = f"cannot order by {unknown[0]!r}; allowed, each also with `-` before it: {', '.join(fields)}"
        raise ValidationError({"ordering": [ErrorDetail(message, "invalid_choice")]})
    if len(names) > MOST_FIELDS:
        raise ValidationError({"ordering": [ErrorDetail(f"may have at most {MOST_FIELDS} fields", "max_length")]})
    return _total([_declared(model, name) for name in names])


def _declared(model: type[Model], name: str) -> Key:
    """Nullable is declared only for nullable columns, because indexes have no such order."""
    field: Any = model._meta.get_field(name.removeprefix("-"))
    return Key(field.attname, name.startswith("-"), field.null)


def _total(keys: list[Key]) -> tuple[Key, ...]:
    return tuple(keys) if keys[-1].column in {"pk", "id"} else (*keys, Key("pk", keys[-1].descends))


def _order(key: Key, back: bool) -> Any:
    """Backwards is the exact mirror, with rows without a value first."""
    last = {"nulls_first" if back else "nulls_last": True} if key.nullable else {}
    return F(key.column).desc(**last) if key.descends != back else F(key.column).asc(**last)


def _rows_after(keys: Sequence[Key], values: Sequence[Any], back: bool) -> Q:
    """Rows after these values: equal in the first columns, and greater in the next."""
    beyond, equal = Q(pk__in=[]), Q()
    for key, value in zip(keys, values, strict=True):
        beyond |= equal & _after(key, value, back)
        equal &= Q(**{f"{key.column}__isnull": True}) if value is None else Q(**{key.column: value})
    return beyond


def _after(key: Key, value: Any, back: bool) -> Q:
    if value is None:
        return Q(**{f"{key.column}__isnull": False}) if back else Q(pk__in=[])
    step = Q(**{f"{key.column}__{'lt' if key.descends != back else 'gt'}": value})
    return step | Q(**{f"{key.column}__isnull": True}) if key.nullable and not back else step


def _cursor(keys: Sequence[Key], row: Any, *, back: bool) -> str:
    values = [getattr(row, key.column) for key in keys]
    plain = [{"t": value.isoformat()} if isinstance(value, datetime) else value for value in values]
    return signing.dumps({"k": _signature(keys), "v": plain, "b": back}, salt=_SALT)


def _signature(keys: Sequence[Key]) -> str:
    return ",".join(f"{'-' if key.descends else ''}{key.column}" for key in keys)


def _typed(values: list[Any]) -> list[Any]:
    return [datetime.fromisoformat(value["t"]) if isinstance(value, dict) else value for value in values]


def _read_cursor(request: Request, keys: Sequence[Key]) -> dict[str, Any] | None:
    text = request.query_params.get("cursor")
    if text is None:
        return None
    try:
        cursor: dict[str, Any] = signing.loads(text, salt=_SALT)
    except (signing.BadSignature, ValueError):
        raise _bad_cursor() from None
    if cursor["k"] != _signature(keys):
        raise _bad_cursor()
    return cursor


def _bad_cursor() -> ValidationError:
    message = "not a cursor of this list; use the links `next` and `previous`"
    return ValidationError({"cursor": [ErrorDetail(message, "cursor")]})
