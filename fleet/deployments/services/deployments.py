"""Creates, changes, scales and deletes deployments, with approval where a rule requires it. Each change and its event
share a transaction. Never changes cells: the reconciler does."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.models import ScalingState
from fleet.autoscaling.planning.policy import (
    CELLS_MOST,
    CellPools,
    CellRange,
    Cells,
    InvalidScaling,
    ScalingPolicy,
    cells_as_json,
    parse_cells,
    parse_scaling_policy,
    scaling_policy_as_json,
)
from fleet.capacity.planning.pools import InvalidMarkets, parse_markets, stored
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import (
    InvalidObjective,
    InvalidPolicy,
    UpdatePolicy,
    emptied_regions,
    parse_objective,
    parse_policy,
    policy_as_json,
)
from fleet.deployments.selectors import check_names_free, shapes_of, version_fit
from fleet.deployments.services.instance_types import (
    ByType,
    by_type_set,
    check_planned_roles,
    check_roles,
    instance_types_changed,
    instance_types_named,
)
from fleet.machines.planner import provider_limits
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import Region
from fleet.rollouts.selectors import ACTIVE
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.versions.services.drafts import version_lock

EVACUATE_RULE = "evacuate-region"
"""Approval rule for everything that empties a region: its evacuation, fixed shares, and scaling it down."""


def deployment_create(
    *,
    name: str,
    model_version: str,
    instance_types: Sequence[str],
    cells: Mapping[str, Cells],
    actor: str,
    now: datetime,
    allow_unreleased: bool = False,
    **columns: Any,
) -> Deployment:
    """Creates a deployment of a model version (`model@version`) on these instance types. `columns` are from
    `Deployment.SETTABLE`; `by_type` is per region. Raises InvalidInput for an unknown version, instance type, region or
    market, a version that does not fit, an invalid policy or range, markets for a region without any, roles that the
    version or the instance types do not support, or the name of a deployment, model or adapter that is in use. Raises
    Conflict if the name is taken, or the version was retired meanwhile."""
    kinds = [kind.shape() for kind in instance_types_named(instance_types)]
    version = version_fit(model_version, kinds, allow_unreleased=allow_unreleased, field="model_version")
    _check_cells(cells)
    check_roles(version, kinds, cells.values())
    by_type: ByType = columns.pop("by_type", {})
    if "update_policy" in columns:
        columns["update_policy"] = _stored_policy(columns["update_policy"], UpdatePolicy())
    _check_objective(columns.get("slo", {}), columns.get("serving_class", ServingClass.REALTIME))
    if "scaling" in columns:
        columns["scaling"] = _stored_scaling(columns["scaling"], ScalingPolicy())
    if "markets" in columns:
        columns["markets"] = _stored_markets(columns["markets"])
        _check_regions_have_markets(columns["markets"], _minimum_by_region(cells))
    try:
        with transaction.atomic():
            version_lock(version_id=version.pk, allow_unreleased=allow_unreleased)
            check_names_free(name, version, field="name")
            deployment = Deployment.objects.create(
                name=name, model_version=version, instance_types=list(instance_types), created_at=now, **columns
            )
            DeploymentRegion.objects.bulk_create(
                DeploymentRegion(
                    deployment=deployment, region_id=region, **_target_columns(stated, DeploymentRegion(cells=0))
                )
                for region, stated in sorted(cells.items())
            )
            by_type_set(deployment, by_type)
            _record_change(deployment, "created", f"{name} created by {actor}: {version.reference}", actor, now)
    except IntegrityError:
        raise Conflict(f"a deployment {name!r} exists already") from None
    return deployment


def deployment_change(*, name: str, actor: str, now: datetime, **columns: Any) -> Deployment:
    """Changes the given columns of `Deployment.SETTABLE`. Missing keys of the update policy, SLO or scaling stay.
    Raises InvalidInput for an invalid policy, an unknown market, markets for a region without any, unsuitable instance
    types, or cells on a type that is not listed. Raises Conflict if it has cells on an instance type that is no longer
    listed."""
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=name)
        if "update_policy" in columns:
            columns["update_policy"] = _stored_policy(columns["update_policy"], deployment.policy())
        if "scaling" in columns:
            columns["scaling"] = _stored_scaling(columns["scaling"], deployment.scaling_policy())
            check_planned_roles(deployment, columns["scaling"])
        if "slo" in columns:
            columns["slo"] = {**deployment.slo, **columns["slo"]}
            _check_objective(columns["slo"], columns.get("serving_class", deployment.serving_class))
        if "markets" in columns:
            columns["markets"] = _stored_markets(columns["markets"])
            _check_regions_have_markets(columns["markets"], _cells_of(deployment))
        if "instance_types" in columns:
            columns["instance_types"] = instance_types_changed(deployment, columns["instance_types"])
        by_type = columns.pop("by_type", {})
        changed = {column: value for column, value in columns.items() if getattr(deployment, column) != value}
        for column, value in changed.items():
            setattr(deployment, column, value)
        if changed:
            deployment.save(update_fields=list(changed))
        changed |= {f"by_type.{region}": wanted for region, wanted in by_type_set(deployment, by_type).items()}
        if changed:
            message = f"{name} changed by {actor}: {', '.join(sorted(changed))}"
            _record_change(deployment, "changed", message, actor, now, **changed)
    return deployment


def deployment_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a deployment, its stopped cells, its ended rollouts and its traffic settings. Raises Conflict if it has
    target cells, live cells or an active rollout; the text names them."""
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=name)
        if blockers := _deletion_blockers(deployment):
            raise Conflict(
                f"{name} cannot be deleted while it has {'; '.join(blockers)}. Scale it to 0 and wait for its cells"
            )
        deployment.rollouts.all().delete()
        deployment.cells.all().delete()
        _record_change(deployment, "deleted", f"{name} deleted by {actor}", actor, now)
        deployment.delete()


