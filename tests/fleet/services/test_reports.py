"""Reports in one statement: the latest wins, and only news is news."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from fleet.models import NodeReport
from fleet.planning.states import NodeState
from fleet.services.reports import NodeRow, reports_store
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


def test_a_thousand_reports_are_one_statement(django_assert_max_num_queries: Any) -> None:
    for index in range(50):
        rows.node(f"n-{index}", connected=False)
    with django_assert_max_num_queries(3):
        assert len(reports_store([row(f"n-{index}") for index in range(50)])) == 50
