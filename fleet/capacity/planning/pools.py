"""Decides which pool of capacity a launch unit uses, how long a pool pauses after a failed launch, and which markets a
deployment may use. Pure. A pool is one way to get machines of a type: a zone, its subnet, and a market, such as a
reservation. A unit is launched as a whole from one pool, so that its machines are in one zone. Only "no capacity" and
"no quota" move it to another pool; any other refusal ends the unit and pauses its pool. A deployment without markets
may use any machine, including one without a market; a deployment with markets uses only machines that are certainly of
one of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import reduce
from typing import Any

from fleet.placement.planning.distance import Path, shared_prefix
from fleet.reconcile.planning.states import PoolState


class Market(StrEnum):
    """How machines are bought. `reserved` and `block`: only in this reservation or Capacity Block. `open`: in a
    matching open reservation, else on demand. `interruptible`: in a reservation that its owner may reclaim."""

    RESERVED = "reserved"
    BLOCK = "block"
    OPEN = "open"
    ON_DEMAND = "on_demand"
    INTERRUPTIBLE = "interruptible"
    SPOT = "spot"


Markets = frozenset[Market]
"""Of a deployment: those that it may use. Of a machine: those that it may belong to; one once it exists."""

ANY: Markets = frozenset()
"""Of a deployment: no limit. Of a machine: no market, or unknown."""


class InvalidMarkets(ValueError):
    """Not valid markets; the text says why."""


def parse_markets(stated: Any) -> Markets:
    """Parses a list such as `["reserved", "on_demand"]`; empty: any. Raises InvalidMarkets if it is not a list, or has
    an unknown or repeated market."""
    known = ", ".join(Market)
    if not isinstance(stated, list | tuple):
        raise InvalidMarkets(f"markets must be a list of some of: {known}; empty for any")
    for name in stated:
        if not isinstance(name, str) or name not in set(Market):
            raise InvalidMarkets(f"{name!r} is not a market; choose from: {known}")
        if stated.count(name) > 1:
            raise InvalidMarkets(f"{name} is repeated")
    return frozenset(Market(name) for name in stated)


def stored(markets: Iterable[Market]) -> list[str]:
    """Returns the markets in the order in which rows store them."""
    found = set(markets)
    return [market.value for market in Market if market in found]


def may_use(wanted: Markets, machine: Markets) -> bool:
    """Whether a deployment with these markets may use a machine."""
    return not wanted or (bool(machine) and machine <= wanted)


def wanted_by_all(stated: Collection[Markets]) -> Markets:
    """Returns the markets that all these deployments may use; `ANY` if there is none, or none states any."""
    choices = [markets for markets in stated if markets]
    return reduce(frozenset.intersection, choices) if choices else ANY


def strictest_first(markets: Markets) -> tuple[int, list[str]]:
    """Sort key: deployments with fewer usable machines choose first, `ANY` last."""
    return len(markets) or len(Market) + 1, stored(markets)


NAMED_MOST = 3


RESERVATIONS = frozenset({Market.RESERVED, Market.BLOCK, Market.INTERRUPTIBLE})
"""Markets whose pools name a reservation."""

UNPRICED = 1e6
"""US dollars an hour: more than any machine costs."""

PAID_ANYWAY = frozenset({Market.RESERVED, Market.BLOCK})
"""AWS bills their capacity used or not: reservations by the hour, Capacity Blocks in advance."""

DECLARABLE = (Market.SPOT, Market.OPEN)
"""Users declare pools of these markets. All others come from a region's stack."""


class LaunchOutcome(StrEnum):
    """Outcome of one launch call. `later` and `unknown`: it may have been carried out. `mismatched`: the request
    differs from the token's earlier one, which is a bug, and machines may run. `attempt_ended`: the token's launch has
    ended."""

    LAUNCHED = "launched"
    NO_CAPACITY = "no_capacity"
    NO_QUOTA = "no_quota"
    REFUSED = "refused"
    ATTEMPT_ENDED = "attempt_ended"
    LATER = "later"
    UNKNOWN = "unknown"
    MISMATCHED = "mismatched"


DEFINITE = frozenset(set(LaunchOutcome) - {LaunchOutcome.LATER, LaunchOutcome.UNKNOWN, LaunchOutcome.MISMATCHED})
"""The attempt can yield nothing more."""


class Scope(StrEnum):
    """What "no capacity" applies to."""

    POOL = "pool"
    SUBNET = "subnet"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Seconds. `pause_s` doubles with each failure in a row up to `pause_most_s` (Karpenter pauses an offering for 180
    s, ParallelCluster for 600). `quota_pause_s`: an operator must raise the quota. `boot_s`: until a machine has
    joined. `block_margin_s`: before the end of a Capacity Block, whose machines EC2 terminates from 30 minutes before.
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
    """Machines that are launched together or not at all. `near`: network nodes, widest first, to place them under.
    `markets`: allowed ones. `wanted`: still needed."""

    id: str
    region: str
    instance_type: str
    count: int
    markets: frozenset[Market]
    near: Path = ()
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class PoolView:
    """`position`: order set by users. `path`: where its machines will be, if known: zone ID, then the network nodes of
    its reservation. `placement_group`: a reservation's own; another one would make part of it unusable (eksctl #7949).
    `free`: machines of its reservation at the last reading; None: unknown. `failures`: in a row. `ends_at`: of a
    Capacity Block. `max_price`: US dollars an hour for spot; None: the on-demand price. `price_per_hour`: the
    provider's price of a machine; None: unknown. `extra_price`: in regions that use the cheapest pool first, the cost
    of one more machine an hour, `UNPRICED` if unknown; None: only positions count."""

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


