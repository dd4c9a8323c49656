"""Ingresses and routing tables over HTTP."""

from typing import Any

import pytest

from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import Ingress, IngressReport, RoutingTable

pytestmark = pytest.mark.django_db


def ingress(where: str = "us-east-1", **report: Any) -> Ingress:
    row = Ingress.objects.create(
        id=f"i-{where}", region=rows.region(where), address="127.0.0.1", port=8080, created_at=NOW
    )
    if report:
        IngressReport.objects.create(ingress=row, **report)
    return row


def test_an_ingress_says_everything_about_itself() -> None:
    row = ingress(
        connected=True, last_seen_at=NOW, revision=2, haproxy_pid=7, cells={"c": "up"}, agent_version="0.1.0+1"
    )
    for revision in (1, 2, 3):
        RoutingTable.objects.create(region=row.region, revision=revision, body={}, reason="r", created_at=NOW)
    assert bearer().get("/api/v1/ingresses/i-us-east-1").json() == {
        "id": "i-us-east-1",
        "region": "us-east-1",
        "address": "127.0.0.1",
        "port": 8080,
        "connected": True,
        "last_seen_at": "2026-11-21T12:00:00Z",
        "agent_version": "0.1.0+1",
        "revision": 2,
        "wanted_revision": 3,
        "haproxy_pid": 7,
        "reason": "",
        "cells": {"c": "up"},
        "created_at": "2026-11-21T12:00:00Z",
    }


def test_an_ingress_that_never_reported_runs_nothing() -> None:
    ingress()
    body = bearer().get("/api/v1/ingresses/i-us-east-1").json()
    assert (body["connected"], body["revision"], body["wanted_revision"], body["cells"]) == (False, 0, 0, {})
    assert body["agent_version"] == ""


def test_ingresses_are_found_by_region_and_connection() -> None:
    ingress(connected=True)
    ingress("us-west-2", connected=False)
    client = bearer()
    for query in ({"region": "us-east-1"}, {"connected": "true"}):
        assert [row["id"] for row in client.get("/api/v1/ingresses", query).json()["results"]] == ["i-us-east-1"]


def table(revision: int, where: str = "us-east-1") -> RoutingTable:
    return RoutingTable.objects.create(
        region=rows.region(where), revision=revision, body={"revision": revision}, reason="r", created_at=NOW
    )


def ids(**query: Any) -> list[str]:
    return [row["id"] for row in bearer().get("/api/v1/routing-tables", query).json()["results"]]


def test_a_routing_table_says_everything_about_itself() -> None:
    table(1)
    table(2)
    shown = {
        "id": "us-east-1@2",
        "region": "us-east-1",
        "revision": 2,
        "current": True,
        "reason": "r",
        "created_at": "2026-11-21T12:00:00Z",
    }
    client = bearer()
    assert client.get("/api/v1/routing-tables").json()["results"][0] == shown
    assert client.get("/api/v1/routing-tables/us-east-1@2").json() == {**shown, "body": {"revision": 2}}
    assert client.get("/api/v1/routing-tables/us-east-1@1").json()["current"] is False


def test_routing_tables_are_found_by_region_and_by_being_the_newest() -> None:
    table(1)
    table(2)
    table(7, "us-west-2")
    assert ids() == ["us-west-2@7", "us-east-1@2", "us-east-1@1"]
    assert ids(region="us-east-1") == ["us-east-1@2", "us-east-1@1"]
    assert ids(current="true") == ["us-west-2@7", "us-east-1@2"]
    assert ids(current="false") == ["us-east-1@1"]


def test_a_revision_that_is_not_there_is_not_found() -> None:
    table(1)
    assert bearer().get("/api/v1/routing-tables/us-east-1@2").status_code == 404
