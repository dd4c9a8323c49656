"""The list of rollouts; the page of one with its waves, gate, charts and actions; the page that previews and starts
one. Services decide."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from django.db.models import Case, Q, QuerySet, When
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from accounts.models import Approval
from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    WHY,
    Action,
    ActionMenu,
    ActionPage,
    Confirmation,
    Field,
    Submission,
    Target,
    action_menu,
    action_page_view,
    action_view,
)
from controlplane.dashboard.charts import Band, Chart, Colour, Series, with_markers
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.events import EventList, chart_markers, rollout_events
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List, ListPage
from fleet.cells.models import Cell
from fleet.cells.pages.data import CellSummary, cells_of
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import GatePolicy, parse_policy
from fleet.load.planner import FINE_S, KEPT_S
from fleet.reconcile.planning.states import CellState, RolloutState, choices
from fleet.recorder.pages.why import why_fragment
from fleet.recorder.planning.explanations import Subject
from fleet.rollouts.models import Rollout, RolloutPoints
from fleet.rollouts.planning.gates import NEW, OLD, appended, length_of, merged
from fleet.rollouts.planning.waves import preview_seconds, preview_stages, stages_of
from fleet.rollouts.selectors import (
    ACTIVE,
    AFTER,
    BEFORE,
    MeasuredLines,
    bake_so_far,
    measured_lines,
    rollouts_described,
    stage_label,
)
from fleet.rollouts.services import (
    Proposal,
    already_serves,
    rollout_abort,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
    rollout_start_or_request,
)
from kernel.models import Event
from kernel.time_ranges import TimeRange
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import VersionState

LATENCIES = (("Time to first token", "time_to_first_token"), ("Time between tokens", "time_between_tokens"))
QUANTILES = ("median", "p95")


@dataclass(frozen=True, slots=True)
class RolloutRow:
    rollout: Rollout
    stage: str


@dataclass(frozen=True, slots=True)
class Wave:
    """One stage. `state`: pending, current, done, rolled back or not reached."""

    label: str
    cells: int
    of: int
    state: str
    tone: str


@dataclass(frozen=True, slots=True)
class GateLine:
    """One number that a gate compares, for the updated and the old cells. `unit`: "", % or ms. `samples`: of both.
    `limit`: what counts as worse, in words. `chance`: probability that the difference is chance."""

    name: str
    updated: float
    old: float | None
    unit: str = ""
    samples: tuple[float, float] | None = None
    limit: str = ""
    chance: float | None = None
    is_worse: bool = False

    @property
    def decimals(self) -> int:
        return {"%": 2, "ms": 1}.get(self.unit, 0)

    @property
    def ratio(self) -> float | None:
        """Updated to old cells, or None if it has no meaning."""
        return self.updated / self.old if self.unit and self.old else None


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """`verdict`: the last gate's, or the one that a gate would have now if `is_so_far`."""

    rollout: Rollout
    waves: tuple[Wave, ...]
    updated: int
    live: int
    verdict: Mapping[str, Any] | None
    is_so_far: bool
    compared: tuple[GateLine, ...]
    gate: GatePolicy


def _listed(request: PageRequest) -> "QuerySet[Rollout]":
    rollouts, state, text = rollouts_described(), request.text("state"), request.text("q")
    if state == "active":
        rollouts = rollouts.filter(state__in=ACTIVE)
    elif state:
        rollouts = rollouts.filter(state=state)
    if text:
        rollouts = rollouts.filter(Q(deployment__name__icontains=text) | Q(reason__icontains=text))
    return rollouts


