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
from fleet.chains.selectors import chains_of_planner
from fleet.chains.services import chain_check, chains_check
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
from kernel.events import events_record
from kernel.models import Event
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
            chain_check(name, columns.get("chain", {}), _minimum_by_region(cells))
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
    return deployments_change(changes={name: columns}, actor=actor, now=now)[name]


@transaction.atomic
def deployments_change(*, changes: Mapping[str, Mapping[str, Any]], actor: str, now: datetime) -> dict[str, Deployment]:
    """As `deployment_change` for several, by name. Three queries, and more for each with other instance types, markets,
    cells by type, or windows of a region."""
    rows = _locked(changes)
    fields: set[str] = set()
    events: list[Event] = []
    for name, columns in changes.items():
        deployment, by_type = rows[name], columns.get("by_type", {})
        stated = _valid_columns(deployment, {key: value for key, value in columns.items() if key != "by_type"})
        changed = {column: value for column, value in stated.items() if getattr(deployment, column) != value}
        for column, value in changed.items():
            setattr(deployment, column, value)
        fields |= changed.keys()
        changed |= {f"by_type.{region}": wanted for region, wanted in by_type_set(deployment, by_type).items()}
        if changed:
            message = f"{name} changed by {actor}: {', '.join(sorted(changed))}"
            events.append(_event(deployment, "changed", message, actor, now, **changed))
    if fields:
        Deployment.objects.bulk_update(rows.values(), sorted(fields))
    if "chain" in fields:  # two of these changes may close a cycle
        chains_check({name: row.chain["planner"] for name, row in rows.items() if row.chain})
    _record(events)
    return rows


def _locked(names: Iterable[str]) -> dict[str, Deployment]:
    """The deployments by name, locked in one order. Raises Deployment.DoesNotExist for an unknown one."""
    wanted = list(names)
    rows = {row.name: row for row in Deployment.objects.select_for_update().filter(name__in=wanted).order_by("name")}
    if unknown := [name for name in wanted if name not in rows]:
        raise Deployment.DoesNotExist(f"there is no deployment {unknown[0]!r}")
    return rows


def _valid_columns(deployment: Deployment, columns: dict[str, Any]) -> dict[str, Any]:
    """The columns as they are stored. Raises as `deployment_change`."""
    if "update_policy" in columns:
        columns["update_policy"] = _stored_policy(columns["update_policy"], deployment.policy())
    if "scaling" in columns:
        columns["scaling"] = _stored_scaling(columns["scaling"], deployment.scaling_policy())
        check_planned_roles(deployment, columns["scaling"])
    if "slo" in columns:
        columns["slo"] = {**deployment.slo, **columns["slo"]}
        _check_objective(columns["slo"], columns.get("serving_class", deployment.serving_class))
    if "chain" in columns:
        chain_check(deployment.name, columns["chain"], _cells_of([deployment.name])[deployment.name])
    if "markets" in columns:
        columns["markets"] = _stored_markets(columns["markets"])
        _check_regions_have_markets(columns["markets"], _cells_of([deployment.name])[deployment.name])
    if "instance_types" in columns:
        columns["instance_types"] = instance_types_changed(deployment, columns["instance_types"])
    return columns


def deployment_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a deployment, its stopped cells, its ended rollouts and its traffic settings. Raises Conflict if it has
    target cells, live cells or an active rollout, or plans requests of another deployment; the text names them."""
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=name)
        if planned := chains_of_planner(name):
            raise Conflict(f"{name} plans the requests of {', '.join(planned[:3])}: change their chain first")
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


def _cells_of(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Deployment -> region -> target cells."""
    found: dict[str, dict[str, int]] = {name: {} for name in names}
    rows = DeploymentRegion.objects.filter(deployment__in=found)
    for name, region, cells in rows.values_list("deployment_id", "region_id", "cells"):
        found[name][region] = cells
    return found


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


def _record_change(deployment: Deployment, what: str, message: str, actor: str, now: datetime) -> None:
    _record([_event(deployment, what, message, actor, now)])


def _event(deployment: Deployment, what: str, message: str, actor: str, now: datetime, **detail: Any) -> Event:
    return Event(
        at=now,
        kind=f"deployment.{what}",
        tone=Tone.MOVING,
        message=message,
        actor=actor,
        deployment=deployment.name,
        detail=detail,
    )


def _record(events: Sequence[Event]) -> None:
    """Records the events of changes, refreshes pages and wakes the reconciler after the commit."""
    if not events:
        return
    events_record(events)
    for name in dict.fromkeys(event.deployment for event in events):
        live.push("deployments", name)
    wake_ups.send("fleet.reconcile")


def cells_stated(places: Iterable[Mapping[str, Any]]) -> dict[str, Cells]:
    """Region -> cells as stated in requests and documents. Raises InvalidInput if they are neither a number, a range
    nor cells by role."""
    try:
        return {place["region"]: parse_cells(place["cells"], f"regions.{place['region']}.cells") for place in places}
    except InvalidScaling as wrong:
        raise InvalidInput(field=wrong.field, rule="cells", message=str(wrong)) from None


def deployment_scale(*, name: str, cells: Mapping[str, Cells], actor: str, now: datetime) -> bool:
    """Sets the number of cells of the named regions, or the range for the autoscaler; a number ends a range. Returns
    False and writes nothing if nothing changes. Raises InvalidInput for an unknown region, a number outside 0 …
    `CELLS_MOST`, or a region without the deployment's markets."""
    return name in deployments_scale(wanted={name: cells}, actor=actor, now=now)


