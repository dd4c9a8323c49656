"""A node's next steps as exact sequences, its reported state and reason, and the orders that it accepts."""

from dataclasses import replace

import pytest
from msgspec import structs

from engine_agent.node.planning.converge import observe, plan_convergence
from engine_agent.node.planning.node import (
    LIMITS,
    Failure,
    MarkFailed,
    Membership,
    NodeSnapshot,
    RunningProcess,
    SetProxyPairs,
    SetProxyPhase,
    StartEngine,
    StartProxy,
    Step,
    StopEngine,
    StopProxy,
    Wait,
    membership_of,
    refusal,
    restart_backoff_s,
)
from engine_agent.protocol.messages import Assignment, Desired, Health, Observed, PrefillCell
from engine_agent.protocol.proxy_messages import pairs_of
from engine_agent.protocol.states import CellRole, EngineState, Phase
from tests.engine_agent.orders import READY_TIMEOUT_S, assignment, order

NOW_S = 1000.0
LEADER = Membership("c-1", 1, 0)
FOLLOWER = Membership("c-1", 1, 1)
DIED = Failure(LEADER, "the engine died", at_s=NOW_S)
SERVING = NodeSnapshot(
    engine=RunningProcess(LEADER, 10, NOW_S - 100),
    proxy=RunningProcess(LEADER, 11, NOW_S - 100),
    health=Health(ok=True),
    was_ready=True,
    proxy_phase=Phase.SERVE,
)
STARTING = replace(SERVING, health=Health(ok=False, reason="loading"), was_ready=False)
DECODES = structs.replace(
    assignment(),
    cell_role=CellRole.DECODE,
    kv_layout="a",
    prefill_cells=(PrefillCell("p-1", 1, "n-2", "10.0.0.2", 9400, 9401, "a", 8),),
)
FOLLOWING = NodeSnapshot(engine=RunningProcess(FOLLOWER, 10, NOW_S), health=Health(ok=True), was_ready=True)


def process(member: Membership, stopping: bool = False, age_s: float = 100.0) -> RunningProcess:
    return RunningProcess(member, 10, NOW_S - age_s, stopping)


def kinds(desired: Assignment | None, node: NodeSnapshot, now_s: float = NOW_S) -> list[type[Step]]:
    return [type(step) for step in plan_convergence(desired, node, now_s)]


@pytest.mark.parametrize(
    ("desired", "node", "steps"),
    [
        pytest.param(None, NodeSnapshot(), [], id="spare and idle"),
        pytest.param(assignment(), NodeSnapshot(), [StartEngine, StartProxy], id="leader starts both"),
        pytest.param(assignment(rank=1), NodeSnapshot(), [StartEngine], id="follower has no proxy"),
        pytest.param(assignment(), SERVING, [], id="leader serves"),
        pytest.param(assignment(rank=1), FOLLOWING, [], id="follower serves"),
        pytest.param(assignment(), replace(SERVING, proxy=None), [StartProxy], id="proxy is gone"),
        pytest.param(assignment(phase=Phase.DRAIN), SERVING, [SetProxyPhase], id="drain"),
        pytest.param(assignment(), replace(SERVING, proxy_phase=Phase.DRAIN), [SetProxyPhase], id="drain taken back"),
        pytest.param(DECODES, SERVING, [], id="the proxy has not said yet which pairs it has"),
        pytest.param(DECODES, replace(SERVING, proxy_pairs=""), [SetProxyPairs], id="the proxy has no pairs yet"),
        pytest.param(DECODES, replace(SERVING, proxy_pairs=pairs_of(DECODES).name), [], id="the proxy has its pairs"),
        pytest.param(assignment(), replace(SERVING, proxy_pairs=""), [], id="a mixed cell has none"),
        pytest.param(
            assignment(phase=Phase.DRAIN),
            replace(SERVING, proxy_phase=Phase.DRAIN),
            [],
            id="drain goes on, engine kept",
        ),
        pytest.param(assignment(phase=Phase.DRAIN), NodeSnapshot(), [], id="nothing is started to be drained"),
        pytest.param(assignment(phase=Phase.DRAIN), replace(SERVING, proxy=None), [], id="nor a proxy"),
        pytest.param(assignment(phase=Phase.STOP), NodeSnapshot(), [], id="stopped"),
    ],
)
def test_steps_of_one_start(desired: Assignment | None, node: NodeSnapshot, steps: list[type[Step]]) -> None:
    assert kinds(desired, node) == steps


