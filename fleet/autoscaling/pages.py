"""Sections of a deployment's page: autoscaler with its latest decisions, prefill and decode cells with their pairs and
handovers, and forecasts next to the actual load. Reads only."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from controlplane.dashboard.charts import Band, Chart, Series
from controlplane.dashboard.events import marked
from engine_agent.protocol.load_messages import HandoverLoad
from engine_agent.protocol.states import CellRole
from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState, ScalingSwitch
from fleet.autoscaling.planning.needs import ScalingRule, may_be_empty
from fleet.autoscaling.planning.policy import InvalidScaling, ScalingMode, ScalingPolicy
from fleet.autoscaling.planning.role_split import RoleSplit, counted
from fleet.autoscaling.planning.roles import RatioRule
from fleet.autoscaling.selectors import scaling_state, scaling_switch
from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, LEADS, SLOT_S, SLOTS, HorizonErrors, horizon_errors
from fleet.cells.models import Cell
from fleet.cells.selectors import Pairings, pairings
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.load.pages import load_of, report_of
from fleet.reconcile.planning.states import CellState
from kernel.tones import Tone
from traffic.demand.models import DemandDay, DemandForecast, ForecastRecord
from traffic.demand.selectors import FORECAST_FRESH_FOR
from traffic.routing.planning.tables import HeldDeployment
from traffic.routing.selectors import held_deployments


@dataclass(frozen=True, slots=True)
class RolePlace:
    """A region by role. `state`: None if its roles are not planned."""

    place: DeploymentRegion
    wanted: RoleSplit
    ready: RoleSplit
    state: RoleState | None

    @property
    def tone(self) -> Tone:
        if self.state is not None and self.state.rule == RatioRule.UNKNOWN:
            return Tone.IDLE
        return Tone.OK if self.ready == self.wanted else Tone.MOVING


@dataclass(frozen=True, slots=True)
class RoleCell:
    """A prefill or decode cell. `pairs`: of a decode cell, the prefill cells that it may call; `layout`: their common
    KV layout; `handovers`: None without a recent report of its leader."""

    cell: Cell
    layout: str
    pairs: tuple[str, ...]
    handovers: HandoverLoad | None

    @property
    def is_decode(self) -> bool:
        return self.cell.role == CellRole.DECODE

    @property
    def is_alone(self) -> bool:
        """Whether a decode cell has no prefill cell of its layout and computes its own prompts."""
        return self.is_decode and not self.pairs


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """Requests of decode cells without a handover since their proxies started. `is_fallback`: a prefill cell failed;
    otherwise by rule."""

    reason: str
    count: int
    is_fallback: bool

    @property
    def tone(self) -> Tone:
        return Tone.WARN if self.is_fallback else Tone.IDLE


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of one deployment. `handed_over`: requests whose prompts a prefill cell computed since proxies started.
    `are_types_mixed`: it lists several instance types, between which handovers are impossible."""

    deployment: str
    are_types_mixed: bool
    is_planned: bool
    itl_ms: float
    places: tuple[RolePlace, ...]
    cells: tuple[RoleCell, ...]
    handed_over: int
    reasons: tuple[ReasonRow, ...]


def roles_of(deployment: Deployment, now: datetime) -> Roles:
    places = DeploymentRegion.objects.filter(deployment=deployment).select_related("role_state").order_by("region_id")
    ready = _ready_roles(deployment)
    rows = [
        RolePlace(place, place.split, counted(ready[place.region_id]), getattr(place, "role_state", None))
        for place in places
    ]
    apart = list(_cells_apart(deployment))
    pairs = pairings(apart)
    shown = tuple(_role_cell(cell, pairs, now) for cell in apart)
    loads = [one.handovers for one in shown if one.handovers is not None]
    is_planned = deployment.plans_roles
    return Roles(
        deployment.name,
        len(deployment.instance_types) > 1,
        is_planned,
        deployment.scaling.get("itl_p99_ms", 50.0),
        tuple(row for row in rows if is_planned or row.place.prefill or row.ready.is_apart),
        shown,
        sum(load.handovers_total for load in loads),
        (*_reasons((load.fallbacks for load in loads), is_fallback=True), *_reasons(load.alone for load in loads)),
    )


