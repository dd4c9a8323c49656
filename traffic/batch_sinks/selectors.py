"""Reads sinks of batches. Never writes."""

from collections.abc import Iterable
from typing import Any

from django.db.models import Count, Q, QuerySet

from traffic.batch_sinks.models import SETTABLE, BatchSink


def sinks_with_waiting_requests() -> "QuerySet[Any]":
    """Returns all sinks; `waiting` counts ended near-real-time requests in no delivery."""
    waits = Q(requests__delivery=None, requests__ended_at__isnull=False)
    return BatchSink.objects.annotate(waiting=Count("requests", filter=waits))


def batch_sinks_present(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the fields of sinks as documents state them, by name."""
    rows = BatchSink.objects.filter(name__in=list(names))
    return {row.name: {"tenant": row.tenant, **{column: getattr(row, column) for column in SETTABLE}} for row in rows}


def unknown_sinks(tenant: str, names: Iterable[str]) -> list[str]:
    """Returns the names that are no sinks of a tenant."""
    known = set(BatchSink.objects.filter(tenant=tenant, name__in=list(names)).values_list("name", flat=True))
    return [name for name in names if name not in known]
