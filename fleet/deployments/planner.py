"""What users of a deployment may expect, and how fast its error budget burns. Pure.

Burn rates over two windows, a long one for weight and a short one so that an alarm ends soon after its cause: Google,
"The Site Reliability Workbook", chapter 5, table 5-8. A burn rate of 1 uses up the budget just in time.

How a deployment may be updated: what may be down at once, in which waves, and what a version must prove.

Pure data with its bounds. Text and numbers from outside come in through `parse_policy`, which names what is wrong.

What empties a region of a deployment, whichever way it is requested. Pure.

What deployments and teams may claim of machines: a deployment's priority, what others may take from it and for what
it takes from others, what it was set to have and may have now, and quotas. Pure data; `fleet.planning.shares` decides.

Names that applications ask for, of deployments, models and adapters: whether a new one is taken. Pure.

Every region's ingress lists every deployment, so a name is one for the whole fleet. A model's name may lead to several
deployments (docs/design/ingress.md#splits); an adapter's leads to one, and is no model's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine_agent.protocol.states import ServingClass
from kernel.constraints import InvalidField, struct_changed
from kernel.tones import Tone


class InvalidObjective(ValueError):
    """An objective that breaks a rule. `field` is the key; the text names it, the value and the rule."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Objective:
    """`availability` is the share of requests that must not fail, `ttft_share` that of requests whose first token
    must come within `ttft_ms`."""

    availability: float = 0.995
    ttft_ms: float = 2000.0
    ttft_share: float = 0.95


DEFAULTS: Mapping[ServingClass, Objective] = {
    ServingClass.REALTIME: Objective(),
    ServingClass.NEAR_REALTIME: Objective(availability=0.99, ttft_ms=60_000.0),
    ServingClass.BATCH: Objective(availability=0.99, ttft_ms=600_000.0),
}
RANGES = {"availability": (0.5, 0.99999), "ttft_ms": (1.0, 3_600_000.0), "ttft_share": (0.5, 0.99999)}


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What happened in one window of time. `served` had a first token, `slow` of them too late."""

    requests: int = 0
    errors: int = 0
    slow: int = 0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Two windows whose burn rates must both exceed `limit`. The budget is that of 30 days."""

    long_s: int
    short_s: int
    limit: float
    tone: Tone


ALARMS = (
    Alarm(3600, 300, 14.4, Tone.BAD),
    Alarm(6 * 3600, 1800, 6.0, Tone.BAD),
    Alarm(3 * 86_400, 6 * 3600, 1.0, Tone.WARN),
)
WINDOWS_S = tuple(sorted({seconds for alarm in ALARMS for seconds in (alarm.long_s, alarm.short_s)}))


@dataclass(frozen=True, slots=True)
class Burn:
    """How fast one budget burns. `rates`: window in seconds -> burn rate, None without requests in it."""

    what: str
    objective: float
    rates: Mapping[int, float | None]
    tone: Tone
    reason: str

    @property
    def percent(self) -> float:
        """The objective in percent."""
        return round(100 * self.objective, 3)


def parse_objective(stated: Mapping[str, Any], serving_class: ServingClass) -> Objective:
    """The objective with what is stated, and the rest from the defaults of its serving class.

    Raises:
        InvalidObjective: an unknown key, or a value of the wrong type or outside its range.
    """
    base = DEFAULTS[serving_class]
    values = {field.name: getattr(base, field.name) for field in fields(Objective)}
    for name, value in stated.items():
        if name not in values:
            raise InvalidObjective(name, f"there is no objective {name!r}; there are: {', '.join(values)}")
        low, high = RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidObjective(name, f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
        values[name] = float(value)
    return Objective(**values)


def burns(objective: Objective, seen: Mapping[int, RequestCounts]) -> tuple[Burn, ...]:
    """How the two budgets burn. `seen`: window in seconds, each of `WINDOWS_S` -> what happened in it until now."""
    failed = {window: _rate(what.errors, what.requests, objective.availability) for window, what in seen.items()}
    late = {window: late_burn(objective, what) for window, what in seen.items()}
    return (
        _judged("requests that succeed", objective.availability, failed),
        _judged(f"first tokens within {objective.ttft_ms:g} ms", objective.ttft_share, late),
    )


def late_burn(objective: Objective, seen: RequestCounts) -> float | None:
    """How many times too fast late first tokens burn their budget; None: no request had one."""
    return _rate(seen.slow, seen.requests - seen.errors, objective.ttft_share)


def total(seen: Iterable[RequestCounts]) -> RequestCounts:
    rows = list(seen)
    return RequestCounts(
        sum(row.requests for row in rows), sum(row.errors for row in rows), sum(row.slow for row in rows)
    )


def _rate(bad: int, of: int, objective: float) -> float | None:
    return min(1.0, bad / of) / (1.0 - objective) if of > 0 else None


def _judged(what: str, objective: float, rates: Mapping[int, float | None]) -> Burn:
    for alarm in ALARMS:
        long, short = rates.get(alarm.long_s), rates.get(alarm.short_s)
        if long is not None and short is not None and min(long, short) > alarm.limit:
            reason = f"burns {long:.1f} times too fast over {_hours(alarm.long_s)} and still does"
            return Burn(what, objective, rates, alarm.tone, reason)
    if all(rate is None for rate in rates.values()):
        return Burn(what, objective, rates, Tone.IDLE, "no request to judge by")
    return Burn(what, objective, rates, Tone.OK, "within its budget")


def _hours(seconds: int) -> str:
    return "the last hour" if seconds == 3600 else f"the last {seconds // 3600} hours"


Cells = Annotated[int, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Ratio = Annotated[float, Meta(ge=1, le=100)]
WAVES_RULE = "a growing list of whole percentages from 1, the last of them 100"
Waves = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=100)], ...],
    Meta(min_length=1, description=WAVES_RULE),
]


