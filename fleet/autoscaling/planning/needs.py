"""What the autoscaler looks at and what it decides. Pure data.

What is asked for a place that may have no cells at all: by requests that wait for its first one, by work that is
queued, and by requests that other regions serve for it. And since when nobody asks. Pure.

A first cell is started where somebody would else go without. Requests that another region serves start none, unless the
policy says so or that region has no room for them.

For how long requests wait for the first cell of a deployment that may have none, and when it is expected. Pure.

How many cells a place takes, by each rule that asks for some, and which of them asks for most. Pure.

A need has two levels. `cells` is what is needed now, and is wanted at once. `enough` is what would have to be enough
before there are fewer: the same load at a lower target, so that a load at the edge between two numbers changes nothing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.ingress_messages import Withheld
from fleet.autoscaling.planning.policy import HOLD_MOST_S, CellRange, ScalingPolicy, WakeOn, window_in_force
from fleet.deployments.planner import ClaimView, GrantRule


class ScalingRule(StrEnum):
    """What a decision follows from. Those from `max` on bound or hold what the others ask for."""

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
    """Requests at once of a deployment in a region: `in_flight` are worked on, `queued` wait for a cell, both as means
    of the last 15 s. `offered`: what all that arrive would be if none had to wait, by how long requests took while none
    did; `autopilot`: what the region autopilot sends there; `forecast`: what is expected, at p90, until a cell that is
    decided on next is ready. None: nobody says.

    `service_s`: how long a request took while none had to wait. `late_burn`: how many times too fast late first tokens
    burn their budget over 5 minutes; `itl_p95_ms`: inter-token latency meanwhile. None: no request to judge by.

    `held` requests wait for a first cell at this moment, and are among those that wait; `arrivals_per_s` come for the
    cells here; `elsewhere` are those of this region's applications that other regions serve, at once. `backlog`:
    requests at once by which what batches and near-real-time requests queue, `backlog_requests`, is done in time.
    """

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
        """Requests at once to have room for. A queue is what could not be served so far, and may be many times what
        would have to be served at once; what arrives may be many times that, too, where who is refused tries again. The
        lesser of both is not too little."""
        waiting = self.in_flight + max(self.queued, self.held)
        return waiting if self.offered is None else max(self.in_flight, min(self.offered, waiting))


@dataclass(frozen=True, slots=True)
class NeedSample:
    """How many cells would have been enough at a moment, with some slack; of a span of time, the most of it."""

    at: datetime
    cells: int


@dataclass(frozen=True, slots=True)
class PlannedNeed:
    """What the plan of the day has there soon: the most cells of the slots until one that is ordered now has served
    for a slot, and of which slot and what for. `enough`: the most until some time later, if
    that is more; there are not fewer before."""

    cells: int
    reason: str
    enough: int = 0


@dataclass(frozen=True, slots=True)
class ScaledPlace:
    """A region in which a deployment has a range. `current`: how many cells it should have, by the last decision or a
    person; in shadow, by the last decision alone. `ready` serve; `ready_for_s`: for how long the youngest of them has;
    None: none is. `load` None: nobody has reported it lately. `cell_price`: US dollars an hour there; 0: unknown.
    `planned` None: there is no plan, or it is too old. `idle_since`: since when nobody has asked, by the look before;
    None: somebody did. `granted`: how many cells it may have while machines are short, and why; None: all.
    `answering`: which part of its cells should answer requests, where others only read prompts; `roles`: how many cells
    the planner of roles needs of both; None: it plans none apart. `capacities`: requests at once of its cells, in the
    order in which they stay and others come, the last also of all further ones; none: all as the deployment's."""

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


