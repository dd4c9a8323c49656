"""Reports in one statement: the latest wins, and only news is news."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from fleet.models import Node, NodeReport
from fleet.planning.states import NodeState
from fleet.services.reports import NodeRow, fault_record, node_introduced, reports_store
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def row(node: str = "n-a", **changes: Any) -> NodeRow:
    base = NodeRow(node=node, connection="k", connected=True, changed_at=NOW, seen_at=NOW)
    return msgspec.structs.replace(base, **changes)


def test_nothing_to_store_is_no_statement() -> None:
    assert reports_store([]) == []


def test_a_first_report_is_news_and_its_repetition_is_not() -> None:
    rows.node("n-a", connected=False)
    assert reports_store([row()]) == ["n-a"]
    assert reports_store([row(seen_at=NOW + timedelta(seconds=2), load={"in_flight": 3})]) == []
    stored = NodeReport.objects.get(node_id="n-a")
    assert stored.load == {"in_flight": 3}
    assert stored.last_seen_at == NOW + timedelta(seconds=2)


@pytest.mark.parametrize(
    "change", [{"state": "failed"}, {"cell": "c2"}, {"generation": 7}, {"connected": False}, {"healthy": False}]
)
def test_what_a_planner_cares_about_is_news(change: dict[str, Any]) -> None:
    rows.node("n-a")
    assert reports_store([row(**change)]) == ["n-a"]


def test_unhealthy_since_keeps_its_first_moment_and_ends_with_health() -> None:
    rows.node("n-a")
    reports_store([row(healthy=False)])
    reports_store([row(healthy=False, seen_at=NOW + timedelta(seconds=4))])
    assert NodeReport.objects.get(node_id="n-a").unhealthy_since == NOW
    reports_store([row()])
    assert NodeReport.objects.get(node_id="n-a").unhealthy_since is None


def test_the_end_of_an_older_connection_does_not_end_the_newer_one() -> None:
    rows.node("n-a", report={"connection": "newer"})
    assert reports_store([row(connection="older", connected=False)]) == []
    assert NodeReport.objects.get(node_id="n-a").connected


def test_retired_and_unknown_nodes_are_passed_over() -> None:
    rows.node("n-gone", state=NodeState.RETIRED, connected=False)
    assert reports_store([row("n-gone"), row("n-unknown")]) == []


def test_many_reports_are_one_statement(django_assert_max_num_queries: Any) -> None:
    for index in range(50):
        rows.node(f"n-{index}", connected=False)
    with django_assert_max_num_queries(3):
        assert len(reports_store([row(f"n-{index}") for index in range(50)])) == 50


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"x": inner}
    return inner


POISON = {
    "a number beyond its column": {"generation": 2**40},
    "a name that is too long": {"agent_version": "v" * 100},
    "a nesting that nobody can encode": {"telemetry": nested(5000)},
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_row_that_cannot_be_stored_is_dropped_and_named_and_the_others_are_kept(
    poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"n-{index}" for index in range(7)}
    for name in names:
        rows.node(name, connected=False)
    said = [row(name, **(poison if name == "n-4" else {})) for name in sorted(names)]
    assert set(reports_store(said)) == names - {"n-4"}
    assert NodeReport.objects.get(connected=False).node_id == "n-4"
    assert "n-4" in caplog.text


def test_the_last_words_of_a_crash_are_kept_without_their_nul_bytes() -> None:
    rows.node("n-a")
    reports_store([row(state="failed", reason="core\x00dumped", telemetry={"log": ["\x00"]})])
    stored = NodeReport.objects.get()
    assert (stored.state, stored.reason, stored.telemetry) == ("failed", "core\ufffddumped", {"log": ["\ufffd"]})
    fault_record(node="n-a", signature="x", summary="\x00", evidence={"line": "\x00"}, now=NOW)
    assert Event.objects.get().detail == {"line": "\ufffd"}


def test_a_fault_names_the_cell_that_the_node_is_in() -> None:
    rows.cell("c1", rows.node("n-a"))
    fault_record(node="n-a", signature="y" * 100, summary="broke", evidence={"gpu": 3}, now=NOW)
    event = Event.objects.get()
    assert (event.cell, event.deployment, event.detail, len(event.kind)) == ("c1", "sim-70b", {"gpu": 3}, 64)


def test_a_fault_of_an_unknown_node_is_passed_over() -> None:
    fault_record(node="n-unknown", signature="x", summary="", evidence={}, now=NOW)
    assert not Event.objects.exists()


def test_a_hello_says_what_the_machine_is_and_an_empty_topology_keeps_the_one_known() -> None:
    rows.node("n-a", topology=["known"])
    node_introduced(node="n-a", topology=(), fingerprint={"kernel": "6"}, accelerators=("H100", "H100"))
    assert Node.objects.values_list("topology", "fingerprint").get() == (["known"], {"kernel": "6"})
    assert Node.objects.get().accelerators == ["H100", "H100"]
    node_introduced(node="n-a", topology=("x", "y"), fingerprint={}, accelerators=())
    assert Node.objects.get().topology == ["x", "y"]


def test_a_hello_with_nul_bytes_is_kept_without_them() -> None:
    rows.node("n-a")
    node_introduced(node="n-a", topology=("rack\x00",), fingerprint={"board": "x\x00"}, accelerators=("\x00",))
    assert Node.objects.values_list("topology", "fingerprint").get() == (["rack\ufffd"], {"board": "x\ufffd"})
