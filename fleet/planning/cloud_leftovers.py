"""Which volumes, network interfaces and requests for spot machines of this install belong to no machine. Pure.

EC2 deletes them with their machine, mostly. What is asked for here is attached to nothing, so nobody's work is lost by
its end; all the same the rules are those of machines (`cloud_sweep`): two looks, old enough, few at once, and none at
all while there are so many that something else is wrong.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from fleet.planning.cloud_sweep import SETTINGS, SweepSettings


class LeftoverKind(StrEnum):
    VOLUME = "volume"
    INTERFACE = "network interface"
    SPOT_REQUEST = "spot request"


@dataclass(frozen=True, slots=True)
class Leftover:
    """One that is attached to nothing. `unit`: of its tags, "" if it has none. `created_at` None: EC2 does not say, as
    of network interfaces; it counts from the first look that showed it."""

    kind: LeftoverKind
    provider_id: str
    unit: str
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class LeftoverPlan:
    """`end` now; `suspects` of this look, with when they were seen first; `held`: why some kinds are left alone, "" if
    none is."""

    end: tuple[Leftover, ...]
    suspects: Mapping[str, datetime]
    held: str = ""


def plan_leftovers(
    found: Sequence[Leftover],
    open_units: Collection[str],
    before: Mapping[str, datetime],
    now: datetime,
    *,
    machines: int,
    has_records: bool = True,
    settings: SweepSettings = SETTINGS,
) -> LeftoverPlan:
    """What one whole look shows. `open_units`: of whose launches something may still come. `before`: suspects of the
    last whole look. `machines`: that are recorded and may run."""
    nobodys = [one for one in found if one.unit not in open_units]
    suspects = {one.provider_id: before.get(one.provider_id, now) for one in nobodys}
    end: list[Leftover] = []
    held = []
    for kind in LeftoverKind:
        own = [one for one in nobodys if one.kind is kind]
        reason = _held(kind, len(own), machines, has_records, settings)
        if reason:
            held.append(reason)
            continue
        sure = [one for one in own if _is_sure(one, before, now, settings)]
        end += sorted(sure, key=lambda one: one.provider_id)[: settings.ended_at_once]
    return LeftoverPlan(tuple(end), suspects, "; ".join(held))


def _is_sure(one: Leftover, before: Mapping[str, datetime], now: datetime, settings: SweepSettings) -> bool:
    seen_at = before.get(one.provider_id)
    if seen_at is None:
        return False
    return (now - (one.created_at or seen_at)).total_seconds() >= settings.orphan_after_s


def _held(kind: LeftoverKind, count: int, machines: int, has_records: bool, settings: SweepSettings) -> str:
    if count and not has_records:
        return f"{count} of kind {kind} belong to no machine, and no launch is recorded at all"
    if count > max(settings.unknown_least, settings.unknown_most_share * machines):
        return f"{count} of kind {kind} belong to no machine, beside {machines} machines: did somebody take them off?"
    return ""
