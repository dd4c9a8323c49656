"""How much energy a machine took since the last look, from meters that its agent reads, and from an estimate for the
time that they do not cover. Pure. All time is accounted for once: what was estimated is not counted again when a meter
tells of it later, and what a meter cannot have seen is not believed but estimated, and told.

Decides which machines' power meters lie, from the readings that were refused of them. Pure.

A meter that restarts once is no liar: the driver under it was loaded anew. One of which reading after reading is
refused is. What was refused is in no sum, and the time is estimated; nothing else follows here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.capacity.planning.rates import PowerRating
from models_registry.versions.planning.machines import IDLE_SHARE

ACCELERATORS, HOST = "accelerators", "host"
COMPONENTS = (ACCELERATORS, HOST)
SLACK_MS = 20_000
"""Reports come every two seconds and are looked at every fifteen: for this long a meter may be behind, or ahead."""
TOLERANCE = 1.25
"""Of the rating, which machines pass for moments."""
MOST_WATTS = 150_000.0
"""No machine draws more, a whole rack included, where nobody states a rating."""
MOST = 2**62


@dataclass(frozen=True, slots=True)
class MeterTotals:
    """What meters of one part of a machine added up in one life of their reader, which `since` names.

    `microjoules` within `covered_ms`; `full_power_ms`: of devices that tell their power in per cent alone, the time at
    full power that would have taken as much. `refused`: readings that could not be so.
    """

    since: str
    microjoules: int = 0
    full_power_ms: int = 0
    covered_ms: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class MeterMark:
    """How far a part of a machine is accounted for: the totals last counted, and the milliseconds that are in no
    amount yet; less than 0: a meter was ahead."""

    totals: MeterTotals
    gap_ms: int = 0


@dataclass(frozen=True, slots=True)
class Energy:
    """Microjoules by their source. `unrated_ms`: time of which nobody knows; `refused`: readings that were not
    believed."""

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
    """How busy a machine's parts are now, from 0 to 1."""

    accelerators: float
    host: float


def plan_energy(
    meters: Mapping[str, MeterTotals],
    marks: Mapping[str, MeterMark],
    elapsed_ms: int,
    rating: PowerRating | None,
    use: Use,
) -> tuple[Energy, dict[str, MeterMark]]:
    """What a machine took in `elapsed_ms`, and the marks to remember; meters and marks by the part that they are of."""
    total, kept = Energy(), {}
    for part, busy in ((ACCELERATORS, use.accelerators), (HOST, use.host)):
        watts = None if rating is None else rating.accelerators if part == ACCELERATORS else rating.host
        if watts == 0:  # there is no such part, or the other one's rating holds it
            continue
        taken, mark = plan_part(meters.get(part), marks.get(part), elapsed_ms, watts, busy)
        total += taken
        if mark is not None:
            kept[part] = mark
    return total, kept


def plan_part(
    meter: MeterTotals | None, mark: MeterMark | None, elapsed_ms: int, watts: float | None, busy: float
) -> tuple[Energy, MeterMark | None]:
    """What one part of a machine took. `watts`: the most that it draws, None: unknown. Without a meter there is nothing
    to remember, and all of the time is estimated."""
    gap_ms = (mark.gap_ms if mark is not None else 0) + elapsed_ms
    if meter is None:
        return estimate(gap_ms, watts, busy), None
    before = _counted_until(meter, mark, gap_ms)
    covered = meter.covered_ms - before.covered_ms
    joules, full = meter.microjoules - before.microjoules, meter.full_power_ms - before.full_power_ms
    if min(covered, joules, full) < 0:  # a report that came late
        meter, covered, joules, full = before, 0, 0, 0
    refused = max(0, meter.refused - before.refused)
    if full > covered or joules > most_microjoules(watts, covered):
        covered, joules, full, refused = 0, 0, 0, refused + 1
    if covered > gap_ms + SLACK_MS:  # its beginning was estimated before
        counted = max(0, gap_ms)
        joules, full, covered = joules * counted // covered, full * counted // covered, counted
    gap_ms -= covered
    rated = 0 if watts is None else round(full * watts * 1000)
    taken = Energy(joules, rated, unrated_ms=full if watts is None else 0, refused=refused)
    if gap_ms > SLACK_MS:
        taken, gap_ms = taken + estimate(gap_ms, watts, busy), 0
    return taken, MeterMark(meter, gap_ms)


