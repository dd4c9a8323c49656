"""Pages of events and audit records, newest first, paged by ID, so that new rows never shift a page. Reads only."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Q, QuerySet
from django.urls import reverse

from audit.models import AuditRecord, Outcome
from audit.selectors import AuditQuery, audit_actions, audit_records
from controlplane.dashboard.charts import Chart, Marker, with_markers
from controlplane.dashboard.choices import choose
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from controlplane.dashboard.lists import Column, List
from fleet.faults.models import Incident
from fleet.rollouts.models import Rollout
from kernel.access import Role
from kernel.models import Event
from kernel.time_ranges import TimeRange
from kernel.tones import Tone
from traffic.region_shares.models import TrafficShift

EVENTS_PER_PAGE = 50
SEARCHED = 50_000
"""Events whose messages are searched at a time: no index finds a part of a message."""
KINDS_FROM_LAST = 2000
"""The filter offers the kinds among this many of the last events; reading all would scan the table."""


@dataclass(frozen=True, slots=True)
class EventList:
    """`older` is the cursor of the next page, None at the end."""

    rows: tuple[Event, ...]
    older: int | None
    filtered: bool


def event_list(request: PageRequest, limit: int = EVENTS_PER_PAGE) -> EventList:
    """Events with an ID below `before`. With a text, only a part of the history is searched at a time."""
    events, floor = _listed(request)
    fetched = list(events.order_by("-id")[: limit + 1])
    if len(fetched) > limit:
        older: int | None = fetched[limit - 1].pk
    else:
        older = floor if floor and Event.objects.filter(id__lt=floor).exists() else None
    return EventList(tuple(fetched[:limit]), older, any(request.text(name) for name in ("kind", "subject", "q")))


def _listed(request: PageRequest) -> "tuple[QuerySet[Event], int]":
    """The events that the filter leaves, and the lowest ID that a text was searched in, or 0."""
    events, before = Event.objects.all(), _before(request)
    kind, subject, text = request.text("kind"), request.text("subject"), request.text("q")
    if kind:
        events = events.filter(kind=kind)
    if subject:
        events = events.filter(Q(cell=subject) | Q(node=subject) | Q(deployment=subject) | Q(region=subject))
    if before is not None:
        events = events.filter(id__lt=before)
    if not text:
        return events, 0
    newest = before or (Event.objects.order_by("-id").values_list("id", flat=True).first() or 0) + 1
    floor = max(0, newest - SEARCHED)
    return events.filter(message__icontains=text, id__gte=floor), floor


EVENT_LIST: List[Event] = List(
    name="events",
    columns=(
        Column("at", "Time", lambda row: row.at),
        Column("kind", "Kind", lambda row: row.kind),
        Column("message", "Message", lambda row: row.message),
        Column("region", "Region", lambda row: row.region),
        Column("deployment", "Deployment", lambda row: row.deployment),
        Column("cell", "Cell", lambda row: row.cell),
        Column("node", "Node", lambda row: row.node),
        Column("actor", "Actor", lambda row: row.actor),
    ),
    query=lambda request: _listed(request)[0],
    order=("-id",),
)


def newest_events(limit: int) -> EventList:
    return _event_list(Event.objects.all(), limit)


def cell_events(cell_id: str, limit: int) -> EventList:
    return _event_list(Event.objects.filter(cell=cell_id), limit)


def node_events(node_id: str, limit: int) -> EventList:
    return _event_list(Event.objects.filter(node=node_id), limit)


def deployment_events(name: str, limit: int) -> EventList:
    return _event_list(Event.objects.filter(deployment=name), limit)


def region_events(name: str, limit: int) -> EventList:
    return _event_list(Event.objects.filter(region=name, kind__startswith="region."), limit)


def rollout_events(rollout: Rollout, limit: int) -> EventList:
    events = Event.objects.filter(deployment=rollout.deployment_id, at__gte=rollout.created_at)
    newest = _event_list(events.filter(at__lte=rollout.ended_at) if rollout.ended_at else events, limit)
    return replace(newest, older=None)


def version_events(reference: str, limit: int) -> EventList:
    return _event_list(Event.objects.filter(kind__startswith="version.", detail__version=reference), limit)


MARKERS_OF_A_KIND = 12
"""Newest ones on a chart; more would hide the lines."""


def chart_markers(
    span: TimeRange, *, deployment: str = "", region: str = "", cell: str = "", node: str = ""
) -> tuple[Marker, ...]:
    """Rollouts, incidents and traffic shifts in a time range, oldest first, in three queries. Incidents of a cell or
    node are only those of the named ones; without names, all of the deployment and region."""
    about = Q()
    if cell or node:
        about = (Q(cell=cell) if cell else Q()) | (Q(node=node) if node else Q())
    elif deployment or region:
        about = Q(deployment=deployment) if deployment else Q(region=region)
    within = (span.start, span.end)
    rollouts = Rollout.objects.filter(created_at__range=within)
    shifts = TrafficShift.objects.filter(at__range=within)
    if deployment:
        rollouts, shifts = rollouts.filter(deployment=deployment), shifts.filter(deployment=deployment)
    incidents = Incident.objects.filter(about, opened_at__range=within, shadow=False)
    markers = [
        Marker(at, f"rollout {pk} of {name} began", reverse("rollout", args=(pk,)), Tone.MOVING)
        for pk, name, at in rollouts.order_by("-id").values_list("pk", "deployment_id", "created_at")[
            :MARKERS_OF_A_KIND
        ]
    ]
    markers += [
        Marker(at, f"incident {pk}: {summary}", reverse("incident", args=(pk,)), Tone.BAD)
        for pk, summary, at in incidents.order_by("-id").values_list("pk", "summary", "opened_at")[:MARKERS_OF_A_KIND]
    ]
    markers += [
        Marker(at, f"traffic of {name} shifted: {reason}", reverse("traffic"), Tone.BAKE)
        for name, reason, at in shifts.order_by("-id").values_list("deployment_id", "reason", "at")[:MARKERS_OF_A_KIND]
    ]
    return tuple(sorted(markers, key=lambda marker: marker.at))


def marked(charts: Iterable[Chart], *, deployment: str = "", region: str = "") -> tuple[Chart, ...]:
    """The charts with the markers of their whole period, as `chart_markers`. Without charts it makes no query."""
    found = tuple(charts)
    if not found:
        return ()
    span = TimeRange("", min(chart.start for chart in found), max(chart.end for chart in found))
    return with_markers(found, chart_markers(span, deployment=deployment, region=region))


def event_kinds() -> list[str]:
    lately = Event.objects.order_by("-id").values("kind")[:KINDS_FROM_LAST]
    return sorted({row["kind"] for row in lately})


def _event_list(events: "QuerySet[Event]", limit: int) -> EventList:
    fetched = list(events.order_by("-id")[: limit + 1])
    return EventList(
        rows=tuple(fetched[:limit]), older=fetched[limit - 1].pk if len(fetched) > limit else None, filtered=False
    )


RECORDS_PER_PAGE = 50
TONES = {Outcome.DONE: Tone.OK, Outcome.DENIED: Tone.BAD}
LONGEST_VALUE = 120
PAGES = frozenset({"cell", "node", "deployment", "rollout", "incident", "key"})
"""Nouns whose pages have the same name and take the key."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One record. `page` is the name of its object's page, "" if it has none; `lines` are its changes as text."""

    record: AuditRecord
    tone: Tone
    page: str
    key: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditList:
    """`older` is the cursor of the next page, None at the end."""

    rows: tuple[AuditRow, ...]
    older: int | None
    filtered: bool


