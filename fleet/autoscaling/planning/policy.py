"""Scaling policies, ranges, cells by role, and windows of a schedule: plain data with bounds. Text and numbers from
requests are parsed here, and errors name the field. Times are arguments; nothing is decided here."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kernel.constraints import InvalidField, struct_changed
from kernel.cron import check_cron, time_zone, times_before

WINDOWS_MOST = 20


class ScheduleWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A minimum of `cells` cells (0: the range begins at 0) for `for_s` seconds from each moment of `cron`: minute,
    hour, day of the month, month, day of the week in `time_zone`. `region`: only there; empty: every region with a
    range."""

    cron: Annotated[str, Meta(min_length=9, max_length=100)]
    for_s: Annotated[float, Meta(ge=60, le=7 * 86_400)]
    cells: Annotated[int, Meta(ge=0, le=1000)]
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"
    region: Annotated[str, Meta(max_length=64)] = ""


def check_window(window: ScheduleWindow, path: str) -> None:
    """Raises InvalidField for an unknown time zone, or a cron expression that lacks one of five fields or never occurs
    within a year."""
    for name, check, value in (("time_zone", time_zone, window.time_zone), ("cron", check_cron, window.cron)):
        try:
            check(value)
        except ValueError as error:
            raise InvalidField(f"{path}.{name}", f"{path}.{name} is {error}") from None


def window_in_force(windows: Iterable[ScheduleWindow], region: str, now: datetime) -> ScheduleWindow | None:
    """The open window with the most cells in a region, or None."""
    theirs = (window for window in windows if window.region in ("", region))
    return max((window for window in theirs if _is_open(window, now)), key=lambda one: one.cells, default=None)


def _is_open(window: ScheduleWindow, now: datetime) -> bool:
    began = last_began(window, now)
    return began is not None and now - began < timedelta(seconds=window.for_s)


def last_began(window: ScheduleWindow, now: datetime) -> datetime | None:
    """When the window last began, `now` included."""
    return next(times_before(window.cron, window.time_zone, now), None)


METRICS_MOST = 5
DIMENSIONS_MOST = 30
"""CloudWatch's limit."""
STATISTIC = r"^(Average|Sum|Minimum|Maximum|SampleCount|p([0-9]|[1-9][0-9])(\.[0-9]{1,3})?)$"
_DimensionText = Annotated[str, Meta(min_length=1, max_length=255)]


class CloudMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric of CloudWatch of which one cell does `per_cell`: cells = value / `per_cell`, rounded up. It is read in
    the AWS region of the cell's region. `region`: only there; empty: every region with a range that is in AWS."""

    namespace: _DimensionText
    metric: _DimensionText
    per_cell: Annotated[float, Meta(gt=0, le=1e12)]
    statistic: Annotated[str, Meta(pattern=STATISTIC)] = "Average"
    period_s: Annotated[int, Meta(ge=60, le=3600, multiple_of=60)] = 60
    dimensions: Annotated[dict[_DimensionText, _DimensionText], Meta(max_length=DIMENSIONS_MOST)] = {}
    region: Annotated[str, Meta(max_length=64)] = ""

    @property
    def key(self) -> str:
        """Names what is read, so that a changed metric has no value yet."""
        read = [self.namespace, self.metric, self.statistic, self.period_s, sorted(self.dimensions.items())]
        return sha256(msgspec.json.encode(read)).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.statistic} of {self.namespace} {self.metric}"


def dimensions_from_text(text: str) -> dict[str, str]:
    """Dimensions from `QueueName=jobs, Stage=prod`. Raises ValueError if it is malformed."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    pairs = [part.partition("=") for part in parts]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise ValueError(f"{text[:60]!r} are not dimensions: write NAME=VALUE, with commas between them")
    return {name.strip(): value.strip() for name, _, value in pairs}


def dimensions_to_text(dimensions: Mapping[str, str]) -> str:
    """The text that `dimensions_from_text` reads."""
    return ", ".join(f"{name}={value}" for name, value in sorted(dimensions.items()))


CELLS_MOST = 1000
"""Limit per region against typing errors; the largest planned fleets have fewer."""
TEXT_MOST = 40
"""Maximum length of a number of cells as text."""
REQUEST_HOLD_MOST_S = 600
"""Clients of OpenAI and Anthropic time out after this, and each waiting request uses two connections of an ingress."""
TARGET_MOST = 0.8
"""The region autopilot fills no region further (`traffic.region_shares.planning.policy.MOST_UTILISED`)."""


class ScalingMode(StrEnum):
    """`shadow` decides and records but changes nothing. `act` sets the number of cells."""

    SHADOW = "shadow"
    ACT = "act"


class WakeOn(StrEnum):
    """What starts the first cell of a region. `waiting`: a request that no other region may serve or has room for;
    `arrivals`: any request of its applications, which other regions serve meanwhile."""

    WAITING = "waiting"
    ARRIVALS = "arrivals"


class RolesBy(StrEnum):
    """Who chooses the roles of cells. `stated`: users; `planned`: `fleet.autoscaling.planning.roles`, in the mode
    `act`."""

    STATED = "stated"
    PLANNED = "planned"


class InvalidScaling(InvalidField):
    """An invalid number of cells, range or policy."""


class CellRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a region's cells, both included."""

    min: int
    max: int

    def clamped(self, cells: int) -> int:
        return min(max(cells, self.min), self.max)

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


