"""The overview: broken and moving objects, the state of users' requests, every cell by region, and the last events.
Reads only."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.dashboard.events import EventList, event_list
from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.shell import health
from fleet.cells.models import Cell
from fleet.deployments.pages.data import DeploymentList, Placed, RegionCells, deployment_list, deployments_placed
from fleet.faults.models import Incident
from fleet.faults.pages import BAD_CELL_STATES, FleetHealth
from fleet.load.selectors import FLEET, Point, last_windows
from fleet.nodes.models import Node
from fleet.nodes.pages import NodeList, nodes_by_urgency
from fleet.reconcile.planning.states import CELL_TONE, NODE_TONE, CellState, IncidentState
from fleet.regions.models import Region
from kernel.tones import Tone

ROWS_SHOWN = 20
"""Rows per kind in the two lists at the top; the full lists are one click away."""

SQUARES = 500
"""Cells that the map shows as squares; above this number each line is a bar."""

MOVING_CELL_STATES = tuple(
    state for state, tone in CELL_TONE.items() if tone in {Tone.MOVING, Tone.WARN} and state is not CellState.READY
)
MOVING_NODE_STATES = tuple(state for state, tone in NODE_TONE.items() if tone in {Tone.MOVING, Tone.WARN})


@dataclass(frozen=True, slots=True)
class Broken:
    """Open incidents, and broken cells without an incident."""

    health: FleetHealth
    incidents: tuple[Incident, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """Cells and nodes in transition, longest first."""

    cells: tuple[Cell, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class BarSegment:
    """The cells in one state as a segment of a bar; `start` and `width` in per cent of the bar."""

    state: str
    tone: Tone
    cells: int
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class MapLine:
    """A deployment in a region: its `cells` as squares or, in a large fleet, `segments` of a bar."""

    deployment: str
    share: RegionCells
    cells: tuple[Cell, ...]
    segments: tuple[BarSegment, ...]

    @property
    def missing(self) -> range:
        """One for each wanted cell that does not exist yet."""
        return range(0 if self.segments else max(0, self.share.wanted - self.share.existing))


@dataclass(frozen=True, slots=True)
class MapRegion:
    region: Region
    lines: tuple[MapLine, ...]


def broken(health: FleetHealth) -> Broken:
    incidents = Incident.objects.filter(state=IncidentState.OPEN, shadow=False)
    explained = incidents.exclude(cell="").values("cell")
    cells = Cell.objects.filter(state__in=BAD_CELL_STATES).exclude(pk__in=explained).order_by("state_since")
    return Broken(health, tuple(incidents[:ROWS_SHOWN]), tuple(cells[:ROWS_SHOWN]))


def moving() -> Moving:
    cells = Cell.objects.filter(state__in=MOVING_CELL_STATES).order_by("state_since", "id")
    nodes = Node.objects.filter(state__in=MOVING_NODE_STATES).order_by("state_since", "id")
    return Moving(cells=tuple(cells[:ROWS_SHOWN]), nodes=tuple(nodes[:ROWS_SHOWN]))


def fleet_map(placed: Sequence[Placed], *, squares: int = SQUARES) -> tuple[MapRegion, ...]:
    """Every live cell of these deployments by region, including regions without cells, in two queries.

    Above `squares` cells, every line is a bar."""
    small = sum(share.existing for _, shares in placed for share in shares) <= squares
    cells: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    live = Cell.objects.exclude(state=CellState.STOPPED) if small else Cell.objects.none()
    for cell in live.order_by("created_at", "id"):
        cells[cell.deployment_id, cell.region_id].append(cell)
    lines: dict[str, list[MapLine]] = defaultdict(list)
    for deployment, shares in placed:
        for share in shares:
            there = tuple(cells[deployment.name, share.region])
            segments = () if small else _segments(share)
            lines[share.region].append(MapLine(deployment.name, share, there, segments))
    return tuple(MapRegion(region=region, lines=tuple(lines[region.name])) for region in Region.objects.all())


def _segments(share: RegionCells) -> tuple[BarSegment, ...]:
    """In the order of states, so that bars can be compared."""
    whole, start, segments = max(1, share.existing, share.wanted), 0.0, []
    for state in (state for state in CellState if state.value in share.states):
        cells = share.states[state.value]
        width = 100.0 * cells / whole
        segments.append(BarSegment(state.value, CELL_TONE[state], cells, round(start, 2), round(width, 2)))
        start += width
    return tuple(segments)


NODES_ON_OVERVIEW = 40
EVENTS_ON_OVERVIEW = 15


def _broken(request: PageRequest) -> Broken:
    return broken(request.once(health))


def _moving(request: PageRequest) -> Moving:
    return moving()


def _placed(request: PageRequest) -> tuple[Placed, ...]:
    return deployments_placed()


def _users(request: PageRequest) -> DeploymentList:
    return deployment_list(request.once(_placed), now=request.now)


def _rates(request: PageRequest) -> Point | None:
    """Load and latency of the whole fleet in its last window of 15 s."""
    return last_windows([FLEET], request.now).get(FLEET)


def _map(request: PageRequest) -> tuple[MapRegion, ...]:
    return fleet_map(request.once(_placed))


def _nodes(request: PageRequest) -> NodeList:
    return nodes_by_urgency(now=request.now, limit=NODES_ON_OVERVIEW)


def _events(request: PageRequest) -> EventList:
    return event_list(limit=EVENTS_ON_OVERVIEW)


OVERVIEW = Page(
    section="overview",
    title="Overview",
    fragments=(
        Fragment("broken", "Broken", ("incidents", "cells"), "dashboard/overview/broken.html", _broken),
        Fragment("moving", "Moving", ("cells", "nodes"), "dashboard/overview/moving.html", _moving),
        Fragment("rates", "Users", ("history",), "dashboard/overview/rates.html", _rates),
        Fragment("users", "", ("load", "cells", "deployments"), "fleet/deployments/table.html", _users),
        Fragment("map", "Cells", ("cells", "deployments"), "dashboard/overview/map.html", _map),
        Fragment("nodes", "Nodes", ("nodes", "cells"), "dashboard/overview/nodes.html", _nodes),
        Fragment("events", "Last events", ("events",), "dashboard/events/list.html", _events),
    ),
)
