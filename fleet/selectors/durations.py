"""How long starts of cells took lately, from the timeline: what a prediction takes for typical."""

from statistics import median

from controlplane.kernel.models import Event
from fleet.planning.snapshot import FleetView

EVENTS_READ = 2000
SHARE_OF_TIMEOUT = 0.25
"""Where no start was seen yet: a ready timeout is commonly set to a few times what a start takes."""


def typical_load_s(fleet: FleetView) -> dict[str, float]:
    """Version -> seconds from a start until ready, for every version of the fleet. One query."""
    measured = _measured()
    found: dict[str, float] = {}
    for deployment in fleet.deployments.values():
        usual = measured.get(deployment.name)
        for version in {deployment.version, *deployment.others}:
            timeout_s = deployment.of(version).ready_timeout_s
            found[version] = median(usual) if usual else timeout_s * SHARE_OF_TIMEOUT
    return found


def _measured() -> dict[str, list[float]]:
    """Deployment -> what its last starts took."""
    events = Event.objects.filter(kind__in=["cell.starting", "cell.ready"]).order_by("-id")[:EVENTS_READ]
    ready: dict[str, Event] = {}
    found: dict[str, list[float]] = {}
    for event in events:
        if event.kind == "cell.ready":
            ready[event.cell] = event
        elif (end := ready.pop(event.cell, None)) is not None:
            found.setdefault(event.deployment, []).append((end.at - event.at).total_seconds())
    return found
