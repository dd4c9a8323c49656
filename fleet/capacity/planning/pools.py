"""In which markets the machines of a deployment may be bought, and which machines that lets it use. Pure.

Whoever states no market may use any machine, also one that was not bought in a market. Whoever states some may use only
a machine of which it is certain that it is of one of them.

From which pool of capacity a unit of machines is to be launched, and how long a pool rests that had none. Pure.

A pool is one way to get machines of one type: a zone, one subnet of it, and a market, such as a reservation. A unit is
launched whole from one pool, so that its machines are in one zone. Only "no capacity" and "no quota" move it to another
pool. What is refused for another reason ends it, and its pool rests for whatever is ordered in its place.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import reduce
from typing import Any

from fleet.placement.planning.distance import Path, shared_prefix
from fleet.reconcile.planning.states import PoolState


class Market(StrEnum):
    """How machines of a pool are bought. `reserved` and `block`: in this reservation or Capacity Block alone. `open`:
    in an open reservation that fits, else on demand. `interruptible`: in a reservation whose owner may want it back."""

    RESERVED = "reserved"
    BLOCK = "block"
    OPEN = "open"
    ON_DEMAND = "on_demand"
    INTERRUPTIBLE = "interruptible"
    SPOT = "spot"


Markets = frozenset[Market]
"""Of a deployment: those that it may use. Of a machine: those that it may turn out to be of, one once it is there."""

ANY: Markets = frozenset()
"""Of a deployment: it states none. Of a machine: it is of none, or nothing is known of it."""


class InvalidMarkets(ValueError):
    """Not a statement of markets; the text says what is wrong and what would be right."""


def parse_markets(stated: Any) -> Markets:
    """The markets of a list of their names, such as `["reserved", "on_demand"]`; empty: any.

    Raises:
        InvalidMarkets: it is no list, names no market, or one twice.
    """
    known = ", ".join(Market)
    if not isinstance(stated, list | tuple):
        raise InvalidMarkets(f"markets must be a list of some of: {known}; empty for any")
    for name in stated:
        if not isinstance(name, str) or name not in set(Market):
            raise InvalidMarkets(f"{name!r} is no market; there are: {known}")
        if stated.count(name) > 1:
            raise InvalidMarkets(f"{name} is named twice")
    return frozenset(Market(name) for name in stated)


def stored(markets: Iterable[Market]) -> list[str]:
    """The markets as rows keep them, in one order however they were stated."""
    found = set(markets)
    return [market.value for market in Market if market in found]


def may_use(wanted: Markets, machine: Markets) -> bool:
    """Whether a deployment with these markets may use a machine."""
    return not wanted or (bool(machine) and machine <= wanted)


def wanted_by_all(stated: Collection[Markets]) -> Markets:
    """What each of these deployments may use; `ANY` if there is no such market, or none states any."""
    choices = [markets for markets in stated if markets]
    return reduce(frozenset.intersection, choices) if choices else ANY


def strictest_first(markets: Markets) -> tuple[int, list[str]]:
    """A key to sort by: whoever may use fewer machines gets its own first, and `ANY` comes last."""
    return len(markets) or len(Market) + 1, stored(markets)


NAMED_MOST = 3
"""Pools that one sentence names."""


RESERVATIONS = frozenset({Market.RESERVED, Market.BLOCK, Market.INTERRUPTIBLE})
"""These name the reservation that their machines are in."""

UNPRICED = 1e6
"""US dollars an hour: more than any machine costs."""

PAID_ANYWAY = frozenset({Market.RESERVED, Market.BLOCK})
"""AWS bills these for the capacity, used or not: a reservation by the hour, a Capacity Block in advance."""

DECLARABLE = (Market.SPOT, Market.OPEN)
"""Pools of these are declared by a person. All others are found by the reading of a region's stack."""


