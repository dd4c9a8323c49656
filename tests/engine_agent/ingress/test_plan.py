"""The exact steps from a running to a desired state, and properties of all plans."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.ingress.desired import DesiredHaproxy, Server, desired_from
from engine_agent.ingress.plan import (
    AddServer,
    DrainServer,
    ReadyServer,
    Reload,
    RemoveServer,
    ReplaceMap,
    SetServerLimit,
    SetServerWeight,
    Step,
    plan_steps,
)
from engine_agent.ingress.routing_maps import MODELS_MAP, SHARES_MAP
from engine_agent.ingress.running import RunningHaproxy
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable, SpillTarget
from tests.engine_agent.ingress.haproxies import finished, running_of, step_of, touched
from tests.engine_agent.ingress.test_desired import CELL, POOL, TABLE, with_cell, with_pool

STRUCTURE = "s"
LAYOUT = desired_from(TABLE)
NAME = ("pool.chat", "c-1-g3")


def steps_to(table: RoutingTable, running: RunningHaproxy | None = None) -> tuple[Step, ...]:
    return plan_steps(running or running_of(LAYOUT, STRUCTURE), desired_from(table), STRUCTURE)


def running_cell(**changes: object) -> RunningHaproxy:
    """The table in force, with the cell's server as given."""
    running = running_of(LAYOUT, STRUCTURE)
    cell, *others = running.servers
    return replace(running, servers=(replace(cell, **changes), *others))  # type: ignore[arg-type]


def test_what_runs_as_it_should_needs_no_step() -> None:
    assert steps_to(TABLE) == ()
    assert steps_to(msgspec.structs.replace(TABLE, revision=9)) == ()


def test_another_structure_reloads_and_drains_first_what_the_old_worker_may_not_use() -> None:
    assert plan_steps(running_of(LAYOUT, "old"), LAYOUT, STRUCTURE) == (Reload("structure is old, should be s"),)
    for table in (with_pool(cells=()), with_cell(drain=True)):
        assert plan_steps(running_of(LAYOUT, "old"), desired_from(table), STRUCTURE) == (
            DrainServer(*NAME, "drained or not there in the table"),
            Reload("structure is old, should be s"),
        )
    nothing = RunningHaproxy("", 1, (), (), {})
    assert plan_steps(nothing, LAYOUT, STRUCTURE) == (Reload("structure is unknown, should be s"),)


def test_a_server_at_another_address_reloads() -> None:
    for table in (with_cell(address="127.0.0.2"), with_cell(port=9009)):
        assert steps_to(table) == (Reload("pool.chat/c-1-g3 is at another address"),)


def test_a_new_cell_comes_before_the_map_and_an_old_one_goes_last() -> None:
    newer = msgspec.structs.replace(CELL, cell="c-2")
    steps = steps_to(with_pool(cells=(newer,), models=("chat",)))
    assert [type(step) for step in steps] == [AddServer, ReplaceMap, ReplaceMap, DrainServer]
    assert steps[0] == AddServer(_server(desired_from(with_pool(cells=(newer,))), "c-2-g3"), "new in the table")
    assert steps[-1] == DrainServer(*NAME, "not in the table any more")


def test_an_old_cell_is_removed_once_idle_and_not_before() -> None:
    gone = with_pool(cells=())
    assert steps_to(gone, running_cell(draining=True, in_flight=1)) == ()
    assert steps_to(gone, running_cell(draining=True, queued=1)) == ()
    assert steps_to(gone, running_cell(draining=True, rested=False)) == ()
    assert steps_to(gone, running_cell(draining=True)) == (RemoveServer(*NAME, "not in the table any more, and idle"),)
    assert steps_to(gone, running_cell(maintenance=True)) == (
        RemoveServer(*NAME, "not in the table any more, and idle"),
    )


def test_a_drain_of_the_table_is_set_once_and_taken_back() -> None:
    drain = with_cell(drain=True)
    assert steps_to(drain) == (DrainServer(*NAME, "the table drains it"),)
    assert steps_to(drain, running_cell(maintenance=True)) == (DrainServer(*NAME, "the table drains it"),)
    assert steps_to(drain, running_cell(draining=True)) == ()
    assert steps_to(TABLE, running_cell(draining=True)) == (ReadyServer(*NAME, "the table serves it"),)


def test_a_cell_that_drains_itself_is_left_alone() -> None:
    assert steps_to(TABLE, running_cell(drains_itself=True)) == ()


def test_a_wanted_cell_in_maintenance_is_taken_out_of_it() -> None:
    assert steps_to(TABLE, running_cell(maintenance=True)) == (
        ReadyServer(*NAME, "the table serves it, and it is in maintenance"),
    )


def test_limits_and_weights_change_in_place() -> None:
    assert steps_to(with_cell(max_connections=5)) == (SetServerLimit(*NAME, 5, "limit is 8, should be 5"),)
    steps = plan_steps(_both_share(0.5, 0.5), desired_from(_shares(0.2, 0.8)), STRUCTURE)
    assert steps == (SetServerWeight("spill.chat", "north", 64, "weight is 256, should be 64"),)


def test_a_region_that_gets_a_share_changes_its_role() -> None:
    steps = steps_to(_shares(0.5, 0.5))
    assert [type(step) for step in steps] == [AddServer, ReplaceMap, DrainServer]
    assert isinstance(steps[0], AddServer)
    assert steps[0].server.name == "north"
    assert steps[2] == DrainServer("spill.chat", "north.standby", "not in the table any more")


def test_a_share_changes_the_map_only() -> None:
    assert steps_to(with_pool(fractions={"east": 0.5, "west": 0.5})) == (
        ReplaceMap(SHARES_MAP, {"pool.chat": "500"}, "its entries differ from the table"),
    )


