"""Silence needs a second witness, and a control plane that is cut off condemns no node."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.states import EngineState
from fleet.faults.planning.liveness import nodes_in_doubt, plan_liveness, status_in_force
from fleet.faults.planning.views import FaultsView
from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.decisions import MoveNode, RestartAgent
from fleet.reconcile.planning.snapshot import FleetView, NodeView, ProviderStatus, RegionView, ReportView
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node


def silent(name: str, seconds: float, *, connected: bool = True, **changes: Any) -> NodeView:
    report = {"connected": connected, "last_seen_at": ago(seconds), "connection_changed_at": ago(seconds)}
    return node(name, report=report, **changes)


def moves(view: FleetView) -> list[tuple[str, NodeState]]:
    return [(d.node, d.to) for d in plan_liveness(view, SETTINGS, NOW) if isinstance(d, MoveNode)]


def test_a_reporting_node_stays_as_it_is() -> None:
    assert plan_liveness(fleet(node("a"), node("b")), SETTINGS, NOW) == ()


def test_a_joining_node_becomes_ready_when_its_agent_connects() -> None:
    assert moves(fleet(node("a", state=NodeState.JOINING))) == [("a", NodeState.READY)]


@pytest.mark.parametrize(("age_s", "expected"), [(119, []), (121, [("a", NodeState.LOST)])])
def test_a_node_that_never_joins_is_lost_after_its_timeout(age_s: float, expected: list[object]) -> None:
    waiting = node("a", state=NodeState.JOINING, state_since=ago(age_s), report={"connected": False})
    assert moves(fleet(waiting, node("b"))) == expected


def test_the_time_to_join_passes_only_while_somebody_listens() -> None:
    waiting = node("a", state=NodeState.JOINING, report={"connected": False})
    assert moves(fleet(waiting, node("b"), listening_since=ago(60))) == []


@pytest.mark.parametrize(("age_s", "expected"), [(1199, []), (1201, [("a", NodeState.LOST)])])
def test_a_region_waits_for_its_machines_as_long_as_its_provider_says(age_s: float, expected: list[object]) -> None:
    report = {"connected": False, "last_seen_at": None}
    waiting = node("a", state=NodeState.JOINING, state_since=ago(age_s), report=report)
    unlisted = node("b", state=NodeState.JOINING, state_since=ago(299), provider=ProviderStatus.GONE, report=report)
    slow = RegionView("east", limits=ProviderLimits(launch_grace_s=300, join_timeout_s=1200))
    view = fleet(waiting, unlisted, node("c"), listening_since=ago(3600))
    assert moves(replace(view, regions={"east": slow})) == expected


@pytest.mark.parametrize(("age_s", "expected"), [(9, []), (11, [("a", NodeState.LOST)])])
def test_a_provider_may_not_know_of_a_new_machine_for_a_moment(age_s: float, expected: list[object]) -> None:
    report = {"connected": False, "last_seen_at": None}
    new = node("a", state=NodeState.JOINING, state_since=ago(age_s), provider=ProviderStatus.GONE, report=report)
    assert moves(fleet(new, node("b"))) == expected


def test_a_closed_connection_and_a_machine_that_is_gone_make_a_loss_at_once() -> None:
    gone = silent("a", 0.2, connected=False, provider=ProviderStatus.GONE)
    assert moves(fleet(gone, node("b"))) == [("a", NodeState.LOST)]


def test_a_machine_that_is_gone_while_its_agent_still_reports_is_no_loss() -> None:
    assert moves(fleet(node("a", provider=ProviderStatus.GONE), node("b"))) == []


def test_a_dead_agent_on_a_running_machine_is_started_again() -> None:
    dead = silent("a", 1.5, connected=False, provider=ProviderStatus.AGENT_DEAD)
    assert [type(d) for d in plan_liveness(fleet(dead, node("b")), SETTINGS, NOW)] == [RestartAgent]


def test_a_connection_that_closed_just_now_is_given_a_moment_to_come_back() -> None:
    dead = silent("a", 0.5, connected=False, provider=ProviderStatus.AGENT_DEAD)
    assert plan_liveness(fleet(dead, node("b")), SETTINGS, NOW) == ()


def test_silence_makes_suspect_but_never_alone_a_loss() -> None:
    assert moves(fleet(silent("a", 12), node("b"))) == [("a", NodeState.SUSPECT)]
    assert moves(fleet(silent("a", 900, state=NodeState.SUSPECT), node("b"))) == []


def test_silence_and_a_leader_that_lost_its_follower_make_a_loss() -> None:
    leader = member("l", report={"state": EngineState.FAILED, "reason": "lost rank 1"})
    follower = replace(member("f", report={"connected": False, "last_seen_at": ago(31)}), state=NodeState.SUSPECT)
    assert moves(fleet(leader, follower, cell("c1", "l", "f"))) == [("f", NodeState.LOST)]


def test_silence_of_a_leader_and_a_follower_that_lost_it_make_a_loss() -> None:
    leader = replace(member("l", report={"connected": False, "last_seen_at": ago(31)}), state=NodeState.SUSPECT)
    said = {"state": EngineState.FAILED, "reason": "leader at 10.1.0.2:21010 does not answer"}
    assert moves(fleet(leader, member("f", report=said), cell("c1", "l", "f"))) == [("l", NodeState.LOST)]
    assert moves(fleet(leader, member("f"), cell("c1", "l", "f"))) == []
    away = member("f", report={**said, "connected": False, "last_seen_at": ago(5)})
    assert moves(fleet(leader, away, cell("c1", "l", "f"), node("s"))) == []


def failed_with(leader: NodeView, *others: NodeView, **changes: Any) -> FleetView:
    """A fleet whose cell `c1` failed 12 s ago, as its follower reported before it stopped its engine."""
    said = {"failed_by": "f", "reason": "rank 1 on f: leader at 10.1.0.2:21010 does not answer"} | changes
    broken = cell(
        "c1", "l", "f", state=CellState.FAILED, state_since=ago(8 if leader.state is NodeState.READY else 12), **said
    )
    return fleet(leader, member("f", report={"state": EngineState.IDLE}), broken, *others)


@pytest.mark.parametrize(
    ("silence_s", "provider", "expected"),
    [
        (9, ProviderStatus.SILENT, []),
        (13, ProviderStatus.SILENT, [("l", NodeState.LOST)]),
        (13, ProviderStatus.UNKNOWN, []),
        (29, ProviderStatus.RUNNING, []),
        (31, ProviderStatus.RUNNING, [("l", NodeState.LOST)]),
    ],
)
def test_a_failed_cell_remembers_who_said_so_and_its_silent_member_is_lost(
    silence_s: float, provider: ProviderStatus, expected: list[object]
) -> None:
    """Immediately if its machine is silent as well, because waiting would protect nothing."""
    state = NodeState.READY if silence_s < SETTINGS.suspect_after_s else NodeState.SUSPECT
    assert moves(failed_with(silent("l", silence_s, state=state, provider=provider))) == expected


def test_a_cell_that_failed_before_its_member_fell_silent_is_no_witness() -> None:
    spoke_since = silent("l", 11, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    assert moves(failed_with(spoke_since)) == []


@pytest.mark.parametrize("failed_by", ["", "l"])
def test_nor_is_one_of_which_nobody_else_said_that_it_failed(failed_by: str) -> None:
    leader = silent("l", 31, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    assert moves(failed_with(leader, failed_by=failed_by)) == []


@pytest.mark.parametrize(
    ("silence_s", "provider", "expected"),
    [
        (119, ProviderStatus.SILENT, []),
        (121, ProviderStatus.SILENT, [("s", NodeState.LOST)]),
        (3600, ProviderStatus.RUNNING, []),
        (3600, ProviderStatus.UNKNOWN, []),
    ],
)
def test_a_silent_spare_is_given_up_once_its_machine_is_silent_too(
    silence_s: float, provider: ProviderStatus, expected: list[object]
) -> None:
    spare = silent("s", silence_s, state=NodeState.SUSPECT, provider=provider)
    assert moves(fleet(spare, node("a"), node("b"))) == expected


def test_a_spare_is_not_given_up_while_much_of_its_region_is_silent() -> None:
    quiet = [silent(name, 600, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT) for name in ("s", "t")]
    elsewhere = [replace(node(f"w{number}"), region="west") for number in range(5)]
    assert moves(fleet(*quiet, node("a"), *elsewhere)) == []


def test_a_silent_member_is_given_up_only_if_its_cell_serves_nothing() -> None:
    quiet = silent("a", 600, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    for state in CellState:
        view = fleet(quiet, node("b"), node("d"), cell("c1", "a", state=state), nodes_per_cell=1)
        expected = [("a", NodeState.LOST)] if state in {CellState.FAILED, CellState.LOST} else []
        assert moves(view) == expected, state


def back(name: str, seconds_ago: float, **changes: Any) -> NodeView:
    return node(name, report={"connection_changed_at": ago(seconds_ago), **changes.pop("report", {})}, **changes)


@pytest.mark.parametrize(("since_s", "expected"), [(59, []), (60, [("l", NodeState.LOST)])])
def test_who_came_back_a_moment_ago_is_no_witness_against_who_is_still_away(
    since_s: float, expected: list[object]
) -> None:
    leader = silent("l", 600, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    broken = cell("c1", "l", "f", state=CellState.FAILED, state_since=ago(5), failed_by="f", reason="lost rank 0")
    follower = replace(member("f", report={"state": EngineState.IDLE}))
    follower = replace(follower, report=replace(follower.report, connection_changed_at=ago(since_s)))
    assert moves(fleet(leader, follower, broken)) == expected
    spare = silent("l", 600, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    assert moves(fleet(spare, back("a", since_s), back("b", since_s))) == expected


@pytest.mark.parametrize(
    ("back_s", "listening_s", "heard_s", "expected"),
    [
        (22, 600, 12, [("l", NodeState.LOST)]),
        (21, 600, 12, []),
        (600, 22, 12, [("l", NodeState.LOST)]),
        (600, 21, 12, []),
        (22, 30, 12, [("l", NodeState.LOST)]),
        (30, 21, 12, []),
        (5, 600, 12, []),
        (22, 600, 9, []),
    ],
)
def test_who_came_back_a_moment_ago_is_a_witness_against_who_was_heard_since(
    back_s: float, listening_s: float, heard_s: float, expected: list[object]
) -> None:
    """A machine loses its power 10 s after a control host, or 12 s before."""
    state = NodeState.SUSPECT if heard_s > SETTINGS.suspect_after_s else NodeState.READY
    leader = silent("l", heard_s, state=state, provider=ProviderStatus.SILENT)
    broken = cell("c1", "l", "f", state=CellState.FAILED, state_since=ago(8), failed_by="f", reason="lost rank 0")
    report = {"state": EngineState.IDLE, "connection_changed_at": ago(back_s)}
    view = fleet(leader, member("f", report=report), broken, listening_since=ago(listening_s))
    assert [move for move in moves(view) if move[1] is NodeState.LOST] == expected


def test_nothing_is_given_up_until_we_have_listened_for_long_enough() -> None:
    spare = silent("s", 600, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
    assert moves(fleet(spare, node("a"), node("b"), listening_since=ago(59))) == []


@given(
    st.lists(st.floats(0, 59), min_size=3, max_size=8),
    st.floats(0, 59.9),
    st.sampled_from([120.0, 600.0, 7200.0]),
)
def test_a_region_that_comes_back_within_a_minute_loses_nobody(
    returns_s: list[float], now_s: float, cut_s: float
) -> None:
    """Spares and members of broken cells, in any order, at any time after the first one is back."""
    after_s = [each - min(returns_s) for each in returns_s]
    nodes = [
        back(f"n{number}", now_s - each)
        if each <= now_s
        else silent(f"n{number}", cut_s + now_s, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
        for number, each in enumerate(after_s)
    ]
    broken = cell("c1", "n0", "n1", state=CellState.FAILED, state_since=ago(now_s / 2), failed_by="n0", reason="cut")
    lost = [move for move in moves(fleet(*nodes, broken)) if move[1] is NodeState.LOST]
    assert lost == []


@given(st.lists(st.tuples(st.floats(0, 59), st.floats(0, 9)), min_size=3, max_size=8), st.floats(20, 59.9))
def test_a_cut_that_ends_in_fits_and_starts_loses_nobody(spoke: list[tuple[float, float]], now_s: float) -> None:
    """All but the first, which stays, reconnect briefly once and for good some time later."""
    nodes = [back("n0", now_s)]
    for number, (returns_s, spoke_s) in enumerate(spoke, 1):
        heard_s = now_s - min(spoke_s, now_s)
        away = silent(f"n{number}", heard_s, state=NodeState.SUSPECT, provider=ProviderStatus.SILENT)
        nodes.append(back(f"n{number}", now_s - returns_s) if spoke_s < returns_s <= now_s else away)
    broken = cell("c1", "n0", "n1", state=CellState.FAILED, state_since=ago(now_s / 2), failed_by="n0", reason="cut")
    lost = [move for move in moves(fleet(*nodes, broken)) if move[1] is NodeState.LOST]
    assert lost == []


def test_a_leader_that_failed_in_an_older_generation_is_no_witness() -> None:
    leader = member("l", generation=2, report={"state": EngineState.FAILED, "reason": "lost rank 1"})
    follower = replace(member("f", report={"connected": False, "last_seen_at": ago(31)}), state=NodeState.SUSPECT)
    assert moves(fleet(leader, follower, cell("c1", "l", "f"))) == []


def test_a_leader_that_failed_in_another_cell_is_no_witness() -> None:
    leader = member("l", of="c9", report={"state": EngineState.FAILED, "reason": "out of memory"})
    follower = replace(member("f", report={"connected": False, "last_seen_at": ago(31)}), state=NodeState.SUSPECT)
    assert moves(fleet(leader, follower, cell("c1", "l", "f"))) == []


def test_an_ingress_witnesses_against_followers_only_once_their_leader_is_silent_too() -> None:
    quiet = {"connected": False, "last_seen_at": ago(31)}
    follower = member("f", report=quiet, state=NodeState.SUSPECT)
    others = [node(f"s{number}") for number in range(40)]  # two of a pool so large may be replaced together
    down = FaultsView(down={"c1": "i-east"})
    serving = fleet(member("l"), follower, cell("c1", "l", "f"), *others)
    assert moves(replace(serving, faults=down)) == []
    silent_cell = fleet(member("l", report=quiet, state=NodeState.SUSPECT), follower, cell("c1", "l", "f"), *others)
    assert moves(replace(silent_cell, faults=down)) == [("l", NodeState.LOST)]
    after = fleet(member("l", report=quiet, state=NodeState.LOST), follower, cell("c1", "l", "f"), *others)
    assert moves(replace(after, faults=down)) == [("f", NodeState.LOST)]


def test_a_suspect_that_reports_again_is_ready() -> None:
    assert moves(fleet(node("a", state=NodeState.SUSPECT), node("b"))) == [("a", NodeState.READY)]


def test_all_silent_at_once_means_that_we_are_broken() -> None:
    assert moves(fleet(silent("a", 100), silent("b", 100))) == []


def test_all_silent_and_all_gone_is_believed() -> None:
    gone = [silent(name, 100, connected=False, provider=ProviderStatus.GONE) for name in "ab"]
    assert moves(fleet(*gone)) == [("a", NodeState.LOST), ("b", NodeState.LOST)]


def test_nobody_listening_means_nothing_is_decided() -> None:
    gone = silent("a", 100, connected=False, provider=ProviderStatus.GONE)
    assert moves(fleet(gone, node("b"), listening_since=None)) == []


def test_silence_is_counted_only_while_somebody_listened() -> None:
    assert moves(fleet(silent("a", 300), node("b"), listening_since=ago(5))) == []


def test_the_provider_is_asked_about_quiet_and_closed_nodes_only() -> None:
    view = fleet(node("a"), silent("b", 4), silent("c", 0.1, connected=False), silent("d", 9, state=NodeState.LOST))
    assert nodes_in_doubt(view, SETTINGS, NOW) == ("b", "c")


@pytest.mark.parametrize(
    ("described_s_ago", "report", "counts"),
    [
        (1.0, {"connected": False, "connection_changed_at": ago(2)}, True),
        (3.0, {"connected": False, "connection_changed_at": ago(2)}, False),
        (1.0, {"connected": True, "last_seen_at": ago(4)}, True),
        (5.0, {"connected": True, "last_seen_at": ago(4)}, False),
        (14.0, {"connected": False, "last_seen_at": None}, True),
        (16.0, {"connected": False, "last_seen_at": None}, False),
    ],
)
def test_what_a_provider_said_counts_while_it_is_about_this_silence(
    described_s_ago: float, report: dict[str, Any], counts: bool
) -> None:
    view = ReportView(**{"last_seen_at": None, **report})
    said = status_in_force(ProviderStatus.GONE, ago(described_s_ago), view, SETTINGS, NOW)
    assert said is (ProviderStatus.GONE if counts else ProviderStatus.UNKNOWN)


def test_a_node_that_is_not_launched_yet_is_neither_missed_nor_judged() -> None:
    new = node(
        "a", state=NodeState.JOINING, state_since=ago(999), ordered=ProviderAction.LAUNCH, report={"connected": False}
    )
    assert nodes_in_doubt(fleet(new, node("b")), SETTINGS, NOW) == ()
    assert moves(fleet(new, node("b"))) == []


def test_an_agent_whose_start_is_ordered_is_not_started_again() -> None:
    dead = silent("a", 1.5, connected=False, provider=ProviderStatus.AGENT_DEAD, ordered=ProviderAction.RESTART_AGENT)
    assert plan_liveness(fleet(dead, node("b")), SETTINGS, NOW) == ()


@pytest.mark.parametrize(
    ("topology", "within", "joined_s", "state"),
    [
        (("az",), 3, 1.0, None),
        (("az",), 3, 2.6, NodeState.READY),
        (("az", "a", "b", "c"), 3, 1.0, NodeState.READY),
        (("az",), 1, 1.0, NodeState.READY),
    ],
)
def test_a_join_waits_for_its_place_where_cells_must_be_near_and_no_longer_than_asking_takes(
    topology: tuple[str, ...], within: int, joined_s: float, state: NodeState | None
) -> None:
    new = node("n", state=NodeState.JOINING, topology=topology, report={"connection_changed_at": ago(joined_s)})
    view = fleet(new, node("o"))
    view = replace(
        view,
        regions={"east": replace(view.regions["east"], limits=ProviderLimits(places_s=1.25))},
        deployments={"llama": replace(view.deployments["llama"], within=within)},
    )
    moved = [decision for decision in plan_liveness(view, SETTINGS, NOW) if isinstance(decision, MoveNode)]
    assert [move.to for move in moved] == ([state] if state else [])