@pytest.mark.parametrize("desired", [None, assignment(phase=Phase.STOP), assignment(generation=2)])
def test_the_proxy_ends_before_the_engine_and_nothing_starts_meanwhile(desired: Assignment | None) -> None:
    proxy_ends = replace(SERVING, proxy=process(LEADER, stopping=True))
    engine_left = replace(SERVING, proxy=None)
    engine_ends = replace(engine_left, engine=process(LEADER, stopping=True))
    seen = [kinds(desired, node) for node in (SERVING, proxy_ends, engine_left, engine_ends)]
    assert seen == [[StopProxy], [Wait], [StopEngine], [Wait]]


def test_a_new_generation_starts_when_the_old_one_is_gone() -> None:
    assert kinds(assignment(generation=2), NodeSnapshot()) == [StartEngine, StartProxy]


def test_a_proxy_of_an_old_generation_ends_before_its_successor_starts() -> None:
    node = NodeSnapshot(engine=process(Membership("c-1", 2, 0)), proxy=process(LEADER))
    assert kinds(assignment(generation=2), node) == [StopProxy]


@pytest.mark.parametrize("phase", Phase)
def test_an_order_of_an_older_generation_changes_nothing(phase: Phase) -> None:
    node = NodeSnapshot(engine=process(Membership("c-1", 2, 0)), proxy=process(Membership("c-1", 2, 0)))
    assert kinds(assignment(generation=1, phase=phase), node) == [Wait]


@pytest.mark.parametrize("node", [replace(STARTING, engine=process(LEADER, age_s=1.0)), SERVING])
def test_a_worker_that_is_told_to_start_twice_starts_once(node: NodeSnapshot) -> None:
    """The same order is repeated while the engine starts and while it serves."""
    for _ in range(2):
        assert not {StartEngine, StopEngine, StopProxy} & set(kinds(assignment(), node))


def test_an_engine_that_ended_waits_for_a_new_generation_while_there_is_contact() -> None:
    node = replace(SERVING, engine=None, failure=DIED)
    (wait,) = plan_convergence(assignment(), node, NOW_S + 3600)
    assert wait == Wait(None, "the control plane restarts the cell: the engine died")


def test_without_contact_it_restarts_in_the_same_generation_after_grace_and_backoff() -> None:
    lost_at_s = NOW_S - 2
    node = replace(SERVING, engine=None, failure=DIED, no_contact_since_s=lost_at_s)
    restart_at_s = lost_at_s + LIMITS.contact_grace_s
    assert [step.until_s for step in plan_convergence(assignment(), node, NOW_S) if isinstance(step, Wait)] == [
        restart_at_s
    ]
    assert kinds(assignment(), node, restart_at_s) == [StartEngine]


def test_without_contact_for_long_only_the_backoff_counts() -> None:
    node = NodeSnapshot(failure=replace(DIED, in_a_row=3), no_contact_since_s=0.0)
    assert kinds(assignment(), node, NOW_S + 3.9) == [Wait]
    assert kinds(assignment(), node, NOW_S + 4.0) == [StartEngine, StartProxy]


def test_without_contact_a_draining_or_stopped_engine_is_not_restarted() -> None:
    node = NodeSnapshot(failure=DIED, no_contact_since_s=0.0)
    assert kinds(assignment(phase=Phase.DRAIN), node) == []
    assert kinds(assignment(phase=Phase.STOP), node) == []


def test_a_failure_of_an_old_generation_does_not_hold_back_the_new_one() -> None:
    assert kinds(assignment(generation=2), NodeSnapshot(failure=DIED)) == [StartEngine, StartProxy]


def test_backoff_doubles_from_one_second_to_thirty() -> None:
    assert [restart_backoff_s(failures) for failures in (1, 2, 3, 5, 6, 99)] == [1.0, 2.0, 4.0, 16.0, 30.0, 30.0]


