"""Loads what the story of an incident is told from: events, replacements and repairs of its nodes and cells. A constant
number of queries, bounded rows. Never writes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q

from fleet.faults.models import Incident, Repair, Replacement
from fleet.faults.planning.story import TABLE, Fault, Happening, Story, tell_story
from fleet.faults.planning.views import Rung
from kernel.models import Event
from kernel.tones import Tone

BEFORE = timedelta(minutes=2)
"""A node is lost 30 s after its last report, and 2 min after it in a region that lost its provider."""
AFTER = timedelta(seconds=30)
"""The routing table with the healed cell and the end of the old machine follow the end of the incident."""
EVENTS_READ = 400
NAMED = 50
"""Nodes and cells of one incident whose events are told."""
SHIFTS = ("traffic.shift", "traffic.held")
ROLLOUTS = ("rollout.paused", "rollout.rolling_back", "rollout.rolled_back")
ATTEMPTS = {
    "agent_restart": "the restart of its agent",
    Rung.RESET.value: f"the {Rung.RESET.noun}",
    Rung.REBOOT.value: f"the {Rung.REBOOT.noun}",
}


@dataclass(frozen=True, slots=True)
class Affected:
    """What an incident is about."""

    nodes: tuple[str, ...]
    cells: tuple[str, ...]


def affected_by(incident: Incident) -> Affected:
    evidence = incident.evidence if isinstance(incident.evidence, dict) else {}
    nodes = [incident.node, *_names(evidence.get("nodes"), "node")]
    cells = [incident.cell, *_names(evidence.get("cells"), "cell")]
    return Affected(*(tuple(dict.fromkeys(filter(None, names)))[:NAMED] for names in (nodes, cells)))


def _names(listed: Any, key: str) -> Iterator[str]:
    for each in listed if isinstance(listed, list) else ():
        yield str(each.get(key, "")) if isinstance(each, dict) else str(each)


def fault_of(incident: Incident) -> Fault:
    evidence = incident.evidence if isinstance(incident.evidence, dict) else {}
    return Fault(incident.kind, incident.summary, incident.opened_at, incident.closed_at, evidence)


def story_of(incident: Incident, *, now: datetime) -> Story:
    """Four queries."""
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
        if event.kind != TABLE or any(cell.search(event.message) for cell in cells)
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
    if incident.deployment:
        about |= Q(kind__in=ROLLOUTS, deployment=incident.deployment)
        about |= Q(kind__in=SHIFTS, deployment=incident.deployment, message__contains=incident.region)
    if incident.cohort:
        about |= Q(kind="rollout.paused", message__contains=incident.summary)
    return Event.objects.filter(about).exclude(Q(kind__startswith="incident.") & ~Q(detail__incident=incident.pk))


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
