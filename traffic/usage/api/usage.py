"""Usage over HTTP: of all tenants for operators, as JSON, CSV or Parquet, and a tenant's own under `GET /v1/usage` with
one of its keys. Also the parameters and formats that usage and costs share."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Sum
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.states import ServingClass
from fleet.requests.models import RequestSample
from kernel import clock
from kernel.rest.view_sets import ViewSet
from traffic.keys.selectors import failed_requests_of
from traffic.responses.selectors import kept_by_tenant, kept_in_all
from traffic.responses.services import store_settings
from traffic.tenants.api import only, openai_error, refused
from traffic.tenants.planner import unix_seconds
from traffic.tenants.selectors import UnknownApplication, application_of
from traffic.usage.models import COUNTS, UsageHour
from traffic.usage.planning.figures import (
    DIMENSIONS,
    BadQuery,
    By,
    UsageQuery,
    csv_pieces,
    money_text,
    parse_usage_query,
)
from traffic.usage.selectors.usage import UsageRow, usage_answer, usage_stream
from traffic.usage.services.export import PARQUET_TYPE, TooManyRows, parquet_table, table_rows

MOST_ROWS, DEFAULT_ROWS = 10_000, 1000
LIMIT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": DEFAULT_ROWS}
AS = ("json", "csv", "parquet")


def query_parameter(name: str, what: str, **more: Any) -> OpenApiParameter:
    """OpenAPI parameter of type string."""
    return OpenApiParameter(name, str, description=what, **more)


MOMENT = "`7d`, `12h`, `2w` ago, a date, or a moment of RFC 3339."
SPAN = (
    query_parameter("from", f"Start: {MOMENT} Default: seven days ago."),
    query_parameter("to", f"End: {MOMENT} Default: now."),
)


def table_parameters(dimensions: tuple[str, ...], group: str) -> list[OpenApiParameter]:
    """Query parameters of a table with these dimensions; `group` is the default grouping."""
    return [
        *(query_parameter(name, f"Of this {name} only.") for name in dimensions if name != "class"),
        query_parameter("class", "Only this class.", enum=[each.value for each in ServingClass]),
        *SPAN,
        query_parameter("by", "Time range of a row.", enum=[by.value for by in By], default=By.TOTAL.value),
        query_parameter("group", f"Any of {', '.join(dimensions)}, with commas; `none`: one row.", default=group),
        OpenApiParameter("limit", LIMIT_SCHEMA, description="Maximum number of rows; tables are always complete."),
        query_parameter("as", "`csv` and `parquet` are tables to download.", enum=AS, default="json"),
    ]


class TablesViewSet(ViewSet):
    """Responds in any form of `AS`."""

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """The `as` parameter decides the form, so Accept headers are ignored."""
        return super().perform_content_negotiation(request, force=force or request.query_params.get("as") in AS[1:])


def given_once(request: Request, allowed: tuple[str, ...]) -> dict[str, str]:
    """Returns the request's parameters. Raises ValidationError if one is unknown, empty or repeated."""
    errors: dict[str, list[ErrorDetail]] = {}
    for name, values in request.query_params.lists():
        if name not in allowed:
            errors[name] = [ErrorDetail(f"unknown parameter; allowed: {', '.join(allowed)}", "unknown_parameter")]
        elif len(values) > 1:
            errors[name] = [ErrorDetail("may be given once only", "once")]
        elif not values[0]:
            errors[name] = [ErrorDetail("is empty; omit it or give a value", "blank")]
    if errors:
        raise ValidationError(errors)
    return {name: str(value) for name, value in request.query_params.items()}


def parsed_query(given: dict[str, str], now: datetime, *of: Any) -> UsageQuery:
    """Like `parse_usage_query`; errors name the parameter."""
    try:
        return parse_usage_query(given, now, *of)
    except BadQuery as error:
        raise ValidationError({error.field: [ErrorDetail(str(error), "invalid")]}) from error


def form_of(text: str) -> str:
    if text not in AS:
        raise ValidationError({"as": [ErrorDetail(f"{text[:40]!r} is not one of: {', '.join(AS)}", "invalid_choice")]})
    return text


def limit_of(text: str) -> int:
    """Returns the maximum number of rows."""
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MOST_ROWS):
        raise ValidationError({"limit": [ErrorDetail(f"must be a whole number from 1 to {MOST_ROWS}", "range")]})
    return int(text)


def download(what: str, pieces: Any, kind: str, query: UsageQuery, ending: str) -> StreamingHttpResponse:
    """A download whose file name has the kind and the time range."""
    name = f"{what}-{query.start:%Y%m%dT%H%M}-{query.end:%Y%m%dT%H%M}.{ending}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingHttpResponse(pieces, content_type=kind, headers=headers)


DAY_S = 86_400


