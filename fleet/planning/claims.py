"""What deployments and teams may claim of machines: a deployment's priority, what others may take from it and for what
it takes from others, what it was set to have and may have now, and quotas. Pure data; `fleet.planning.shares` decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from engine_agent.protocol.states import ServingClass

PRIORITY_MOST = 9
PRIORITIES: Mapping[ServingClass, int] = {
    ServingClass.REALTIME: 6,
    ServingClass.NEAR_REALTIME: 4,
    ServingClass.BATCH: 2,
}
"""With room between them and at both ends for what a person states."""


class Preempts(StrEnum):
    """For which of its cells a deployment takes machines of lower priority: those that its range begins with (a number
    that a person set counts whole), all that it should have, or none."""

    MIN = "min"
    NEED = "need"
    NOTHING = "nothing"


class GrantRule(StrEnum):
    """Why a place has fewer cells than were set, or no fewer any more."""

    QUOTA = "quota"
    RECLAIM = "reclaim"
    PRIORITY = "priority"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """`priority`: 0 to `PRIORITY_MOST`, the higher goes first. `preemptible`: whether a higher one, or the team that
    a machine was borrowed from, may take cells below its floor, too. None: as its serving class has it."""

    priority: int | None = None
    preemptible: bool | None = None
    preempts: Preempts = Preempts.MIN

    def of_class(self, serving_class: ServingClass) -> "SharingPolicy":
        """With what the serving class says where nothing is stated."""
        priority = PRIORITIES[serving_class] if self.priority is None else self.priority
        is_batch = serving_class is ServingClass.BATCH
        return replace(self, priority=priority, preemptible=is_batch if self.preemptible is None else self.preemptible)


UNSTATED = SharingPolicy(PRIORITIES[ServingClass.REALTIME], preemptible=False)
"""Of a deployment of which nothing is said."""


@dataclass(frozen=True, slots=True)
class ClaimView:
    """What a deployment was set to have in a region: `asked` cells, of which `floor` are no surplus; None: all, as of a
    number that a person set. `granted`: how many of them it may have while machines are short, since when and by which
    rule; None: all. `prefill` and `decode`: so many of the asked cells should have these roles, the rest is mixed.
    `by_type`: so many should be on these instance types, the rest wherever is best."""

    asked: int
    floor: int | None = None
    granted: int | None = None
    granted_at: datetime | None = None
    rule: GrantRule | None = None
    reason: str = ""
    prefill: int = 0
    decode: int = 0
    by_type: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_force(self) -> int:
        return self.asked if self.granted is None else min(self.asked, self.granted)

    @property
    def least(self) -> int:
        return self.asked if self.floor is None else min(self.floor, self.asked)


@dataclass(frozen=True, slots=True)
class QuotaView:
    """Machines of an instance type that a team is entitled to, in a region, or, where it names none, over all of them.
    `borrow_most`: how many of other teams it may borrow; None: any number."""

    team: str
    instance_type: str
    machines: int
    borrow_most: int | None = None
    region: str = ""


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """`patience_s`: how long a cell waits for machines before others make room for it; where machines are bought, and
    come after a while, so much longer than they take to boot. `kept_s`: how long a cell that was taken is not given
    back: a start and a drain take minutes, and load that comes back within them would only move cells to and fro."""

    patience_s: float = 30.0
    kept_s: float = 600.0
