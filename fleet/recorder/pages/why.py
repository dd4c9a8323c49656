"""Why, on pages: the newest decisions about an object and its time line on its own page, and a page with what it waits
for now and the other choices of a decision. Reads only."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet
from django.http import Http404
from django.urls import reverse

from controlplane.dashboard.fragments import Fragment, Page, PageRequest, found_or_404
from controlplane.explained import EXPLAINED, LOOPS, explained
from controlplane.forecast_budget import FORECASTS
from fleet.cells.models import Cell
from fleet.clouds.services.starts import NOT_STARTED
from fleet.faults.models import Incident
from fleet.load.selectors import FLEET, cell_subject, deployment_subject, load_series, step_of
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CELL_TONE, NODE_TONE, CellState, NodeState
from fleet.recorder.planning.encoding import CannotDecode
from fleet.recorder.planning.reasons import Subject
from fleet.recorder.planning.time_line import Change, Lane, Seen, Span, cell_spans, lanes_of, load_spans, states_of
from fleet.recorder.selectors import StoredReason, alternatives_of, reasons_about
from fleet.rollouts.models import Rollout
from kernel.models import Event
from kernel.refusals import Busy
from kernel.time_ranges import TimeRange
from kernel.tones import Tone
from traffic.region_shares.models import TrafficShift

SHOWN, SHOWN_ON_PAGE = 5, 50
NODES_LOADED = 500
"""A larger fleet is loaded only when someone asks, because that takes longer than a page may."""


@dataclass(frozen=True, slots=True)
class WhyPart:
    """The newest decisions about an object. `subject`: `cell:c-1`; `more`: there are others."""

    subject: str
    rows: tuple[StoredReason, ...]
    more: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class NowPart:
    """The explanation of an object's state. `is_asked`: False in a large fleet until the user requests it."""

    kind: Subject
    name: str
    sentences: tuple[str, ...] = ()
    is_asked: bool = True
    trouble: str = ""

    @property
    def page(self) -> str:
        return "deployment" if self.kind is Subject.SHARE else self.kind.value

    @property
    def page_key(self) -> str:
        return self.name.partition("@")[0] if self.kind is Subject.SHARE else self.name


def why_fragment(kind: Subject) -> Fragment:
    """The fragment of an object's own page."""

    def load(request: PageRequest) -> WhyPart:
        return _part(kind.named(request.key), SHOWN)

    return Fragment(f"{kind}-why", "Why", ("events",), "fleet/recorder/why.html", load)


def _part(subject: str, limit: int) -> WhyPart:
    found = reasons_about(subject, limit + 1, LOOPS)
    return WhyPart(subject, tuple(found[:limit]), more=len(found) > limit)


def _subject(request: PageRequest) -> tuple[Subject, str]:
    kind, _, name = request.key.partition(":")
    if kind not in set(EXPLAINED) or not name:
        kinds = ", ".join(EXPLAINED)
        raise Http404(f"There is no {request.key[:80]!r} to explain; use KIND:NAME with one of {kinds}.")
    return Subject(kind), name


def _now(request: PageRequest) -> NowPart:
    kind, name = _subject(request)
    if kind is not Subject.SHARE and not request.text("now") and Node.objects.count() > NODES_LOADED:
        return NowPart(kind, name, is_asked=False)
    try:
        with FORECASTS.take(request.caller.user.get_username()):
            return NowPart(kind, name, tuple(explained(kind, name, request.now)))
    except Busy as busy:
        return NowPart(kind, name, trouble=f"The present is not explained: {busy}.")


def _decisions(request: PageRequest) -> WhyPart:
    kind, name = _subject(request)
    part = _part(kind.named(name), SHOWN_ON_PAGE)
    chosen = request.text("choices")
    try:
        rows = tuple(
            replace(one, alternatives=alternatives_of(one, LOOPS))
            if one.has_choices and chosen == str(one.round)
            else one
            for one in part.rows
        )
    except CannotDecode as wrong:
        return replace(part, trouble=f"The other choices are unknown: {wrong}.")
    return replace(part, rows=rows)