class CountsSerializer(serializers.Serializer[Any]):
    """Counters of one group."""

    arrived = serializers.IntegerField(help_text="Requests with a key at ingresses, including refused ones.")
    limited = serializers.IntegerField(help_text="Those over a limit.")
    failed = serializers.IntegerField(help_text="Those answered with 5xx.")
    refused = serializers.IntegerField(
        help_text="Answered with 5xx by an ingress because no cell answered; also without a key."
    )
    requests = serializers.IntegerField(help_text="Requests that cells admitted.")
    errors = serializers.IntegerField(help_text="Those that failed in the cell.")  # type: ignore[assignment]
    cancelled = serializers.IntegerField(help_text="Those cut short by the client, its deadline or the cell's end.")
    estimated = serializers.IntegerField(help_text="Those without token counts from the engine.")
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Part of `prompt_tokens`: found in the engine's cache.")
    completion_tokens = serializers.IntegerField()
    charged = serializers.CharField(help_text="US dollars, at the token prices when they were counted.")
    machine_cost = serializers.CharField(help_text="US dollars: share of the cells' settled hours.")


class UsageGroupSerializer(CountsSerializer):
    """One group. Dimensions that are not grouped by are null; an empty one is a value, such as requests without a
    key."""

    start = serializers.DateTimeField(allow_null=True, help_text="Start of its time; null with `by=total`.")
    tenant = serializers.CharField(allow_null=True)
    key = serializers.CharField(allow_null=True, help_text="Prefix of a key.")
    deployment = serializers.CharField(
        allow_null=True, help_text="Empty if an ingress counted a key before the deployment was known."
    )

    class Meta:
        examples = {"adapter": None}

    def get_fields(self) -> dict[str, Any]:
        adapter = serializers.CharField(allow_null=True, help_text="Empty for the base model.")
        return {**super().get_fields(), "class": serializers.CharField(allow_null=True), "adapter": adapter}


@extend_schema_serializer(many=False)
class UsageSerializer(serializers.Serializer[Any]):
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(choices=[(by.value, by.value) for by in By])
    group = serializers.ListField(child=serializers.CharField())
    rows = UsageGroupSerializer(many=True)
    totals = CountsSerializer(help_text="Totals of all filtered rows, shown or not.")
    truncated = serializers.BooleanField(help_text="Whether there are more groups than `limit`.")

    class Meta:
        examples = {"group": ["tenant"]}


class KeptOfTenantSerializer(serializers.Serializer[Any]):
    tenant = serializers.CharField(help_text="Empty for requests without a key.")
    responses = serializers.IntegerField()
    bytes = serializers.IntegerField(source="size", help_text="Of their inputs and answers.")
    oldest_at = serializers.DateTimeField()


@extend_schema_serializer(many=False)
class KeptResponsesSerializer(serializers.Serializer[Any]):
    responses = serializers.IntegerField(help_text="Totals of all tenants, shown or not.")
    bytes = serializers.IntegerField()
    most_responses_of_tenant = serializers.IntegerField(help_text="Beyond this, requests to store more get 429.")
    most_bytes_of_tenant = serializers.IntegerField()
    days = serializers.FloatField(help_text="Retention; 0 if storage is disabled.")
    tenants = KeptOfTenantSerializer(many=True, help_text="Tenants with the most bytes first.")
    truncated = serializers.BooleanField(help_text="Whether there are more tenants than `limit`.")


class UsageViewSet(TablesViewSet):
    """Usage and charges of tenants and keys. Hours are kept for 90 days, then days for 400."""

    @extend_schema(
        parameters=table_parameters(DIMENSIONS, "tenant"),
        responses={
            ("200", "application/json"): UsageSerializer,
            ("200", "text/csv"): str,
            ("200", PARQUET_TYPE): bytes,
        },
        filters=False,
    )
    def list(self, request: Request) -> HttpResponseBase:
        """Usage by group, latest first, with totals. Rows are disjoint and may be summed."""
        given = given_once(request, (*DIMENSIONS, "from", "to", "by", "group", "limit", "as"))
        form, limit = form_of(given.pop("as", "json")), limit_of(given.pop("limit", str(DEFAULT_ROWS)))
        query = parsed_query(given, clock.now())
        if form == "csv":
            return download(
                "usage", csv_pieces(table_rows(usage_stream(query))), "text/csv; charset=utf-8", query, form
            )
        if form == "parquet":
            return download("usage", iter([_usage_parquet(query)]), PARQUET_TYPE, query, form)
        answer = usage_answer(query, most=limit)
        return Response(
            {
                "start": query.start,
                "end": query.end,
                "by": query.by.value,
                "group": list(query.group),
                "rows": [_usage_group(row) for row in answer.rows],
                "totals": _rendered_counts(answer.totals),
                "truncated": answer.truncated,
            }
        )

    @extend_schema(
        parameters=[
            query_parameter("tenant", "Only this tenant."),
            OpenApiParameter("limit", LIMIT_SCHEMA, description="Maximum number of tenants."),
        ],
        responses={200: KeptResponsesSerializer},
    )
    @action(detail=False, methods=["get"])
    def responses(self, request: Request) -> Response:
        """Number and size of stored `/v1/responses` by tenant, without their content."""
        given = given_once(request, ("tenant", "limit"))
        limit, settings = limit_of(given.get("limit", str(DEFAULT_ROWS))), store_settings()
        tenants = kept_by_tenant(most=limit + 1, tenant=given.get("tenant", ""))
        responses, size = kept_in_all()
        return Response(
            {
                "responses": responses,
                "bytes": size,
                "most_responses_of_tenant": settings.max_kept_per_tenant,
                "most_bytes_of_tenant": settings.max_kept_bytes_per_tenant,
                "days": settings.kept_s / DAY_S,
                "tenants": KeptOfTenantSerializer(tenants[:limit], many=True).data,
                "truncated": len(tenants) > limit,
            }
        )


