"""What-if: what the fleet would do after a change, simulated on virtual time. Typical durations and no faults: it shows
what the planners would decide, not what may fail meanwhile. Parts that are at rest and not involved are left out.
Nothing is changed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet.deployments.planner import UpdatePolicy
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView, VersionView
from fleet.reconcile.planning.states import CellState, RolloutState
from simulator.clock import EventQueue
from simulator.context import TimelineEntry, VersionBehaviour
from simulator.fault_injection import roll_out, scale
from simulator.fleet_slice import limits_as_floors, without_other_deployments, without_other_regions
from simulator.reconciler import Pace
from simulator.world import Place, World

HORIZON_S = 6 * 3600.0
MAX_EVENTS = 300_000
"""Limit of the work of one forecast; a forecast that reaches it states how far it looked."""
POLL_EVERY_S = 15.0
CALM_S = 60.0
"""The change is over after this time without activity."""
PACE = Pace(every_s=5.0, quiet_s=15.0, wake_up_s=0.5)
LARGE_FLEET_PACE = Pace(every_s=20.0, quiet_s=30.0, wake_up_s=4.0)
LARGE_FLEET_NODES = 300
"""With more machines, now or after a scaling, passes are rarer, to keep a forecast short; times are up to 20 s late."""
MAX_STEPS = 500
STEP_KINDS = ("rollout.", "cell.", "node.", "grant.")


@dataclass(frozen=True, slots=True)
class RollOut:
    """Moves a deployment to a version; `size` is its number of nodes, `further` those on other instance types."""

    deployment: str
    to_version: str
    policy: UpdatePolicy
    size: VersionView
    further: Mapping[str, VersionView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sets the number of cells in these regions; `roles`: prefill and decode cells among them, mixed if none are named;
    `by_type`: cells by instance type, in regions where they change."""

    deployment: str
    cells: Mapping[str, int]
    roles: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    by_type: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoseRegion:
    """Every machine of a region fails at the same time, and its provider reports it. `settled`: first the fleet comes
    to rest, such as after changes that are only considered; times count from the loss."""

    region: str
    settled: bool = False


Change = RollOut | Scale | LoseRegion


@dataclass(frozen=True, slots=True)
class PlaceForecast:
    """A deployment in a region: cells in service now, at the worst time, and at the end. `least_at_s`: seconds from now
    until the worst time, 0 if no cell stops serving."""

    deployment: str
    region: str
    wanted: int
    ready_now: int
    ready_least: int
    ready_then: int
    least_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """The moment from which a forecast counts: serving cells, numbers of entries, and seconds of the run."""

    ready: Mapping[Place, int] = field(default_factory=dict)
    at_s: float = 0.0
    entries: int = 0
    samples: Mapping[Place, int] = field(default_factory=dict)
    launched: int = 0
    is_settled: bool = True


@dataclass(frozen=True, slots=True)
class Forecast:
    """`steps` are the predicted decisions, in seconds from now. `took_s`: until the last of them; None if it is not
    over within the simulated time. `refusals`: decisions that would wait, and for what."""

    steps: tuple[TimelineEntry, ...]
    took_s: float | None
    looked_s: float
    places: tuple[PlaceForecast, ...]
    machines_launched: int
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def predict(
    fleet: FleetView,
    change: Change,
    now: datetime,
    *,
    load_s: Mapping[str, float],
    has_time: Callable[[], bool] = lambda: True,
) -> Forecast:
    """Applies the change to this fleet and returns the outcome. `load_s`: version -> typical seconds from a start until
    it is ready; `has_time`: whether to continue, called before each event."""
    queue = EventQueue(now)
    settings = FleetSettings()
    part = replace(_relevant(fleet, change), listening_since=fleet.listening_since or now)
    budgets = replace(settings, ledger=limits_as_floors(fleet, settings.ledger))
    behaviours = {version: VersionBehaviour(load_s=seconds, load_spread=0.0) for version, seconds in load_s.items()}
    world = World(part, settings=budgets, behaviours=behaviours, skip_repeats=True, queue=queue)
    world.reconciler.pace = PACE if _nodes_then(part, change) <= LARGE_FLEET_NODES else LARGE_FLEET_PACE
    start = _start(world, change, has_time)
    _begin(world, change)
    is_over = _run(world, change.region if isinstance(change, LoseRegion) else "", has_time)
    forecast = _forecast(world, change, start, is_over)
    places = (*forecast.places, *_other_places(fleet, world))
    return replace(forecast, places=tuple(sorted(places, key=lambda place: (place.deployment, place.region))))


