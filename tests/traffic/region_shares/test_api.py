"""Shares of deployments and their history over HTTP."""

import pytest

from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficMatrix, TrafficShift

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_a_deployment_shows_its_shares_and_what_they_answer_to() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 15.0, WEST: 12.0})
    fleet.run(20)
    fleet.lose(EAST, 2)
    fleet.run(2)
    body = bearer().get("/api/v1/traffic/matrices/sim-70b").json()
    assert body["shares"] == TrafficMatrix.objects.get().shares
    assert (body["revision"], body["held"], body["utilisation_cap"]) == (2, "", 0.8)
    east, west = body["regions"]
    assert (east["region"], east["capacity_now"], west["capacity_now"]) == (EAST, 10, 30)
    assert east["load"] <= 8
    assert west["load"] <= 24


def test_before_the_first_plan_there_is_nothing_to_show_but_the_deployment() -> None:
    rows.deployment()
    body = bearer().get("/api/v1/traffic/matrices", {"deployment": "sim-70b"}).json()["results"][0]
    assert (body["deployment"], body["revision"], body["shares"], body["regions"]) == ("sim-70b", 0, {}, [])


def test_history_is_found_by_deployment_and_kind() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 15.0, WEST: 12.0})
    fleet.run(20)
    fleet.lose(EAST, 2)
    fleet.run(2)
    client = bearer()
    (relief,) = client.get("/api/v1/traffic/history", {"kind": "relief", "deployment": "sim-70b"}).json()["results"]
    assert relief["moved"] == pytest.approx(TrafficShift.objects.latest("id").moved)
    assert client.get(f"/api/v1/traffic/history/{relief['id']}").json() == relief
    assert client.get("/api/v1/traffic/history", {"deployment": "other"}).json()["results"] == []
