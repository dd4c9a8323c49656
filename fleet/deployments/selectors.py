"""Reads what deployments serve: whether a version fits instance types, who uses a version, and the names that
applications use, with a check that none is taken. Never writes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.db.models import Q, QuerySet

from engine_agent.protocol.engine_builds import EngineBuild, NeededBuild
from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell
from fleet.clouds.models import CapacityPool
from fleet.deployments.models import Deployment
from fleet.deployments.planner import ServedName, name_collision
from fleet.machines.models import Invitation, Machine, MachineSlot
from fleet.machines.planner import INGRESS_TYPE
from fleet.nodes.models import Node
from fleet.quotas.models import Quota
from fleet.reconcile.planning.states import CellState, MachineState, NodeState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from kernel import clock
from kernel.refusals import InvalidInput
from models_registry.builds.selectors import builds_ordered
from models_registry.instance_types.models import InstanceType, Origin
from models_registry.instance_types.planner import CPU, WITHOUT_CHIPS, InstanceShape
from models_registry.instance_types.selectors import instance_shapes, types_of_versions
from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.planning.engine_arguments import check_engine_options, render_engine_plan
from models_registry.versions.planning.lifecycle import may_be_rolled_out
from models_registry.versions.planning.roles import apart_objection, role_spec
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.selectors import engine_allowances, version_stated

MAX_NAMED_USES = 5
"""Number of uses listed by name."""


def builds_needed(region: str, instance_type: str = "") -> tuple[NeededBuild, ...]:
    """The builds that a host of this type, or of any, needs for the deployments of a region. None for a make of
    accelerators if a deployment on it names no build: such a host may serve that one. Three queries."""
    there = Deployment.objects.filter(regions__region=region).select_related("model_version").order_by("name")
    rows = [row for row in there if not instance_type or instance_type in row.instance_types]
    shapes = instance_shapes({kind for row in rows for kind in row.instance_types})
    known = builds_ordered() if rows else {}
    named: dict[str, dict[str, EngineBuild]] = defaultdict(dict)
    for row in rows:
        for kind in [instance_type] if instance_type else row.instance_types:
            with suppress(InvalidVersion):
                build = row.model_version.spec().on(kind).engine_build
                make = CPU if shapes[kind].accelerator in WITHOUT_CHIPS else shapes[kind].vendor
                named[make][build] = known.get(build, EngineBuild(build))
    return tuple(
        NeededBuild(make, EngineBuild(name, facts=build.facts))
        for make, builds in sorted(named.items())
        for name, build in sorted(builds.items())
        if "" not in builds
    )


def version_fit(
    reference: str, kinds: Iterable[InstanceShape], *, allow_unreleased: bool, field: str, model: str = ""
) -> ModelVersion:
    """The version named `model@version`, if its cells can run on all of these instance types. `field`: the request's
    field for errors. Raises InvalidInput if it is unknown, of another model than `model`, not released, or does not
    fit."""

    def refuse(rule: str, message: str) -> InvalidInput:
        return InvalidInput(field=field, rule=rule, message=message)

    version = version_stated(reference, field=field)
    if model and version.model_id != model.partition("@")[0]:
        raise refuse("same_model", f"{reference} is not a version of {model}")
    if version.state == VersionState.RETIRED:
        raise refuse("released", f"{reference} is retired")
    if version.state == VersionState.DRAFT:
        raise refuse("released", f"{reference} is a draft; validate it first")
    if not may_be_rolled_out(VersionState(version.state), allow_unreleased=allow_unreleased):
        raise refuse("released", f"{reference} is {version.state}; release it, or set allow_unreleased")
    try:
        spec = version.spec(engine_allowances())
        for kind in kinds:
            check_engine_options(spec, kind.name)
            render_engine_plan(spec, kind)
    except InvalidVersion as wrong:
        raise refuse("runs_there", str(wrong)) from None
    return version


def version_uses(version_id: int) -> list[str]:
    """Deployments, active rollouts (I7: a rollback must stay possible) and live cells that use the version."""
    deployments = Deployment.objects.filter(model_version=version_id).values_list("name", flat=True)
    either = Q(from_version=version_id) | Q(to_version=version_id)
    rollouts = Rollout.objects.filter(either, state__in=ACTIVE).values_list("pk", "deployment_id")
    cells = Cell.objects.filter(model_version=version_id).exclude(state=CellState.STOPPED.value)
    uses = [f"deployment {name}" for name in deployments]
    uses += [f"rollout {number} of {deployment}" for number, deployment in rollouts.order_by("pk")]
    uses += [f"cell {name}" for name in cells.order_by("id").values_list("id", flat=True)]
    return uses if len(uses) <= MAX_NAMED_USES else [*uses[:MAX_NAMED_USES], f"{len(uses) - MAX_NAMED_USES} more"]


def instance_type_uses(name: str) -> list[str]:
    """Whatever of the fleet uses an instance type now: deployments, spares, pools, quotas, invitations, machines, nodes
    and cells."""
    live_nodes = Node.objects.filter(instance_type=name).exclude(state=NodeState.RETIRED.value)
    live_cells = Cell.objects.filter(instance_type=name).exclude(state=CellState.STOPPED.value)
    machines = Machine.objects.filter(instance_type=name).exclude(state=MachineState.GONE.value)
    invited = Invitation.objects.filter(instance_type=name, left__gt=0, withdrawn_at=None, expires_at__gt=clock.now())
    users: tuple[tuple[str, QuerySet[Any], str], ...] = (
        ("deployment", Deployment.objects.filter(instance_types__contains=[name]), "name"),
        ("spares of", Region.objects.filter(spares__has_key=name), "name"),
        ("pools in", CapacityPool.objects.filter(instance_type=name), "region_id"),
        ("quota", Quota.objects.filter(instance_type=name), "name"),
        ("invitation", invited, "prefix"),
        ("machine", machines, "id"),
        ("machine", MachineSlot.objects.filter(instance_type=name), "machine_id"),
        ("cell", live_cells, "id"),
        ("node", live_nodes, "id"),
    )
    uses = [
        f"{noun} {key}"
        for noun, rows, column in users
        for key in rows.order_by(column).values_list(column, flat=True).distinct()[: MAX_NAMED_USES + 1]
    ]
    return uses if len(uses) <= MAX_NAMED_USES else [*uses[:MAX_NAMED_USES], "more"]


def instance_types_wanted() -> set[str]:
    """The types whose machines the fleet may launch: those that versions, deployments, spares and pools name, those of
    ingresses, and those that operators added."""
    deployed = Deployment.objects.values_list("instance_types", flat=True)
    spared = Region.objects.values_list("spares", flat=True)
    own = InstanceType.objects.exclude(origin=Origin.SHIPPED)
    held = Q(pools__isnull=False) | Q(name=INGRESS_TYPE)
    return {
        *types_of_versions(),
        *(kind for kinds in (*deployed, *spared) for kind in kinds),
        *own.values_list("name", flat=True),
        *InstanceType.objects.filter(held).values_list("name", flat=True).distinct(),
    }


def concurrency_on(version: ModelVersion, instance_type: str) -> int:
    """Concurrent requests that a cell of the version on this type was tested for. Raises InvalidVersion if it does not
    cover this type."""
    return version.spec().on(instance_type).max_concurrency


def concurrency_by_type(version: ModelVersion) -> dict[tuple[str, str], int]:
    """(instance type, role) -> concurrent requests, for a version that differs by type. Types with invalid data are
    left out."""
    if not version.by_type:
        return {}
    spec, found = version.spec(), dict[tuple[str, str], int]()
    for kind in version.parallelism:
        with suppress(InvalidVersion):
            found |= {(kind, role.value): role_spec(spec, role, kind).max_concurrency for role in CellRole}
    return found


def engine_on(version: ModelVersion, instance_type: str) -> str:
    """Engine of its cells on this type, or the version's own if the type's data are invalid."""
    try:
        return version.spec().on(instance_type).engine
    except InvalidVersion:
        return version.engine


def shapes_of(deployment: Deployment) -> list[InstanceShape]:
    """Instance types of its cells, the preferred first."""
    by_name = instance_shapes(deployment.instance_types)
    return [by_name[name] for name in deployment.instance_types]


def roles_objection(version: ModelVersion, kinds: Sequence[InstanceShape]) -> str:
    """Why cells of a version cannot have roles on these instance types, or "". Prefill and decode cells exchange KV
    data, so all must be of one type."""
    if len(kinds) > 1:
        return f"cells with roles need a single instance type, but {len(kinds)} are listed"
    return apart_objection(version.spec(engine_allowances()), kinds[0])


def check_names_free(deployment: str, version: ModelVersion, *, field: str) -> None:
    """Checks the names that a deployment has with this version. Two concurrent requests may both pass; routing then
    gives the name to one (`traffic.routing.planning.tables.resolve_adapters`). Raises InvalidInput if a name is taken;
    the text names both."""
    wanted = [*_own_names(deployment, version), *_adapters(deployment, version)]
    if collision := name_collision(wanted, [*served_names(), *_own_names(deployment, version)]):
        raise InvalidInput(field=field, rule="distinct", message=collision)


def served_names() -> list[ServedName]:
    """Names in use: of each deployment and its model, and of adapters of its version, its active rollouts' versions and
    its cells' versions."""
    names = []
    for row in Deployment.objects.select_related("model_version"):
        names += [*_own_names(row.name, row.model_version), *_adapters(row.name, row.model_version)]
    for rollout in Rollout.objects.filter(state__in=ACTIVE).select_related("from_version", "to_version"):
        for version in (rollout.from_version, rollout.to_version):
            names += _adapters(rollout.deployment_id, version)
    live = Cell.objects.exclude(state=CellState.STOPPED.value).exclude(model_version__adapters=[])
    used = live.order_by().values_list("deployment_id", "model_version_id").distinct()
    versions = ModelVersion.objects.in_bulk({version for _, version in used})
    for deployment, version_id in used:
        names += _adapters(deployment, versions[version_id])
    return list(dict.fromkeys(names))


def _own_names(deployment: str, version: ModelVersion) -> list[ServedName]:
    return [ServedName(name, deployment) for name in dict.fromkeys((deployment, version.model_id))]


def _adapters(deployment: str, version: ModelVersion) -> Iterator[ServedName]:
    return (ServedName(name, deployment, version.reference) for name in version.adapter_names)
