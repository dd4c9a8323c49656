"""Web processes record that they listen and whether they keep up."""

from datetime import timedelta

import pytest
from django.db import connection

from fleet.nodes.models import HOLDS_SINCE, AgentListener, Node, NodeReport, holds_since
from fleet.nodes.planner import ListenerView
from fleet.nodes.services.reports import FORGOTTEN_AFTER, listener_renew
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE, fleet_view
from kernel.leases import lease_held_since
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def renew(listener: str, after_s: float, *, keeps_up: bool = True) -> ListenerView:
    listener_renew(listener=listener, keeps_up=keeps_up, now=NOW + timedelta(seconds=after_s))
    return fleet_view(now=NOW).listeners.by_id[listener]


def at(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def test_it_listens_since_it_has_kept_up_without_a_gap() -> None:
    assert renew("a", 0) == ListenerView(NOW, NOW + at(5))
    assert renew("a", 3) == ListenerView(NOW, NOW + at(8))
    assert renew("a", 4, keeps_up=False) == ListenerView(None, NOW + at(9))
    assert renew("a", 6) == ListenerView(NOW + at(6), NOW + at(11))


def test_one_that_was_stopped_for_a_while_begins_anew() -> None:
    renew("a", 0)
    assert renew("a", 60) == ListenerView(NOW + at(60), NOW + at(65))


def test_somebody_listens_while_one_process_keeps_up() -> None:
    def since(after_s: float) -> object:
        return lease_held_since(name=LISTENING_LEASE, now=NOW + at(after_s))

    renew("a", 0, keeps_up=False)
    assert since(1) is None
    renew("b", 2)
    renew("a", 3, keeps_up=False)
    assert since(4) == NOW + at(2)
    renew("b", 5, keeps_up=False)
    assert since(8) is None


def test_processes_that_ended_long_ago_are_forgotten_when_another_begins() -> None:
    renew("a", 0)
    renew("b", FORGOTTEN_AFTER.total_seconds())
    renew("c", FORGOTTEN_AFTER.total_seconds() + 6)
    assert set(AgentListener.objects.values_list("id", flat=True)) == {"b", "c"}


def test_a_report_holds_while_heartbeats_follow_it() -> None:
    """In both forms, for Django's queries and for SQL: the web process runs, and did not note silence."""
    for listener, after_s in (("runs", 60), ("ended", 0)):
        listener_renew(listener=listener, keeps_up=True, now=NOW + at(after_s))
    for name, report in {
        "n-held": {"listener": "runs"},
        "n-new": {"listener": "ended", "last_seen_at": NOW + at(50)},
        "n-quiet": {"listener": "runs", "quiet": True},
        "n-gone": {"listener": "runs", "connected": False},
        "n-ended": {"listener": "ended"},
        "n-unknown": {"listener": "x"},
        "n-never": {"listener": "runs", "last_seen_at": None, "connected": False},
    }.items():
        rows.node(name, report=report)
    since = NOW + at(45)
    held = NodeReport.objects.filter(holds_since(since)).values_list("node_id", flat=True)
    assert set(held) == {"n-held", "n-new"}
    assert set(Node.objects.filter(holds_since(since, "report__")).values_list("id", flat=True)) == set(held)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT node_id FROM fleet_nodereport AS report WHERE {HOLDS_SINCE}", {"since": since})  # noqa: S608
        assert {node for (node,) in cursor.fetchall()} == set(held)
