"""Whether a machine of a cloud is there, from lists that lag and zones that do not answer. Pure.

Gone is only what was seen to end, or was absent from two complete lists in a row while it was old enough to be in
them. Of what a list does not show nothing follows by itself: a wrong "gone" would end a cell that serves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

VISIBLE_AFTER = timedelta(minutes=10)
"""When a machine that was launched is in every complete list."""
ABSENT_LISTS = 2
ENDED = frozenset({"shutting-down", "terminated", "gone"})
"""States of a machine that will not come back. `gone`: lists prove it, nobody saw its end."""
GONE = "gone"


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """`launched_at`: when its launch was noted. `absent_lists`: in how many complete lists in a row it was not."""

    provider_id: str
    zone: str
    state: str
    launched_at: datetime
    absent_lists: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """What one list said, which began at `began_at`. `states` by id. `complete`: all pages came. Machines in
    `silent_zones` may be missing in it."""

    states: Mapping[str, str]
    began_at: datetime
    complete: bool
    silent_zones: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Presence:
    """What is known of a machine from now on."""

    provider_id: str
    state: str
    absent_lists: int


def plan_presence(machines: Collection[KnownMachine], listed: Listed) -> tuple[Presence, ...]:
    """What a list changes about the machines that are recorded."""
    found = [_judge(machine, listed) for machine in machines]
    return tuple(one for one in found if one is not None)


def _judge(machine: KnownMachine, listed: Listed) -> Presence | None:
    if machine.state in ENDED and listed.states.get(machine.provider_id) not in ENDED:
        return None  # what ended does not come back, however a late list shows it
    if machine.provider_id in listed.states:
        return Presence(machine.provider_id, listed.states[machine.provider_id], 0)
    if not listed.complete or machine.zone in listed.silent_zones:
        return None
    if listed.began_at - machine.launched_at < VISIBLE_AFTER:
        return None
    absent = machine.absent_lists + 1
    return Presence(machine.provider_id, GONE if absent >= ABSENT_LISTS else machine.state, absent)