@dataclass(frozen=True, slots=True)
class ScalingView:
    """A deployment whose cells are a range somewhere. `per_cell`: requests at once that a cell was tested for;
    `utilisation_cap`: to which share of that the region autopilot fills; `start_up_s`: from a decision until the cell
    is ready; `elsewhere_price`: US dollars an hour for the cells that it has where no range is."""

    deployment: str
    policy: ScalingPolicy
    per_cell: float
    utilisation_cap: float
    start_up_s: float
    places: tuple[ScaledPlace, ...]
    elsewhere_price: float = 0.0
    is_rolling: bool = False
    is_full_elsewhere: bool = True
    """Cells where no range is have no room for more, or there are none."""
    crowded_out: frozenset[str] = frozenset()
    """Regions whose requests no other one has room for: for the planner to fill in."""
    capacities: tuple[float, ...] = ()
    """As of the place that is looked at: what its cells carry one by one, where they are not alike."""

    def at(self, place: ScaledPlace) -> "ScalingView":
        """With what the cells of a place carry, where only a part of them answers, or they are of several types;
        `per_cell` is then the mean of those that there should be."""
        if not place.capacities:
            return replace(self, per_cell=self.per_cell * place.answering)
        count = max(1, place.current)
        mean = sum(self.carried(count, place.capacities)) / count
        return replace(self, per_cell=mean, capacities=place.capacities)

    @staticmethod
    def carried(count: int, capacities: tuple[float, ...]) -> tuple[float, ...]:
        """What so many cells carry, one by one."""
        return (*capacities[:count], *[capacities[-1]] * (count - len(capacities)))


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """How many cells a place should have now, by which rule, and why in a sentence. `needed`: what its load alone takes
    at this moment, within the range; None: unknown. `history` and `idle_since` are to be kept for the next look."""

    region: str
    wanted: int
    needed: int | None
    rule: ScalingRule
    reason: str
    history: tuple[NeedSample, ...]
    idle_since: datetime | None = None


GAP_S = 60.0
"""A longer time without a look is one of which nothing is known."""


def waiting_asks(place: ScaledPlace, load: PlaceLoad) -> Iterator[tuple[ScalingRule, float, str]]:
    """Rules by which so many requests at once are to have room at least, each with what it says of them."""
    if load.held > 0 and place.ready == 0:
        count = math.ceil(load.held)
        text = f"{count} request{' waits' if count == 1 else 's wait'} for its first cell"
        yield ScalingRule.WAITING, max(load.total, min(load.held, 1.0)), text
    if load.backlog > 0:
        text = f"what is queued of batches and near-real-time requests ({load.backlog_requests:.0f} requests)"
        yield ScalingRule.BACKLOG, load.backlog, f"{text} is done in time by {load.backlog:.1f} at once"


