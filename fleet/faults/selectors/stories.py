"""Loads the sources of an incident's story: events, replacements and repairs of its nodes and cells; its impact
on requests; and how long similar ones lasted. A constant number of queries, bounded rows. Never writes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Count, Q, QuerySet, Sum

from fleet.cells.models import Cell
from fleet.faults.models import Incident, IncidentPart, Repair, Replacement
from fleet.faults.planning.report import Healing, Impact, NoteView, Postmortem, TenantImpact, Work, median_s
from fleet.faults.planning.story import (
    SWITCHYARD,
    TABLE,
    Fault,
    Happening,
    Story,
    evidence_in_units,
    tell_story,
)
from fleet.faults.planning.views import NO_USABLE_CELL, REGION_LOST, PartNoun, Rung
from fleet.load.models import LoadWindow
from fleet.load.planner import KEPT_S
from fleet.load.selectors import cell_subject, deployment_subject, region_subject
from fleet.reconcile.planning.states import IncidentState
from kernel.models import Event
from kernel.tones import Tone

BEFORE = timedelta(minutes=2)
"""A node is lost 30 s after its last report, and 2 min after it in a region that lost its provider."""
AFTER = timedelta(seconds=30)
"""The routing table with the healed cell and the end of the old machine follow the end of the incident."""
EVENTS_READ = 400
NAMED = 50
"""Nodes and cells of one incident whose events are read."""
SHIFTS = ("traffic.shift", "traffic.held")
ROLLOUTS = ("rollout.paused", "rollout.rolling_back", "rollout.rolled_back")
ATTEMPTS = {
    "agent_restart": "the restart of its agent",
    Rung.RESET.value: f"the {Rung.RESET.noun}",
    Rung.REBOOT.value: f"the {Rung.REBOOT.noun}",
}


@dataclass(frozen=True, slots=True)
class Affected:
    """The nodes and cells of an incident."""

    nodes: tuple[str, ...]
    cells: tuple[str, ...]


def affected_by(incident: Incident) -> Affected:
    """Its parts, and what its row and its evidence name."""
    evidence = incident.evidence if isinstance(incident.evidence, dict) else {}
    parts = list(incident.parts.all())
    nodes = [incident.node, *_of(parts, PartNoun.NODE), *_names(evidence.get("nodes"), "node")]
    cells = [incident.cell, *_of(parts, PartNoun.CELL), *_names(evidence.get("cells"), "cell")]
    return Affected(*(tuple(dict.fromkeys(filter(None, names)))[:NAMED] for names in (nodes, cells)))


def _of(parts: Iterable[IncidentPart], noun: PartNoun) -> Iterator[str]:
    return (part.name for part in parts if part.noun == noun)


def _names(listed: Any, key: str) -> Iterator[str]:
    for each in listed if isinstance(listed, list) else ():
        yield str(each.get(key, "")) if isinstance(each, dict) else str(each)


def fault_of(incident: Incident) -> Fault:
    evidence = incident.evidence if isinstance(incident.evidence, dict) else {}
    return Fault(incident.kind, incident.summary, incident.opened_at, incident.closed_at, evidence)


def story_of(incident: Incident, *, now: datetime) -> Story:
    """Five queries."""
    affected = affected_by(incident)
    since, until = incident.opened_at - BEFORE, (incident.closed_at + AFTER) if incident.closed_at else now
    oldest = list(_events(incident, affected).filter(at__range=(since, until)).order_by("at", "id")[: EVENTS_READ + 1])
    newest: list[Event] = []
    if len(oldest) > EVENTS_READ:
        between = _events(incident, affected).filter(at__range=(oldest[EVENTS_READ - 1].at, until))
        newest = list(between.exclude(pk__in=[one.pk for one in oldest[:EVENTS_READ]]).order_by("-at", "-id")[:100])
    cells = [re.compile(rf"(?:(?<![\w-])|(?<=\s-)){re.escape(cell)}(?![\w-])") for cell in affected.cells]
    happenings = [
        _from_event(event, incident)
        for event in [*oldest[:EVENTS_READ], *reversed(newest)]
        if event.kind != TABLE or incident.kind == REGION_LOST or any(cell.search(event.message) for cell in cells)
    ]
    happenings += _from_replacements(incident, affected, happenings)
    happenings += _from_repairs(affected, since, until)
    return tell_story(fault_of(incident), happenings, now=now)


def _events(incident: Incident, affected: Affected) -> Any:
    about = Q(kind__startswith="incident.", detail__incident=incident.pk)
    if affected.nodes:
        about |= Q(node__in=affected.nodes)
    if affected.cells:
        about |= Q(cell__in=affected.cells)
        named = reduce(or_, (Q(message__contains=cell) for cell in affected.cells))
        about |= Q(kind=TABLE, region=incident.region) & named
    if incident.kind in {REGION_LOST, NO_USABLE_CELL}:
        for kinds in ("traffic.", "ingress."):
            about |= Q(kind__startswith=kinds, region=incident.region)
    if incident.deployment:
        about |= Q(kind__in=ROLLOUTS, deployment=incident.deployment)
        about |= Q(kind__in=SHIFTS, deployment=incident.deployment, message__contains=incident.region)
    if incident.cohort:
        about |= Q(kind="rollout.paused", message__contains=incident.summary)
    others = Q(kind__startswith="incident.") & ~Q(detail__incident=incident.pk)
    # The event of the cell tells the same.
    return Event.objects.filter(about).exclude(others).exclude(kind="incident.joined")


def _from_event(event: Event, incident: Incident) -> Happening:
    """The messages of an incident's own events repeat its summary."""
    text, cell, node = event.message, event.cell, event.node
    if event.kind in {"incident.opened", "incident.closed"}:
        rest = f": {incident.resolution}" if event.kind == "incident.closed" else ""
        text, cell, node = f"{event.kind.replace('.', ' ').capitalize()}{rest}", "", ""
    return Happening(event.at, event.kind, text, Tone(event.tone), event.actor, cell, node)


