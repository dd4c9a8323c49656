"""How many cells a place takes, by each rule that asks for some, and which of them asks for most. Pure.

A need has two levels. `cells` is what is needed now, and is wanted at once. `enough` is what would have to be enough
before there are fewer: the same load at a lower target, so that a load at the edge between two numbers changes nothing.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from fleet.planning.autoscaling.view import PlaceLoad, ScaledPlace, ScalingRule, ScalingView
from fleet.planning.autoscaling.windows import window_in_force
from fleet.planning.autoscaling.zero import elsewhere_ask, waiting_asks

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