def elsewhere_ask(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> tuple[ScalingRule, float, str] | None:
    """The same for requests from here that other regions serve while there is no cell here."""
    if place.ready > 0 or load.elsewhere <= 0:
        return None
    text = f"{load.elsewhere:.1f} requests at once of this region are served in others"
    if view.policy.wake is WakeOn.ARRIVALS:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, and its policy starts a cell here"
    if place.region in view.crowded_out:
        return ScalingRule.ARRIVALS, load.elsewhere, f"{text}, which have no room for more"
    return None


def is_idle(view: ScalingView, load: PlaceLoad) -> bool:
    """Whether nobody asks for anything that a cell here is for."""
    asks_here = load.total > 0 or load.held > 0 or load.backlog > 0 or load.arrivals_per_s > 0
    return not asks_here and not (view.policy.wake is WakeOn.ARRIVALS and load.elsewhere > 0)


def idle_since(view: ScalingView, place: ScaledPlace, now: datetime) -> datetime | None:
    """Since when that has been so, as far as it was seen; None: it is not, or nobody knows."""
    if place.load is None or not is_idle(view, place.load):
        return None
    last = place.history[-1].at if place.history else None
    was_seen = last is not None and now - last <= timedelta(seconds=GAP_S)
    return place.idle_since if place.idle_since is not None and was_seen else now


def idle_long_enough(view: ScalingView, since: datetime | None, now: datetime) -> bool:
    """Whether it has been idle for as long as its policy says."""
    return since is not None and now - since >= timedelta(seconds=view.policy.idle_s)


START_UPS = 2.0
"""So many start-up times: a start that fails once is made again."""
HOLD_LEAST_S = 30
STEP = 1.25
"""Start-up times are told in steps of a quarter: each new number is a new routing table, and of the hold a reload."""


def may_be_empty(policy: ScalingPolicy, ranges: Iterable[CellRange]) -> bool:
    """Whether a deployment may be without cells by its own policy."""
    return any(one.min == 0 for one in ranges) or any(window.cells == 0 for window in policy.schedule)


def stepped_s(start_up_s: float) -> int:
    """The start-up time as it is told, rounded up."""
    return math.ceil(STEP ** math.ceil(math.log(max(1.0, start_up_s), STEP) - 1e-9))


def hold_s(policy: ScalingPolicy, start_up_s: float) -> int:
    """For how long a request is held at most."""
    if policy.hold_s is not None:
        return math.ceil(policy.hold_s)
    return min(HOLD_MOST_S, max(HOLD_LEAST_S, math.ceil(START_UPS * stepped_s(start_up_s))))


def ready_at_s(started: Iterable[datetime], start_up_s: float) -> int:
    """When the first of the cells that start is expected, in seconds since 1970; 0: none starts."""
    first = min(started, default=None)
    return 0 if first is None else math.ceil(first.timestamp() + stepped_s(start_up_s))


def withheld_by(claims: Iterable[ClaimView]) -> Withheld:
    """What keeps the first cell from machines: by claims of the places where one may start. Nothing does while one of
    them may have a cell, or has not been set one yet."""
    rules = [claim.rule if claim.asked and claim.in_force == 0 else None for claim in claims]
    if not rules or None in rules or GrantRule.RETURN in rules:
        return Withheld.NOTHING
    return Withheld.MACHINES if GrantRule.PRIORITY in rules else Withheld.QUOTA


SLACK = 0.1
"""Of the target that must be free before there are fewer cells: a Kubernetes HPA ignores a tenth as well."""
BELOW_CAP = 0.95
"""Of the autopilot's cap that a target may be: a region at its cap is given no more, and would never look too full."""
OBJECTIVE_STEP = 0.1
"""Of the cells that there are, and at least one, for an objective that burns: nobody knows how many would be enough."""
OBJECTIVE_SEEN_S = 300.0
"""Over so long the objective is judged."""
OBJECTIVE_HELPED_S = OBJECTIVE_SEEN_S + 60.0
"""So long the youngest cell must have served before there is another step: what had waited for it is over after less
than a minute, and then all that is judged came after that."""
LEAST_UTILISATION = 0.3
"""Below, first tokens are late for another reason than too few cells, and more of these would not help."""
FORECAST_LEAST = 0.05
"""Requests at once; less is no forecast that anybody comes, and would keep a cell where the range begins at 0."""
DECISION_S = 900.0
"""Beyond a start-up that a forecast counts: what is decided now is to be enough until what is decided next is there."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Need:
    rule: ScalingRule
    cells: int
    enough: int
    reason: str


def load_cells(view: ScalingView, load: PlaceLoad) -> int:
    """What the load of this moment alone takes."""
    return _cells(load.total, target_of(view), view)


def target_of(view: ScalingView) -> float:
    """How full cells should be, as a share of what they were tested for."""
    return min(view.policy.target_utilisation, BELOW_CAP * view.utilisation_cap)


def greatest_need(view: ScalingView, place: ScaledPlace, now: datetime) -> Need:
    """Of all that asks for cells what asks for most; of equals, what comes first. `enough` is the most of any."""
    needs = tuple(need for need in _needs(view.at(place), place, now) if need.cells > 0 or need.rule is ScalingRule.MIN)
    most = max(needs, key=lambda need: need.cells)
    return Need(most.rule, most.cells, max(need.enough for need in needs), most.reason)


def _needs(view: ScalingView, place: ScaledPlace, now: datetime) -> Iterator[Need]:
    if place.load is not None:
        yield from _asked(view, place, place.load)
        if place.planned is None:  # a plan is made from what is forecast
            yield from _forecast(view, place.load)
        if place.current > 0:  # without cells it is who asks now that counts, and no mean of before
            yield _utilisation(view, place.load)
            yield from _autopilot(view, place.load)
            yield from _objective(view, place, place.load)
    if place.planned is not None:
        text = f"the plan of the day has {cells_text(place.planned.cells)} there: {place.planned.reason}"
        enough = max(place.planned.cells, place.planned.enough)
        yield Need(ScalingRule.PLAN, place.planned.cells, enough, text)
    if place.roles is not None and place.current > 0:
        yield Need(ScalingRule.ROLES, place.roles.cells, place.roles.cells, place.roles.reason)
    if (window := window_in_force(view.policy.schedule, place.region, now)) and window.cells > 0:
        text = f"a window of the schedule ({window.cron} {window.time_zone}) wants {cells_text(window.cells)}"
        yield Need(ScalingRule.SCHEDULE, window.cells, window.cells, text)
    least = place.range.min
    nobody = "" if least else "nobody asks, and "
    yield Need(ScalingRule.MIN, least, least, f"{nobody}its range begins at {least}")


def _asked(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> Iterator[Need]:
    """By what is not worked on here: one cell at least."""
    asks = [*waiting_asks(place, load)]
    if ask := elsewhere_ask(view, place, load):
        asks.append(ask)
    target = target_of(view)
    for rule, requests, text in asks:
        enough = max(1, _cells(requests, target * (1 - SLACK), view))
        yield Need(rule, max(1, _cells(requests, target, view)), enough, f"{text}: {_taking(view, requests, target)}")


def _utilisation(view: ScalingView, load: PlaceLoad) -> Need:
    """Requests that wait would be worked on if there was room: they count like those that are."""
    target, total = target_of(view), load.total
    rule, waiting = ScalingRule.UTILISATION, ""
    if load_cells(view, load) > _cells(load.in_flight, target, view):
        rule, waiting = ScalingRule.QUEUE, f", of which {load.in_flight:.1f} are worked on and {load.queued:.1f} wait,"
    text = f"{total:.1f} requests at once{waiting} take {_taking(view, total, target)}"
    return Need(rule, _cells(total, target, view), _cells(total, target * (1 - SLACK), view), text)


def _autopilot(view: ScalingView, load: PlaceLoad) -> Iterator[Need]:
    if load.autopilot is None:
        return
    cap = view.utilisation_cap
    text = f"the region autopilot sends {load.autopilot:.1f} requests at once, which take"
    yield Need(
        ScalingRule.AUTOPILOT,
        _cells(load.autopilot, cap, view),
        _cells(load.autopilot, cap * (1 - SLACK), view),
        f"{text} {_taking(view, load.autopilot, cap)}",
    )


def _forecast(view: ScalingView, load: PlaceLoad) -> Iterator[Need]:
    if load.forecast is None or load.forecast < FORECAST_LEAST:
        return
    target = target_of(view)
    within = f"{view.start_up_s + DECISION_S:.0f} s"
    text = f"up to {load.forecast:.1f} requests at once are expected within {within} (p90), which take"
    yield Need(
        ScalingRule.FORECAST,
        _cells(load.forecast, target, view),
        _cells(load.forecast, target * (1 - SLACK), view),
        f"{text} {_taking(view, load.forecast, target)}",
    )


def _objective(view: ScalingView, place: ScaledPlace, load: PlaceLoad) -> Iterator[Need]:
    """A step more while users wait too long on cells that are not idle, once the step before had its time; while they
    do, never fewer."""
    if not (complaint := _complaint(view, load)):
        return
    current = place.range.clamped(place.current)
    is_busy = load.total >= LEAST_UTILISATION * place.ready * view.per_cell
    if not is_busy:
        return
    had_its_time = place.ready >= current and (place.ready_for_s or 0.0) >= OBJECTIVE_HELPED_S
    step = max(1, math.ceil(OBJECTIVE_STEP * current)) if had_its_time else 0
    ask = f"{cells_text(step)} more than {current}" if step else f"the {cells_text(current)} there should be"
    yield Need(ScalingRule.OBJECTIVE, current + step, current + step, f"{complaint}: {ask}")


def _complaint(view: ScalingView, load: PlaceLoad) -> str:
    policy = view.policy
    if policy.slo_burn is not None and load.late_burn is not None and load.late_burn >= policy.slo_burn:
        return (
            f"late first tokens burn their budget {load.late_burn:.1f} times too fast, {policy.slo_burn:g} are allowed"
        )
    if policy.itl_p95_ms is not None and load.itl_p95_ms is not None and load.itl_p95_ms > policy.itl_p95_ms:
        return f"inter-token latency is {load.itl_p95_ms:.0f} ms at its 95th percentile, beyond {policy.itl_p95_ms:g}"
    return ""


def _cells(requests: float, share: float, view: ScalingView) -> int:
    """The fewest cells, in the order in which they stay and come, that carry so much together."""
    if not view.capacities:
        return math.ceil(requests / (share * view.per_cell) - ROUNDING)
    left = requests / share
    for number, capacity in enumerate(view.capacities):
        if left <= ROUNDING * capacity:
            return number
        left -= capacity
    return len(view.capacities) + max(0, math.ceil(left / view.capacities[-1] - ROUNDING))


def _taking(view: ScalingView, requests: float, share: float) -> str:
    cells = _cells(requests, share, view)
    each = f"{view.per_cell:g} each"
    if view.capacities:
        of = Counter(view.carried(cells, view.capacities))
        each = "what each was tested for: " + " and ".join(f"{n} for {most:g}" for most, n in sorted(of.items()))
    return f"{cells_text(cells)} at {share:.0%} of {each}"


def cells_text(count: int) -> str:
    """`1 cell`, `5 cells`."""
    return f"{count} cell{'' if count == 1 else 's'}"
