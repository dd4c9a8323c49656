"""The overview's own questions: what is broken, what is moving, and where every cell is."""

from collections import defaultdict
from dataclasses import dataclass

from controlplane.dashboard.selectors.deployments import Share, shares_of
from controlplane.dashboard.selectors.incidents import BAD_CELL_STATES, Standing, standing
from controlplane.kernel.tones import Tone
from fleet.models import Cell, Deployment, Incident, Node, Region
from fleet.planning.states import CELL_TONE, NODE_TONE, CellState, IncidentState

ROWS_SHOWN = 20
"""Of each kind in the two lists at the top; the full lists are one click away."""

MOVING_CELL_STATES = tuple(
    state for state, tone in CELL_TONE.items() if tone in {Tone.MOVING, Tone.WARN} and state is not CellState.READY
)
MOVING_NODE_STATES = tuple(state for state, tone in NODE_TONE.items() if tone in {Tone.MOVING, Tone.WARN})


@dataclass(frozen=True, slots=True)
class Broken:
    """Open incidents, and broken cells that no incident names."""

    standing: Standing
    incidents: tuple[Incident, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """Cells and nodes on their way somewhere, longest first."""

    cells: tuple[Cell, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MapRegion:
    """One region of the fleet map: deployments with the cells they have and want there."""

    region: Region
    lines: tuple[tuple[str, Share], ...]


def broken() -> Broken:
    incidents = Incident.objects.filter(state=IncidentState.OPEN, shadow=False)
    explained = incidents.exclude(cell="").values("cell")
    cells = Cell.objects.filter(state__in=BAD_CELL_STATES).exclude(pk__in=explained).order_by("state_since")
    return Broken(standing=standing(), incidents=tuple(incidents[:ROWS_SHOWN]), cells=tuple(cells[:ROWS_SHOWN]))


def moving() -> Moving:
    cells = Cell.objects.filter(state__in=MOVING_CELL_STATES).order_by("state_since", "id")
    nodes = Node.objects.filter(state__in=MOVING_NODE_STATES).order_by("state_since", "id")
    return Moving(cells=tuple(cells[:ROWS_SHOWN]), nodes=tuple(nodes[:ROWS_SHOWN]))


def fleet_map() -> tuple[MapRegion, ...]:
    """Every live cell in its place, regions without any cell included, in five queries."""
    cells: dict[str, list[Cell]] = defaultdict(list)
    for cell in Cell.objects.exclude(state=CellState.STOPPED).order_by("created_at", "id"):
        cells[cell.deployment_id].append(cell)
    lines: dict[str, list[tuple[str, Share]]] = defaultdict(list)
    for deployment in Deployment.objects.prefetch_related("regions__region"):
        for share in shares_of(deployment, cells[deployment.name]):
            lines[share.region].append((deployment.name, share))
    return tuple(MapRegion(region=region, lines=tuple(lines[region.name])) for region in Region.objects.all())
