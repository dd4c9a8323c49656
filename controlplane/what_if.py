"""Predicts the effect of a change from the live snapshot. Reads only; nothing that it predicts is done."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from fleet.autoscaling.planning.needs import NeedSample, PlaceLoad, ScaledPlace, ScalingView, cells_text
from fleet.autoscaling.planning.planner import agreement_s, plan_scaling
from fleet.autoscaling.planning.policy import CellPools, CellRange, Cells, ScalingMode
from fleet.autoscaling.selectors import place_plans, scaling_mode, scaling_switch, start_times_s, typical_s
from fleet.capacity.planning.rates import MachinePrices, Source
from fleet.capacity.planning.view import PlacePlan, at_load, need_within
from fleet.capacity.selectors import machine_prices
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import roles_objection, shapes_of
from fleet.deployments.services.instance_types import ByType, check_by_type
from fleet.reconcile.planning.snapshot import DeploymentView, FleetView
from fleet.reconcile.selectors.snapshot import deployment_views, fleet_view, version_view
from fleet.rollouts.services import rollout_propose
from kernel.refusals import InvalidInput
from simulator.prediction import Change, Forecast, LoseRegion, RollOut, Scale, predict
from traffic.capacity.selectors.autoscaling import scaled_deployments

NOTES_MOST = 20
HasTime = Callable[[], bool]
"""Whether a forecast may continue (`ForecastBudget`)."""


def typical_load_s(fleet: FleetView) -> dict[str, float]:
    """Version -> seconds from a start until ready, for every version of the fleet. One query."""
    measured = start_times_s()
    return {
        version: typical_s(measured.get(deployment.name), deployment.of(version).ready_timeout_s)
        for deployment in fleet.deployments.values()
        for version in {deployment.version, *deployment.others}
    }


def plan_rollout(
    *,
    deployment: str,
    version: str,
    policy: Mapping[str, Any],
    allow_unreleased: bool,
    now: datetime,
    has_time: HasTime,
) -> Forecast:
    """What this rollout would do. Raises InvalidInput if it could not be started; the same rules as for starting it."""
    proposal = rollout_propose(deployment=deployment, version=version, policy=policy, allow_unreleased=allow_unreleased)
    size, *more = (version_view(proposal.version, on, is_apart=True) for on in shapes_of(proposal.deployment))
    further = dict(zip(proposal.deployment.instance_types[1:], more, strict=True))
    view = fleet_view(now=now)
    change = RollOut(deployment, proposal.version.reference, proposal.policy, size, further)
    forecast = _predict(view, change, now, has_time, {change.to_version: _usual(view, deployment)})
    return _noting(forecast, _scaling_notes(deployment=deployment))


def plan_scale(
    *, deployment: str, cells: Mapping[str, Cells], now: datetime, has_time: HasTime, by_type: ByType | None = None
) -> Forecast:
    """What this number of cells would do; of a range, what it leaves of the number that there is. Raises InvalidInput
    for an unknown deployment, region or instance type, or cells by role that its version cannot have."""
    view = fleet_view(now=now)
    if deployment not in view.deployments:
        raise InvalidInput(field="scale.deployment", rule="exists", message=f"there is no deployment {deployment!r}")
    _known_regions(view, cells, "scale.regions")
    before = _asked(view, deployment)
    wanted = {region: _count(stated, before.get(region, 0)) for region, stated in cells.items()}
    roles = {region: (one.prefill, one.decode) for region, one in cells.items() if isinstance(one, CellPools)}
    if any(prefill for prefill, _ in roles.values()):
        _can_be_apart(deployment)
    check_by_type(by_type or {}, view.deployments[deployment].instance_types)
    forecast = _predict(view, Scale(deployment, wanted, roles, by_type or {}), now, has_time)
    notes = (*_scaling_notes(deployment=deployment), *_plan_notes(deployment, wanted, now))
    return _noting(forecast, [*notes, *_price_notes(view, deployment, wanted, now)])


def _can_be_apart(deployment: str) -> None:
    row = Deployment.objects.select_related("model_version").get(name=deployment)
    if objection := roles_objection(row.model_version, shapes_of(row)):
        raise InvalidInput(field="scale.regions", rule="roles", message=objection)


def _count(stated: Cells, before: int) -> int:
    if isinstance(stated, CellPools):
        return stated.total
    return stated.clamped(before) if isinstance(stated, CellRange) else stated


def plan_load(*, deployment: str, factor: float, now: datetime, has_time: HasTime) -> Forecast:
    """Forecast the autoscaler and the fleet for the current load and the plan of the day, both multiplied by `factor`.
    The policy counts as acting. Raises InvalidInput if there is no such deployment, its cells are a range nowhere, or
    its load is unknown."""
    view = fleet_view(now=now)
    if deployment not in view.deployments:
        raise InvalidInput(field="load.deployment", rule="exists", message=f"there is no deployment {deployment!r}")
    scaled, problems = scaled_deployments(now, deployment)
    if not scaled:
        why = problems.get(deployment, "its cells are a range nowhere, so they do not follow its load")
        raise InvalidInput(field="load.deployment", rule="scaled", message=f"{deployment}: {why}")
    if all(place.load is None for place in scaled[0].view.places):
        raise InvalidInput(field="load.deployment", rule="load", message=f"no load of {deployment} was reported")
    decisions = plan_scaling(_with_load(scaled[0].view, place_plans(now, [deployment]), factor, now), now)
    wanted = {one.region: one.wanted for one in decisions}
    forecast = _predict(view, Scale(deployment, wanted), now, has_time)
    notes = [f"{deployment} in {one.region} would have {one.wanted}: {one.reason}" for one in decisions]
    return _noting(forecast, [*notes, *_price_notes(view, deployment, wanted, now)])


def _with_load(
    view: ScalingView, plans: Mapping[tuple[str, str], PlacePlan], factor: float, now: datetime
) -> ScalingView:
    """As it would be seen once that load had lasted for the whole agreement, and the day had been planned by it."""
    ago = now - timedelta(seconds=agreement_s(view))
    history = (NeedSample(ago, 0), NeedSample(now, 0))

    def seen(place: ScaledPlace) -> ScaledPlace:
        plan = plans.get((view.deployment, place.region))
        planned = None if plan is None else need_within(at_load(plan, factor), now, view.start_up_s)
        return replace(place, load=place.load and _times(place.load, factor), history=history, planned=planned)

    return replace(view, places=tuple(seen(place) for place in view.places))


def _times(load: PlaceLoad, factor: float) -> PlaceLoad:
    """The load in requests, multiplied. Latencies are unknown then."""
    sent = None if load.autopilot is None else load.autopilot * factor
    return replace(
        load,
        in_flight=load.in_flight * factor,
        queued=load.queued * factor,
        offered=None if load.offered is None else load.offered * factor,
        autopilot=sent,
        forecast=None,
        late_burn=None,
        itl_p95_ms=None,
        arrivals_per_s=load.arrivals_per_s * factor,
        elsewhere=load.elsewhere * factor,
    )


def _scaling_notes(**of: str) -> Iterable[str]:
    """Notes about numbers of cells that may change by load during the forecast, which ignores that."""
    if scaling_switch().paused:
        return
    ranged = DeploymentRegion.objects.filter(cells_max__isnull=False, **of).select_related("deployment")
    for place in ranged.order_by("deployment_id", "region_id")[:NOTES_MOST]:
        if scaling_mode(place.deployment) is ScalingMode.ACT:
            where = f"{place.deployment_id} in {place.region_id}"
            yield f"{where} is scaled by load within {place.range}; that is not part of this"


def _plan_notes(deployment: str, wanted: Mapping[str, int], now: datetime) -> Iterable[str]:
    """Where the plan of the day has other cells within a start-up and a slot than would be wanted."""
    for (name, region), plan in sorted(place_plans(now, [deployment]).items()):
        need = need_within(plan, now, plan.start_up_s)
        if need is not None and region in wanted and need.cells != wanted[region]:
            would = f"the plan of the day has {cells_text(need.cells)} of {name} in {region}, not {wanted[region]}"
            yield f"{would}: {need.reason}"


def _price_notes(view: FleetView, deployment: str, wanted: Mapping[str, int], now: datetime) -> Iterable[str]:
    """Cost of its machines per hour now and after the change, by the prices in force."""
    spec, prices = view.deployments[deployment], machine_prices()
    before, after = spec.cells_wanted, {**spec.cells_wanted, **wanted}
    for kind in spec.instance_types:
        found = {region: prices.of(region, kind, now) for region in after}
        if unpriced := sorted(region for region, price in found.items() if price.usd is None):
            yield f"{kind} has no price in {', '.join(unpriced)}: set a rate to see its cost"
            continue
        size = spec.of(spec.version, kind).nodes_per_cell
        hourly = {region: size * (price.usd or 0.0) for region, price in found.items()}
        was, would = (sum(hourly[region] * cells for region, cells in there.items()) for there in (before, after))
        source = max((price.source for price in found.values()), default=Source.MEASURED)
        then = f"then, with all cells on {kind}," if spec.further else "then,"
        yield f"its machines cost ${was:,.2f} an hour now and ${would:,.2f} {then} by prices that are {source.label}"


def hourly_costs(names: Iterable[str], now: datetime) -> dict[str, float | None]:
    """US dollars an hour for the machines of all cells that each deployment should have; 0 if it does not exist, None
    without a price. A constant number of queries."""
    wanted = list(names)
    if not wanted:
        return {}
    prices, views = machine_prices(), deployment_views()
    return {name: _hourly_cost(views[name], prices, now) if name in views else 0.0 for name in wanted}


def _hourly_cost(spec: DeploymentView, prices: MachinePrices, now: datetime) -> float | None:
    """Cells without a stated type count as the first one."""
    total = 0.0
    for region, cells in spec.cells_wanted.items():
        for kind, count in (spec.claim(region).by_type or {spec.instance_types[0]: cells}).items():
            price = prices.of(region, kind, now).usd
            if price is None and count:
                return None
            total += count * spec.of(spec.version, kind).nodes_per_cell * (price or 0.0)
    return total


def _noting(forecast: Forecast, notes: Iterable[str]) -> Forecast:
    return replace(forecast, warnings=(*forecast.warnings, *notes))


def plan_lost_region(*, region: str, now: datetime, has_time: HasTime, after: FleetView | None = None) -> Forecast:
    """What the loss of every machine of a region would do. `after`: a snapshot with changes that are only considered;
    the region is lost once they are over. Raises InvalidInput for an unknown region."""
    view = after or fleet_view(now=now)
    _known_regions(view, {region: 0}, "lose_region")
    return _noting(_predict(view, LoseRegion(region, settled=after is not None), now, has_time), _scaling_notes())


def plan_onwards(*, view: FleetView, deployment: str, now: datetime, has_time: HasTime) -> Forecast:
    """Forecast a deployment from this snapshot, which may contain a change that is only considered. Raises KeyError if
    the snapshot has no such deployment."""
    wanted = _asked(view, deployment)
    return _noting(_predict(view, Scale(deployment, wanted), now, has_time), _plan_notes(deployment, wanted, now))


def _asked(view: FleetView, deployment: str) -> dict[str, int]:
    """What was set of each region, whether machines are there for it or not."""
    spec = view.deployments[deployment]
    return {region: spec.claim(region).asked for region in spec.cells_wanted}


def _known_regions(view: FleetView, regions: Mapping[str, Any], field: str) -> None:
    if unknown := sorted(set(regions) - set(view.regions)):
        known = ", ".join(sorted(view.regions)) or "none"
        raise InvalidInput(field=field, rule="exists", message=f"there is no region {unknown[0]!r}; there are: {known}")


def _usual(view: FleetView, deployment: str) -> float:
    """A new version is taken to load as long as the one that it replaces."""
    return typical_load_s(view)[view.deployments[deployment].version]


def _predict(
    view: FleetView, change: Change, now: datetime, has_time: HasTime, more: Mapping[str, float] | None = None
) -> Forecast:
    return predict(view, change, now, load_s={**typical_load_s(view), **(more or {})}, has_time=has_time)