def _start(world: World, change: Change, has_time: Callable[[], bool]) -> Start:
    if not isinstance(change, LoseRegion) or not change.settled:
        return Start(dict(world.ready))
    is_settled = _run(world, "", has_time)
    return Start(
        ready=dict(world.ready),
        at_s=world.queue.now_s,
        entries=len(world.timeline.entries),
        samples={place: len(series.ready) - 1 for place, series in world.series.items()},
        launched=world.provider.launched,
        is_settled=is_settled,
    )


def _nodes_then(part: FleetView, change: Change) -> int:
    """Returns roughly how many machines passes will process: the existing ones, or those that a scaling needs."""
    if not isinstance(change, Scale):
        return len(part.nodes)
    spec = part.deployments[change.deployment]
    return max(len(part.nodes), sum(change.cells.values()) * spec.of(spec.version).nodes_per_cell)


def _relevant(fleet: FleetView, change: Change) -> FleetView:
    if isinstance(change, LoseRegion):
        if change.settled and len(fleet.nodes) <= LARGE_FLEET_NODES:
            return fleet  # the considered changes may be in other regions
        return without_other_regions(fleet, change.region)
    return without_other_deployments(fleet, change.deployment)


def _other_places(fleet: FleetView, world: World) -> Iterator[PlaceForecast]:
    ready = Counter((c.deployment, c.region) for c in fleet.cells.values() if c.state is CellState.READY)
    for name, spec in fleet.deployments.items():
        for region, wanted in spec.cells_wanted.items():
            if (name, region) not in world.series:
                there = ready[name, region]
                yield PlaceForecast(name, region, wanted, there, there, there)


def _begin(world: World, change: Change) -> None:
    match change:
        case RollOut(deployment=name, to_version=version, policy=policy, size=size, further=more):
            roll_out(world, name, version, policy)
            spec = world.store.deployments[name]
            further = {kind: {**views, version: more[kind]} for kind, views in spec.further.items()}
            others = {**spec.others, version: size}
            world.store.deployments[name] = replace(spec, others=others, further=further)
        case Scale(deployment=name, cells=cells, roles=roles, by_type=by_type):
            for region, count in cells.items():
                scale(world, name, region, count)
            _state_roles(world, name, cells, roles)
            for region, stated in by_type.items():
                spec = world.store.deployments[name]
                claim = replace(spec.claim(region), by_type=stated)
                world.store.deployments[name] = spec.claiming(region, claim)
        case LoseRegion(region=region):
            for machine in list(world.provider.machines.values()):
                if world.region_of(machine.node) == region:
                    machine.power_off(silently=False)
            world.provider.sold_out.add(region)


def _state_roles(world: World, name: str, cells: Mapping[str, int], roles: Mapping[str, tuple[int, int]]) -> None:
    """Sets the numbers of prefill and decode cells in these regions; the caller has checked that the versions can hand
    prompts over."""
    spec = world.store.deployments[name]
    if roles:
        others = {version: replace(view, hands_over=True) for version, view in spec.others.items()}
        spec = replace(spec, hands_over=True, others=others)
    for region in cells:
        prefill, decode = roles.get(region, (0, 0))
        spec = spec.claiming(region, replace(spec.claim(region), prefill=prefill, decode=decode))
    world.store.deployments[name] = spec


