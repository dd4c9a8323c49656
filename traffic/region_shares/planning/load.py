"""Derives the last minute of a deployment in a region from ingress counters: arrivals from
applications, capacity, loss of capacity and expected demand. Also decides which regions have an incident because no
cell can serve a deployment, or because the autopilot sends all requests elsewhere. Pure.

An ingress counts what it sends to its own cells, from any region, and what it sends to other regions. Arrivals are the
sum, less what other regions sent here. Windows are conservative: capacity is the minimum and demand the maximum, so
that flapping cells and short lulls move no requests.

Only unplanned outages count: a deployment that is scaled to zero, evacuated or never had a usable cell has no incident,
and neither do cells that the disruption ledger took down."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from msgspec import Struct

from engine_agent.protocol.messages import JsonObject
from fleet.reconcile.planning.states import CellState
from kernel.ages import age_text

WINDOW_S = 60.0
"""design.md §5: healthy capacity is the minimum over the last 60 s."""
SMOOTHING_S = 15.0
"""Averaging time of arrivals: Poisson noise is then 12 % at 5 requests/s, and a surge counts within 15 s."""
SAMPLES_MAX = 64
"""Samples come every 2 s; this bounds the row when wake-ups are more frequent."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a deployment in a region; `at` is Unix time in seconds. `arrivals_per_s` counts requests of the
    region's applications; `in_service` those in its cells, from any region; `capacity` the tested concurrency of its
    healthy cells; `queued` those that wait for a cell; `to_cells_per_s` all requests for its cells, whether or not
    there was room."""

    at: float
    arrivals_per_s: float
    in_service: float
    capacity: float
    queued: float = 0.0
    to_cells_per_s: float = 0.0


def recent_samples(samples: Sequence[Sample], now: float) -> tuple[Sample, ...]:
    """Returns the samples of the window and those that its first average needs, oldest first."""
    return tuple(sample for sample in samples if now - sample.at <= WINDOW_S + SMOOTHING_S)[-SAMPLES_MAX:]


def capacity_to_count_on(samples: Sequence[Sample], now: float) -> float:
    """Returns the minimum of the window, in concurrent requests; 0 without a sample."""
    return min((sample.capacity for sample in samples if now - sample.at <= WINDOW_S), default=0.0)


def share_lost(samples: Sequence[Sample], now: float) -> float:
    """Returns the deepest fall within the window as a share of the capacity before it. Growth loses nothing."""
    capacities = [sample.capacity for sample in samples if now - sample.at <= WINDOW_S]
    peaks = accumulate(capacities, max)
    return max((1 - capacity / peak for capacity, peak in zip(capacities, peaks, strict=True) if peak > 0), default=0.0)


def has_returned(samples: Sequence[Sample]) -> bool:
    """Returns whether capacity was 0 and rose again exactly once. A flapping region keeps the conservative figures. A
    window that begins without capacity counts as one fall."""
    capacities = [sample.capacity for sample in samples]
    if not capacities or capacities[-1] <= 0:
        return False
    return sum(after <= 0 < before for before, after in pairwise([1.0, *capacities])) == 1


def is_starting(samples: Sequence[Sample], now: float) -> bool:
    """Returns whether it never had capacity and has not waited a whole window: a region that starts with its fleet, not
    one that failed."""
    return not any(sample.capacity for sample in samples) and not any(now - s.at >= WINDOW_S for s in samples)


def is_calm(samples: Sequence[Sample]) -> bool:
    """Returns whether the window has no requests and one capacity. Oldest first."""
    is_idle = not any(one.arrivals_per_s or one.in_service or one.queued or one.to_cells_per_s for one in samples)
    return is_idle and len({one.capacity for one in samples}) <= 1


def has_requests(before: JsonObject, after: JsonObject) -> bool:
    """Returns whether an ingress got requests between two reports, or has some."""
    pools, known = after.get("pools", {}), before.get("pools", {})
    return any(
        row.get("in_flight") or row.get("requests_total") != known.get(name, {}).get("requests_total")
        for name, row in pools.items()
    )


def arrivals_to_expect(samples: Sequence[Sample]) -> float:
    """Returns the maximum average over `SMOOTHING_S`, in requests/s, or the average of too few samples. Samples are
    oldest first."""
    means, first = [], 0
    for last, sample in enumerate(samples):
        while sample.at - samples[first].at >= SMOOTHING_S:
            first += 1
        if last == len(samples) - 1 or sample.at - samples[0].at >= SMOOTHING_S:
            means.append(fmean([one.arrivals_per_s for one in samples[first : last + 1]]))
    return max(means, default=0.0)


def service_time_s(samples: Sequence[Sample]) -> float:
    """Returns the service time of a request by Little's law over all samples; 0 without arrivals. Queued requests do
    not count, since a queue would otherwise look like demand."""
    arrivals = sum(sample.arrivals_per_s for sample in samples)
    return sum(sample.in_service for sample in samples) / arrivals if arrivals > 0 else 0.0


@dataclass(frozen=True, slots=True)
class MeanLoad:
    """Mean concurrent requests in cells and in queues, and arrivals at cells per second."""

    in_service: float
    queued: float
    to_cells_per_s: float

    @property
    def service_s(self) -> float | None:
        """Returns the service time by Little's law, or None if there are no arrivals or a queue would distort it."""
        return self.in_service / self.to_cells_per_s if self.to_cells_per_s > 0 and self.queued == 0 else None


