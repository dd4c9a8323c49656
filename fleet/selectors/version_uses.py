"""What the fleet tells the model registry: who uses a version, and which machines there are."""

from collections.abc import Mapping

from django.db.models import Q

from fleet.models import Cell, Deployment, InstanceType, Rollout
from fleet.planning.states import CellState
from fleet.selectors.rollout import ACTIVE
from models_registry.planning.instance_types import INSTANCE_TYPES, InstanceShape

NAMED = 5
"""Uses that are named before the rest is counted."""


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


def machines_known() -> Mapping[str, InstanceShape]:
    """The fleet's instance types, and the public ones that it has no row of."""
    return {**INSTANCE_TYPES, **{row.name: row.shape() for row in InstanceType.objects.all()}}
