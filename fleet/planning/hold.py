"""For how long requests wait for the first cell of a deployment that may have none, and when it is expected. Pure."""

import math
from collections.abc import Iterable
from datetime import datetime

from engine_agent.protocol.ingress_messages import Withheld
from fleet.planning.autoscaling.policy import HOLD_MOST_S, CellRange, ScalingPolicy
from fleet.planning.claims import ClaimView, GrantRule

START_UPS = 2.0
"""So many start-up times: a start that fails once is made again."""
HOLD_LEAST_S = 30
STEP = 1.25
"""Start-up times are told in steps of a quarter: each new number is a new routing table, and of the hold a reload."""


def may_be_empty(policy: ScalingPolicy, ranges: Iterable[CellRange]) -> bool:
    """Whether a deployment may be without cells by its own policy."""
    return any(one.min == 0 for one in ranges) or any(window.cells == 0 for window in policy.schedule)


def stepped_s(start_up_s: float) -> int:
    """The start-up time as it is told, rounded up."""
    return math.ceil(STEP ** math.ceil(math.log(max(1.0, start_up_s), STEP) - 1e-9))


def hold_s(policy: ScalingPolicy, start_up_s: float) -> int:
    """For how long a request is held at most."""
    if policy.hold_s is not None:
        return math.ceil(policy.hold_s)
    return min(HOLD_MOST_S, max(HOLD_LEAST_S, math.ceil(START_UPS * stepped_s(start_up_s))))


def ready_at_s(started: Iterable[datetime], start_up_s: float) -> int:
    """When the first of the cells that start is expected, in seconds since 1970; 0: none starts."""
    first = min(started, default=None)
    return 0 if first is None else math.ceil(first.timestamp() + stepped_s(start_up_s))


def withheld_by(claims: Iterable[ClaimView]) -> Withheld:
    """What keeps the first cell from machines: by claims of the places where one may start. Nothing does while one of
    them may have a cell, or has not been set one yet."""
    rules = [claim.rule if claim.asked and claim.in_force == 0 else None for claim in claims]
    if not rules or None in rules or GrantRule.RETURN in rules:
        return Withheld.NOTHING
    return Withheld.MACHINES if GrantRule.PRIORITY in rules else Withheld.QUOTA