def mean_load(samples: Sequence[Sample], now: float, *, part: float = 1.0) -> MeanLoad | None:
    """Returns the mean of the last `SMOOTHING_S` or `over_s`, or None without a sample."""
    last = [sample for sample in samples if now - sample.at <= SMOOTHING_S]
    if not last:
        return None
    return MeanLoad(
        part * fmean(sample.in_service for sample in last),
        part * fmean(sample.queued for sample in last),
        part * fmean(sample.to_cells_per_s for sample in last),
    )


class IngressCounters(Struct, frozen=True):
    """The last report of an ingress on one pool: counters since its worker started, rates since the previous report.
    `at` is Unix time, rates are per second over the last `over_s` (0 at first), and `spilled` counts requests sent to
    each other region."""

    at: float
    worker: int
    local: int
    spilled: dict[str, int] = {}
    local_per_s: float = 0.0
    spilled_per_s: dict[str, float] = {}
    over_s: float = 0.0


def ingress_counters(
    before: IngressCounters | None, telemetry: JsonObject, pool: str, at: float
) -> IngressCounters | None:
    """Returns the pool's counters. Without a new report the old ones stay; None if the pool was never reported."""
    row = telemetry.get("pools", {}).get(pool)
    if row is None or (before is not None and at <= before.at):
        return before
    now = IngressCounters(at, telemetry.get("worker_pid", 0), row["requests_total"], row.get("spilled_to", {}))
    if before is None:
        return now
    return IngressCounters(
        now.at,
        now.worker,
        now.local,
        now.spilled,
        _per_s(before, now, before.local, now.local),
        {region: _per_s(before, now, before.spilled.get(region, 0), total) for region, total in now.spilled.items()},
        now.at - before.at,
    )


def arrivals_per_s(counted: Mapping[str, Iterable[IngressCounters]]) -> dict[str, float]:
    """Returns arrivals of each region's own applications, per second. Reports arrive at different times, so the result
    is limited to 0 or more."""
    rates = {
        region: sum(one.local_per_s + sum(one.spilled_per_s.values()) for one in ingresses)
        for region, ingresses in counted.items()
    }
    for ingresses in counted.values():
        for one in ingresses:
            for region, per_s in one.spilled_per_s.items():
                if region in rates:
                    rates[region] -= per_s
    return {region: max(0.0, per_s) for region, per_s in rates.items()}


def queued(telemetry: JsonObject, pool: str) -> float:
    """Returns how many of a pool's requests wait at an ingress for a cell, including a first one."""
    return float(telemetry.get("pools", {}).get(pool, {}).get("queued", 0)) + held(telemetry, pool)


def pools_waiting(telemetry: JsonObject) -> frozenset[str]:
    """Returns the pools with requests that wait at an ingress for a first cell."""
    return frozenset(name for name in telemetry.get("pools", {}) if held(telemetry, name) > 0)


def held(telemetry: JsonObject, pool: str) -> float:
    """Returns how many of a pool's requests wait at an ingress for its first cell."""
    return float(telemetry.get("pools", {}).get(pool, {}).get("held", 0))


