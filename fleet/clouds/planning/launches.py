"""Decides the next step of a launch unit, so that it is launched once and as a whole although answers are lost, and how
many machines an hour may be launched. Pure. Each attempt has a number, a pool and a token, written before the call; the
cloud carries out calls with the same token once. An attempt without an answer is repeated unchanged, and the next
attempt begins only when the previous one can yield no more machines. If repeating is unsafe or unwanted, its machines
are searched for by tags. The provider itself checks the cap last before a launch, so that no planner, bug or operator
can exceed it; launches in doubt count."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from fleet.capacity.planning.pools import (
    DEFINITE,
    Hopeless,
    LaunchOutcome,
    PoolView,
    TryPool,
    UnitView,
    WaitFor,
    plan_pool,
)


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """Seconds. Pauses between calls or searches for an attempt are half its age, `again_least_s` to `again_most_s`.
    `token_trusted_s`: how long a token is repeated; AWS does not state how long it remembers one. `visible_after_s`:
    after this long a launched machine is in every complete list. `hopeless_again_s`: before pools are evaluated again
    if none is usable."""

    again_least_s: float = 5.0
    again_most_s: float = 300.0
    token_trusted_s: float = 3600.0
    visible_after_s: float = 600.0
    hopeless_again_s: float = 180.0


SETTINGS = AttemptSettings()

IN_DOUBT_IF_REPEATED = {
    LaunchOutcome.REFUSED: "was refused",
    LaunchOutcome.NO_CAPACITY: "found no capacity",
    LaunchOutcome.NO_QUOTA: "found no quota",
}
"""Outcomes that the cloud may decide before it checks the token: after a repeated call they prove nothing about earlier
calls."""


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One try of a unit. `pool`: as of the attempt, because a repeated call must send the same. `called_at`: start of
    the last call, written before it; `begun_at` at first. `outcome` None: not known. `again_at`: nothing happens before
    it. `ended_at` None: open."""

    number: int
    token: str
    pool: PoolView
    count: int
    begun_at: datetime
    called_at: datetime
    outcome: LaunchOutcome | None = None
    again_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def is_repeated(self) -> bool:
        """Compares in both directions: hosts that call in turn have different clocks."""
        return self.called_at != self.begun_at


@dataclass(frozen=True, slots=True)
class WriteAttempt:
    number: int
    token: str
    pool: PoolView
    reason: str


@dataclass(frozen=True, slots=True)
class RepeatCall:
    """Repeat the call with all parameters unchanged."""

    attempt: AttemptView


@dataclass(frozen=True, slots=True)
class FindMachines:
    """Search for machines with the attempt's tags, in a complete list."""

    attempt: AttemptView
    reason: str


@dataclass(frozen=True, slots=True)
class WaitUntil:
    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class CancelUnit:
    """No machine of it was or will be launched."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnitLaunched:
    attempt: AttemptView


Step = WriteAttempt | RepeatCall | FindMachines | WaitUntil | CancelUnit | UnitLaunched


@dataclass(frozen=True, slots=True)
class EndAttempt:
    outcome: LaunchOutcome


@dataclass(frozen=True, slots=True)
class KeepAttempt:
    """It stays open until at least `again_at`."""

    outcome: LaunchOutcome
    again_at: datetime


def token_of(install: str, unit: str, number: int) -> str:
    """Returns the client token of an attempt: 64 characters, EC2's maximum."""
    return sha256(f"{install}/{unit}/{number}".encode()).hexdigest()


def next_step(
    unit: UnitView, attempts: Sequence[AttemptView], pools: Sequence[PoolView], install: str, now: datetime
) -> Step:
    """Returns the next step of a unit. `attempts`: all of it, in any order."""
    for attempt in attempts:
        if attempt.outcome is LaunchOutcome.LAUNCHED:
            return UnitLaunched(attempt)
        if attempt.ended_at is None:
            return _open_attempt(unit, attempt, now)
    last = max(attempts, key=lambda one: one.number, default=None)
    if last is not None and last.outcome is LaunchOutcome.REFUSED:
        return CancelUnit(f"attempt {last.number} in {last.pool.name} was refused")
    if not unit.wanted:
        return CancelUnit("it is no longer wanted")
    match plan_pool(unit, pools, now):
        case TryPool(pool, reason):
            number = last.number + 1 if last is not None else 1
            return WriteAttempt(number, token_of(install, unit.id, number), pool, reason)
        case WaitFor(until, reason):
            return WaitUntil(until, reason)
        case Hopeless(reason):
            return WaitUntil(now + timedelta(seconds=SETTINGS.hopeless_again_s), reason)


