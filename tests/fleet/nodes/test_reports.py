"""Reports are stored in one statement: the latest wins, and only changes are announced."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from msgspec import convert
from msgspec.json import encode
from msgspec.structs import fields, replace

from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Health, Hello, Inventory, Observed, Report, StepTimes
from engine_agent.protocol.states import AgentKind, EngineState
from engine_agent.protocol.telemetry_messages import Accelerator, NodeTelemetry
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.services import reports
from fleet.nodes.services.reports import ReceivedReport, fault_record, hellos_store, reports_store
from fleet.reconcile.planning.states import NodeState
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


IDLE = Report(seq=1, observed=Observed(state=EngineState.IDLE))


def received(node: str = "n-a", *, report: Report = IDLE, **changes: Any) -> ReceivedReport:
    base = ReceivedReport(node, "k", True, NOW, NOW, report)
    return replace(base, **changes)


def observed(**changes: Any) -> Report:
    return replace(IDLE, observed=replace(IDLE.observed, **changes))


UNHEALTHY = replace(IDLE, health=Health(ok=False))
LATER = NOW + timedelta(seconds=4)


def test_every_field_of_a_report_is_a_column_and_every_column_a_field() -> None:
    stated = {field.name for kind in (ReceivedReport, Report, Observed) for field in fields(kind)}
    columns = {field.attname for field in NodeReport._meta.concrete_fields}
    assert stated - columns == {"report", "observed", "seq"}
    assert columns - stated == {"unhealthy_since"}


def test_what_a_report_states_is_stored_under_its_own_name() -> None:
    rows.node("n-a")
    full = Report(
        seq=9,
        observed=Observed(EngineState.READY, cell="c1", generation=3, rank=1, reason="r", engine_pid=7),
        health=Health(ok=True, reason="probed"),
        load=Load(ttft_counts={12: 4}),
        telemetry=NodeTelemetry(accelerators=(Accelerator(0, "nvidia", "H100", utilisation_percent=42.0),)),
        steps=StepTimes(steps={3: 1}),
    )
    reports_store([received(report=full, boot_id="b", agent_version="2")])
    stored: Any = NodeReport.objects.get()
    assert (stored.state, stored.cell, stored.generation, stored.rank) == ("ready", "c1", 3, 1)
    assert (stored.reason, stored.engine_pid, stored.boot_id, stored.agent_version) == ("r", 7, "b", "2")
    assert (stored.health["reason"], stored.load["ttft_counts"], stored.steps["steps"]) == (
        "probed",
        {"12": 4},
        {"3": 1},
    )
    assert convert(stored.telemetry, NodeTelemetry) == full.telemetry


def test_nothing_to_store_is_no_statement() -> None:
    assert reports_store([]) == []


def test_a_first_report_is_news_and_its_repetition_is_not() -> None:
    rows.node("n-a", connected=False)
    assert reports_store([received()]) == ["n-a"]
    assert reports_store([received(last_seen_at=LATER, report=replace(IDLE, load=Load(in_flight=3)))]) == []
    stored: Any = NodeReport.objects.get(node_id="n-a")
    assert (stored.load["in_flight"], stored.last_seen_at) == (3, LATER)


@pytest.mark.parametrize(
    "change",
    [
        received(report=observed(state=EngineState.FAILED)),
        received(report=observed(cell="c2")),
        received(report=observed(generation=7)),
        received(report=UNHEALTHY),
        received(connected=False),
    ],
)
def test_what_a_planner_cares_about_is_news(change: ReceivedReport) -> None:
    rows.node("n-a")
    assert reports_store([change]) == ["n-a"]


def test_unhealthy_since_keeps_its_first_moment_and_ends_with_health() -> None:
    rows.node("n-a")
    reports_store([received(report=UNHEALTHY)])
    reports_store([received(report=UNHEALTHY, last_seen_at=LATER)])
    assert NodeReport.objects.get(node_id="n-a").unhealthy_since == NOW
    reports_store([received()])
    assert NodeReport.objects.get(node_id="n-a").unhealthy_since is None


@pytest.mark.parametrize(
    ("newer_reported_after_s", "state"),
    [(-30, "idle"), (-5, "ready"), (0, "ready"), (30, "ready"), (300, "idle")],
    ids=["newer one silent", "just before", "at once", "held back for long", "clock set back"],
)
def test_what_an_older_connection_left_at_another_web_changes_nothing_of_a_newer_one(
    newer_reported_after_s: int, state: str
) -> None:
    seen = NOW + timedelta(seconds=newer_reported_after_s)
    newer = {"connection": "newer", "connection_changed_at": LATER, "last_seen_at": seen, "state": "ready"}
    rows.node("n-a", report=newer)
    reports_store([received(connection="older")])
    assert NodeReport.objects.get().state == state


def test_a_flush_touches_no_row_for_each_other_row() -> None:
    """PostgreSQL's work grows with the rows, not with their square."""
    names = [f"n-{number}" for number in range(40)]
    for name in names:
        rows.node(name)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE fleet_node, fleet_nodereport")  # another test may have changed them
        for way in (
            "hashjoin",
            "mergejoin",
            "seqscan",
        ):  # the worst case of its estimates: tables have indexes, parts have none
            cursor.execute(f"SET LOCAL enable_{way} = off")
        statement = f"EXPLAIN (ANALYZE, FORMAT JSON) {reports._STORE.as_string(None)}"
        cursor.execute(
            statement, {"rows": encode([reports._report_columns(received(name)) for name in names]).decode()}
        )
        ((plan,),) = cursor.fetchone()
    assert max(_rows_touched(plan["Plan"])) <= 2 * len(names)