def _deletion_blockers(deployment: Deployment) -> list[str]:
    wanted = deployment.regions.filter(cells__gt=0).values_list("region_id", "cells")
    live = deployment.cells.exclude(state=CellState.STOPPED.value).order_by("id").values_list("id", flat=True)
    rollouts = deployment.rollouts.filter(state__in=ACTIVE).values_list("pk", flat=True)
    blockers = [f"{count} target cells in {region}" for region, count in wanted]
    blockers += [f"{len(live)} live cells, such as {live[0]}"] if live else []
    return blockers + [f"active rollout {number}" for number in rollouts]


def _stored_policy(stated: Mapping[str, Any], base: UpdatePolicy) -> dict[str, Any]:
    """The stored form: only what differs from the defaults."""
    try:
        policy = parse_policy(stated, base)
    except InvalidPolicy as wrong:
        raise InvalidInput(field=f"update_policy.{wrong.field}", rule="policy", message=str(wrong)) from None
    defaults = policy_as_json(UpdatePolicy())
    return {key: value for key, value in policy_as_json(policy).items() if value != defaults[key]}


def _stored_scaling(stated: Mapping[str, Any], base: ScalingPolicy) -> dict[str, Any]:
    """The stored form: only what differs from the defaults."""
    try:
        policy = parse_scaling_policy(stated, base)
    except InvalidScaling as wrong:
        raise InvalidInput(field=f"scaling.{wrong.field}", rule="policy", message=str(wrong)) from None
    for window in policy.schedule:
        if window.region:
            _check_regions_exist([window.region], "scaling.schedule")
    defaults = scaling_policy_as_json(ScalingPolicy())
    return {key: value for key, value in scaling_policy_as_json(policy).items() if value != defaults[key]}


def _check_objective(stated: Mapping[str, Any], serving_class: str) -> None:
    try:
        parse_objective(stated, ServingClass(serving_class))
    except InvalidObjective as wrong:
        raise InvalidInput(field=f"slo.{wrong.field}", rule="objective", message=str(wrong)) from None


