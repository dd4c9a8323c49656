"""The simulated tables: what is loaded for a pass, what agents and ingresses change, and how a transaction is
committed. `simulator.store` applies decisions to them. `on_write` is called after each transaction, `before_write`
before it; the latter may raise to kill the writing process."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from typing import Protocol

from engine_agent.protocol.messages import Assignment, Desired, EnginePlan, Peer
from engine_agent.protocol.states import MemberRole, Phase
from fleet.reconcile.planning.decisions import Decision
from fleet.reconcile.planning.settings import LedgerLimits
from fleet.reconcile.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    NodeView,
    ProviderStatus,
    ReportView,
    RolloutView,
)
from fleet.reconcile.planning.states import CELL_PHASE, CellState, NodeState
from simulator.fault_rows import with_checks


class StaleWrite(Exception):
    """The rows have changed since the decision was made."""


class ProcessKilled(Exception):
    """The writing process was killed."""


@dataclass(frozen=True, slots=True)
class Write:
    """One committed transaction: its cause, and the cell or the rollout before and after if it changed one."""

    cause: Decision | str
    at: datetime
    before: CellView | None = None
    after: CellView | None = None
    rollout_before: RolloutView | None = None
    rollout_after: RolloutView | None = None


class Provider(Protocol):
    """The provider's interface for effects outside of a transaction."""

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None: ...

    def terminate(self, node: str) -> None:
        """Terminates a machine; does nothing if there is none."""

    def restart_agent(self, node: str) -> None:
        """Starts the agent of a running machine."""

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the network nodes of the machine that is launched next, below `near` if there is room."""

    def describe(self, node: str) -> ProviderStatus: ...

    def reset(self, node: str) -> None:
        """Has a node's agent reset its devices and run its deep checks."""

    def reboot(self, node: str) -> None:
        """Reboots a node's machine."""

    def check(self, node: str) -> None:
        """Has a node's agent run its deep checks."""


class NoProvider:
    """Does nothing: for stores without a world."""

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None:
        pass

    def terminate(self, node: str) -> None:
        pass

    def restart_agent(self, node: str) -> None:
        pass

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        return near or (region,)

    def describe(self, node: str) -> ProviderStatus:
        return ProviderStatus.UNKNOWN

    def reset(self, node: str) -> None:
        pass

    def reboot(self, node: str) -> None:
        pass

    def check(self, node: str) -> None:
        pass