def _run(world: World, lost: str, has_time: Callable[[], bool]) -> bool:
    """Until the fleet is at rest outside the region `lost`; False if a limit came first."""
    calm_since_s: float | None = None
    until_s = world.queue.now_s + HORIZON_S
    while world.queue.now_s < until_s and world.queue.done < MAX_EVENTS:
        if not world.run_until(world.queue.now_s + POLL_EVERY_S, has_time):
            return False
        if not _is_at_rest(world, lost):
            calm_since_s = None
        elif calm_since_s is None:
            calm_since_s = world.queue.now_s
        elif world.queue.now_s - calm_since_s >= CALM_S:
            return True
    return False


def _is_at_rest(world: World, lost: str) -> bool:
    """Whether nothing more will happen: all is well, or the remaining steps wait for something that will not happen."""
    if any(rollout.state is not RolloutState.PAUSED for rollout in world.store.rollouts.values()):
        return False
    left = [cell for name in world.unsettled if (cell := world.store.cells.get(name)) is not None]
    return all(cell.region == lost or cell.state is CellState.PENDING for cell in left)


def _forecast(world: World, change: Change, start: Start, is_over: bool) -> Forecast:
    entries = (entry for entry in world.timeline.entries[start.entries :] if entry.kind.startswith(STEP_KINDS))
    steps = [replace(entry, at_s=entry.at_s - start.at_s) for entry in entries]
    places = tuple(_place_forecast(world, place, start) for place in sorted(world.series))
    waiting = (cell for cell in world.store.cells.values() if cell.state in {CellState.PENDING, CellState.LOST})
    last_s = steps[-1].at_s if steps else 0.0
    return Forecast(
        steps=tuple(steps[:MAX_STEPS]),
        took_s=last_s if is_over else None,
        looked_s=world.queue.now_s - start.at_s,
        places=places,
        machines_launched=world.provider.launched - start.launched,
        refusals=tuple(f"{cell.id}: {cell.reason}" for cell in waiting),
        warnings=tuple(_warnings(world, start, places, steps, is_over)),
    )


def _place_forecast(world: World, place: Place, start: Start) -> PlaceForecast:
    series, first, ready_now = world.series[place], start.samples.get(place, 0), start.ready.get(place, 0)
    wanted = world.store.deployments[place[0]].cells_wanted.get(place[1], 0)
    least = min(series.ready[first:])
    least_at_s = series.at_s[series.ready.index(least, first)] - start.at_s if least < ready_now else 0.0
    return PlaceForecast(place[0], place[1], wanted, ready_now, least, series.ready[-1], least_at_s)


def _warnings(
    world: World, start: Start, places: tuple[PlaceForecast, ...], steps: list[TimelineEntry], is_over: bool
) -> Iterator[str]:
    if not start.is_settled:
        yield f"the changes before it were not over after {start.at_s:.0f} s, the limit of this forecast"
    if not is_over:
        yield f"not over within {world.queue.now_s - start.at_s:.0f} s, the limit of this forecast"
    if len(steps) > MAX_STEPS:
        yield f"{len(steps)} steps; the first {MAX_STEPS} are listed"
    for rollout in world.store.rollouts.values():
        yield f"the rollout of {rollout.deployment} would be {rollout.state}: {rollout.reason}"
    for place in places:
        where = f"{place.deployment} in {place.region}"
        if place.ready_least == 0 and place.ready_now:
            yield f"{where} would have no cell in service for a while"
        if place.ready_then < place.wanted:
            yield f"{where} would end with {place.ready_then} of {place.wanted} cells in service"
    for name, spec in sorted(world.store.deployments.items()):
        for region, claim in sorted(spec.claims.items()):
            if claim.in_force < claim.asked:
                yield f"{name} in {region} may have {claim.in_force} of {claim.asked} cells: {claim.reason}"
    if launched := world.provider.launched - start.launched:
        yield f"{launched} machines would be launched"
