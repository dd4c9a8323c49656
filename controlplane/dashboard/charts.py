"""Builds charts: a Plotly figure, from which the browser also makes a table of the same numbers. Colours are names of
CSS tokens, which the browser (static/dashboard/charts.js) resolves for the current theme. Pure: callers load the
numbers.

Figures are `plotly` graph objects without validation, which would refuse the tokens and take ten times as long; tests
validate them (docs/design/operators.md, charts)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from html import escape
from typing import Any

import msgspec

from kernel.tones import Tone

MOST_SERIES = 5
"""Readers cannot distinguish more lines by colour."""
HEIGHT_PX = 176
LABELLED_SHARE = 0.15
"""Share of a chart's width; narrower bands have a colour and no label."""
NEAR = 1.25
"""An objective above this multiple of the largest value would flatten the lines: it becomes a label."""


class Colour(StrEnum):
    """Tokens of static/dashboard/charts.css and console.css: five for series, then the tones with a meaning."""

    FIRST = "--series-1"
    SECOND = "--series-2"
    THIRD = "--series-3"
    FOURTH = "--series-4"
    FIFTH = "--series-5"
    OK = "--ok"
    MOVING = "--moving"
    WARN = "--warn"
    BAD = "--bad"
    IDLE = "--idle"
    BAKE = "--bake"


BY_PLACE = (Colour.FIRST, Colour.SECOND, Colour.THIRD, Colour.FOURTH, Colour.FIFTH)


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `values` has one value for each step of the chart; None is a gap."""

    name: str
    values: Sequence[float | None]
    colour: Colour | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A marked span of time: a wave, a bake, an incident. `end` is None while it lasts."""

    label: str
    start: datetime
    end: datetime | None
    colour: Colour = Colour.BAKE


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment on a chart: a rollout began, an incident opened, traffic shifted. `url`: its page."""

    at: datetime
    label: str
    url: str
    tone: Tone

    @property
    def colour(self) -> Colour:
        return Colour(f"--{self.tone.value}")


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over time on one axis. `name` is unique on the page; `unit` follows the title and each value.

    `start` is the time of the first value of every series, `step_s` the seconds between values. `threshold` is an
    objective: a horizontal line, or a label if it is off the scale. `from_zero` False: the axis begins at the smallest
    value. `markers` None: not loaded, which a test of all pages refuses (`dashboard.events.marked`). Raises ValueError
    for more than `MOST_SERIES` series, or series of different lengths."""

    name: str
    title: str
    unit: str
    start: datetime
    step_s: float
    series: tuple[Series, ...]
    bands: tuple[Band, ...] = ()
    threshold: float | None = None
    decimals: int = 1
    markers: tuple[Marker, ...] | None = None
    from_zero: bool = True

    def __post_init__(self) -> None:
        if len(self.series) > MOST_SERIES:
            raise ValueError(f"{self.name} has {len(self.series)} series; the limit is {MOST_SERIES}")
        if len({len(series.values) for series in self.series}) > 1:
            raise ValueError(f"{self.name} has series of different lengths")

    @property
    def is_empty(self) -> bool:
        return all(value is None for series in self.series for value in series.values)

    @property
    def end(self) -> datetime:
        """End of the period of the last value."""
        return self._at(max((len(series.values) for series in self.series), default=1))

    @property
    def figure(self) -> str:
        return figure_json((self._trace(*numbered) for numbered in enumerate(self.series)), self._layout())

    @property
    def is_threshold_near(self) -> bool:
        """Whether the objective is drawn on the scale of the values."""
        values = [value for series in self.series for value in series.values if value is not None]
        return self.threshold is not None and self.threshold <= NEAR * max(values, default=0.0)

    def _is_wide(self, band: Band, end: datetime) -> bool:
        """Whether its label fits without overlapping others."""
        return (band.end or end) - max(band.start, self.start) >= LABELLED_SHARE * (end - self.start)

    def _at(self, number: int) -> datetime:
        return self.start + timedelta(seconds=number * self.step_s)

    def _trace(self, number: int, series: Series) -> dict[str, Any]:
        line = {"color": series.colour or BY_PLACE[number], "width": 1.5, "dash": "dash" if series.dashed else "solid"}
        return {
            "mode": "lines+markers" if sum(value is not None for value in series.values) == 1 else "lines",
            "name": series.name,
            "x0": _stamp(self.start),
            "dx": self.step_s * 1000,
            "y": [None if value is None else round(value, 3) for value in series.values],
            "line": line,
            "connectgaps": False,
            "hovertemplate": f"%{{y:,.{self.decimals}f}} {self.unit}",
        }

    def _layout(self) -> dict[str, Any]:
        end = self.end - timedelta(seconds=self.step_s)
        found = (marker for marker in self.markers or () if self.start <= marker.at <= self.end)
        markers = [replace(marker, at=min(marker.at, end)) for marker in found]
        shapes = [*(_band(band, end) for band in self.bands), *(_line_at(marker) for marker in markers)]
        labels = [*(_label(band) for band in self.bands if self._is_wide(band, end)), *map(_flag, markers)]
        if self.threshold is not None and self.is_threshold_near:
            shapes.append(_across(self.threshold))
        elif self.threshold is not None:
            labels.append(_above(f"objective {self.threshold:,.0f} {self.unit}, off the scale"))
        return {
            "height": HEIGHT_PX,
            "showlegend": len(self.series) > 1,
            "xaxis": {"type": "date", "range": [_stamp(self.start), _stamp(end)]},
            "yaxis": {"rangemode": "tozero" if self.from_zero else "normal"},
            "shapes": shapes,
            "annotations": labels,
        }


