"""Random fleets: after any failure the planners bring every target cell back without breaking a rule. Failures known
from other systems: short or one-sided symptoms cause no action, and dead cells are not kept because a rank still
answers. Rollouts are in `tests/fleet/rollouts/test_whole_rollouts.py`; the list with its scenarios is in
`tests/simulator/test_hurt_elsewhere.py`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.states import EngineState
from fleet.faults.planning.views import IncidentKind
from fleet.reconcile.planning.decisions import MoveCell, MoveNode, OpenIncident
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.snapshot import FleetView, ProviderStatus
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node
from tests.fleet.world import World


@pytest.mark.slow
@given(
    wanted=st.integers(1, 3),
    nodes_per_cell=st.integers(1, 3),
    warm=st.integers(0, 2),
    kills=st.lists(st.tuples(st.integers(3, 40), st.integers(0, 9)), max_size=5),
)
def test_every_wanted_cell_comes_back_after_any_nodes_die(
    wanted: int, nodes_per_cell: int, warm: int, kills: list[tuple[int, int]]
) -> None:
    world = World(fleet(wanted=wanted, nodes_per_cell=nodes_per_cell, warm=warm))
    for tick in range(120):
        for _, index in (kill for kill in kills if kill[0] == tick):
            world.kill(index)
        world.tick()
        world.check_rules()
    assert len(world.cells(CellState.READY)) == wanted
    assert world.spare_count() == warm


def first_round(view: FleetView) -> tuple[Any, ...]:
    """Decisions of the first planner in a round that has any."""
    return next((decided for planner in PLANNERS if (decided := planner(view, SETTINGS, NOW))), ())


def pair(leader: dict[str, Any], follower: dict[str, Any], **changes: Any) -> FleetView:
    ranks = (member("l", report=leader), member("f", report=follower, **changes))
    return fleet(
        *ranks, member("o", of="c2"), member("p", of="c2"), cell("c1", "l", "f"), cell("c2", "o", "p"), wanted=2
    )


def test_one_failed_probe_changes_nothing() -> None:
    assert first_round(pair({"unhealthy_since": ago(3), "health_reason": "timeout"}, {})) == ()


def test_one_missed_report_changes_nothing() -> None:
    assert first_round(pair({}, {"last_seen_at": ago(4)})) == ()


def test_all_agents_silent_at_once_is_an_incident_and_no_action() -> None:
    silent = {"last_seen_at": ago(300)}
    view = fleet(
        *(member(name, of="c1", report=silent) for name in "lf"), node("s", report=silent), cell("c1", "l", "f")
    )
    (opened,) = first_round(view)
    assert isinstance(opened, OpenIncident)
    assert opened.kind is IncidentKind.ALL_SILENT


def test_a_leader_that_answers_200_does_not_hide_that_its_followers_engine_is_dead() -> None:
    (moved,) = first_round(pair({}, {"state": EngineState.FAILED, "reason": "exit 1"}))
    assert isinstance(moved, MoveCell)
    assert (moved.cell, moved.to) == ("c1", CellState.FAILED)


def test_nor_that_its_followers_machine_is_gone() -> None:
    (moved,) = first_round(pair({}, {"connected": False}, provider=ProviderStatus.GONE))
    assert isinstance(moved, MoveNode)
    assert (moved.node, moved.to) == ("f", NodeState.LOST)


@pytest.mark.parametrize("silence_s", [31, 3600])
def test_a_silent_follower_of_a_leader_that_serves_is_suspect_and_never_lost(silence_s: float) -> None:
    view = pair({}, {"last_seen_at": ago(silence_s)}, state=NodeState.SUSPECT)
    told = [decision for decision in first_round(view) if isinstance(decision, OpenIncident)]
    assert first_round(view) == tuple(told), "an operator is told of it after a while, and nothing else is done"
    assert len(told) == (silence_s > SETTINGS.unreachable_after_s)


@pytest.mark.parametrize("verdict", [ProviderStatus.GONE, ProviderStatus.UNKNOWN])
def test_a_stale_verdict_does_nothing_to_a_node_that_came_back(verdict: ProviderStatus) -> None:
    """It was suspect and its provider called it gone, but it reports again."""
    back = member("f", state=NodeState.SUSPECT, state_since=ago(20), provider=verdict)
    view = fleet(member("l"), back, cell("c1", "l", "f"))
    (moved,) = first_round(view)
    assert isinstance(moved, MoveNode)
    assert (moved.node, moved.to) == ("f", NodeState.READY)
