"""The names that deployments are asked for by, and the check that a version brings none that is taken."""

from collections.abc import Iterator

from fleet.models import Cell, Deployment, Rollout
from fleet.planning.served_names import ServedName, name_collision
from fleet.planning.states import CellState
from fleet.selectors.rollout import ACTIVE
from kernel.refusals import InvalidInput
from models_registry.models import ModelVersion


def check_names_free(deployment: str, version: ModelVersion, *, field: str) -> None:
    """Check the names that a deployment has with this version. Of two that come at one time both may pass: routing then
    gives the name to one (`traffic.planning.routing.resolve_adapters`).

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
