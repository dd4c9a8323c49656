"""A scenario and one run of it: a world, the events in it, and the expectations at the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fleet.reconcile.planning.settings import FleetSettings
from simulator.context import QUIET, NetworkQuality, VersionBehaviour
from simulator.fleet_spec import FleetSpec, build_fleet
from simulator.invariants import INVARIANTS
from simulator.reconciler import Pace, ProcessFaults
from simulator.world import World

STEPS = 200
"""A run is divided into so many parts, to show progress and to check whether it is over."""
CALM_STEPS = 6
"""A run is over after so many parts without activity."""
NEVER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """`play` schedules the events, with the world's random numbers. `expect` yields one sentence for each wrong state
    at the end. A run ends at `until_s`, or after `busy_s` as soon as there is no activity for a while."""

    about: str
    fleet: FleetSpec
    play: Callable[[World], None]
    until_s: float
    expect: Callable[[World], Iterable[str]]
    behaviours: Mapping[str, VersionBehaviour] = field(default_factory=dict)
    settings: FleetSettings = field(default_factory=FleetSettings)
    quality: NetworkQuality = QUIET
    process_faults: ProcessFaults = field(default_factory=ProcessFaults)
    pace: Pace = field(default_factory=Pace)
    skip_repeats: bool = False
    busy_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """One process is killed once, before the write of this number; `whole`: all processes of the control plane are."""

    write: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `failures`: violated invariants and failed expectations."""

    seed: int
    world: World
    failures: tuple[str, ...]
    kill: Kill | None = None


def world_of(scenario: Scenario, seed: int, kill: Kill | None = None) -> World:
    world = World(
        build_fleet(scenario.fleet),
        seed=seed,
        settings=scenario.settings,
        behaviours=scenario.behaviours,
        quality=scenario.quality,
        skip_repeats=scenario.skip_repeats,
        invariants=INVARIANTS,
    )
    world.reconciler.process_faults = scenario.process_faults
    if kill is not None:
        world.reconciler.process_faults = replace(scenario.process_faults, killed=0.0, whole=kill.whole)
        world.reconciler.kill_before_write = kill.write
    world.reconciler.pace = scenario.pace
    scenario.play(world)
    return world


def run(
    scenario: Scenario, seed: int, progress: Callable[[float], None] = lambda _: None, *, kill: Kill | None = None
) -> Outcome:
    """Runs one seed to its end. `progress` is called with the finished part, 0 to 1."""
    world = world_of(scenario, seed, kill)
    calm = 0
    for step in range(1, STEPS + 1):
        world.run_until(scenario.until_s * step / STEPS)
        progress(step / STEPS)
        calm = calm + 1 if world.is_settled() else 0
        if scenario.busy_s is not None and world.queue.now_s >= scenario.busy_s and calm >= CALM_STEPS:
            break
    world.check()
    broken = tuple(
        f"{entry.subject} at {entry.at_s:.1f} s: {entry.text}" for entry in dict.fromkeys(world.timeline.violations)
    )
    return Outcome(seed, world, (*broken, *scenario.expect(world)), kill)


def sweep(scenario: Scenario, seed: int, *, whole: bool = False) -> Iterator[Outcome]:
    """Runs one seed repeatedly, each time with a kill before another write, until each write had one. The first outcome
    is that of the run without a kill, which determines the number of writes."""
    undisturbed = run(scenario, seed, kill=Kill(NEVER, whole))
    yield undisturbed
    for write in range(undisturbed.world.store.writes):
        yield run(scenario, seed, kill=Kill(write, whole))