class Rows:
    """The rows. `fleet` is what a pass would load now; it changes with them unless it is copied."""

    def __init__(self, fleet: FleetView) -> None:
        self.nodes: dict[str, NodeView] = dict(fleet.nodes)
        self.cells: dict[str, CellView] = dict(fleet.cells)
        self.deployments = dict(fleet.deployments)
        self.regions = dict(fleet.regions)
        self.rollouts = dict(fleet.rollouts)
        self.faults = fleet.faults
        self.notices = fleet.notices
        self.quotas = fleet.quotas
        self.listening_since = fleet.listening_since
        self.member_of = {member.node: cell.id for cell in self.cells.values() for member in cell.members}
        self.versions: Counter[str] = Counter(dict.fromkeys(self.nodes, 1))
        ids = [*(one.id for one in fleet.faults.incidents), *(one.id for one in fleet.faults.replacements)]
        self._fault_numbers = count(max(ids, default=0) + 1)
        self._cell_numbers, self._node_numbers = count(len(self.cells) + 1), count(len(self.nodes) + 1)
        self.rollouts_begun = max((rollout.id for rollout in self.rollouts.values()), default=0)
        self.limits = LedgerLimits()
        self._pools: Counter[tuple[str, str]] | None = None
        self.writes = 0
        self.before_write: Callable[[], None] = lambda: None
        self.on_write: Callable[[Write], None] = lambda _: None
        self.on_desired: Callable[[Iterable[str]], None] = lambda _: None
        self.provider: Provider = NoProvider()

    # --- what is read ------------------------------------------------------------------------------------------------

    def fleet(self) -> FleetView:
        return FleetView(
            regions=dict(self.regions),
            nodes=dict(self.nodes),
            cells={name: cell for name, cell in self.cells.items() if cell.state is not CellState.STOPPED},
            deployments=dict(self.deployments),
            listening_since=self.listening_since,
            rollouts=dict(self.rollouts),
            faults=self.faults,
            notices=self.notices,
            quotas=self.quotas,
        )

    def desired(self, node: str) -> Desired:
        cell_id = self.member_of.get(node)
        cell = self.cells[cell_id] if cell_id is not None else None
        assignment = assignment_of(cell, self.deployments[cell.deployment], node) if cell is not None else None
        return Desired(node=node, version=self.versions[node], assignment=assignment)

    # --- what agents and ingresses report ----------------------------------------------------------------------------

    def report(self, node: str, report: ReportView) -> bool:
        """Stores the last report of a node. Returns whether a planner may need it."""
        known = self.nodes.get(node)
        if known is None or known.state is NodeState.RETIRED:
            return False
        self.nodes[node] = replace(known, report=report)
        return _relevant_part(known.report) != _relevant_part(report)

    def mark_unrouted(self, cell_id: str, generation: int, now: datetime) -> bool:
        """Every ingress has acknowledged a table that sends this cell no new requests."""
        cell = self.cells[cell_id]
        if (cell.generation, cell.state, cell.unrouted_at) != (generation, CellState.DRAINING, None):
            return False
        self.before_write()
        self._set_cell("unrouted", cell, replace(cell, unrouted_at=now), now)
        return True

    def checked(self, node: str, is_well: bool) -> None:
        """A node's agent has reported the results of the deep checks of its repair."""
        self.faults = with_checks(self.faults, node, is_well)

    # --- machines of a region's own pool ---------------------------------------------------------------------------

    def take_free(self, region: str, instance_type: str, count: int) -> None:
        """Turns so many free machines into nodes; a negative number turns nodes into free machines."""
        view = self.regions[region]
        if view.free is not None:
            free = view.free.get(instance_type, 0) - count
            self.regions[region] = replace(view, free={**view.free, instance_type: free})

    # --- one transaction ---------------------------------------------------------------------------------------------

    def _pool(self, region: str, instance_type: str) -> int:
        """Machines of a pool that are not retired, counted again only after a retirement."""
        if self._pools is None:
            rows = (node for node in self.nodes.values() if node.state is not NodeState.RETIRED)
            self._pools = Counter((node.region, node.instance_type) for node in rows)
        return self._pools[region, instance_type]

    def _moved(self, cell: CellView, to: CellState, reason: str, now: datetime) -> CellView:
        return replace(cell, state=to, reason=reason, state_since=now)

    def _write_cell(self, cause: Decision | str, cell: CellView, now: datetime, *, ordered: bool = True) -> None:
        self.before_write()
        nodes = {member.node for member in cell.members} if ordered else ()
        self._set_cell(cause, self.cells[cell.id], cell, now, nodes)

    def _set_cell(
        self, cause: Decision | str, before: CellView | None, cell: CellView, now: datetime, nodes: Iterable[str] = ()
    ) -> None:
        self.cells[cell.id] = cell
        self._desired_changed(nodes)
        self._commit(Write(cause, now, before, cell))

    def _put_members(self, cell: CellView, nodes: tuple[str, ...], now: datetime) -> None:
        for member in cell.members:
            del self.member_of[member.node]
        for name in nodes:
            self.member_of[name] = cell.id
            self.nodes[name] = replace(self.nodes[name], spare_since=None)
        for member in cell.members:
            if member.node not in self.member_of:
                self.nodes[member.node] = replace(self.nodes[member.node], spare_since=now)

    def _desired_changed(self, nodes: Iterable[str]) -> None:
        in_order = sorted(nodes)  # the order of a set differs between processes, and a seed must be reproducible
        for node in in_order:
            self.versions[node] += 1
        self.on_desired(in_order)

    def _commit(self, write: Write) -> None:
        self.writes += 1
        self.on_write(write)


def _relevant_part(report: ReportView) -> tuple[object, ...]:
    return report.connected, report.state, report.cell, report.generation, report.unhealthy_since is None


def assignment_of(cell: CellView, spec: DeploymentView, node: str) -> Assignment:
    """Returns the assignment of a cell's member, as the services derive it from the same rows."""
    rank = next(member.rank for member in cell.members if member.node == node)
    timeout_s = spec.of_cell(cell).ready_timeout_s
    return Assignment(
        cell=cell.id,
        generation=cell.generation,
        rank=rank,
        role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
        phase=CELL_PHASE.get(cell.state, Phase.STOP),
        plan=EnginePlan(spec.engine, cell.version, max_concurrency=8, ready_timeout_s=timeout_s),
        peers=tuple(Peer(node=member.node, rank=member.rank, address="", port_base=0) for member in cell.members),
        secret=f"{cell.id}/{cell.generation}",
        drain_deadline_s=spec.drain_deadline_s,
    )
