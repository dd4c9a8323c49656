"""Checks the instance types of deployments: names in requests, cells per type, and whether cells can have roles.
Writes only `by_type`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.autoscaling.planning.policy import CellPools, Cells, RolesBy
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import roles_objection, shapes_of, version_fit
from fleet.reconcile.planning.states import CellState
from fleet.rollouts.selectors import ACTIVE
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.planner import InstanceShape
from models_registry.instance_types.services import instance_type_named
from models_registry.versions.models import ModelVersion


def instance_types_named(names: Sequence[str]) -> list[InstanceType]:
    """The instance types that a request lists, in its order. Raises InvalidInput if the list is empty, or has an
    unknown or repeated name."""
    if not names or len(set(names)) < len(names):
        message = "repeats a name" if names else "is empty; list the instance types of its cells, the preferred first"
        raise InvalidInput(field="instance_types", rule="list", message=message)
    return [instance_type_named(name, field="instance_types") for name in names]


ByType = Mapping[str, Mapping[str, int]]
"""Region -> instance type -> target cells on it."""


def instance_types_changed(deployment: Deployment, names: Sequence[str]) -> list[str]:
    """Checks a new list of types for an existing deployment. Removes `by_type` entries without cells of types that are
    no longer listed. Raises InvalidInput for an unknown type, one that does not fit a version in use, or several
    although cells have roles. Raises Conflict if it has cells, or target cells, on a type that is no longer listed."""
    kinds = [kind.shape() for kind in instance_types_named(names)]
    ends = {deployment.model_version.reference}
    for rollout in deployment.rollouts.filter(state__in=ACTIVE).select_related("from_version", "to_version"):
        ends |= {rollout.from_version.reference, rollout.to_version.reference}
    for reference in sorted(ends):
        version_fit(reference, kinds, allow_unreleased=True, field="instance_types")
    has_roles = deployment.plans_roles or deployment.regions.filter(prefill__gt=0).exists()
    if has_roles and (objection := roles_objection(deployment.model_version, kinds)):
        raise InvalidInput(field="instance_types", rule="roles", message=objection)
    cells = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    held = cells.exclude(instance_type__in=names).order_by("instance_type_id", "id").first()
    if held is not None:
        kind = held.instance_type_id
        raise Conflict(
            f"{deployment.name} has cells on {kind}, such as {held.id}; set 0 for it in by_type of each region first"
        )
    for place in deployment.regions.all():
        stated = {kind: count for kind, count in place.by_type.items() if kind in names}
        for kind, count in place.by_type.items():
            if count and kind not in stated:
                raise Conflict(
                    f"{place.region_id} has a target of {count} cells on {kind}; set 0 for it in by_type first"
                )
        if stated != place.by_type:
            DeploymentRegion.objects.filter(pk=place.pk).update(by_type=stated)
    return list(names)


def check_by_type(by_type: ByType, instance_types: Sequence[str]) -> None:
    """Raises InvalidInput for cells on a type that is not listed, or a choice of 0 cells everywhere."""
    for region, wanted in by_type.items():
        for kind in wanted:
            if kind not in instance_types:
                message = f"{kind!r} is not one of its instance types: {', '.join(instance_types)}"
                raise InvalidInput(field=f"by_type.{region}", rule="listed", message=message)
        if wanted and not any(count for count in wanted.values()) and set(wanted) == set(instance_types):
            message = "has 0 cells on every instance type; leave one out, or scale the region to 0"
            raise InvalidInput(field=f"by_type.{region}", rule="some", message=message)


def by_type_set(deployment: Deployment, by_type: ByType) -> dict[str, dict[str, int]]:
    """Sets the target cells per type of the named regions. Returns what changed. Raises InvalidInput for a type that is
    not listed, or a region that the deployment does not have."""
    if not by_type:
        return {}
    check_by_type(by_type, deployment.instance_types)
    places = {place.region_id: place for place in DeploymentRegion.objects.filter(deployment=deployment)}
    changed: dict[str, dict[str, int]] = {}
    for region, wanted in sorted(by_type.items()):
        place = places.get(region)
        if place is None:
            known = ", ".join(sorted(places)) or "none"
            message = f"the deployment is not in {region!r}; its regions: {known}"
            raise InvalidInput(field=f"by_type.{region}", rule="exists", message=message)
        if dict(wanted) != place.by_type:
            place.by_type = changed[region] = dict(wanted)
            place.save(update_fields=["by_type"])
    return changed


def check_roles(version: ModelVersion, kinds: Sequence[InstanceShape], stated: Iterable[Cells]) -> None:
    """Raises InvalidInput if the cells have roles, which the version or the instance types do not support."""
    if not any(isinstance(one, CellPools) and one.prefill for one in stated):
        return
    if objection := roles_objection(version, kinds):
        raise InvalidInput(field="regions", rule="roles", message=objection)


def check_planned_roles(deployment: Deployment, scaling: Mapping[str, Any]) -> None:
    """Raises InvalidInput if roles are to be planned, which the version or the instance types do not support."""
    if scaling.get("roles") != RolesBy.PLANNED.value:
        return
    if objection := roles_objection(deployment.model_version, shapes_of(deployment)):
        raise InvalidInput(field="scaling.roles", rule="roles", message=objection)