class UpdateStrategy(StrEnum):
    """In place: cells go down and come back on their own nodes. Surge: a new cell comes first, then an old one goes."""

    IN_PLACE = "in_place"
    SURGE = "surge"


class GoodputMissing(StrEnum):
    """What a gate does where no benchmark compares both versions."""

    PAUSE = "pause"
    GO_ON = "go_on"


class InvalidPolicy(InvalidField):
    pass


class GatePolicy(msgspec.Struct, frozen=True):
    """What the gate after each wave compares. Ratios are of updated to control cells at the same time.

    `significance`: the probability at which a difference that large would be chance, below which it counts.
    `goodput_ratio`: what the new version must carry of what the old one does, by benchmarks of both under the same
    conditions; 0: nobody asks. Below it, or without such benchmarks where `goodput_missing` says so, it pauses.
    """

    error_ratio: Ratio = 2.0
    latency_ratio: Ratio = 1.25
    min_samples: Annotated[int, Meta(ge=2, le=1_000_000)] = 50
    significance: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    goodput_ratio: Annotated[float, Meta(ge=0, le=10)] = 0.0
    goodput_missing: GoodputMissing = GoodputMissing.PAUSE


class UpdatePolicy(msgspec.Struct, frozen=True):
    """Counts are cells; `_s` are seconds.

    `max_unavailable` bounds what is down by our own doing: in a region together with what broke by itself, and over
    the deployment. `surge` cells may be there beyond the wanted ones. `progress_deadline_s` without any progress pauses
    a rollout (Nomad: 10 min). `max_failed_cells` failures of updated cells end it; a cell counts once per start.
    """

    strategy: UpdateStrategy = UpdateStrategy.IN_PLACE
    max_unavailable: Cells = 1
    surge: Cells = 0
    canary: bool = True
    waves_percent: Waves = (10, 25, 50, 100)
    canary_bake_s: Seconds = 300.0
    bake_s: Seconds = 300.0
    min_healthy_s: Seconds = 60.0
    max_failed_cells: Annotated[int, Meta(ge=1, le=1000)] = 2
    auto_rollback: bool = True
    progress_deadline_s: Seconds = 600.0
    gate: GatePolicy = GatePolicy()


