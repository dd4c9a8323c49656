"""Share matrices (origin region -> serving region -> share of the origin's requests), operators' traffic policies, and
the overrides in force. Pure: it validates and computes, and never decides how shares change. External input is read by
`parse_traffic_policy`. An override expires at its time; an evacuation for real outweighs a fixed row that sends
requests to its region."""

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
"""Shares are stored in hundredths of a point; ingresses draw in tenths of one."""
_UNITS = 10**SHARE_DIGITS


class BadMatrix(ValueError):
    """The stored value is not a share matrix."""


def read_matrix(stored: object) -> Matrix:
    """Reads stored shares. Raises BadMatrix if they are not rows of shares from 0 to 1."""
    try:
        return msgspec.convert(stored, dict[str, dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]]])
    except msgspec.ValidationError as error:
        raise BadMatrix(str(error)) from None


def whole_row(row: Row, home: str) -> dict[str, float]:
    """Returns the row in hundredths of a point that sum to exactly 1; rounding errors stay at home. Raises ValueError
    if no share is above 0."""
    total = math.fsum(share for share in row.values() if share > 0)
    if total <= 0:
        raise ValueError(f"the row of {home} has no share above 0: {dict(row)}")
    units = {region: int(share / total * _UNITS + 1e-6) for region, share in sorted(row.items()) if share > 0}
    keeper = home if row.get(home, 0) > 0 else max(units, key=lambda region: (units[region], region))
    units[keeper] += _UNITS - sum(units.values())
    return {region: count / _UNITS for region, count in units.items() if count > 0}


def distance(row: Row, other: Row) -> float:
    """Total variation: the share of requests that move if one row replaces the other, 0 to 1."""
    return math.fsum(abs(row.get(region, 0.0) - other.get(region, 0.0)) for region in {*row, *other}) / 2


def movement(before: Matrix, after: Matrix, demand: Mapping[str, float]) -> float:
    """Returns the share of all requests that change region. New origins move nothing."""
    total = math.fsum(demand.get(origin, 0.0) for origin in after)
    moved = math.fsum(
        demand.get(origin, 0.0) * distance(before[origin], row) for origin, row in after.items() if origin in before
    )
    return moved / total if total > 0 else 0.0


def loads(matrix: Matrix, demand: Mapping[str, float]) -> dict[str, float]:
    served: dict[str, float] = defaultdict(float)
    for origin, row in matrix.items():
        for region, share in row.items():
            served[region] += share * demand.get(origin, 0.0)
    return dict(served)


def step_towards(row: Row, target: Row, step: float, home: str) -> dict[str, float]:
    """Moves the row towards the target by at most `step` (total variation), in equal steps. Rounding may add one
    step."""
    steps = math.ceil(distance(row, target) / step - 1e-9)
    part = 1 / max(1, steps)
    blend = {name: (1 - part) * row.get(name, 0.0) + part * target.get(name, 0.0) for name in {*row, *target}}
    return whole_row(blend, home)


MOST_UTILISED = 0.8
"""design.md §5: at most 80 % of tested capacity. The rest absorbs bursts and the seconds before a shift."""

MAX_WEIGHT = 10_000
"""An ingress resolves shares of a hundredth of a per cent."""


Regions = Annotated[tuple[str, ...], Meta(min_length=1, description="a list of at least one region that may serve")]
Price = Annotated[float, Meta(ge=0.01, le=100)]
Tested = Annotated[int, Meta(ge=1, le=10_000)]
Weight = Annotated[int, Meta(ge=0, le=MAX_WEIGHT)]


EXACT_NEEDS_BOUND = "exact needs a load_bound, so that no cell is overloaded; try 1.25"


class InvalidTrafficPolicy(InvalidField):
    pass


