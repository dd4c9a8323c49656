"""Computes a machine's energy since the last pass, from its meters and, where they have no data, from an estimate; and
decides which machines have an implausible power meter. Pure. All time is accounted for once: estimated time is not
counted again when a meter reports it later, and implausible readings are replaced by the estimate. A single restart of
a meter is normal (its driver was reloaded); repeated refusals are reported. Nothing else follows from them here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.capacity.planning.rates import PowerRating
from models_registry.instance_types.planner import IDLE_SHARE

ACCELERATORS, HOST = "accelerators", "host"
COMPONENTS = (ACCELERATORS, HOST)
SLACK_MS = 20_000
"""Reports come every 2 s and are read every 15 s, so a meter may be this far ahead or behind."""
TOLERANCE = 1.25
"""Machines exceed their rating briefly, by up to this share."""
MOST_WATTS = 150_000.0
"""Above the power of a whole rack; used for machines without a rating."""
MOST = 2**62


@dataclass(frozen=True, slots=True)
class MeterTotals:
    """Totals of one part's meters in one life of their reader, identified by `since`. `microjoules` are within
    `covered_ms`; `full_power_ms`, for devices that report power only in per cent, is the equivalent time at full power.
    `refused` counts implausible readings."""

    since: str
    microjoules: int = 0
    full_power_ms: int = 0
    covered_ms: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class MeterMark:
    """How far a part is accounted for: totals last counted, and unaccounted milliseconds; negative if a meter was
    ahead."""

    totals: MeterTotals
    gap_ms: int = 0


@dataclass(frozen=True, slots=True)
class Energy:
    """Microjoules by source. `unrated_ms` is time without known power; `refused` counts implausible readings."""

    measured: int = 0
    rated: int = 0
    estimated: int = 0
    unrated_ms: int = 0
    refused: int = 0

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(
            self.measured + other.measured,
            self.rated + other.rated,
            self.estimated + other.estimated,
            self.unrated_ms + other.unrated_ms,
            self.refused + other.refused,
        )

    @property
    def total(self) -> int:
        return self.measured + self.rated + self.estimated


@dataclass(frozen=True, slots=True)
class Use:
    """Current utilisation of a machine's parts, 0 to 1."""

    accelerators: float
    host: float


def plan_energy(
    meters: Mapping[str, MeterTotals],
    marks: Mapping[str, MeterMark],
    elapsed_ms: int,
    rating: PowerRating | None,
    use: Use,
) -> tuple[Energy, dict[str, MeterMark]]:
    """Returns a machine's energy in `elapsed_ms` and the marks to store; meters and marks are by part."""
    total, kept = Energy(), {}
    for part, busy in ((ACCELERATORS, use.accelerators), (HOST, use.host)):
        watts = None if rating is None else rating.accelerators if part == ACCELERATORS else rating.host
        if watts == 0:  # no such part, or included in the other one's rating
            continue
        taken, mark = plan_part(meters.get(part), marks.get(part), elapsed_ms, watts, busy)
        total += taken
        if mark is not None:
            kept[part] = mark
    return total, kept


def plan_part(
    meter: MeterTotals | None, mark: MeterMark | None, elapsed_ms: int, watts: float | None, busy: float
) -> tuple[Energy, MeterMark | None]:
    """Returns the energy of one part. `watts` is its maximum power, None if unknown. Without a meter all time is
    estimated and no mark is needed."""
    gap_ms = (mark.gap_ms if mark is not None else 0) + elapsed_ms
    if meter is None:
        return estimate(gap_ms, watts, busy), None
    before = _counted_until(meter, mark, gap_ms)
    covered = meter.covered_ms - before.covered_ms
    joules, full = meter.microjoules - before.microjoules, meter.full_power_ms - before.full_power_ms
    if min(covered, joules, full) < 0:  # a late report
        meter, covered, joules, full = before, 0, 0, 0
    refused = max(0, meter.refused - before.refused)
    if full > covered or joules > most_microjoules(watts, covered):
        covered, joules, full, refused = 0, 0, 0, refused + 1
    if covered > gap_ms + SLACK_MS:  # its start was estimated before
        counted = max(0, gap_ms)
        joules, full, covered = joules * counted // covered, full * counted // covered, counted
    gap_ms -= covered
    rated = 0 if watts is None else round(full * watts * 1000)
    taken = Energy(joules, rated, unrated_ms=full if watts is None else 0, refused=refused)
    if gap_ms > SLACK_MS:
        taken, gap_ms = taken + estimate(gap_ms, watts, busy), 0
    return taken, MeterMark(meter, gap_ms)


def _counted_until(meter: MeterTotals, mark: MeterMark | None, gap_ms: int) -> MeterTotals:
    """Returns the totals from which the meter counts. A life that began after the last pass counts from 0; for others,
    the accounted part is unknown."""
    if mark is not None and mark.totals.since == meter.since:
        return mark.totals
    return MeterTotals(meter.since) if 0 < meter.covered_ms <= gap_ms + SLACK_MS else meter


