"""How many calls the control plane makes to EC2 in one account and region, and which machines the next topology call
covers. Pure. EC2 meters calls by token buckets. Each call has an own bucket, smaller by `OWN_SHARE` and shared by all
processes: other users of the account keep the rest, and calls wait here instead of being throttled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import ceil
from types import MappingProxyType

OWN_SHARE = 0.8
HALVED_FOR_S = 60.0
"""After a `RequestLimitExceeded`, which shows that the account has other users."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket: its size, and its refill in a second."""

    size: float
    per_s: float


DESCRIBE = "Describe*"
MUTATING = "Mutating*"
LAUNCHED_MACHINES = "RunInstances: machines"
ENDED_MACHINES = "TerminateInstances: machines"

RATES: Mapping[str, Rate] = MappingProxyType(
    {
        # https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html, of one account and region.
        DESCRIBE: Rate(100, 20),
        MUTATING: Rate(50, 5),
        "RunInstances": Rate(5, 2),
        LAUNCHED_MACHINES: Rate(1000, 2),
        "TerminateInstances": Rate(100, 5),
        ENDED_MACHINES: Rate(1000, 20),
        "CreateTags": Rate(100, 10),
        "DescribeInstanceTopology": Rate(1, 1),
        "DescribeCapacityBlockOfferings": Rate(10, 0.15),
    }
)
"""EC2's limits of a new account. Calls without a row share the bucket of their kind."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is left of a call's budget. `halved_until`: set after EC2 throttled it."""

    tokens: float
    refilled_at: datetime
    halved_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class NotBefore:
    """Nothing was taken. `at`: when the budget suffices, if no other process takes any."""

    bucket: Bucket
    at: datetime


def bucket_of(call: str) -> str:
    """Returns the row of `RATES` that meters an EC2 call."""
    if call in RATES:
        return call
    return DESCRIBE if call.startswith(("Describe", "Get", "List")) else MUTATING


def full(name: str, now: datetime) -> Bucket:
    return Bucket(_own_rate(name, halved=False).size, now)


def take(name: str, bucket: Bucket, now: datetime, amount: float = 1.0) -> Taken | NotBefore:
    """Takes one call, or so many machines. Raises ValueError if a full bucket holds less."""
    if amount > _own_rate(name, halved=False).size:
        raise ValueError(
            f"{name}: {amount:g} in one call, with a budget that holds {_own_rate(name, halved=False).size:g}"
        )
    bucket = _refilled(name, bucket, now)
    if bucket.tokens >= amount:
        return Taken(replace(bucket, tokens=bucket.tokens - amount))
    if not _is_halved(bucket, now) or bucket.halved_until is None:
        return NotBefore(bucket, _filled_at(amount - bucket.tokens, _own_rate(name, halved=False), now))
    halved = _own_rate(name, halved=True)
    left_s = (bucket.halved_until - now).total_seconds()
    then = min(halved.size, bucket.tokens + left_s * halved.per_s)
    if then >= amount:
        return NotBefore(bucket, _filled_at(amount - bucket.tokens, halved, now))
    return NotBefore(bucket, _filled_at(amount - then, _own_rate(name, halved=False), bucket.halved_until))


def throttled(name: str, bucket: Bucket, now: datetime) -> Bucket:
    """Returns the empty bucket after EC2 answered `RequestLimitExceeded`."""
    bucket = _refilled(name, bucket, now)
    return Bucket(0.0, bucket.refilled_at, now + timedelta(seconds=HALVED_FOR_S))


def _own_rate(name: str, halved: bool) -> Rate:
    """A bucket must hold at least one call."""
    rate, share = RATES[name], OWN_SHARE / 2 if halved else OWN_SHARE
    return Rate(max(1.0, rate.size * share), rate.per_s * share)


def _filled_at(missing: float, rate: Rate, since: datetime) -> datetime:
    """A millisecond late, so that rounding causes no second wait."""
    return since + timedelta(seconds=missing / rate.per_s + 0.001)


def _is_halved(bucket: Bucket, now: datetime) -> bool:
    return bucket.halved_until is not None and now < bucket.halved_until


