"""Who goes before whom when machines are short: a deployment's priority, what others may take from it, and for what it
takes from others. Pure data with the defaults of each serving class."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
