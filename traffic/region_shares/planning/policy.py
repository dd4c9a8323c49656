"""Arithmetic of traffic matrices: origin region -> serving region -> share of the origin's requests. Pure.

It knows shares, loads and distances, and nothing of why a share is what it is.

What an operator may lay down about a deployment's traffic: where it may be served, what regions cost, how full they
may be. Pure data with its rules; text and numbers from outside come in through `parse_traffic_policy`.

What operators ordered about a deployment's traffic, and what of it holds now. Pure: it says what must be, not how.

An order ends by itself at its time. Evacuating a region for real outweighs a fixed row that sends requests there.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine_agent.protocol.request_limits import RequestLimits
from kernel.constraints import InvalidField, struct_changed
from traffic.batches.planning.pacing import AtRiskPolicy

Row = Mapping[str, float]
Matrix = Mapping[str, Row]

SHARE_DIGITS = 4
"""Shares are kept in hundredths of a point; ingresses draw in tenths of one."""
_UNITS = 10**SHARE_DIGITS


class BadMatrix(ValueError):
    """What is stored as shares are none."""


def read_matrix(stored: object) -> Matrix:
    """Stored shares.

    Raises:
        BadMatrix: they are no rows of shares from 0 to 1.
    """
    try:
        return msgspec.convert(stored, dict[str, dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]]])
    except msgspec.ValidationError as error:
        raise BadMatrix(str(error)) from None


def whole_row(row: Row, home: str) -> dict[str, float]:
    """The same row in hundredths of a point, summing to exactly 1 as such; what rounding leaves over stays at home.

    Raises:
        ValueError: no share is above 0.
    """
    total = math.fsum(share for share in row.values() if share > 0)
    if total <= 0:
        raise ValueError(f"the row of {home} has no share above 0: {dict(row)}")
    units = {region: int(share / total * _UNITS + 1e-6) for region, share in sorted(row.items()) if share > 0}
    keeper = home if row.get(home, 0) > 0 else max(units, key=lambda region: (units[region], region))
    units[keeper] += _UNITS - sum(units.values())
    return {region: count / _UNITS for region, count in units.items() if count > 0}


def distance(row: Row, other: Row) -> float:
    """Total variation: the share of requests that go elsewhere when one row takes the other's place, 0 to 1."""
    return math.fsum(abs(row.get(region, 0.0) - other.get(region, 0.0)) for region in {*row, *other}) / 2


def movement(before: Matrix, after: Matrix, demand: Mapping[str, float]) -> float:
    """The share of all requests that go to another region than before. Origins that had no row moved nothing."""
    total = math.fsum(demand.get(origin, 0.0) for origin in after)
    moved = math.fsum(
        demand.get(origin, 0.0) * distance(before[origin], row) for origin, row in after.items() if origin in before
    )
    return moved / total if total > 0 else 0.0


def loads(matrix: Matrix, demand: Mapping[str, float]) -> dict[str, float]:
    """What each region serves under a matrix, in the unit of the demand."""
    served: dict[str, float] = defaultdict(float)
    for origin, row in matrix.items():
        for region, share in row.items():
            served[region] += share * demand.get(origin, 0.0)
    return dict(served)


def step_towards(row: Row, target: Row, step: float, home: str) -> dict[str, float]:
    """The row moved towards the target by at most `step` (in total variation), in equal steps if it takes several.

    Rounding may make them one more than exact shares would take.
    """
    steps = math.ceil(distance(row, target) / step - 1e-9)
    part = 1 / max(1, steps)
    blend = {name: (1 - part) * row.get(name, 0.0) + part * target.get(name, 0.0) for name in {*row, *target}}
    return whole_row(blend, home)


MOST_UTILISED = 0.8
"""design.md §5: at most 80 % of tested capacity. The rest is for bursts and for the seconds before a shift."""

MAX_WEIGHT = 10_000
"""What an ingress can tell apart: a share of a hundredth of a per cent."""


Regions = Annotated[
    tuple[str, ...], Meta(min_length=1, description="a list of the regions that may serve, at least one")
]
Price = Annotated[float, Meta(ge=0.01, le=100)]
Tested = Annotated[int, Meta(ge=1, le=10_000)]
Weight = Annotated[int, Meta(ge=0, le=MAX_WEIGHT)]


EXACT_NEEDS_BOUND = "exact needs a load_bound, so that no cell attracts too much; 1.25 is usual"


class InvalidTrafficPolicy(InvalidField):
    pass


