"""A day of 80,000 chips in three regions, one of which is lost for an hour."""

from collections.abc import Iterator, Mapping

from fleet.deployments.planner import UpdatePolicy
from simulator.context import VersionBehaviour
from simulator.fault_injection import FAULTS, lose_region, resume_paused, roll_out
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.invariants import all_well, mixed_versions
from simulator.reconciler import Pace
from simulator.scenario import Scenario
from simulator.world import World

REGIONS = ("east", "north", "west")
LOST_REGION = "north"
CELLS = 5000
NODES_PER_CELL = 4
CHIPS_PER_NODE = 4
DEPLOYMENTS = 25
LARGEST = "model-00"
LARGEST_SHARE = 0.136
"""Of all cells; the other deployments share the rest evenly."""
FAULTS_PER_NODE_DAY = 0.006
"""Meta's report on Llama 3 counts 466 interruptions of 2,000 hosts in 54 days, which is 0.0043 per host and day."""
SPARES_PER_CELL = 0.004
"""Of all cells, kept in each region."""
POLICY = UpdatePolicy(max_unavailable=20, canary_bake_s=300.0, bake_s=300.0, min_healthy_s=60.0)
ROLLOUT_AT, LOST_AT, LOST_FOR, FAULTS_UNTIL = 1 / 24, 12 / 24, 1 / 24, 0.95
"""Shares of the day."""


def cells_by_deployment(cells: int) -> Mapping[str, Mapping[str, int]]:
    """Returns deployment -> region -> cells, `cells` in total. Remainders go to the first deployments, and to another
    region in each of them."""
    largest = round(cells * LARGEST_SHARE)
    counts = (largest, *_parts(cells - largest, DEPLOYMENTS - 1))
    return {
        f"model-{number:02d}": dict(zip(REGIONS, _parts(count, len(REGIONS), first=number), strict=True))
        for number, count in enumerate(counts)
    }


def _parts(total: int, count: int, first: int = 0) -> tuple[int, ...]:
    least, rest = divmod(total, count)
    return tuple(least + ((index - first) % count < rest) for index in range(count))


def day_of_regions(cells: int = CELLS, hours: float = 24.0) -> Scenario:
    """Returns the scenario with so many cells of four nodes, and all times of the day in proportion to `hours`. Loading
    and baking take as long as in a whole day, so a short day needs few cells to finish its rollout."""
    day_s = hours * 3600.0
    nodes = cells * NODES_PER_CELL
    faults = max(2, round(FAULTS_PER_NODE_DAY * nodes * hours / 24.0))

    def play(world: World) -> None:
        for _ in range(faults):
            fault = world.random.choice(FAULTS)
            world.queue.at(world.random.uniform(0.0, day_s * FAULTS_UNTIL), lambda fault=fault: fault(world))  # type: ignore[misc]
        world.queue.at(day_s * ROLLOUT_AT, lambda: roll_out(world, LARGEST, "v2"))
        world.queue.at(day_s * LOST_AT, lambda: lose_region(world, LOST_REGION, day_s * LOST_FOR))
        resume_paused(world, every_s=900.0)

    specs = (
        DeploymentSpec(name, by_region, size=NODES_PER_CELL, policy=POLICY, ready_timeout_s=600.0)
        for name, by_region in cells_by_deployment(cells).items()
    )
    return Scenario(
        about=f"{nodes * CHIPS_PER_NODE:,} chips, {nodes:,} nodes and {cells:,} cells in three regions; in "
        f"{hours:g} hours {faults} faults, a rollout, and a region lost for {hours * 60 * LOST_FOR:g} minutes.",
        fleet=FleetSpec(tuple(specs), spares=max(2, round(SPARES_PER_CELL * cells)), devices=CHIPS_PER_NODE),
        play=play,
        until_s=day_s,
        expect=_expect,
        behaviours={version: VersionBehaviour(load_s=120.0) for version in ("v1", "v2")},
        skip_repeats=True,
        pace=Pace(every_s=15.0, quiet_s=60.0, wake_up_s=2.0),
    )


def _expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"
    if world.provider.dark:
        yield f"{', '.join(sorted(world.provider.dark))} is still lost"


SCENARIOS = {"day_80000_chips": day_of_regions()}
