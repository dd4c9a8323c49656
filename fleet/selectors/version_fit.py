"""Finds model versions that machines of a type can serve now. Changes nothing."""

from fleet.models import InstanceType
from kernel.refusals import InvalidInput
from models_registry.models import ModelVersion, VersionState
from models_registry.planning.engine_arguments import render_engine_plan
from models_registry.planning.lifecycle import may_be_rolled_out
from models_registry.planning.version_spec import InvalidVersion
from models_registry.selectors.model import version_by_reference


def version_fit(
    reference: str, kind: InstanceType, *, allow_unreleased: bool, field: str, model: str = ""
) -> ModelVersion:
    """The version that `model@version` names, if a cell of it can be made there. `field`: what a refusal speaks of.

    Raises:
        InvalidInput: unknown, of another model than `model` (its deployment's version), not released, or no fit.
    """

    def refuse(rule: str, message: str) -> InvalidInput:
        return InvalidInput(field=field, rule=rule, message=message)

    version = version_by_reference(ModelVersion.objects.all(), reference)
    if version is None:
        raise refuse("exists", f"there is no model version {reference!r}; it reads model@version")
    if model and version.model_id != model.partition("@")[0]:
        raise refuse("same_model", f"{reference} is another model than {model}")
    if version.state == VersionState.RETIRED:
        raise refuse("released", f"{reference} is retired")
    if version.state == VersionState.DRAFT:
        raise refuse("released", f"{reference} is a draft, which may still change; validate it first")
    if not may_be_rolled_out(VersionState(version.state), allow_unreleased=allow_unreleased):
        raise refuse("released", f"{reference} is {version.state}; release it, or say allow_unreleased")
    try:
        render_engine_plan(version.spec(), kind.shape())
    except InvalidVersion as wrong:
        raise refuse("runs_there", str(wrong)) from None
    return version