def _usage_parquet(query: UsageQuery) -> bytes:
    try:
        return parquet_table(table_rows(usage_stream(query)))
    except TooManyRows as error:
        raise ValidationError({"from": [ErrorDetail(str(error), "range")]}) from error


def _usage_group(row: UsageRow) -> dict[str, Any]:
    return {"start": row.start, **{name: row.group.get(name) for name in DIMENSIONS}, **_rendered_counts(row.sums)}


def _rendered_counts(sums: dict[str, Any]) -> dict[str, Any]:
    amounts = {name: money_text(sums[name]) for name in ("charged", "machine_cost")}
    return {**{name: sums[name] for name in COUNTS}, **amounts}


OWN_DIMENSIONS = {"key": "key", "deployment": "deployment", "class": "serving_class", "adapter": "adapter"}
"""Dimensions of a tenant's own usage, with their columns."""
HOURS = 24
MAX_HOURS = 24 * 90
"""Retention of hours."""


@only("GET")
def own_usage(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/usage: the last `hours` hours, newest first, grouped by `group` (default: by key)."""
    try:
        application = application_of(request.headers.get("Authorization", ""), clock.now())
    except UnknownApplication as unknown:
        return refused(unknown)
    if not application.tenant:
        return openai_error(401, "missing_api_key", "send an API key: usage is shown to its tenant")
    text = request.GET.get("hours", str(HOURS))
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MAX_HOURS):
        return openai_error(400, "invalid_hours", f"`hours` must be a whole number from 1 to {MAX_HOURS}", "hours")
    group = list(dict.fromkeys(request.GET.get("group", "key").split(",")))
    if others := [name for name in group if name not in OWN_DIMENSIONS]:
        known = ", ".join(OWN_DIMENSIONS)
        message = f"`group` cannot be {others[0][:40]!r}; use one or more of {known}, separated by commas"
        return openai_error(400, "invalid_value", message, "group")
    since = clock.now() - timedelta(hours=int(text))
    hours = UsageHour.objects.filter(tenant=application.tenant, hour__gt=since).order_by()
    sums = {name: Sum(name) for name in (*COUNTS, "charged")}
    columns = [OWN_DIMENSIONS[name] for name in group]
    rows: Iterable[Any] = hours.values("hour", *columns).annotate(**sums).order_by("-hour", *columns)
    return JsonResponse(
        {"object": "list", "tenant": application.tenant, "data": [_own_row_json(row, group) for row in rows]}
    )


def _own_row_json(row: dict[str, Any], group: list[str]) -> dict[str, Any]:
    return {
        "object": "usage.hour",
        "start_time": unix_seconds(row["hour"]),
        "end_time": unix_seconds(row["hour"] + timedelta(hours=1)),
        **{name: row[OWN_DIMENSIONS[name]] or None for name in group},
        **{name: row[name] for name in COUNTS},
        "charged": money_text(row["charged"]),
    }


MAX_ERRORS = 100


@only("GET")
def own_errors(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/usage/errors: sampled failed requests of the key, newest first; with `request_id`, only this one, also if
    it had no valid key."""
    now = clock.now()
    try:
        application = application_of(request.headers.get("Authorization", ""), now)
    except UnknownApplication as unknown:
        return refused(unknown)
    if not application.key:
        return openai_error(401, "missing_api_key", "send an API key: failed requests are shown to their key")
    found = failed_requests_of(now, key=application.key, request=request.GET.get("request_id", ""))
    return JsonResponse({"object": "list", "data": [_own_error_json(row) for row in found[:MAX_ERRORS]]})


def _own_error_json(row: RequestSample) -> dict[str, Any]:
    return {
        "object": "request.error",
        "request_id": row.request,
        "created_at": unix_seconds(row.at),
        "model": row.deployment,
        "path": row.path,
        "status": row.status,
        "code": row.reason or None,
        "tried_elsewhere": row.is_handed_back,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "duration_ms": row.total_ms,
    }


ROUTES = (("usage", UsageViewSet, "usage"),)
