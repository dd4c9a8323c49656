"""The points of a rollout's charts as they are kept: appended in steps, merged into longer ones at a bound. Pure."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

Values = Sequence[float | None]
Lines = Mapping[str, Mapping[str, Values]]
"""Measure -> version -> values."""
NEW, OLD = "new", "old"
MOST_POINTS = 960
"""Of a line: four hours in steps of 15 s. Six lines of them are some 40 KB."""
MERGED_BY: Mapping[str, Callable[[Sequence[float]], float]] = {"ttft": max, "itl": max, "errors": fmean}
"""Measure -> what stands for several values: the worst latency, the mean of shares."""


def length_of(lines: Lines) -> int:
    """How many steps the lines have; all have as many."""
    return max((len(values) for versions in lines.values() for values in versions.values()), default=0)


def merged(lines: Lines, count: int) -> dict[str, dict[str, list[float | None]]]:
    """The same with `count` steps as one; the last one may be of fewer."""
    return {
        measure: {
            version: [_merge(measure, values[place : place + count]) for place in range(0, len(values), count)]
            for version, values in versions.items()
        }
        for measure, versions in lines.items()
    }


def appended(lines: Lines, more: Lines) -> dict[str, dict[str, list[float | None]]]:
    """The lines with more steps behind them."""
    return {
        measure: {version: [*lines.get(measure, {}).get(version, ()), *values] for version, values in versions.items()}
        for measure, versions in more.items()
    }


def _merge(measure: str, values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return MERGED_BY[measure](known) if known else None
