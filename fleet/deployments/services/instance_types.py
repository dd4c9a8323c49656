"""Instance types, as requests name them.

On which instance types a deployment's cells may be, how many of them a person wants on which, and whether they can
have roles there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.autoscaling.planning.policy import CellPools, Cells, RolesBy
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import roles_objection, shapes_of, version_fit
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import InstanceType
from fleet.rollouts.selectors import ACTIVE
from kernel.refusals import Conflict, InvalidInput
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.machines import InstanceShape


def instance_type_named(name: str) -> InstanceType:
    """The instance type that a request names.

    Raises:
        InvalidInput: there is none; it says which there are.
    """
    kind = InstanceType.objects.filter(name=name).first()
    if kind is None:
        raise _unknown(name, "instance_type")
    return kind


def instance_types_named(names: Sequence[str]) -> list[InstanceType]:
    """The instance types that a request lists, in its order.

    Raises:
        InvalidInput: none, one twice, or one that there is not.
    """
    if not names or len(set(names)) < len(names):
        message = "names one twice" if names else "names none; name the ones that its cells may be on, the first first"
        raise InvalidInput(field="instance_types", rule="list", message=message)
    found = {kind.name: kind for kind in InstanceType.objects.filter(name__in=names)}
    if missing := [name for name in names if name not in found]:
        raise _unknown(missing[0], "instance_types")
    return [found[name] for name in names]


def _unknown(name: str, field: str) -> InvalidInput:
    there = ", ".join(InstanceType.objects.values_list("name", flat=True)) or "none"
    return InvalidInput(field=field, rule="exists", message=f"there is no instance type {name!r}; there are: {there}")


ByType = Mapping[str, Mapping[str, int]]
"""Region -> instance type -> cells that should be on it."""


def instance_types_changed(deployment: Deployment, names: Sequence[str]) -> list[str]:
    """Check another list of types for a deployment that is there, and forget what was stated of one that is gone.

    Raises:
        InvalidInput: an unknown type, one that a version of it cannot be on, or several where cells have roles.
        Conflict: it has cells on one that is no longer listed, or wants some there.
    """
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
            f"{deployment.name} has cells on {kind}, such as {held.id}; want 0 there first, in by_type of each region"
        )
    for place in deployment.regions.all():
        stated = {kind: count for kind, count in place.by_type.items() if kind in names}
        for kind, count in place.by_type.items():
            if count and kind not in stated:
                raise Conflict(f"{place.region_id} wants {count} cells on {kind}; want 0 there first, in by_type")
        if stated != place.by_type:
            DeploymentRegion.objects.filter(pk=place.pk).update(by_type=stated)
    return list(names)


def check_by_type(by_type: ByType, instance_types: Sequence[str]) -> None:
    """Check that cells are wanted on listed types alone.

    Raises:
        InvalidInput: on another one, or where there is no choice.
    """
    for region, wanted in by_type.items():
        for kind in wanted:
            if kind not in instance_types:
                message = f"{kind!r} is none of its instance types, which are: {', '.join(instance_types)}"
                raise InvalidInput(field=f"by_type.{region}", rule="listed", message=message)
        if wanted and not any(count for count in wanted.values()) and set(wanted) == set(instance_types):
            message = "wants no cell on any of its instance types; leave one of them out, or scale the region to 0"
            raise InvalidInput(field=f"by_type.{region}", rule="some", message=message)


def by_type_set(deployment: Deployment, by_type: ByType) -> dict[str, dict[str, int]]:
    """Write how many cells of the named regions should be on which types. Returns what changed.

    Raises:
        InvalidInput: a type that is not listed, or a region in which it has no cells to state this of.
    """
    check_by_type(by_type, deployment.instance_types)
    places = {place.region_id: place for place in DeploymentRegion.objects.filter(deployment=deployment)}
    changed: dict[str, dict[str, int]] = {}
    for region, wanted in sorted(by_type.items()):
        place = places.get(region)
        if place is None:
            there = ", ".join(sorted(places)) or "none"
            message = f"it has no cells in {region!r}; its regions are: {there}"
            raise InvalidInput(field=f"by_type.{region}", rule="exists", message=message)
        if dict(wanted) != place.by_type:
            place.by_type = changed[region] = dict(wanted)
            place.save(update_fields=["by_type"])
    return changed


def check_roles(version: ModelVersion, kinds: Sequence[InstanceShape], stated: Iterable[Cells]) -> None:
    """Cells by role take a version that can hand prompts over on these machines.

    Raises:
        InvalidInput: it cannot.
    """
    if not any(isinstance(one, CellPools) and one.prefill for one in stated):
        return
    if objection := roles_objection(version, kinds):
        raise InvalidInput(field="regions", rule="roles", message=objection)


def check_planned_roles(deployment: Deployment, scaling: Mapping[str, Any]) -> None:
    """The same for roles that are planned.

    Raises:
        InvalidInput: it cannot.
    """
    if scaling.get("roles") != RolesBy.PLANNED.value:
        return
    if objection := roles_objection(deployment.model_version, shapes_of(deployment)):
        raise InvalidInput(field="scaling.roles", rule="roles", message=objection)
