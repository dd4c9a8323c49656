"""What an operator may lay down about a deployment's traffic: where it may be served, what regions cost, how full they
may be. Pure data with its rules; text and numbers from outside come in through `parse_traffic_policy`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine_agent.protocol.request_limits import RequestLimits
from kernel.constraints import InvalidField, struct_changed
from traffic.planning.batch_pacing import AtRiskPolicy

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
    for field, region in named:
        if region not in known:
            there = ", ".join(sorted(known)) or "none"
            raise InvalidTrafficPolicy(field, f"there is no region {region!r}; there are: {there}")
