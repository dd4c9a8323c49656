"""The first screen: the state of the fleet in one line, six numbers with their last hour, the yard map, what waits for
a person, what is under way, and what users get. Reads only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import ceil

from controlplane.dashboard.events import EventList, newest_events
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, deferred
from controlplane.dashboard.lists import ListPage
from controlplane.dashboard.shell import health
from controlplane.dashboard.templatetags.switchyard import NOTHING, money, ms, percent, rate, share
from controlplane.dashboard.yard_map import Yard, YardMap, yard_cells, yard_map
from controlplane.in_progress import Operation, in_progress, needs_a_person
from fleet.capacity.selectors import machine_costs
from fleet.cells.models import Cell
from fleet.deployments.pages.data import DeploymentRow, Placed, deployment_list, deployments_placed
from fleet.faults.models import Incident
from fleet.faults.pages import BAD_CELL_STATES, FleetHealth, cells_in_incidents
from fleet.load.planner import FINE_S, MINUTE_S
from fleet.load.selectors import FLEET, LoadSeries, Point, load_series
from fleet.reconcile.planning.states import IncidentState
from fleet.recorder.pages.past import PAST_OVERVIEW
from fleet.recorder.pages.why import time_line_fragment
from kernel.row_cache import SharedRead
from kernel.time_ranges import last

ROWS_SHOWN = 20
"""Open incidents and broken cells at the top; the full lists are one click away."""
EVENTS_ON_OVERVIEW = 15
RECENT_POINTS = 4
"""A number is the newest of this many windows; older ones are no longer current."""
COST_STEP = timedelta(minutes=5)
COST_STEPS = 13


@dataclass(frozen=True, slots=True)
class Status:
    """Open incidents, broken cells without an incident, the number of operations under way, and of incidents that
    opened in the last hour."""

    health: FleetHealth
    incidents: tuple[Incident, ...]
    cells: tuple[Cell, ...]
    moving: int
    last_hour: int

    @property
    def is_current(self) -> bool:
        """Whether the planners pass, so that the absence of problems means something."""
        return bool(self.health.control.loops) and not self.health.control.is_late


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the fleet. `values`: its last hour, oldest first; `note`: what it means, or why it is unknown."""

    label: str
    text: str
    values: tuple[float | None, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """`is_silent`: no load was collected in the last minute."""

    rows: tuple[Number, ...]
    is_silent: bool


def status_of(health: FleetHealth, moving: int, now: datetime) -> Status:
    incidents = Incident.objects.filter(state=IncidentState.OPEN, shadow=False)
    explained = incidents.exclude(cell="").values("cell")
    broken = Cell.objects.filter(state__in=BAD_CELL_STATES).exclude(pk__in=explained)
    cells = broken.exclude(pk__in=cells_in_incidents()).order_by("state_since")
    opened = Incident.objects.filter(shadow=False, opened_at__gt=now - timedelta(hours=1)).count()
    return Status(health, tuple(incidents[:ROWS_SHOWN]), tuple(cells[:ROWS_SHOWN]), moving, opened)


def numbers_of(load: LoadSeries, yard: Yard, now: datetime) -> Numbers:
    """The six numbers. The cost takes up to five queries."""
    per_cell = yard.per_cell

    def used(point: Point) -> float | None:
        return 100 * point.in_flight / (point.cells * per_cell) if point.cells and per_cell else None

    median, tail = _line(load, lambda point: point.ttft_p50_ms), _line(load, lambda point: point.ttft_p99_ms)
    rows = (
        _number("Requests/s", _line(load, lambda point: point.requests_per_s), rate),
        _number("Errors", _line(load, lambda point: point.errors_percent), percent),
        Number("TTFT p50, p99", f"{ms(_newest(median))}, {ms(_newest(tail))}", tail, "The line shows p99."),
        _number("Tokens/s", _line(load, lambda point: point.tokens_per_s), rate),
        _number("Utilisation", _line(load, used), share, "Requests in flight, of the tested capacity of ready cells."),
        _cost(now),
    )
    return Numbers(rows, not any(load.points[-RECENT_POINTS:]))


def _line(load: LoadSeries, value: Callable[[Point], float | None]) -> tuple[float | None, ...]:
    return tuple(None if point is None else value(point) for point in load.points)


def _newest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values[-RECENT_POINTS:]) if value is not None), None)


