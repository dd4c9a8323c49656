"""What a benchmark of a deployment measures, the ingress where its requests go in, and how a deployment comes to serve
what is to be measured. Registered with the model registry, which lies below."""

from django.conf import settings

from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.protocol.ports import hop_port
from engine_agent.protocol.states import CellRole
from fleet.models import Cell, CellMember, Deployment, Rollout
from fleet.planning.autoscaling.policy import (
    CellPools,
    CellRange,
    InvalidScaling,
    cells_as_json,
    cells_to_text,
    parse_cells,
)
from fleet.planning.fingerprints import stack_digest
from fleet.planning.role_split import RoleSplit, counted
from fleet.planning.states import CellState, RolloutState
from fleet.selectors.model_version import engine_on
from fleet.selectors.rollout import ACTIVE
from fleet.services.deployment import deployment_scale
from fleet.services.rollout_actions import rollout_propose, rollout_start
from kernel.refusals import Conflict, InvalidInput
from models_registry.planning.point_figures import Machines
from models_registry.planning.varied_columns import Cells, cells_count, split_text
from models_registry.selectors.benchmark_target import (
    BenchmarkTarget,
    Entrance,
    NoTarget,
    ServeRequest,
    Serving,
    ServingState,
)
from traffic.planning.key import playground_key_text
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.selectors.key import key_standing
from traffic.services.ingress_client import NoIdentity, own_identity

AT_ONCE = {
    "strategy": "in_place", "surge": 0, "canary": False, "waves_percent": [100], "canary_bake_s": 0.0, "bake_s": 0.0,
    "min_healthy_s": 5.0, "max_failed_cells": 1, "auto_rollback": False, "progress_deadline_s": 3600.0,
}  # fmt: skip
"""How a rollout goes of which nobody but the benchmark feels anything."""


def benchmark_describe(deployment: str, region: str) -> BenchmarkTarget:
    """The ready cells of a deployment in a region, which must be alike.

    Raises:
        NoTarget: there are none, the region is not said and there are several, or cells differ.
    """
    row = Deployment.objects.filter(pk=deployment).first()
    if row is None:
        raise NoTarget(f"there is no deployment {deployment!r}")
    region = region or _only_region(row)
    cells = list(
        Cell.objects.filter(deployment=row, region=region, state=CellState.READY.value)
        .select_related("model_version")
        .order_by("id")
    )
    if not cells:
        raise NoTarget(f"{deployment} has no ready cell in {region}")
    versions = sorted({cell.model_version.reference for cell in cells})
    if len(versions) > 1:
        raise NoTarget(f"{deployment} serves {' and '.join(versions)} in {region}; measure when its rollout has ended")
    engine = engine_on(cells[0].model_version, cells[0].instance_type_id)
    members = list(CellMember.objects.filter(cell__in=cells).select_related("node__report", "node__instance_type"))
    stacks = {stack_digest(member.node.fingerprint, engine) for member in members}
    kinds = {member.node.instance_type for member in members}
    if len(stacks) > 1 or len(kinds) > 1:
        what = "run different software (fingerprints differ)" if len(stacks) > 1 else "are of several instance types"
        raise NoTarget(f"the machines of {deployment} in {region} {what}, so a number would be of neither")
    kind = kinds.pop()
    there = counted(CellRole(cell.role) for cell in cells)
    return BenchmarkTarget(
        deployment=deployment,
        region=region,
        version_id=cells[0].model_version_id,
        instance_type=kind.name,
        fingerprint=stacks.pop()[:16],
        cells=tuple(f"{cell.pk}#{cell.generation}" for cell in cells),
        machines=Machines(
            len(cells), kind.chips * len(members), kind.watts * len(members), kind.price_per_hour * len(members)
        ),
        in_flight=sum(_in_flight(member) for member in members if member.rank == 0),
        regions=tuple(sorted(place.region_id for place in row.regions.all() if place.cells)),
        split=split_text(there.prefill, there.decode, there.mixed) if there.is_apart else "",
        stated=_stated(row, region),
    )


def _stated(row: Deployment, region: str) -> Cells | None:
    """What a person stated; None: the autoscaler or the planner of roles decides."""
    place = row.regions.filter(region=region).first()
    stated = place.stated(plans_roles=row.plans_roles) if place is not None else None
    return None if stated is None or row.plans_roles or isinstance(stated, CellRange) else cells_as_json(stated)


def benchmark_enter(deployment: str, region: str) -> Entrance:
    """The region's first ingress, by TLS with the control plane's certificate as other regions come in.

    Raises:
        NoTarget: the region has no ingress, or this host no certificate.
    """
    ingresses = ingress_addresses_by_region().get(region)
    if not ingresses:
        raise NoTarget(f"region {region} has no ingress")
    ingress = ingresses[0]
    headers = {"X-Switchyard-Class": "realtime"}
    if key_standing().required:
        headers["Authorization"] = f"Bearer {playground_key_text(settings.SECRET_KEY)}"
    if settings.PLAIN_LINKS:
        return Entrance(ingress.address, ingress.port, deployment, headers)
    try:
        fleet, context = own_identity().read()
    except NoIdentity as error:
        raise NoTarget(f"this host has no certificate of the control plane: {error}") from None
    name = IdentityName(fleet, IdentityKind.INGRESS, ingress.id).dns
    return Entrance(ingress.address, hop_port(ingress.port), deployment, headers, context, name)