def _ready_roles(deployment: Deployment) -> Mapping[str, list[CellRole]]:
    """Region -> roles of its ready cells. Reads two columns, because a deployment may have hundreds of mixed cells."""
    ready: dict[str, list[CellRole]] = defaultdict(list)
    found = Cell.objects.filter(deployment=deployment, state=CellState.READY.value)
    for region, role in found.values_list("region_id", "role"):
        ready[region].append(CellRole(role))
    return ready


def _cells_apart(deployment: Deployment) -> Iterable[Cell]:
    live = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    live = live.exclude(role=CellRole.MIXED.value)
    return live.prefetch_related("members__node__report").order_by("region_id", "created_at", "id")


def _role_cell(cell: Cell, pairs: Pairings, now: datetime) -> RoleCell:
    leader = next((member for member in cell.members.all() if member.rank == 0), None)
    load = load_of(cell, report_of(leader.node), now) if leader else None
    if cell.role == CellRole.DECODE:
        named = tuple(one.cell for one in pairs.prefill_cells(cell.pk))
    else:
        named = pairs.decode_cells(cell.pk)
    return RoleCell(cell, pairs.layout(cell.pk), named, load.handovers if load else None)


def _reasons(counts: Iterable[Mapping[str, int]], *, is_fallback: bool = False) -> Iterable[ReasonRow]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return (ReasonRow(reason, count, is_fallback) for reason, count in total.most_common())


SERIES_SHOWN = 4
"""The series with most load; the API returns all."""
PER_SLOT = SLOT_S // HISTORY_SLOT_S
HOUR = LEADS.index(3)
"""The one-hour horizon: its slot begins 45 minutes after the forecast."""
DAY = timedelta(days=1)
Values = list[float | None]


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """A series. `errors`: of the method in force at each horizon; `is_old`: the forecast is no longer used."""

    forecast: DemandForecast
    chart: Chart
    errors: tuple[HorizonErrors, ...]
    is_old: bool


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Forecasts of one deployment. `hidden`: number of series not shown."""

    deployment: str
    rows: tuple[ForecastRow, ...]
    hidden: int


def forecasts_of(deployment: str, now: datetime) -> Forecasts:
    found = DemandForecast.objects.filter(deployment=deployment)
    ordered = sorted(found, key=lambda row: -max(row.p50, default=0.0))
    shown = ordered[:SERIES_SHOWN]
    begins = min((row.made_at for row in shown), default=now) - DAY
    records = ForecastRecord.objects.filter(series__in=shown, made_at__gte=begins - timedelta(hours=1))
    days = DemandDay.objects.filter(deployment=deployment, day__gte=begins.date())
    loads = {(day.origin_id, day.serving_class, day.day): day.loads for day in days}
    said: dict[int, list[ForecastRecord]] = {}
    for record in records:
        said.setdefault(record.series_id, []).append(record)
    rows = tuple(_forecast_row(row, loads, said.get(row.pk, []), now) for row in shown)
    charts = marked((row.chart for row in rows), deployment=deployment)
    marked_rows = tuple(replace(row, chart=chart) for row, chart in zip(rows, charts, strict=True))
    return Forecasts(deployment, marked_rows, len(ordered) - len(shown))


def _forecast_row(
    row: DemandForecast,
    loads: dict[tuple[str, str, date], list[float | None]],
    records: list[ForecastRecord],
    now: datetime,
) -> ForecastRow:
    begins = row.made_at - DAY
    nothing: Values = [None] * SLOTS
    before, before_p90 = _forecast_an_hour_before(row, records, begins)
    chart = Chart(
        f"forecast-{row.pk}",
        f"From {row.origin_id}, {row.serving_class}",
        "requests at once",
        begins,
        SLOT_S,
        (
            Series("load", [*(_slot_load(row, loads, begins, slot) for slot in range(SLOTS)), *nothing]),
            Series("p50", [*nothing, *row.p50]),
            Series("p90", [*nothing, *row.p90], dashed=True),
            Series("p50, an hour before", [*before, *nothing]),
            Series("p90, an hour before", [*before_p90, *nothing], dashed=True),
        ),
        bands=(Band("expected", row.made_at, row.made_at + DAY),),
    )
    errors = tuple(one for one in horizon_errors(row.ledger) if one.chosen)
    return ForecastRow(row, chart, errors, now - row.made_at > FORECAST_FRESH_FOR)


def _slot_load(
    row: DemandForecast, loads: dict[tuple[str, str, date], list[float | None]], begins: datetime, slot: int
) -> float | None:
    known = []
    for part in range(PER_SLOT):
        at = begins + timedelta(seconds=slot * SLOT_S + part * HISTORY_SLOT_S)
        number = (at.hour * 3600 + at.minute * 60) // HISTORY_SLOT_S
        there = loads.get((row.origin_id, row.serving_class, at.date()), [])
        known += [load for load in there[number : number + 1] if load is not None]
    return sum(known) / len(known) if known else None


def _forecast_an_hour_before(
    row: DemandForecast, records: list[ForecastRecord], begins: datetime
) -> tuple[Values, Values]:
    """p50 and p90 of the method in force; each record covers half an hour."""
    method = row.methods[LEADS[HOUR]]
    both: tuple[Values, Values] = ([None] * SLOTS, [None] * SLOTS)
    for record in records:
        first = round((record.made_at - begins).total_seconds() / SLOT_S) + LEADS[HOUR]
        for values, said in zip(both, (record.p50, record.p90), strict=True):
            for slot in range(max(0, first), min(SLOTS, first + 2)):
                values[slot] = said[method][HOUR] if method in said else None
    return both


DECISIONS_SHOWN = 8
BOUND = frozenset({ScalingRule.MAX.value, ScalingRule.BUDGET.value, ScalingRule.UNKNOWN_LOAD.value})
"""Rules that may need an operator's attention."""