class TrafficPolicy(msgspec.Struct, frozen=True):
    """Utilisations are shares of tested capacity.

    `residency` maps an origin to the regions that may serve its requests; an origin that is not named may use all.
    `cost` is a region's relative price (1.0 where not named): while a cheaper region is filled to less than
    `cost_utilisation`, requests go there from a dearer one, if it is at most `cost_latency_ms` away.
    `tested_concurrency` is how many requests at once a cell was tested for, and `tested_by_type` the same on instance
    types where it is another number; neither: its version's `max_concurrency` there.
    `load_bound`: requests that share a prefix keep to one cell, while it has at most so many times the mean load; None:
    each goes to the cell with the fewest. `routing` says which cell: `sticky`, the one that served that prefix last,
    or `exact`, the one that says that it has most of it in its cache. `shared_caches`: tenants may find each other's
    prompts in a cell's cache, and so can measure them. `split` maps deployments to the weights by which they answer to
    this one's model names (empty: this one alone), and `split_sticky` keeps a conversation with the one that it began
    with.
    `batch_at_risk`: what is done about batches that will miss their deadlines; None: what the installation says.
    `request_limits`: how much work one request may ask of a cell.
    """

    residency: Mapping[str, Regions] = {}
    cost: Mapping[str, Price] = {}
    cost_utilisation: Annotated[float, Meta(ge=0, le=MOST_UTILISED)] = 0.6
    cost_latency_ms: Annotated[float, Meta(ge=0, le=1000)] = 50.0
    utilisation_cap: Annotated[float, Meta(ge=0.05, le=MOST_UTILISED)] = MOST_UTILISED
    tested_concurrency: Tested | None = None
    tested_by_type: Mapping[str, Tested] = {}
    load_bound: Annotated[float, Meta(ge=1, le=10)] | None = None
    routing: Literal["sticky", "exact"] = "sticky"
    shared_caches: bool = False
    split: Mapping[str, Weight] = {}
    split_sticky: bool = True
    batch_at_risk: AtRiskPolicy | None = None
    request_limits: RequestLimits = RequestLimits()

    def may_serve(self, origin: str, region: str) -> bool:
        """Whether residency lets `region` serve requests that arrive in `origin`."""
        return origin not in self.residency or region in self.residency[origin]

    def tested_on(self, instance_type: str) -> int | None:
        """Requests at once that a cell on this type was tested for; None: what its version says."""
        return self.tested_by_type.get(instance_type) or self.tested_concurrency

    def price(self, region: str) -> float:
        return self.cost.get(region, 1.0)


def parse_traffic_policy(
    stated: Mapping[str, Any], regions: Iterable[str] | None = None, base: TrafficPolicy | None = None
) -> TrafficPolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    `regions` are those that there are; None: names are not checked, as for what was stored before.

    Raises:
        InvalidTrafficPolicy: an unknown key or region, or a value of the wrong type or outside its range.
    """
    try:
        policy = struct_changed(base or TrafficPolicy(), stated, path="policy")
        if policy.routing == "exact" and policy.load_bound is None:
            raise InvalidTrafficPolicy("routing", EXACT_NEEDS_BOUND)
        if regions is not None:
            _check_regions(policy, stated, frozenset(regions))
    except InvalidField as error:
        raise InvalidTrafficPolicy(error.field, str(error)) from None
    return policy


def traffic_policy_as_json(policy: TrafficPolicy) -> dict[str, Any]:
    """What `parse_traffic_policy` reads back into an equal policy."""
    plain: dict[str, Any] = msgspec.to_builtins(policy)
    return {**plain, "residency": {origin: list(regions) for origin, regions in policy.residency.items()}}


def _check_regions(policy: TrafficPolicy, stated: Mapping[str, Any], known: frozenset[str]) -> None:
    named: list[tuple[str, str]] = []
    if "residency" in stated:
        named += [("residency", origin) for origin in policy.residency]
        named += [(f"residency.{origin}", region) for origin, serving in policy.residency.items() for region in serving]
    if "cost" in stated:
        named += [("cost", region) for region in policy.cost]
    for name, region in named:
        if region not in known:
            there = ", ".join(sorted(known)) or "none"
            raise InvalidTrafficPolicy(name, f"there is no region {region!r}; there are: {there}")


class OverrideKind(StrEnum):
    """Shares: one origin's row is fixed. Evacuation: a region serves nothing of what others can."""

    SHARES = "shares"
    EVACUATION = "evacuation"


class EvacuationMode(StrEnum):
    """A drill moves step by step, and only what fits elsewhere. For real everything leaves at once, fit or not."""

    DRILL = "drill"
    REAL = "real"


@dataclass(frozen=True, slots=True)
class OverrideView:
    """One order. `deployment` "": all. `region` is the origin of the fixed row, or the one to evacuate."""

    id: int
    kind: OverrideKind
    deployment: str
    region: str
    expires_at: datetime
    shares: Row = field(default_factory=dict)
    mode: EvacuationMode = EvacuationMode.DRILL


@dataclass(frozen=True, slots=True)
class Orders:
    """What holds for one deployment: fixed rows, regions that are closed, and those that empty as far as they can."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    emptying: frozenset[str] = frozenset()


def orders_for(deployment: str, overrides: Iterable[OverrideView], now: datetime) -> Orders:
    """The orders in force for a deployment; of several about one row the youngest counts."""
    there = sorted((one for one in overrides if one.deployment in ("", deployment)), key=lambda one: one.id)
    there = [one for one in there if one.expires_at > now]
    evacuated = [one for one in there if one.kind is OverrideKind.EVACUATION]
    closed = frozenset(one.region for one in evacuated if one.mode is EvacuationMode.REAL)
    rows = {}
    for one in there:
        if one.kind is OverrideKind.SHARES:
            open_shares = {region: share for region, share in one.shares.items() if region not in closed}
            if any(share > 0 for share in open_shares.values()):
                rows[one.region] = whole_row(open_shares, one.region)
    return Orders(rows, closed, frozenset(one.region for one in evacuated) - closed)
