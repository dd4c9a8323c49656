"""Reads schedules of batches in the form of documents. Never writes."""

from collections.abc import Iterable
from typing import Any

from traffic.batch_schedules.models import SETTABLE, BatchSchedule


def batch_schedules_present(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the fields of schedules as documents state them, by name."""
    rows = BatchSchedule.objects.filter(name__in=list(names))
    return {row.name: {"key": row.key_id, **{column: getattr(row, column) for column in SETTABLE}} for row in rows}