class TrafficPolicy(msgspec.Struct, frozen=True):
    """Utilisations are relative to tested capacity; null fields fall back to the model version or the installation."""

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
    continuation: bool = False
    split: Mapping[str, Weight] = {}
    split_sticky: bool = True
    batch_at_risk: AtRiskPolicy | None = None
    request_limits: RequestLimits = RequestLimits()

    def may_serve(self, origin: str, region: str) -> bool:
        """Returns whether residency lets `region` serve requests that arrive in `origin`."""
        return origin not in self.residency or region in self.residency[origin]

    def tested_on(self, instance_type: str) -> int | None:
        """Returns the concurrency that a cell on this type was tested for, or None to use its version's."""
        return self.tested_by_type.get(instance_type) or self.tested_concurrency

    def price(self, region: str) -> float:
        return self.cost.get(region, 1.0)


POLICY_HELP = {
    "residency": "Origin -> regions that may serve its requests; other origins may use all.",
    "cost": "Region -> relative price (default 1.0).",
    "cost_utilisation": "A cheaper region is preferred up to this utilisation.",
    "cost_latency_ms": "Maximum round trip to a cheaper region, in milliseconds.",
    "utilisation_cap": "No region is filled beyond this utilisation; at most 0.8.",
    "tested_concurrency": "Concurrent requests that a cell was tested for; null uses its version's `max_concurrency`.",
    "tested_by_type": "Instance type -> `tested_concurrency` on it, if different.",
    "load_bound": "Requests with one prefix stay on a cell up to this multiple of the mean load; null disables this.",
    "routing": "With a load_bound: `sticky` uses a prefix's last cell, `exact` the one with most of it cached.",
    "shared_caches": "Whether tenants may hit each other's prompts in a cell's cache, and so can measure them.",
    "continuation": "Whether streams whose cell fails or drains continue at another cell.",
    "split": "Deployment -> weight by which it answers this one's model names; empty for none.",
    "split_sticky": "Whether a conversation stays on its first deployment.",
    "batch_at_risk": "Action for batches that will miss their deadlines: notify their owners; first send them as"
    " near-real-time; also let the plan of the day buy cells for them. Null uses the installation's setting.",
    "request_limits": "Most work that one request may ask of a cell.",
}
"""Help texts of the fields of `TrafficPolicy` in the API."""


def parse_traffic_policy(
    stated: Mapping[str, Any], regions: Iterable[str] | None = None, base: TrafficPolicy | None = None
) -> TrafficPolicy:
    """Returns the policy with the stated fields and the rest from `base` (default: the defaults). `regions` are the
    known regions; None skips the check of names, for stored policies. Raises InvalidTrafficPolicy for an unknown key or
    region, or a value of the wrong type or out of range."""
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
    """Returns JSON that `parse_traffic_policy` reads back into an equal policy."""
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
            raise InvalidTrafficPolicy(name, f"unknown region {region!r}; known: {there}")


class OverrideKind(StrEnum):
    """Shares fix one origin's row. An evacuated region serves only what no other can."""

    SHARES = "shares"
    EVACUATION = "evacuation"


class EvacuationMode(StrEnum):
    """A drill moves in steps and only what fits elsewhere. A real evacuation moves everything in one step."""

    DRILL = "drill"
    REAL = "real"


@dataclass(frozen=True, slots=True)
class OverrideView:
    """An override. An empty `deployment` means all; `region` is the origin of the fixed row, or the region to
    evacuate."""

    id: int
    kind: OverrideKind
    deployment: str
    region: str
    expires_at: datetime
    shares: Row = field(default_factory=dict)
    mode: EvacuationMode = EvacuationMode.DRILL


@dataclass(frozen=True, slots=True)
class ActiveOverrides:
    """Overrides in force for one deployment: fixed rows, closed regions, and regions that empty as far as others have
    room."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    emptying: frozenset[str] = frozenset()


def overrides_for(deployment: str, overrides: Iterable[OverrideView], now: datetime) -> ActiveOverrides:
    """Returns the overrides in force for a deployment; the newest of several about one row applies."""
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
    return ActiveOverrides(rows, closed, frozenset(one.region for one in evacuated) - closed)
