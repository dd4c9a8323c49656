"""What answers that are tables share: which parameters may be given, in which form they are returned, and how long they
are."""

from datetime import datetime
from typing import Any

from django.http import StreamingHttpResponse
from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.request import Request

from engine_agent.protocol.states import ServingClass
from kernel.rest.view_sets import ViewSet
from traffic.planning.usage_query import BadQuery, By, UsageQuery, parse_usage_query

MOST_ROWS, DEFAULT_ROWS = 10_000, 1000
LIMIT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": DEFAULT_ROWS}
AS = ("json", "csv", "parquet")


def query_parameter(name: str, what: str, **more: Any) -> OpenApiParameter:
    """A parameter of text, for the document."""
    return OpenApiParameter(name, str, description=what, **more)


MOMENT = "`7d`, `12h`, `2w` ago, a date, or a moment of RFC 3339."
SPAN = (query_parameter("from", f"Since when: {MOMENT} Seven days."), query_parameter("to", f"Until: {MOMENT} Now."))


def table_parameters(dimensions: tuple[str, ...], group: str) -> list[OpenApiParameter]:
    """What a table may be asked for by these dimensions; `group`: by which it is grouped if nothing is said."""
    return [
        *(query_parameter(name, f"Of this {name} only.") for name in dimensions if name != "class"),
        query_parameter("class", "Of this class only.", enum=[each.value for each in ServingClass]),
        *SPAN,
        query_parameter("by", "The time that a row is about.", enum=[by.value for by in By], default=By.TOTAL.value),
        query_parameter("group", f"Any of {', '.join(dimensions)}, with commas; `none`: one row.", default=group),
        OpenApiParameter("limit", LIMIT_SCHEMA, description="Rows at most; not of tables, which are whole."),
        query_parameter("as", "`csv` and `parquet` are tables to download.", enum=AS, default="json"),
    ]


class TablesViewSet(ViewSet):
    """Answers in any form of `AS`."""

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """A table has one form, whatever a client accepts."""
        return super().perform_content_negotiation(request, force=force or request.query_params.get("as") in AS[1:])


def given_once(request: Request, allowed: tuple[str, ...]) -> dict[str, str]:
    """The parameters of a request.

    Raises:
        ValidationError: one that is not allowed, empty, or given twice.
    """
    errors: dict[str, list[ErrorDetail]] = {}
    for name, values in request.query_params.lists():
        if name not in allowed:
            errors[name] = [ErrorDetail(f"unknown parameter; allowed: {', '.join(allowed)}", "unknown_parameter")]
        elif len(values) > 1:
            errors[name] = [ErrorDetail("may be given once only", "once")]
        elif not values[0]:
            errors[name] = [ErrorDetail("is empty; leave it out, or give a value", "blank")]
    if errors:
        raise ValidationError(errors)
    return {name: str(value) for name, value in request.query_params.items()}


def parsed_query(given: dict[str, str], now: datetime, *of: Any) -> UsageQuery:
    """See `parse_usage_query`; refusals name the parameter."""
    try:
        return parse_usage_query(given, now, *of)
    except BadQuery as error:
        raise ValidationError({error.field: [ErrorDetail(str(error), "invalid")]}) from error


def form_of(text: str) -> str:
    """One of `AS`."""
    if text not in AS:
        raise ValidationError({"as": [ErrorDetail(f"{text[:40]!r} is not one of: {', '.join(AS)}", "invalid_choice")]})
    return text


def limit_of(text: str) -> int:
    """How many rows at most."""
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MOST_ROWS):
        raise ValidationError({"limit": [ErrorDetail(f"must be a whole number from 1 to {MOST_ROWS}", "range")]})
    return int(text)


def download(what: str, pieces: Any, kind: str, query: UsageQuery, ending: str) -> StreamingHttpResponse:
    """A file whose name says what it is and the time that it is about."""
    name = f"{what}-{query.start:%Y%m%dT%H%M}-{query.end:%Y%m%dT%H%M}.{ending}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingHttpResponse(pieces, content_type=kind, headers=headers)
