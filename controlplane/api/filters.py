"""Filters that refuse what they do not understand: a misspelt parameter must not look like an unfiltered list."""

from collections.abc import Mapping
from typing import Any

from django.db.models import QuerySet
from django.http import QueryDict
from django_filters import rest_framework as filters
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.request import Request

BOOLEANS = ("true", "false")

Errors = dict[str, list[ErrorDetail]]


class StrictFilterBackend(filters.DjangoFilterBackend):
    """Filters lists by the view's `filterset_class`. Details and actions take no parameter at all."""

    def filter_queryset(self, request: Request, queryset: QuerySet[Any], view: Any) -> QuerySet[Any]:
        """The filtered rows.

        Raises:
            ValidationError: an unknown, repeated, empty or malformed parameter; every one of them is named.
        """
        filterset = None if view.detail else self.get_filterset(request, queryset, view)
        known: Mapping[str, Any] = filterset.filters if filterset else {}
        paging = () if view.detail else (view.paginator.cursor_query_param, view.paginator.page_size_query_param)
        errors = _misused(request.query_params, known, paging)
        if filterset is not None:
            errors |= _malformed(filterset, skip=set(errors))
        if errors:
            raise ValidationError(errors)
        return queryset if filterset is None else filterset.qs


def _misused(given: QueryDict, known: Mapping[str, Any], paging: tuple[str, ...]) -> Errors:
    errors: Errors = {}
    for name, values in given.lists():
        repeatable = isinstance(known.get(name), filters.MultipleChoiceFilter)
        if name not in known and name not in paging:
            allowed = ", ".join([*sorted(known), *paging]) or "none here"
            errors[name] = [ErrorDetail(f"unknown parameter; allowed: {allowed}", "unknown_parameter")]
        elif any(value == "" for value in values):
            errors[name] = [ErrorDetail("is empty; leave it out, or give a value", "blank")]
        elif len(values) > 1 and not repeatable:
            errors[name] = [ErrorDetail("may be given once only", "once")]
        elif isinstance(known.get(name), filters.BooleanFilter) and values[0] not in BOOLEANS:
            errors[name] = [ErrorDetail(f"{values[0]!r} is not one of: true, false", "invalid_choice")]
    return errors


def _malformed(filterset: Any, skip: set[str]) -> Errors:
    errors: Errors = {}
    for name, problems in filterset.form.errors.as_data().items():
        if name not in skip:
            errors[name] = [_explained(filterset.filters[name], problem) for problem in problems]
    return errors


def _explained(rule: Any, problem: Any) -> ErrorDetail:
    code = problem.code or "invalid"
    if code == "invalid_choice" and "choices" in rule.extra:
        allowed = ", ".join(str(value) for value, _ in rule.extra["choices"])
        return ErrorDetail(f"{problem.params['value']!r} is not one of: {allowed}", code)
    return ErrorDetail(" ".join(problem.messages), code)