def test_a_map_that_lost_its_entries_is_filled() -> None:
    running = replace(running_of(LAYOUT, STRUCTURE), maps={**LAYOUT.maps, MODELS_MAP: {}})
    assert steps_to(TABLE, running) == (
        ReplaceMap(MODELS_MAP, LAYOUT.maps[MODELS_MAP], "its entries differ from the table"),
    )


def _shares(north: float, west: float) -> RoutingTable:
    return with_pool(fractions={"east": 0.0, "north": north, "west": west})


def _both_share(north: float, west: float) -> RunningHaproxy:
    return running_of(desired_from(_shares(north, west)), STRUCTURE)


def _server(desired: DesiredHaproxy, name: str) -> Server:
    return next(server for server in desired.servers if server.name == name)


def test_two_pools_do_not_disturb_each_other() -> None:
    other = msgspec.structs.replace(POOL, name="other", models=("other",))
    both = msgspec.structs.replace(TABLE, pools=(POOL, other))
    fewer = msgspec.structs.replace(TABLE, pools=(POOL, msgspec.structs.replace(other, cells=())))
    steps = plan_steps(running_of(desired_from(both), STRUCTURE), desired_from(fewer), STRUCTURE)
    assert steps == (DrainServer("pool.other", "c-1-g3", "not in the table any more"),)


MAX_PASSES = 4
"""At most four rounds: reload or change; drain the rest; remove idle servers; nothing."""


@st.composite
def cells(draw: st.DrawFn, cell: str) -> CellEndpoint:
    generation = draw(st.integers(1, 2))
    port = 9000 + generation
    limit = draw(st.integers(1, 3))
    return CellEndpoint(cell, generation, "127.0.0.1", port, limit, drain=draw(st.booleans()))


@st.composite
def pools(draw: st.DrawFn, name: str) -> Pool:
    regions = ["home", *draw(st.sets(st.sampled_from(["west", "north"])))]
    weights = [draw(st.integers(0, 3)) for _ in regions]
    total = sum(weights)
    return Pool(
        name=name,
        models=tuple(f"{name}-{model}" for model in draw(st.sets(st.integers(0, 2), min_size=1))),
        serving_class="realtime",
        cells=tuple(draw(cells(cell)) for cell in draw(st.sets(st.sampled_from(["a", "b", "c"])))),
        spill=tuple(SpillTarget(region, "10.0.0.1", 80) for region in regions if region != "home"),
        fractions={region: weight / total for region, weight in zip(regions, weights, strict=True)} if total else {},
    )


@st.composite
def desired_states(draw: st.DrawFn) -> DesiredHaproxy:
    names = draw(st.sets(st.sampled_from(["p", "q"])))
    return desired_from(RoutingTable(1, "home", tuple(draw(pools(name)) for name in sorted(names))))


@st.composite
def runnings(draw: st.DrawFn) -> RunningHaproxy:
    """A worker in any state: busy, drained, in maintenance, with another limit, with a draining cell."""
    desired = draw(desired_states())
    running = running_of(desired, structure(desired))
    servers = tuple(
        replace(
            server,
            in_flight=draw(st.integers(0, 2)),
            draining=draw(st.booleans()),
            maintenance=draw(st.booleans()),
            drains_itself=draw(st.booleans()),
            max_connections=draw(st.sampled_from([server.max_connections, 7])),
        )
        for server in running.servers
    )
    maps = running.maps if draw(st.booleans()) else {}
    return replace(running, servers=servers, maps=maps)


def structure(desired: DesiredHaproxy) -> str:
    return "+".join(f"{pool.name}:{pool.probe_model}" for pool in desired.pools)


def run_pass(running: RunningHaproxy, desired: DesiredHaproxy) -> RunningHaproxy:
    for step in plan_steps(running, desired, structure(desired)):
        running = step_of(running, step, desired, structure(desired))
    return running


@given(runnings(), desired_states())
def test_the_steps_arrive_at_the_table(running: RunningHaproxy, desired: DesiredHaproxy) -> None:
    for _ in range(MAX_PASSES):
        running = finished(run_pass(running, desired))
    assert plan_steps(running, desired, structure(desired)) == ()
    assert {(server.backend, server.name) for server in running.servers} == {
        (server.backend, server.name) for server in desired.servers
    }
    assert {name: running.maps.get(name, {}) for name in desired.maps} == desired.maps
    after = {(server.backend, server.name): server for server in running.servers}
    for server in desired.servers:
        there = after[server.backend, server.name]
        assert (there.draining or there.maintenance) == server.drain


@given(runnings(), desired_states())
def test_the_first_pass_already_gives_no_new_request_to_what_is_not_wanted(
    running: RunningHaproxy, desired: DesiredHaproxy
) -> None:
    after = run_pass(running, desired)
    wanted = {(server.backend, server.name) for server in desired.servers if not server.drain}
    for server in after.servers:
        assert (server.backend, server.name) in wanted or server.draining or server.maintenance


@pytest.mark.slow
@given(desired_states(), desired_states())
def test_no_step_touches_a_server_that_is_as_it_should_be(before: DesiredHaproxy, after: DesiredHaproxy) -> None:
    running = run_pass(running_of(before, structure(before)), before)
    changed = touched(plan_steps(running, after, structure(after)))
    assert not changed & {(s.backend, s.name) for s in set(before.servers) & set(after.servers)}


@given(runnings(), desired_states())
def test_a_busy_server_is_never_removed(running: RunningHaproxy, desired: DesiredHaproxy) -> None:
    run_pass(running, desired)  # the model of HAProxy would refuse