WHY = Page(
    section="",
    title="",
    fragments=(
        Fragment("why-now", "", (), "fleet/recorder/now.html", _now),
        Fragment("why-decisions", "Decisions", ("events",), "fleet/recorder/why.html", _decisions),
    ),
)


# --- time lines ------------------------------------------------------------------------------------------------------

AROUND = timedelta(minutes=2)
ID_DIGITS = 18
SPANS_READ = 200
"""Of each lane. A cell that restarts every minute has 60 changes in an hour."""


@dataclass(frozen=True, slots=True)
class TimeLine:
    """`past_url`: the page that shows the fleet as it was at the start of a bar."""

    lanes: tuple[Lane, ...]
    span: TimeRange
    past_url: str


Lanes = dict[str, Iterable[Span]]
_PAST_OF: dict[Subject | None, str] = {Subject.CELL: "cells", Subject.NODE: "nodes"}
"""The page that shows an object as it was; the overview shows the others."""


def time_line_fragment(kind: Subject | None) -> Fragment:
    """The fragment of an object's own page; None: of the whole fleet."""
    name = "time-line" if kind is None else f"{kind}-time-line"

    def load(request: PageRequest) -> TimeLine:
        span = _span_of_incident(request) if kind is Subject.INCIDENT else request.span
        past = reverse(_PAST_OF.get(kind, "overview"))
        return TimeLine(lanes_of(_LANES[kind](request.key, span, request.now), span.start, span.end), span, past)

    return Fragment(name, "Time line", ("events",), "fleet/recorder/time_line.html", load)


def _states(kind: Subject, name: str, span: TimeRange) -> list[Span]:
    """The states of a cell or a node, from its events."""
    known: Mapping[CellState, Tone] | Mapping[NodeState, Tone] = CELL_TONE if kind is Subject.CELL else NODE_TONE
    tones = {state.value: tone for state, tone in known.items()}
    kinds = [f"{kind}.{state}" for state in tones]
    events = Event.objects.filter(**{kind.value: name}, kind__in=kinds, at__lte=span.end).order_by("-id")
    newest = list(events.values_list("at", "kind", "message")[:SPANS_READ])
    states = ((at, one.partition(".")[2], message) for at, one, message in reversed(newest))
    return states_of(Change(at, state, tones[state], message) for at, state, message in states)


def _incidents(found: "QuerySet[Incident]", span: TimeRange) -> list[Span]:
    rows = found.filter(Q(closed_at=None) | Q(closed_at__gte=span.start), opened_at__lte=span.end, shadow=False)
    return [
        Span(one.kind, one.tone, one.opened_at, one.closed_at, one.summary, "incident", str(one.pk))
        for one in rows.order_by("-id")[:SPANS_READ]
    ]


def _rollouts(found: "QuerySet[Rollout]", span: TimeRange) -> list[Span]:
    rows = found.filter(Q(ended_at=None) | Q(ended_at__gte=span.start), created_at__lte=span.end)
    return [
        Span(one.state, one.tone, one.created_at, one.ended_at, one.reason, "rollout", str(one.pk))
        for one in rows.order_by("-id")[:SPANS_READ]
    ]


def _shares(deployment: str, span: TimeRange) -> list[Span]:
    """From one change of the region shares to the next."""
    rows = TrafficShift.objects.filter(deployment=deployment, at__lte=span.end).order_by("-id")[:SPANS_READ]
    newest = list(rows)
    ends = [None, *(row.at for row in newest)]
    return [
        Span(row.kind, Tone.MOVING if number % 2 else Tone.IDLE, row.at, end, row.reason)
        for number, (row, end) in enumerate(zip(newest, ends, strict=False))
    ]


def _seen(subject: str, span: TimeRange, now: datetime) -> tuple[list[Seen | None], datetime, timedelta]:
    """Stored windows of load, with their start and step."""
    step_s = step_of(span, now)
    series = load_series([subject], span, step_s)[subject]
    seen = [Seen(one.cells, one.in_flight, one.queued) if one else None for one in series.points]
    return seen, series.start, timedelta(seconds=step_s)


