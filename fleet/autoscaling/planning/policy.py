"""Times at which there should be at least so many cells: a cron expression says when a window begins, in a time zone,
and it lasts for a while. Pure: the time is an argument.

What an operator lays down for a deployment whose cells are a range: how full they should be, what else asks for
more, how soon there may be fewer, at which times how many, and what an hour may cost. Pure data with its bounds; text
and numbers from outside come in through `parse_scaling_policy` and `parse_range`, which name what is wrong.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta

from kernel.constraints import InvalidField, struct_changed

WINDOWS_MOST = 20
YEAR = timedelta(days=366)
A_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
"""Any will do to see whether a window comes at least once a year."""


class ScheduleWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At least `cells` cells (0: the range begins at 0 meanwhile) for `for_s` seconds from each moment that `cron`
    names: minute, hour, day of the month, month, day of the week, as in `time_zone`. `region`: in this one alone;
    empty: in each that has a range."""

    cron: Annotated[str, Meta(min_length=9, max_length=100)]
    for_s: Annotated[float, Meta(ge=60, le=7 * 86_400)]
    cells: Annotated[int, Meta(ge=0, le=1000)]
    time_zone: Annotated[str, Meta(min_length=1, max_length=64)] = "UTC"
    region: Annotated[str, Meta(max_length=64)] = ""


def check_window(window: ScheduleWindow, path: str) -> None:
    """Raises:
    InvalidField: no such time zone, no cron expression of five fields, or one that names no moment in a year.
    """
    try:
        _zone(window.time_zone)
    except (KeyError, OSError, ValueError):
        raise InvalidField(
            f"{path}.time_zone",
            f"{path}.time_zone is {window.time_zone!r}; it must be a name of the IANA database, such as Europe/Berlin",
        ) from None
    five = "five fields (minute, hour, day of the month, month, day of the week), such as 0 8 * * MON-FRI"
    try:
        if len(window.cron.split()) != 5:
            raise CronSimError("Wrong number of fields")
        first = next(CronSim(window.cron, A_YEAR), None)
    except CronSimError as error:
        why = str(error).lower()
        raise InvalidField(f"{path}.cron", f"{path}.cron is {window.cron!r}: {why}; it must have {five}") from None
    if first is None or first - A_YEAR > YEAR:
        raise InvalidField(f"{path}.cron", f"{path}.cron is {window.cron!r}; it must name a moment of every year")


def window_in_force(windows: Iterable[ScheduleWindow], region: str, now: datetime) -> ScheduleWindow | None:
    """Of the windows that are open in a region the one that wants most; None: none is."""
    theirs = (window for window in windows if window.region in ("", region))
    return max((window for window in theirs if _is_open(window, now)), key=lambda one: one.cells, default=None)


def _is_open(window: ScheduleWindow, now: datetime) -> bool:
    began = last_began(window, now)
    return began is not None and now - began < timedelta(seconds=window.for_s)


def last_began(window: ScheduleWindow, now: datetime) -> datetime | None:
    """When the window last began, `now` included. Times that the clock's change leaves out or has twice are treated as
    by Debian's cron (cronsim)."""
    after = now.astimezone(_zone(window.time_zone)).replace(microsecond=0) + timedelta(seconds=1)
    return next(CronSim(window.cron, after, reverse=True), None)


@cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


CELLS_MOST = 1000
"""Of a region: guards against a slip of the finger that would buy machines; the largest fleets that we plan for have
fewer."""
TEXT_MOST = 40
"""Characters of a number of cells, however it is said."""
HOLD_MOST_S = 600
"""Clients of OpenAI and Anthropic give up after that, and each that waits holds two connections of an ingress."""
TARGET_MOST = 0.8
"""No region is filled further by the region autopilot (`traffic.region_shares.planning.policy.MOST_UTILISED`)."""


class ScalingMode(StrEnum):
    """Shadow: it decides and records, and changes nothing. Act: it sets the number of cells."""

    SHADOW = "shadow"
    ACT = "act"


class WakeOn(StrEnum):
    """What starts the first cell of a region without any. Waiting: a request that no other region may serve or has room
    for. Arrivals: any request of its applications; other regions serve them meanwhile."""

    WAITING = "waiting"
    ARRIVALS = "arrivals"


class RolesBy(StrEnum):
    """Who says which cells are mixed, prefill and decode cells. Stated: a person. Planned: `fleet.planning.roles`,
    where the mode is `act`; in shadow it only says what it would do."""

    STATED = "stated"
    PLANNED = "planned"


class InvalidScaling(InvalidField):
    """A number of cells, a range or a policy that breaks a rule."""


class CellRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many cells a region may have, both ends included."""

    min: int
    max: int

    def clamped(self, cells: int) -> int:
        return min(max(cells, self.min), self.max)

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


class CellPools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many cells of a region have which role."""

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
"""How many cells a region should have: so many, as many of a range as the autoscaler finds right, or so many of each
role."""


