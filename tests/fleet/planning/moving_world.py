"""A world in which a deployment is moved between versions, some of which crash, fail later, or are slow."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum

from engine_agent.protocol.states import EngineState
from fleet.planning.decisions import ChangeRollout, Decision, DrainCell, LaunchNodes
from fleet.planning.faults.liveness import nodes_in_doubt
from fleet.planning.ledger import LedgerLimits
from fleet.planning.load.counters import CellCounters
from fleet.planning.planners import MAX_ROUNDS, PLANNERS
from fleet.planning.policy import UpdatePolicy
from fleet.planning.settings import FaultSettings, FleetSettings
from fleet.planning.snapshot import (
    CellView,
    DeploymentView,
    NodeView,
    ProviderStatus,
    RegionView,
    ReportView,
    RolloutView,
)
from fleet.planning.states import ROLLOUT_ACTIVE, ROLLOUT_ALLOWED, CellState, RolloutState
from tests.fleet.planning.fleets import KIND, NOW
from tests.fleet.planning.world import World

OLD, NEW = "llama@1", "llama@2"
SETTINGS = FleetSettings(
    ledger=LedgerLimits(region_floor=100, fleet_floor=100),
    faults=FaultSettings(frozen_above_nodes=100, common_cause_nodes=100),
)
"""A dozen machines of which three die are no sign of anything here, so that no incident stands in a rollout's way."""
REGIONS = ("east", "west")
USUAL_BUCKET = 60
REQUESTS_PER_S = 20


class Behaviour(StrEnum):
    """What a version does once it is started."""

    GOOD = "good"
    CRASHES = "crashes"
    FAILS_LATER = "fails later"
    SLOW = "slow"
    SILENT = "silent"