def _stored_markets(stated: Sequence[str]) -> list[str]:
    try:
        return stored(parse_markets(stated))
    except InvalidMarkets as wrong:
        raise InvalidInput(field="markets", rule="market", message=str(wrong)) from None


def _cells_of(deployment: Deployment) -> dict[str, int]:
    return dict(DeploymentRegion.objects.filter(deployment=deployment).values_list("region_id", "cells"))


def _check_regions_have_markets(markets: Sequence[str], cells: Mapping[str, int]) -> None:
    """A deployment with markets would wait forever in a region without any."""
    if not markets:
        return
    wanted = [region for region, count in cells.items() if count]
    for region, provider in Region.objects.filter(name__in=wanted).order_by("name").values_list("name", "provider"):
        if not provider_limits(provider).has_markets:
            message = (
                f"provider {provider} of {region} has no markets, so no machine there matches "
                f"markets {', '.join(markets)}; remove the markets, or the cells in {region}"
            )
            raise InvalidInput(field="markets", rule="provider", message=message)


def _record_change(deployment: Deployment, what: str, message: str, actor: str, now: datetime, **detail: Any) -> None:
    event_record(
        kind=f"deployment.{what}",
        message=message,
        tone=Tone.MOVING,
        now=now,
        actor=actor,
        deployment=deployment.name,
        detail=detail,
    )
    live.push("deployments", deployment.name)
    wake_ups.send("fleet.reconcile")


def cells_stated(places: Iterable[Mapping[str, Any]]) -> dict[str, Cells]:
    """Region -> cells as stated in requests and documents. Raises InvalidInput if they are neither a number, a range
    nor cells by role."""
    try:
        return {place["region"]: parse_cells(place["cells"], f"regions.{place['region']}.cells") for place in places}
    except InvalidScaling as wrong:
        raise InvalidInput(field=wrong.field, rule="cells", message=str(wrong)) from None


@transaction.atomic
def deployment_scale(*, name: str, cells: Mapping[str, Cells], actor: str, now: datetime) -> bool:
    """Sets the number of cells of the named regions, or the range for the autoscaler; a number ends a range. Returns
    False and writes nothing if nothing changes. Raises InvalidInput for an unknown region, a number outside 0 …
    `CELLS_MOST`, or a region without the deployment's markets."""
    deployment = Deployment.objects.select_for_update().get(name=name)
    _check_cells(cells)
    check_roles(deployment.model_version, shapes_of(deployment), cells.values())
    _check_regions_have_markets(deployment.markets, _minimum_by_region(cells))
    before = {place.region_id: place for place in DeploymentRegion.objects.filter(deployment=deployment)}
    nothing = DeploymentRegion(cells=0)
    changed = False
    for region, stated in sorted(cells.items()):
        current = before.get(region, nothing)
        if region in before and stated == current.stated(plans_roles=deployment.plans_roles):
            continue
        changed = True
        columns = _target_columns(stated, current, keeps_roles=deployment.plans_roles)
        DeploymentRegion.objects.update_or_create(deployment=deployment, region_id=region, defaults=columns)
        count = columns["cells"]
        if not isinstance(stated, CellRange):
            ScalingState.objects.filter(place__deployment=deployment, place__region=region).delete()
        event_record(
            kind="deployment.scaled",
            message=f"{name} in {region} from {current.cells} to {count} cells{_stated_text(current, stated)}, "
            f"requested by {actor}",
            tone=Tone.MOVING,
            now=now,
            actor=actor,
            region=region,
            deployment=name,
            detail={"was": current.cells, "cells": count, **_stated_detail(stated)},
        )
    if changed:
        announce_scaled(name)
    return changed


def announce_scaled(name: str) -> None:
    """Refreshes pages and wakes the reconciler after the commit."""
    live.push("deployments", name)
    wake_ups.send("fleet.reconcile")


