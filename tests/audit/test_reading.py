"""Records are found by what they are about, by those who may see them."""

import pytest
from django.contrib.auth.models import User

from audit.models import Outcome, Proof
from audit.services import Act, Actor, audit_record
from tests.controlplane.api.client import bearer, rules
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ADA = Actor("ada", Proof.TOKEN, "10.0.0.1", "0a1b2c3d")


def write() -> None:
    row = {"table": "fleet_node", "did": "update", "key": "n-1", "changed": {"cordoned": [False, True]}}
    audit_record(
        actor=ADA,
        act=Act("node.cordon", object="node/n-1", about=["region/eu"], reason="fan", changes={"rows": [row]}),
        now=NOW,
    )
    audit_record(actor=Actor("bob", Proof.SESSION), act=Act("key.revoke", Outcome.DENIED, "key/0f"), now=NOW)


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("", [2, 1]),
        ("?actor=ada", [1]),
        ("?object=region/eu", [1]),
        ("?object=node/n-1&action=node.cordon", [1]),
        ("?outcome=denied", [2]),
        ("?token_prefix=0a1b2c3d", [1]),
        ("?since=2026-11-22T00:00:00Z", []),
    ],
)
def test_the_api_narrows(query: str, numbers: list[int]) -> None:
    write()
    assert [each["number"] for each in bearer().get(f"/api/v1/audit{query}").json()["results"]] == numbers


def test_one_record_is_whole() -> None:
    write()
    record = bearer().get("/api/v1/audit/1").json()
    assert (record["about"], record["changes"]["rows"][0]["key"]) == (["node/n-1", "region/eu"], "n-1")
    assert len(record["digest"]) == 64


def test_a_misspelt_filter_is_refused() -> None:
    assert rules(bearer().get("/api/v1/audit?actr=ada")) == {"actr": "unknown_parameter"}


def test_viewers_may_not_read_it_and_that_is_recorded() -> None:
    User.objects.create_user("visitor")
    assert bearer("visitor").get("/api/v1/audit").status_code == 403
    newest = bearer().get("/api/v1/audit").json()["results"][0]
    assert (newest["actor"], newest["action"], newest["outcome"]) == ("visitor", "audit-record.list", "denied")


def test_the_page_says_in_words_what_changed() -> None:
    write()
    text = fragment(signed_in(), "/audit/", "audit-list")
    assert "fleet_node n-1: cordoned false → true" in text
    assert "was denied" in text
    assert "fan" in text
    assert "0a1b2c3d…" in text


def test_the_page_narrows_to_one_object() -> None:
    write()
    text = fragment(signed_in(), "/audit/?object=node/n-1", "audit-list")
    assert "node.cordon" in text
    assert "key.revoke" not in text


def test_a_thing_leads_to_its_records() -> None:
    node = rows.node("n-00000001")
    client = signed_in()
    bearer().post(f"/api/v1/nodes/{node.id}/cordon")
    assert f"/audit/?object=node/{node.id}" in client.get(f"/nodes/{node.id}/").text
