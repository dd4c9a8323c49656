"""Routing tables over HTTP."""

from typing import Any

import pytest

from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.models import RoutingTable

pytestmark = pytest.mark.django_db


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