def audit_list(query: AuditQuery, limit: int = RECORDS_PER_PAGE) -> AuditList:
    fetched = list(audit_records(query)[: limit + 1])
    narrowed = any((query.actor, query.action, query.object, query.outcome, query.request_id))
    older = fetched[limit - 1].number if len(fetched) > limit else None
    return AuditList(tuple(_audit_row(record) for record in fetched[:limit]), older, narrowed)


def _audit_row(record: AuditRecord) -> AuditRow:
    noun, _, key = record.object.partition("/")
    return AuditRow(
        record=record,
        tone=TONES[Outcome(record.outcome)],
        page=noun if noun in PAGES and key and "/" not in key else "",
        key=key,
        lines=tuple(_lines(json.loads(record.changes))),
    )


def _lines(changes: dict[str, Any]) -> Iterator[str]:
    for row in _entries(changes.get("rows")):
        name = f"{row.get('table', '')} {row.get('key', '')}".strip()
        columns = row.get("changed") or row.get("was")
        if not isinstance(columns, dict):
            yield f"{name}: {row.get('did', 'changed')}"
            continue
        for column, value in columns.items():
            if "changed" in row and isinstance(value, list) and len(value) == 2:
                yield f"{name}: {column} {_short(value[0])} → {_short(value[1])}"
            else:
                yield f"{name}: {column} was {_short(value)}"
    for event in _entries(changes.get("events")):
        yield str(event.get("message", ""))
    if isinstance(body := changes.get("asked"), dict):
        yield from (f"request {name} = {_short(value)}" for name, value in body.items())


