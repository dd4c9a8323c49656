"""Overrides over HTTP: preview, start, end."""

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from tests.controlplane.api.client import DescribedClient, bearer, rules
from tests.rows_of_a_file import rows_of_a_file
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficOverride

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

FIX: dict[str, Any] = {
    "deployment": "sim-70b",
    "origin": EAST,
    "shares": {EAST: 0.25, WEST: 0.75},
    "duration_s": 600,
    "why": "a test",
}
EVACUATE: dict[str, Any] = {"region": EAST, "mode": "real", "duration_s": 600, "why": "fire"}


@pytest.fixture(scope="module", autouse=True)
def _fleet(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with rows_of_a_file(django_db_blocker):
        Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0}).run(20)
        yield


@pytest.fixture
def client() -> DescribedClient:
    return bearer()


def test_a_preview_of_an_evacuation_says_who_receives_what_and_changes_nothing(client: DescribedClient) -> None:
    (effect,) = client.post("/api/v1/traffic/evacuations/preview", EVACUATE, format="json").json()["effects"]
    east, west = effect["regions"]
    assert (east["load_after"], west["receives"]) == (0.0, pytest.approx(12, abs=0.5))
    assert west["utilisation_after"] == pytest.approx(0.8, abs=0.03)
    assert effect["shares"][EAST] == {WEST: 1.0}
    assert not TrafficOverride.objects.exists()


def test_an_evacuation_needs_the_regions_name_once_more(client: DescribedClient) -> None:
    url = "/api/v1/traffic/evacuations"
    assert rules(client.post(url, EVACUATE, format="json")) == {"confirm": "required"}
    assert rules(client.post(url, {**EVACUATE, "confirm": WEST}, format="json")) == {"confirm": "confirm"}
    given = client.post(url, {**EVACUATE, "confirm": EAST}, format="json").json()
    assert (given["kind"], given["mode"], given["deployment"], given["actor"]) == (
        "evacuation",
        "real",
        None,
        "operator",
    )
    assert [row["id"] for row in client.get(url).json()["results"]] == [given["id"]]


def test_fixed_shares_are_previewed_given_and_ended(client: DescribedClient) -> None:
    url = "/api/v1/traffic/overrides"
    (effect,) = client.post(f"{url}/preview", FIX, format="json").json()["effects"]
    assert effect["shares"][EAST] == {EAST: 0.25, WEST: 0.75}
    given = client.post(url, FIX, format="json").json()
    ended = client.post(f"{url}/{given['id']}/end", {"why": "done"}, format="json").json()
    assert (ended["active"], ended["end_reason"]) == (False, "ended by operator: done")
    assert client.post(f"{url}/{given['id']}/end", {}, format="json").status_code == 409
    assert client.get(url, {"ended": "false"}).json()["results"] == []
    assert len(client.get(url, {"ended": "true", "kind": "shares"}).json()["results"]) == 1


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"shares": {EAST: 0.5}}, {"shares": "sum"}),
        ({"origin": "mars"}, {"origin": "exists"}),
        ({"duration_s": 1}, {"duration_s": "min_value"}),
        ({"hurry": True}, {"hurry": "unknown"}),
    ],
)
def test_an_order_that_cannot_be_meant_is_refused_in_preview_too(
    client: DescribedClient, changes: dict[str, Any], broken: dict[str, str]
) -> None:
    for path in ("overrides", "overrides/preview"):
        assert rules(client.post(f"/api/v1/traffic/{path}", {**FIX, **changes}, format="json")) == broken
