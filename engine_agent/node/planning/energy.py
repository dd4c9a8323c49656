"""Adds up counters of energy. Pure. A counter that wraps continues, and one that restarts begins again. A reading is
refused if it exceeds the device's power, goes back or stands still. That time is in no sum, and readers estimate it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine_agent.protocol.telemetry_messages import EnergyMeter

TOLERANCE = 1.25
"""Of the maximum power of a device, which it exceeds for moments."""
STILL_AFTER_MS = 60_000
"""A running device draws power within this time."""
LONGEST_MS = 600_000
"""Between two readings; in a longer time a counter may have wrapped or restarted several times."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a device. `microjoules` since some time, or `share`: its current power as a share of the maximum.
    `most_watts`: its maximum power. `wraps_at`: microjoules after which its counter wraps to 0; None: it never
    wraps."""

    microjoules: int | None = None
    share: float | None = None
    most_watts: float = 2_000.0
    wraps_at: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The change between two readings of a device. `wrong`: why it is refused; empty: it is valid."""

    microjoules: int = 0
    full_power_ms: float = 0.0
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class MeterState:
    """A meter and its last readings. `still_ms`: how long each device's counter has not moved."""

    meter: EnergyMeter
    readings: Mapping[str, Reading]
    at_ms: int
    still_ms: Mapping[str, int]

    @classmethod
    def begin(cls, name: str, covers: str, since: str, readings: Mapping[str, Reading], at_ms: int) -> "MeterState":
        return cls(EnergyMeter(name=name, covers=covers, since=since), dict(readings), at_ms, {})


def advance(state: MeterState, readings: Mapping[str, Reading], at_ms: int) -> MeterState:
    """The meter after another reading of all devices; `at_ms`: of a monotonic clock. If one reading is refused, the
    time counts for none, because a partial sum would look complete."""
    elapsed_ms = at_ms - state.at_ms
    if elapsed_ms <= 0:
        return state
    meter = state.meter
    steps = {
        name: step(state.readings[name], readings[name], elapsed_ms) for name in state.readings.keys() & readings.keys()
    }
    still = {
        name: state.still_ms.get(name, 0) + elapsed_ms
        for name, each in steps.items()
        if not each.wrong and each.microjoules == 0 and readings[name].microjoules is not None
    }
    wrong = any(each.wrong for each in steps.values()) or any(ms > STILL_AFTER_MS for ms in still.values())
    if state.readings.keys() != readings.keys() or not readings or wrong:
        changed = replace_meter(meter, refused=1)
    else:
        changed = replace_meter(
            meter,
            microjoules=sum(each.microjoules for each in steps.values()),
            full_power_ms=round(sum(each.full_power_ms for each in steps.values()) / len(steps)),
            covered_ms=elapsed_ms,
        )
    return replace(state, meter=changed, readings=dict(readings), at_ms=at_ms, still_ms=still)


def step(before: Reading, now: Reading, elapsed_ms: int) -> Step:
    """The energy of a device between two readings."""
    if elapsed_ms > LONGEST_MS:
        return Step(wrong="not read for too long")
    if now.share is not None:
        valid = 0 <= now.share <= TOLERANCE
        return Step(full_power_ms=min(1.0, now.share) * elapsed_ms) if valid else Step(wrong="no share of its power")
    if before.microjoules is None or now.microjoules is None:
        return Step(wrong="not read")
    most = round(now.most_watts * TOLERANCE * elapsed_ms * 1000)
    grew = now.microjoules - before.microjoules
    if grew < 0:
        if now.wraps_at is None:
            return Step(wrong="restarted")
        if most >= now.wraps_at:
            return Step(wrong="may have wrapped more than once")
        grew += now.wraps_at
    return Step(grew) if 0 <= grew <= most else Step(wrong="more than it can draw")


def replace_meter(meter: EnergyMeter, **more: int) -> EnergyMeter:
    return EnergyMeter(
        name=meter.name,
        covers=meter.covers,
        since=meter.since,
        microjoules=meter.microjoules + more.get("microjoules", 0),
        full_power_ms=meter.full_power_ms + more.get("full_power_ms", 0),
        covered_ms=meter.covered_ms + more.get("covered_ms", 0),
        refused=meter.refused + more.get("refused", 0),
    )
