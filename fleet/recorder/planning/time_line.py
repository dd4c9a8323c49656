"""Bars over time from recorded rows: the states of an object, its load, and what happened around it. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from kernel.ages import age_text
from kernel.tones import Tone

WIDTH = 1000.0
"""Of the drawing, in its own units."""
NARROWEST = 2.0
"""A state of a second in a day would be invisible."""


@dataclass(frozen=True, slots=True)
class Change:
    """From `at` on, the object is in this state."""

    at: datetime
    state: str
    tone: Tone
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A bar. `end` None: it lasts. `page` and `key` make the link of what it stands for, if any."""

    label: str
    tone: Tone
    start: datetime
    end: datetime | None = None
    reason: str = ""
    page: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in the drawing. `shown_from`: its start or that of the time line, which `?at=` takes."""

    span: Span
    x: float
    width: float
    shown_from: datetime
    age: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars beside one label."""

    label: str
    bars: tuple[Bar, ...]


def states_of(changes: Iterable[Change]) -> list[Span]:
    """The spans between changes, oldest first. A repeated state only has a new reason."""
    spans: list[Span] = []
    for change in changes:
        if spans and spans[-1].label == change.state:
            continue
        if spans:
            last = spans[-1]
            spans[-1] = Span(last.label, last.tone, last.start, change.at, last.reason)
        spans.append(Span(change.state, change.tone, change.at, reason=change.reason))
    return spans


@dataclass(frozen=True, slots=True)
class Seen:
    """A stored window of load: means of serving cells and of requests in flight and waiting."""

    cells: float
    in_flight: float
    queued: float


HIGH_FROM = 0.5
"""Of the greatest load in the period. A cell's tested concurrency is not stored with a window."""
ROUNDED = 0.05
"""A window's number of cells counts as whole within this; otherwise it changed in the window."""


def load_spans(windows: Sequence[Seen | None], start: datetime, step: timedelta) -> list[Span]:
    """Load in levels of its greatest value: none, low, high, and waiting requests. A window without reports is a
    gap."""
    peak = max((one.in_flight for one in windows if one), default=0.0)

    def level(one: Seen) -> tuple[str, Tone]:
        if one.queued >= 1:
            return "requests wait", Tone.WARN
        if one.in_flight <= 0:
            return "no load", Tone.IDLE
        return ("high", Tone.MOVING) if one.in_flight >= HIGH_FROM * peak else ("low", Tone.OK)

    def reason(there: list[Seen]) -> str:
        most, waiting = max(one.in_flight for one in there), max(one.queued for one in there)
        return f"up to {most:.1f} requests in flight, {waiting:.1f} waiting"

    return _merged(windows, level, reason, start, step)


def cell_spans(windows: Sequence[Seen | None], start: datetime, step: timedelta) -> list[Span]:
    """The number of serving cells."""

    def level(one: Seen) -> tuple[str, Tone]:
        whole = round(one.cells)
        if abs(one.cells - whole) > ROUNDED:
            return "changes", Tone.MOVING
        return (f"{whole} serving", Tone.OK) if whole else ("none serving", Tone.BAD)

    def reason(there: list[Seen]) -> str:
        least, most = min(one.cells for one in there), max(one.cells for one in there)
        return f"{least:.1f} to {most:.1f} cells" if most - least > ROUNDED else ""

    return _merged(windows, level, reason, start, step)


def _merged(
    windows: Sequence[Seen | None],
    level: Callable[[Seen], tuple[str, Tone]],
    reason: Callable[[list[Seen]], str],
    start: datetime,
    step: timedelta,
) -> list[Span]:
    """One span for neighbouring windows of the same level."""
    spans: list[Span] = []
    for found, group in groupby(enumerate(windows), lambda one: level(one[1]) if one[1] else None):
        there = list(group)
        if found is not None:
            label, tone = found
            first, last = start + there[0][0] * step, start + (there[-1][0] + 1) * step
            spans.append(Span(label, tone, first, last, reason([one for _, one in there if one])))
    return spans


def lanes_of(spans: Mapping[str, Iterable[Span]], start: datetime, end: datetime) -> tuple[Lane, ...]:
    """Lanes in the order of `spans`, without those that have nothing between `start` and `end`."""
    length_s = (end - start).total_seconds()

    def bar(span: Span) -> Bar:
        first, last = max(span.start, start), min(span.end or end, end)
        x = WIDTH * (first - start).total_seconds() / length_s
        width = max(NARROWEST, WIDTH * (last - first).total_seconds() / length_s)
        age = age_text(((span.end or end) - span.start).total_seconds())
        return Bar(span, round(min(x, WIDTH - width), 1), round(width, 1), first, age)

    lanes = (
        Lane(label, tuple(bar(one) for one in found if one.start <= end and (one.end or end) >= start))
        for label, found in spans.items()
    )
    return tuple(lane for lane in lanes if lane.bars)
