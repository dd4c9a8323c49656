"""`GET /healthz`, for load balancers and everybody, and `GET /metrics`: what Prometheus scrapes. The latter takes an
API token that may read, as every other answer about the fleet does (`authorization` in Prometheus's configuration); it
shows no secret and no name of a tenant."""

from time import monotonic
from typing import Any

from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.observability.exposition import host_registry
from controlplane.observability.fleet import FleetGauges
from kernel.control_hosts import control_hosts
from kernel.loop_passes import control_standing

HEALTH_KEPT_S = 1.0
"""The page is public, so it must cost nothing."""
_health: tuple[float, int, dict[str, Any]] = (float("-inf"), 503, {})


@never_cache
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """200 while this process and its database answer. Late control loops are reported without a 503, which would also
    take the screens out of service."""
    global _health  # noqa: PLW0603 - the last answer, for requests within a second
    if monotonic() - _health[0] > HEALTH_KEPT_S:
        _health = (monotonic(), *_health_status())
    return JsonResponse(_health[2], status=_health[1])


def _health_status() -> tuple[int, dict[str, Any]]:
    try:
        standing, hosts = control_standing(), control_hosts()
    except DatabaseError:
        return 503, {"status": "the database does not answer"}
    return 200, {
        "status": "late" if standing.is_late else "ok",
        "summary": str(standing),
        "last_pass_s": _rounded(standing.last_pass_s),
        "queue_s": _rounded(standing.queue_s),
        "loops": {loop.loop: _rounded(loop.age_s) for loop in standing.loops},
        "hosts": [{"name": host.name, "silent_s": _rounded(host.silent_s)} for host in hosts.hosts],
        "hosts_are_well": not hosts.problems,
        "hosts_summary": str(hosts),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


class Metrics(APIView):
    """Viewers may, by the default permission."""

    schema = None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        standing = CollectorRegistry()
        standing.register(FleetGauges())
        text = generate_latest(host_registry()) + generate_latest(standing)
        return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)