def _cells_not_ready(deployment: str, span: TimeRange) -> list[Span]:
    """The states of a deployment's cells, without those that serve and those that are gone."""
    kinds = [f"cell.{state.value}" for state in CellState]
    events = Event.objects.filter(deployment=deployment, kind__in=kinds, at__lte=span.end).order_by("-id")
    newest = list(events.values_list("at", "kind", "message", "cell")[:SPANS_READ])
    changes: dict[str, list[Change]] = {}
    for at, kind, message, cell in reversed(newest):
        state = CellState(kind.partition(".")[2])
        changes.setdefault(cell, []).append(Change(at, state.value, CELL_TONE[state], message))
    quiet = {CellState.READY.value, CellState.STOPPED.value}
    return [
        replace(one, label=f"{cell} {one.label}", page="cell", key=cell)
        for cell, found in changes.items()
        for one in states_of(found)
        if one.label not in quiet
    ]


def _of_cell(name: str, span: TimeRange, now: datetime) -> Lanes:
    deployment = Cell.objects.filter(pk=name).values("deployment")
    seen = _seen(cell_subject(name), span, now)
    return {
        "State": _states(Subject.CELL, name, span),
        "Load": load_spans(*seen),
        "Incidents": _incidents(Incident.objects.filter(cell=name), span),
        "Rollouts": _rollouts(Rollout.objects.filter(deployment__in=deployment), span),
    }


def _of_node(name: str, span: TimeRange, _: datetime) -> Lanes:
    return {
        "State": _states(Subject.NODE, name, span),
        "Incidents": _incidents(Incident.objects.filter(node=name), span),
    }


def _of_deployment(name: str, span: TimeRange, now: datetime) -> Lanes:
    seen = _seen(deployment_subject(name), span, now)
    return {
        "Cells": cell_spans(*seen),
        "Not ready": _cells_not_ready(name, span),
        "Load": load_spans(*seen),
        "Rollouts": _rollouts(Rollout.objects.filter(deployment=name), span),
        "Incidents": _incidents(Incident.objects.filter(Q(deployment=name) | _of_its_machines(name)), span),
        "Shares": _shares(name, span),
    }


def _of_its_machines(deployment: str) -> Q:
    """Incidents of launches, whose evidence names all deployments that want such machines."""
    return Q(kind=NOT_STARTED, evidence__deployments__contains=[deployment])


def _of_incident(key: str, span: TimeRange, now: datetime) -> Lanes:
    """The incident, the states of its cell and its node, and the load of its deployment."""
    incident = _incident_of(key)
    itself = Span(incident.kind, incident.tone, incident.opened_at, incident.closed_at, incident.summary)
    lanes: Lanes = {"Incident": [itself]}
    for kind, name in ((Subject.CELL, incident.cell), (Subject.NODE, incident.node)):
        if name:
            lanes[kind.value.capitalize()] = _states(kind, name, span)
    if incident.deployment:
        lanes["Load"] = load_spans(*_seen(deployment_subject(incident.deployment), span, now))
    return lanes


def _incident_of(key: str) -> Incident:
    found = Incident.objects.filter(pk=int(key)).first() if key.isdecimal() and len(key) < ID_DIGITS else None
    return found_or_404(found, f"incident {key[:ID_DIGITS]}")


def _span_of_incident(request: PageRequest) -> TimeRange:
    """From shortly before it opened until shortly after it closed."""
    incident = _incident_of(request.key)
    end = min(request.now, incident.closed_at + AROUND if incident.closed_at else request.now)
    return TimeRange("", incident.opened_at - AROUND, end)


def _of_fleet(_: str, span: TimeRange, now: datetime) -> Lanes:
    return {
        "Load": load_spans(*_seen(FLEET, span, now)),
        "Incidents": _incidents(Incident.objects.all(), span),
        "Rollouts": _rollouts(Rollout.objects.all(), span),
    }


_LANES: dict[Subject | None, Callable[[str, TimeRange, datetime], Lanes]] = {
    Subject.CELL: _of_cell,
    Subject.NODE: _of_node,
    Subject.DEPLOYMENT: _of_deployment,
    Subject.INCIDENT: _of_incident,
    None: _of_fleet,
}
