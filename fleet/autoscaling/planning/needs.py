"""How many cells a place needs, by each rule that asks for some, and which rule asks for most: actual and forecast
load, the objective, the schedule, requests that wait for a first cell, queued work, and requests that other regions
serve for it. Also for how long requests wait for a first cell, and when it is expected. Decides nothing; `planner`
does.

A need has two levels. `cells` are needed now. `enough` must suffice before cells are removed: the same load at a lower
target, so that a load between two numbers of cells changes nothing. A first cell starts only for requests that no other
region can serve, unless the policy says otherwise."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.ingress_messages import Withheld
from fleet.autoscaling.planning.policy import (
    CELLS_MOST,
    REQUEST_HOLD_MOST_S,
    CellRange,
    CloudMetric,
    ScalingPolicy,
    WakeOn,
    window_in_force,
)
from fleet.deployments.planner import ClaimView, GrantRule


class ScalingRule(StrEnum):
    """The rule that determined a decision. Those from `max` on limit or hold what the others ask for."""

    UTILISATION = "utilisation"
    QUEUE = "queue"
    OBJECTIVE = "objective"
    AUTOPILOT = "autopilot"
    FORECAST = "forecast"
    PLAN = "plan"
    ROLES = "roles"
    WAITING = "waiting"
    BACKLOG = "backlog"
    ARRIVALS = "arrivals"
    METRIC = "metric"
    SCHEDULE = "schedule"
    MIN = "min"
    MAX = "max"
    BUDGET = "budget"
    IDLE = "idle"
    AGREEMENT = "agreement"
    ROLLOUT = "rollout"
    UNKNOWN_LOAD = "unknown_load"


@dataclass(frozen=True, slots=True)
class PlaceLoad:
    """Concurrent requests of a deployment in a region, as means of the last 15 s. `in_flight`: being processed;
    `queued`: waiting for a cell; `offered`: concurrency if none had to wait, from arrivals and `service_s`, the
    duration of a request without waiting; `autopilot`: sent there by the region autopilot; `forecast`: expected at p90
    until the next cell could be ready; None: unknown.

    `late_burn`: burn rate of late first tokens over 5 minutes; `itl_p95_ms`: inter-token latency over the same time;
    None without requests. `held`: requests waiting for a first cell now, included in those that wait; `arrivals_per_s`:
    for cells here; `elsewhere`: concurrent requests of this region's applications served by other regions; `backlog`:
    concurrency that finishes the `backlog_requests` of batches and near-real-time requests in time."""

    in_flight: float
    queued: float = 0.0
    offered: float | None = None
    service_s: float | None = None
    autopilot: float | None = None
    forecast: float | None = None
    late_burn: float | None = None
    itl_p95_ms: float | None = None
    held: float = 0.0
    arrivals_per_s: float = 0.0
    elsewhere: float = 0.0
    backlog: float = 0.0
    backlog_requests: float = 0.0

    @property
    def total(self) -> float:
        """Concurrent requests to have room for. A queue may be many times the needed concurrency, and so may arrivals
        if rejected clients retry. The smaller of both is sufficient."""
        waiting = self.in_flight + max(self.queued, self.held)
        return waiting if self.offered is None else max(self.in_flight, min(self.offered, waiting))


@dataclass(frozen=True, slots=True)
class NeedSample:
    """The cells that would have been enough at a moment, with slack; of a span of time, the maximum."""

    at: datetime
    cells: int


@dataclass(frozen=True, slots=True)
class PlannedNeed:
    """The day plan's cells there until a cell ordered now has served for one slot, with that slot's reason. `enough`:
    the maximum of a longer time, below which no cell is removed."""

    cells: int
    reason: str
    enough: int = 0


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A metric of CloudWatch in a place. `value` None: it has no recent one, because of `problem`."""

    metric: CloudMetric
    value: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ScaledPlace:
    """A region in which a deployment has a range. `current`: target by the last decision or a user (in shadow mode, by
    the last decision). `ready`: serving cells; `ready_for_s`: how long the newest has served, if any. `load`: None
    without a recent report. `cell_price`: US dollars per hour, 0 if unknown. `planned`: None without a recent plan.
    `idle_since`: since when there were no requests by the previous check. `granted`: cells allowed while machines are
    scarce, and why (None: all). `answering`: share of cells that answer, without prefill cells; `roles`: cells that the
    planner of roles needs of both roles, if apart. `capacities`: concurrency of each cell in the order in which they
    stay and are added, the last for all further ones; empty if all are equal. `metrics`: those of its policy that
    are read there."""

    region: str
    range: CellRange
    current: int
    ready: int
    ready_for_s: float | None
    load: PlaceLoad | None
    history: tuple[NeedSample, ...] = ()
    cell_price: float = 0.0
    planned: PlannedNeed | None = None
    idle_since: datetime | None = None
    granted: int | None = None
    grant_reason: str = ""
    answering: float = 1.0
    roles: PlannedNeed | None = None
    capacities: tuple[float, ...] = ()
    metrics: tuple[MetricValue, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalingView:
    """A deployment with a range in some region. `per_cell`: tested concurrency per cell; `utilisation_cap`: share to
    which the region autopilot fills cells; `start_up_s`: from the decision until a cell is ready; `elsewhere_price`:
    cost per hour of its cells in other regions."""

    deployment: str
    policy: ScalingPolicy
    per_cell: float
    utilisation_cap: float
    start_up_s: float
    places: tuple[ScaledPlace, ...]
    elsewhere_price: float = 0.0
    is_rolling: bool = False
    is_full_elsewhere: bool = True
    """Regions without a range have no room for more, or no cells."""
    displaced_regions: frozenset[str] = frozenset()
    """Regions for whose requests no other one has room; set by the planner."""
    capacities: tuple[float, ...] = ()
    """Concurrency of each cell of the current place, if they differ."""

    def at(self, place: ScaledPlace) -> "ScalingView":
        """The view with the capacity of a place's cells. With several types, `per_cell` is the mean over its target
        cells."""
        if not place.capacities:
            return replace(self, per_cell=self.per_cell * place.answering)
        count = max(1, place.current)
        mean = sum(self.carried(count, place.capacities)) / count
        return replace(self, per_cell=mean, capacities=place.capacities)

    @staticmethod
    def carried(count: int, capacities: tuple[float, ...]) -> tuple[float, ...]:
        """Concurrency of each of `count` cells."""
        return (*capacities[:count], *[capacities[-1]] * (count - len(capacities)))


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """Target cells of a place with rule and reason. `needed`: cells that the current load alone needs within the range,
    or None if unknown. `history` and `idle_since`: kept for the next check."""

    region: str
    wanted: int
    needed: int | None
    rule: ScalingRule
    reason: str
    history: tuple[NeedSample, ...]
    idle_since: datetime | None = None


GAP_S = 60.0
"""After a longer gap between checks, nothing is known about the time in between."""


def waiting_asks(place: ScaledPlace, load: PlaceLoad) -> Iterator[tuple[ScalingRule, float, str]]:
    """Rules that ask for room for waiting or queued requests: rule, concurrency and text."""
    if load.held > 0 and place.ready == 0:
        count = math.ceil(load.held)
        text = f"{count} request{' waits' if count == 1 else 's wait'} for its first cell"
        yield ScalingRule.WAITING, max(load.total, min(load.held, 1.0)), text
    if load.backlog > 0:
        text = f"the backlog of batches and near-real-time requests ({load.backlog_requests:.0f} requests)"
        yield ScalingRule.BACKLOG, load.backlog, f"{text} needs {load.backlog:.1f} concurrent requests"


def elsewhere_ask(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> tuple[ScalingRule, float, str] | None:
    """The same for requests of this region that others serve while there is no cell here."""
    if place.ready > 0 or load.elsewhere <= 0:
        return None
    text = f"{load.elsewhere:.1f} concurrent requests of this region are served in others"
    if view.policy.wake is WakeOn.ARRIVALS:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, and its policy starts a cell here"
    if place.region in view.displaced_regions:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, which have no room for more"
    return None


def is_idle(view: ScalingView, load: PlaceLoad) -> bool:
    """Whether there are no requests for cells here."""
    asks_here = load.total > 0 or load.held > 0 or load.backlog > 0 or load.arrivals_per_s > 0
    return not asks_here and not (view.policy.wake is WakeOn.ARRIVALS and load.elsewhere > 0)


def idle_since(view: ScalingView, place: ScaledPlace, now: datetime) -> datetime | None:
    """Since when the place has been idle without a gap, or None."""
    if place.load is None or not is_idle(view, place.load):
        return None
    last = place.history[-1].at if place.history else None
    was_seen = last is not None and now - last <= timedelta(seconds=GAP_S)
    return place.idle_since if place.idle_since is not None and was_seen else now


def idle_long_enough(view: ScalingView, since: datetime | None, now: datetime) -> bool:
    """Whether it has been idle for as long as its policy requires."""
    return since is not None and now - since >= timedelta(seconds=view.policy.idle_s)


START_UPS = 2.0
"""A hold covers two start-ups, so that a failed start is retried."""
REQUEST_HOLD_LEAST_S = 30
STEP = 1.25
"""Announced start-up times are rounded to steps of a quarter, because each new number changes the routing table and
reloads the hold."""


def may_be_empty(policy: ScalingPolicy, ranges: Iterable[CellRange]) -> bool:
    """Whether the policy allows a deployment without cells."""
    return any(one.min == 0 for one in ranges) or any(window.cells == 0 for window in policy.schedule)


def stepped_s(start_up_s: float) -> int:
    """The announced start-up time, rounded up."""
    return math.ceil(STEP ** math.ceil(math.log(max(1.0, start_up_s), STEP) - 1e-9))


def hold_s(policy: ScalingPolicy, start_up_s: float) -> int:
    """The maximum time for which a request is held."""
    if policy.hold_s is not None:
        return math.ceil(policy.hold_s)
    return min(REQUEST_HOLD_MOST_S, max(REQUEST_HOLD_LEAST_S, math.ceil(START_UPS * stepped_s(start_up_s))))


def ready_at_s(started: Iterable[datetime], start_up_s: float) -> int:
    """When the first starting cell is expected, in seconds since 1970, or 0 if none starts."""
    first = min(started, default=None)
    return 0 if first is None else math.ceil(first.timestamp() + stepped_s(start_up_s))


def withheld_by(claims: Iterable[ClaimView]) -> Withheld:
    """What keeps the first cell from getting machines, from the claims of the places where it may start. Nothing if one
    of them may have a cell or has no target yet."""
    rules = [claim.rule if claim.asked and claim.in_force == 0 else None for claim in claims]
    if not rules or None in rules or GrantRule.RETURN in rules:
        return Withheld.NOTHING
    return Withheld.MACHINES if GrantRule.PRIORITY in rules else Withheld.QUOTA


SLACK = 0.1
"""Share of the target that must be free before cells are removed. A Kubernetes HPA also tolerates a tenth."""
BELOW_CAP = 0.95
"""Maximum target relative to the autopilot's cap. A region at its cap gets no more requests and would never exceed its
target."""
OBJECTIVE_STEP = 0.1
"""Share of the current cells added per step, at least one, for a violated objective, because the right number is
unknown."""
OBJECTIVE_SEEN_S = 300.0
"""The objective is evaluated over this time."""
OBJECTIVE_HELPED_S = OBJECTIVE_SEEN_S + 60.0
"""How long the newest cell must have served before the next step. Old queues are gone after less than a minute; all
evaluated requests then came later."""
MIN_UTILISATION = 0.3
"""Below this utilisation, first tokens are late for other reasons, and more cells would not help."""
MIN_FORECAST = 0.05
"""A smaller forecast in concurrent requests is noise, and would keep a cell where the range begins at 0."""
DECISION_S = 900.0
"""Added to the start-up time of a forecast, so that cells suffice until the next decision takes effect."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Need:
    rule: ScalingRule
    cells: int
    enough: int
    reason: str


def load_cells(view: ScalingView, load: PlaceLoad) -> int:
    return _cells_for(load.total, target_of(view), view)


def target_of(view: ScalingView) -> float:
    """Target utilisation as a share of the tested concurrency."""
    return min(view.policy.target_utilisation, BELOW_CAP * view.utilisation_cap)


def greatest_need(view: ScalingView, place: ScaledPlace, now: datetime) -> Need:
    """The need with the most cells; the first of equal ones. `enough` is the maximum of all."""
    needs = tuple(
        need for need in all_needs(view.at(place), place, now) if need.cells > 0 or need.rule is ScalingRule.MIN
    )
    most = max(needs, key=lambda need: need.cells)
    return Need(most.rule, most.cells, max(need.enough for need in needs), most.reason)


def _metric_need(place: ScaledPlace, one: MetricValue) -> Need:
    """Without a recent value the place keeps its cells: an outage of CloudWatch must not look like an absence of
    work."""
    if one.value is None:
        text = f"{one.metric} has no recent value ({one.problem or 'none was read'})"
        text = f"{text}: it keeps {cells_text(place.current)}"
        return Need(ScalingRule.METRIC, place.current, place.current, text)
    value, per_cell = max(0.0, one.value), one.metric.per_cell
    levels = (per_cell, per_cell * (1 - SLACK))
    cells, enough = (math.ceil(min(value / level, CELLS_MOST) - ROUNDING) for level in levels)
    text = f"{one.metric} is {value:g}, and a cell does {per_cell:g}: {cells_text(cells)}"
    return Need(ScalingRule.METRIC, cells, enough, text)


def all_needs(view: ScalingView, place: ScaledPlace, now: datetime) -> Iterator[Need]:
    """What each rule asks for. `view`: with the capacity of the place's cells."""
    if place.load is not None:
        yield from _waiting_needs(view, place, place.load)
        if place.planned is None:  # a plan includes the forecast
            yield from _forecast_need(view, place.load)
        if place.current > 0:  # without cells only current requests count
            yield _utilisation_need(view, place.load)
            yield from _autopilot_need(view, place.load)
            yield from _objective_need(view, place, place.load)
    if place.planned is not None:
        text = f"the day plan has {cells_text(place.planned.cells)} there: {place.planned.reason}"
        enough = max(place.planned.cells, place.planned.enough)
        yield Need(ScalingRule.PLAN, place.planned.cells, enough, text)
    if place.roles is not None and place.current > 0:
        yield Need(ScalingRule.ROLES, place.roles.cells, place.roles.cells, place.roles.reason)
    if (window := window_in_force(view.policy.schedule, place.region, now)) and window.cells > 0:
        text = f"a window of the schedule ({window.cron} {window.time_zone}) wants {cells_text(window.cells)}"
        yield Need(ScalingRule.SCHEDULE, window.cells, window.cells, text)
    yield from (_metric_need(place, one) for one in place.metrics)
    least = place.range.min
    no_requests = "" if least else "no requests, and "
    yield Need(ScalingRule.MIN, least, least, f"{no_requests}its range begins at {least}")


def _waiting_needs(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> Iterator[Need]:
    """At least one cell for requests that are not being processed here."""
    asks = [*waiting_asks(place, load)]
    if ask := elsewhere_ask(view, place, load):
        asks.append(ask)
    target = target_of(view)
    for rule, requests, text in asks:
        enough = max(1, _cells_for(requests, target * (1 - SLACK), view))
        yield Need(
            rule,
            max(1, _cells_for(requests, target, view)),
            enough,
            f"{text}: {_cells_for_text(view, requests, target)}",
        )


def _utilisation_need(view: ScalingView, load: PlaceLoad) -> Need:
    """Waiting requests count like those being processed."""
    target, total = target_of(view), load.total
    rule, waiting = ScalingRule.UTILISATION, ""
    if load_cells(view, load) > _cells_for(load.in_flight, target, view):
        rule, waiting = ScalingRule.QUEUE, f", of which {load.in_flight:.1f} are in flight and {load.queued:.1f} wait,"
    text = f"{total:.1f} concurrent requests{waiting} need {_cells_for_text(view, total, target)}"
    return Need(rule, _cells_for(total, target, view), _cells_for(total, target * (1 - SLACK), view), text)


def _autopilot_need(view: ScalingView, load: PlaceLoad) -> Iterator[Need]:
    if load.autopilot is None:
        return
    cap = view.utilisation_cap
    text = f"the region autopilot sends {load.autopilot:.1f} concurrent requests, which need"
    yield Need(
        ScalingRule.AUTOPILOT,
        _cells_for(load.autopilot, cap, view),
        _cells_for(load.autopilot, cap * (1 - SLACK), view),
        f"{text} {_cells_for_text(view, load.autopilot, cap)}",
    )


def _forecast_need(view: ScalingView, load: PlaceLoad) -> Iterator[Need]:
    if load.forecast is None or load.forecast < MIN_FORECAST:
        return
    target = target_of(view)
    within = f"{view.start_up_s + DECISION_S:.0f} s"
    text = f"up to {load.forecast:.1f} concurrent requests are expected within {within} (p90), which need"
    yield Need(
        ScalingRule.FORECAST,
        _cells_for(load.forecast, target, view),
        _cells_for(load.forecast, target * (1 - SLACK), view),
        f"{text} {_cells_for_text(view, load.forecast, target)}",
    )


def _objective_need(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> Iterator[Need]:
    """One step more while latency objectives are missed on busy cells and the previous step has had its time. Never
    fewer in the meantime."""
    if not (complaint := _missed_objective(view, load)):
        return
    current = place.range.clamped(place.current)
    is_busy = load.total >= MIN_UTILISATION * place.ready * view.per_cell
    if not is_busy:
        return
    had_its_time = place.ready >= current and (place.ready_for_s or 0.0) >= OBJECTIVE_HELPED_S
    step = max(1, math.ceil(OBJECTIVE_STEP * current)) if had_its_time else 0
    ask = f"{cells_text(step)} more than {current}" if step else f"the current {cells_text(current)}"
    yield Need(ScalingRule.OBJECTIVE, current + step, current + step, f"{complaint}: {ask}")


def _missed_objective(view: ScalingView, load: PlaceLoad) -> str:
    policy = view.policy
    if policy.slo_burn is not None and load.late_burn is not None and load.late_burn >= policy.slo_burn:
        return (
            f"late first tokens burn their budget {load.late_burn:.1f} times too fast; {policy.slo_burn:g} is allowed"
        )
    if policy.itl_p95_ms is not None and load.itl_p95_ms is not None and load.itl_p95_ms > policy.itl_p95_ms:
        return f"inter-token latency is {load.itl_p95_ms:.0f} ms at its 95th percentile, beyond {policy.itl_p95_ms:g}"
    return ""


def _cells_for(requests: float, share: float, view: ScalingView) -> int:
    """The fewest cells, in their order, that carry this concurrency together."""
    if not view.capacities:
        return math.ceil(requests / (share * view.per_cell) - ROUNDING)
    left = requests / share
    for number, capacity in enumerate(view.capacities):
        if left <= ROUNDING * capacity:
            return number
        left -= capacity
    return len(view.capacities) + max(0, math.ceil(left / view.capacities[-1] - ROUNDING))


def _cells_for_text(view: ScalingView, requests: float, share: float) -> str:
    cells = _cells_for(requests, share, view)
    each = f"{view.per_cell:g} each"
    if view.capacities:
        of = Counter(view.carried(cells, view.capacities))
        each = "what each was tested for: " + " and ".join(f"{n} for {most:g}" for most, n in sorted(of.items()))
    return f"{cells_text(cells)} at {share:.0%} of {each}"


def cells_text(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"
