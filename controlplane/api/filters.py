"""Filters that reject unknown parameters: a misspelt filter must never return an unfiltered list."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import QueryDict
from django_filters import rest_framework as filters
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.filters import BaseFilterBackend
from rest_framework.request import Request

from kernel.rest.changes import BEGINNING, DEFAULT_WATCH_TIMEOUT_S, FORM, MAX_WATCH_TIMEOUT_S, is_revision

BOOLEANS = ("true", "false")
FURTHEST_OFFSET = timedelta(hours=16)
"""Largest UTC offset that PostgreSQL accepts; Python accepts up to 24 hours."""

Errors = dict[str, list[ErrorDetail]]


class StrictFilterBackend(filters.DjangoFilterBackend):
    """Filters lists by the view's `filterset_class`. Details and actions take no parameters."""

    def filter_queryset(self, request: Request, queryset: QuerySet[Any], view: Any) -> QuerySet[Any]:
        """The filtered rows. Raises ValidationError for unknown, repeated, empty or malformed parameters, and lists all
        of them."""
        filterset = None if view.detail else self.get_filterset(request, queryset, view)
        known: Mapping[str, Any] = filterset.filters if filterset else {}
        errors = _misused(request.query_params, known, _common_parameters(view))
        if filterset is not None:
            errors |= _malformed(filterset, skip=set(errors)) | _in_utc(filterset)
        if errors:
            raise ValidationError(errors)
        return queryset if filterset is None else filterset.qs

    def get_filterset_kwargs(self, request: Request, queryset: QuerySet[Any], view: Any) -> dict[str, Any]:
        """`since` may be a time for filters, or a revision for watching."""
        kwargs: dict[str, Any] = super().get_filterset_kwargs(request, queryset, view)
        if is_revision(request.query_params.get("since", "")):
            kwargs["data"] = kwargs["data"].copy()
            del kwargs["data"]["since"]
        return kwargs


class Ordering(BaseFilterBackend):
    """Describes `?ordering=`; controlplane.api.pagination applies it, because cursors depend on it."""

    def filter_queryset(self, request: Request, queryset: QuerySet[Any], view: Any) -> QuerySet[Any]:
        return queryset

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        names = [sign + name for name in getattr(view, "ordering_fields", ()) for sign in ("", "-")]
        if not names:
            return []
        described = "Fields to order by, most significant first; `-` before a field: descending."
        schema = {"type": "array", "items": {"type": "string", "enum": names}, "maxItems": MOST_FIELDS}
        return [query_parameter("ordering", described, schema) | {"style": "form", "explode": False}]


class WatchParameters(BaseFilterBackend):
    """Checks and describes `?since=` and `?timeout=`; kernel.rest.view_sets applies them."""

    def filter_queryset(self, request: Request, queryset: QuerySet[Any], view: Any) -> QuerySet[Any]:
        """The unchanged rows. Raises ValidationError for an invalid revision or timeout."""
        if view.detail or not getattr(view, "watch_kind", None):
            return queryset
        errors: Errors = {}
        since, timeout = (request.query_params.get(name) for name in WATCH_PARAMETERS)
        watches = since is not None and is_revision(since)
        if since is not None and not watches and not _is_time_filter(view):
            message = f"is not a revision; use that of an earlier response, or {BEGINNING} to start"
            errors["since"] = [ErrorDetail(message, "revision")]
        if timeout is not None and not (timeout.isascii() and timeout.isdecimal() and _patient(timeout)):
            message = f"must be a whole number of seconds from 0 to {MAX_WATCH_TIMEOUT_S}, and is {timeout[:20]!r}"
            errors["timeout"] = [ErrorDetail(message, "range")]
        elif timeout is not None and not watches:
            errors["timeout"] = [ErrorDetail("requires a revision in `since`", "needs_since")]
        if errors:
            raise ValidationError(errors)
        return queryset

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        if not getattr(view, "watch_kind", None):
            return []
        since = f"Only changes after this revision, with `gone` and the next `revision`; `{BEGINNING}`: everything."
        patience = "Seconds to wait for a change, if there is none yet."
        limits = {"type": "integer", "minimum": 0, "maximum": MAX_WATCH_TIMEOUT_S, "default": DEFAULT_WATCH_TIMEOUT_S}
        described = (
            []
            if _is_time_filter(view)
            else [query_parameter("since", since, {"type": "string", "pattern": f"^({FORM})$"})]
        )
        return [*described, query_parameter("timeout", patience, limits)]


WATCH_PARAMETERS = ("since", "timeout")
MOST_FIELDS = 3


def query_parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _patient(timeout: str) -> bool:
    return len(timeout) <= 2 and int(timeout) <= MAX_WATCH_TIMEOUT_S


def _is_time_filter(view: Any) -> bool:
    return "since" in getattr(getattr(view, "filterset_class", None), "base_filters", {})


def _common_parameters(view: Any) -> tuple[str, ...]:
    if view.detail:
        return ()
    paging = (view.paginator.cursor_query_param, view.paginator.page_size_query_param)
    ordering = ("ordering",) if getattr(view, "ordering_fields", None) else ()
    return (*ordering, *paging, *(WATCH_PARAMETERS if getattr(view, "watch_kind", None) else ()))


def _misused(given: QueryDict, known: Mapping[str, Any], paging: tuple[str, ...]) -> Errors:
    errors: Errors = {}
    for name, values in given.lists():
        repeatable = isinstance(known.get(name), filters.MultipleChoiceFilter)
        if name not in known and name not in paging:
            allowed = ", ".join(dict.fromkeys([*sorted(known), *paging])) or "none here"
            errors[name] = [ErrorDetail(f"unknown parameter; allowed: {allowed}", "unknown_parameter")]
        elif any(value == "" for value in values):
            errors[name] = [ErrorDetail("is empty; leave it out, or give a value", "blank")]
        elif len(values) > 1 and not repeatable:
            errors[name] = [ErrorDetail("must not be repeated", "once")]
        elif isinstance(known.get(name), filters.BooleanFilter) and values[0] not in BOOLEANS:
            errors[name] = [ErrorDetail(f"{values[0]!r} is not one of: true, false", "invalid_choice")]
    return errors


def _malformed(filterset: Any, skip: set[str]) -> Errors:
    errors: Errors = {}
    for name, problems in filterset.form.errors.as_data().items():
        if name not in skip:
            errors[name] = [_explained(filterset.filters[name], problem) for problem in problems]
    return errors


def _in_utc(filterset: Any) -> Errors:
    """Converts times with an offset that PostgreSQL rejects to UTC."""
    errors: Errors = {}
    cleaned = filterset.form.cleaned_data
    for name, value in cleaned.items():
        if isinstance(value, datetime) and abs(value.utcoffset() or timedelta()) >= FURTHEST_OFFSET:
            try:
                cleaned[name] = value.astimezone(UTC)
            except OverflowError:
                errors[name] = [ErrorDetail("is not a time between the years 1 and 9999", "range")]
    return errors


def _explained(rule: Any, problem: Any) -> ErrorDetail:
    code = problem.code or "invalid"
    if code == "invalid_choice" and "choices" in rule.extra:
        allowed = ", ".join(str(value) for value, _ in rule.extra["choices"])
        return ErrorDetail(f"{problem.params['value']!r} is not one of: {allowed}", code)
    return ErrorDetail(" ".join(problem.messages), code)
