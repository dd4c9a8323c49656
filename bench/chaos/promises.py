"""What must hold while faults happen: which failed requests and which late passes a fault excuses, and whether what was
written down names it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

PASS_WITHIN_S = 15.0
"""The oldest that the last pass may be, also after the end of a harm to whoever makes passes."""
KNOWN_WITHIN_S = 5.0
"""Until then a pass may not have heard of a harm yet: agents report every 2 s."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Window:
    """From `begins` to `ends`, in seconds of the load's clock, requests that `cells` answered, or that were sent to
    `ingresses` (URLs), may fail. With `passes` there may be none, too. The harm itself is over at `over`."""

    begins: float
    ends: float
    why: str
    cells: frozenset[str] = frozenset()
    ingresses: frozenset[str] = frozenset()
    passes: bool = False
    over: float = 0.0

    def overlaps(self, begins: float, ends: float) -> bool:
        return begins <= self.ends and ends >= self.begins


def closed(windows: Iterable[Window], now: float, pass_at: float) -> list[Window]:
    """The windows, once the fleet is whole by what the pass that ended at `pass_at` left: a pass that knew of a harm
    closes its window, an earlier one speaks of the time before."""
    return [
        replace(window, ends=now) if window.ends == FOREVER and pass_at > window.over + KNOWN_WITHIN_S else window
        for window in windows
    ]


class Request(Protocol):
    """What the load remembers of a request; `cell` is empty if none answered."""

    url: str
    began: float
    ended: float
    cell: str
    error: str


@dataclass(frozen=True, slots=True)
class PassSeen:
    """At `at`, in seconds of the load's clock, the last pass was `age_s` old."""

    at: float
    age_s: float


def unexcused(
    requests: Iterable[Request], windows: Sequence[Window], cells: Mapping[str, frozenset[str]]
) -> list[Request]:
    """Requests that failed where nothing had been done to what served them; `cells` are those of each ingress's region,
    by its URL."""
    return [request for request in requests if request.error and not _is_excused(request, windows, cells)]


def _is_excused(request: Request, windows: Sequence[Window], cells: Mapping[str, frozenset[str]]) -> bool:
    open_then = [window for window in windows if window.overlaps(request.began, request.ended)]
    harmed = frozenset[str]().union(*(window.cells for window in open_then))
    away = frozenset[str]().union(*(window.ingresses for window in open_then))
    if request.cell in harmed or request.url in away:
        return True
    # Or it went through another region's ingress, and ended with that.
    if any(request.cell in there and url in away for url, there in cells.items()):
        return True
    # Or no cell was left that could have answered it: none here, and none behind another ingress that was there.
    here = cells.get(request.url, frozenset())
    return not request.cell and bool(here) and all(there <= harmed or url in away for url, there in cells.items())


def late_passes(seen: Iterable[PassSeen], windows: Sequence[Window]) -> list[PassSeen]:
    """Looks that found the last pass too old, though nothing had been done to whoever makes passes."""
    late = (look for look in seen if look.age_s > PASS_WITHIN_S)
    excuses = [window for window in windows if window.passes]
    return [look for look in late if not any(window.overlaps(look.at - look.age_s, look.at) for window in excuses)]


def has_trail(kinds: Sequence[str], subjects: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an event or incident of one of these kinds names one of the subjects: a node, cell, region or ingress."""
    wanted = set(subjects)
    return any(row["kind"] in kinds and wanted & _named(row) for row in rows)


def _named(row: Mapping[str, Any]) -> set[str]:
    return {str(row.get(field, "")) for field in ("node", "cell", "region", "subject")}