def pool_state(pool: PoolView, now: datetime) -> PoolState:
    """Returns the state of a pool for one machine of a deployment that may use its market."""
    if not pool.enabled:
        return PoolState.OFF
    if pool.ends_at is not None and now + SETTINGS.useful >= pool.ends_at:
        return PoolState.ENDED
    if pool.paused_until is not None and pool.paused_until > now:
        return PoolState.RESTING
    return PoolState.FULL if pool.market in RESERVATIONS and pool.free == 0 else PoolState.USABLE


def moved(order: Sequence[int], pool: int, position: int) -> tuple[int, ...]:
    """Returns the IDs of a type's pools with `pool` at `position`; larger positions mean last."""
    others = [one for one in order if one != pool]
    return (*others[:position], pool, *others[position:])


@dataclass(frozen=True, slots=True)
class TryPool:
    pool: PoolView
    reason: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """No pool is usable before `until`."""

    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """No pool is usable until an operator or a reservation changes something."""

    reason: str


@dataclass(frozen=True, slots=True)
class PausePool:
    """Do not use this pool before `until`."""

    pool: int
    until: datetime
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumePool:
    """It had machines: reset its failures."""

    pool: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a unit may use a pool: from `usable_at` on; None: not until something changes. `reason`: why not now, or
    ""."""

    pool: PoolView
    usable_at: datetime | None
    reason: str = ""


def plan_pool(
    unit: UnitView, pools: Sequence[PoolView], now: datetime, settings: PoolSettings = SETTINGS
) -> TryPool | WaitFor | Hopeless:
    """Returns the pool to try next: the nearest to `unit.near`, then the cheapest where prices count, then the first by
    position."""
    found = fits(unit, pools, now, settings)
    usable = next((fit.pool for fit in found if not fit.reason), None)
    if usable is not None:
        return TryPool(usable, _choice_reason(unit, usable, found))
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
    """Returns, by pool ID, why the unit would not be launched from it now, or ""."""
    return {fit.pool.id: fit.reason for fit in fits(unit, pools, now, settings)}


def fits(
    unit: UnitView, pools: Sequence[PoolView], now: datetime, settings: PoolSettings = SETTINGS
) -> tuple[Fit, ...]:
    """Returns the pools of the unit's region and type in order of use."""
    own = [pool for pool in pools if (pool.region, pool.instance_type) == (unit.region, unit.instance_type)]
    own.sort(key=lambda pool: (-shared_prefix(pool.path, unit.near), pool.extra_price or 0.0, pool.position, pool.id))
    return tuple(_fit(unit, pool, now, settings) for pool in own)


def _fit(unit: UnitView, pool: PoolView, now: datetime, settings: PoolSettings) -> Fit:
    if not pool.enabled:
        return Fit(pool, None, "a user disabled it")
    if pool.market not in unit.markets:
        return Fit(pool, None, f"its deployment does not use {pool.market}")
    if pool.ends_at is not None and now + settings.useful >= pool.ends_at:
        return Fit(pool, None, f"it ends at {_utc_text(pool.ends_at)}, too soon for a new machine")
    if pool.paused_until is not None and pool.paused_until > now:
        return Fit(pool, pool.paused_until, f"it is paused until {_utc_text(pool.paused_until)}: {pool.pause_reason}")
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
    """Returns the pools to pause or resume after a launch call with the answer `text`. No pause gets shorter. `pools`
    must be current: the attempt's own view may be hours old."""
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
    """Returns the EC2 quota of the type's vCPUs: "Running On-Demand P instances", "… Trn …", "… G and VT …", "…
    Standard (A, C, D, H, I, M, R, T, Z) …"
    (https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html)."""
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


def _choice_reason(unit: UnitView, pool: PoolView, found: Sequence[Fit]) -> str:
    near = shared_prefix(pool.path, unit.near)
    where = f", {near} of {len(unit.near)} network nodes shared" if unit.near else ""
    passed = []
    for fit in found:
        if fit.pool is pool:
            break
        passed.append(f"{fit.pool.name}: {fit.reason}")
    return f"{pool.name}{where}{_price_reason(pool, found)}" + (f"; not {_listed(passed)}" if passed else "")


def _price_reason(pool: PoolView, found: Sequence[Fit]) -> str:
    """Why it precedes usable pools with a better position."""
    dearer = [fit.pool for fit in found if not fit.reason and fit.pool.position < pool.position]
    dearer = [one for one in dearer if (one.extra_price or 0.0) > (pool.extra_price or 0.0)]
    if not dearer:
        return ""
    return f", cheapest at {_dollars(pool)}: {dearer[0].name} costs {_dollars(dearer[0])}"


def _dollars(pool: PoolView) -> str:
    if pool.market in PAID_ANYWAY:
        return "0 $/h, because it is already paid"
    return "an unknown price" if pool.extra_price == UNPRICED else f"{pool.extra_price or 0.0:.2f} $/h"


def extra_price(market: Market, effective: float | None) -> float:
    """Cost of one more machine an hour: 0 if the capacity is paid in any case."""
    return 0.0 if market in PAID_ANYWAY else UNPRICED if effective is None else effective


def _listed(sentences: Sequence[str]) -> str:
    more = f"; and {len(sentences) - NAMED_MOST} more" if len(sentences) > NAMED_MOST else ""
    return "; ".join(sentences[:NAMED_MOST]) + more


def _utc_text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