def benchmark_serve(request: ServeRequest) -> Serving:
    """Roll a deployment that serves nobody out to a version, all cells at once and without bakes. A rollout of somebody
    else is waited for. Cells by role are made of mixed ones that serve it already: so a rollout never has to leave one
    that answers, and a version that cannot have its cells apart can follow one that had."""
    row = Deployment.objects.filter(pk=request.deployment).first()
    if row is None:
        return Serving(ServingState.REFUSED, f"there is no deployment {request.deployment!r} any more")
    rollout = Rollout.objects.filter(deployment=row).select_related("to_version").order_by("-id").first()
    if rollout is not None and rollout.state in ACTIVE:
        return _under_way(rollout, request)
    if rollout is not None and _has_failed(rollout, request):
        return Serving(ServingState.REFUSED, f"its rollout is {rollout.state}: {rollout.reason}")
    served = _served(row, request)
    if request.cells is not None:
        cells = request.cells if served is not None else cells_count(request.cells)
        if moving := _scaled(row, request, cells):
            return moving
    return served or _begun(row, request)


def _scaled(row: Deployment, request: ServeRequest, wanted: Cells) -> Serving | None:
    """Have its cells be these; None: they are, and all of them serve."""
    try:
        cells = parse_cells(wanted, "cells")
        scales = deployment_scale(name=row.name, cells={request.region: cells}, actor=request.actor, now=request.now)
    except (InvalidScaling, InvalidInput) as refused:
        return Serving(ServingState.REFUSED, str(refused))
    pools = cells if isinstance(cells, CellPools) else CellPools(0, 0, cells_count(wanted))
    there = Cell.objects.filter(deployment=row, region=request.region).exclude(state=CellState.STOPPED.value)
    roles = counted(CellRole(cell.role) for cell in there)
    is_ready = all(cell.state == CellState.READY for cell in there)
    if not scales and is_ready and roles == RoleSplit(pools.mixed, pools.prefill, pools.decode):
        return None
    return Serving(ServingState.MOVING, f"its cells become {cells_to_text(cells)}: {roles} are there")


def _has_failed(rollout: Rollout, request: ServeRequest) -> bool:
    is_ours = rollout.to_version.reference == request.version and rollout.created_at >= request.since
    return is_ours and rollout.state != RolloutState.SUCCEEDED


def _under_way(rollout: Rollout, request: ServeRequest) -> Serving:
    if rollout.to_version.reference != request.version:
        if rollout.actor != request.actor or rollout.state != RolloutState.PAUSED:
            return Serving(ServingState.MOVING, f"waits for {rollout}: {rollout.reason}")
        return _begun(rollout.deployment, request)
    if rollout.state == RolloutState.PAUSED:
        return Serving(ServingState.REFUSED, f"its rollout is paused: {rollout.reason}")
    return Serving(ServingState.MOVING, f"{rollout} to {request.version}: {rollout.reason}")


def _served(row: Deployment, request: ServeRequest) -> Serving | None:
    """Whether all its cells run the version and are ready; None: a rollout is needed."""
    cells = list(
        Cell.objects.filter(deployment=row).exclude(state=CellState.STOPPED.value).select_related("model_version")
    )
    if row.model_version.reference != request.version or any(
        cell.model_version.reference != request.version for cell in cells
    ):
        return None
    ready = sum(cell.state == CellState.READY for cell in cells)
    wanted = sum(place.cells_in_force for place in row.regions.all())
    if ready >= max(1, wanted):
        return Serving(ServingState.SERVES)
    return Serving(ServingState.MOVING, f"{ready} of {wanted} cells are ready")


def _begun(row: Deployment, request: ServeRequest) -> Serving:
    cells = max(1, sum(place.cells_in_force for place in row.regions.all()))
    policy = {**AT_ONCE, "max_unavailable": cells}
    try:
        proposal = rollout_propose(deployment=row.name, version=request.version, policy=policy, allow_unreleased=True)
        rollout = rollout_start(proposal=proposal, actor=request.actor, now=request.now, why="to be measured")
    except (InvalidInput, Conflict) as refused:
        return Serving(ServingState.REFUSED, str(refused))
    return Serving(ServingState.MOVING, f"{rollout} to {request.version} begins")


def _only_region(row: Deployment) -> str:
    regions = sorted(place.region_id for place in row.regions.all() if place.cells)
    if len(regions) != 1:
        listed = ", ".join(regions) or "no region"
        raise NoTarget(f"{row.name} has cells in {listed}; say which region to measure")
    return regions[0]


def _in_flight(member: CellMember) -> int:
    report = getattr(member.node, "report", None)
    return int((report.load or {}).get("in_flight", 0)) if report else 0
