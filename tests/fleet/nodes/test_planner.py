"""When silence counts, from which nodes one fetches an artifact, and which may be in one cell by their reported
software."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.fingerprint import Difference
from engine_agent.protocol.messages import Holder
from fleet.faults.planning.liveness import plan_liveness
from fleet.nodes.planner import (
    MAX_EXCUSED,
    QUIET_AFTER,
    RECONNECT_WITHIN,
    HolderView,
    Listeners,
    ListenerView,
    compare_stacks,
    member_stacks,
    plan_holders,
    stack_digest,
)
from fleet.reconcile.planning.decisions import MoveNode
from fleet.reconcile.planning.snapshot import NodeView, ProviderStatus
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

LASTS = NOW + timedelta(seconds=5)
WELL = ListenerView(ago(3600), LASTS)
BEHIND = ListenerView(None, LASTS)


def heard(name: str, seconds: float, listener: str = "a", *, connected: bool = True) -> NodeView:
    report = {"last_seen_at": ago(seconds), "connection_changed_at": ago(seconds), "connected": connected}
    return node(name, report={**report, "listener": listener, "quiet": connected and seconds > 3})


def suspects(*nodes: NodeView, **listeners: ListenerView) -> list[str]:
    """`w` reports, so the control plane is not cut off."""
    view = replace(fleet(*nodes, heard("w", 0, "w")), listeners=Listeners({"w": WELL, **listeners}))
    decisions = plan_liveness(view, SETTINGS, NOW)
    return [d.node for d in decisions if isinstance(d, MoveNode) and d.to is NodeState.SUSPECT]


@pytest.mark.parametrize(("silence_s", "expected"), [(10, []), (11, ["n"])])
def test_real_silence_is_noticed_as_soon_as_ever(silence_s: float, expected: list[str]) -> None:
    assert suspects(heard("n", silence_s), a=WELL) == expected
    assert suspects(heard("n", silence_s, connected=False), a=WELL) == expected


def sends_heartbeats(name: str, reported_s: float, *, quiet: bool = False, connected: bool = True) -> NodeView:
    report = {"last_seen_at": ago(reported_s), "connection_changed_at": ago(3600), "listener": "a"}
    return node(name, report={**report, "quiet": quiet, "connected": connected})


def test_a_node_without_changes_is_heard_as_long_as_its_web_process_runs() -> None:
    assert suspects(sends_heartbeats("n", 30), a=WELL) == []
    assert suspects(sends_heartbeats("n", 30, quiet=True), a=WELL) == ["n"]
    assert suspects(sends_heartbeats("n", 30, connected=False), a=WELL) == ["n"]
    ended = ListenerView(ago(3600), ago(40))
    assert suspects(sends_heartbeats("n", 60), a=ended, b=WELL) == ["n"]


def test_a_report_certainly_holds_until_silence_would_have_been_noted() -> None:
    renewed_s = 5 - (LASTS - NOW).total_seconds()
    view = replace(fleet(sends_heartbeats("n", 30)), listeners=Listeners({"a": WELL}))
    there = view.nodes["n"]
    assert view.heard_at(there, NOW) == ago(renewed_s)
    assert view.holds_until(there, NOW) == ago(renewed_s) - QUIET_AFTER
    just = replace(fleet(sends_heartbeats("n", 1)), listeners=view.listeners)
    assert just.holds_until(just.nodes["n"], NOW) == ago(1)
    never = replace(fleet(node("n", report={"last_seen_at": None})), listeners=view.listeners)
    assert never.holds_until(never.nodes["n"], NOW) is None


def test_a_clock_that_is_ahead_makes_no_node_heard_in_the_future() -> None:
    ahead = replace(fleet(sends_heartbeats("n", 30)), listeners=Listeners({"a": ListenerView(NOW, ago(-300))}))
    assert ahead.heard_at(ahead.nodes["n"], NOW) == NOW


def test_while_a_web_process_is_behind_its_agents_are_not_silent_and_those_of_others_are() -> None:
    assert suspects(heard("n", 60), heard("other", 60, "b"), a=BEHIND, b=WELL) == ["other"]


@pytest.mark.parametrize(("caught_up_s", "expected"), [(9, []), (11, ["n"])])
def test_silence_counts_from_when_it_has_caught_up(caught_up_s: float, expected: list[str]) -> None:
    assert suspects(heard("n", 60), a=ListenerView(ago(caught_up_s), LASTS)) == expected


@pytest.mark.parametrize(("ended_s", "expected"), [(34, []), (36, ["n"])])
def test_agents_of_a_web_process_that_ended_or_is_stopped_have_time_to_find_another(
    ended_s: float, expected: list[str]
) -> None:
    """25 s, and then the 10 s until suspect."""
    assert suspects(heard("n", ended_s + 3), a=ListenerView(ago(3600), ago(ended_s))) == expected


def test_an_agent_that_waits_before_another_web_process_is_not_silent() -> None:
    gone = ListenerView(ago(3600), ago(60))
    assert suspects(heard("n", 62), a=gone, b=BEHIND) == []
    assert suspects(heard("n", 62, connected=False), a=WELL, b=BEHIND) == []
    assert suspects(heard("n", 62), a=gone, b=ListenerView(ago(34), LASTS)) == []
    assert suspects(heard("n", 62), a=gone, b=ListenerView(ago(36), LASTS)) == ["n"]
    assert suspects(heard("n", 62), a=gone, b=WELL) == ["n"]


def test_a_web_process_that_is_always_behind_or_starts_again_and_again_hides_no_dead_node() -> None:
    excused_s = MAX_EXCUSED.total_seconds()
    for other in (BEHIND, ListenerView(ago(1), LASTS)):
        assert suspects(heard("n", excused_s + 9), a=other) == []
        assert suspects(heard("n", excused_s + 11), a=other) == ["n"]
        assert suspects(heard("n", excused_s + 11, connected=False), a=WELL, b=other) == ["n"]


def test_a_node_that_is_only_excused_is_no_witness() -> None:
    """Its leader reported that the follower is gone before the web process fell behind."""
    broken = cell("c1", "l", "f", state=CellState.FAILED, state_since=ago(90), failed_by="l", reason="lost rank 1")
    leader = member("l", report={"last_seen_at": ago(40), "listener": "a", "quiet": True})
    follower = replace(
        member("f", report={"last_seen_at": ago(95), "listener": "w", "quiet": True}),
        state=NodeState.SUSPECT,
        provider=ProviderStatus.SILENT,
    )
    view = fleet(leader, follower, heard("w", 0, "w"), broken)
    view = replace(view, listeners=Listeners({"w": WELL, "a": BEHIND}))
    assert [d for d in plan_liveness(view, SETTINGS, NOW) if isinstance(d, MoveNode)] == []


_PAST = st.floats(0, 4000).map(ago)
_LISTENERS = st.builds(ListenerView, since=st.none() | _PAST, until=st.floats(-5, 4000).map(ago))


@given(
    st.dictionaries(st.sampled_from("abc"), _LISTENERS),
    st.floats(0, 4000),
    st.sampled_from(["", "a", "b", "x"]),
    st.booleans(),
)
def test_an_excuse_only_delays_and_never_for_longer_than_its_bound(
    listeners: dict[str, ListenerView], heard_s: float, listener: str, connected: bool
) -> None:
    heard_at = ago(heard_s)
    counts_from = Listeners(listeners).counts_from(heard_at, listener, connected=connected, now=NOW)
    assert heard_at <= counts_from <= heard_at + MAX_EXCUSED
    if all(one.since and max(one.since, one.until) + RECONNECT_WITHIN <= heard_at for one in listeners.values()):
        assert counts_from == heard_at


OLD = {"driver": "2.26", "sim.engine": "sim 1", "vllm.engine": "vllm 0.16.0"}
NEW = {**OLD, "driver": "2.27"}


def test_only_the_machine_and_the_cells_engine_count() -> None:
    other_vllm = {**OLD, "vllm.engine": "vllm 0.17.0"}
    assert stack_digest(OLD, "sim") == stack_digest(other_vllm, "sim") != stack_digest(NEW, "sim")
    assert stack_digest(OLD, "vllm") != stack_digest(other_vllm, "vllm")
    assert stack_digest({}, "sim") == ""


def test_members_are_grouped_by_what_they_run_the_leaders_group_first() -> None:
    seen = compare_stacks(member_stacks("sim", [(2, "c", NEW), (1, "b", OLD), (0, "a", NEW)]))
    assert [[rank.node for rank in group.ranks] for group in seen.groups] == [["a", "c"], ["b"]]
    assert seen.differing == (Difference("driver", ("2.27", "2.26", "2.27")),)
    assert seen.groups[0].digest == stack_digest(NEW, "sim")


def test_a_node_that_has_said_nothing_is_no_difference() -> None:
    seen = compare_stacks(member_stacks("sim", [(0, "a", OLD), (1, "b", {})]))
    assert len(seen.groups) == 1
    assert not seen.differing


HOLDER = HolderView("n-1", "eu", "10.0.0.1", 21000, is_whole=True, is_ready=True, is_leaving=False)


@pytest.mark.parametrize(
    "unfit",
    [
        {"node": "n-0"}, {"region": "us"}, {"address": ""}, {"address": "10.0.0.9"}, {"port_base": None},
        {"is_ready": False}, {"is_leaving": True},
    ],
)  # fmt: skip
def test_nodes_fetch_only_from_ready_nodes_of_their_region_that_stay(unfit: dict[str, Any]) -> None:
    assert plan_holders("n-0", "eu", "10.0.0.9", [HOLDER]) == (Holder("n-1", "10.0.0.1", 21000),)
    assert plan_holders("n-0", "eu", "10.0.0.9", [replace(HOLDER, **unfit)]) == ()


def test_complete_holders_are_named_first_and_nodes_get_different_ones() -> None:
    views = [replace(HOLDER, node=f"n-{n}", address=f"10.0.1.{n}", is_whole=n % 2 == 0) for n in range(20)]
    named = [[each.node for each in plan_holders(f"m-{n}", "eu", "", views)] for n in range(20)]
    assert all(len(set(one)) == 3 and all(int(name[2:]) % 2 == 0 for name in one) for one in named)
    assert len({tuple(one) for one in named}) > 10
    assert plan_holders("m-1", "eu", "", reversed(views)) == plan_holders("m-1", "eu", "", views)
    [*_, last] = plan_holders("m-1", "eu", "", [view for view in views if not view.is_whole or view.node == "n-2"])
    assert int(last.node[2:]) % 2 == 1