def _entries(part: Any) -> list[dict[str, Any]]:
    return [entry for entry in part if isinstance(entry, dict)] if isinstance(part, list) else []


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


MAX_ID_DIGITS = 18


def _before(request: PageRequest) -> int | None:
    """The upper limit of IDs from the URL, if any."""
    text = request.text("before")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS else None


def _events(request: PageRequest) -> EventList:
    return event_list(request)


def _event_filter(request: PageRequest) -> Filter:
    subject = request.text("subject")
    return Filter(
        text_label=f"Find in events of {subject}" if subject else "Find in events",
        text_name="q",
        text=request.text("q"),
        choices=(choose(request, "kind", "every kind", event_kinds()),),
        kept=(("subject", subject),) if subject else (),
    )


def _audit_query(request: PageRequest) -> AuditQuery:
    return AuditQuery(
        actor=request.text("actor"),
        action=request.text("action"),
        object=request.text("object"),
        outcome=request.text("outcome"),
        request_id=request.text("request_id"),
        before=_before(request),
    )


def _audit(request: PageRequest) -> AuditList:
    return audit_list(_audit_query(request))


AUDIT_LIST: List[AuditRecord] = List(
    name="audit",
    columns=(
        Column("number", "Number", lambda row: row.number),
        Column("at", "Time", lambda row: row.at),
        Column("actor", "Actor", lambda row: row.actor),
        Column("action", "Action", lambda row: row.action),
        Column("object", "Object", lambda row: row.object),
        Column("outcome", "Outcome", lambda row: row.outcome),
        Column("reason", "Reason", lambda row: row.reason),
        Column("address", "Address", lambda row: row.address),
        Column("request", "Request", lambda row: row.request_id),
        Column("digest", "Digest", lambda row: row.digest),
    ),
    query=lambda request: audit_records(_audit_query(request)),
    order=("-number",),
)


def _audit_filter(request: PageRequest) -> Filter:
    return Filter(
        text_label="Exact object, such as deployment/sim-70b",
        text_name="object",
        text=request.text("object"),
        choices=(
            choose(request, "action", "every action", audit_actions()),
            choose(request, "outcome", "every outcome", (outcome.value for outcome in Outcome)),
        ),
    )


EVENTS = Page(
    section="events",
    title="Events",
    fragments=(Fragment("events-list", "", ("events",), "dashboard/events/list.html", _events),),
    narrow=_event_filter,
    lists=(EVENT_LIST,),
)
AUDIT = Page(
    section="audit",
    title="Audit",
    fragments=(Fragment("audit-list", "", (), "dashboard/audit/list.html", _audit),),
    narrow=_audit_filter,
    lists=(AUDIT_LIST,),
    role=Role.OPERATOR,
)
