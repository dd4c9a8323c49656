"""Quotas over HTTP: use, permissions and errors."""

from typing import Any

import pytest

from audit.models import AuditRecord
from fleet.deployments.models import Deployment
from fleet.quotas.models import Quota
from kernel.models import Event
from tests.controlplane.access.callers import calls, granted, make_user
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/quotas"


def owned(team: str, **columns: Any) -> Deployment:
    """A deployment of a team with cells of two machines."""
    deployment = rows.deployment(**columns)
    Deployment.objects.update(team=team)
    return deployment


def give(**body: Any) -> Any:
    stated = {"team": "search", "instance_type": "local.cpu", "machines": 1, **body}
    return bearer("operator").post(URL, stated, format="json")


def test_a_quota_says_who_uses_and_borrows_what() -> None:
    deployment = owned("search", cells=2)
    rows.cell("a", rows.node("n-1"), rows.node("n-2"))
    assert give().status_code == 200
    quota = bearer().get(f"{URL}/search:local.cpu").json()
    assert quota | {"changed_at": ""} == {
        "name": "search:local.cpu",
        "team": "search",
        "instance_type": "local.cpu",
        "region": "",
        "machines": 1,
        "borrow_most": None,
        "wanted": 4,
        "used": 2,
        "borrowed": 1,
        "idle": 0,
        "deployments": [deployment.name],
        "changed_by": "operator",
        "changed_at": "",
    }


def test_it_is_set_anew_and_ends() -> None:
    rows.deployment()
    give()
    assert give(machines=5, borrow_most=2).json()["machines"] == 5
    assert [(row.machines, row.borrow_most) for row in Quota.objects.all()] == [(5, 2)]
    assert bearer("operator").delete(f"{URL}/search:local.cpu").json()["idle"] == 5
    assert not Quota.objects.exists()
    assert list(Event.objects.order_by("pk").values_list("kind", flat=True)) == [
        "quota.set", "quota.set", "quota.removed",
    ]  # fmt: skip
    assert AuditRecord.objects.count() == 3


def test_a_quota_of_a_region_counts_what_is_there_and_stands_beside_the_one_over_all() -> None:
    owned("search", cells=2)
    rows.cell("a", rows.node("n-1"), rows.node("n-2"))
    rows.region("eu-west-1")
    give(machines=6)
    assert give(machines=5, region="us-east-1").json()["used"] == 2
    assert give(machines=3, region="eu-west-1").json()["used"] == 0
    listed = {row["name"]: (row["region"], row["wanted"], row["idle"]) for row in bearer().get(URL).json()["results"]}
    assert listed == {
        "search:local.cpu": ("", 4, 4),
        "search:local.cpu:us-east-1": ("us-east-1", 4, 3),
        "search:local.cpu:eu-west-1": ("eu-west-1", 0, 3),
    }
    assert bearer("operator").delete(f"{URL}/search:local.cpu:eu-west-1").json()["region"] == "eu-west-1"
    assert [row["name"] for row in bearer().get(URL, {"region": "us-east-1"}).json()["results"]] == [
        "search:local.cpu:us-east-1"
    ]


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ({"machines": 4}, {"machines": 5, "region": "us-east-1"}, "state 4 at most, or raise that first"),
        ({"machines": 5, "region": "us-east-1"}, {"machines": 4}, "state 5 at least, or lower us-east-1 first"),
    ],
)
def test_a_region_has_no_more_than_all_of_them(first: dict[str, Any], then: dict[str, Any], told: str) -> None:
    rows.deployment()
    give(**first)
    refused = give(**then)
    assert refused.status_code == 400
    assert told in str(refused.json())
    assert Quota.objects.count() == 1


def test_what_is_so_already_is_no_event() -> None:
    rows.deployment()
    give()
    give()
    assert Event.objects.count() == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"team": "a team"}, "team"),
        ({"instance_type": "none"}, "instance_type"),
        ({"region": "mars-1"}, "region"),
        ({"machines": -1}, "machines"),
        ({"machines": 1_000_000}, "machines"),
        ({"borrow_most": -1}, "borrow_most"),
        ({"more": 1}, "more"),
    ],
)
def test_what_makes_no_sense_is_refused(body: dict[str, Any], field: str) -> None:
    rows.deployment()
    assert field in rules(give(**body))
    assert not Quota.objects.exists()


def test_a_viewer_looks_and_sets_nothing() -> None:
    rows.deployment()
    give()
    viewer = calls(make_user("vera"))
    assert viewer.get(URL).json()["results"][0]["team"] == "search"
    stated = {"team": "search", "instance_type": "local.cpu", "machines": 9}
    assert viewer.post(URL, stated, format="json").status_code == 403
    assert viewer.delete(f"{URL}/search:local.cpu").status_code == 403


@pytest.mark.parametrize("change", [{"priority": 9}, {"team": "ads"}, {"preemptible": False}, {"preempts": "need"}])
def test_who_may_operate_one_deployment_does_not_say_whose_machines_it_gets(change: dict[str, Any]) -> None:
    deployment = rows.deployment()
    url, client = f"/api/v1/deployments/{deployment.name}", calls(granted("grace", deployment.name))
    assert client.patch(url, {"drain_deadline_s": 5}, format="json").status_code == 200
    assert client.patch(url, change, format="json").status_code == 403
    assert bearer("operator").patch(url, change, format="json").status_code == 200


@pytest.mark.parametrize("change", [{"priority": 10}, {"priority": -1}, {"preempts": "all"}, {"team": "a team"}])
def test_a_deployment_is_told_what_would_be_right(change: dict[str, Any]) -> None:
    deployment = rows.deployment()
    response = bearer("operator").patch(f"/api/v1/deployments/{deployment.name}", change, format="json")
    assert set(rules(response)) == set(change)