ROLLOUT_LIST: List[RolloutRow] = List(
    name="rollouts",
    columns=(
        Column("rollout", "Rollout", lambda row: row.rollout.pk, ("id",), is_newest_first=True),
        Column("state", "State", lambda row: row.rollout.state, ("state",)),
        Column("deployment", "Deployment", lambda row: row.rollout.deployment_id, ("deployment_id",)),
        Column("from", "From", lambda row: row.rollout.from_version.reference, ("from_version_id",), "wide"),
        Column("to", "To", lambda row: row.rollout.to_version.reference, ("to_version_id",)),
        Column("stage", "Stage", lambda row: row.stage, ("stage",), "wide"),
        Column("actor", "Started by", lambda row: row.rollout.actor, ("actor",), "wide"),
        Column(
            "started", "Started", lambda row: row.rollout.created_at, ("created_at",), "number", is_newest_first=True
        ),
    ),
    query=_listed,
    rows=lambda rollouts, now: [RolloutRow(rollout, stage_label(rollout)) for rollout in rollouts],
    order=("-id",),
    filters=("state", "q"),
)


def rollout_find(key: str) -> RolloutDetail | None:
    """One rollout with everything that its page shows, or None."""
    rollout = rollouts_described().filter(pk=int(key)).first() if key.isdecimal() and len(key) < 10 else None
    if rollout is None:
        return None
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(state=CellState.STOPPED.value)
    versions = Counter(cells.values_list("model_version_id", flat=True))
    so_far = bake_so_far(rollout)
    verdict = msgspec.to_builtins(so_far) if so_far is not None else rollout.verdict
    gate = parse_policy(rollout.policy).gate
    return RolloutDetail(
        rollout=rollout,
        waves=_waves(rollout),
        updated=versions[rollout.to_version_id],
        live=versions.total(),
        verdict=verdict,
        is_so_far=so_far is not None,
        compared=tuple(gate_lines(verdict["numbers"], gate)) if verdict else (),
        gate=gate,
    )


def gate_lines(numbers: Mapping[str, float | None], gate: GatePolicy) -> Iterator[GateLine]:
    """The numbers of a verdict, each with its samples and its limit. Leaves out those that the verdict lacks."""
    requests, control = numbers.get("requests"), numbers.get("control_requests")
    if requests is None:
        return
    yield GateLine("Requests", requests, control, limit=f"at least {gate.min_samples} of each")
    if requests:
        share = 100 * (numbers.get("errors") or 0) / requests
        usual = 100 * (numbers.get("control_errors") or 0) / control if control else None
        chance = numbers.get("errors_chance")
        is_worse = usual is not None and share > gate.error_ratio * usual and _is_significant(chance, gate)
        limit = f"{gate.error_ratio:g} times"
        yield GateLine("Failed requests", share, usual, "%", (requests, control or 0), limit, chance, is_worse)
    for name, key in LATENCIES:
        samples = (numbers.get(f"{key}_samples") or 0, numbers.get(f"{key}_control_samples") or 0)
        for quantile in QUANTILES:
            here, there = numbers.get(f"{key}_{quantile}_ms"), numbers.get(f"{key}_{quantile}_control_ms")
            if here is None or there is None:
                continue
            chance = numbers.get(f"{key}_{quantile}_chance")
            is_worse = here > gate.latency_ratio * there and _is_significant(chance, gate)
            label, limit = f"{name}, {quantile}", f"{gate.latency_ratio:g} times"
            yield GateLine(label, here, there, "ms", samples, limit, chance, is_worse)


def _is_significant(chance: float | None, gate: GatePolicy) -> bool:
    return chance is not None and chance < gate.significance


def _waves(rollout: Rollout) -> tuple[Wave, ...]:
    places = DeploymentRegion.objects.filter(deployment_id=rollout.deployment_id)
    wanted = {place.region_id: place.cells_in_force for place in places}
    splits = {place.region_id: place.split for place in places}
    stages = preview_stages(parse_policy(rollout.policy), wanted, tuple(rollout.region_order), splits)
    done = rollout.state == RolloutState.SUCCEEDED
    is_rolled_back = rollout.state in {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK}
    waves = []
    for stage in stages:
        if done or stage.index < rollout.stage:
            state, tone = ("rolled back", "idle") if is_rolled_back else ("done", "ok")
        elif stage.index == rollout.stage:
            state, tone = rollout.get_state_display().lower(), str(rollout.tone)
        else:
            state, tone = "pending" if rollout.state in ACTIVE else "not reached", "idle"
        waves.append(Wave(stage.label, stage.cells, stage.of, state, tone))
    return tuple(waves)


