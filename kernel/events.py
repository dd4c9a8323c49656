"""Writes event rows in the caller's transaction, and sends hints to browsers after the commit."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from kernel import live
from kernel.models import Event
from kernel.tones import Tone


def events_record(events: Sequence[Event]) -> None:
    """Record many events in one statement, in the transaction of their changes."""
    Event.objects.bulk_create(events)
    live.push("events")


def event_record(  # noqa: PLR0913 - one keyword per column of the timeline
    *,
    kind: str,
    message: str,
    now: datetime,
    tone: Tone = Tone.IDLE,
    actor: str = "switchyard",
    region: str = "",
    deployment: str = "",
    cell: str = "",
    node: str = "",
    detail: dict[str, Any] | None = None,
) -> Event:
    """Record an event in the transaction of its change."""
    event = Event.objects.create(
        at=now,
        kind=kind,
        tone=tone,
        message=message,
        actor=actor,
        region=region,
        deployment=deployment,
        cell=cell,
        node=node,
        detail=detail or {},
    )
    live.push("events")
    return event