def _open_attempt(unit: UnitView, attempt: AttemptView, now: datetime) -> Step:
    name = f"attempt {attempt.number} in {attempt.pool.name}"
    if attempt.again_at is not None and attempt.again_at > now:
        return WaitUntil(attempt.again_at, f"{name} is in doubt")
    if not unit.wanted:
        return FindMachines(attempt, f"{name} may have launched machines that are no longer wanted")
    if attempt.outcome is LaunchOutcome.MISMATCHED:
        return FindMachines(attempt, f"the token of {name} was used for another request")
    if attempt.outcome in IN_DOUBT_IF_REPEATED:
        reason = IN_DOUBT_IF_REPEATED[attempt.outcome]
        return FindMachines(attempt, f"{name} {reason} when it was repeated, and may have been carried out before")
    if (now - attempt.begun_at).total_seconds() >= SETTINGS.token_trusted_s:
        return FindMachines(attempt, f"the token of {name} is too old to be repeated")
    return RepeatCall(attempt)


def after_call(
    attempt: AttemptView, outcome: LaunchOutcome, now: datetime, retry_after_s: float = 0.0
) -> EndAttempt | KeepAttempt:
    """Returns what follows from a call's outcome. A refusal of a repeated call proves nothing about earlier calls:
    missing permissions are checked before the token, and so may be capacity and a quota that the earlier call used up.
    """
    in_doubt = outcome in IN_DOUBT_IF_REPEATED and attempt.is_repeated
    if outcome in DEFINITE and not in_doubt:
        return EndAttempt(outcome)
    return KeepAttempt(outcome, _again_at(attempt, now, retry_after_s))


def after_search(attempt: AttemptView, found: int, complete: bool, now: datetime) -> EndAttempt | KeepAttempt:
    """Returns what follows from a search by tags with `found` machines. `complete`: all pages arrived, and every zone
    answered. Finding none counts only after machines would be visible."""
    if found:
        return EndAttempt(LaunchOutcome.LAUNCHED)
    if complete and (now - attempt.called_at).total_seconds() >= SETTINGS.visible_after_s:
        proven = attempt.outcome in IN_DOUBT_IF_REPEATED
        return EndAttempt(attempt.outcome if attempt.outcome and proven else LaunchOutcome.ATTEMPT_ENDED)
    return KeepAttempt(attempt.outcome or LaunchOutcome.UNKNOWN, _again_at(attempt, now, 0.0))


def _again_at(attempt: AttemptView, now: datetime, retry_after_s: float) -> datetime:
    """Half its age from now, so that pauses grow without a counter."""
    age_s = (now - attempt.begun_at).total_seconds()
    pause_s = min(max(age_s / 2, SETTINGS.again_least_s, retry_after_s), SETTINGS.again_most_s)
    return now + timedelta(seconds=pause_s)


WINDOW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class LaunchCap:
    """Of one region. `machines`: launched in an hour. `price_per_hour`: US dollars an hour of the machines that were
    launched within an hour; None: no limit."""

    machines: int
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Machines of an attempt that was carried out or is in doubt. `price_per_hour`: of one machine, in US dollars, or
    None."""

    at: datetime
    count: int
    price_per_hour: float | None


@dataclass(frozen=True, slots=True)
class CapRefusal:
    """`until`: when the launch fits if no other happens; None: only after the cap or the price changes."""

    reason: str
    until: datetime | None


def cap_refusal(
    count: int, price_per_hour: float | None, launches: Sequence[Launch], cap: LaunchCap, now: datetime
) -> CapRefusal | None:
    """Returns why the cap forbids a launch of `count` machines; None if it fits. `price_per_hour`: of one machine, in
    US dollars."""
    recent = sorted((one for one in launches if one.at > now - WINDOW), key=lambda one: one.at)
    there = sum(one.count for one in recent)
    if there + count > cap.machines:
        reason = (
            f"{there} machines were launched within an hour, and {count} more would exceed the cap of {cap.machines}"
        )
        return CapRefusal(reason, _fits_at(recent, cap.machines - count, [one.count for one in recent]))
    if cap.price_per_hour is None:
        return None
    if price_per_hour is None:
        reason = "the price of such a machine is unknown, so the price cap cannot be checked: set its price"
        return CapRefusal(reason, None)
    prices = [one.count * (one.price_per_hour or 0.0) for one in recent]
    price = count * price_per_hour
    if sum(prices) + price > cap.price_per_hour:
        reason = (
            f"machines for {sum(prices):.2f} dollars an hour were launched within an hour, and {price:.2f} more would "
            f"exceed the cap of {cap.price_per_hour:.2f}"
        )
        return CapRefusal(reason, _fits_at(recent, cap.price_per_hour - price, prices))
    return None


def _fits_at(recent: Sequence[Launch], room: float, amounts: Sequence[float]) -> datetime | None:
    """When the remaining amounts fit into `room` as launches leave the hour; None: never."""
    left = sum(amounts)
    for launch, amount in zip(recent, amounts, strict=True):
        if room < 0:
            return None
        left -= amount
        if left <= room:
            return launch.at + WINDOW
    return None
