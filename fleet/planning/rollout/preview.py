"""Says what a rollout would do before it is started: its stages in cells, and what stands against it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fleet.planning.policy import UpdatePolicy, UpdateStrategy
from fleet.planning.role_split import RoleSplit
from fleet.planning.rollout.waves import canary_cells, stages_of


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
