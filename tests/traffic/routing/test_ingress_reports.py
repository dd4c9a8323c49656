"""The latest report wins, changes send wake-ups, and a bad row is dropped alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from fleet.faults.models import CellSighting
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import IngressReport, RoutingTable
from traffic.routing.services.ingresses import IngressRow, ingress_create, ingress_reports_store

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=2)


@pytest.fixture(autouse=True)
def ingresses() -> None:
    for port, region in enumerate(("us-east-1", "us-west-2")):
        ingress_create(region=rows.region(region), address="127.0.0.1", port=port, now=NOW)


def row(ingress: str = "i-us-east-1", **changes: Any) -> IngressRow:
    base = IngressRow(
        ingress=ingress, connection="k", connected=True, changed_at=NOW, seen_at=NOW, revision=3, cells={"c1": "up"}
    )
    return msgspec.structs.replace(base, **changes)


def test_a_report_is_kept_whole() -> None:
    ingress_reports_store([row(haproxy_pid=7, reason="r", telemetry={"conns": 2})])
    kept = IngressReport.objects.get()
    assert (kept.connected, kept.revision, kept.cells, kept.last_seen_at) == (True, 3, {"c1": "up"}, NOW)
    assert (kept.haproxy_pid, kept.reason, kept.telemetry) == (7, "r", {"conns": 2})


@pytest.mark.parametrize(
    ("change", "wakes"),
    [
        ({"seen_at": LATER, "telemetry": {"conns": 9}}, False),
        ({"revision": 4}, True),
        ({"cells": {"c1": "down"}}, True),
        ({"connected": False, "changed_at": LATER}, True),
    ],
)
def test_only_news_rings(
    change: dict[str, Any], wakes: bool, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    ingress_reports_store([row()])
    with django_capture_on_commit_callbacks() as callbacks:
        ingress_reports_store([row(**change)])
    assert bool(callbacks) is wakes


def test_coming_back_unchanged_is_news_too(django_capture_on_commit_callbacks: Callable[..., Any]) -> None:
    ingress_reports_store([row(), row(connected=False)])
    with django_capture_on_commit_callbacks() as callbacks:
        ingress_reports_store([row(connection="newer")])
    assert callbacks


def test_the_end_of_a_connection_keeps_what_it_said() -> None:
    ingress_reports_store([row(), row(connected=False, changed_at=LATER)])
    kept = IngressReport.objects.get()
    assert (kept.connected, kept.connection_changed_at, kept.revision) == (False, LATER, 3)


def test_the_end_of_an_older_connection_does_not_end_the_newer_one() -> None:
    ingress_reports_store([row(connection="newer"), row(connection="older", connected=False)])
    assert IngressReport.objects.get().connected


def test_an_unknown_ingress_is_passed_over() -> None:
    ingress_reports_store([row("i-unknown")])
    assert not IngressReport.objects.exists()


@pytest.mark.parametrize("poison", [{"revision": -1}, {"haproxy_pid": 2**40}])
def test_a_row_that_cannot_be_stored_is_dropped_and_named_and_the_others_are_kept(
    poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ingress_reports_store([row(**poison), row("i-us-west-2")])
    assert IngressReport.objects.get().ingress_id == "i-us-west-2"
    assert "dropped the report of i-us-east-1" in caplog.text


def test_nul_bytes_are_replaced() -> None:
    ingress_reports_store([row(reason="a\x00", cells={"c\x00": "up"})])
    kept = IngressReport.objects.get()
    assert (kept.reason, kept.cells) == ("a\ufffd", {"c\ufffd": "up"})


def test_unreachable_cells_are_reported_to_the_fleet_with_their_routed_generation() -> None:
    cell = {
        "cell": "c1", "generation": 4, "address": "127.0.0.1", "port": 1, "max_connections": 8
    }  # fmt: skip
    pool = {"name": "p", "models": [], "serving_class": "realtime", "cells": [cell], "spill": [], "fractions": {}}
    RoutingTable.objects.create(region_id="us-east-1", revision=3, body={"pools": [pool]}, reason="r", created_at=NOW)
    ingress_reports_store([row(cells={"c1": "down", "gone": "down"})])
    assert CellSighting.objects.get().down == {"c1": 4}
    ingress_reports_store([row(cells={"c1": "up"}, seen_at=LATER)])
    assert CellSighting.objects.get().down == {}
