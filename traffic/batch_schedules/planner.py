"""Decides which times and objects of a schedule become runs, and when a waiting run may begin. Pure: times, objects and
open batches are arguments."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice, takewhile

from kernel.cron import time_after, time_zone, times_before
from kernel.tones import Tone

SUFFIX = ".jsonl"
TIME_NAMES = ("date", "year", "month", "day", "hour", "minute")
OBJECT_NAMES = (*TIME_NAMES, "name")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Overlap(StrEnum):
    """The effect on a run while the batch of an earlier run is open."""

    WAIT = "wait"
    SKIP = "skip"
    ALLOW = "allow"


class MissedRuns(StrEnum):
    """What happens to times that passed while no control plane ran: none, the last one, or all are made up for."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class RunState(StrEnum):
    WAITING = "waiting"
    STARTED = "started"
    SKIPPED = "skipped"
    MISSED = "missed"
    FAILED = "failed"


RUN_TONE: Mapping[RunState, Tone] = {
    RunState.WAITING: Tone.MOVING,
    RunState.STARTED: Tone.OK,
    RunState.SKIPPED: Tone.IDLE,
    RunState.MISSED: Tone.WARN,
    RunState.FAILED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Seconds unless the name says otherwise."""

    late_s: float = 300.0
    """A time that is noticed later than this was missed. Far above the interval of passes."""
    missed_most: int = 100
    """Missed times that are considered; older ones are not recorded."""
    waiting_most: int = 100
    """Waiting runs of a schedule; further times are skipped."""
    open_most: int = 20
    """Open batches of a schedule that allows overlap."""
    list_every_s: float = 30.0
    """Interval of listing a prefix."""
    list_pages: int = 10
    """Pages per listing; the next one continues there."""
    page_objects: int = 1000
    """The most that S3 returns."""
    markers_most: int = 100
    """Markers that are looked up one by one per listing."""
    runs_kept: int = 1000
    """Runs by time that are kept of each schedule."""


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """Times that become runs, times that are recorded as missed, both oldest first, and the next time."""

    due: tuple[datetime, ...]
    missed: tuple[datetime, ...]
    next_at: datetime


def plan_times(
    cron: str, zone: str, policy: MissedRuns, checked_until: datetime, now: datetime, settings: ScheduleSettings
) -> PlannedTimes:
    """Plans the times after `checked_until`, up to `now`."""
    newest_first = takewhile(lambda at: at > checked_until, times_before(cron, zone, now))
    times = tuple(islice(newest_first, settings.missed_most))[::-1]
    late_before = now - timedelta(seconds=settings.late_s)
    late = tuple(at for at in times if at < late_before)
    made_up = {MissedRuns.SKIP: (), MissedRuns.ONCE: late[-1:], MissedRuns.ALL: late}[policy]
    due = (*made_up, *(at for at in times if at >= late_before))
    missed = tuple(at for at in late if at not in made_up)
    return PlannedTimes(due, missed, time_after(cron, zone, now))


@dataclass(frozen=True, slots=True)
class ListedObject:
    key: str
    etag: str
    changed_at: datetime


def marker_of(key: str, marker: str) -> str:
    """Returns the key of the object that marks another one as complete: with the marker appended if that begins with a
    dot, else the object of this name in the same folder."""
    if marker.startswith("."):
        return key + marker
    folder, slash, _ = key.rpartition("/")
    return f"{folder}{slash}{marker}"


def plan_objects(
    objects: Iterable[ListedObject], present: Iterable[str], marker: str, quiet_s: float, now: datetime
) -> list[ListedObject]:
    """Returns the inputs that are complete, in the order of their keys: their marker is present or, without markers,
    they did not change for `quiet_s`."""
    keys, before = frozenset(present), now - timedelta(seconds=quiet_s)
    inputs = (each for each in objects if each.key.endswith(SUFFIX) and each.key.isprintable())
    ready = (each for each in inputs if (marker_of(each.key, marker) in keys if marker else each.changed_at <= before))
    return sorted(ready, key=lambda each: each.key)


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A waiting run begins, is skipped or stays."""

    begins: bool
    is_skipped: bool = False
    reason: str = ""


def plan_run(overlap: Overlap, open_batches: int, settings: ScheduleSettings) -> RunOrder:
    """Decides about the oldest waiting run while `open_batches` of its schedule are open."""
    if not open_batches or (overlap is Overlap.ALLOW and open_batches < settings.open_most):
        return RunOrder(begins=True)
    batches = "the batch of an earlier run is open" if open_batches == 1 else f"{open_batches} batches are open"
    return RunOrder(begins=False, is_skipped=overlap is Overlap.SKIP, reason=batches)


def check_template(text: str, names: Iterable[str]) -> None:
    """Raises ValueError for an unknown name in braces, or a single brace."""
    known = tuple(names)
    for name in _PLACEHOLDER.findall(text):
        if name not in known:
            there = ", ".join(f"{{{each}}}" for each in known)
            raise ValueError(f"{{{name[:40]}}} is unknown; known: {there}")
    if re.search(r"[{}]", _PLACEHOLDER.sub("", text)):
        raise ValueError("has a single brace; names are in two, such as {date}")


def expand(text: str, at: datetime, zone: str, name: str = "") -> str:
    """Replaces the names in braces by the time of a run in the schedule's zone, and `name` by that of its object."""
    local = at.astimezone(time_zone(zone))
    values = {
        "date": f"{local:%Y-%m-%d}",
        "year": f"{local:%Y}",
        "month": f"{local:%m}",
        "day": f"{local:%d}",
        "hour": f"{local:%H}",
        "minute": f"{local:%M}",
        "name": name,
    }
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def object_name(key: str) -> str:
    """Returns the last part of a key without `.jsonl`."""
    return key.rpartition("/")[2].removesuffix(SUFFIX)