class CellPools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: int
    decode: int
    mixed: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        more = f", {self.mixed} mixed" if self.mixed else ""
        return f"{self.prefill} prefill, {self.decode} decode{more}"


Cells = int | CellRange | CellPools
"""Target of a region: a number, a range for the autoscaler, or cells per role."""


class ScalingPolicy(msgspec.Struct, frozen=True):
    """`target_utilisation`: share of the tested concurrency. `slo_burn`: burn rate of late first tokens over 5 minutes
    above which a step is added; `itl_p95_ms`: the same for the 95th percentile of inter-token latency; None: off.
    `down_after_s`: fewer cells must have been enough for this long, and for at least two start-ups. `start_up_s`: from
    the decision until a cell is ready; None: measured. `budget_per_hour`: US dollars for the machines of all its cells;
    it limits growth only. `schedule`: windows with a minimum of cells. `metrics`: of CloudWatch; without a recent
    value of one, no cell is removed.

    `idle_s`: time without requests before the last cell stops, where the range begins at 0. `wake`: what starts the
    first cell again. `hold_s`: how long requests wait for it; None: two start-ups. `roles`: who chooses prefill and
    decode cells. `itl_p99_ms`: limit of inter-token latency for that plan."""

    mode: ScalingMode = ScalingMode.SHADOW
    target_utilisation: Annotated[float, Meta(ge=0.1, le=TARGET_MOST)] = 0.7
    slo_burn: Annotated[float, Meta(ge=1, le=1000)] | None = 6.0
    itl_p95_ms: Annotated[float, Meta(ge=1, le=60_000)] | None = None
    down_after_s: Annotated[float, Meta(ge=10, le=86_400)] = 600.0
    start_up_s: Annotated[float, Meta(ge=1, le=7200)] | None = None
    budget_per_hour: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    schedule: Annotated[
        tuple[ScheduleWindow, ...],
        Meta(
            max_length=WINDOWS_MOST,
            description=f"a list of at most {WINDOWS_MOST} windows with cron, for_s, cells (from 0) and, where they are"
            " not to be UTC's and every region's, time_zone and region",
        ),
    ] = ()
    idle_s: Annotated[float, Meta(ge=10, le=7 * 86_400)] = 900.0
    wake: WakeOn = WakeOn.WAITING
    hold_s: Annotated[float, Meta(ge=5, le=REQUEST_HOLD_MOST_S)] | None = None
    metrics: Annotated[
        tuple[CloudMetric, ...],
        Meta(
            max_length=METRICS_MOST,
            description=f"a list of at most {METRICS_MOST} metrics of CloudWatch with namespace, metric, per_cell and,"
            " where they differ from the defaults, statistic, period_s, dimensions and region",
        ),
    ] = ()
    roles: RolesBy = RolesBy.STATED
    itl_p99_ms: Annotated[float, Meta(ge=1, le=60_000)] = 50.0


def parse_scaling_policy(stated: Mapping[str, Any], base: ScalingPolicy | None = None) -> ScalingPolicy:
    """The policy with the stated values, and `base` (or the defaults) for the rest. Raises InvalidScaling for an
    unknown key, a value of the wrong type or outside its range, or a window that never occurs."""
    try:
        policy = struct_changed(base or ScalingPolicy(), stated, path="scaling")
        for place, window in enumerate(policy.schedule):
            check_window(window, f"schedule.{place}")
    except InvalidField as error:
        raise InvalidScaling(error.field, str(error)) from None
    return policy


