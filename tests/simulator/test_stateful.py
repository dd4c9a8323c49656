"""Hypothesis searches for a sequence of events that violates an invariant, and shrinks it: I1-I10 hold after every
step, and the fleet recovers once the events stop."""

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleet.deployments.planner import UpdatePolicy, UpdateStrategy
from fleet.reconcile.planning.states import RolloutState
from simulator.context import UNRULY, VersionBehaviour
from simulator.fault_injection import FAULTS, agent_server_restarts, network_cut, resume_paused, roll_out, scale
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.invariants import INVARIANTS, all_well, mixed_versions
from simulator.reconciler import Pace
from simulator.world import World

BEHAVIOURS = {
    "v1": VersionBehaviour(load_s=8.0),
    "v2": VersionBehaviour(load_s=12.0),
    "v3": VersionBehaviour(load_s=8.0, never_starts=True),
    "v4": VersionBehaviour(load_s=8.0, fails_after_s=15.0),
}
HEALS_WITHIN_S = 3600.0


class AnyStory(RuleBasedStateMachine):
    """Operators and faults act on a small world; time passes between them."""

    @initialize(seed=st.integers(0, 2**32), surge=st.booleans(), spares=st.integers(0, 2))
    def begin(self, seed: int, surge: bool, spares: int) -> None:
        policy = UpdatePolicy(
            strategy=UpdateStrategy.SURGE if surge else UpdateStrategy.IN_PLACE,
            surge=1 if surge else 0,
            canary_bake_s=15.0,
            bake_s=15.0,
            min_healthy_s=5.0,
        )
        shape = FleetSpec((DeploymentSpec("llama", {"east": 2, "west": 2}, policy=policy),), spares=spares)
        self.world = World(build_fleet(shape), seed=seed, behaviours=BEHAVIOURS, quality=UNRULY, invariants=INVARIANTS)
        self.world.reconciler.pace = Pace(every_s=1.0, quiet_s=5.0, wake_up_s=0.2)

    @rule(seconds=st.sampled_from([0.3, 2.0, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run_until(self.world.queue.now_s + seconds)

    @rule(fault=st.sampled_from(FAULTS))
    def something_breaks(self, fault: Callable[[World], None]) -> None:
        fault(self.world)

    @rule(seconds=st.floats(2.0, 45.0))
    def a_line_is_cut(self, seconds: float) -> None:
        network_cut(self.world, seconds)

    @rule(seconds=st.floats(1.0, 20.0))
    def nobody_listens(self, seconds: float) -> None:
        if self.world.agent_server.is_up:
            agent_server_restarts(self.world, seconds)

    @rule(writes=st.integers(0, 3))
    def the_reconciler_dies(self, writes: int) -> None:
        self.world.reconciler.kill_before_write = self.world.store.writes + writes

    @rule(region=st.sampled_from(["east", "west"]), cells=st.integers(1, 4))
    def somebody_scales(self, region: str, cells: int) -> None:
        scale(self.world, "llama", region, cells)

    @rule(version=st.sampled_from(["v1", "v2", "v3", "v4"]))
    def somebody_rolls_out(self, version: str) -> None:
        if "llama" not in self.world.store.rollouts and self.world.store.deployments["llama"].version != version:
            roll_out(self.world, "llama", version)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "world"):
            assert self.world.timeline.violations == []

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        resume_paused(world, every_s=60.0)
        end_s = world.queue.now_s + HEALS_WITHIN_S
        while world.queue.now_s < end_s:
            world.run_until(world.queue.now_s + 60.0)
            rolling = any(one.state is not RolloutState.PAUSED for one in world.store.rollouts.values())
            if world.is_settled() and not rolling and not [*all_well(world), *mixed_versions(world)]:
                break
        assert [*all_well(world), *mixed_versions(world)] == []
        assert world.timeline.violations == []


AnyStory.TestCase.settings = settings(
    max_examples=settings().max_examples // 3, stateful_step_count=12, suppress_health_check=list(HealthCheck)
)
test_any_story_ends_well = AnyStory.TestCase
