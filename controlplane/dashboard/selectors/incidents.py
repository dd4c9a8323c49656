"""Open and closed incidents, and how much trouble there is all in all."""

from dataclasses import dataclass

from django.db.models import Count, Exists, OuterRef, Q

from controlplane.kernel.tones import Tone
from fleet.models import Cell, Incident, Node
from fleet.planning.states import CELL_TONE, CellState, IncidentState, NodeState

INCIDENTS_SHOWN = 100

BAD_CELL_STATES = tuple(state for state, tone in CELL_TONE.items() if tone is Tone.BAD)


@dataclass(frozen=True, slots=True)
class IncidentList:
    rows: tuple[Incident, ...]
    more: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """The fleet in numbers. `trouble` counts open incidents, and broken cells that none of them names."""

    incidents: int
    cells: int
    cells_ready: int
    cells_broken: int
    cells_unexplained: int
    nodes: int

    @property
    def trouble(self) -> int:
        return self.incidents + self.cells_unexplained


def incident_list(*, state: str = "", text: str = "", limit: int = INCIDENTS_SHOWN) -> IncidentList:
    """Incidents, youngest first; open ones unless `state` says otherwise (`all` for both)."""
    incidents = Incident.objects.all() if state == "all" else Incident.objects.filter(state=state or IncidentState.OPEN)
    if text:
        incidents = incidents.filter(
            Q(kind__icontains=text) | Q(subject__icontains=text) | Q(summary__icontains=text) | Q(cell__icontains=text)
        )
    found = list(incidents[: limit + 1])
    return IncidentList(rows=tuple(found[:limit]), more=len(found) > limit, filtered=bool(state or text))


def standing() -> Standing:
    """The whole fleet in three queries."""
    explained = Incident.objects.filter(state=IncidentState.OPEN, cell=OuterRef("pk"))
    broken = Q(state__in=BAD_CELL_STATES)
    cells = Cell.objects.exclude(state=CellState.STOPPED).aggregate(
        total=Count("pk"),
        ready=Count("pk", filter=Q(state=CellState.READY)),
        broken=Count("pk", filter=broken),
        unexplained=Count("pk", filter=broken & ~Q(Exists(explained))),
    )
    return Standing(
        incidents=Incident.objects.filter(state=IncidentState.OPEN).count(),
        cells=cells["total"],
        cells_ready=cells["ready"],
        cells_broken=cells["broken"],
        cells_unexplained=cells["unexplained"],
        nodes=Node.objects.exclude(state=NodeState.RETIRED).count(),
    )