FINE_FOR, MIDDLE_FOR = timedelta(hours=1), timedelta(days=1)
LONGEST = timedelta(days=14)
BANDS_SHOWN = 60

BAND_COLOUR: dict[RolloutState, Colour] = {
    RolloutState.RUNNING: Colour.MOVING,
    RolloutState.BAKING: Colour.BAKE,
    RolloutState.PAUSED: Colour.WARN,
    RolloutState.ROLLING_BACK: Colour.BAD,
}

CHARTS = (
    ("ttft", "Time to first token, p95 of the worst cell", "ms"),
    ("itl", "Time between tokens, p95 of the worst cell", "ms"),
    ("errors", "Failed requests", "%"),
)


def rollout_charts(rollout: Rollout, now: datetime) -> tuple[Chart, ...]:
    """Errors and latencies of both versions, in five queries. Uses the stored points if there are any."""
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    measured = _stored_lines(rollout, until) or _lines_from_load(rollout, until, now)
    if measured is None:
        return ()
    bands = _state_bands(rollout, until)
    return tuple(_chart(name, title, unit, measured, bands) for name, title, unit in CHARTS)


def _stored_lines(rollout: Rollout, until: datetime) -> MeasuredLines | None:
    """The stored points, and the samples since then, because housekeeping stores them only every few minutes."""
    points = RolloutPoints.objects.filter(rollout=rollout).first()
    if points is None:
        return None
    end = points.start + timedelta(seconds=length_of(points.lines) * points.step_s)
    steps = int((until - end).total_seconds() // points.step_s)
    tail_s = steps * points.step_s
    tail = TimeRange("", end, end + timedelta(seconds=tail_s))
    newer = measured_lines(rollout, tail, FINE_S) if 0 < tail_s <= KEPT_S[FINE_S] else None
    if newer is None:
        return MeasuredLines(points.start, points.step_s, points.lines)
    lines = appended(points.lines, merged(newer.lines, points.step_s // FINE_S))
    return MeasuredLines(points.start, points.step_s, lines)


def _lines_from_load(rollout: Rollout, until: datetime, now: datetime) -> MeasuredLines | None:
    """From load history, for rollouts without stored points."""
    since = max(rollout.created_at - BEFORE, until - LONGEST)
    return measured_lines(rollout, TimeRange("", since, until), _finest_step_s(now - since))


def _finest_step_s(age: timedelta) -> int:
    """The finest steps that load history keeps for that long."""
    return FINE_S if age <= FINE_FOR else 300 if age <= MIDDLE_FOR else 3600


def _chart(name: str, title: str, unit: str, measured: MeasuredLines, bands: tuple[Band, ...]) -> Chart:
    lines = measured.lines[name]
    both = (Series("new version", lines[NEW]), Series("old version", lines[OLD], dashed=True))
    return Chart(f"rollout-{name}", title, unit, measured.start, measured.step_s, both, bands)


def _state_bands(rollout: Rollout, until: datetime) -> tuple[Band, ...]:
    events = Event.objects.filter(
        deployment=rollout.deployment_id, kind__startswith="rollout.", detail__rollout=rollout.pk
    ).order_by("id")
    turns: list[tuple[datetime, RolloutState, int]] = []
    for event in events[: 4 * BANDS_SHOWN]:
        name, stage = event.kind.partition(".")[2], int(event.detail.get("stage", 0))
        if name not in set(RolloutState):
            continue
        state = RolloutState(name)
        if not turns or turns[-1][1:] != (state, stage):
            turns.append((event.at, state, stage))
    ends = [*(at for at, _, _ in turns[1:]), until]
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    labels = [stage.label for stage in stages] or [""]
    return tuple(
        Band(_band_label(state, labels[min(stage, len(labels) - 1)]), at, end, BAND_COLOUR[state])
        for (at, state, stage), end in zip(turns, ends, strict=False)
        if state in BAND_COLOUR
    )[:BANDS_SHOWN]


def _band_label(state: RolloutState, stage: str) -> str:
    return {RolloutState.RUNNING: stage, RolloutState.BAKING: "bake"}.get(state, state.value.replace("_", " "))


EVENTS_OF_ONE_ROLLOUT = 100
VERSIONS_OFFERED = 200

OFFERED: dict[RolloutState, tuple[str, ...]] = {
    RolloutState.RUNNING: ("pause", "roll-back", "abort"),
    RolloutState.BAKING: ("skip-bake", "pause", "roll-back", "abort"),
    RolloutState.PAUSED: ("resume", "skip-bake", "roll-back", "abort"),
    RolloutState.ROLLING_BACK: ("abort",),
}
EFFECTS: dict[str, str] = {
    "pause": "No further cell is updated. Cells that are being updated finish.",
    "resume": "The stage continues. A bake starts over.",
    "skip-bake": "The next stage starts without a gate decision.",
    "roll-back": "Every cell returns to the previous version.",
    "abort": "The rollout ends here. Every cell keeps the version that it runs.",
}


def _rollout_filter(request: PageRequest) -> Filter:
    options = (("", "all"), ("active", "active"), *choices(RolloutState))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by deployment or reason", text_name="q", text=request.text("q"), choices=(state,))


def _rollout(request: PageRequest) -> RolloutDetail:
    return found_or_404(rollout_find(request.key), f"rollout {request.key!r}")


def _rollout_charts(request: PageRequest) -> tuple[Chart, ...]:
    rollout = request.once(_rollout).rollout
    span = TimeRange("", rollout.created_at - BEFORE, (rollout.ended_at or request.now) + AFTER)
    return with_markers(rollout_charts(rollout, request.now), chart_markers(span, deployment=rollout.deployment_id))


def _rollout_cells(request: PageRequest) -> ListPage[CellSummary]:
    return cells_of(request.once(_rollout).rollout.deployment_id, request.now)


def _rollout_action_menu(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_rollout).rollout, request.caller.access, *ROLLOUT_ACTIONS)


def _events_of_rollout(request: PageRequest) -> EventList:
    return rollout_events(request.once(_rollout).rollout, EVENTS_OF_ONE_ROLLOUT)


ROLLOUTS = Page(
    section="rollouts",
    title="Rollouts",
    fragments=(Fragment("rollouts-table", "", ("rollouts",), "fleet/rollouts/table.html", ROLLOUT_LIST.page),),
    narrow=_rollout_filter,
    export=ROLLOUT_LIST.export,
)

ROLLOUT = Page(
    section="rollouts",
    title="",
    charts=True,
    actions=_rollout_action_menu,
    fragments=(
        Fragment("rollout", "", ("rollouts:{key}", "cells"), "fleet/rollouts/rollout.html", _rollout),
        Fragment(
            "rollout-charts",
            "New and old version",
            ("rollouts:{key}",),
            "dashboard/charts/several.html",
            _rollout_charts,
        ),
        why_fragment(Subject.ROLLOUT),
        Fragment("rollout-cells", "Cells", ("cells", "load"), "fleet/cells/table.html", _rollout_cells),
        Fragment("rollout-events", "Events", ("events",), "dashboard/events/list.html", _events_of_rollout),
    ),
)


def _run_service(service: Callable[..., None], form: Submission, rollout: Rollout) -> None:
    service(rollout_id=rollout.pk, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="rollout",
    find=lambda rollout_id: get_object_or_404(Rollout, pk=rollout_id),
    name=lambda rollout: f"rollout {rollout.pk}",
    url=lambda rollout: reverse("rollout", args=(rollout.pk,)),
    deployment=lambda rollout: rollout.deployment_id,
    action_url=lambda rollout, name: reverse("rollout-action", args=(rollout.pk, name)),
)
SERVICES: dict[str, Callable[..., None]] = {
    "pause": rollout_pause,
    "resume": rollout_resume,
    "skip-bake": rollout_skip_bake,
    "roll-back": rollout_roll_back,
    "abort": rollout_abort,
}


def _effect(name: str, rollout: Rollout, now: datetime) -> str:
    return EFFECTS[name]


WORDS = {"skip-bake": ("promote",), "resume": ("promote", "continue"), "abort": ("stop",)}
"""Other names of these actions, as in Argo Rollouts."""


def _why_not(name: str, rollout: Rollout) -> str:
    state = RolloutState(rollout.state)
    return "" if name in OFFERED.get(state, ()) else f"Not for a rollout that is {rollout.get_state_display().lower()}."


ROLLOUT_ACTIONS = tuple(
    Action(
        target=TARGET,
        name=name,
        label=name.replace("-", " ").capitalize(),
        run=partial(_run_service, service),
        fields=(REQUIRED_WHY if name == "skip-bake" else WHY,),
        effect=partial(_effect, name),
        why_not=partial(_why_not, name),
        words=WORDS.get(name, ()),
    )
    for name, service in SERVICES.items()
)
rollout_action = action_view(*ROLLOUT_ACTIONS)


def _propose_from_form(form: Submission) -> Proposal:
    return rollout_propose(
        deployment=form.text("deployment"),
        version=_chosen_version(form),
        policy={},
        allow_unreleased=form.text("unreleased") == "yes",
    )


def _start_from_form(form: Submission, thing: None) -> Approval | HttpResponse:
    started = rollout_start_or_request(
        proposal=_propose_from_form(form), actor=form.actor, now=form.now, why=form.text("why")
    )
    return started if isinstance(started, Approval) else redirect("rollout", key=str(started.pk))


def _chosen_version(form: Submission) -> str:
    """The version in the form, or else the newest released version of the deployment's model."""
    released = ModelVersion.objects.filter(
        state=VersionState.RELEASED.value, model__versions__deployments=form.text("deployment")
    )
    newest = None if form.text("version") else released.order_by("-id").first()
    return newest.reference if newest is not None else form.text("version")


def _form_context(form: Submission, thing: None) -> Context:
    """All deployments, and the versions of the chosen one's model: released ones first, the newest first."""
    deployments = list(Deployment.objects.order_by("name").values_list("name", flat=True))
    chosen = form.text("deployment")
    states = [VersionState.RELEASED.value, VersionState.VALIDATED.value]
    versions = ModelVersion.objects.filter(state__in=states, model__versions__deployments=chosen).distinct()
    released_first = Case(When(state=VersionState.RELEASED.value, then=0), default=1)
    offered = versions.order_by(released_first, "-id").only("model_id", "version", "state")[:VERSIONS_OFFERED]
    return {
        "form": {"deployment": chosen, "unreleased": form.text("unreleased"), "version": _chosen_version(form)},
        "deployments": deployments,
        "versions": [(version.reference, version.state) for version in offered],
    }


def _preview_context(form: Submission, thing: None) -> Context:
    """The stages of the rollout that the form describes, or {} while it is incomplete."""
    deployment, version = form.text("deployment"), _chosen_version(form)
    if not deployment or not version:
        return {}
    proposal = _propose_from_form(form)
    if already_serves(proposal.deployment, proposal.version):
        return {"serves_already": proposal}
    stages = preview_stages(proposal.policy, proposal.wanted, proposal.regions, proposal.splits)
    confirmation = Confirmation(
        name="start",
        label="Start",
        url=reverse("rollout-new"),
        effect="",
        submit=f"Roll {deployment} out to {version}",
        fields=(
            Field("deployment", kind="hidden", value=deployment),
            Field("version", kind="hidden", value=version),
            Field("unreleased", kind="hidden", value=form.text("unreleased")),
            replace(WHY, value=form.text("why")),
        ),
    )
    return {
        "proposal": proposal,
        "stages": stages,
        "at_least_s": preview_seconds(proposal.policy, stages),
        "confirmation": confirmation,
    }


NEW_ROLLOUT = Target(
    noun="rollout", find=lambda: None, name=lambda thing: "rollouts", url=lambda thing: reverse("rollouts")
)
START = Action(target=NEW_ROLLOUT, name="start", label="Start", run=_start_from_form)
rollout_new = action_page_view(
    ActionPage(
        action=START,
        template="fleet/rollouts/new.html",
        context=_form_context,
        predict=_preview_context,
        deployment=lambda form: form.text("deployment"),
    )
)