def served_elsewhere(telemetry: JsonObject, pool: str) -> float:
    """Returns how many of a pool's requests an ingress has open at other regions."""
    return float(telemetry.get("pools", {}).get(pool, {}).get("spilled_in_flight", 0))


def in_service(telemetry: JsonObject, cells: Iterable[str]) -> float:
    """Returns how many requests these cells work on, as counted by an ingress, without queued ones."""
    there = telemetry.get("cells", {})
    return float(sum(there[cell].get("in_flight", 0) for cell in cells if cell in there))


def _per_s(before: IngressCounters, now: IngressCounters, was: int, total: int) -> float:
    """A restarted worker counts from 0. A removed server takes its count along; the rate is then 0."""
    more = total if now.worker != before.worker else max(0, total - was)
    return more / (now.at - before.at)


OPEN_AFTER_S = 5.0
CLOSE_AFTER_S = 10.0
"""A flapping region has one incident, not one per second."""
SEEN_AFTER_S = 15.0
"""An ingress sees a newly ready cell within a few seconds: table, health check, report."""
UP = "up"
CELLS_NAMED = 20


@dataclass(frozen=True, slots=True)
class CellStanding:
    """A cell of the place. `on_purpose`: the disruption ledger explains its absence. `views` maps an ingress to its
    view."""

    id: str
    state: CellState
    since: datetime
    reason: str = ""
    on_purpose: bool = False
    views: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.state is CellState.READY and all(view == UP for view in self.views.values())

    def is_missed(self, now: datetime) -> bool:
        """Whether it should serve but does not, without a planned cause."""
        if self.on_purpose or self.state is CellState.DRAINING or self.is_up:
            return False
        return self.state is not CellState.READY or (now - self.since).total_seconds() >= SEEN_AFTER_S


@dataclass(frozen=True, slots=True)
class Place:
    """A deployment in a region that has an ingress. `wanted` is the desired number of cells; `capacity` the concurrent
    requests of cells that every ingress sees; `emptied`: the autopilot, not an override, sends all requests elsewhere;
    `elsewhere` lists regions that serve the deployment; `refused` counts unanswered requests by status. `served`,
    `since` and `refused_before` are the last pass's state: whether a cell was usable, since when none is, and the
    refusals at that time."""

    deployment: str
    region: str
    wanted: int
    capacity: float
    emptied: bool
    closed: bool
    cells: tuple[CellStanding, ...] = ()
    elsewhere: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    served: bool = False
    since: datetime | None = None
    refused_before: Mapping[str, int] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return f"{self.deployment}@{self.region}"

    @property
    def is_intended(self) -> bool:
        """Whether nothing should be served here."""
        return self.wanted == 0 or self.closed


@dataclass(frozen=True, slots=True)
class WindowState:
    served: bool
    since: datetime | None
    refused_before: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Unserved:
    """The incident that should be open."""

    summary: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Assessment:
    """`unserved` is None if there is nothing to report; `resolution` is then why an open incident closes."""

    noted: WindowState
    unserved: Unserved | None = None
    resolution: str = ""


def assess_place(place: Place, now: datetime) -> Assessment:
    """Returns whether the place has no usable cell, since when, and the evidence."""
    if place.is_intended:
        why = "the region is evacuated" if place.closed else "no cell is configured there"
        # A region that served before its evacuation does not count as cold afterwards.
        return Assessment(WindowState(place.served and place.wanted > 0, None, {}), resolution=why)
    if place.capacity > 0 and not place.emptied:
        return Assessment(WindowState(True, None, {}), resolution="its cells serve again")
    missed = [cell for cell in place.cells if cell.is_missed(now)]
    if not place.served or (place.capacity <= 0 and not missed):
        return Assessment(WindowState(place.served, None, {}), resolution="its cells are down as planned")
    since = place.since or now
    before = place.refused_before if place.since is not None else place.refused
    noted = WindowState(True, since, before)
    if (now - since).total_seconds() < OPEN_AFTER_S:
        return Assessment(noted)
    return Assessment(noted, _unserved_incident(place, missed, since, before))


