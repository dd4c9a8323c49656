"""Predicts the effect of a change from the live snapshot. Reads only; nothing that it predicts is done."""

from collections.abc import Callable, Mapping
from datetime import datetime
from statistics import median
from typing import Any

from fleet.models import Region
from fleet.planning.snapshot import FleetView
from fleet.selectors.snapshot import fleet_view, version_view
from fleet.services.rollout_actions import rollout_propose
from kernel.models import Event
from kernel.refusals import InvalidInput
from simulator.prediction import Change, Forecast, LoseRegion, RollOut, Scale, predict

HasTime = Callable[[], bool]
"""Whether a forecast may look on (controlplane.forecast_budget): nobody makes one without."""
EVENTS_READ = 2000
SHARE_OF_TIMEOUT = 0.25
"""Where no start was seen yet: a ready timeout is commonly set to a few times what a start takes."""


def typical_load_s(fleet: FleetView) -> dict[str, float]:
    """Version -> seconds from a start until ready, for every version of the fleet. One query."""
    measured = _measured()
    load_s: dict[str, float] = {}
    for deployment in fleet.deployments.values():
        usual = measured.get(deployment.name)
        for version in {deployment.version, *deployment.others}:
            timeout_s = deployment.of(version).ready_timeout_s
            load_s[version] = median(usual) if usual else timeout_s * SHARE_OF_TIMEOUT
    return load_s


def _measured() -> dict[str, list[float]]:
    """Deployment -> what its last starts took."""
    events = Event.objects.filter(kind__in=["cell.starting", "cell.ready"]).order_by("-id")[:EVENTS_READ]
    ready: dict[str, Event] = {}
    durations: dict[str, list[float]] = {}
    for event in events:
        if event.kind == "cell.ready":
            ready[event.cell] = event
        elif (end := ready.pop(event.cell, None)) is not None:
            durations.setdefault(event.deployment, []).append((end.at - event.at).total_seconds())
    return durations


def plan_rollout(
    *,
    deployment: str,
    version: str,
    policy: Mapping[str, Any],
    allow_unreleased: bool,
    now: datetime,
    has_time: HasTime,
) -> Forecast:
    """What this rollout would do.

    Raises:
        InvalidInput: it could not be started; the same rules as for starting it.
    """
    proposal = rollout_propose(deployment=deployment, version=version, policy=policy, allow_unreleased=allow_unreleased)
    size = version_view(proposal.version, proposal.deployment.instance_type_id)
    view = fleet_view(now=now)
    change = RollOut(deployment, proposal.version.reference, proposal.policy, size)
    return _predict(view, change, now, has_time, {change.to_version: _usual(view, deployment)})


def plan_scale(*, deployment: str, cells: Mapping[str, int], now: datetime, has_time: HasTime) -> Forecast:
    """What this number of cells would do.

    Raises:
        InvalidInput: an unknown deployment or region.
    """
    view = fleet_view(now=now)
    if deployment not in view.deployments:
        raise InvalidInput(field="scale.deployment", rule="exists", message=f"there is no deployment {deployment!r}")
    _known_regions(view, cells, "scale.regions")
    return _predict(view, Scale(deployment, cells), now, has_time)


def plan_lost_region(*, region: str, now: datetime, has_time: HasTime) -> Forecast:
    """What the loss of every machine of a region would do.

    Raises:
        InvalidInput: an unknown region.
    """
    view = fleet_view(now=now)
    _known_regions(view, {region: 0}, "lose_region")
    return _predict(view, LoseRegion(region), now, has_time)


def plan_onwards(*, view: FleetView, deployment: str, now: datetime, has_time: HasTime) -> Forecast:
    """What would become of a deployment from this snapshot on, which may say what is only considered.

    Raises:
        KeyError: the snapshot has no such deployment.
    """
    return _predict(view, Scale(deployment, dict(view.deployments[deployment].cells_wanted)), now, has_time)


def _known_regions(view: FleetView, regions: Mapping[str, Any], field: str) -> None:
    if unknown := sorted(set(regions) - set(view.regions)):
        known = ", ".join(Region.objects.order_by("name").values_list("name", flat=True)) or "none"
        raise InvalidInput(field=field, rule="exists", message=f"there is no region {unknown[0]!r}; there are: {known}")


def _usual(view: FleetView, deployment: str) -> float:
    """A new version is taken to load as long as the one that it replaces."""
    return typical_load_s(view)[view.deployments[deployment].version]


def _predict(
    view: FleetView, change: Change, now: datetime, has_time: HasTime, more: Mapping[str, float] | None = None
) -> Forecast:
    return predict(view, change, now, load_s={**typical_load_s(view), **(more or {})}, has_time=has_time)
