"""Writes event rows and tells browsers after the commit. Never commits: it lives in its caller's transaction."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from kernel import live
from kernel.models import Event
from kernel.tones import Tone


def events_record(events: Sequence[Event]) -> None:
    """Record many things that happened, beside their changes, in one statement."""
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
    """Record that something happened, beside the change itself, in one transaction."""
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
