"""What happened, youngest first, in pages by id: new events never shift a page while it is read."""

from dataclasses import dataclass, replace
from datetime import timedelta

from django.db.models import Q, QuerySet

from fleet.models import Incident, Rollout
from kernel.models import Event

EVENTS_PER_PAGE = 50
BEFORE_INCIDENT = timedelta(minutes=2)
KINDS_FROM_LAST = 2000
"""The filter offers the kinds among this many of the last events; reading all of them would scan the table."""


@dataclass(frozen=True, slots=True)
class EventList:
    """`older` is the cursor of the next page, None at the end."""

    rows: tuple[Event, ...]
    older: int | None
    filtered: bool


def event_list(
    *, kind: str = "", subject: str = "", before: int | None = None, limit: int = EVENTS_PER_PAGE
) -> EventList:
    """Events with an id below `before`. `subject` is the whole name of a region, deployment, cell or node."""
    events = Event.objects.order_by("-id")
    if kind:
        events = events.filter(kind=kind)
    if subject:
        events = events.filter(Q(cell=subject) | Q(node=subject) | Q(deployment=subject) | Q(region=subject))
    if before is not None:
        events = events.filter(id__lt=before)
    fetched = list(events[: limit + 1])
    rows = tuple(fetched[:limit])
    return EventList(rows=rows, older=rows[-1].pk if len(fetched) > limit else None, filtered=bool(kind or subject))


def cell_events(cell_id: str, limit: int) -> EventList:
    return _of(Event.objects.filter(cell=cell_id), limit)


def node_events(node_id: str, limit: int) -> EventList:
    return _of(Event.objects.filter(node=node_id), limit)


def deployment_events(name: str, limit: int) -> EventList:
    return _of(Event.objects.filter(deployment=name), limit)


def region_events(name: str, limit: int) -> EventList:
    """What happened to it itself, and not to what is in it."""
    return _of(Event.objects.filter(region=name, kind__startswith="region."), limit)


def rollout_events(rollout: Rollout, limit: int) -> EventList:
    """What happened to its deployment from its start to its end."""
    events = Event.objects.filter(deployment=rollout.deployment_id, at__gte=rollout.created_at)
    newest = _of(events.filter(at__lte=rollout.ended_at) if rollout.ended_at else events, limit)
    return replace(newest, older=None)


def version_events(reference: str, limit: int) -> EventList:
    """What the registry did with a version, `model@version`."""
    return _of(Event.objects.filter(kind__startswith="version.", detail__version=reference), limit)


def incident_events(incident: Incident, limit: int) -> EventList:
    """What happened to its node or cell from shortly before it opened until it closed."""
    about = Q(detail__incident=incident.pk)
    if incident.node:
        about |= Q(node=incident.node)
    elif incident.cell:
        about |= Q(cell=incident.cell)
    events = Event.objects.filter(about, at__gte=incident.opened_at - BEFORE_INCIDENT)
    newest = _of(events.filter(at__lte=incident.closed_at) if incident.closed_at else events, limit)
    return replace(newest, older=None)


def event_kinds() -> list[str]:
    lately = Event.objects.order_by("-id").values("kind")[:KINDS_FROM_LAST]
    return sorted({row["kind"] for row in lately})


def _of(events: "QuerySet[Event]", limit: int) -> EventList:
    fetched = list(events.order_by("-id")[: limit + 1])
    return EventList(
        rows=tuple(fetched[:limit]), older=fetched[limit - 1].pk if len(fetched) > limit else None, filtered=False
    )
