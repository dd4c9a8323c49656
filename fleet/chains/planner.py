"""Chains of two deployments: a planner answers first, for example by rewriting a query, and the application then sends
its own request to the deployment that the user waits for. Parses the objective over both, joins their sampled requests
by trace, and measures the sum and the share of each. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from fleet.deployments.planner import WINDOWS_S, Burn, Objective, RequestCounts, burns

LONGEST_CHAIN = timedelta(minutes=5)
"""A planner's request that is older than this belongs to another turn of the conversation."""
RANGES = {"ttft_ms": (1.0, 3_600_000.0), "ttft_share": (0.5, 0.99999), "planner_ms": (1.0, 3_600_000.0)}
SLOWEST_SHOWN = 10


class InvalidChain(ValueError):
    """An invalid chain. `field` is the key; the text names it, the value and the rule."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Chain:
    """`ttft_ms`: from the arrival of the planner's request to the first token of the deployment's answer, for
    `ttft_share` of requests. `planner_ms`: the part that the planner may take; None: not stated."""

    planner: str
    ttft_ms: float
    ttft_share: float = 0.99
    planner_ms: float | None = None


def parse_chain(stated: Mapping[str, Any]) -> Chain | None:
    """The chain, or None for an empty one. Raises InvalidChain for an unknown or missing key, a value of the wrong type
    or outside its range, or a planner's part that leaves nothing for the deployment."""
    if not stated:
        return None
    known = [field.name for field in fields(Chain)]
    for name, value in stated.items():
        if name not in known:
            raise InvalidChain(name, f"unknown key {name!r} of chain; known: {', '.join(known)}")
        if name == "planner":
            if not isinstance(value, str) or not value:
                raise InvalidChain(name, f"planner is {value!r}; it must be the name of a deployment")
            continue
        low, high = RANGES[name]
        if name == "planner_ms" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidChain(name, f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
    for name in ("planner", "ttft_ms"):
        if name not in stated:
            raise InvalidChain(name, f"chain needs {name}; an empty chain removes it")
    numbers = {name: float(stated[name]) for name in RANGES if stated.get(name) is not None}
    chain = Chain(stated["planner"], **numbers)
    if chain.planner_ms is not None and chain.planner_ms >= chain.ttft_ms:
        message = f"planner_ms is {chain.planner_ms:g}; it must be less than ttft_ms, {chain.ttft_ms:g}"
        raise InvalidChain("planner_ms", message)
    return chain


def chain_cycle(name: str, planner: str, planners: Mapping[str, str]) -> tuple[str, ...]:
    """The deployments of a cycle that this planner would close, in order; empty if there is none. `planners`: the
    planner of each deployment that has one."""
    path = [name]
    while planner and planner not in path:
        path.append(planner)
        planner = planners.get(planner, "")
    return (*path, name) if planner == name else ()


@dataclass(frozen=True, slots=True)
class LinkedRequest:
    """A sampled request with a trace. `at`: its arrival at the cell; `ingress_ms`: from the ingress to there;
    `first_ms` and `total_ms` count from `at`."""

    at: datetime
    request: str
    tenant: str
    trace: str
    cell: str
    ingress_ms: float | None
    first_ms: float | None
    total_ms: float

    @property
    def arrived_at(self) -> datetime:
        return self.at - timedelta(milliseconds=self.ingress_ms or 0.0)

    @property
    def took_ms(self) -> float:
        """From its arrival at the ingress to its end."""
        return self.total_ms + (self.ingress_ms or 0.0)

    @property
    def waited_ms(self) -> float:
        """From its arrival at the ingress to its first token, or to its whole answer."""
        return (self.total_ms if self.first_ms is None else self.first_ms) + (self.ingress_ms or 0.0)


@dataclass(frozen=True, slots=True)
class ChainedRequest:
    """A request and the planner's request before it. `between_ms`: the time of the application, by the clocks of two
    hosts, so never less than 0."""

    planner: LinkedRequest
    request: LinkedRequest
    between_ms: float

    @property
    def planner_ms(self) -> float:
        return self.planner.took_ms

    @property
    def own_ms(self) -> float:
        return self.request.waited_ms

    @property
    def sum_ms(self) -> float:
        return self.planner_ms + self.between_ms + self.own_ms


def join_by_trace(planners: Iterable[LinkedRequest], requests: Iterable[LinkedRequest]) -> list[ChainedRequest]:
    """Each request with the planner's last request of its tenant and trace before it, newest first. A request without
    one is left out: its planner was not called, or not sampled."""
    by_trace: dict[tuple[str, str], list[LinkedRequest]] = {}
    for each in sorted(planners, key=lambda each: each.arrived_at):
        by_trace.setdefault((each.tenant, each.trace), []).append(each)
    found = []
    for request in requests:
        candidates = by_trace.get((request.tenant, request.trace), [])
        place = bisect_right(candidates, request.arrived_at, key=lambda each: each.arrived_at)
        if place == 0 or request.arrived_at - candidates[place - 1].arrived_at > LONGEST_CHAIN:
            continue
        planner = candidates[place - 1]
        elapsed_ms = (request.arrived_at - planner.arrived_at) / timedelta(milliseconds=1)
        found.append(ChainedRequest(planner, request, max(0.0, elapsed_ms - planner.took_ms)))
    return sorted(found, key=lambda each: each.request.at, reverse=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the sum, in milliseconds. `percent`: its mean part of the sum."""

    name: str
    p50_ms: float
    p95_ms: float
    p99_ms: float
    percent: float


@dataclass(frozen=True, slots=True)
class ChainFigures:
    """What sampled chains took. `parts`: the planner, the application between both, the deployment, and the sum.
    `late_percent`: of chains over the objective; `planner_late_percent`: of planners over their part, None if that is
    not stated. All are empty or None without a chain."""

    count: int = 0
    parts: tuple[Part, ...] = ()
    late_percent: float | None = None
    planner_late_percent: float | None = None
    slowest: tuple[ChainedRequest, ...] = ()


def chain_figures(chain: Chain, found: Sequence[ChainedRequest]) -> ChainFigures:
    if not found:
        return ChainFigures()
    columns = {
        "planner": [each.planner_ms for each in found],
        "application": [each.between_ms for each in found],
        "deployment": [each.own_ms for each in found],
        "sum": [each.sum_ms for each in found],
    }
    whole_ms = sum(columns["sum"]) or 1.0
    part_ms = chain.planner_ms
    return ChainFigures(
        count=len(found),
        parts=tuple(_part(name, values, 100 * sum(values) / whole_ms) for name, values in columns.items()),
        late_percent=_percent_above(columns["sum"], chain.ttft_ms),
        planner_late_percent=None if part_ms is None else _percent_above(columns["planner"], part_ms),
        slowest=tuple(sorted(found, key=lambda each: each.sum_ms, reverse=True)[:SLOWEST_SHOWN]),
    )


def _part(name: str, values: Sequence[float], percent: float) -> Part:
    p50_ms, p95_ms, p99_ms = (_quantile(sorted(values), share) for share in (0.5, 0.95, 0.99))
    return Part(name, p50_ms, p95_ms, p99_ms, percent)


def _percent_above(values: Sequence[float], limit_ms: float) -> float:
    return 100 * sum(value > limit_ms for value in values) / len(values)


def chain_burn(chain: Chain, found: Iterable[ChainedRequest], now: datetime, kept_s: float) -> Burn:
    """Burn rate of late sums by window. Windows longer than samples are kept have none."""
    ages_s = [((now - each.request.at).total_seconds(), each.sum_ms > chain.ttft_ms) for each in found]
    seen = dict.fromkeys(WINDOWS_S, RequestCounts())
    for window in WINDOWS_S:
        if window <= kept_s:
            late_ones = [is_late for age_s, is_late in ages_s if age_s <= window]
            seen[window] = RequestCounts(requests=len(late_ones), slow=sum(late_ones))
    _, burn = burns(Objective(ttft_ms=chain.ttft_ms, ttft_share=chain.ttft_share), seen)
    return burn


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many of the others do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
