"""The one place that reads the wall clock. Everything that decides takes `now` as an argument instead."""

from datetime import UTC, datetime


def now() -> datetime:
    """Current time, aware, in UTC."""
    return datetime.now(UTC)
