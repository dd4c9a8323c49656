"""Regions and instance types over HTTP."""

import pytest

from fleet.regions.models import Region
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import RoutingTable
from traffic.routing.services.tables import tables_publish

pytestmark = pytest.mark.django_db


def test_a_region_says_everything_about_itself() -> None:
    rows.region("us-east-1", ingress_url="http://127.0.0.1:8080", spares={"local.cpu": {"warm": 2, "repair_only": 1}})
    rows.node("n-00000001")
    rows.node("n-00000002", state="lost")
    rows.node("n-00000003", state="retired")
    rows.cell("a", state="starting")
    rows.cell("b", state="stopped")
    assert bearer().get("/api/v1/regions/us-east-1").json() == {
        "name": "us-east-1",
        "provider": "local",
        "position": 0,
        "ingress_url": "http://127.0.0.1:8080",
        "spares": {"local.cpu": 2},
        "repair_only": {"local.cpu": 1},
        "plain_http": "serve",
        "cheapest_first": False,
        "grpc": False,
        "alarms": [],
        "cloud": None,
        "nodes": {"joining": 0, "ready": 1, "suspect": 0, "faulty": 0, "lost": 1},
        "cells": {"pending": 0, "starting": 1, "ready": 0, "draining": 0, "failed": 0, "lost": 0},
    }


def test_each_region_counts_its_own() -> None:
    rows.node("n-00000001", where="us-east-1")
    rows.region("us-west-2")
    counts = {row["name"]: row["nodes"]["ready"] for row in bearer().get("/api/v1/regions").json()["results"]}
    assert counts == {"us-east-1": 1, "us-west-2": 0}


def test_regions_are_found_by_provider() -> None:
    rows.region("us-east-1", provider="aws")
    rows.region("us-west-2")
    assert [row["name"] for row in bearer().get("/api/v1/regions?provider=aws").json()["results"]] == ["us-east-1"]


def test_a_region_is_created_changed_and_deleted() -> None:
    rows.deployment()
    client, path = bearer("ada"), "/api/v1/regions/eu-west-1"
    made = client.post("/api/v1/regions", {"name": "eu-west-1", "spares": {"local.cpu": 2}}, format="json")
    assert made.json()["spares"] == {"local.cpu": 2}
    assert client.post("/api/v1/regions", {"name": "eu-west-1"}, format="json").status_code == 409
    changed = client.patch(path, {"spares": {}}, format="json")
    assert changed.json()["spares"] == {}
    assert client.delete(path).status_code == 428
    assert client.delete(path, headers={"if-match": changed["ETag"]}).status_code == 200
    assert not Region.objects.filter(name="eu-west-1").exists()


def test_only_a_region_of_a_cloud_has_pools_to_choose_the_cheapest_of() -> None:
    rows.region()
    refused = bearer().patch("/api/v1/regions/us-east-1", {"cheapest_first": True}, format="json")
    assert rules(refused) == {"cheapest_first": "provider"}
    Region.objects.update(provider="aws")
    changed = bearer().patch("/api/v1/regions/us-east-1", {"cheapest_first": True}, format="json")
    assert changed.json()["cheapest_first"] is True


def test_only_a_region_of_a_cloud_has_alarms() -> None:
    rows.region()
    named = {"alarms": [{"prefix": "node-"}]}
    assert rules(bearer().patch("/api/v1/regions/us-east-1", named, format="json")) == {"alarms": "provider"}
    Region.objects.update(provider="ecs")
    changed = bearer().patch("/api/v1/regions/us-east-1", named, format="json")
    assert changed.json()["alarms"] == [{"prefix": "node-", "replaces": False}]
    for wrong in ([{"prefix": "a"}] * 2, [{"replaces": True}], [{"prefix": ""}], "a", [{"prefix": "a"}] * 11):
        assert bearer().patch("/api/v1/regions/us-east-1", {"alarms": wrong}, format="json").status_code == 400
    assert Region.objects.get().alarms == [{"prefix": "node-", "replaces": False}]


def test_a_region_with_anything_in_it_is_not_deleted() -> None:
    rows.cell("c-1", rows.node("n-00000001"))
    response = bearer().delete("/api/v1/regions/us-east-1", headers={"if-match": "*"})
    assert response.status_code == 409
    assert "1 x cell" in response.json()["detail"]
    assert "1 x cell (c-1)" in response.json()["detail"]
    assert "1 x node (n-00000001)" in response.json()["detail"]


def test_a_region_that_nothing_was_part_of_is_deleted_with_its_routing_tables() -> None:
    rows.cell("c-1", rows.node("n-00000001"))
    bearer().post("/api/v1/regions", {"name": "eu-west-1"}, format="json")
    assert sorted(tables_publish(now=NOW)) == ["eu-west-1", "us-east-1"]
    assert bearer().delete("/api/v1/regions/eu-west-1", headers={"if-match": "*"}).status_code == 200
    assert set(RoutingTable.objects.values_list("region", flat=True)) == {"us-east-1"}
    assert tables_publish(now=NOW) == []


def test_spares_of_a_machine_that_nobody_knows_are_refused() -> None:
    response = bearer().post("/api/v1/regions", {"name": "eu", "spares": {"none": 1}}, format="json")
    assert rules(response) == {"spares.none": "exists"}


def test_a_name_with_which_two_ingresses_would_have_the_same_name_is_refused() -> None:
    api = bearer()
    assert api.post("/api/v1/regions", {"name": "eu-1"}, format="json").status_code == 200
    response = api.post("/api/v1/regions", {"name": "eu-1-2"}, format="json")
    assert (response.status_code, Region.objects.filter(name="eu-1-2").exists()) == (409, False)
    assert "would each have an ingress called i-eu-1-2: choose another name" in response.content.decode()
    other = api.post("/api/v1/regions", {"name": "eu-1-2", "provider": "machines"}, format="json")
    assert other.status_code == 200, "its ingresses are named after their machines"


@pytest.mark.parametrize("name", ["US_East", "-east", "a" * 41])
def test_a_name_that_no_certificate_of_its_ingresses_could_have_is_refused(name: str) -> None:
    response = bearer().post("/api/v1/regions", {"name": name}, format="json")
    assert rules(response) == {"name": "name"}
    assert "has 1 to 40 lower-case letters, digits, - and _, such as eu-west-1" in response.content.decode()
