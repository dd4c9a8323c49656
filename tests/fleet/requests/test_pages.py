"""Sampled requests on pages, over HTTP, in the search and on the command line; tenants see their own only."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from engine_agent.protocol.request_messages import SampleKind
from fleet.faults.models import Incident
from fleet.requests.models import RequestSample
from kernel import clock
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from traffic.keys.services import NewKey, key_create, key_revoke
from traffic.usage.models import UsageHour

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

CELL = "sim-70b-us-east-1-1"
PLACE = {"cell": CELL, "deployment": "sim-70b", "region": "us-east-1", "generation": 1}
TIMES = {"is_stream": True, "queue_ms": 1.0, "total_ms": 1200.0, "completion_tokens": 50}


def stored(name: str, **columns: Any) -> RequestSample:
    own = {
        "at": clock.now() - timedelta(minutes=5),
        "kind": "uniform",
        "status": 200,
        "first_ms": 100.0,
        **PLACE,
        **TIMES,
    }
    return RequestSample.objects.create(request=name, **{**own, **columns})


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell(CELL, rows.node("n-1"), rows.node("n-2"))


@pytest.fixture
def slow_tenant() -> None:
    for n in range(30):
        stored(f"ordinary-{n}", tenant="acme", prompt_tokens=200)
        stored(f"slow-{n}", tenant="big", kind="slow", prompt_tokens=20_000, first_ms=4000.0)
    failure = {"kind": SampleKind.ERROR.value, "first_ms": None, "status": 500, "reason": "engine_dropped"}
    stored("failed-1", tenant="acme", **failure)


@pytest.mark.usefixtures("slow_tenant")
@pytest.mark.parametrize("url", [f"/cells/{CELL}/", "/deployments/sim-70b/", "/incidents/{incident}/"])
def test_a_page_says_what_slow_requests_have_in_common(url: str) -> None:
    now = clock.now()
    incident = Incident.objects.create(
        kind="slo", subject="sim-70b", deployment="sim-70b", opened_at=now, summary="slow"
    )
    url = url.format(incident=incident.pk)
    text = " ".join(fragment(signed_in(), url, "requests-slow").split())
    assert "100 % of the slow requests have in common: " in text
    for expected in ("tenant big", "prompt of at least 16,384 tokens", "Engine to first token", "slow-29"):
        assert expected in text
    failed = fragment(signed_in(), url, "requests-failed")
    assert "<code>engine_dropped</code>" in failed
    assert "failed-1" in failed


def test_without_samples_a_page_says_so() -> None:
    assert "No sampled requests in this time" in fragment(signed_in(), f"/cells/{CELL}/", "requests-slow")
    incident = Incident.objects.create(kind="x", subject="fleet", opened_at=clock.now(), summary="x")
    text = fragment(signed_in(), f"/incidents/{incident.pk}/", "requests-slow")
    assert "names no cell or deployment" in text


@pytest.mark.usefixtures("slow_tenant")
def test_the_list_and_the_search_find_a_request_by_its_id() -> None:
    client = signed_in()
    assert "slow-29" in fragment(client, "/requests/?q=slow-29", "requests-table")
    assert "slow-28" not in fragment(client, "/requests/?q=slow-29", "requests-table")
    assert "failed-1" in fragment(client, "/requests/?kind=error", "requests-table")
    found = fragment(client, "/search/?q=failed-1", "search-results")
    assert "/requests/?q=failed-1" in found
    assert "500 engine dropped" in found


@pytest.mark.parametrize(
    "query", ["kind=nothing", "cell=%2525", "sort=-nothing", "page=99999", "from=x", "key=%F0%9F%92%A9&q=%25"]
)
def test_odd_parameters_of_the_list_are_no_fault(query: str) -> None:
    assert signed_in().get(f"/requests/?{query}").status_code == 200


@pytest.mark.usefixtures("slow_tenant")
def test_the_api_compares_and_lists() -> None:
    client = calls(make_user("vera"))
    found = client.get(f"/api/v1/requests/comparison/?cell={CELL}").json()
    assert (found["slow"], found["others"], found["findings"][0]["hits"]) == (30, 30, 30)
    listed = client.get("/api/v1/requests/?kind=error&request=failed").json()["results"]
    assert [(row["request"], row["outcome"]) for row in listed] == [("failed-1", "500 engine_dropped")]
    for odd in ("range=x", "cell=x&unknown=1", "from=x"):
        assert client.get(f"/api/v1/requests/comparison/?{odd}").status_code == 400
    assert calls(None).get("/api/v1/requests/").status_code == 401


# Tenants.


def used(key: NewKey, deployment: str = "sim-70b") -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    UsageHour.objects.create(tenant=key.key.tenant, key=key.key.prefix, deployment=deployment, hour=hour, requests=3)


@pytest.fixture
def keys() -> tuple[NewKey, NewKey]:
    ours, theirs = (key_create(name="k", tenant=name, actor="ann", now=clock.now()) for name in ("rufus", "ads"))
    for key, name in ((ours, "our-failure"), (theirs, "their-failure")):
        used(key)
        stored(name, kind="error", status=400, reason="context_length_exceeded", key=key.key.prefix, tenant="rufus")
    return ours, theirs


def own_errors(text: str, **query: str) -> tuple[int, Any]:
    response = Client().get("/v1/usage/errors", query, headers={"authorization": f"Bearer {text}"} if text else {})
    return response.status_code, response.json()


def test_a_key_reads_its_own_failed_requests(keys: tuple[NewKey, NewKey]) -> None:
    ours, theirs = keys
    status, body = own_errors(ours.text)
    assert status == 200
    assert [(row["request_id"], row["status"], row["code"]) for row in body["data"]] == [
        ("our-failure", 400, "context_length_exceeded")
    ]
    assert own_errors(ours.text, request_id="their-failure")[1]["data"] == []
    assert [row["request_id"] for row in own_errors(theirs.text)[1]["data"]] == ["their-failure"]
    key_revoke(prefix=ours.key.prefix, actor="ann", now=clock.now())
    for text in ("", "sk-x", ours.text):
        assert own_errors(text)[0] == 401


def test_a_node_cannot_write_to_a_tenant_that_does_not_use_its_deployment(keys: tuple[NewKey, NewKey]) -> None:
    """A compromised node names any key. Usage counts no key that ingresses did not count for the deployment."""
    ours, _ = keys
    stored("forged", kind="error", status=500, key=ours.key.prefix, deployment="other")
    assert [row["request_id"] for row in own_errors(ours.text)[1]["data"]] == ["our-failure"]


def refused_at_ingress(name: str, **columns: Any) -> None:
    own = {"cell": "", "generation": 0, "ingress": "i-1", "completion_tokens": 0, "queue_ms": None, "first_ms": None}
    stored(name, **{**own, "status": 401, "kind": "refused", "deployment": "", "reason": "invalid_api_key", **columns})


@pytest.fixture
def refusals(keys: tuple[NewKey, NewKey]) -> tuple[NewKey, NewKey]:
    ours, theirs = keys
    for key, name in ((ours, "our-limit"), (theirs, "their-limit")):
        of_key = {"tenant": key.key.tenant, "key": key.key.prefix}
        refused_at_ingress(name, kind="error", status=429, reason="rate_limit_exceeded", **of_key)
    refused_at_ingress("revoked-key-1")
    return keys


def test_a_key_reads_requests_that_no_cell_answered(refusals: tuple[NewKey, NewKey]) -> None:
    ours, _ = refusals

    def rows_of(**query: str) -> list[str]:
        return [row["request_id"] for row in own_errors(ours.text, **query)[1]["data"]]

    assert set(rows_of()) == {"our-failure", "our-limit"}
    assert rows_of(request_id="our-limit") == ["our-limit"]
    assert rows_of(request_id="revoked-key-1") == ["revoked-key-1"]
    for odd in ("their-limit", "revoked-key", "%", "r" * 5000):
        assert rows_of(request_id=odd) == []
    assert own_errors(ours.text, request_id="\x00")[0] == 400


def test_the_page_of_a_tenant_finds_a_request_by_its_id(refusals: tuple[NewKey, NewKey]) -> None:
    ours, _ = refusals
    client = Client()
    client.post("/tenant/", {"key": ours.text})
    shown = client.get("/tenant/").text
    assert "our-limit" in shown
    assert "revoked-key-1" not in shown
    found = client.get("/tenant/?request=revoked-key-1").text
    assert "invalid_api_key" in found
    assert "no valid key" in found
    assert "our-failure" not in found
    for odd in ("their-limit", "revoked-key", "r" * 5000):
        assert "No sampled request failed" in client.get(f"/tenant/?request={odd}").text
    assert client.get("/tenant/?request=%00").status_code == 400


@pytest.mark.usefixtures("refusals")
def test_lists_have_requests_that_no_cell_answered() -> None:
    table = fragment(signed_in(), "/requests/?kind=failed", "requests-table")
    for expected in ("revoked-key-1", "our-limit", "our-failure", "no cell", "i-1"):
        assert expected in table
    listed = calls(make_user("vera")).get("/api/v1/requests/?failed=true").json()["results"]
    assert {row["kind"] for row in listed} == {"error", "refused"}
    assert calls(make_user("vic")).get("/api/v1/requests/?failed=false").json()["results"] == []


def test_pages_of_tenants_and_keys_show_their_failed_requests(keys: tuple[NewKey, NewKey]) -> None:
    ours, theirs = keys
    client = Client()
    client.post("/tenant/", {"key": ours.text})
    shown = client.get("/tenant/").text
    assert "our-failure" in shown
    assert "their-failure" not in shown
    page = fragment(signed_in(), f"/keys/{theirs.key.prefix}/", "key-failed")
    assert "their-failure" in page
    assert "our-failure" not in page
