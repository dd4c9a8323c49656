"""A node takes only orders that speak of a later state than the one it holds (I5)."""

import pytest

from engine_agent.node.planning.node import membership_of
from engine_agent.node.planning.orders import refusal
from engine_agent.protocol.messages import Desired
from engine_agent.protocol.states import Phase
from tests.engine_agent.orders import assignment, order

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