def _from_replacements(incident: Incident, affected: Affected, told: Iterable[Happening]) -> Iterator[Happening]:
    """Replacements whose begin is no event."""
    known = {(one.node, one.at) for one in told}
    for row in Replacement.objects.filter(incident=incident).order_by("id")[:NAMED]:
        if (row.node_id, row.begun_at or row.opened_at) not in known or row.rule == "silence":
            begun = "is being replaced" if row.begun_at else "is to be replaced after its cell has drained"
            text = f"{row.node_id} {begun}: {row.reason}"
            yield Happening(row.opened_at, "replacement", text, Tone.MOVING, row.actor, row.cell, row.node_id)


def _from_repairs(affected: Affected, since: datetime, until: datetime) -> Iterator[Happening]:
    rows = Repair.objects.filter(node__in=affected.nodes, what__in=list(ATTEMPTS), at__range=(since, until))
    for row in rows.order_by("id")[:NAMED]:
        yield Happening(
            row.at,
            "repair",
            f"{row.node_id}: {ATTEMPTS[row.what]} was ordered: {row.reason}",
            Tone.MOVING,
            node=row.node_id,
        )


COMPARED = 50
"""Closed incidents of a kind whose durations are compared."""
CELLS_COUNTED = 500


@dataclass(frozen=True, slots=True)
class Place:
    """A deployment in a region; "" means all."""

    deployment: str
    region: str

    @property
    def subject(self) -> str:
        return deployment_subject(self.deployment, self.region) if self.deployment else region_subject(self.region)

    def __str__(self) -> str:
        return (
            f"{self.deployment} in {self.region}" if self.deployment and self.region else self.deployment or self.region
        )


def places_of(incident: Incident) -> tuple[Place, ...]:
    """Where the incident may have hurt requests. One query."""
    if incident.kind == REGION_LOST:
        return (Place("", incident.region),)
    cells = Cell.objects.filter(pk__in=affected_by(incident).cells).order_by("deployment_id", "region_id")
    found = {Place(*each) for each in cells.values_list("deployment_id", "region_id")}
    if incident.deployment:
        found.add(Place(incident.deployment, incident.region))
    return tuple(sorted(found, key=str))


