"""A world of deployments that share a pool too small for all. It asserts at every decision that no protected minimum is
taken, no pace is exceeded, and no cell is given back too soon."""

from collections import Counter
from dataclasses import replace
from datetime import datetime

from fleet.deployments.planner import GrantRule
from fleet.reconcile.planning.decisions import Decision, DrainCell, GrantCells
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, DisruptionCause
from tests.fleet.world import SETTINGS, World

KEPT_S = SETTINGS.shares.kept_s
Place = tuple[str, str]


class ShareWorld(World):
    """`steps`: every grant as time, place and cells in force before and after."""

    def __init__(self, fleet: FleetView) -> None:
        super().__init__(fleet)
        self.steps: list[tuple[datetime, Place, int, int]] = []
        self.taken_at: dict[Place, datetime] = {}

    def want(self, deployment: str, region: str, cells: int) -> None:
        """A user or the load sets another target."""
        self.store.deployments[deployment] = self.store.deployments[deployment].scaled(region, cells)

    def in_force(self, deployment: str, region: str = "east") -> int:
        return self.store.deployments[deployment].claim(region).in_force

    def ready(self, deployment: str, region: str = "east") -> int:
        cells = self.store.cells.values()
        return sum((c.deployment, c.region, c.state) == (deployment, region, CellState.READY) for c in cells)

    def check_rules(self) -> None:
        taken = Counter(member.node for cell in self.store.cells.values() for member in cell.members)
        assert max(taken.values(), default=1) == 1
        for spec in self.store.deployments.values():
            making_room = [c for c in self.store.cells.values() if c.disruption is DisruptionCause.PREEMPTION]
            of_spec = sum(cell.deployment == spec.name for cell in making_room)
            assert of_spec <= max(1, spec.policy.max_unavailable), spec.name

    def apply(self, decision: Decision) -> None:
        if isinstance(decision, GrantCells):
            self._check_grant(decision)
        super().apply(decision)

    def _check_grant(self, grant: GrantCells) -> None:
        spec = self.store.deployments[grant.deployment]
        claim, place = spec.claim(grant.region), (grant.deployment, grant.region)
        before, after = claim.in_force, replace(claim, granted=grant.granted).in_force
        self.steps.append((self.now, place, before, after))
        if after < before and grant.taker and grant.rule is GrantRule.PRIORITY:
            taker = self.store.deployments[grant.taker]
            assert (spec.sharing.priority or 0) < (taker.sharing.priority or 0), grant
            assert after >= claim.least or spec.sharing.preemptible, grant
        if after < before and grant.rule is not GrantRule.QUOTA:
            self.taken_at[place] = self.now
        elif after > before and place in self.taken_at:
            assert (self.now - self.taken_at[place]).total_seconds() >= KEPT_S, grant

    def _check_floor(self, decision: DrainCell) -> None:
        """I1 for any deployment."""
        cell = self.store.cells[decision.cell]
        spec = self.store.deployments[cell.deployment]
        ready, wanted = self.ready(cell.deployment, cell.region), spec.cells_wanted.get(cell.region, 0)
        down = sum(
            other.deployment == cell.deployment and other.region == cell.region and other.disruption is not None
            for other in self.store.cells.values()
        )
        lost = max(0, wanted - ready - down)
        assert ready - 1 >= wanted - spec.policy.max_unavailable - lost, decision
