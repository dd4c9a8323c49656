"""From any state to any table: the steps arrive there, and touch nothing that is as it should be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.ingress.desired import DesiredHaproxy, desired_from
from engine_agent.ingress.plan import plan_steps
from engine_agent.ingress.running import RunningHaproxy
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable, SpillTarget
from tests.engine_agent.ingress.haproxies import finished, running_of, step_of, touched

MAX_PASSES = 4
"""Reload or change; drain what is left; remove what is idle; nothing."""


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
    """A worker in any state: busy, drained, in maintenance, with another limit, with a cell that wants nothing."""
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
    run_pass(running, desired)  # the model of HAProxy refuses to