def deployments_hit(incident: Incident) -> list[str]:
    """Deployments whose requests the incident may have hurt. Two queries at most."""
    places = places_of(incident)
    names = {place.deployment for place in places if place.deployment}
    regions = [place.region for place in places if not place.deployment]
    if regions:
        names |= set(Cell.objects.filter(region__in=regions).values_list("deployment_id", flat=True).distinct())
    return sorted(names)


def impact_of(incident: Incident, start: datetime, *, now: datetime, tenants: tuple[TenantImpact, ...] = ()) -> Impact:
    """Requests at the places of the incident, in the finest windows that are kept for its whole duration. Four queries.
    `tenants`: whose requests failed, which only the billing knows."""
    places = places_of(incident)
    age_s = (now - start).total_seconds()
    step_s = next((step for step, kept_s in sorted(KEPT_S.items()) if age_s < kept_s), None)
    if not places or step_s is None:
        return Impact(tuple(map(str, places)))
    rows = LoadWindow.objects.filter(
        step_s=step_s, at__gt=start - timedelta(seconds=step_s), at__lte=incident.closed_at or now
    )
    seen = _sums(rows.filter(subject__name__in=[place.subject for place in places]))
    if not seen["windows"]:
        return Impact(tuple(map(str, places)))
    at_place = reduce(or_, (_cells_at(place) for place in places))
    cells = Cell.objects.filter(at_place).order_by("-state_since").values_list("pk", flat=True)[:CELLS_COUNTED]
    served = _sums(rows.filter(subject__name__in=[cell_subject(cell) for cell in cells]))
    # Only cells count the requests that they hand back, and only places those that no cell answered.
    retried = max(0, served["requests"] - seen["requests"])
    return Impact(tuple(map(str, places)), step_s, seen["requests"], seen["errors"], retried, seen["slow"], tenants)


def _cells_at(place: Place) -> Q:
    which = {"deployment": place.deployment, "region": place.region}
    return Q(**{name: value for name, value in which.items() if value})


def _sums(rows: QuerySet[LoadWindow]) -> dict[str, int]:
    sums = rows.aggregate(requests=Sum("requests"), errors=Sum("errors"), slow=Sum("slow"), windows=Count("at"))
    return {name: value or 0 for name, value in sums.items()}


def healing_of(incident: Incident) -> Healing:
    """How long the last incidents of the same kind lasted that healed without a user. One query."""
    alike = Incident.objects.filter(
        kind=incident.kind, state=IncidentState.CLOSED.value, shadow=False, closed_by=SWITCHYARD
    ).exclude(pk=incident.pk)
    times = alike.order_by("-id").values_list("opened_at", "closed_at")[:COMPARED]
    lasted = [(closed - opened).total_seconds() for opened, closed in times if closed]
    return Healing(median_s(lasted), len(lasted))


def postmortem_of(incident: Incident, *, now: datetime, tenants: tuple[TenantImpact, ...] = ()) -> Postmortem:
    """Everything that the report of an incident shows."""
    story = story_of(incident, now=now)
    work = Replacement.objects.filter(incident=incident).order_by("id")[:NAMED]
    return Postmortem(
        number=incident.pk,
        summary=incident.summary,
        kind=incident.kind,
        severity=incident.severity,
        state=incident.state,
        opened_at=incident.opened_at,
        closed_at=incident.closed_at,
        resolution=incident.resolution,
        owner=incident.owner,
        acknowledged_by=incident.acknowledged_by,
        runbook=incident.runbook,
        story=story,
        evidence=evidence_in_units(fault_of(incident).evidence),
        impact=impact_of(incident, story.start, now=now, tenants=tenants),
        healing=healing_of(incident),
        work=tuple(
            Work(f"Replacement of {row.node_id} ({row.rule}): {row.reason}", row.opened_at, row.actor, _result(row))
            for row in work
        ),
        notes=tuple(NoteView(note.at, note.actor, note.text) for note in incident.notes.all()),
        down=tuple(f"{part.noun} {part.name}" for part in incident.parts.all() if part.recovered_at is None),
    )


def _result(row: Replacement) -> str:
    return (row.resolution or "ended") if row.closed_at else ""