@dataclass(frozen=True, slots=True)
class ScaledPlaceRow:
    """A region with a range. `state`: None before the first check."""

    place: DeploymentRegion
    state: ScalingState | None

    @property
    def tone(self) -> Tone:
        if self.state is None or self.state.rule in BOUND:
            return Tone.WARN if self.state else Tone.IDLE
        return Tone.OK if self.state.wanted == self.place.cells else Tone.MOVING

    @property
    def percent(self) -> float | None:
        """Utilisation of the target cells in percent of their tested concurrency."""
        load: dict[str, float] = self.state.load if self.state else {}
        if "in_flight" not in load or not load.get("per_cell") or not self.place.cells:
            return None
        return 100.0 * (load["in_flight"] + load["queued"]) / (self.place.cells * load["per_cell"])

    @property
    def held(self) -> int:
        """Requests that waited for the first cell at the latest check."""
        return round((self.state.load if self.state else {}).get("held") or 0)


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision and its regret in cell-seconds; None before the next check."""

    decision: ScalingDecision
    tone: Tone
    too_few_s: float | None
    too_many_s: float | None


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Autoscaling of one deployment. `problem`: why its stored policy is invalid; nothing is changed then."""

    deployment: str
    policy: ScalingPolicy
    switch: ScalingSwitch
    places: tuple[ScaledPlaceRow, ...]
    decisions: tuple[DecisionRow, ...]
    problem: str = ""
    hold: HeldDeployment | None = None
    """How requests wait for its first cell, or None."""

    @property
    def may_be_empty(self) -> bool:
        return may_be_empty(self.policy, [row.place.range for row in self.places if row.place.range])

    @property
    def target_percent(self) -> float:
        return 100.0 * self.policy.target_utilisation

    @property
    def is_shadow(self) -> bool:
        return self.policy.mode is ScalingMode.SHADOW


def autoscaling_of(deployment: Deployment) -> Autoscaling:
    places = DeploymentRegion.objects.filter(deployment=deployment, cells_max__isnull=False)
    rows = places.select_related("scaling_state").order_by("region_id")
    decisions = ScalingDecision.objects.filter(deployment=deployment)[:DECISIONS_SHOWN]
    policy, problem = ScalingPolicy(), ""
    try:
        policy = deployment.scaling_policy()
    except InvalidScaling as wrong:
        problem = str(wrong)
    return Autoscaling(
        deployment.name,
        policy,
        scaling_switch(),
        tuple(ScaledPlaceRow(place, scaling_state(place)) for place in rows),
        tuple(_decision(row) for row in decisions),
        problem,
        held_deployments().get(deployment.name),
    )


def _decision(row: ScalingDecision) -> DecisionRow:
    tone = Tone.IDLE if not row.acted else Tone.WARN if row.rule in BOUND else Tone.MOVING
    if not row.observed_s:
        return DecisionRow(row, tone, None, None)
    return DecisionRow(row, tone, row.too_few_cell_s, row.too_many_cell_s)
