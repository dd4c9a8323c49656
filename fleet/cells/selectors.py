"""Reads cells in a number of queries that does not grow with their number: descriptions, counts, readiness of the
fleet, and pairs of prefill and decode cells for their leaders' orders. Never writes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from django.db.models import Count, OuterRef, Prefetch, QuerySet, Subquery

from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, PrefillCell
from engine_agent.protocol.ports import KV_TRANSFER, PROXY
from engine_agent.protocol.states import CellRole
from fleet.autoscaling.models import RoleState
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.selectors import engine_on
from fleet.nodes.models import Node
from fleet.nodes.planner import StackComparison, compare_stacks, member_stacks, stack_digest
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.rollouts.planning.versions import PairingCell, decode_nodes_of, prefill_cells_of
from models_registry.versions.planning.roles import kv_layout, role_spec
from models_registry.versions.planning.spec import InvalidVersion

LONG_COLUMNS = (
    "node__topology", "node__accelerators", "node__report__telemetry", "node__report__steps", "node__report__health",
)  # fmt: skip
"""Columns of a cell's nodes that no description shows. Reading them would take most of the time."""


def cells_described() -> QuerySet[Cell]:
    """Cells with version, deployment, members, and the members' nodes and reports: two queries."""
    members = CellMember.objects.select_related("node__report").defer(*LONG_COLUMNS).order_by("rank")
    return Cell.objects.select_related("model_version", "deployment").prefetch_related(
        Prefetch("members", queryset=members)
    )


def cell_stacks(cell: Cell) -> StackComparison:
    """Compares the software of a described cell's members. No query."""
    members = ((member.rank, member.node_id, member.node.fingerprint) for member in cell.members.all())
    return compare_stacks(member_stacks(engine_on(cell.model_version, cell.instance_type_id), members))


def cell_counts_by_region() -> dict[str, dict[str, int]]:
    """Region -> state -> number of cells, without stopped cells and empty states. One query."""
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
    """(deployment, region) -> instance type -> number of live cells. One query."""
    live = Cell.objects.exclude(state=CellState.STOPPED.value).order_by("instance_type_id")
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    columns = ("deployment_id", "region_id", "instance_type_id")
    for deployment, region, kind, count in live.values_list(*columns).annotate(count=Count("id")):
        found[deployment, region][kind] = count
    return found


@dataclass(frozen=True, slots=True)
class Readiness:
    """`waiting_for` is empty once all target cells are ready."""

    summary: str
    waiting_for: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.waiting_for

    def plus(self, more: tuple[str, ...]) -> "Readiness":
        return replace(self, waiting_for=(*self.waiting_for, *more), summary="; ".join((self.summary, *more)))


def fleet_readiness() -> Readiness:
    """Compares target with ready cells, and gives the reason of every other cell."""
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


RUNNING = (CellState.STARTING.value, CellState.READY.value, CellState.DRAINING.value)
Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class Pairings:
    """`leaders`: cell -> its leader, for prefill and decode cells; `by_place`: the same cells by place, as planners see
    them; `from_tokens`: cell -> threshold of the planner of roles, where it acts."""

    leaders: Mapping[str, CellMember]
    cells: dict[str, PairingCell]
    by_place: dict[Place, list[PairingCell]]
    from_tokens: dict[str, int]

    def layout(self, cell: str) -> str:
        """Fingerprint of the KV layout that the cell hands over, or ""."""
        return self.cells[cell].layout if cell in self.cells else ""

    def prefill_cells(self, cell: str) -> tuple[PrefillCell, ...]:
        """Prefill cells that a decode cell may call."""
        own = self.cells.get(cell)
        if own is None or own.role is not CellRole.DECODE:
            return ()
        return tuple(self._prefill_cell(one) for one in prefill_cells_of(own, self._cells_of_place(cell)))

    def prefill_from_tokens(self, cell: str) -> int:
        """Uncached tokens from which a decode cell lets a prefill cell compute the prompt."""
        return self.from_tokens.get(cell, PREFILL_FROM_TOKENS)

    def decode_nodes(self, cell: str) -> tuple[str, ...]:
        """Nodes whose proxies may call a prefill cell."""
        own = self.cells.get(cell)
        return (
            decode_nodes_of(own, self._cells_of_place(cell)) if own is not None and own.role is CellRole.PREFILL else ()
        )

    def decode_cells(self, cell: str) -> tuple[str, ...]:
        """Decode cells that may call a prefill cell."""
        nodes = set(self.decode_nodes(cell))
        return tuple(sorted(one.id for one in self.cells.values() if one.node in nodes))

    def _cells_of_place(self, cell: str) -> list[PairingCell]:
        row = self.leaders[cell].cell
        return self.by_place[row.deployment_id, row.region_id]

    def _prefill_cell(self, one: PairingCell) -> PrefillCell:
        leader = self.leaders[one.id]
        cell, node = leader.cell, leader.node
        return PrefillCell(
            cell=cell.pk,
            generation=cell.generation,
            node=node.pk,
            host=node.address,
            port=node.port(PROXY),
            kv_port=node.port(KV_TRANSFER),
            kv_layout=one.layout,
            max_concurrency=_prefill_concurrency(cell),
        )


def pairings(cells: Iterable[Cell]) -> Pairings:
    """Pairs in the places of these cells that have separate prefill and decode cells."""
    places = {(cell.deployment_id, cell.region_id) for cell in cells if cell.role != CellRole.MIXED}
    if not places:
        return Pairings({}, {}, {}, {})
    planned = RoleState.objects.filter(
        place__deployment=OuterRef("cell__deployment"), place__region=OuterRef("cell__region"), acting=True
    )
    rows = (
        CellMember.objects.annotate(from_tokens=Subquery(planned.values("from_tokens")[:1]))
        .filter(
            cell__deployment__in={deployment for deployment, _ in places},
            cell__region__in={region for _, region in places},
            cell__state__in=RUNNING,
            rank=0,
        )
        .exclude(cell__role=CellRole.MIXED.value)
    )
    leaders = {
        row.cell_id: row
        for row in rows.select_related("node", "cell__instance_type", "cell__model_version")
        if row.node.port_base is not None
    }
    found = {name: _pairing_cell(row) for name, row in leaders.items()}
    there: dict[Place, list[PairingCell]] = defaultdict(list)
    for name, row in leaders.items():
        there[row.cell.deployment_id, row.cell.region_id].append(found[name])
    from_tokens = {
        name: row.from_tokens for name, row in leaders.items() if row.from_tokens and row.cell.deployment.plans_roles
    }
    return Pairings(leaders, found, there, from_tokens)


def _pairing_cell(leader: CellMember) -> PairingCell:
    cell, version = leader.cell, leader.cell.model_version
    kind = cell.instance_type.shape()
    try:
        spec = version.spec().on(kind.name)
        layout = kv_layout(spec, kind, stack_digest(leader.node.fingerprint, spec.engine))
    except InvalidVersion:
        layout = ""
    return PairingCell(cell.pk, CellRole(cell.role), layout, leader.node_id, cell.state == CellState.READY)


def _prefill_concurrency(cell: Cell) -> int:
    return role_spec(cell.model_version.spec(), CellRole.PREFILL, cell.instance_type_id).max_concurrency
