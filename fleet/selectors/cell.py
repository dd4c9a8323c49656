"""Cells with everything that is shown of them, in a number of queries that does not grow with the number of cells."""

from django.db.models import Count, Prefetch, QuerySet

from fleet.models import Cell, CellMember
from fleet.planning.fingerprints import StackComparison, compare_stacks, member_stacks
from fleet.planning.states import CellState

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
    return compare_stacks(member_stacks(cell.model_version.engine, members))


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
