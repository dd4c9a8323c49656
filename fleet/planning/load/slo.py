"""What users of a deployment may expect, and how fast its error budget burns. Pure.

Burn rates over two windows, a long one for weight and a short one so that an alarm ends soon after its cause: Google,
"The Site Reliability Workbook", chapter 5, table 5-8. A burn rate of 1 uses up the budget just in time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine_agent.protocol.states import ServingClass
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
