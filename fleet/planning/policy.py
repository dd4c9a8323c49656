"""How a deployment may be updated: what may be down at once, in which waves, and what a version must prove.

Pure data with its bounds. Text and numbers from outside come in through `parse_policy`, which names what is wrong.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kernel.constraints import InvalidField, struct_changed

Cells = Annotated[int, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Ratio = Annotated[float, Meta(ge=1, le=100)]
WAVES_RULE = "a growing list of whole percentages from 1, the last of them 100"
Waves = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=100)], ...],
    Meta(min_length=1, description=WAVES_RULE),
]


class UpdateStrategy(StrEnum):
    """In place: cells go down and come back on their own nodes. Surge: a new cell comes first, then an old one goes."""

    IN_PLACE = "in_place"
    SURGE = "surge"


class GoodputMissing(StrEnum):
    """What a gate does where no benchmark compares both versions."""

    PAUSE = "pause"
    GO_ON = "go_on"


class InvalidPolicy(InvalidField):
    pass


class GatePolicy(msgspec.Struct, frozen=True):
    """What the gate after each wave compares. Ratios are of updated to control cells at the same time.

    `significance`: the probability at which a difference that large would be chance, below which it counts.
    `goodput_ratio`: what the new version must carry of what the old one does, by benchmarks of both under the same
    conditions; 0: nobody asks. Below it, or without such benchmarks where `goodput_missing` says so, it pauses.
    """

    error_ratio: Ratio = 2.0
    latency_ratio: Ratio = 1.25
    min_samples: Annotated[int, Meta(ge=2, le=1_000_000)] = 50
    significance: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    goodput_ratio: Annotated[float, Meta(ge=0, le=10)] = 0.0
    goodput_missing: GoodputMissing = GoodputMissing.PAUSE


class UpdatePolicy(msgspec.Struct, frozen=True):
    """Counts are cells; `_s` are seconds.

    `max_unavailable` bounds what is down by our own doing: in a region together with what broke by itself, and over
    the deployment. `surge` cells may be there beyond the wanted ones. `progress_deadline_s` without any progress pauses
    a rollout (Nomad: 10 min). `max_failed_cells` failures of updated cells end it; a cell counts once per start.
    """

    strategy: UpdateStrategy = UpdateStrategy.IN_PLACE
    max_unavailable: Cells = 1
    surge: Cells = 0
    canary: bool = True
    waves_percent: Waves = (10, 25, 50, 100)
    canary_bake_s: Seconds = 300.0
    bake_s: Seconds = 300.0
    min_healthy_s: Seconds = 60.0
    max_failed_cells: Annotated[int, Meta(ge=1, le=1000)] = 2
    auto_rollback: bool = True
    progress_deadline_s: Seconds = 600.0
    gate: GatePolicy = GatePolicy()


def parse_policy(stated: Mapping[str, Any], base: UpdatePolicy | None = None) -> UpdatePolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    Raises:
        InvalidPolicy: an unknown key, a value of the wrong type or outside its range, or values that exclude another.
    """
    try:
        policy = struct_changed(base or UpdatePolicy(), stated, path="policy")
    except InvalidField as error:
        raise InvalidPolicy(error.field, str(error)) from None
    _check_waves(policy.waves_percent)
    _check_strategy(policy)
    return policy


def policy_as_json(policy: UpdatePolicy) -> dict[str, Any]:
    """What `parse_policy` reads back into an equal policy."""
    plain: dict[str, Any] = msgspec.to_builtins(policy)
    return {**plain, "waves_percent": list(policy.waves_percent)}


def _check_waves(waves: tuple[int, ...]) -> None:
    if list(waves) != sorted(set(waves)) or waves[-1] != 100:
        raise InvalidPolicy("waves_percent", f"waves_percent is {list(waves)}; it must be {WAVES_RULE}")


def _check_strategy(policy: UpdatePolicy) -> None:
    if policy.strategy is UpdateStrategy.IN_PLACE and policy.max_unavailable == 0:
        raise InvalidPolicy(
            "max_unavailable", "max_unavailable is 0; in_place must take down at least 1 cell at a time"
        )
    if policy.strategy is UpdateStrategy.SURGE and policy.surge == 0:
        raise InvalidPolicy("surge", "surge is 0; the strategy surge needs at least 1 cell beyond the wanted ones")
