"""Model versions as the fleet uses them: which ones machines of a type can serve, and who uses one."""

from collections.abc import Mapping

from django.db.models import Q

from fleet.models import Cell, Deployment, InstanceType, Rollout
from fleet.planning.states import CellState
from fleet.selectors.rollout import ACTIVE
from kernel.refusals import InvalidInput
from models_registry.models import ModelVersion, VersionState
from models_registry.planning.engine_arguments import check_engine_options, render_engine_plan
from models_registry.planning.instance_types import INSTANCE_TYPES, InstanceShape
from models_registry.planning.lifecycle import may_be_rolled_out
from models_registry.planning.version_spec import InvalidVersion
from models_registry.selectors.engine_allowance import engine_allowances
from models_registry.selectors.model import version_stated

NAMED = 5
"""Uses that are named before the rest is counted."""


def version_fit(
    reference: str, kind: InstanceType, *, allow_unreleased: bool, field: str, model: str = ""
) -> ModelVersion:
    """The version that `model@version` names, if a cell of it can be made there. `field`: what a refusal speaks of.

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
        check_engine_options(spec, kind.pk)
        render_engine_plan(spec, kind.shape())
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


def instance_shapes() -> Mapping[str, InstanceShape]:
    """The fleet's instance types, and the public ones that it has no row of."""
    return {**INSTANCE_TYPES, **{row.name: row.shape() for row in InstanceType.objects.all()}}