def scaling_policy_as_json(policy: ScalingPolicy) -> dict[str, Any]:
    """The form that `parse_scaling_policy` reads."""
    plain: dict[str, Any] = msgspec.to_builtins(policy)
    lists = {name: [msgspec.to_builtins(one) for one in getattr(policy, name)] for name in ("schedule", "metrics")}
    return {**plain, **lists}


def parse_range(stated: Any, path: str) -> CellRange:
    """A range from an object with `min` and `max`. Raises InvalidScaling if it is no valid range."""
    rule = f"an object with min and max, whole numbers of which 0 <= min <= max <= {CELLS_MOST} and 1 <= max"
    try:
        cells = msgspec.convert(stated, CellRange)
    except msgspec.ValidationError:
        raise InvalidScaling(path, f"{path} is {stated!r}; it must be {rule}") from None
    if not (0 <= cells.min <= cells.max <= CELLS_MOST and cells.max >= 1):
        raise InvalidScaling(path, f"{path} is {cells}; it must be {rule}")
    return cells


def parse_pools(stated: Any, path: str) -> CellPools:
    """Cells per role from an object with `prefill`, `decode` and optional `mixed`. Raises InvalidScaling if it is
    something else, out of range, or has one role without the other."""
    rule = (
        "an object with prefill and decode, and mixed where there are such cells, whole numbers from 0 of which the "
        f"sum is at most {CELLS_MOST}"
    )
    try:
        pools = msgspec.convert(stated, CellPools)
    except msgspec.ValidationError:
        raise InvalidScaling(path, f"{path} is {stated!r}; it must be {rule}") from None
    if min(pools.prefill, pools.decode, pools.mixed) < 0 or pools.total > CELLS_MOST:
        raise InvalidScaling(path, f"{path} is {stated!r}; it must be {rule}")
    if bool(pools.prefill) is not bool(pools.decode):
        there, missing = ("prefill", "decode") if pools.prefill else ("decode", "prefill")
        raise InvalidScaling(
            path,
            f"{path} has {there} cells without {missing} cells, which work in pairs; set both, or a plain number for "
            "mixed cells",
        )
    return pools


def parse_cells(stated: Any, path: str) -> Cells:
    """A number of cells, a range, or cells per role, as in documents and requests. Raises InvalidScaling if it is none
    of these."""
    if isinstance(stated, Mapping) and {"min", "max"} & stated.keys():
        return parse_range(stated, path)
    if isinstance(stated, Mapping):
        pools = parse_pools(stated, path)
        return pools if pools.prefill else pools.mixed
    if isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated <= CELLS_MOST:
        rule = f"a whole number from 0 to {CELLS_MOST}, an object with min and max, or one with prefill and decode"
        raise InvalidScaling(path, f"{path} is {stated!r}; it must be {rule}")
    return stated


def cells_as_json(cells: Cells) -> int | dict[str, int]:
    """The form that `parse_cells` reads."""
    if isinstance(cells, CellPools):
        plain = {"prefill": cells.prefill, "decode": cells.decode}
        return {**plain, "mixed": cells.mixed} if cells.mixed else plain
    return cells if isinstance(cells, int) else {"min": cells.min, "max": cells.max}


_TEXT = re.compile(r"(?P<number>\d+)|(?P<min>\d+)(?:\.\.|-)(?P<max>\d+)|(?P<pools>\d+[pdm](?:\+\d+[pdm])*)")
_ROLE_OF = {"p": "prefill", "d": "decode", "m": "mixed"}


def cells_from_text(text: str) -> int | dict[str, int] | None:
    """The input of `parse_cells` from typed text: `3`, `2..8` or `2-8`, `1p+3d` or `1p+3d+2m`; None if it is
    invalid."""
    found = _TEXT.fullmatch(text.replace(" ", "")) if text.isascii() and len(text) <= TEXT_MOST else None
    if found is None:
        return None
    if found["number"]:
        return int(found["number"])
    if found["min"]:
        return {"min": int(found["min"]), "max": int(found["max"])}
    parts = [(_ROLE_OF[part[-1]], int(part[:-1])) for part in found["pools"].split("+")]
    stated = {"prefill": 0, "decode": 0, **dict(parts)}
    return stated if len(dict(parts)) == len(parts) else None


def cells_to_text(cells: Cells) -> str:
    """The text that `cells_from_text` reads: `3`, `2-8`, `1p+3d`."""
    if isinstance(cells, CellPools):
        return f"{cells.prefill}p+{cells.decode}d" + (f"+{cells.mixed}m" if cells.mixed else "")
    return f"{cells.min}-{cells.max}" if isinstance(cells, CellRange) else str(cells)
