"""Plain data of deployments, with their bounds and checks: objectives and error budgets, update policies, sharing of
machines, and names that applications use. Text and numbers from requests are parsed here, and errors name the field.
Never reads the database or the clock.

Burn rates use a long window for significance and a short one, so that an alarm ends soon after its cause: Google, "The
Site Reliability Workbook", chapter 5, table 5-8. A burn rate of 1 uses up the budget exactly at its end."""

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
    """An invalid objective. `field` is the key; the text names it, the value and the rule."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Objective:
    """`availability`: share of requests that must succeed; `ttft_share`: share whose first token must arrive within
    `ttft_ms`."""

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
    """Counts of one time window. `slow`: requests whose first token was late."""

    requests: int = 0
    errors: int = 0
    slow: int = 0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Raised if the burn rates of both windows exceed `limit`. The budget covers 30 days."""

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
    """The burn of one budget. `rates`: window in seconds -> burn rate, or None without requests."""

    what: str
    objective: float
    rates: Mapping[int, float | None]
    tone: Tone
    reason: str

    @property
    def percent(self) -> float:
        return round(100 * self.objective, 3)


def parse_objective(stated: Mapping[str, Any], serving_class: ServingClass) -> Objective:
    """The objective with the stated values, and the defaults of its serving class for the rest. Raises InvalidObjective
    for an unknown key, or a value of the wrong type or outside its range."""
    base = DEFAULTS[serving_class]
    values = {field.name: getattr(base, field.name) for field in fields(Objective)}
    for name, value in stated.items():
        if name not in values:
            raise InvalidObjective(name, f"unknown objective {name!r}; known: {', '.join(values)}")
        low, high = RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidObjective(name, f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
        values[name] = float(value)
    return Objective(**values)


def burns(objective: Objective, seen: Mapping[int, RequestCounts]) -> tuple[Burn, ...]:
    """Burn of the two budgets. `seen`: window in seconds, each of `WINDOWS_S` -> its counts until now."""
    failed = {window: _burn_rate(what.errors, what.requests, objective.availability) for window, what in seen.items()}
    late = {window: late_burn(objective, what) for window, what in seen.items()}
    return (
        _burn_verdict("requests that succeed", objective.availability, failed),
        _burn_verdict(f"first tokens within {objective.ttft_ms:g} ms", objective.ttft_share, late),
    )


def late_burn(objective: Objective, seen: RequestCounts) -> float | None:
    """Burn rate of late first tokens, or None if no request had one."""
    return _burn_rate(seen.slow, seen.requests - seen.errors, objective.ttft_share)


def total(seen: Iterable[RequestCounts]) -> RequestCounts:
    rows = list(seen)
    return RequestCounts(
        sum(row.requests for row in rows), sum(row.errors for row in rows), sum(row.slow for row in rows)
    )


def _burn_rate(bad: int, of: int, objective: float) -> float | None:
    return min(1.0, bad / of) / (1.0 - objective) if of > 0 else None


def _burn_verdict(what: str, objective: float, rates: Mapping[int, float | None]) -> Burn:
    for alarm in ALARMS:
        long, short = rates.get(alarm.long_s), rates.get(alarm.short_s)
        if long is not None and short is not None and min(long, short) > alarm.limit:
            reason = f"burns {long:.1f} times too fast over {_window_text(alarm.long_s)} and still does"
            return Burn(what, objective, rates, alarm.tone, reason)
    if all(rate is None for rate in rates.values()):
        return Burn(what, objective, rates, Tone.IDLE, "no requests")
    return Burn(what, objective, rates, Tone.OK, "within its budget")


def _window_text(seconds: int) -> str:
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
    """`in_place`: cells are drained and return on their own nodes. `surge`: a new cell starts before an old one is
    stopped."""

    IN_PLACE = "in_place"
    SURGE = "surge"


class GoodputMissing(StrEnum):
    """Behaviour of a gate if no benchmark compares both versions."""

    PAUSE = "pause"
    GO_ON = "go_on"


class InvalidPolicy(InvalidField):
    pass


class GatePolicy(msgspec.Struct, frozen=True):
    """Limits of the gate after each wave. Ratios are updated to control cells over the same time. `significance`: a
    difference counts if its probability by chance is lower. `goodput_ratio`: required goodput of the new version
    relative to the old one, in benchmarks under the same conditions; 0 switches it off. The rollout pauses below it,
    and also without benchmarks if `goodput_missing` is `pause`."""

    error_ratio: Ratio = 2.0
    latency_ratio: Ratio = 1.25
    min_samples: Annotated[int, Meta(ge=2, le=1_000_000)] = 50
    significance: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    goodput_ratio: Annotated[float, Meta(ge=0, le=10)] = 0.0
    goodput_missing: GoodputMissing = GoodputMissing.PAUSE


class UpdatePolicy(msgspec.Struct, frozen=True):
    """Counts are cells; `_s` are seconds. `max_unavailable`: limit of planned disruptions, per region including failed
    cells, and over the whole deployment. `surge`: cells allowed above the target. `progress_deadline_s`: pauses a
    rollout without progress (Nomad: 10 min). `max_failed_cells`, `max_failed_percent` of the updated cells: the greater
    one is the number of failures that ends a rollout."""

    strategy: UpdateStrategy = UpdateStrategy.IN_PLACE
    max_unavailable: Cells = 1
    surge: Cells = 0
    canary: bool = True
    waves_percent: Waves = (10, 25, 50, 100)
    canary_bake_s: Seconds = 300.0
    bake_s: Seconds = 300.0
    min_healthy_s: Seconds = 60.0
    max_failed_cells: Annotated[int, Meta(ge=1, le=1000)] = 2
    max_failed_percent: Annotated[int, Meta(ge=0, le=100)] = 2
    auto_rollback: bool = True
    progress_deadline_s: Seconds = 600.0
    gate: GatePolicy = GatePolicy()

    def most_failures(self, updated: int) -> int:
        """So many failures of updated cells end a rollout. Engines of any version fail now and then, so the number
        grows with the `updated` cells."""
        return max(self.max_failed_cells, self.max_failed_percent * updated // 100)


def parse_policy(stated: Mapping[str, Any], base: UpdatePolicy | None = None) -> UpdatePolicy:
    """The policy with the stated values, and `base` (or the defaults) for the rest. Raises InvalidPolicy for an unknown
    key, a value of the wrong type or outside its range, or values that exclude each other."""
    try:
        policy = struct_changed(base or UpdatePolicy(), stated, path="policy")
    except InvalidField as error:
        raise InvalidPolicy(error.field, str(error)) from None
    _check_waves(policy.waves_percent)
    _check_strategy(policy)
    return policy


def policy_as_json(policy: UpdatePolicy) -> dict[str, Any]:
    """The form that `parse_policy` reads."""
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
        raise InvalidPolicy("surge", "surge is 0; the strategy surge needs at least 1")


EMPTIED_BELOW = 0.1
"""A region that keeps less than this share of its cells or requests counts as emptied."""


def empties_origin(shares: Mapping[str, float], origin: str) -> bool:
    """Whether a region keeps almost none of its requests."""
    return shares.get(origin, 0.0) < EMPTIED_BELOW


def emptied_regions(before: Mapping[str, int], cells: Mapping[str, int]) -> tuple[str, ...]:
    """Regions of `cells`, the new targets, that keep almost none of the cells in `before`."""
    return tuple(sorted(region for region, count in cells.items() if count < EMPTIED_BELOW * before.get(region, 0)))


PRIORITY_MOST = 9
PRIORITIES: Mapping[ServingClass, int] = {
    ServingClass.REALTIME: 6,
    ServingClass.NEAR_REALTIME: 4,
    ServingClass.BATCH: 2,
}
"""Leaves room for operators' own values between and around them."""


class Preempts(StrEnum):
    """Cells for which a deployment takes machines from lower priorities: those up to the minimum of its range (or a
    number set by a user), all, or none."""

    MIN = "min"
    NEED = "need"
    NOTHING = "nothing"


class GrantRule(StrEnum):
    """Why a place has fewer cells than its target, or no longer has."""

    QUOTA = "quota"
    RECLAIM = "reclaim"
    PRIORITY = "priority"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """`priority`: 0 to `PRIORITY_MOST`; higher ones go first. `preemptible`: whether a higher one, or the team that
    lent a machine, may also take cells below its minimum; None uses the default of its serving class."""

    priority: int | None = None
    preemptible: bool | None = None
    preempts: Preempts = Preempts.MIN

    def of_class(self, serving_class: ServingClass) -> "SharingPolicy":
        """With the defaults of the serving class filled in."""
        priority = PRIORITIES[serving_class] if self.priority is None else self.priority
        is_batch = serving_class is ServingClass.BATCH
        return replace(self, priority=priority, preemptible=is_batch if self.preemptible is None else self.preemptible)


UNSTATED = SharingPolicy(PRIORITIES[ServingClass.REALTIME], preemptible=False)
"""Default of a deployment without any setting."""


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A deployment's target in a region. `asked`: cells, of which `floor` are not surplus (None: all, for a number set
    by a user). `granted`: cells allowed while machines are scarce (None: all), with time and rule. `prefill` and
    `decode`: cells with these roles; the rest is mixed. `by_type`: cells on these instance types; the rest is placed
    freely."""

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
    """Machines of an instance type that a team is entitled to in a region, or in total without one. `borrow_most`:
    machines that it may borrow from other teams (None: unlimited)."""

    team: str
    instance_type: str
    machines: int
    borrow_most: int | None = None
    region: str = ""


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """`patience_s`: how long a cell waits for machines before others make room for it, plus the boot time where
    machines are bought. `kept_s`: how long a taken cell is not given back. Starts and drains take minutes, so load that
    returns earlier would only move cells back and forth."""

    patience_s: float = 30.0
    kept_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ServedName:
    """A name, its deployment and its kind. `adapter_of`: the version (`model@version`) whose adapter it is, or "" for
    the name of the deployment or its model."""

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
    """Why these names collide with served ones, naming both, or "". Versions of one deployment may share an adapter,
    because a rollout serves both."""
    there = list(served)
    for new in wanted:
        for old in there:
            same_deployment = new.deployment == old.deployment
            both_adapters = bool(new.adapter_of and old.adapter_of)
            may_share = same_deployment if both_adapters else not (new.adapter_of or old.adapter_of)
            if new.name == old.name and not may_share:
                return f"{new} has the same name as {old}; rename it"
    return ""