def _unserved_incident(
    place: Place, missed: list[CellStanding], since: datetime, before: Mapping[str, int]
) -> Unserved:
    refused = {
        code: count - before.get(code, 0) for code, count in place.refused.items() if count > before.get(code, 0)
    }
    what = (
        f"No cell of {place.deployment} in {place.region} can serve"
        if place.capacity <= 0
        else f"The autopilot sends all requests for {place.deployment} away from {place.region}, which has cells"
    )
    helpers = f"requests go to {', '.join(place.elsewhere)}" if place.elsewhere else "no region serves it"
    count = sum(refused.values())
    lost = f"{count} requests failed since" if count else "no request failed yet"
    named = missed or place.cells
    evidence = {
        "since": since.isoformat(),
        "wanted": place.wanted,
        "served_by": list(place.elsewhere),
        "refused": refused,
        "cells": [_as_evidence(cell) for cell in named[:CELLS_NAMED]],
    }
    return Unserved(f"{what}: {_first_cell_text(named)}; {helpers}; {lost}", evidence)


def _first_cell_text(cells: Iterable[CellStanding]) -> str:
    first = next(iter(cells), None)
    if first is None:
        return "it has no cell"
    views = sorted({view for view in first.views.values() if view != UP})
    seen = f", {' and '.join(views)} at its ingresses" if views else ""
    return f"{first.id} is {first.state}{seen}" + (f" ({first.reason})" if first.reason else "")


def _as_evidence(cell: CellStanding) -> dict[str, Any]:
    return {
        "cell": cell.id,
        "state": str(cell.state),
        "since": cell.since.isoformat(),
        "reason": cell.reason,
        "ingresses": dict(cell.views),
    }


REGION_SILENT_S = 30.0
"""Both processes of an ingress are started again 5 s after they died."""


@dataclass(frozen=True, slots=True)
class IngressSilence:
    """An ingress, and when it last reported."""

    id: str
    seen_at: datetime


def lost_regions(
    assessed: Iterable[tuple[Place, Assessment]],
    ingresses: Mapping[str, Sequence[IngressSilence]],
    agents_report: bool,
    now: datetime,
) -> dict[str, Unserved]:
    """Regions that lost all of their traffic: no cell can serve any of several deployments, or all of their ingresses
    are silent while agents elsewhere report (`agents_report`). A region with one deployment has the incident of that
    deployment. Evacuated regions are not lost."""
    places: dict[str, list[tuple[Place, Assessment]]] = defaultdict(list)
    for place, assessment in assessed:
        if place.served and not place.is_intended:
            places[place.region].append((place, assessment))
    lost = {}
    for region, found in places.items():
        silent = [one for one in ingresses.get(region, ()) if (now - one.seen_at).total_seconds() >= REGION_SILENT_S]
        unserved = [(place, one.unserved) for place, one in found if one.unserved is not None]
        if len(unserved) == len(found) > 1:
            lost[region] = _region_without_cells(region, unserved)
        elif silent and agents_report and len(silent) == len(ingresses[region]):
            lost[region] = _region_without_ingress(region, [place.deployment for place, _ in found], silent, now)
    return lost


def _region_without_cells(region: str, unserved: Sequence[tuple[Place, Unserved]]) -> Unserved:
    refused: Counter[str] = Counter()
    for _, one in unserved:
        refused.update(one.evidence["refused"])
    elsewhere = sorted({name for place, _ in unserved for name in place.elsewhere})
    names = [place.deployment for place, _ in unserved]
    where = f"requests go to {', '.join(elsewhere)}" if elsewhere else "no other region serves them"
    summary = f"{region} serves nothing: no cell of its {len(names)} deployments can serve; {where}"
    evidence = {
        "since": min(one.evidence["since"] for _, one in unserved),
        "deployments": names,
        "served_by": elsewhere,
        "refused": dict(refused),
        "cells": [cell for _, one in unserved for cell in one.evidence["cells"]][:CELLS_NAMED],
    }
    return Unserved(summary, evidence)


def _region_without_ingress(
    region: str, deployments: Sequence[str], silent: Sequence[IngressSilence], now: datetime
) -> Unserved:
    last = max(one.seen_at for one in silent)
    quiet = age_text((now - last).total_seconds())
    noun = "its ingress has" if len(silent) == 1 else f"all {len(silent)} ingresses have"
    evidence = {
        "since": last.isoformat(),
        "deployments": sorted(deployments),
        "ingresses": [{"ingress": one.id, "silent_s": round((now - one.seen_at).total_seconds())} for one in silent],
    }
    return Unserved(f"{region} may serve nothing: {noun} not reported for {quiet}", evidence)