class ScalingPolicy(msgspec.Struct, frozen=True):
    """`target_utilisation` is a share of tested capacity: requests at once, over those that cells were tested for.

    `slo_burn`: from this rate on, at which late first tokens burn their budget over 5 minutes, there is a step more;
    `itl_p95_ms`: and where the 95th percentile of inter-token latency is beyond it. None: they ask for nothing.
    `down_after_s`: so long fewer cells must have been enough before there are fewer; twice the start-up time at least.
    `start_up_s`: from the decision until a cell is ready; None: as measured. `budget_per_hour`: US dollars that the
    machines of all its cells may cost; what is there already is not taken away for it. `schedule`: windows in which
    there are at least so many; 0: in which the range begins at 0.

    `idle_s`: so long nobody must have asked before the last cell goes, where the range begins at 0. `wake`: what brings
    the first one back. `hold_s`: so long requests wait for it; None: twice the start-up time (`planning.hold`).

    `roles`: who says which cells only read prompts and which answer. `itl_p99_ms`: between two tokens at most, which
    that is planned by.
    """

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
    hold_s: Annotated[float, Meta(ge=5, le=HOLD_MOST_S)] | None = None
    roles: RolesBy = RolesBy.STATED
    itl_p99_ms: Annotated[float, Meta(ge=1, le=60_000)] = 50.0


def parse_scaling_policy(stated: Mapping[str, Any], base: ScalingPolicy | None = None) -> ScalingPolicy:
    """The policy with what is stated, and the rest from `base` (the defaults where there is none).

    Raises:
        InvalidScaling: an unknown key, a value of the wrong type or outside its range, or a window that never comes.
    """
    try:
        policy = struct_changed(base or ScalingPolicy(), stated, path="scaling")
        for place, window in enumerate(policy.schedule):
            check_window(window, f"schedule.{place}")
    except InvalidField as error:
        raise InvalidScaling(error.field, str(error)) from None
    return policy


def scaling_policy_as_json(policy: ScalingPolicy) -> dict[str, Any]:
    """What `parse_scaling_policy` reads back into an equal policy."""
    plain: dict[str, Any] = msgspec.to_builtins(policy)
    return {**plain, "schedule": [msgspec.to_builtins(window) for window in policy.schedule]}


def parse_range(stated: Any, path: str) -> CellRange:
    """A range as it is stated: an object with `min` and `max`.

    Raises:
        InvalidScaling: something else, or numbers that are no range.
    """
    rule = f"an object with min and max, whole numbers of which 0 <= min <= max <= {CELLS_MOST} and 1 <= max"
    try:
        cells = msgspec.convert(stated, CellRange)
    except msgspec.ValidationError:
        raise InvalidScaling(path, f"{path} is {stated!r}; it must be {rule}") from None
    if not (0 <= cells.min <= cells.max <= CELLS_MOST and cells.max >= 1):
        raise InvalidScaling(path, f"{path} is {cells}; it must be {rule}")
    return cells


def parse_pools(stated: Any, path: str) -> CellPools:
    """Cells by role as they are stated: an object with `prefill`, `decode` and, where there are some, `mixed`.

    Raises:
        InvalidScaling: something else, numbers out of range, or one role without the other.
    """
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
            f"{path} has {there} cells without {missing} cells, which work in pairs; state some of both, or mixed "
            "cells alone as a number",
        )
    return pools


def parse_cells(stated: Any, path: str) -> Cells:
    """A number of cells, a range of them, or cells by role, as documents and requests state it.

    Raises:
        InvalidScaling: it is none of these.
    """
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
    """What `parse_cells` reads back."""
    if isinstance(cells, CellPools):
        plain = {"prefill": cells.prefill, "decode": cells.decode}
        return {**plain, "mixed": cells.mixed} if cells.mixed else plain
    return cells if isinstance(cells, int) else {"min": cells.min, "max": cells.max}


_TEXT = re.compile(r"(?P<number>\d+)|(?P<min>\d+)(?:\.\.|-)(?P<max>\d+)|(?P<pools>\d+[pdm](?:\+\d+[pdm])*)")
_ROLE_OF = {"p": "prefill", "d": "decode", "m": "mixed"}


def cells_from_text(text: str) -> int | dict[str, int] | None:
    """What `parse_cells` takes, of what people type: `3`, `2..8` or `2-8`, `1p+3d` or `1p+3d+2m`; None: none of
    these."""
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
    """What `cells_from_text` reads back: `3`, `2-8`, `1p+3d`."""
    if isinstance(cells, CellPools):
        return f"{cells.prefill}p+{cells.decode}d" + (f"+{cells.mixed}m" if cells.mixed else "")
    return f"{cells.min}-{cells.max}" if isinstance(cells, CellRange) else str(cells)
