"""A rollout drains no cell whose nodes still fetch its version, says which node it waits for, and gives up at its
deadline; spares fetch what may start on them."""

from collections import defaultdict
from dataclasses import replace

import pytest
from msgspec import structs

from fleet.deployments.planner import UpdatePolicy, UpdateStrategy
from fleet.reconcile.planning.decisions import OrderPrefetch
from fleet.reconcile.planning.snapshot import FleetView, Holdings, NodeView, ReportView, VersionView
from fleet.reconcile.planning.states import CellState, NodeState, RolloutState
from fleet.rollouts.planning.prefetch import MOST_ON_A_SPARE, plan_prefetch
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from tests.fleet.fleets import KIND, NOW, SETTINGS, cell, fleet, member, node
from tests.fleet.world import NAME, NEW, OLD, World

QUICK = UpdatePolicy(
    min_healthy_s=2, canary_bake_s=20, bake_s=4, progress_deadline_s=60, waves_percent=(50, 100), canary=True
)
BUILD, WEIGHTS = "sha256:b", "sha256:w"
NEEDS = {OLD: frozenset({"sha256:old"}), NEW: frozenset({BUILD, WEIGHTS})}


class FetchingWorld(World):
    """Nodes hold the version that they run, and `fetch_s` after an order those that it names."""

    fetch_s: float = 5.0
    trouble: str = ""
    is_reported = True

    def __init__(self, view: FleetView) -> None:
        super().__init__(view)
        self._ordered_at = defaultdict[tuple[str, str], float](float)

    def _report_of(self, node: NodeView) -> ReportView:
        now_s = (self.now - NOW).total_seconds()
        held = set(NEEDS[OLD])
        for version in node.prefetch:
            began_s = self._ordered_at.setdefault((node.id, version), now_s)
            held |= NEEDS[version] if now_s - began_s >= self.fetch_s and not self.trouble else set()
        holdings = Holdings(frozenset(held), {BUILD: self.trouble} if self.trouble else {})
        return replace(super()._report_of(node), holdings=holdings if self.is_reported else None)

    def prefetch(self) -> dict[str, tuple[str, ...]]:
        return {name: node.prefetch for name, node in self.store.nodes.items() if node.prefetch}


def fetching(cells: int, policy: UpdatePolicy = QUICK, *, spares: int = 0) -> FetchingWorld:
    """Cells of two nodes at `OLD`, whose rollout to `NEW` begins."""
    others = {name: VersionView(2, engine="vllm", needs=needs) for name, needs in NEEDS.items()}
    spec = DeploymentSpec(NAME, {"east": cells}, version=OLD, policy=policy, others=others)
    made = FetchingWorld(build_fleet(FleetSpec((spec,), spares=spares), NOW))
    made.tick()
    made.roll_out()
    return made


def drained(world: FetchingWorld) -> list[str]:
    return [one.id for one in world.store.cells.values() if one.state is CellState.DRAINING]


def test_a_rollout_drains_a_cell_once_all_of_its_nodes_have_fetched_the_version() -> None:
    world = fetching(3)
    world.tick()
    [canary, *_] = sorted(world.cells(), key=lambda one: (one.created_at, one.id))
    nodes = {one.node for one in canary.members}
    assert world.prefetch() == dict.fromkeys(nodes, (NEW,))
    for _ in range(4):
        assert drained(world) == []
        world.tick()
    assert world.rollout is not None
    assert f"{canary.id} is not drained before {min(nodes)} has fetched {NEW}" in world.rollout.reason
    world.run(10, until=RolloutState.BAKING)
    assert world.touched == {canary.id}


def test_nodes_of_the_next_stage_fetch_during_the_bake_and_nobody_fetches_after_the_rollout() -> None:
    world = fetching(4)
    world.run(60, until=RolloutState.BAKING)
    world.tick()
    assert len(world.prefetch()) == 2
    assert not world.touched & {world.store.member_of[name] for name in world.prefetch()}
    world.run(300, until=RolloutState.SUCCEEDED)
    world.tick()
    assert (world.outcome, world.prefetch()) == (RolloutState.SUCCEEDED, {})