class LaunchOutcome(StrEnum):
    """What came of one launch call. `later` and `unknown`: it may have been carried out. `mismatched`: what was asked
    differs from what the same token asked before, which is a fault of ours, and machines may run. `attempt_ended`: what
    this token launched has ended."""

    LAUNCHED = "launched"
    NO_CAPACITY = "no_capacity"
    NO_QUOTA = "no_quota"
    REFUSED = "refused"
    ATTEMPT_ENDED = "attempt_ended"
    LATER = "later"
    UNKNOWN = "unknown"
    MISMATCHED = "mismatched"


DEFINITE = frozenset(set(LaunchOutcome) - {LaunchOutcome.LATER, LaunchOutcome.UNKNOWN, LaunchOutcome.MISMATCHED})
"""After these nothing more can come of the attempt than is known."""


class Scope(StrEnum):
    """How far "no capacity" reaches."""

    POOL = "pool"
    SUBNET = "subnet"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Seconds. `pause_s` doubles with each failure in a row up to `pause_most_s` (Karpenter rests an offering for
    180 s, ParallelCluster for 600). `quota_pause_s`: a person has to ask for more first. `boot_s`: until a machine has
    joined. `block_margin_s`: before the end of a Capacity Block, of which EC2 ends the machines from 30 minutes before.
    """

    pause_s: float = 180.0
    pause_most_s: float = 1800.0
    quota_pause_s: float = 3600.0
    boot_s: float = 1200.0
    block_margin_s: float = 2400.0

    @property
    def useful(self) -> timedelta:
        """How long before its end a pool is no longer used."""
        return timedelta(seconds=self.boot_s + self.block_margin_s)


SETTINGS = PoolSettings()


@dataclass(frozen=True, slots=True)
class UnitView:
    """Machines to be launched together or not at all. `near`: network nodes, widest first, below which they should be.
    `markets`: in which they may be bought. `wanted`: somebody still needs them."""

    id: str
    region: str
    instance_type: str
    count: int
    markets: frozenset[Market]
    near: Path = ()
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class PoolView:
    """`position`: the order in which a person wants pools used. `path`: where its machines will be, as far as is known:
    zone id, then the network nodes of its reservation. `placement_group`: of a reservation only the one that it was
    made in, for another one would keep part of it out of reach (eksctl #7949). `free`: machines left in its reservation
    when it was last looked at; None: not known. `failures`: in a row. `ends_at`: of a Capacity Block. `max_price`: US
    dollars an hour, of spot; None: the price on demand. `price_per_hour`: what its provider asks for a machine;
    None: not known. `extra_price`: of a region that tries the cheapest first, what one machine more costs an hour,
    `UNPRICED` where nobody knows; None: pools are tried by their positions alone."""

    id: int
    region: str
    instance_type: str
    position: int
    market: Market
    zone: str
    subnet: str
    image: str
    path: Path = ()
    reservation: str = ""
    placement_group: str = ""
    max_price: float | None = None
    price_per_hour: float | None = None
    extra_price: float | None = None
    ends_at: datetime | None = None
    free: int | None = None
    enabled: bool = True
    paused_until: datetime | None = None
    pause_reason: str = ""
    failures: int = 0

    @property
    def name(self) -> str:
        return f"{self.market} in {self.zone}" + (f" ({self.reservation})" if self.reservation else "")


def pool_state(pool: PoolView, now: datetime, settings: PoolSettings = SETTINGS) -> PoolState:
    """What a pool is good for, for one machine of a deployment that may use its market."""
    if not pool.enabled:
        return PoolState.OFF
    if pool.ends_at is not None and now + settings.useful >= pool.ends_at:
        return PoolState.ENDED
    if pool.paused_until is not None and pool.paused_until > now:
        return PoolState.RESTING
    return PoolState.FULL if pool.market in RESERVATIONS and pool.free == 0 else PoolState.USABLE


def moved(order: Sequence[int], pool: int, position: int) -> tuple[int, ...]:
    """The ids of a type's pools in a new order, in which `pool` is at `position`; past the last one it is the last."""
    others = [one for one in order if one != pool]
    return (*others[:position], pool, *others[position:])


@dataclass(frozen=True, slots=True)
class TryPool:
    pool: PoolView
    reason: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """No pool before `until`."""

    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """No pool will do until a person, or another reservation, changes what there is."""

    reason: str


@dataclass(frozen=True, slots=True)
class PausePool:
    """Use this pool for nothing before `until`."""

    pool: int
    until: datetime
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumePool:
    """It had machines: forget its failures."""

    pool: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a pool may be used for a unit: from `usable_at` on; None: not before something changes. `reason`: why not
    now, "" if it may be."""

    pool: PoolView
    usable_at: datetime | None
    reason: str = ""


def plan_pool(
    unit: UnitView, pools: Sequence[PoolView], now: datetime, settings: PoolSettings = SETTINGS
) -> TryPool | WaitFor | Hopeless:
    """The pool to try next: the nearest to `unit.near`, of those the cheapest where prices count, of those the first by
    position."""
    found = fits(unit, pools, now, settings)
    usable = next((fit.pool for fit in found if not fit.reason), None)
    if usable is not None:
        return TryPool(usable, _why(unit, usable, found))
    said = _listed([f"{fit.pool.name}: {fit.reason}" for fit in found])
    times = [fit.usable_at for fit in found if fit.usable_at is not None]
    if times:
        return WaitFor(min(times), f"no pool of {unit.instance_type} may be used now; {said}")
    if found:
        return Hopeless(f"no pool of {unit.instance_type} may be used; {said}")
    return Hopeless(f"{unit.region} has no pool of {unit.instance_type}")


def why_not(
    unit: UnitView, pools: Sequence[PoolView], now: datetime, settings: PoolSettings = SETTINGS
) -> Mapping[int, str]:
    """Of each pool that has such machines, by its id: why the unit would not be launched from it now; "" if it may."""
    return {fit.pool.id: fit.reason for fit in fits(unit, pools, now, settings)}


def fits(
    unit: UnitView, pools: Sequence[PoolView], now: datetime, settings: PoolSettings = SETTINGS
) -> tuple[Fit, ...]:
    """The pools of the unit's region and instance type, in the order in which they are tried."""
    own = [pool for pool in pools if (pool.region, pool.instance_type) == (unit.region, unit.instance_type)]
    own.sort(key=lambda pool: (-shared_prefix(pool.path, unit.near), pool.extra_price or 0.0, pool.position, pool.id))
    return tuple(_fit(unit, pool, now, settings) for pool in own)


def _fit(unit: UnitView, pool: PoolView, now: datetime, settings: PoolSettings) -> Fit:
    if not pool.enabled:
        return Fit(pool, None, "a person has switched it off")
    if pool.market not in unit.markets:
        return Fit(pool, None, f"its deployment does not use {pool.market}")
    if pool.ends_at is not None and now + settings.useful >= pool.ends_at:
        return Fit(pool, None, f"it ends at {_said(pool.ends_at)}, before a machine would be of use")
    if pool.paused_until is not None and pool.paused_until > now:
        return Fit(pool, pool.paused_until, f"it rests until {_said(pool.paused_until)}, because {pool.pause_reason}")
    if pool.market in RESERVATIONS and pool.free is not None and pool.free < unit.count:
        again = now + timedelta(seconds=settings.pause_s)
        return Fit(pool, again, f"its reservation has room for {pool.free} of {unit.count} machines")
    return Fit(pool, now)


def pauses(
    outcome: LaunchOutcome,
    scope: Scope,
    text: str,
    pool_id: int,
    pools: Sequence[PoolView],
    now: datetime,
    settings: PoolSettings = SETTINGS,
) -> tuple[PausePool | ResumePool, ...]:
    """Which pools rest after a launch call in one, to which `text` was the answer. No pause ends earlier by it.

    `pools` as they are now: that of the attempt may be hours old, and others have failed since.
    """
    pool = next((one for one in pools if one.id == pool_id), None)
    if pool is None:
        return ()
    if outcome is LaunchOutcome.LAUNCHED:
        return (ResumePool(pool.id),) if pool.failures or pool.paused_until is not None else ()
    if outcome is LaunchOutcome.NO_QUOTA:
        return tuple(
            _paused(one, now + timedelta(seconds=settings.quota_pause_s), one.failures, text)
            for one in pools
            if one.region == pool.region and _quota_of(one) == _quota_of(pool)
        )
    if outcome not in (LaunchOutcome.NO_CAPACITY, LaunchOutcome.REFUSED):
        return ()
    full = [one for one in pools if one.subnet == pool.subnet] if scope is Scope.SUBNET else [pool]
    return tuple(_paused(one, now + _pause(one.failures, settings), one.failures + 1, text) for one in full)


def quota_family(instance_type: str) -> str:
    """Which quota of EC2 its vCPUs count against: "Running On-Demand P instances", "… Trn …", "… G and VT …",
    "… Standard (A, C, D, H, I, M, R, T, Z) …" (https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html).
    """
    letters = instance_type[: next((at for at, sign in enumerate(instance_type) if not sign.isalpha()), None)]
    if letters in _STANDARD:
        return "standard"
    return "g" if letters in ("g", "gr", "vt") else letters


_STANDARD = frozenset("acdhimrtz") | {"im", "is"}


def _quota_of(pool: PoolView) -> tuple[str, bool]:
    return quota_family(pool.instance_type), pool.market is Market.SPOT


def _pause(failures: int, settings: PoolSettings) -> timedelta:
    doublings = min(failures, 16)  # beyond any `pause_most_s`
    return timedelta(seconds=min(settings.pause_s * 2**doublings, settings.pause_most_s))


def _paused(pool: PoolView, until: datetime, failures: int, reason: str) -> PausePool:
    if pool.paused_until is not None and pool.paused_until > until:
        return PausePool(pool.id, pool.paused_until, failures, pool.pause_reason)
    return PausePool(pool.id, until, failures, reason)


def _why(unit: UnitView, pool: PoolView, found: Sequence[Fit]) -> str:
    near = shared_prefix(pool.path, unit.near)
    where = f", {near} of {len(unit.near)} network nodes shared" if unit.near else ""
    passed = []
    for fit in found:
        if fit.pool is pool:
            break
        passed.append(f"{fit.pool.name}: {fit.reason}")
    return f"{pool.name}{where}{_cheap(pool, found)}" + (f"; not {_listed(passed)}" if passed else "")


def _cheap(pool: PoolView, found: Sequence[Fit]) -> str:
    """Why it comes before those that have a better place in the order and would do as well."""
    dearer = [fit.pool for fit in found if not fit.reason and fit.pool.position < pool.position]
    dearer = [one for one in dearer if (one.extra_price or 0.0) > (pool.extra_price or 0.0)]
    if not dearer:
        return ""
    return f", cheapest at {_dollars(pool)}: {dearer[0].name} costs {_dollars(dearer[0])}"


def _dollars(pool: PoolView) -> str:
    if pool.market in PAID_ANYWAY:
        return "no more, for it is paid for"
    return "what nobody knows" if pool.extra_price == UNPRICED else f"{pool.extra_price or 0.0:.2f} $/h"


def extra_price(market: Market, effective: float | None) -> float:
    """What one machine more of a pool costs an hour: nothing where its capacity is paid for whether it runs or not."""
    return 0.0 if market in PAID_ANYWAY else UNPRICED if effective is None else effective


def _listed(sentences: Sequence[str]) -> str:
    more = f"; and {len(sentences) - NAMED_MOST} more" if len(sentences) > NAMED_MOST else ""
    return "; ".join(sentences[:NAMED_MOST]) + more


def _said(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
