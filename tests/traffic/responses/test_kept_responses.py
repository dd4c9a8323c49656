"""Number and size of stored responses by tenant, without their content."""

from datetime import timedelta

import pytest

from kernel import clock
from tests.controlplane.api.client import bearer
from traffic.responses.models import StoredResponse

pytestmark = pytest.mark.django_db
PATH = "/api/v1/usage/responses"


def kept(tenant: str, size: int, days_ago: int = 0) -> None:
    at = clock.now() - timedelta(days=days_ago)
    StoredResponse.objects.create(
        tenant=tenant, model="m", state="completed", input=b'"secret"', response=b'"secret"', bytes=size,
        created_at=at, ended_at=at,
    )  # fmt: skip


def test_they_are_counted_by_tenant_the_largest_first() -> None:
    kept("ada", 10)
    kept("rufus", 300, days_ago=2)
    kept("rufus", 200)
    response = bearer().get(PATH)
    body = response.json()
    assert (body["responses"], body["bytes"], body["truncated"]) == (3, 510, False)
    assert [(row["tenant"], row["responses"], row["bytes"]) for row in body["tenants"]] == [
        ("rufus", 2, 500),
        ("ada", 1, 10),
    ]
    assert body["tenants"][0]["oldest_at"] < body["tenants"][1]["oldest_at"]
    assert (body["most_responses_of_tenant"], body["days"]) == (20_000, 30.0)
    assert b"secret" not in response.content


def test_one_tenant_or_the_first_few_may_be_asked_for() -> None:
    kept("ada", 10)
    kept("rufus", 300)
    first = bearer().get(PATH, {"limit": 1}).json()
    assert ([row["tenant"] for row in first["tenants"]], first["truncated"], first["responses"]) == (["rufus"], True, 2)
    assert [row["tenant"] for row in bearer().get(PATH, {"tenant": "ada"}).json()["tenants"]] == ["ada"]
    assert bearer().get(PATH, {"tenant": "nobody"}).json()["tenants"] == []
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"tenant": ""}, {"model": "m"}):
        answer = bearer().get(PATH, wrong)
        assert (answer.status_code, next(iter(wrong)) in str(answer.json())) == (400, True)


def test_a_store_without_any_says_so() -> None:
    body = bearer().get(PATH).json()
    assert (body["responses"], body["bytes"], body["tenants"]) == (0, 0, [])
