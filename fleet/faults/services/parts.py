"""Joins what belongs to one fault: the loss of a node and the failures of its cells are one incident. Its parts are the
nodes and cells that it hit, until they have recovered. Call these in the transaction of the change."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from fleet.cells.models import CellMember
from fleet.faults.models import Incident, IncidentPart
from fleet.faults.planning.views import (
    EXPLAINED_WITHIN_S,
    EXPLAINS_CELLS,
    NO_USABLE_CELL,
    NODE_LOST,
    OF_CELLS,
    REGION_LOST,
    PartNoun,
)
from fleet.reconcile.planning.states import IncidentState


@dataclass(frozen=True, slots=True)
class Hit:
    """The nodes and cells that a fault hit. `is_down`: the cells are down already."""

    nodes: frozenset[str] = frozenset()
    cells: frozenset[str] = frozenset()
    is_down: bool = False

    @property
    def parts(self) -> list[tuple[PartNoun, str]]:
        cells = sorted(self.cells) if self.is_down else ()
        return [*((PartNoun.NODE, node) for node in sorted(self.nodes)), *((PartNoun.CELL, cell) for cell in cells)]


NOTHING = Hit()


def hit_by(kind: str, evidence: Mapping[str, Any], columns: Mapping[str, Any]) -> Hit:
    """`NOTHING` for incidents that include no failure of a cell, and for rules in shadow mode."""
    if columns.get("shadow") or kind not in EXPLAINS_CELLS | OF_CELLS:
        return NOTHING
    listed = evidence.get("nodes")
    nodes = {columns.get("node", ""), *(listed if isinstance(listed, list) else ())}
    cells = {columns.get("cell", "")}
    # Faulty hardware may still serve; a lost node does not.
    return Hit(frozenset(nodes - {""}), frozenset(cells - {""}), kind == NODE_LOST or kind in OF_CELLS)


def parts_add(incident: Incident, parts: Iterable[tuple[PartNoun, str]], now: datetime) -> None:
    """Adds what is not a part yet. A part that has recovered before is down again."""
    wanted = list(parts)
    known = {(part.noun, part.name): part for part in incident.parts.all()} if wanted else {}
    for noun, name in wanted:
        part = known.get((noun, name))
        if part is None:
            IncidentPart.objects.create(incident=incident, noun=noun.value, name=name, since=now)
        elif part.recovered_at is not None:
            IncidentPart.objects.filter(pk=part.pk).update(recovered_at=None)


def incident_explaining(cell: str) -> Incident | None:
    """The open incident whose fault includes this cell's failure, if any."""
    members = list(CellMember.objects.filter(cell_id=cell).values_list("node_id", flat=True))
    of_cell = IncidentPart.objects.filter(incident=OuterRef("pk"), noun=PartNoun.CELL.value, name=cell)
    of_node = IncidentPart.objects.filter(incident=OuterRef("pk"), noun=PartNoun.NODE.value, name__in=members)
    about = Q(Exists(of_cell)) | (Q(kind__in=EXPLAINS_CELLS) & (Q(Exists(of_node)) | Q(cell=cell)))
    return _open_incidents().filter(about, shadow=False).order_by("id").select_for_update().first()


def failures_explained(kind: str, hit: Hit, region: str, now: datetime) -> list[Incident]:
    """Open incidents that this one explains, oldest first, locked: those of failed cells for a fault of these nodes and
    cells, those of unserved deployments for a lost region."""
    if kind == REGION_LOST:
        rows = _open_incidents().filter(kind=NO_USABLE_CELL, region=region)
    elif kind in EXPLAINS_CELLS and hit is not NOTHING:
        members = CellMember.objects.filter(node__in=hit.nodes).values_list("cell_id", flat=True)
        cells = hit.cells | set(members if hit.nodes else ())
        since = now - timedelta(seconds=EXPLAINED_WITHIN_S)
        rows = _open_incidents().filter(kind__in=OF_CELLS, subject__in=cells, opened_at__gte=since)
    else:
        return []
    return list(rows.order_by("id").select_for_update())


def parts_recovered(noun: PartNoun, names: Iterable[str], now: datetime) -> list[Incident]:
    """Marks parts as recovered. Returns their open incidents, locked."""
    parts = IncidentPart.objects.filter(noun=noun.value, name__in=list(names), recovered_at__isnull=True)
    of_open = parts.filter(incident__state=IncidentState.OPEN.value)
    incidents = list(_open_incidents().select_for_update().filter(pk__in=of_open.values("incident")).order_by("id"))
    of_open.update(recovered_at=now)
    return incidents


def has_open_parts() -> Exists:
    """For querysets of incidents: a node or cell of it has not recovered."""
    return Exists(IncidentPart.objects.filter(incident=OuterRef("pk"), recovered_at__isnull=True))


def _open_incidents() -> QuerySet[Incident]:
    return Incident.objects.filter(state=IncidentState.OPEN.value)