def _rows_touched(step: dict[str, Any]) -> Iterator[float]:
    """Sum of the rows of each step of a plan, over all its loops."""
    left_out = sum(step.get(each, 0) for each in step if each.startswith("Rows Removed by"))
    yield (step["Actual Rows"] + left_out) * step["Actual Loops"]
    for part in step.get("Plans", ()):
        yield from _rows_touched(part)


def test_the_end_of_an_older_connection_does_not_end_the_newer_one() -> None:
    rows.node("n-a", report={"connection": "newer"})
    assert reports_store([received(connection="older", connected=False)]) == []
    assert NodeReport.objects.get(node_id="n-a").connected


def test_retired_and_unknown_nodes_are_passed_over() -> None:
    rows.node("n-gone", state=NodeState.RETIRED, connected=False)
    assert reports_store([received("n-gone"), received("n-unknown")]) == []


def test_many_reports_are_one_statement(django_assert_max_num_queries: Any) -> None:
    for index in range(50):
        rows.node(f"n-{index}", connected=False)
    with django_assert_max_num_queries(3):
        assert len(reports_store([received(f"n-{index}") for index in range(50)])) == 50


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"x": inner}
    return inner


POISON = {
    "a number beyond its column": {"report": observed(generation=2**40)},
    "a name that is too long": {"agent_version": "v" * 100},
    "a nesting that nobody can encode": {"report": replace(IDLE, telemetry=nested(5000))},
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_row_that_cannot_be_stored_is_dropped_and_named_and_the_others_are_kept(
    poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"n-{index}" for index in range(7)}
    for name in names:
        rows.node(name, connected=False)
    reports = [received(name, **(poison if name == "n-4" else {})) for name in sorted(names)]
    assert set(reports_store(reports)) == names - {"n-4"}
    assert NodeReport.objects.get(connected=False).node_id == "n-4"
    assert "n-4" in caplog.text


def test_the_last_words_of_a_crash_are_kept_without_their_nul_bytes() -> None:
    rows.node("n-a")
    crash = observed(state=EngineState.FAILED, reason="core\x00dumped")
    reports_store([received(report=replace(crash, telemetry=NodeTelemetry(refused_order="\x00")))])
    stored: Any = NodeReport.objects.get()
    assert (stored.state, stored.reason, stored.telemetry) == (
        "failed",
        "core\ufffddumped",
        {"refused_order": "\ufffd"},
    )
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


def hello(**changes: Any) -> Hello:
    base = Hello(protocol=1, kind=AgentKind.NODE, id="n-a", boot_id="b", agent_version="1")
    return replace(base, **changes)


def inventory(*accelerators: str, port_base: int = 9400) -> Inventory:
    return Inventory("local.cpu", "10.0.0.7", port_base, cores=2, memory_bytes=1, accelerators=accelerators)


def test_a_hello_says_what_the_machine_is_and_an_empty_topology_keeps_the_one_known() -> None:
    rows.node("n-a", topology=["known"])
    hellos_store([hello(fingerprint={"kernel": "6"}, inventory=inventory("H100", "H100"))])
    node = Node.objects.get()
    assert (node.topology, node.fingerprint, node.accelerators) == (["known"], {"kernel": "6"}, ["H100", "H100"])
    assert node.address == "127.0.0.1", "what the provider stated stays"
    hellos_store([hello(topology=("x", "y"))])
    assert Node.objects.get().topology == ["x", "y"]


def test_hellos_of_many_are_one_statement_and_write_only_what_is_new(django_assert_num_queries: Any) -> None:
    for name in ("n-a", "n-b", "n-c"):
        rows.node(name)
    known = [hello(id=name, fingerprint={"kernel": "6"}) for name in ("n-a", "n-b")]
    hellos_store(known)
    versions = dict(row_versions())
    with django_assert_num_queries(4):  # a savepoint and its release, the statement, and the nodes without an address
        assert hellos_store([*known, hello(id="n-c", fingerprint={"kernel": "6"})]) == {}
    assert [name for name, version in row_versions() if version != versions[name]] == ["n-c"]


def row_versions() -> list[tuple[str, str]]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, ctid::text FROM fleet_node ORDER BY id")
        return list(cursor.fetchall())


def test_a_hello_that_cannot_be_stored_is_refused_alone() -> None:
    for name in ("n-a", "n-b", "n-c"):
        rows.node(name)
    poison = hello(id="n-b", fingerprint={"deep": "\ud800"})
    refused = hellos_store([hello(id="n-a", topology=("x",)), poison, hello(id="n-c", topology=("x",))])
    assert list(refused) == ["n-b"]
    assert list(Node.objects.order_by("id").values_list("topology", flat=True)) == [["x"], ["spine", "rack"], ["x"]]


def test_a_hello_with_nul_bytes_is_kept_without_them() -> None:
    rows.node("n-a")
    hellos_store([hello(topology=("rack\x00",), fingerprint={"board": "x\x00"}, inventory=inventory("\x00"))])
    node = Node.objects.get()
    assert (node.topology, node.fingerprint, node.accelerators) == (["rack\ufffd"], {"board": "x\ufffd"}, ["\ufffd"])
