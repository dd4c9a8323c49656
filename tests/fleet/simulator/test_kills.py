"""The reconciler is killed before every single write of a rollout, one run each: the rollout ends as it would have."""

from fleet.planning.policy import UpdatePolicy
from fleet.simulator.behaviour import VersionBehaviour
from fleet.simulator.happenings import all_well, mixed_versions, roll_out
from fleet.simulator.shape import DeploymentShape, FleetShape, fleet_of
from fleet.simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=15.0, bake_s=0.0, min_healthy_s=2.0)
SHAPE = FleetShape((DeploymentShape("llama", {"east": 2}, size=1, policy=POLICY),), spares=0)


def rolled_out(kill_at: int | None) -> World:
    world = World(fleet_of(SHAPE), seed=1, behaviours={"v2": VersionBehaviour(load_s=5.0)})
    world.control.kill_at = kill_at
    world.queue.at(1.0, lambda: roll_out(world, "llama", "v2"))
    while world.queue.now_s < 300.0 and not (world.queue.now_s > 5.0 and world.is_settled()):
        world.run_until(world.queue.now_s + 5.0)
    world.check()
    return world


def test_a_kill_before_any_write_changes_nothing_but_the_time() -> None:
    undisturbed = rolled_out(None)
    assert undisturbed.store.deployments["llama"].version == "v2"
    for write in range(undisturbed.store.writes):
        world = rolled_out(write)
        late_s = world.queue.now_s - undisturbed.queue.now_s

        assert world.control.kills == 1, f"killed before write {write}"
        assert world.journal.violations == [], f"killed before write {write}"
        assert [*all_well(world), *mixed_versions(world)] == [], f"killed before write {write}"
        assert world.store.deployments["llama"].version == "v2", f"killed before write {write}"
        assert late_s <= 25.0, f"killed before write {write}"
