"""What a node says of itself: state and reason for each thing that can be the case."""

from dataclasses import replace

import pytest

from engine_agent.node.planning.node import Failure, Membership, NodeSnapshot, RunningProcess
from engine_agent.node.planning.observe import observe
from engine_agent.protocol.messages import Assignment, Health, Observed
from engine_agent.protocol.states import EngineState, Phase
from tests.engine_agent.orders import assignment

NOW_S = 1000.0
LEADER = Membership("c-1", 1, 0)
UNHEALTHY = Health(ok=False, reason="follower 1 is gone")
SERVING = NodeSnapshot(
    engine=RunningProcess(LEADER, 10, 0.0),
    proxy=RunningProcess(LEADER, 11, 0.0),
    health=Health(ok=True),
    was_ready=True,
    proxy_phase=Phase.SERVE,
)
FOLLOWING = NodeSnapshot(engine=RunningProcess(Membership("c-1", 1, 1), 10, 0.0))
PROXY_DIED = Failure(LEADER, "the proxy died", NOW_S)
DRAIN, STOP = assignment(phase=Phase.DRAIN), assignment(phase=Phase.STOP)
OLD = "generation 1 of c-1 has not ended yet"


@pytest.mark.parametrize(
    ("desired", "node", "state", "reason"),
    [
        (assignment(), SERVING, "ready", ""),
        (assignment(rank=1), FOLLOWING, "starting", "no answer yet"),
        (assignment(rank=1), replace(FOLLOWING, health=Health(ok=True)), "ready", ""),
        (assignment(), NodeSnapshot(), "starting", "the engine is about to start"),
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
        (STOP, SERVING, "draining", "ending the cell proxy"),
        (STOP, replace(SERVING, proxy=None), "draining", "ending the engine"),
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
