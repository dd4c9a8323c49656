"""How a deployment may be updated: what may be down at once, in which waves, and what a version must prove.

Pure data with its rules. Text and numbers from outside come in through `parse_policy`, which names what is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any


class UpdateStrategy(StrEnum):
    """In place: cells go down and come back on their own nodes. Surge: a new cell comes first, then an old one goes."""

    IN_PLACE = "in_place"
    SURGE = "surge"


class InvalidPolicy(ValueError):
    """A policy that breaks a rule. `field` is the key; the text names it, the value and the rule."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What the gate after each wave compares. Ratios are of updated to control cells at the same time.

    `significance`: the probability at which a difference that large would be chance, below which it counts.
    """

    error_ratio: float = 2.0
    latency_ratio: float = 1.25
    min_samples: int = 50
    significance: float = 0.01


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """Counts are cells; `_s` are seconds.

    `max_unavailable` bounds what is down by our own doing: in a region together with what broke by itself, and over
    the deployment. `surge` cells may be there beyond the wanted ones. `progress_deadline_s` without any progress pauses
    a rollout (Nomad: 10 min). `max_failed_cells` failures of updated cells end it; a cell counts once per start.
    """

    strategy: UpdateStrategy = UpdateStrategy.IN_PLACE
    max_unavailable: int = 1
    surge: int = 0
    canary: bool = True
    waves_percent: tuple[int, ...] = (10, 25, 50, 100)
    canary_bake_s: float = 300.0
    bake_s: float = 300.0
    min_healthy_s: float = 60.0
    max_failed_cells: int = 2
    auto_rollback: bool = True
    progress_deadline_s: float = 600.0
    gate: GatePolicy = GatePolicy()


INTEGERS = {"max_unavailable": (0, 1000), "surge": (0, 1000), "max_failed_cells": (1, 1000), "min_samples": (2, 10**6)}
SECONDS = ("canary_bake_s", "bake_s", "min_healthy_s", "progress_deadline_s")
DAY_S = 86400.0


def parse_policy(stated: Mapping[str, Any], base: UpdatePolicy | None = None) -> UpdatePolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    Raises:
        InvalidPolicy: an unknown key, a value of the wrong type or outside its range, or values that exclude another.
    """
    policy = base or UpdatePolicy()
    changes = {name: _value(name, value, policy) for name, value in _known(stated, UpdatePolicy, "").items()}
    policy = replace(policy, **changes)
    _check_together(policy)
    return policy


def policy_as_json(policy: UpdatePolicy) -> dict[str, Any]:
    """What `parse_policy` reads back into an equal policy."""
    plain = {field.name: getattr(policy, field.name) for field in fields(policy)}
    gate = {field.name: getattr(policy.gate, field.name) for field in fields(policy.gate)}
    return {**plain, "strategy": policy.strategy.value, "waves_percent": list(policy.waves_percent), "gate": gate}


def _known(stated: Mapping[str, Any], kind: type, prefix: str) -> Mapping[str, Any]:
    if not isinstance(stated, Mapping):
        raise InvalidPolicy(prefix.rstrip("."), f"the policy is {type(stated).__name__}; it must be an object")
    names = [field.name for field in fields(kind)]
    for name in stated:
        if name not in names:
            raise InvalidPolicy(f"{prefix}{name}", f"there is no {prefix}{name}; there are: {', '.join(names)}")
    return stated


def _value(name: str, value: Any, policy: UpdatePolicy) -> Any:
    if name == "strategy":
        return _strategy(value)
    if name == "waves_percent":
        return _waves(value)
    if name == "gate":
        stated = _known(value, GatePolicy, "gate.")
        return replace(policy.gate, **{key: _gate_value(key, number) for key, number in stated.items()})
    if name in SECONDS:
        return _number(name, value, 0.0, DAY_S)
    if name in INTEGERS:
        return _integer(name, value)
    if not isinstance(value, bool):
        raise InvalidPolicy(name, f"{name} is {value!r}; it must be true or false")
    return value


def _gate_value(name: str, value: Any) -> Any:
    if name in INTEGERS:
        return _integer(name, value, prefix="gate.")
    return _number(f"gate.{name}", value, *((0.0, 0.5) if name == "significance" else (1.0, 100.0)))


def _strategy(value: Any) -> UpdateStrategy:
    try:
        return UpdateStrategy(value)
    except ValueError:
        raise InvalidPolicy("strategy", f"strategy is {value!r}; it must be in_place or surge") from None


def _waves(value: Any) -> tuple[int, ...]:
    rule = "it must be a growing list of whole percentages from 1, the last of them 100"
    whole = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if not whole or not value or list(value) != sorted(set(value)) or value[0] < 1 or value[-1] != 100:
        raise InvalidPolicy("waves_percent", f"waves_percent is {value!r}; {rule}")
    return tuple(value)


def _integer(name: str, value: Any, prefix: str = "") -> int:
    low, high = INTEGERS[name]
    if type(value) is not int or not low <= value <= high:
        raise InvalidPolicy(
            prefix + name, f"{prefix}{name} is {value!r}; it must be a whole number from {low} to {high}"
        )
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidPolicy(name, f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
    return float(value)


def _check_together(policy: UpdatePolicy) -> None:
    if policy.strategy is UpdateStrategy.IN_PLACE and policy.max_unavailable == 0:
        raise InvalidPolicy(
            "max_unavailable", "max_unavailable is 0; in_place must take down at least 1 cell at a time"
        )
    if policy.strategy is UpdateStrategy.SURGE and policy.surge == 0:
        raise InvalidPolicy("surge", "surge is 0; the strategy surge needs at least 1 cell beyond the wanted ones")
