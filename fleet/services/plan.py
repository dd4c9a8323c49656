"""Turns a question into a prediction from the live snapshot. Reads only; nothing that it predicts is done."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from controlplane.kernel.refusals import InvalidInput
from fleet.models import Region
from fleet.planning.snapshot import FleetView
from fleet.selectors.durations import typical_load_s
from fleet.selectors.snapshot import fleet_view, version_view
from fleet.services.rollout_actions import rollout_propose
from fleet.simulator.prediction import Change, Forecast, LoseRegion, RollOut, Scale, predict


def plan_rollout(
    *, deployment: str, version: str, policy: Mapping[str, Any], allow_unreleased: bool, now: datetime
) -> Forecast:
    """What this rollout would do.

    Raises:
        InvalidInput: it could not be started; the same rules as for starting it.
    """
    proposal = rollout_propose(deployment=deployment, version=version, policy=policy, allow_unreleased=allow_unreleased)
    size = version_view(proposal.version, proposal.deployment.instance_type_id)
    view = fleet_view(now=now)
    change = RollOut(deployment, proposal.version.reference, proposal.policy, size)
    return _predict(view, change, now, {change.to_version: _usual(view, deployment)})


def plan_scale(*, deployment: str, cells: Mapping[str, int], now: datetime) -> Forecast:
    """What this number of cells would do.

    Raises:
        InvalidInput: an unknown deployment or region.
    """
    view = fleet_view(now=now)
    if deployment not in view.deployments:
        raise InvalidInput(field="scale.deployment", rule="exists", message=f"there is no deployment {deployment!r}")
    _known_regions(view, cells, "scale.regions")
    return _predict(view, Scale(deployment, cells), now)


def plan_lost_region(*, region: str, now: datetime) -> Forecast:
    """What the loss of every machine of a region would do.

    Raises:
        InvalidInput: an unknown region.
    """
    view = fleet_view(now=now)
    _known_regions(view, {region: 0}, "lose_region")
    return _predict(view, LoseRegion(region), now)


def plan_onwards(*, view: FleetView, deployment: str, now: datetime) -> Forecast:
    """What would become of a deployment from this snapshot on, which may say what is only considered.

    Raises:
        KeyError: the snapshot has no such deployment.
    """
    return _predict(view, Scale(deployment, dict(view.deployments[deployment].cells_wanted)), now)


def _known_regions(view: FleetView, regions: Mapping[str, Any], field: str) -> None:
    if unknown := sorted(set(regions) - set(view.regions)):
        known = ", ".join(Region.objects.order_by("name").values_list("name", flat=True)) or "none"
        raise InvalidInput(field=field, rule="exists", message=f"there is no region {unknown[0]!r}; there are: {known}")


def _usual(view: FleetView, deployment: str) -> float:
    """A new version is taken to load as long as the one that it replaces."""
    return typical_load_s(view)[view.deployments[deployment].version]


def _predict(view: FleetView, change: Change, now: datetime, more: Mapping[str, float] | None = None) -> Forecast:
    return predict(view, change, now, load_s={**typical_load_s(view), **(more or {})})
