"""What an operator may lay down about a deployment's traffic: where it may be served, what regions cost, how full they
may be. Pure data with its rules; text and numbers from outside come in through `parse_traffic_policy`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

MOST_UTILISED = 0.8
"""design.md §5: at most 80 % of tested capacity. The rest is for bursts and for the seconds before a shift."""

MAX_WEIGHT = 10_000
"""What an ingress can tell apart: a share of a hundredth of a per cent."""


class InvalidTrafficPolicy(ValueError):
    """A policy that breaks a rule. `field` is the key; the text names it, the value and what would be right."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class TrafficPolicy:
    """Utilisations are shares of tested capacity.

    `residency` maps an origin to the regions that may serve its requests; an origin that is not named may use all.
    `cost` is a region's relative price (1.0 where not named): while a cheaper region is filled to less than
    `cost_utilisation`, requests go there from a dearer one, if it is at most `cost_latency_ms` away.
    `tested_concurrency` is how many requests at once a cell was tested for; None: its version's `max_concurrency`.
    `load_bound`: requests that share a prefix keep to one cell, while it has at most so many times the mean load; None:
    each goes to the cell with the fewest. `split` maps deployments to the weights by which they answer to this one's
    model names (empty: this one alone), and `split_sticky` keeps a conversation with the one that it began with.
    """

    residency: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    cost_utilisation: float = 0.6
    cost_latency_ms: float = 50.0
    utilisation_cap: float = MOST_UTILISED
    tested_concurrency: int | None = None
    load_bound: float | None = None
    split: Mapping[str, int] = field(default_factory=dict)
    split_sticky: bool = True

    def may_serve(self, origin: str, region: str) -> bool:
        """Whether residency lets `region` serve requests that arrive in `origin`."""
        return origin not in self.residency or region in self.residency[origin]

    def price(self, region: str) -> float:
        return self.cost.get(region, 1.0)


NUMBERS = {
    "cost_utilisation": (0.0, MOST_UTILISED),
    "cost_latency_ms": (0.0, 1000.0),
    "utilisation_cap": (0.05, MOST_UTILISED),
    "load_bound": (1.0, 10.0),
}


def parse_traffic_policy(
    stated: Mapping[str, Any], regions: Iterable[str] | None = None, base: TrafficPolicy | None = None
) -> TrafficPolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    `regions` are those that there are; None: names are not checked, as for what was stored before.

    Raises:
        InvalidTrafficPolicy: an unknown key or region, or a value of the wrong type or outside its range.
    """
    names = [one.name for one in fields(TrafficPolicy)]
    for key in stated:
        if key not in names:
            raise InvalidTrafficPolicy(key, f"there is no {key}; there are: {', '.join(names)}")
    known = None if regions is None else frozenset(regions)
    return replace(base or TrafficPolicy(), **{key: _value(key, value, known) for key, value in stated.items()})


def traffic_policy_as_json(policy: TrafficPolicy) -> dict[str, Any]:
    """What `parse_traffic_policy` reads back into an equal policy."""
    plain = {one.name: getattr(policy, one.name) for one in fields(policy)}
    residency = {origin: list(regions) for origin, regions in policy.residency.items()}
    return {**plain, "residency": residency, "cost": dict(policy.cost), "split": dict(policy.split)}


def _value(key: str, value: Any, known: frozenset[str] | None) -> Any:
    if key == "residency":
        return {
            _region(key, origin, known): _regions(f"residency.{origin}", serving, known)
            for origin, serving in _mapping(key, value).items()
        }
    if key == "cost":
        return {
            _region(key, region, known): _number(f"cost.{region}", price, 0.01, 100.0)
            for region, price in _mapping(key, value).items()
        }
    if key == "split":
        return {str(name): _weight(f"split.{name}", weight) for name, weight in _mapping(key, value).items()}
    if key == "split_sticky":
        return _yes_or_no(key, value)
    if key == "load_bound" and value is None:
        return None
    if key == "tested_concurrency":
        return _concurrency(value)
    return _number(key, value, *NUMBERS[key])


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidTrafficPolicy(key, f"{key} is {value!r}; it must be an object")
    return value


def _regions(key: str, value: Any, known: frozenset[str] | None) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidTrafficPolicy(key, f"{key} is {value!r}; it must list the regions that may serve, at least one")
    return tuple(_region(key, region, known) for region in value)


def _region(key: str, name: Any, known: frozenset[str] | None) -> str:
    if not isinstance(name, str) or (known is not None and name not in known):
        there = ", ".join(sorted(known or ())) or "none"
        raise InvalidTrafficPolicy(key, f"there is no region {name!r}; there are: {there}")
    return name


def _weight(key: str, value: Any) -> int:
    if type(value) is int and 0 <= value <= MAX_WEIGHT:
        return value
    raise InvalidTrafficPolicy(key, f"{key} is {value!r}; it must be a whole number from 0 to {MAX_WEIGHT}")


def _yes_or_no(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidTrafficPolicy(key, f"{key} is {value!r}; it must be true or false")


def _concurrency(value: Any) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= 10_000):
        return value
    raise InvalidTrafficPolicy(
        "tested_concurrency", f"tested_concurrency is {value!r}; it must be a whole number from 1 to 10000, or null"
    )


def _number(key: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidTrafficPolicy(key, f"{key} is {value!r}; it must be a number from {low:g} to {high:g}")
    return float(value)
