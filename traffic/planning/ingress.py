"""Decides whether an ingress that is not connected must be started. Pure."""

from dataclasses import dataclass
from datetime import datetime

from fleet.planning.snapshot import ProviderStatus

RESTART_AFTER_S = 1.0
"""A closed connection may be our own restart; its agent is given this long to come back."""
START_AGAIN_AFTER_S = 5.0
"""Between two starts, so that an ingress that dies at once is not started in a storm."""


@dataclass(frozen=True, slots=True)
class StartIngress:
    """`start_whole`: boot it anew; otherwise only its agent, which adopts the running HAProxy."""

    start_whole: bool
    reason: str


def plan_ingress(
    status: ProviderStatus, *, known: bool, disconnected_at: datetime | None, now: datetime
) -> StartIngress | None:
    """What to start of an ingress that is not connected, if anything."""
    if not known:
        return StartIngress(start_whole=True, reason="first start")
    away_s = (now - disconnected_at).total_seconds() if disconnected_at else START_AGAIN_AFTER_S
    if status is ProviderStatus.AGENT_DEAD and away_s >= RESTART_AFTER_S:
        return StartIngress(start_whole=False, reason="its agent is dead, HAProxy runs; started the agent again")
    if status is ProviderStatus.GONE and away_s >= START_AGAIN_AFTER_S:
        return StartIngress(start_whole=True, reason="it is gone; started it again")
    return None