def _refilled(name: str, bucket: Bucket, now: datetime) -> Bucket:
    """A clock that went back takes nothing away."""
    since, own = bucket.refilled_at, _own_rate(name, _is_halved(bucket, now))
    if now <= since:
        return bucket
    halved_s = 0.0
    if bucket.halved_until is not None:
        halved_s = max(0.0, (min(now, bucket.halved_until) - since).total_seconds())
    seconds = (now - since).total_seconds() - halved_s / 2
    flowed = bucket.tokens + seconds * RATES[name].per_s * OWN_SHARE
    return replace(bucket, tokens=min(own.size, flowed), refilled_at=now)


STATUS_EVERY_S = 60.0
"""DescribeInstanceStatus: states, health and scheduled events of all machines."""
LIST_EVERY_S = 300.0
"""DescribeInstances: all machines of this install."""
TOPOLOGY_EVERY_S = 900.0
"""DescribeInstanceTopology of machines with a known place."""
RESERVATIONS_EVERY_S = 300.0
GARBAGE_EVERY_S = 900.0
"""DescribeVolumes, DescribeNetworkInterfaces and DescribeSpotInstanceRequests: resources attached to no machine."""
PAGE = 1000
"""Machines on a page of DescribeInstances and DescribeInstanceStatus."""
TOPOLOGY_PAGE = 100
TOPOLOGY_CALL_EVERY_S = 1.0 / (RATES["DescribeInstanceTopology"].per_s * OWN_SHARE)
"""Also the delay of joins for each 100 of them."""


def steady_calls(machines: int) -> Mapping[str, float]:
    """Returns calls a minute in an idle region by bucket, with at most ten reservations."""
    pages = max(1, ceil(machines / PAGE))
    described = pages * (60 / STATUS_EVERY_S + 60 / LIST_EVERY_S) + 2 * 60 / RESERVATIONS_EVERY_S
    described += 3 * 60 / GARBAGE_EVERY_S
    return {
        DESCRIBE: described,
        "DescribeInstanceTopology": ceil(machines / TOPOLOGY_PAGE) * 60 / TOPOLOGY_EVERY_S,
    }


# DescribeInstanceTopology takes 100 IDs a call, and one call a second for an account and region: so the control
# plane makes these calls, never the agents. It covers only running machines of some types and leaves out the
# others.

TOPOLOGY_AGAIN_S = 60.0
"""First retry for a machine that the answer left out; doubles up to `TOPOLOGY_EVERY_S`."""
TOPOLOGY_CALL = "DescribeInstanceTopology"


@dataclass(frozen=True, slots=True)
class PlacedMachine:
    """`id`: its provider's. `asked_at`: of the last request for its place; None: never. `path`: as far as known."""

    id: str
    launched_at: datetime
    asked_at: datetime | None = None
    path: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return len(self.path) > 1


def path_of(zone_id: str, network_nodes: Iterable[str], block: str = "") -> tuple[str, ...]:
    """Returns a machine's place, widest first: the zone by the ID that all accounts share, its network nodes, and for
    UltraServers the Capacity Block. Without nodes only the zone is known; machines without topology still spread over
    zones."""
    nodes = tuple(node for node in network_nodes if node)
    return (zone_id, *nodes, block) if block and nodes else (zone_id, *nodes)


def topology_batches(machines: Iterable[PlacedMachine], now: datetime) -> tuple[tuple[str, ...], ...]:
    """Returns the IDs of each call: first machines never requested, then those without a known place, then known ones;
    in each group the longest waiting first."""
    due = [machine for machine in machines if _is_topology_due(machine, now)]
    due.sort(key=lambda one: (one.asked_at is not None, one.is_known, one.asked_at or one.launched_at, one.id))
    ids = [machine.id for machine in due]
    return tuple(tuple(ids[at : at + TOPOLOGY_PAGE]) for at in range(0, len(ids), TOPOLOGY_PAGE))


def _is_topology_due(machine: PlacedMachine, now: datetime) -> bool:
    if machine.asked_at is None:
        return True
    pause_s = TOPOLOGY_EVERY_S
    if not machine.is_known:
        pause_s = min(max(TOPOLOGY_AGAIN_S, (machine.asked_at - machine.launched_at).total_seconds()), pause_s)
    return now - machine.asked_at >= timedelta(seconds=pause_s)
