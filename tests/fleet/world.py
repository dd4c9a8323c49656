"""A world in memory under the planners: the simulator's store carries out what they decide, agents obey within one
tick, and machines die when told to.

It asserts I1 at every disruption, and that planners decide nothing stale, forbidden or repeated.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum

from engine_agent.protocol.states import EngineState
from fleet.deployments.planner import UpdatePolicy
from fleet.faults.planning.liveness import nodes_in_doubt
from fleet.faults.planning.views import NoticeView
from fleet.load.planner import CellCounters
from fleet.reconcile.planning.decisions import (
    CordonNode,
    Decision,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    RestartAgent,
)
from fleet.reconcile.planning.planner import MAX_ROUNDS, PLANNERS
from fleet.reconcile.planning.settings import FaultSettings, FleetSettings, LedgerLimits
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView, ProviderStatus, ReportView, RolloutView
from fleet.reconcile.planning.states import ROLLOUT_ACTIVE, CellState, NodeState, NoticeKind, RolloutState
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.rows import Write
from simulator.store import Store
from tests.fleet.fleets import NOW

NAME, OLD, NEW = "llama", "llama@1", "llama@2"
SETTINGS = FleetSettings(
    ledger=LedgerLimits(region_floor=100, fleet_floor=100),
    faults=FaultSettings(frozen_above_nodes=100, common_cause_nodes=100),
)
"""Three dead machines of a dozen are no common cause here, so that no incident blocks a rollout."""
RUNS = frozenset({CellState.STARTING, CellState.READY, CellState.DRAINING})
USUAL_BUCKET = 60
REQUESTS_PER_S = 20
BLAMES_A_MACHINE = (CordonNode, OpenIncident, ReplaceNode, RequestReplacement, RestartAgent)
"""Decisions for which this world gives no cause but a provider's notice: here agents die with their machines, and
machines die whole."""


class Behaviour(StrEnum):
    GOOD = "good"
    CRASHES = "crashes"
    FAILS_LATER = "fails later"
    SLOW = "slow"
    SILENT = "silent"


class World:
    """A fleet with the deployment `llama`; `behaviour` says what its cells do at version `NEW`."""

    def __init__(self, fleet: FleetView, *, behaviour: Behaviour = Behaviour.GOOD) -> None:
        self.store = Store(fleet)
        self.store.limits = SETTINGS.ledger
        self.store.on_write = self._written
        self.behaviour = behaviour
        self.now = NOW
        self.dead: set[str] = set()
        self.unwell: set[str] = set()
        """Nodes whose probe has just failed."""
        self.sold_out = False
        """No provider sells machines."""
        self.ended: list[RolloutView] = []
        self.touched: set[str] = set()
        """Cells that ever were at `NEW`, or on their way to it."""

    @property
    def fleet(self) -> FleetView:
        return self.store.fleet()

    @property
    def rollout(self) -> RolloutView | None:
        return self.store.rollouts.get(NAME)

    @property
    def outcome(self) -> RolloutState | None:
        """The state in which the rollout ended."""
        return self.ended[-1].state if self.ended else None

    @property
    def cells_wanted(self) -> int:
        return sum(self.store.deployments[NAME].cells_wanted.values())

    def cells(self, state: CellState | None = None, version: str | None = None) -> list[CellView]:
        return [
            cell
            for cell in self.store.cells.values()
            if state in {None, cell.state} and version in {None, cell.version} and not cell.is_leaving
        ]

    def spare_count(self) -> int:
        nodes = self.store.nodes.values()
        return sum(node.id not in self.store.member_of and node.state is NodeState.READY for node in nodes)

    def check_rules(self) -> None:
        """No node in two cells; a running cell has all its members; nothing unplanned in between."""
        taken = [member.node for cell in self.store.cells.values() for member in cell.members]
        assert len(taken) == len(set(taken))
        size = self.store.deployments[NAME].nodes_per_cell
        for cell in self.store.cells.values():
            if cell.state in {CellState.STARTING, CellState.READY}:
                assert len(cell.members) == size

    # --- what happens to it ------------------------------------------------------------------------------------------

    def kill(self, index: int) -> None:
        """One of the machines that live dies."""
        alive = sorted(name for name in self.store.nodes if name not in self.dead)
        if alive:
            self.dead.add(alive[index % len(alive)])

    def announce(self, index: int, kind: NoticeKind, lead_s: float | None) -> None:
        """The provider says something of one of the machines that live."""
        alive = sorted(name for name in self.store.nodes if name not in self.dead)
        if alive:
            ends_at = None if lead_s is None else self.now + timedelta(seconds=lead_s)
            self.store.notices += (NoticeView(alive[index % len(alive)], kind, self.now, ends_at),)

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Another number of cells is wanted from now on."""
        for region, cells in wanted.items():
            self.store.deployments[NAME] = self.store.deployments[NAME].scaled(region, cells)

    def roll_out(self) -> None:
        """An operator starts a rollout from `OLD` to `NEW`."""
        spec = self.store.deployments[NAME]
        regions = tuple(sorted(spec.cells_wanted))
        self.store.rollouts[NAME] = RolloutView(
            1, NAME, OLD, NEW, RolloutState.RUNNING, 0, regions, spec.policy, revision=1, state_since=self.now
        )

    def put_rollout(self, state: RolloutState) -> None:
        """An operator puts the rollout into this state, if it is active."""
        if rollout := self.rollout:
            changed = replace(rollout, state=state, state_since=self.now, revision=rollout.revision + 1)
            self.store.rollouts[NAME] = changed

    # --- as time passes ----------------------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes, agents obey, and the planners run until they have nothing more to say."""
        self.now += timedelta(seconds=seconds)
        self.agents_act()
        for _ in range(MAX_ROUNDS):
            if not self._round():
                return

    def run(self, seconds: int, until: RolloutState | None = None, *, step_s: int = 1) -> None:
        for _ in range(0, seconds, step_s):
            self.tick(step_s)
            if until is not None and (self.outcome is until or (self.rollout and self.rollout.state is until)):
                return

    def agents_act(self) -> None:
        """Agents follow their orders and report; ingresses send no requests to draining cells."""
        for node in list(self.store.nodes.values()):
            if node.id not in self.dead:
                self.store.report(node.id, self._report_of(node))
            elif node.report.connected:
                closed = replace(node.report, connected=False, connection_changed_at=self.now)
                self.store.report(node.id, closed)
        for cell in list(self.store.cells.values()):
            self.store.mark_unrouted(cell.id, cell.generation, self.now)

    def _report_of(self, node: NodeView) -> ReportView:
        cell = self.store.cells.get(self.store.member_of.get(node.id, ""))
        since = self.now if node.id in self.unwell else None
        if cell is None or cell.state not in RUNS:
            return ReportView(True, self.now, node.created_at, unhealthy_since=since)
        reason = self._failure(cell)
        return ReportView(
            connected=True,
            last_seen_at=self.now,
            connection_changed_at=node.created_at,
            state=EngineState.FAILED if reason else EngineState.READY,
            cell=cell.id,
            generation=cell.generation,
            reason=reason,
            unhealthy_since=since,
        )

    def _failure(self, cell: CellView) -> str:
        """Why the cell's engines fail; empty: they serve."""
        if self.dead and any(member.node in self.dead for member in cell.members):
            return "a peer died"
        if cell.version != NEW:
            return ""
        age_s = (self.now - cell.state_since).total_seconds()
        late = self.behaviour is Behaviour.FAILS_LATER and cell.state is CellState.READY and age_s > 3
        return "the version is bad" if late or self.behaviour is Behaviour.CRASHES else ""

    # --- what is planned ---------------------------------------------------------------------------------------------

    def _round(self) -> bool:
        """The first planner that decides anything ends it."""
        view = self._view()
        for planner in PLANNERS:
            decisions = planner(view, SETTINGS, self.now)
            for decision in decisions:
                self.apply(decision)
            if decisions:
                return True
        return False

    def _view(self) -> FleetView:
        """What planners see: the rows, which machines are gone, and while a rollout compares, what cells count."""
        view = self.fleet
        doubtful = nodes_in_doubt(view, SETTINGS, self.now)
        gone = {n: replace(view.nodes[n], provider=ProviderStatus.GONE) for n in doubtful if n in self.dead}
        if gone:
            view = replace(view, nodes={**view.nodes, **gone})
        if not view.rollouts:
            return view
        return replace(view, cells={name: self._with_counters(cell) for name, cell in view.cells.items()})

    def _with_counters(self, cell: CellView) -> CellView:
        """Every ready cell serves, unless its version never reports a number."""
        is_silent = cell.version == NEW and self.behaviour is Behaviour.SILENT
        count = int(REQUESTS_PER_S * (self.now - cell.state_since).total_seconds())
        if cell.state is not CellState.READY or is_silent or not count:
            return cell
        is_slow = cell.version == NEW and self.behaviour is Behaviour.SLOW
        latencies = {USUAL_BUCKET + (5 if is_slow else 0): count}
        return replace(cell, counters=CellCounters(cell.generation, count, 0, latencies, latencies))

    def apply(self, decision: Decision) -> None:
        """Carry it out. Nothing comes between planning and this, so that one that is stale is a mistake."""
        assert not isinstance(decision, BLAMES_A_MACHINE) or self._is_announced(decision), decision
        if isinstance(decision, DrainCell) and not decision.forced:
            self._check_floor(decision)
        if isinstance(decision, ExplainCell):
            assert self.store.cells[decision.cell].reason != decision.reason
        if not (self.sold_out and isinstance(decision, LaunchNodes)):
            self.store.apply(decision, self.now)

    def _is_announced(self, decision: Decision) -> bool:
        """Whether it speaks of a machine that its provider has spoken of, or of several."""
        told = {notice.node for notice in self.store.notices}
        nodes = decision.evidence.get("nodes", ()) if isinstance(decision, OpenIncident) else ()
        named = {getattr(decision, "node", ""), *nodes} - {""}
        return not isinstance(decision, RestartAgent) and bool(named) and named <= told

    def _check_floor(self, decision: DrainCell) -> None:
        """I1: available >= wanted - max_unavailable - what is lost already, in the region and in the deployment."""
        deployment = self.store.deployments[NAME]
        region = self.store.cells[decision.cell].region
        for regions in ({region}, set(deployment.cells_wanted)):
            wanted = sum(deployment.cells_wanted.get(name, 0) for name in regions)
            ready = sum(cell.region in regions for cell in self.cells(CellState.READY))
            down = sum(cell.region in regions and cell.disruption is not None for cell in self.store.cells.values())
            lost = max(0, wanted - ready - down)
            assert ready - 1 >= wanted - deployment.policy.max_unavailable - lost, decision

    def _written(self, write: Write) -> None:
        if write.after is not None and write.after.version == NEW:
            self.touched.add(write.after.id)
        if write.rollout_after is not None and write.rollout_after.state not in ROLLOUT_ACTIVE:
            self.ended.append(write.rollout_after)


def rolling_out(
    wanted: Mapping[str, int], policy: UpdatePolicy, *, behaviour: Behaviour = Behaviour.GOOD, warm: int = 0
) -> World:
    """A world whose cells, of two nodes each, are all proven at `OLD`, and whose rollout to `NEW` has just begun."""
    llama = DeploymentSpec(NAME, wanted, version=OLD, policy=policy)
    world = World(build_fleet(FleetSpec((llama,), spares=warm), NOW), behaviour=behaviour)
    world.roll_out()
    return world