def test_a_rollout_that_waits_too_long_pauses_with_the_reason_and_drains_nothing() -> None:
    world = fetching(3)
    world.trouble = "build vllm-2 cannot run here: it needs glibc 2.35 or newer, and this host has 2.34"
    world.run(200, until=RolloutState.PAUSED)
    assert world.rollout is not None
    assert world.rollout.reason.startswith("no progress for ")
    assert world.rollout.reason.endswith(f"has fetched {NEW}: {world.trouble}")
    assert world.touched == set()
    world.trouble = ""
    world.put_rollout(RolloutState.RUNNING)
    world.run(300, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


def test_a_rollback_waits_for_no_node() -> None:
    world = fetching(3)
    world.run(60, until=RolloutState.BAKING)
    world.put_rollout(RolloutState.ROLLING_BACK)
    world.trouble = "no room"
    world.run(60, until=RolloutState.ROLLED_BACK)
    assert world.outcome is RolloutState.ROLLED_BACK


def test_agents_that_fetch_nothing_in_advance_are_not_waited_for() -> None:
    world = fetching(3)
    world.is_reported, world.fetch_s = False, 10_000.0
    world.run(300, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


def test_a_surge_starts_on_spares_that_fetch_both_versions() -> None:
    world = fetching(1, structs.replace(QUICK, strategy=UpdateStrategy.SURGE, surge=1), spares=4)
    world.tick()
    assert set(world.prefetch().values()) == {(NEW, OLD)}
    world.run(300, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


def with_needs(view: FleetView, count: int) -> FleetView:
    """Deployments `d0` (the smallest) and further ones, of one version each."""
    needs = frozenset({BUILD})
    one = view.deployments["llama"]
    many = {
        f"d{number}": replace(
            one, name=f"d{number}", version=f"d{number}@1", cells_wanted={"east": number + 1}, needs=needs
        )
        for number in range(count)
    }
    return replace(view, deployments={"llama": one, **many})


def orders(view: FleetView) -> dict[str, tuple[str, ...]]:
    return {one.node: one.versions for one in plan_prefetch(view, SETTINGS, NOW)}


@pytest.mark.parametrize(
    "changes",
    [
        {"region": "west"},
        {"instance_type": "trn1.2xlarge"},
        {"cordoned": True},
        {"state": NodeState.SUSPECT},
    ],
)
def test_only_usable_spares_of_the_place_and_type_fetch_and_others_forget_what_they_should(changes: dict) -> None:  # type: ignore[type-arg]
    view = with_needs(fleet(node("a"), node("b", prefetch=("d0@1",), **changes), cell("c1")), 1)
    assert orders(view) == {"a": ("d0@1",), "b": ()}


def test_a_spare_fetches_for_the_largest_deployments_and_members_nothing() -> None:
    versions = tuple(f"d{number}@1" for number in range(9, 9 - MOST_ON_A_SPARE, -1))
    view = with_needs(fleet(node("a"), member("m"), member("n"), cell("c1", "m", "n")), 10)
    assert orders(view) == {"a": versions}
    held = replace(view.nodes["a"], prefetch=versions)
    assert orders(replace(view, nodes={**view.nodes, "a": held})) == {}


def test_without_builds_and_weights_there_is_nothing_to_do() -> None:
    assert plan_prefetch(fleet(node("a")), SETTINGS, NOW) == ()
    [forgotten] = plan_prefetch(fleet(node("a", prefetch=("gone@1",))), SETTINGS, NOW)
    assert forgotten == OrderPrefetch("a", ("gone@1",), (), "nothing is needed any more")
    assert KIND in fleet(node("a")).deployments["llama"].instance_types
