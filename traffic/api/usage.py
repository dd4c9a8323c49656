"""What tenants and their keys used, by the hour, over HTTP. Read only. `own_usage` is `GET /v1/usage`, for the
applications of a tenant: an ingress passes the request on, key included."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers

from kernel import clock
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import examples
from traffic.api.openai_form import only, openai_error
from traffic.models import UsageHour
from traffic.selectors.application import UnknownApplication, application_of


@extend_schema_serializer(examples=[OpenApiExample("usage", examples.USAGE, response_only=True)])
class UsageSerializer(serializers.ModelSerializer[UsageHour]):
    key = serializers.CharField(help_text="Prefix of a key; empty: the tenant's requests and tokens, as cells count.")
    hour = serializers.DateTimeField(help_text="When it began.")

    class Meta:
        model = UsageHour
        fields = [
            "tenant", "key", "hour", "requests", "limited", "errors", "prompt_tokens", "completion_tokens",
        ]  # fmt: skip


class UsageFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    key = filters.CharFilter()
    since = filters.IsoDateTimeFilter(field_name="hour", lookup_expr="gte")
    until = filters.IsoDateTimeFilter(field_name="hour", lookup_expr="lt")

    class Meta:
        model = UsageHour
        fields: list[str] = []


class UsageViewSet(ListModelMixin, GenericViewSet[UsageHour]):
    """Requests, refusals, errors and tokens by the hour, newest first. Rows with a key count what ingresses saw, rows
    without one what cells served the tenant: the two overlap, so add up either."""

    serializer_class = UsageSerializer
    filterset_class = UsageFilter
    page_order = "-id"
    ordering_fields = ("id", "hour", "tenant", "key", "requests", "prompt_tokens", "completion_tokens")

    def get_queryset(self) -> QuerySet[UsageHour]:
        return UsageHour.objects.all()


HOURS = 24
MAX_HOURS = 24 * 90
"""As long as hours are kept."""


@only("GET")
def own_usage(request: HttpRequest) -> HttpResponseBase:
    """The hours of the last `hours` hours, newest first: those of the tenant as cells served it, and of each key."""
    try:
        application = application_of(request.headers.get("Authorization", ""), clock.now())
    except UnknownApplication as unknown:
        return openai_error(401, unknown.code, str(unknown))
    if not application.tenant:
        return openai_error(401, "missing_api_key", "send an API key: usage is shown to its tenant")
    text = request.GET.get("hours", str(HOURS))
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MAX_HOURS):
        return openai_error(400, "invalid_hours", f"`hours` must be a whole number from 1 to {MAX_HOURS}", "hours")
    since = clock.now() - timedelta(hours=int(text))
    rows = UsageHour.objects.filter(tenant=application.tenant, hour__gt=since).order_by("-hour", "key")
    return JsonResponse({"object": "list", "tenant": application.tenant, "data": [_shown(row) for row in rows]})


def _shown(row: UsageHour) -> dict[str, Any]:
    return {
        "object": "usage.hour",
        "start_time": _seconds(row.hour),
        "end_time": _seconds(row.hour + timedelta(hours=1)),
        "key": row.key or None,
        "requests": row.requests,
        "limited": row.limited,
        "errors": row.errors,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
    }


def _seconds(at: datetime) -> int:
    return int(at.timestamp())
