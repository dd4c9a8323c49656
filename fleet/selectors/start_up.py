"""How long cells took from what began them until they were ready, as the timeline has it."""

from collections.abc import Iterable
from datetime import datetime
from statistics import median

from kernel.models import Event

EVENTS_READ = 2000
SHARE_OF_TIMEOUT = 0.25
"""Where no start was seen yet: a ready timeout is commonly set to a few times what a start takes."""
CREATED, STARTING, READY = "cell.pending", "cell.starting", "cell.ready"


def start_times_s(deployments: Iterable[str] | None = None, *, since: str = STARTING) -> dict[str, list[float]]:
    """Deployment -> seconds that its last starts took, youngest first, from events of the kind `since` until the cell
    was ready; a start that was tried again counts from its last try. None: of all deployments. One query."""
    events = Event.objects.filter(kind__in=[since, READY])
    if deployments is not None:
        events = events.filter(deployment__in=list(deployments))
    ready: dict[str, datetime] = {}
    durations: dict[str, list[float]] = {}
    newest = events.order_by("-id").values_list("kind", "cell", "deployment", "at")
    for kind, cell, deployment, at in newest[:EVENTS_READ]:
        if kind == READY:
            ready[cell] = at
        elif (end := ready.pop(cell, None)) is not None:
            durations.setdefault(deployment, []).append((end - at).total_seconds())
    return durations


def typical_s(measured: Iterable[float] | None, ready_timeout_s: float) -> float:
    """What a start usually takes: the median of those that were seen, else a part of its timeout."""
    return median(measured) if measured else ready_timeout_s * SHARE_OF_TIMEOUT