def figure_json(traces: Iterable[Mapping[str, Any]], layout: Mapping[str, Any]) -> str:
    """A Plotly figure of scatter traces as JSON."""
    data = [_drawn("Scatter", trace) for trace in traces]
    return msgspec.json.encode({"data": data, "layout": _drawn("Layout", layout)}).decode()


VALUES = frozenset({"x", "y", "x0", "dx", "text", "customdata", "xaxis", "shapes", "annotations"})
"""Properties that differ between charts of the same kind. They bypass Plotly's objects, which copy value by value."""
LOOKS_KEPT = 2000


def _drawn(kind: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in properties.items() if name in VALUES}
    look = {name: value for name, value in properties.items() if name not in VALUES}
    return {**_look(kind, json.dumps(look)), **values}


@lru_cache(LOOKS_KEPT)
def _look(kind: str, properties: str) -> dict[str, Any]:
    """Kept, because a Plotly object takes 1 ms and a page has dozens. The library is imported here, because only web
    draws."""
    from plotly import graph_objects

    made = getattr(graph_objects, kind)(json.loads(properties), _validate=False)
    look: dict[str, Any] = made.to_plotly_json()
    return look


def prepare_charts() -> None:
    """Imports Plotly and makes the objects of a first chart."""
    series = Series("", (1.0, 2.0))
    Chart(name="first", title="", unit="", start=datetime.now(UTC), step_s=60.0, series=(series,)).figure  # noqa: B018


def with_markers(charts: Iterable[Chart], markers: tuple[Marker, ...]) -> tuple[Chart, ...]:
    return tuple(replace(chart, markers=markers) for chart in charts)


def _stamp(when: datetime) -> str:
    """In UTC and without a zone, as Plotly shows it. The browser changes it to its own zone if chosen."""
    return when.strftime("%Y-%m-%d %H:%M:%S")


def _band(band: Band, end: datetime) -> dict[str, Any]:
    across = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    return {
        **across,
        "x0": _stamp(band.start),
        "x1": _stamp(band.end or end),
        "fillcolor": band.colour,
        "opacity": 0.12,
        "line": {"width": 0},
    }


def _label(band: Band) -> dict[str, Any]:
    place = {"xref": "x", "yref": "paper", "y": 1, "xanchor": "left", "yanchor": "top", "showarrow": False}
    return {**place, "x": _stamp(band.start), "text": band.label, "font": {"color": band.colour, "size": 11}}


def _line_at(marker: Marker) -> dict[str, Any]:
    at = _stamp(marker.at)
    line = {"color": marker.colour, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _flag(marker: Marker) -> dict[str, Any]:
    """A small flag at the top of a marker's line, whose label appears under the pointer."""
    place = {"xref": "x", "yref": "paper", "y": 1, "xanchor": "center", "yanchor": "bottom", "showarrow": False}
    look = {"text": "\u25be", "hovertext": escape(marker.label), "font": {"color": marker.colour, "size": 11}}
    return {**place, "x": _stamp(marker.at), **look}


def _above(text: str) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "top", "showarrow": False}
    return {**place, "text": text, "font": {"color": Colour.WARN, "size": 11}}


def _across(value: float) -> dict[str, Any]:
    line = {"color": Colour.WARN, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": value, "y1": value, "line": line}
