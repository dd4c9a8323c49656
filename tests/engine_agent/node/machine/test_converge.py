"""What a machine agent does next: a table, and that no order ends what it does not name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.node.machine.agent import Here, Step, next_step, pause_s, phase_of
from engine_agent.protocol.machine_messages import MachineOrder, RunAgent
from engine_agent.protocol.states import AgentKind, MachinePhase

NODE = RunAgent(AgentKind.NODE, "n-1", "r", "10.0.0.7", 21000)
NONE = MachineOrder("m-1", 1)
RUN = MachineOrder("m-1", 2, NODE)
LEAVE = MachineOrder("m-1", 3, leave=True)


@pytest.mark.parametrize(
    ("order", "here", "step"),
    [
        (None, Here("n-1", alive=False), Step.NOTHING),
        (NONE, Here("", alive=False), Step.NOTHING),
        (NONE, Here("n-1", alive=True), Step.WIPE),
        (RUN, Here("", alive=False), Step.START),
        (RUN, Here("n-1", alive=True), Step.NOTHING),
        (RUN, Here("n-1", alive=False), Step.START),
        (RUN, Here("n-1", alive=False, start_after_s=11.0), Step.NOTHING),
        (RUN, Here("n-2", alive=True), Step.WIPE),
        (LEAVE, Here("n-1", alive=True), Step.WIPE),
        (LEAVE, Here("", alive=False), Step.LEAVE),
    ],
)
def test_the_next_step(order: MachineOrder | None, here: Here, step: Step) -> None:
    assert next_step(order, here, 10.0) is step


@pytest.mark.parametrize(
    ("order", "here", "phase"),
    [
        (None, Here("", alive=False), MachinePhase.IDLE),
        (RUN, Here("", alive=False), MachinePhase.STARTING),
        (RUN, Here("n-1", alive=True), MachinePhase.RUNNING),
        (RUN, Here("n-1", alive=False), MachinePhase.AGENT_DEAD),
    ],
)
def test_what_is_reported(order: MachineOrder | None, here: Here, phase: MachinePhase) -> None:
    assert phase_of(order, here) is phase
    assert phase_of(order, here, left=True) is MachinePhase.LEFT


@given(st.booleans(), st.booleans(), st.floats(0, 100), st.floats(0, 100))
def test_what_an_order_names_is_never_wiped(leave: bool, alive: bool, start_after_s: float, now_s: float) -> None:
    here = Here("n-1", alive=alive, start_after_s=start_after_s)
    step = next_step(MachineOrder("m-1", 2, NODE, leave=leave), here, now_s)
    assert (step is Step.WIPE) == leave


def test_what_ends_at_once_is_started_ever_more_slowly() -> None:
    assert [pause_s(failures) for failures in (0, 1, 2, 10, 10_000)] == [1.0, 2.0, 4.0, 30.0, 30.0]