def test_an_engine_that_is_not_ready_in_time_is_given_up_and_ended() -> None:
    late_s = NOW_S - 100 + READY_TIMEOUT_S
    assert plan_convergence(assignment(), STARTING, late_s - 1) == (Wait(late_s, "the engine is starting"),)
    reason = "not ready within 60 s: loading"
    assert plan_convergence(assignment(), STARTING, late_s) == (
        MarkFailed(LEADER, reason),
        StopEngine(LIMITS.engine_stop_grace_s, reason),
    )
    given_up = replace(STARTING, failure=replace(DIED, reason=reason))
    assert kinds(assignment(), given_up, late_s) == [StopEngine]


def test_an_engine_that_was_ready_is_never_given_up_for_being_late() -> None:
    assert kinds(assignment(), replace(SERVING, health=Health(ok=False, reason="hangs")), NOW_S + 3600) == []


def test_a_proxy_restarts_at_once_and_then_with_growing_pauses() -> None:
    once = replace(SERVING, proxy=None, proxy_failure=replace(DIED, reason="the proxy died"))
    assert kinds(assignment(), once) == [StartProxy]
    again = replace(once, proxy_failure=Failure(LEADER, "the proxy died", NOW_S, in_a_row=3))
    assert kinds(assignment(), again, NOW_S + 1.9) == [Wait]
    assert kinds(assignment(), again, NOW_S + 2.0) == [StartProxy]


def test_a_proxy_that_answers_no_more_is_replaced_once_it_had_time_to_start() -> None:
    node = replace(SERVING, proxy=process(LEADER, age_s=20.0), proxy_silent_since_s=NOW_S - LIMITS.proxy_silent_s)
    assert kinds(assignment(), node) == [StopProxy]
    assert kinds(assignment(), replace(node, proxy=process(LEADER, age_s=10.0))) == []
    assert kinds(assignment(), replace(node, proxy_silent_since_s=NOW_S - 1.0)) == []


def test_other_pairs_have_another_name() -> None:
    names = {
        pairs_of(structs.replace(DECODES, **changes)).name
        for changes in ({}, {"prefill_cells": ()}, {"prefill_from_tokens": 7}, {"decode_nodes": ("n-1",)})
    }
    assert len(names) == 4
    assert pairs_of(assignment()).name == ""


UNHEALTHY = Health(ok=False, reason="follower 1 is gone")
STARTING_FOLLOWER = NodeSnapshot(engine=RunningProcess(FOLLOWER, 10, 0.0))
PROXY_DIED = Failure(LEADER, "the proxy died", NOW_S)
DRAIN, STOP = assignment(phase=Phase.DRAIN), assignment(phase=Phase.STOP)
OLD = "generation 1 of c-1 has not ended yet"


