"""Cells as they are shown, in a number of queries that does not grow with the number of cells, and whether those
that should be ready are."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from django.db.models import Count, Prefetch, QuerySet

from fleet.models import Cell, CellMember, DeploymentRegion, Node
from fleet.planning.fingerprints import StackComparison, compare_stacks, member_stacks
from fleet.planning.states import CellState, NodeState
from fleet.selectors.model_version import engine_on

LONG_COLUMNS = (
    "node__topology", "node__accelerators", "node__report__telemetry", "node__report__steps", "node__report__health",
)  # fmt: skip
"""Of a cell's nodes: what no description of a cell shows. Reading them would take longer than all the rest."""


def cells_described() -> QuerySet[Cell]:
    """Cells with version, deployment, members, and the members' nodes and reports: two queries."""
    members = CellMember.objects.select_related("node__report").defer(*LONG_COLUMNS).order_by("rank")
    return Cell.objects.select_related("model_version", "deployment").prefetch_related(
        Prefetch("members", queryset=members)
    )


def cell_stacks(cell: Cell) -> StackComparison:
    """What the members of a described cell run, side by side. No query."""
    members = ((member.rank, member.node_id, member.node.fingerprint) for member in cell.members.all())
    return compare_stacks(member_stacks(engine_on(cell.model_version, cell.instance_type_id), members))


def cell_counts_by_region() -> dict[str, dict[str, int]]:
    """Region -> state -> number of cells; stopped ones and states without a cell are absent. One query."""
    counts: dict[str, dict[str, int]] = {}
    there = Cell.objects.exclude(state=CellState.STOPPED.value).order_by()
    for region, state, count in there.values_list("region_id", "state").annotate(count=Count("id")):
        counts.setdefault(region, {})[state] = count
    return counts


def ready_cells_by_place() -> dict[tuple[str, str], int]:
    """(deployment, region) -> number of ready cells. One query."""
    ready = Cell.objects.filter(state=CellState.READY.value).order_by()
    rows = ready.values_list("deployment_id", "region_id").annotate(count=Count("id"))
    return {(deployment, region): count for deployment, region, count in rows}


def cells_by_type() -> dict[tuple[str, str], dict[str, int]]:
    """(deployment, region) -> instance type -> number of cells that have not stopped. One query."""
    live = Cell.objects.exclude(state=CellState.STOPPED.value).order_by("instance_type_id")
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    columns = ("deployment_id", "region_id", "instance_type_id")
    for deployment, region, kind, count in live.values_list(*columns).annotate(count=Count("id")):
        found[deployment, region][kind] = count
    return found


@dataclass(frozen=True, slots=True)
class Readiness:
    """`waiting_for` is empty when everything wanted is there."""

    summary: str
    waiting_for: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.waiting_for

    def plus(self, more: tuple[str, ...]) -> "Readiness":
        return replace(self, waiting_for=(*self.waiting_for, *more), summary="; ".join((self.summary, *more)))


def fleet_readiness() -> Readiness:
    """Compare wanted with ready cells, and say of every other cell what holds it up."""
    ready: Counter[tuple[str, str]] = Counter()
    held_up = []
    for cell in Cell.objects.exclude(state=CellState.STOPPED):
        if cell.state == CellState.READY:
            ready[cell.deployment_id, cell.region_id] += 1
        else:
            held_up.append(f"{cell.id} is {cell.state}: {cell.reason}")
    wanted = DeploymentRegion.objects.all()
    short = [
        f"{row.deployment_id} in {row.region_id}: {ready[row.deployment_id, row.region_id]} of {row.cells} ready"
        for row in wanted
        if ready[row.deployment_id, row.region_id] < row.cells
    ]
    nodes = Node.objects.filter(state=NodeState.READY).count()
    total = sum(row.cells for row in wanted)
    there = sum(min(ready[row.deployment_id, row.region_id], row.cells) for row in wanted)
    summary = f"{there} of {total} cells ready, {nodes} nodes joined"
    return Readiness(summary=summary, waiting_for=tuple(short + held_up) if short else ())
