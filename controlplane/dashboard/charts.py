"""Builds charts: a Plotly figure and the same numbers as a table, from one set of series. Colours are names of CSS
tokens, which the browser (static/dashboard/charts.js) resolves for the current theme. Pure: callers load the numbers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

MOST_SERIES = 5
"""Readers cannot distinguish more lines by colour."""
HEIGHT_PX = 176
LABELLED_SHARE = 0.15
"""Share of a chart's width; narrower bands have a colour and no label."""


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
class Chart:
    """Lines over time on one axis. `name` is unique on the page; `unit` follows the title and each value.

    `start` is the time of the first value of every series, `step_s` the seconds between values. `threshold` is drawn as
    a horizontal line: an objective. Raises ValueError for more than `MOST_SERIES` series, or series of different
    lengths."""

    name: str
    title: str
    unit: str
    start: datetime
    step_s: float
    series: tuple[Series, ...]
    bands: tuple[Band, ...] = ()
    threshold: float | None = None
    decimals: int = 1

    def __post_init__(self) -> None:
        if len(self.series) > MOST_SERIES:
            raise ValueError(f"{self.name} has {len(self.series)} series; the limit is {MOST_SERIES}")
        if len({len(series.values) for series in self.series}) > 1:
            raise ValueError(f"{self.name} has series of different lengths")

    @property
    def is_empty(self) -> bool:
        return all(value is None for series in self.series for value in series.values)

    @property
    def figure(self) -> str:
        traces = [self._trace(number, series) for number, series in enumerate(self.series)]
        return json.dumps({"data": traces, "layout": self._layout()}, separators=(",", ":"))

    def rows(self) -> Iterator[tuple[datetime, tuple[float | None, ...]]]:
        """The same numbers, newest first, without steps that have no value."""
        columns = list(zip(*(series.values for series in self.series), strict=True))
        for number, values in reversed(list(enumerate(columns))):
            if any(value is not None for value in values):
                yield self._at(number), values

    def _is_wide(self, band: Band, end: datetime) -> bool:
        """Whether its label fits without overlapping others."""
        return (band.end or end) - max(band.start, self.start) >= LABELLED_SHARE * (end - self.start)

    def _at(self, number: int) -> datetime:
        return self.start + timedelta(seconds=number * self.step_s)

    def _trace(self, number: int, series: Series) -> dict[str, Any]:
        line = {"color": series.colour or BY_PLACE[number], "width": 1.5, "dash": "dash" if series.dashed else "solid"}
        return {
            "type": "scatter",
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
        end = self._at(max((len(series.values) for series in self.series), default=1) - 1)
        shapes = [_band(band, end) for band in self.bands]
        if self.threshold is not None:
            shapes.append(_across(self.threshold))
        return {
            "height": HEIGHT_PX,
            "showlegend": len(self.series) > 1,
            "xaxis": {"type": "date", "range": [_stamp(self.start), _stamp(end)]},
            "yaxis": {"rangemode": "tozero"},
            "shapes": shapes,
            "annotations": [_label(band) for band in self.bands if self._is_wide(band, end)],
        }


def _stamp(when: datetime) -> str:
    """Plotly shows times without a zone unchanged: all times on screens are UTC."""
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


def _across(value: float) -> dict[str, Any]:
    line = {"color": Colour.WARN, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": value, "y1": value, "line": line}