@pytest.mark.parametrize(
    ("desired", "node", "state", "reason"),
    [
        (assignment(), SERVING, "ready", ""),
        (assignment(rank=1), STARTING_FOLLOWER, "starting", "no answer yet"),
        (assignment(rank=1), replace(STARTING_FOLLOWER, health=Health(ok=True)), "ready", ""),
        (assignment(), NodeSnapshot(), "starting", "the engine is about to start"),
        (assignment(), NodeSnapshot(before_start="build b: fetching 1 GB"), "starting", "build b: fetching 1 GB"),
        (assignment(), replace(SERVING, health=UNHEALTHY, was_ready=False), "starting", "follower 1 is gone"),
        (assignment(), replace(SERVING, health=UNHEALTHY), "starting", "follower 1 is gone"),
        (assignment(), replace(SERVING, proxy_phase=None), "starting", "the cell proxy has not answered yet"),
        (assignment(), replace(SERVING, engine=None, failure=Failure(LEADER, "died", NOW_S)), "failed", "died"),
        (assignment(), replace(SERVING, proxy=None, proxy_failure=PROXY_DIED), "starting", "the proxy died"),
        (
            assignment(),
            replace(SERVING, proxy=None, proxy_failure=replace(PROXY_DIED, in_a_row=5)),
            "failed",
            "5 times in a row: the proxy died",
        ),
        (assignment(), replace(SERVING, proxy_silent_since_s=NOW_S - 1), "ready", ""),
        (assignment(), replace(SERVING, proxy_silent_since_s=0.0), "starting", "the cell proxy does not answer"),
        (assignment(generation=2), SERVING, "starting", OLD),
        (assignment(generation=2), replace(SERVING, failure=Failure(LEADER, "died", NOW_S)), "starting", OLD),
        (DRAIN, SERVING, "draining", ""),
        (DRAIN, NodeSnapshot(), "idle", "nothing runs here to drain"),
        (DRAIN, NodeSnapshot(failure=Failure(LEADER, "died", NOW_S)), "failed", "died"),
        (STOP, SERVING, "draining", "stopping the cell proxy"),
        (STOP, replace(SERVING, proxy=None), "draining", "stopping the engine"),
        (STOP, NodeSnapshot(failure=Failure(LEADER, "died", NOW_S)), "idle", ""),
    ],
)  # fmt: skip
def test_says(desired: Assignment, node: NodeSnapshot, state: str, reason: str) -> None:
    seen = observe(desired, node, NOW_S)
    assert (seen.state.value, seen.reason) == (state, reason)
    assert (seen.cell, seen.generation, seen.rank) == (desired.cell, desired.generation, desired.rank)


def test_a_spare_is_idle_and_names_no_cell() -> None:
    assert observe(None, NodeSnapshot(), NOW_S) == Observed(state=EngineState.IDLE)


def test_a_spare_to_be_names_the_cell_that_it_leaves() -> None:
    seen = observe(None, SERVING, NOW_S)
    assert (seen.state, seen.cell, seen.generation) == (EngineState.DRAINING, "c-1", 1)


def test_the_pid_is_of_the_generation_that_the_report_speaks_of() -> None:
    assert observe(assignment(), SERVING, NOW_S).engine_pid == 10
    assert observe(assignment(generation=2), SERVING, NOW_S).engine_pid is None


IN_FORCE = order(5, assignment(generation=3))


@pytest.mark.parametrize(
    "received",
    [
        pytest.param(IN_FORCE, id="the same order again"),
        pytest.param(order(6, assignment(generation=3, phase=Phase.DRAIN)), id="another phase"),
        pytest.param(order(6, assignment(generation=4)), id="the next generation"),
        pytest.param(order(6, assignment(generation=1, cell="c-2")), id="another cell, whatever its generation"),
        pytest.param(order(6, None), id="no cell"),
    ],
)
def test_takes(received: Desired) -> None:
    assert refusal(IN_FORCE, received, "n-1") is None


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        (order(6, assignment(generation=2)), "generation 2 of c-1 is older than 3"),
        (order(4, assignment(generation=4)), "its version 4 is older than 5"),
        (order(4, None), "its version 4 is older than 5"),
        (order(6, assignment(generation=3, rank=1)), "rank 1 in generation 3 of c-1, where this node is rank 0"),
        (order(6, None, node="n-2"), "it is for node n-2; this is n-1"),
    ],
)
def test_refuses(received: Desired, reason: str) -> None:
    assert refusal(IN_FORCE, received, "n-1") == reason


def test_the_first_order_is_taken_whatever_it_says() -> None:
    assert refusal(None, order(1, assignment(generation=9)), "n-1") is None
    assert refusal(order(1, None), order(2, assignment(generation=1)), "n-1") is None


def test_what_still_runs_counts_though_the_order_in_force_is_to_run_nothing() -> None:
    nothing, running = order(5, None), membership_of(assignment(generation=3))
    older = refusal(nothing, order(6, assignment(generation=2)), "n-1", running)
    assert older == "generation 2 of c-1 is older than 3"
    other_rank = refusal(nothing, order(6, assignment(generation=3, rank=1)), "n-1", running)
    assert other_rank == "rank 1 in generation 3 of c-1, where this node is rank 0"
    assert refusal(nothing, order(6, assignment(generation=3)), "n-1", running) is None
    assert refusal(nothing, order(6, assignment(generation=1, cell="c-2")), "n-1", running) is None
