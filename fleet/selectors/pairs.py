"""Which prefill and decode cells pair, as the orders of their leaders name each other. One query, none without any."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db.models import OuterRef, Subquery

from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, PrefillCell
from engine_agent.protocol.ports import KV_TRANSFER, PROXY
from engine_agent.protocol.states import CellRole
from fleet.models import Cell, CellMember, RoleState
from fleet.planning.fingerprints import stack_digest
from fleet.planning.roles.plan import PairingCell, decode_nodes_of, prefill_cells_of
from fleet.planning.states import CellState
from models_registry.planning.roles import kv_layout, role_spec
from models_registry.planning.version_spec import InvalidVersion

RUNNING = (CellState.STARTING.value, CellState.READY.value, CellState.DRAINING.value)
Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class Pairings:
    """`leaders`: cell -> its leader, of cells apart; `there`: place -> these cells as planners see them. `from_tokens`:
    cell -> what the planner of roles found, where it acts."""

    leaders: Mapping[str, CellMember]
    cells: dict[str, PairingCell]
    there: dict[Place, list[PairingCell]]
    from_tokens: dict[str, int]

    def layout(self, cell: str) -> str:
        """The fingerprint of what it hands over; empty: nothing."""
        return self.cells[cell].layout if cell in self.cells else ""

    def prefill_cells(self, cell: str) -> tuple[PrefillCell, ...]:
        """Those that a decode cell may call."""
        own = self.cells.get(cell)
        if own is None or own.role is not CellRole.DECODE:
            return ()
        return tuple(self._called(one) for one in prefill_cells_of(own, self._around(cell)))

    def prefill_from_tokens(self, cell: str) -> int:
        """From so many uncached tokens on a decode cell has a prompt read by a prefill cell."""
        return self.from_tokens.get(cell, PREFILL_FROM_TOKENS)

    def decode_nodes(self, cell: str) -> tuple[str, ...]:
        """The nodes whose proxies may call a prefill cell."""
        own = self.cells.get(cell)
        return decode_nodes_of(own, self._around(cell)) if own is not None and own.role is CellRole.PREFILL else ()

    def decode_cells(self, cell: str) -> tuple[str, ...]:
        """The decode cells that may call a prefill cell."""
        nodes = set(self.decode_nodes(cell))
        return tuple(sorted(one.id for one in self.cells.values() if one.node in nodes))

    def _around(self, cell: str) -> list[PairingCell]:
        row = self.leaders[cell].cell
        return self.there[row.deployment_id, row.region_id]

    def _called(self, one: PairingCell) -> PrefillCell:
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
    """Of the places of these cells, those that are apart."""
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
    found = {name: _pairing(row) for name, row in leaders.items()}
    there: dict[Place, list[PairingCell]] = defaultdict(list)
    for name, row in leaders.items():
        there[row.cell.deployment_id, row.cell.region_id].append(found[name])
    from_tokens = {
        name: row.from_tokens for name, row in leaders.items() if row.from_tokens and row.cell.deployment.plans_roles
    }
    return Pairings(leaders, found, there, from_tokens)


def _pairing(leader: CellMember) -> PairingCell:
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
