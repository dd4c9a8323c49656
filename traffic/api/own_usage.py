"""`GET /v1/usage`: what a tenant used, told to its own applications. An ingress passes the request on, key included;
the key alone says whose usage is shown, so nobody can ask for another's (I15)."""

from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from kernel import clock
from traffic.models import UsageHour
from traffic.selectors.application import UnknownApplication, application_of

HOURS = 24
MAX_HOURS = 24 * 90
"""As long as hours are kept."""


@require_safe
def own_usage(request: HttpRequest) -> JsonResponse:
    """The hours of the last `hours` hours, newest first: those of the tenant as cells served it, and of each key."""
    try:
        application = application_of(request.headers.get("Authorization", ""), clock.now())
    except UnknownApplication as unknown:
        return _refused(401, unknown.code, str(unknown), None)
    if not application.tenant:
        return _refused(401, "missing_api_key", "usage is told to the owner of an API key", None)
    text = request.GET.get("hours", str(HOURS))
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= MAX_HOURS):
        return _refused(400, "invalid_hours", f"`hours` must be a whole number from 1 to {MAX_HOURS}", "hours")
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


def _refused(status: int, code: str, message: str, param: str | None) -> JsonResponse:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JsonResponse({"error": error}, status=status)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())