def _number(label: str, values: tuple[float | None, ...], form: Callable[[object], str], note: str = "") -> Number:
    return Number(label, form(_newest(values)), values, note)


def _cost(now: datetime) -> Number:
    """The price of all live machines. Machines with an unknown price are left out and named."""
    costs, unpriced = _machine_costs(now)
    note = f"No price is known for {', '.join(sorted(unpriced))}." if unpriced else "All machines, spares included."
    text = money(Decimal(costs[-1]).quantize(Decimal("0.01"))) if costs[-1] or not unpriced else NOTHING
    return Number("$/h", text, tuple(costs) if text != NOTHING else (), note)


_COSTS: SharedRead[tuple[list[float], set[str]]] = SharedRead(
    "fleet_node", "fleet_machine", "fleet_rate", "fleet_capacitypool", "models_registry_instancetype"
)


def _machine_costs(now: datetime) -> tuple[list[float], set[str]]:
    """The last hour at the ends of its minutes, so that all users of a process share it. One query, or five after a
    change. The machines of the current minute are those of now; only a price may begin up to a minute early."""
    minute = datetime.fromtimestamp(ceil(now.timestamp() / MINUTE_S) * MINUTE_S, UTC)
    times = [minute - COST_STEP * step for step in reversed(range(COST_STEPS))]
    return _COSTS.get(minute, lambda: machine_costs(times))


def _status(request: PageRequest) -> Status:
    return status_of(request.once(health), len(request.once(_progress)), request.now)


def _progress(request: PageRequest) -> tuple[Operation, ...]:
    return in_progress(request.now)


def _waiting(request: PageRequest) -> tuple[Operation, ...]:
    return needs_a_person(request.now, request.caller.access)


def _placed(request: PageRequest) -> tuple[Placed, ...]:
    return deployments_placed()


def _yard(request: PageRequest) -> Yard:
    return yard_cells(request.now)


def _numbers(request: PageRequest) -> Numbers:
    load = load_series([FLEET], last("1h", request.now), FINE_S)[FLEET]
    return numbers_of(load, request.once(_yard), request.now)


def _map(request: PageRequest) -> YardMap:
    return yard_map(request.once(_placed), request.once(_yard), request.text("map"), request.now)


def _users(request: PageRequest) -> ListPage[DeploymentRow]:
    return deployment_list(request.once(_placed), request.now)


def _events(request: PageRequest) -> EventList:
    return newest_events(EVENTS_ON_OVERVIEW)


WAITS = ("incidents", "approvals", "rollouts", "machines", "imports", "usage", "traffic")
MOVES = ("cells", "nodes", "rollouts", "traffic", "machines", "agents", "imports")
"""Hints after which other operations are under way."""
OVERVIEW = Page(
    section="overview",
    title="Overview",
    past=PAST_OVERVIEW,
    fragments=(
        Fragment(
            "status", "", ("incidents", "cells", "rollouts", "traffic"), "dashboard/overview/status.html", _status
        ),
        Fragment("numbers", "", ("history",), "dashboard/overview/numbers.html", _numbers),
        Fragment("map", "Yard map", ("cells", "deployments", "history"), "dashboard/overview/map.html", _map),
        Fragment("waiting", "Needs a person", WAITS, "dashboard/overview/operations.html", _waiting),
        Fragment("moving", "In progress", MOVES, "dashboard/overview/operations.html", _progress),
        *deferred(
            Fragment("users", "Deployments", ("load", "cells", "deployments"), "fleet/deployments/table.html", _users),
            time_line_fragment(None),
            Fragment("events", "Last events", ("events",), "dashboard/events/list.html", _events),
        ),
    ),
)
