"""Cursor pages `{next, previous, results}`: a list that changes while it is read neither repeats nor skips rows."""

from collections.abc import Sequence
from typing import Any

from django.db.models import QuerySet
from rest_framework.exceptions import ErrorDetail, NotFound, ValidationError
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.views import APIView

NEXT = "http://127.0.0.1:8000/api/v1/events?cursor=cD00NzEw"


class CursorPages(CursorPagination):
    """Orders by the view's `page_order`, a unique field; by the primary key if it has none."""

    page_size = 100
    page_size_query_param = "page_size"
    page_size_query_description = "Results per page."
    max_page_size = 1000
    cursor_query_description = "Where to go on; take the links `next` and `previous` instead of making one."

    def get_ordering(self, request: Request, queryset: QuerySet[Any], view: APIView) -> tuple[str, ...]:
        return (getattr(view, "page_order", "pk"),)

    def get_page_size(self, request: Request) -> int:
        text = request.query_params.get("page_size")
        if text is None:
            return self.page_size
        if not text.isdecimal() or not 1 <= int(text[:5]) <= self.max_page_size:
            message = f"must be a whole number from 1 to {self.max_page_size}, and is {text[:20]!r}"
            raise ValidationError({"page_size": [ErrorDetail(message, "range")]})
        return int(text)

    def paginate_queryset(
        self, queryset: QuerySet[Any] | Sequence[Any], request: Request, view: APIView | None = None
    ) -> list[Any] | None:
        try:
            return super().paginate_queryset(queryset, request, view)
        except ValueError as error:
            raise _bad_cursor() from error

    def decode_cursor(self, request: Request) -> Any:
        try:
            cursor = super().decode_cursor(request)
        except NotFound as error:
            raise _bad_cursor() from error
        if cursor is not None and "\0" in str(cursor.position):
            raise _bad_cursor()
        return cursor

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        link = {"type": ["string", "null"], "format": "uri"}
        return {
            "type": "object",
            "required": ["next", "previous", "results"],
            "properties": {
                "next": {**link, "description": "The following page; null on the last.", "example": NEXT},
                "previous": {**link, "description": "The page before; null on the first.", "example": None},
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: APIView) -> list[dict[str, Any]]:
        parameters = super().get_schema_operation_parameters(view)
        size = next(parameter for parameter in parameters if parameter["name"] == self.page_size_query_param)
        size["schema"] = {"type": "integer", "minimum": 1, "maximum": self.max_page_size, "default": self.page_size}
        return parameters


def _bad_cursor() -> ValidationError:
    message = "no cursor of this list; take the links `next` and `previous`"
    return ValidationError({"cursor": [ErrorDetail(message, "cursor")]})
