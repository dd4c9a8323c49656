"""`GET /metrics`: what Prometheus scrapes. It takes an API token that may read, as every other answer about the fleet
does (`authorization` in Prometheus's configuration); it shows no secret and no name of a tenant."""

from typing import Any

from django.http import HttpResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.observability.exposition import host_registry
from controlplane.observability.fleet import FleetGauges


class Metrics(APIView):
    """Viewers may, by the default permission."""

    schema = None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        standing = CollectorRegistry()
        standing.register(FleetGauges())
        text = generate_latest(host_registry()) + generate_latest(standing)
        return HttpResponse(text, content_type=CONTENT_TYPE_LATEST)