class MovingWorld(World):
    """Two regions, one deployment `llama` at `OLD`; `behaviour` says what `NEW` does."""

    def __init__(
        self, wanted: Mapping[str, int], policy: UpdatePolicy, *, behaviour: Behaviour = Behaviour.GOOD, warm: int = 0
    ) -> None:
        super().__init__(wanted=0, nodes_per_cell=2, warm=0)
        self.behaviour = behaviour
        self.ended: list[RolloutView] = []
        self.touched: set[str] = set()
        self.unwell: set[str] = set()
        """Nodes whose probe has just failed."""
        self.barren = False
        """Nobody sells machines."""
        self.scale(wanted, policy)
        self.fleet = replace(self.fleet, regions={name: RegionView(name, {KIND: warm}) for name in REGIONS})

    def scale(self, wanted: Mapping[str, int], policy: UpdatePolicy | None = None) -> None:
        """Another number of cells is wanted from now on."""
        before = self.fleet.deployments["llama"]
        view = DeploymentView("llama", KIND, 2, wanted, version=before.version or OLD, policy=policy or before.policy)
        self.fleet = replace(self.fleet, deployments={"llama": view})

    def start_rollout(self, **changes: object) -> None:
        policy = self.fleet.deployments["llama"].policy
        view = RolloutView(1, "llama", OLD, NEW, RolloutState.RUNNING, 0, REGIONS, policy, 1, self.now)
        self.fleet = replace(self.fleet, rollouts={"llama": replace(view, **changes)})  # type: ignore[arg-type]

    def wish(self, state: RolloutState) -> None:
        """An operator puts the rollout into this state, if it is active."""
        if rollout := self.rollout:
            self._set_rollout(replace(rollout, state=state, state_since=self.now, revision=rollout.revision + 1))

    @property
    def rollout(self) -> RolloutView | None:
        return self.fleet.rollouts.get("llama")

    @property
    def outcome(self) -> RolloutState | None:
        """The state in which the rollout ended."""
        return self.ended[-1].state if self.ended else None

    def cells(self, state: CellState | None = None, version: str | None = None) -> list[CellView]:
        return [
            cell
            for cell in self.fleet.cells.values()
            if state in {None, cell.state} and version in {None, cell.version} and not cell.is_leaving
        ]

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes, agents obey, and the planners run until they have nothing more to say."""
        self.now += timedelta(seconds=seconds)
        self.agents_act()
        self._count(seconds)
        for _ in range(MAX_ROUNDS):
            if not self._round():
                return

    def run(self, seconds: int, until: RolloutState | None = None) -> None:
        for _ in range(seconds):
            self.tick()
            if until is not None and (self.outcome is until or (self.rollout and self.rollout.state is until)):
                return

    def settle(self) -> None:
        """Until every wanted cell is there and has proven itself."""
        self.run(30)
        wanted = sum(self.fleet.deployments["llama"].cells_wanted.values())
        assert len(self.cells(CellState.READY)) == wanted

    def apply(self, decision: Decision) -> None:
        if isinstance(decision, ChangeRollout):
            self._change(decision)
        elif isinstance(decision, DrainCell):
            self._check_floor(decision)
            super().apply(decision)
        elif not (self.barren and isinstance(decision, LaunchNodes)):
            super().apply(decision)
        for cell in self.cells(version=NEW):
            self.touched.add(cell.id)

    def _check_floor(self, decision: DrainCell) -> None:
        """I1: available >= wanted - max_unavailable - what is lost already, in the region and in the deployment."""
        deployment = self.fleet.deployments["llama"]
        region = self.fleet.cells[decision.cell].region
        for regions in ({region}, set(deployment.cells_wanted)):
            wanted = sum(deployment.cells_wanted.get(name, 0) for name in regions)
            ready = sum(cell.region in regions for cell in self.cells(CellState.READY))
            down = sum(cell.region in regions and cell.disruption is not None for cell in self.fleet.cells.values())
            lost = max(0, wanted - ready - down)
            assert ready - 1 >= wanted - deployment.policy.max_unavailable - lost, decision

    def _round(self) -> bool:
        view = self.fleet
        gone = {n: ProviderStatus.GONE for n in nodes_in_doubt(view, SETTINGS, self.now) if n in self.dead}
        nodes = {name: replace(node, provider=gone.get(name, node.provider)) for name, node in view.nodes.items()}
        for planner in PLANNERS:
            decisions = planner(replace(view, nodes=nodes), SETTINGS, self.now)
            for decision in decisions:
                self.apply(decision)
            if decisions:
                return True
        return False

    def _change(self, decision: ChangeRollout) -> None:
        rollout = self.fleet.rollouts["llama"]
        assert (decision.rollout, decision.seen, decision.revision) == (rollout.id, rollout.state, rollout.revision)
        assert decision.to in ROLLOUT_ALLOWED[rollout.state]
        moved = (rollout.state, rollout.stage) != (decision.to, decision.stage)
        self._set_rollout(
            replace(
                rollout,
                state=decision.to,
                stage=decision.stage,
                reason=decision.reason,
                revision=rollout.revision + 1,
                state_since=self.now if moved else rollout.state_since,
                failed=(*rollout.failed, *decision.failed),
                counters=rollout.counters if decision.counters is None else decision.counters,
            )
        )

    def _set_rollout(self, rollout: RolloutView) -> None:
        if rollout.state is RolloutState.SUCCEEDED:
            deployment = replace(self.fleet.deployments["llama"], version=rollout.to_version)
            self.fleet = replace(self.fleet, deployments={"llama": deployment})
        if rollout.state in ROLLOUT_ACTIVE:
            self.fleet = replace(self.fleet, rollouts={"llama": rollout})
        else:
            self.ended.append(rollout)
            self.fleet = replace(self.fleet, rollouts={})

    def _obey(self, view: NodeView) -> ReportView:
        report = super()._obey(view)
        if view.id in self.unwell:
            report = replace(report, unhealthy_since=self.now)
        cell = self.fleet.cell_of(view.id)
        if cell is None or cell.version != NEW or report.state is not EngineState.READY:
            return report
        age_s = (self.now - cell.state_since).total_seconds()
        late = self.behaviour is Behaviour.FAILS_LATER and cell.state is CellState.READY and age_s > 3
        if self.behaviour is Behaviour.CRASHES or late:
            return replace(report, state=EngineState.FAILED, reason="the version is bad")
        return report

    def _count(self, seconds: float) -> None:
        """Every ready cell serves, unless its version never reports a number."""
        for cell in self.cells(CellState.READY):
            if cell.version == NEW and self.behaviour is Behaviour.SILENT:
                continue
            slow = cell.version == NEW and self.behaviour is Behaviour.SLOW
            before = cell.counters or CellCounters(cell.generation)
            number = before.requests + int(REQUESTS_PER_S * seconds)
            latencies = {USUAL_BUCKET + (5 if slow else 0): number}
            self._set(replace(cell, counters=CellCounters(cell.generation, number, 0, latencies, latencies)))


def started(wanted: Mapping[str, int], policy: UpdatePolicy, **changes: object) -> MovingWorld:
    """A world whose cells are all proven at `OLD`, and whose rollout to `NEW` has just begun."""
    world = MovingWorld(wanted, policy, **changes)  # type: ignore[arg-type]
    world.now = NOW
    world.settle()
    world.start_rollout()
    return world
