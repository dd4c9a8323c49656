"""Metrics of processes that answer no HTTP themselves: a port of their own, where one is asked for. It tells nothing
but metrics, so the address should be one that only Prometheus reaches."""

import logging

from django.conf import settings
from prometheus_client import start_http_server

from controlplane.observability.exposition import counted

log = logging.getLogger(__name__)


def listen_for_scrapes() -> None:
    """Answer `GET /metrics` on `SWITCHYARD_METRICS_LISTEN`, if it is set. A port that is taken stops nobody."""
    if not (address := settings.METRICS_LISTEN):
        return
    host, _, port = address.rpartition(":")
    try:
        start_http_server(int(port), host.strip("[]") or "127.0.0.1", counted())
    except (OSError, ValueError) as error:
        log.warning("no metrics on %s: %s", address, error)
