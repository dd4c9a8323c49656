"""Counts of the processes of this host, as Prometheus's registries and text. Reads nothing of the fleet, so workers can
serve them on a separate port, if one is set."""

import logging

from django.conf import settings
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from kernel.metrics import FOLDER, OURS

log = logging.getLogger(__name__)


def host_registry() -> CollectorRegistry:
    """What was counted here, over all processes that share the folder."""
    if FOLDER is None:
        return OURS
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(FOLDER))  # type: ignore[no-untyped-call]
    return registry


def serve_metrics() -> None:
    """Answer `GET /metrics` on `SWITCHYARD_METRICS_LISTEN`, if it is set; only Prometheus should reach that address.
    A port that is taken stops no process."""
    if not (address := settings.METRICS_LISTEN):
        return
    host, _, port = address.rpartition(":")
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1", host_registry())
    except (OSError, ValueError) as error:
        log.warning("no metrics on %s: %s", address, error)