def _counted_until(meter: MeterTotals, mark: MeterMark | None, gap_ms: int) -> MeterTotals:
    """The totals from which on a meter counts. A life that began after the last look counts from 0; of any other one
    nobody knows what was accounted for."""
    if mark is not None and mark.totals.since == meter.since:
        return mark.totals
    return MeterTotals(meter.since) if 0 < meter.covered_ms <= gap_ms + SLACK_MS else meter


def most_microjoules(watts: float | None, ms: int) -> int:
    """More than this a part that draws `watts` at most cannot take in this time."""
    return round((MOST_WATTS if watts is None else watts * TOLERANCE) * max(0, ms) * 1000)


def estimate(ms: int, watts: float | None, busy: float) -> Energy:
    """What a part takes by its rating: what it draws when idle, and the rest as far as it is busy."""
    if ms <= 0:
        return Energy()
    if watts is None:
        return Energy(unrated_ms=ms)
    drawn = watts * (IDLE_SHARE + (1 - IDLE_SHARE) * min(1.0, max(0.0, busy)))
    return Energy(estimated=round(drawn * ms * 1000))


def meters_of(telemetry: Any) -> dict[str, MeterTotals]:
    """Meters by the part that they cover, out of what a node reports; of two that cover one the first. What is not in
    the form of its agent is left out."""
    found: dict[str, MeterTotals] = {}
    for row in telemetry if isinstance(telemetry, Sequence) and not isinstance(telemetry, str) else ():
        if not isinstance(row, Mapping) or row.get("covers") not in COMPONENTS or row["covers"] in found:
            continue
        counts = [row.get(name, 0) for name in ("microjoules", "full_power_ms", "covered_ms", "refused")]
        if isinstance(row.get("since"), str) and all(type(count) is int and 0 <= count < MOST for count in counts):
            found[row["covers"]] = MeterTotals(row["since"][:40], *counts)
    return found


def use_of(accelerators: Any, host_cpu_percent: Any, is_busy: bool) -> Use:
    """How busy a machine is, as far as it says; else as busy as its cell is."""
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
"""So many may be wrong for once: a restart, and a device that is seen late after it."""
QUIET_MS = 600_000
"""Without a refusal for so long, a meter is believed again."""


@dataclass(frozen=True, slots=True)
class MeterLook:
    """One look at a node's meters. `refused`: readings that were not believed since the last look; `counted`: whether
    any was believed; `is_there`: whether it has a meter at all."""

    refused: int
    counted: bool
    is_there: bool = True


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Readings of a node that were refused, one after another: from when to when, in milliseconds since 1970."""

    refused: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class MeterPlan:
    """`suspicions`: what is remembered of nodes; `opened`: nodes whose meters lie, with the sentence of the incident;
    `closed`: nodes with why theirs is over."""

    suspicions: Mapping[str, Suspicion]
    opened: tuple[tuple[str, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_power_meters(
    looks: Mapping[str, MeterLook], before: Mapping[str, Suspicion], open_about: frozenset[str], now_ms: int
) -> MeterPlan:
    """What to remember, open and close. `looks`: of every node that there is. A node that says nothing new of its
    meter keeps its incident."""
    kept: dict[str, Suspicion] = {}
    closed: list[tuple[str, str]] = []
    for node in sorted(before.keys() | open_about | {name for name, look in looks.items() if look.refused}):
        look, was = looks.get(node), before.get(node)
        if look is None:
            over = "the node is no more"
        elif not look.is_there:
            over = "it reports no meter any more"
        else:
            now = _suspicion(look, was, now_ms)
            over = "" if now is not None and not _is_over(look, now, now_ms) else "its readings are believed again"
            if now is not None and not over:
                kept[node] = now
        if over and node in open_about:
            closed.append((node, over))
    opened = [
        (node, _sentence(node, one))
        for node, one in kept.items()
        if one.refused > REFUSED_MOST and node not in open_about
    ]
    return MeterPlan(kept, tuple(opened), tuple(closed))


def _suspicion(look: MeterLook, was: Suspicion | None, now_ms: int) -> Suspicion | None:
    if not look.refused:
        return was
    if was is None or now_ms - was.last_ms > QUIET_MS:
        return Suspicion(look.refused, now_ms, now_ms)
    return Suspicion(was.refused + look.refused, was.first_ms, now_ms)


def _is_over(look: MeterLook, one: Suspicion, now_ms: int) -> bool:
    return look.counted and now_ms - one.last_ms >= QUIET_MS


def _sentence(node: str, one: Suspicion) -> str:
    return (
        f"{one.refused} readings of {node}'s power meter were refused: its counter went back, stood still, or grew by"
        " more than the machine can draw; its energy is estimated meanwhile"
    )
