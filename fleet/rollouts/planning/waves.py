"""The stages of a rollout: a canary, then region by region a growing share of the cells; and the preview of a rollout
before it starts. A stage is an index into a list that depends only on the policy and the order of regions, so it keeps
its meaning while regions are scaled. Its number of cells is computed from the current target."""

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
    """`percent` of the region's cells, or None for the canary: one cell, or one of each role."""

    region: str
    percent: int | None

    def target(self, wanted: int, canary: int = 1) -> int:
        """Cells on the new version at the end of this stage, of `wanted` cells in the region. `canary`: size of the
        canary, 2 with separate prefill and decode cells, because new cells pair only with new ones."""
        return min(canary, wanted) if self.percent is None else -(-wanted * self.percent // 100)

    @property
    def label(self) -> str:
        return f"{self.region} canary" if self.percent is None else f"{self.region} {self.percent} %"


def canary_cells(split: RoleSplit) -> int:
    return 2 if split.is_apart else 1


def stages_of(policy: UpdatePolicy, regions: tuple[str, ...]) -> tuple[Stage, ...]:
    """All stages in order, one region after the other."""
    canary = (Stage(regions[0], None),) if policy.canary and regions else ()
    return canary + tuple(Stage(region, percent) for region in regions for percent in policy.waves_percent)


@dataclass(frozen=True)
class RolloutProgress:
    """Progress of a rollout, and the target of each region in the current stage."""

    rollout: RolloutView
    deployment: DeploymentView

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """In the rollout's order. Regions added to the deployment later come last."""
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
        """Whether new cells start before old ones stop. A rollback needs no spare nodes unless the policy allows no
        unavailable cell."""
        policy = self.rollout.policy
        return policy.strategy is UpdateStrategy.SURGE and (not self.is_returning or policy.max_unavailable == 0)

    def wanted(self, region: str) -> int:
        return self.deployment.cells_wanted.get(region, 0)

    def quota(self, region: str) -> int:
        """Cells of a region on the goal version at the end of this stage."""
        if self.is_returning or self._is_past(region):
            return self.wanted(region)
        return self.target(self.stage) if region == self.stage.region else 0

    def target(self, stage: Stage) -> int:
        """Cells of the stage's region on the new version at its end."""
        return stage.target(self.wanted(stage.region), canary_cells(self.deployment.split(stage.region)))

    def is_complete(self, region: str) -> bool:
        """Whether all cells of the region, including new ones, get the goal version."""
        whole = region == self.stage.region and self.stage.percent == 100
        return self.is_returning or whole or self._is_past(region)

    def next_stage(self) -> int | None:
        """The next stage that moves any cell, or None after the last."""
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
    """The progress of a deployment's active rollout, or None without a rollout or a region."""
    if rollout is None or not (rollout.region_order or deployment.cells_wanted):
        return None
    return RolloutProgress(rollout, deployment)


@dataclass(frozen=True, slots=True)
class PreviewStage:
    """A stage that moves cells: the cells on the new version at its end, and its bake."""

    index: int
    label: str
    region: str
    cells: int
    of: int
    bake_s: float


def order_of_regions(wanted: Mapping[str, int], positions: Sequence[str]) -> tuple[str, ...]:
    """Regions with cells first, each group in the order of `positions`."""
    named = [region for region in positions if region in wanted]
    return tuple(sorted(named, key=lambda region: wanted[region] == 0))


def preview_stages(
    policy: UpdatePolicy,
    wanted: Mapping[str, int],
    regions: tuple[str, ...],
    splits: Mapping[str, RoleSplit] = MappingProxyType({}),
) -> tuple[PreviewStage, ...]:
    """The stages that move any cell. `splits`: cells per role and region."""
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
    """The minimum duration in seconds: `min_healthy_s` per step and all bakes."""
    in_parallel = max(1, policy.surge if policy.strategy is UpdateStrategy.SURGE else policy.max_unavailable)
    total, reached = 0.0, dict[str, int]()
    for stage in stages:
        steps = -(-(stage.cells - reached.get(stage.region, 0)) // in_parallel)
        reached[stage.region] = stage.cells
        total += steps * policy.min_healthy_s + stage.bake_s
    return total


def objection(
    policy: UpdatePolicy, wanted: Mapping[str, int], splits: Mapping[str, RoleSplit] = MappingProxyType({})
) -> str:
    """Why this policy cannot move this deployment, or ""."""
    total = sum(wanted.values())
    if policy.strategy is UpdateStrategy.IN_PLACE and sum(split.answering for split in splits.values()) == 1 < total:
        return (
            "in_place would take down the deployment's only cell that answers; use the strategy surge, with surge 2 to "
            "start a pair"
        )
    if policy.strategy is UpdateStrategy.IN_PLACE and total == 1:
        return "in_place would take down the deployment's only cell; use the strategy surge"
    return ""
