"""Checks planners of deployments before they are stored: other deployments, in the same regions, without a cycle."""

from collections.abc import Mapping
from typing import Any

from django.db import connection

from fleet.chains.planner import InvalidChain, chain_cycle, parse_chain
from fleet.chains.selectors import planners_stated
from fleet.deployments.models import Deployment, DeploymentRegion
from kernel.refusals import InvalidInput

_CHAINS_LOCK = 0x53595F434841
"""Taken by every change of a chain ("SY_CHA"), because each is compared with all others."""


def chain_check(name: str, stated: Mapping[str, Any], cells: Mapping[str, int]) -> None:
    """`cells`: those of the deployment by region. Until the transaction ends, no other process changes a chain, so two
    changes cannot close a cycle. Raises InvalidInput."""
    try:
        chain = parse_chain(stated)
    except InvalidChain as wrong:
        raise InvalidInput(field=f"chain.{wrong.field}", rule="chain", message=str(wrong)) from None
    if chain is None:
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_CHAINS_LOCK])
    message = ""
    if chain.planner == name:
        message = f"{name} cannot plan its own requests: name another deployment"
    elif not Deployment.objects.filter(name=chain.planner).exists():
        message = f"there is no deployment {chain.planner[:96]!r} that could plan requests"
    elif away := sorted({region for region, count in cells.items() if count} - _regions_of(chain.planner)):
        message = (
            f"{chain.planner} has no cells in {', '.join(away)}, where {name} has some, so each request would cross "
            f"regions: scale it there first"
        )
    if message:
        raise InvalidInput(field="chain.planner", rule="planner", message=message)
    chains_check({name: chain.planner})


def chains_check(planners: Mapping[str, str]) -> None:
    """`planners`: those that change, which may be stored already. Raises InvalidInput if they close a cycle."""
    stated = planners_stated() | dict(planners)
    for name, planner in planners.items():
        if cycle := chain_cycle(name, planner, stated):
            message = f"deployments would plan each other's requests: {' → '.join(cycle)}"
            raise InvalidInput(field="chain.planner", rule="planner", message=message)


def _regions_of(deployment: str) -> set[str]:
    """Regions where it has target cells, or a range of them."""
    rows = DeploymentRegion.objects.filter(deployment=deployment).exclude(cells=0, cells_max__isnull=True)
    return set(rows.values_list("region_id", flat=True))
