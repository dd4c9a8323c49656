"""Model versions as the fleet uses them: which ones machines of a type can serve, and who uses one.

The names that deployments are asked for by, and the check that a version brings none that is taken.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from django.db.models import Q

from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.planner import ServedName, name_collision
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import InstanceType
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from kernel.refusals import InvalidInput
from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.planning.engine_arguments import check_engine_options, render_engine_plan
from models_registry.versions.planning.lifecycle import may_be_rolled_out
from models_registry.versions.planning.machines import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.roles import apart_objection, role_spec
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.selectors import engine_allowances, version_stated

NAMED = 5
"""Uses that are named before the rest is counted."""


def version_fit(
    reference: str, kinds: Iterable[InstanceShape], *, allow_unreleased: bool, field: str, model: str = ""
) -> ModelVersion:
    """The version that `model@version` names, if a cell of it can be made on all of these instance types. `field`: what
    a refusal speaks of.

    Raises:
        InvalidInput: unknown, of another model than `model` (its deployment's version), not released, or no fit.
    """

    def refuse(rule: str, message: str) -> InvalidInput:
        return InvalidInput(field=field, rule=rule, message=message)

    version = version_stated(reference, field=field)
    if model and version.model_id != model.partition("@")[0]:
        raise refuse("same_model", f"{reference} is another model than {model}")
    if version.state == VersionState.RETIRED:
        raise refuse("released", f"{reference} is retired")
    if version.state == VersionState.DRAFT:
        raise refuse("released", f"{reference} is a draft, which may still change; validate it first")
    if not may_be_rolled_out(VersionState(version.state), allow_unreleased=allow_unreleased):
        raise refuse("released", f"{reference} is {version.state}; release it, or say allow_unreleased")
    try:
        spec = version.spec(engine_allowances())
        for kind in kinds:
            check_engine_options(spec, kind.name)
            render_engine_plan(spec, kind)
    except InvalidVersion as wrong:
        raise refuse("runs_there", str(wrong)) from None
    return version


def version_uses(version_id: int) -> list[str]:
    """Deployments of the version, active rollouts from or to it (I7: a rollback stays reachable), and live cells."""
    deployments = Deployment.objects.filter(model_version=version_id).values_list("name", flat=True)
    either = Q(from_version=version_id) | Q(to_version=version_id)
    rollouts = Rollout.objects.filter(either, state__in=ACTIVE).values_list("pk", "deployment_id")
    cells = Cell.objects.filter(model_version=version_id).exclude(state=CellState.STOPPED.value)
    uses = [f"deployment {name}" for name in deployments]
    uses += [f"rollout {number} of {deployment}" for number, deployment in rollouts.order_by("pk")]
    uses += [f"cell {name}" for name in cells.order_by("id").values_list("id", flat=True)]
    return uses if len(uses) <= NAMED else [*uses[:NAMED], f"{len(uses) - NAMED} more"]


def fleet_shapes(names: Collection[str] | None = None) -> dict[str, InstanceShape]:
    """The fleet's instance types, all or these."""
    rows = InstanceType.objects.all() if names is None else InstanceType.objects.filter(name__in=names)
    return {row.name: row.shape() for row in rows}


def concurrency_on(version: ModelVersion, instance_type: str) -> int:
    """Requests at once that a cell of a version on this type was tested for.

    Raises:
        InvalidVersion: it says nothing of this type.
    """
    return version.spec().on(instance_type).max_concurrency


def concurrency_by_type(version: ModelVersion) -> dict[tuple[str, str], int]:
    """Instance type and role -> requests at once of such a cell, of a version that differs by type; types that it says
    nonsense of are left out."""
    if not version.by_type:
        return {}
    spec, found = version.spec(), dict[tuple[str, str], int]()
    for kind in version.parallelism:
        with suppress(InvalidVersion):
            found |= {(kind, role.value): role_spec(spec, role, kind).max_concurrency for role in CellRole}
    return found


def engine_on(version: ModelVersion, instance_type: str) -> str:
    """The engine of its cells on this type; the version's own where what it says of the type cannot be read."""
    try:
        return version.spec().on(instance_type).engine
    except InvalidVersion:
        return version.engine


def shapes_of(deployment: Deployment) -> list[InstanceShape]:
    """The instance types that its cells may be on, the preferred first."""
    there = fleet_shapes(deployment.instance_types)
    return [there[name] for name in deployment.instance_types]


def roles_objection(version: ModelVersion, kinds: Sequence[InstanceShape]) -> str:
    """Why cells of a version cannot have roles on these instance types; empty: they can. What one hands over another
    must be able to take, so they are all of one type."""
    if len(kinds) > 1:
        return f"cells by role are of one instance type, and there are {len(kinds)}: list one"
    return apart_objection(version.spec(engine_allowances()), kinds[0])


def instance_shapes() -> Mapping[str, InstanceShape]:
    """The fleet's instance types, and the public ones that it has no row of."""
    return {**INSTANCE_TYPES, **fleet_shapes()}


def check_names_free(deployment: str, version: ModelVersion, *, field: str) -> None:
    """Check the names that a deployment has with this version. Of two that come at one time both may pass: routing then
    gives the name to one (`traffic.routing.planning.tables.resolve_adapters`).

    Raises:
        InvalidInput: one is another's; the text names both.
    """
    wanted = [*_own_names(deployment, version), *_adapters(deployment, version)]
    if collision := name_collision(wanted, [*served_names(), *_own_names(deployment, version)]):
        raise InvalidInput(field=field, rule="distinct", message=collision)


def served_names() -> list[ServedName]:
    """Of every deployment: its own, its model's, and the adapters of its version, of versions that it is moved from or
    to, and of its cells."""
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
