"""Which machines of a cloud belong to nobody, and may be ended. Pure.

A machine is an orphan if no row knows it by its id, and nothing more can come of the launch that its tags name. It may
be ended once two lists in a row showed it so and it is older than a launch takes to be noted. The cloud was listed
before the rows were read, so what was launched in between is known. When much of what runs is unknown the records are
what is wrong, as after an old backup: nothing is ended.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.planning.presence import ENDED


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """`orphan_after_s`: age in seconds from which a machine must be known. `ended_at_once`: in one look. At most
    `unknown_least` machines, or `unknown_most_share` of what runs, may be unknown; above that all is held."""

    orphan_after_s: float = 600.0
    ended_at_once: int = 5
    unknown_least: int = 5
    unknown_most_share: float = 0.2


SETTINGS = SweepSettings()


@dataclass(frozen=True, slots=True)
class ListedMachine:
    """One machine of this install as the cloud lists it. `unit`: of its tags, "" if it has none."""

    provider_id: str
    unit: str
    state: str
    launched_at: datetime


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`end` now; `suspects` of this look; `held`: why nothing is ended, "" if something may be."""

    end: tuple[str, ...] = ()
    suspects: frozenset[str] = frozenset()
    held: str = ""


def plan_sweep(
    listed: Sequence[ListedMachine],
    known: Collection[str],
    open_units: Collection[str],
    before: Collection[str],
    now: datetime,
    *,
    has_records: bool = True,
    settings: SweepSettings = SETTINGS,
) -> SweepPlan:
    """What one list shows. `known`: ids of machines that may run, as rows have them. `open_units`: of whose launches
    something may still come. `before`: the suspects of the last look. `has_records`: some launch is recorded."""
    running = [one for one in listed if one.state not in ENDED]
    orphans = [one for one in running if one.provider_id not in known and one.unit not in open_units]
    suspects = frozenset(one.provider_id for one in orphans)
    if orphans and not has_records:
        return SweepPlan(suspects=suspects, held=f"{len(orphans)} machines run, and no launch is recorded at all")
    if len(orphans) > max(settings.unknown_least, settings.unknown_most_share * len(running)):
        held = f"{len(orphans)} of {len(running)} machines are of no launch that is recorded: were records lost?"
        return SweepPlan(suspects=suspects, held=held)
    old = [one for one in orphans if (now - one.launched_at).total_seconds() >= settings.orphan_after_s]
    sure = sorted(one.provider_id for one in old if one.provider_id in before)
    return SweepPlan(tuple(sure[: settings.ended_at_once]), suspects)
