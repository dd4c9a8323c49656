"""The stages of a rollout: a canary, then region by region a growing share of the cells. Pure arithmetic.

A stage is a number in a list that depends on the policy and the order of regions alone, so it keeps its meaning while
regions are scaled; how many cells it stands for is counted anew from what is wanted now.

Says what a rollout would do before it is started: its stages in cells, and what stands against it. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.deployments.planner import UpdatePolicy, UpdateStrategy
from fleet.reconcile.planning.snapshot import DeploymentView, RolloutView
from fleet.reconcile.planning.states import ROLLOUT_MOVING, RolloutState


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


@dataclass(frozen=True, slots=True)
class PreviewStage:
    """A stage that moves cells: how many of the region's cells run the new version at its end, and its bake."""

    index: int
    label: str
    region: str
    cells: int
    of: int
    bake_s: float


def order_of_regions(wanted: Mapping[str, int], positions: Sequence[str]) -> tuple[str, ...]:
    """The order of their turn: those with cells first, each group in the order of `positions`."""
    named = [region for region in positions if region in wanted]
    return tuple(sorted(named, key=lambda region: wanted[region] == 0))


def preview_stages(
    policy: UpdatePolicy,
    wanted: Mapping[str, int],
    regions: tuple[str, ...],
    splits: Mapping[str, RoleSplit] = MappingProxyType({}),
) -> tuple[PreviewStage, ...]:
    """The stages that move any cell, in their order. `splits`: how many of them have which role."""
    stages: list[PreviewStage] = []
    reached: dict[str, int] = {}
    for index, stage in enumerate(stages_of(policy, regions)):
        of = wanted.get(stage.region, 0)
        cells = stage.target(of, canary_cells(splits.get(stage.region, RoleSplit())))
        if cells > reached.get(stage.region, 0):
            reached[stage.region] = cells
            bake_s = policy.canary_bake_s if stage.percent is None else policy.bake_s
            stages.append(PreviewStage(index, stage.label, stage.region, cells, of, bake_s))
    return tuple(stages)


def preview_seconds(policy: UpdatePolicy, stages: Sequence[PreviewStage]) -> float:
    """The least time it takes, in seconds: cells must prove themselves and bakes must pass, however fast they start."""
    at_once = max(1, policy.surge if policy.strategy is UpdateStrategy.SURGE else policy.max_unavailable)
    total, reached = 0.0, dict[str, int]()
    for stage in stages:
        steps = -(-(stage.cells - reached.get(stage.region, 0)) // at_once)
        reached[stage.region] = stage.cells
        total += steps * policy.min_healthy_s + stage.bake_s
    return total


def objection(
    policy: UpdatePolicy, wanted: Mapping[str, int], splits: Mapping[str, RoleSplit] = MappingProxyType({})
) -> str:
    """Why this policy cannot move this deployment; empty: it can."""
    total = sum(wanted.values())
    if policy.strategy is UpdateStrategy.IN_PLACE and sum(split.answering for split in splits.values()) == 1 < total:
        return (
            "the deployment has one cell that answers, beside prefill cells, which in_place would take down; use the "
            "strategy surge, with surge 2 for a pair at once"
        )
    if policy.strategy is UpdateStrategy.IN_PLACE and total == 1:
        return "the deployment has one cell, which in_place would take down; use the strategy surge"
    return ""
