"""Only one generation serves: each part rejects messages of an older one by name, as after a one-way network cut. Each
rejection has other tests; this is the list of them."""

from dataclasses import replace

import pytest

from engine_agent.cell_proxy.refusal import other_start
from engine_agent.engines.handshake import FollowerHandshake, HandshakeFailed, Identity, LeaderHandshake
from engine_agent.node.planning.node import membership_of, refusal
from engine_agent.protocol.states import EngineState
from fleet.cells.planner import plan_health
from fleet.reconcile.planning.states import CellState
from tests.engine_agent.orders import assignment, order
from tests.fleet.fleets import NOW, SETTINGS, cell, fleet, member

OLD = Identity("c-1", 3, 0, "n-00000000", {"vllm": "0.32.0"}, b"the secret of c-1, generation 3")
NEW = replace(OLD, generation=4, node_id="n-00000001", secret=b"the secret of c-1, generation 4")
BINDING = b"digest of the leader's certificate"


def test_an_ingress_that_still_routes_to_the_old_leader_is_refused_by_the_cell_of_the_new() -> None:
    answer = other_start("c-1-g3", "c-1-g4")
    assert (answer.status, answer.code, answer.retry) == (503, "other_generation", True)
    assert answer.message == "the request is for c-1-g3, this is c-1-g4"


def test_and_one_that_routes_to_the_new_is_refused_by_the_cell_of_the_old() -> None:
    assert other_start("c-1-g4", "c-1-g3").code == "other_generation"


def test_a_follower_of_the_old_generation_is_refused_by_the_leader_of_the_new() -> None:
    was = LeaderHandshake(OLD, 1, BINDING)
    join = FollowerHandshake(replace(OLD, rank=1), BINDING).join(was.challenge)
    decision = LeaderHandshake(NEW, 1, BINDING).decide(join, lambda _: "", taken_for_good=False)
    assert decision.joined is None
    assert decision.reason == "this is cell c-1 generation 4, not cell c-1 generation 3"


def test_a_leader_of_the_old_generation_is_refused_by_a_follower_of_the_new() -> None:
    challenge = LeaderHandshake(OLD, 1, BINDING).challenge
    with pytest.raises(HandshakeFailed, match="leads cell c-1 generation 3, not cell c-1 generation 4"):
        FollowerHandshake(replace(NEW, rank=1), BINDING).join(challenge)


def test_an_order_of_the_old_generation_is_refused_by_a_node_that_heard_or_runs_the_new() -> None:
    older, newer = assignment(generation=3), assignment(generation=4)
    said = "generation 3 of c-1 is older than 4"
    assert refusal(order(5, newer), order(6, older), "n-1") == said
    assert refusal(None, order(6, older), "n-1", membership_of(newer)) == said


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.FAILED])
def test_a_report_of_the_old_generation_neither_makes_the_new_ready_nor_fails_it(state: EngineState) -> None:
    old = {"state": state, "reason": "of the past"}
    view = fleet(member("l", report=old), member("f", generation=4), cell("c1", "l", "f", state=CellState.STARTING))
    newer = replace(view, cells={"c1": replace(view.cells["c1"], generation=4)})
    assert plan_health(newer, SETTINGS, NOW) == ()
