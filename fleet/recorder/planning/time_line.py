"""Bars over time from recorded rows: the states of an object, and what happened around it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

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