def _target_columns(stated: Cells, current: DeploymentRegion, *, keeps_roles: bool = False) -> dict[str, int | None]:
    """Columns of a row. A range keeps the current number if it is within. A target without roles ends them unless they
    are planned."""
    no_range = {"cells_min": None, "cells_max": None}
    if isinstance(stated, CellPools):
        return {"cells": stated.total, "prefill": stated.prefill, "decode": stated.decode, **no_range}
    roles: dict[str, int | None] = {} if keeps_roles else {"prefill": 0, "decode": 0}
    if isinstance(stated, CellRange):
        return {"cells": stated.clamped(current.cells), "cells_min": stated.min, "cells_max": stated.max, **roles}
    return {"cells": stated, **no_range, **roles}


def _stated_text(current: DeploymentRegion, stated: Cells) -> str:
    if isinstance(stated, CellRange):
        return f", autoscaled within {stated}"
    if isinstance(stated, CellPools):
        return f", {stated}"
    return f", no longer autoscaled within {current.range}" if current.range else ""


def _stated_detail(stated: Cells) -> dict[str, Any]:
    if isinstance(stated, int):
        return {}
    return {"range" if isinstance(stated, CellRange) else "pools": cells_as_json(stated)}


def _minimum_by_region(cells: Mapping[str, Cells]) -> dict[str, int]:
    return {region: _minimum_cells(stated) for region, stated in cells.items()}


def _minimum_cells(stated: Cells) -> int:
    if isinstance(stated, int):
        return stated
    return stated.min if isinstance(stated, CellRange) else stated.total


@transaction.atomic
def deployment_scale_or_request(*, name: str, cells: Mapping[str, Cells], actor: str, now: datetime) -> bool | Approval:
    """Scales, or requests approval if that empties a region and evacuations require it. Raises InvalidInput as
    `deployment_scale` does."""
    _check_cells(cells)
    deployment = Deployment.objects.select_for_update().get(name=name)
    before = _cells_of(deployment)
    after = {
        region: _target_columns(stated, DeploymentRegion(cells=before.get(region, 0)))["cells"] or 0
        for region, stated in cells.items()
    }
    emptied = emptied_regions(before, after)
    if not emptied or not requires_approval(EVACUATE_RULE):
        return deployment_scale(name=name, cells=cells, actor=actor, now=now)
    summary = f"scale {name} to {', '.join(f'{stated} cells in {region}' for region, stated in sorted(cells.items()))}"
    arguments = {"name": name, "cells": {region: cells_as_json(stated) for region, stated in cells.items()}}
    request = ApprovalRequest(summary, arguments, actor, now, "", name, emptied[0])
    return approval_request(EMPTY_BY_SCALING.name, request)


def _perform_scale(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    name = arguments["name"]
    cells = {region: parse_cells(stated, "cells") for region, stated in arguments["cells"].items()}
    if not Deployment.objects.filter(name=name).exists():
        raise Conflict(f"deployment {name!r} was deleted")
    return "scaled" if deployment_scale(name=name, cells=cells, actor=actor, now=now) else "nothing to change"


EMPTY_BY_SCALING = FleetAction("empty-by-scaling", "Scale a region down to nothing", _perform_scale, settable=False)


def _check_cells(cells: Mapping[str, Cells]) -> None:
    _check_regions_exist(cells, "regions")
    for region, stated in cells.items():
        if isinstance(stated, int) and not 0 <= stated <= CELLS_MOST:
            raise InvalidInput(
                field="regions",
                rule="range",
                message=f"{stated} cells in {region}; the number must be from 0 to {CELLS_MOST}",
            )


def _check_regions_exist(regions: Iterable[str], field: str) -> None:
    known = set(Region.objects.values_list("name", flat=True))
    for region in regions:
        if region not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InvalidInput(field=field, rule="exists", message=f"unknown region {region!r}; known: {names}")