@transaction.atomic
def deployments_scale(*, wanted: Mapping[str, Mapping[str, Cells]], actor: str, now: datetime) -> set[str]:
    """As `deployment_scale` for several, by name. Returns the changed ones. At most seven queries, and more for each
    with roles or markets."""
    rows = _locked(wanted)
    _check_cells(*wanted.values())
    places: dict[tuple[str, str], DeploymentRegion] = {
        (place.deployment_id, place.region_id): place for place in DeploymentRegion.objects.filter(deployment__in=rows)
    }
    new: list[DeploymentRegion] = []
    changed: list[DeploymentRegion] = []
    unranged: list[int] = []
    events: list[Event] = []
    for name, cells in wanted.items():
        deployment = rows[name]
        _check_row_roles(deployment, cells)
        _check_regions_have_markets(deployment.markets, _minimum_by_region(cells))
        for region, stated in sorted(cells.items()):
            place = places.get((name, region))
            if place is not None and stated == place.stated(plans_roles=deployment.plans_roles):
                continue
            current = place or DeploymentRegion(deployment=deployment, region_id=region, cells=0)
            columns = _target_columns(stated, current, keeps_roles=deployment.plans_roles)
            events.append(_scale_event(current, stated, columns["cells"] or 0, actor, now))
            for column, value in columns.items():
                setattr(current, column, value)
            (new if place is None else changed).append(current)
            unranged += [place.pk] if place is not None and not isinstance(stated, CellRange) else []
    if new:
        DeploymentRegion.objects.bulk_create(new)
    if changed:
        DeploymentRegion.objects.bulk_update(changed, ("cells", "cells_min", "cells_max", "prefill", "decode"))
    if unranged:
        ScalingState.objects.filter(place__in=unranged).delete()
    _record(events)
    return {event.deployment for event in events}


def _check_row_roles(deployment: Deployment, cells: Mapping[str, Cells]) -> None:
    if any(isinstance(one, CellPools) for one in cells.values()):
        check_roles(deployment.model_version, shapes_of(deployment), cells.values())


def _scale_event(current: DeploymentRegion, stated: Cells, count: int, actor: str, now: datetime) -> Event:
    """`current`: the place before the change."""
    name, region = current.deployment_id, current.region_id
    change = f"{name} in {region} from {current.cells} to {count} cells{_stated_text(current, stated)}"
    return Event(
        at=now,
        kind="deployment.scaled",
        tone=Tone.MOVING,
        message=f"{change}, requested by {actor}",
        actor=actor,
        region=region,
        deployment=name,
        detail={"was": current.cells, "cells": count, **_stated_detail(stated)},
    )


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


def deployment_scale_or_request(*, name: str, cells: Mapping[str, Cells], actor: str, now: datetime) -> bool | Approval:
    """Scales, or requests approval if that empties a region and evacuations require it. Raises InvalidInput as
    `deployment_scale` does."""
    return deployments_scale_or_request(wanted={name: cells}, actor=actor, now=now)[name]


@transaction.atomic
def deployments_scale_or_request(
    *, wanted: Mapping[str, Mapping[str, Cells]], actor: str, now: datetime
) -> dict[str, bool | Approval]:
    """As `deployment_scale_or_request` for several, by name."""
    _check_cells(*wanted.values())
    _locked(wanted)
    before = _cells_of(wanted)
    emptied = {name: _emptied(before[name], cells) for name, cells in wanted.items()}
    held = {name for name in wanted if emptied[name]}
    if held and not requires_approval(EVACUATE_RULE):
        held = set()
    scaled = deployments_scale(
        wanted={name: cells for name, cells in wanted.items() if name not in held}, actor=actor, now=now
    )
    return {
        name: _request_scale(name, cells, emptied[name][0], actor, now) if name in held else name in scaled
        for name, cells in wanted.items()
    }


def _emptied(before: Mapping[str, int], cells: Mapping[str, Cells]) -> Sequence[str]:
    after = {
        region: _target_columns(stated, DeploymentRegion(cells=before.get(region, 0)))["cells"] or 0
        for region, stated in cells.items()
    }
    return emptied_regions(before, after)


def _request_scale(name: str, cells: Mapping[str, Cells], emptied: str, actor: str, now: datetime) -> Approval:
    summary = f"scale {name} to {', '.join(f'{stated} cells in {region}' for region, stated in sorted(cells.items()))}"
    arguments = {"name": name, "cells": {region: cells_as_json(stated) for region, stated in cells.items()}}
    request = ApprovalRequest(summary, arguments, actor, now, "", name, emptied)
    return approval_request(EMPTY_BY_SCALING.name, request)


def _perform_scale(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    name = arguments["name"]
    cells = {region: parse_cells(stated, "cells") for region, stated in arguments["cells"].items()}
    if not Deployment.objects.filter(name=name).exists():
        raise Conflict(f"deployment {name!r} was deleted")
    return "scaled" if deployment_scale(name=name, cells=cells, actor=actor, now=now) else "nothing to change"


EMPTY_BY_SCALING = FleetAction("empty-by-scaling", "Scale a region down to nothing", _perform_scale, settable=False)


def _check_cells(*wanted: Mapping[str, Cells]) -> None:
    _check_regions_exist([region for cells in wanted for region in cells], "regions")
    for region, stated in (place for cells in wanted for place in cells.items()):
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
