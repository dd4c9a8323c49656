"""Changes what a deployment should be. The reconciler brings the fleet there."""

from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from controlplane.kernel import hints, live
from controlplane.kernel.events import event_record
from controlplane.kernel.refusals import InvalidInput
from controlplane.kernel.tones import Tone
from fleet.models import Deployment, DeploymentRegion, Region

CELLS_PER_REGION_MAX = 1000
"""Guards against a slip of the finger that would buy machines; the largest fleets we plan for have fewer."""


@transaction.atomic
def deployment_scale(*, name: str, cells: Mapping[str, int], actor: str, now: datetime) -> bool:
    """Set how many cells the named regions should have; other regions stay as they are.

    Returns False, and writes nothing, if that is what they have already.

    Raises:
        InvalidInput: an unknown region, or a number outside 0 … `CELLS_PER_REGION_MAX`.
    """
    deployment = Deployment.objects.select_for_update().get(name=name)
    _check(cells)
    before = dict(DeploymentRegion.objects.filter(deployment=deployment).values_list("region_id", "cells"))
    changed = {region: count for region, count in cells.items() if before.get(region) != count}
    for region, count in sorted(changed.items()):
        DeploymentRegion.objects.update_or_create(deployment=deployment, region_id=region, defaults={"cells": count})
        was = before.get(region, 0)
        event_record(
            kind="deployment.scaled",
            message=f"{name} in {region} from {was} to {count} cells, asked by {actor}",
            tone=Tone.MOVING,
            now=now,
            actor=actor,
            region=region,
            deployment=name,
            detail={"was": was, "cells": count},
        )
    if changed:
        live.push("deployments", name)
        hints.ring("fleet.reconcile")
    return bool(changed)


def _check(cells: Mapping[str, int]) -> None:
    known = set(Region.objects.values_list("name", flat=True))
    for region, count in cells.items():
        if region not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InvalidInput(
                field="regions", rule="exists", message=f"there is no region {region!r}; there are: {names}"
            )
        if not 0 <= count <= CELLS_PER_REGION_MAX:
            raise InvalidInput(
                field="regions",
                rule="range",
                message=f"{count} cells in {region}; the number must be from 0 to {CELLS_PER_REGION_MAX}",
            )
