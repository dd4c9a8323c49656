"""Pools of capacity over HTTP."""

from datetime import timedelta

import pytest

from audit.models import AuditRecord
from fleet.capacity.planning.pools import Market
from fleet.clouds.models import CapacityPool
from kernel import clock
from tests.controlplane.api.client import bearer, rules
from tests.fleet.pools import TYPE, pool

pytestmark = pytest.mark.django_db

PATH = "/api/v1/capacity-pools"
SPOT = {"region": "us-east-1", "instance_type": TYPE, "zone": "us-east-1a", "max_price": 9.5, "why": "cheaper"}


def test_a_pool_says_everything_about_itself() -> None:
    row = pool(2, Market.RESERVED, reservation="cr-1", network_nodes=["nn-1"], free=0)
    assert bearer().get(f"{PATH}/{row.pk}").json() == {
        "id": row.pk,
        "region": "us-east-1",
        "instance_type": TYPE,
        "position": 2,
        "market": "reserved",
        "zone": "us-east-1a",
        "zone_id": "use1-a",
        "subnet": "subnet-a",
        "image": "ami-1",
        "reservation": "cr-1",
        "placement_group": "",
        "network_nodes": ["nn-1"],
        "max_price": None,
        "price_per_hour": None,
        "price_at": None,
        "ends_at": None,
        "free": 0,
        "enabled": True,
        "origin": "stack",
        "declared_by": "",
        "state": "full",
        "tone": "idle",
        "paused_until": None,
        "pause_reason": "",
        "failures": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("", [0, 1, 2, 0]),
        ("?region=us-east-1", [0, 1, 2]),
        ("?region=us-east-1&market=spot", [1]),
        ("?market=spot&market=on_demand&region=us-east-1", [0, 1]),
        ("?state=off", [1]),
        ("?state=resting", [0]),
        ("?zone=us-east-1b", [2]),
        ("?instance_type=none", []),
    ],
)
def test_pools_are_found_by_what_they_are(query: str, places: list[int]) -> None:
    pool(0, paused_until=clock.now() + timedelta(hours=1))
    pool(1, Market.SPOT, enabled=False)
    pool(2, Market.RESERVED, zone="us-east-1b", free=0)
    pool(0, region="eu-west-1")
    assert [row["position"] for row in bearer().get(f"{PATH}{query}").json()["results"]] == places


def test_a_spot_pool_is_declared_changed_and_removed_and_each_is_recorded() -> None:
    first = pool(0)
    client = bearer("ada")
    made = client.post(PATH, SPOT, format="json").json()
    assert (made["market"], made["origin"], made["declared_by"], made["position"]) == ("spot", "person", "ada", 1)
    path = f"{PATH}/{made['id']}"
    changed = client.patch(path, {"position": 0, "max_price": None, "enabled": False}, format="json").json()
    assert (changed["position"], changed["max_price"], changed["state"]) == (0, None, "off")
    assert client.post(f"{path}/remove", {}, format="json").status_code == 200
    assert client.post(f"{PATH}/{first.pk}/remove", {}, format="json").status_code == 409
    assert list(CapacityPool.objects.values_list("pk", flat=True)) == [first.pk]
    actions = list(AuditRecord.objects.filter(outcome="done").order_by("pk").values_list("action", flat=True))
    assert actions == ["capacity-pool.create", "capacity-pool.change", "capacity-pool.remove"]


def test_a_resting_pool_is_resumed() -> None:
    row = pool(0, paused_until=clock.now() + timedelta(hours=1), pause_reason="none", failures=2)
    answer = bearer().post(f"{PATH}/{row.pk}/resume", {"why": "capacity is back"}, format="json")
    assert (answer.json()["state"], answer.json()["failures"]) == ("usable", 0)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({**SPOT, "zone": "us-east-1z"}, {"zone": "exists"}),
        ({**SPOT, "market": "reserved"}, {"market": "declarable"}),
        ({**SPOT, "market": "free"}, {"market": "invalid_choice"}),
        ({**SPOT, "max_price": 0}, {"max_price": "min_value"}),
        ({**SPOT, "subnet": "subnet-1"}, {"subnet": "unknown"}),
        ({"region": "us-east-1"}, {"instance_type": "required", "zone": "required"}),
    ],
)
def test_what_cannot_be_declared_is_refused(body: dict[str, object], refused: dict[str, str]) -> None:
    pool(0)
    assert rules(bearer().post(PATH, body, format="json")) == refused


def test_a_change_under_an_old_etag_is_refused() -> None:
    row = pool(0)
    client = bearer()
    seen = client.get(f"{PATH}/{row.pk}")["ETag"]
    client.patch(f"{PATH}/{row.pk}", {"enabled": False}, format="json")
    again = client.patch(f"{PATH}/{row.pk}", {"enabled": True}, format="json", headers={"if-match": seen})
    assert again.status_code == 412


def test_one_that_is_not_there_is_not_found() -> None:
    assert bearer().get(f"{PATH}/99").status_code == 404
    assert bearer().patch(f"{PATH}/999999999", {"enabled": True}, format="json").status_code == 404