def most_microjoules(watts: float | None, ms: int) -> int:
    """Returns the maximum energy of a part with this power in this time."""
    return round((MOST_WATTS if watts is None else watts * TOLERANCE) * max(0, ms) * 1000)


def estimate(ms: int, watts: float | None, busy: float) -> Energy:
    """Estimates a part's energy from its rating: idle power, and the rest by utilisation."""
    if ms <= 0:
        return Energy()
    if watts is None:
        return Energy(unrated_ms=ms)
    drawn = watts * (IDLE_SHARE + (1 - IDLE_SHARE) * min(1.0, max(0.0, busy)))
    return Energy(estimated=round(drawn * ms * 1000))


def meters_of(telemetry: Any) -> dict[str, MeterTotals]:
    """Returns a node's meters by the part that they cover; the first of two that cover one. Malformed meters are
    ignored."""
    found: dict[str, MeterTotals] = {}
    for row in telemetry if isinstance(telemetry, Sequence) and not isinstance(telemetry, str) else ():
        if not isinstance(row, Mapping) or row.get("covers") not in COMPONENTS or row["covers"] in found:
            continue
        counts = [row.get(name, 0) for name in ("microjoules", "full_power_ms", "covered_ms", "refused")]
        if isinstance(row.get("since"), str) and all(type(count) is int and 0 <= count < MOST for count in counts):
            found[row["covers"]] = MeterTotals(row["since"][:40], *counts)
    return found


def use_of(accelerators: Any, host_cpu_percent: Any, is_busy: bool) -> Use:
    """Returns a machine's utilisation as reported, or else that of its cell."""
    shares = [
        device["utilisation_percent"]
        for device in (accelerators if isinstance(accelerators, list) else ())
        if isinstance(device, Mapping) and _is_percent(device.get("utilisation_percent"))
    ]
    assumed = 1.0 if is_busy else 0.0
    return Use(
        accelerators=sum(shares) / len(shares) / 100 if shares else assumed,
        host=host_cpu_percent / 100 if _is_percent(host_cpu_percent) else assumed,
    )


def _is_percent(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


POWER_METER = "power-meter"
REFUSED_MOST = 2
"""Tolerated refusals: a restart, and a device that appears late after it."""
QUIET_MS = 600_000
"""A meter is trusted again after this time without refusals."""


@dataclass(frozen=True, slots=True)
class MeterSample:
    """One reading of a node's meters. `refused` readings since the last pass; `counted`: any was accepted; `is_there`:
    a meter exists."""

    refused: int
    counted: bool
    is_there: bool = True


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Consecutive refused readings of a node, from first to last, in Unix milliseconds."""

    refused: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class MeterPlan:
    """`suspicions` to store; `opened`: nodes with new incidents and their texts; `closed`: nodes with the reason for
    closing."""

    suspicions: Mapping[str, Suspicion]
    opened: tuple[tuple[str, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_power_meters(
    looks: Mapping[str, MeterSample], before: Mapping[str, Suspicion], open_about: frozenset[str], now_ms: int
) -> MeterPlan:
    """Returns what to store, open and close. `looks` covers every node. A node without new meter data keeps its
    incident."""
    kept: dict[str, Suspicion] = {}
    closed: list[tuple[str, str]] = []
    for node in sorted(before.keys() | open_about | {name for name, look in looks.items() if look.refused}):
        look, was = looks.get(node), before.get(node)
        if look is None:
            over = "the node was deleted"
        elif not look.is_there:
            over = "it no longer reports a meter"
        else:
            now = _next_suspicion(look, was, now_ms)
            over = "" if now is not None and not _is_over(look, now, now_ms) else "its readings are plausible again"
            if now is not None and not over:
                kept[node] = now
        if over and node in open_about:
            closed.append((node, over))
    opened = [
        (node, _suspicion_text(node, one))
        for node, one in kept.items()
        if one.refused > REFUSED_MOST and node not in open_about
    ]
    return MeterPlan(kept, tuple(opened), tuple(closed))


def _next_suspicion(look: MeterSample, was: Suspicion | None, now_ms: int) -> Suspicion | None:
    if not look.refused:
        return was
    if was is None or now_ms - was.last_ms > QUIET_MS:
        return Suspicion(look.refused, now_ms, now_ms)
    return Suspicion(was.refused + look.refused, was.first_ms, now_ms)


def _is_over(look: MeterSample, one: Suspicion, now_ms: int) -> bool:
    return look.counted and now_ms - one.last_ms >= QUIET_MS


def _suspicion_text(node: str, one: Suspicion) -> str:
    return (
        f"{one.refused} readings of {node}'s power meter were refused: its counter went back, stood still, or grew by"
        " more than the machine can draw; its energy is estimated until it is plausible"
    )
