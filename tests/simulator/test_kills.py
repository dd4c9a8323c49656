"""The control plane is killed before every write of a rollout under faults, one run each: the invariants hold, and the
end is the same. `make simulate S=rollout_under_faults SWEEP=1` does the same with a larger scenario."""

from collections.abc import Iterator

import pytest

from fleet.deployments.planner import UpdatePolicy
from simulator.context import UNRULY, VersionBehaviour
from simulator.fault_injection import agent_dies, engine_crashes, machine_dies, network_cut, resume_paused, roll_out
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.invariants import all_well, mixed_versions
from simulator.scenario import Scenario, sweep
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=15.0, bake_s=0.0, min_healthy_s=2.0)


def play(world: World) -> None:
    world.queue.at(2.0, lambda: roll_out(world, "llama", "v2"))
    world.queue.at(12.0, lambda: machine_dies(world))
    world.queue.at(25.0, lambda: network_cut(world, 14.0))
    world.queue.at(30.0, lambda: engine_crashes(world))
    world.queue.at(40.0, lambda: agent_dies(world))
    resume_paused(world, every_s=30.0)


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if world.store.deployments["llama"].version != "v2":
        yield "the rollout did not come to its end"


SCENARIO = Scenario(
    about="A quick rollout of three cells; a machine, a connection, an engine and an agent break in the middle of it.",
    fleet=FleetSpec((DeploymentSpec("llama", {"east": 2, "west": 1}, policy=POLICY),), spares=1),
    play=play,
    until_s=400.0,
    busy_s=60.0,
    expect=expect,
    behaviours={version: VersionBehaviour(load_s=6.0) for version in ("v1", "v2")},
    quality=UNRULY,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, marks=pytest.mark.long, id="the process that writes"),
        pytest.param(True, id="the whole control plane"),
    ],
)
def test_a_kill_before_any_write_breaks_nothing_and_the_end_is_the_same(whole: bool) -> None:
    undisturbed, *others = sweep(SCENARIO, seed=1, whole=whole)

    assert undisturbed.failures == ()
    assert len(others) == undisturbed.world.store.writes > 30
    for outcome in others:
        assert outcome.failures == (), outcome.kill
        assert outcome.world.reconciler.kills == 1, outcome.kill
        assert outcome.world.store.deployments == undisturbed.world.store.deployments, outcome.kill