def parse_policy(stated: Mapping[str, Any], base: UpdatePolicy | None = None) -> UpdatePolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    Raises:
        InvalidPolicy: an unknown key, a value of the wrong type or outside its range, or values that exclude another.
    """
    try:
        policy = struct_changed(base or UpdatePolicy(), stated, path="policy")
    except InvalidField as error:
        raise InvalidPolicy(error.field, str(error)) from None
    _check_waves(policy.waves_percent)
    _check_strategy(policy)
    return policy


def policy_as_json(policy: UpdatePolicy) -> dict[str, Any]:
    """What `parse_policy` reads back into an equal policy."""
    plain: dict[str, Any] = msgspec.to_builtins(policy)
    return {**plain, "waves_percent": list(policy.waves_percent)}


def _check_waves(waves: tuple[int, ...]) -> None:
    if list(waves) != sorted(set(waves)) or waves[-1] != 100:
        raise InvalidPolicy("waves_percent", f"waves_percent is {list(waves)}; it must be {WAVES_RULE}")


def _check_strategy(policy: UpdatePolicy) -> None:
    if policy.strategy is UpdateStrategy.IN_PLACE and policy.max_unavailable == 0:
        raise InvalidPolicy(
            "max_unavailable", "max_unavailable is 0; in_place must take down at least 1 cell at a time"
        )
    if policy.strategy is UpdateStrategy.SURGE and policy.surge == 0:
        raise InvalidPolicy("surge", "surge is 0; the strategy surge needs at least 1 cell beyond the wanted ones")


EMPTIED_BELOW = 0.1
"""A region that keeps less than a tenth, of its cells or of its own requests, is empty for those who would not have it
emptied."""


def empties_origin(shares: Mapping[str, float], origin: str) -> bool:
    """Whether a region keeps next to none of its own requests."""
    return shares.get(origin, 0.0) < EMPTIED_BELOW


def emptied_regions(before: Mapping[str, int], cells: Mapping[str, int]) -> tuple[str, ...]:
    """Those of `cells`, the new numbers, that keep next to none of the cells that they should have had `before`."""
    return tuple(sorted(region for region, count in cells.items() if count < EMPTIED_BELOW * before.get(region, 0)))


PRIORITY_MOST = 9
PRIORITIES: Mapping[ServingClass, int] = {
    ServingClass.REALTIME: 6,
    ServingClass.NEAR_REALTIME: 4,
    ServingClass.BATCH: 2,
}
"""With room between them and at both ends for what a person states."""


class Preempts(StrEnum):
    """For which of its cells a deployment takes machines of lower priority: those that its range begins with (a number
    that a person set counts whole), all that it should have, or none."""

    MIN = "min"
    NEED = "need"
    NOTHING = "nothing"


class GrantRule(StrEnum):
    """Why a place has fewer cells than were set, or no fewer any more."""

    QUOTA = "quota"
    RECLAIM = "reclaim"
    PRIORITY = "priority"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """`priority`: 0 to `PRIORITY_MOST`, the higher goes first. `preemptible`: whether a higher one, or the team that
    a machine was borrowed from, may take cells below its floor, too. None: as its serving class has it."""

    priority: int | None = None
    preemptible: bool | None = None
    preempts: Preempts = Preempts.MIN

    def of_class(self, serving_class: ServingClass) -> "SharingPolicy":
        """With what the serving class says where nothing is stated."""
        priority = PRIORITIES[serving_class] if self.priority is None else self.priority
        is_batch = serving_class is ServingClass.BATCH
        return replace(self, priority=priority, preemptible=is_batch if self.preemptible is None else self.preemptible)


UNSTATED = SharingPolicy(PRIORITIES[ServingClass.REALTIME], preemptible=False)
"""Of a deployment of which nothing is said."""


@dataclass(frozen=True, slots=True)
class ClaimView:
    """What a deployment was set to have in a region: `asked` cells, of which `floor` are no surplus; None: all, as of a
    number that a person set. `granted`: how many of them it may have while machines are short, since when and by which
    rule; None: all. `prefill` and `decode`: so many of the asked cells should have these roles, the rest is mixed.
    `by_type`: so many should be on these instance types, the rest wherever is best."""

    asked: int
    floor: int | None = None
    granted: int | None = None
    granted_at: datetime | None = None
    rule: GrantRule | None = None
    reason: str = ""
    prefill: int = 0
    decode: int = 0
    by_type: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_force(self) -> int:
        return self.asked if self.granted is None else min(self.asked, self.granted)

    @property
    def least(self) -> int:
        return self.asked if self.floor is None else min(self.floor, self.asked)


@dataclass(frozen=True, slots=True)
class QuotaView:
    """Machines of an instance type that a team is entitled to, in a region, or, where it names none, over all of them.
    `borrow_most`: how many of other teams it may borrow; None: any number."""

    team: str
    instance_type: str
    machines: int
    borrow_most: int | None = None
    region: str = ""


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """`patience_s`: how long a cell waits for machines before others make room for it; where machines are bought, and
    come after a while, so much longer than they take to boot. `kept_s`: how long a cell that was taken is not given
    back: a start and a drain take minutes, and load that comes back within them would only move cells to and fro."""

    patience_s: float = 30.0
    kept_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ServedName:
    """A name, of which deployment, and what it is there. `adapter_of`: the version (`model@version`) whose adapter it
    is; empty: it is the deployment's own name, or its model's."""

    name: str
    deployment: str
    adapter_of: str = ""

    def __str__(self) -> str:
        if self.adapter_of:
            return f"adapter {self.name} of {self.adapter_of}, deployment {self.deployment}"
        if self.name == self.deployment:
            return f"deployment {self.name}"
        return f"model {self.name} of deployment {self.deployment}"


def name_collision(wanted: Iterable[ServedName], served: Iterable[ServedName]) -> str:
    """Why these names cannot be served beside those that are, naming both; empty if they can. Versions of one
    deployment may have an adapter in common: during a rollout both are served."""
    there = list(served)
    for new in wanted:
        for old in there:
            same_deployment = new.deployment == old.deployment
            both_adapters = bool(new.adapter_of and old.adapter_of)
            may_share = same_deployment if both_adapters else not (new.adapter_of or old.adapter_of)
            if new.name == old.name and not may_share:
                return (
                    f"{new} would have the name of {old}; each name that applications ask for leads to one: rename it"
                )
    return ""
