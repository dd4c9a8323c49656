"""The stages of a rollout: a canary, then region by region a growing share of the cells. Pure arithmetic.

A stage is a number in a list that depends on the policy and the order of regions alone, so it keeps its meaning while
regions are scaled; how many cells it stands for is counted anew from what is wanted now.
"""

from dataclasses import dataclass
from functools import cached_property

from fleet.planning.policy import UpdatePolicy, UpdateStrategy
from fleet.planning.role_split import RoleSplit
from fleet.planning.snapshot import DeploymentView, RolloutView
from fleet.planning.states import ROLLOUT_MOVING, RolloutState


@dataclass(frozen=True, slots=True)
class Stage:
    """`percent` of the region's cells; None: the canary, one cell, or one of each role."""

    region: str
    percent: int | None

    def target(self, wanted: int, canary: int = 1) -> int:
        """How many of the region's `wanted` cells run the new version at the end of this stage. `canary`: of the first;
        2 where prefill and decode cells are apart: new ones pair with new ones alone."""
        return min(canary, wanted) if self.percent is None else -(-wanted * self.percent // 100)

    @property
    def label(self) -> str:
        return f"{self.region} canary" if self.percent is None else f"{self.region} {self.percent} %"


def canary_cells(split: RoleSplit) -> int:
    """Of a canary: a pair where prefill and decode cells are apart."""
    return 2 if split.is_apart else 1


def stages_of(policy: UpdatePolicy, regions: tuple[str, ...]) -> tuple[Stage, ...]:
    """Every stage in its order; never two regions at once."""
    canary = (Stage(regions[0], None),) if policy.canary and regions else ()
    return canary + tuple(Stage(region, percent) for region in regions for percent in policy.waves_percent)


@dataclass(frozen=True)
class RolloutProgress:
    """Where a rollout stands, and what each region should come to in this stage. Without slots: its stages are kept."""

    rollout: RolloutView
    deployment: DeploymentView

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The order of the rollout; regions that the deployment got meanwhile come last."""
        order = self.rollout.region_order
        return order + tuple(sorted(set(self.deployment.cells_wanted) - set(order)))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.rollout.policy, self.regions)

    @cached_property
    def stage(self) -> Stage:
        return self.stages[min(self.rollout.stage, len(self.stages) - 1)]

    @property
    def goal(self) -> str:
        """The version that cells are moved to now."""
        return self.rollout.from_version if self.is_returning else self.rollout.to_version

    @property
    def is_returning(self) -> bool:
        return self.rollout.state is RolloutState.ROLLING_BACK

    @property
    def is_moving(self) -> bool:
        """Whether more cells may be moved to the goal."""
        return self.rollout.state in ROLLOUT_MOVING

    @property
    def is_surging(self) -> bool:
        """Whether new cells come before old ones go. The way back needs no spare nodes, unless nothing may be away."""
        policy = self.rollout.policy
        return policy.strategy is UpdateStrategy.SURGE and (not self.is_returning or policy.max_unavailable == 0)

    def wanted(self, region: str) -> int:
        return self.deployment.cells_wanted.get(region, 0)

    def quota(self, region: str) -> int:
        """How many of a region's cells run the goal version at the end of this stage."""
        if self.is_returning or self._is_past(region):
            return self.wanted(region)
        return self.target(self.stage) if region == self.stage.region else 0

    def target(self, stage: Stage) -> int:
        """How many cells of its region run the new version at the end of a stage."""
        return stage.target(self.wanted(stage.region), canary_cells(self.deployment.split(stage.region)))

    def is_complete(self, region: str) -> bool:
        """Whether every cell of the region, new ones too, takes the goal version."""
        whole = region == self.stage.region and self.stage.percent == 100
        return self.is_returning or whole or self._is_past(region)

    def next_stage(self) -> int | None:
        """The next stage that moves any cell; None: this is the last."""
        here = self.stage
        for index in range(self.rollout.stage + 1, len(self.stages)):
            stage = self.stages[index]
            reached = self.target(here) if stage.region == here.region else 0
            if self.target(stage) > reached:
                return index
        return None

    def _is_past(self, region: str) -> bool:
        order = self.regions
        return region in order and order.index(region) < order.index(self.stage.region)


def progress_of(deployment: DeploymentView, rollout: RolloutView | None) -> RolloutProgress | None:
    """The progress of a deployment's active rollout, if it has one that leads anywhere."""
    if rollout is None or not (rollout.region_order or deployment.cells_wanted):
        return None
    return RolloutProgress(rollout, deployment)
