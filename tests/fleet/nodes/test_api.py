"""Nodes over HTTP."""

from typing import Any

import pytest

from fleet.nodes.models import Node, NodeReport
from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def ids(**query: Any) -> list[str]:
    return [row["id"] for row in bearer().get("/api/v1/nodes", query).json()["results"]]


def test_a_node_says_everything_about_itself() -> None:
    report = {"engine_pid": 42, "agent_version": "0.1.0"}
    leader = rows.node("n-00000001", fingerprint={"engine": "sim"}, accelerators=["H100"], report=report)
    rows.cell("c", leader, rows.node("n-00000002"))
    assert bearer().get("/api/v1/nodes/n-00000001").json() == {
        "id": "n-00000001",
        "region": "us-east-1",
        "instance_type": "local.cpu",
        "state": "ready",
        "reason": "",
        "tone": "ok",
        "cordoned": False,
        "cell": "c",
        "deployment": "sim-70b",
        "rank": 0,
        "role": "leader",
        "machine": "",
        "address": "127.0.0.1",
        "port_base": 40000,
        "topology": ["spine", "rack"],
        "fingerprint": {"engine": "sim"},
        "accelerators": ["H100"],
        "prefetch": [],
        "connected": True,
        "last_seen_at": "2026-11-21T12:00:00Z",
        "agent_version": "0.1.0",
        "engine": {"state": "ready", "reason": "", "pid": 42, "generation": 1},
        "holds": {"builds": [], "artifacts": [], "troubles": {}},
        "checks": None,
        "state_since": "2026-11-21T12:00:00Z",
        "created_at": "2026-11-21T12:00:00Z",
    }


def test_a_spare_is_in_no_cell() -> None:
    rows.node("n-00000001")
    body = bearer().get("/api/v1/nodes/n-00000001").json()
    assert [body[name] for name in ("role", "cell", "deployment", "rank")] == ["spare", None, None, None]


def test_a_node_that_never_reported_has_no_engine() -> None:
    rows.node("n-00000001")
    NodeReport.objects.all().delete()
    body = bearer().get("/api/v1/nodes/n-00000001").json()
    assert [body[name] for name in ("engine", "connected", "last_seen_at", "agent_version")] == [None, False, None, ""]


def test_retired_nodes_are_left_out_unless_asked_for() -> None:
    rows.node("n-00000001")
    rows.node("n-00000002", state="retired")
    assert ids() == ["n-00000001"]
    assert ids(include="all") == ["n-00000001", "n-00000002"]
    assert ids(state="retired") == ["n-00000002"]
    assert bearer().get("/api/v1/nodes/n-00000002").status_code == 200


def test_nodes_are_found_by_what_they_are() -> None:
    leader, follower = rows.node("n-00000001"), rows.node("n-00000002")
    rows.cell("c", leader, follower)
    rows.node("n-00000003", where="us-west-2", cordoned=True, connected=False)
    assert ids(role="leader") == ["n-00000001"]
    assert ids(role=["follower", "spare"]) == ["n-00000002", "n-00000003"]
    assert ids(cell="c") == ids(deployment="sim-70b") == ["n-00000001", "n-00000002"]
    assert ids(region="us-west-2") == ids(cordoned="true") == ids(connected="false") == ["n-00000003"]
    assert ids(cordoned="false") == ids(connected="true") == ["n-00000001", "n-00000002"]
    assert ids(instance_type="other") == []


def test_a_cordoned_node_can_be_let_in_again() -> None:
    rows.node("n-00000001")
    client = bearer("ada")
    assert client.post("/api/v1/nodes/n-00000001/cordon", {"why": "hot"}, format="json").json()["cordoned"] is True
    assert client.post("/api/v1/nodes/n-00000001/uncordon").json()["cordoned"] is False
    assert list(Event.objects.order_by("id").values_list("kind", "message", "actor")) == [
        ("node.cordoned", "n-00000001 cordoned by ada: hot", "ada"),
        ("node.uncordoned", "n-00000001 uncordoned by ada", "ada"),
    ]


@pytest.mark.parametrize("action", ["cordon", "uncordon"])
def test_a_retired_node_is_a_conflict(action: str) -> None:
    rows.node("n-00000001", state="retired")
    assert bearer().post(f"/api/v1/nodes/n-00000001/{action}").status_code == 409


@pytest.mark.parametrize("action", ["cordon", "uncordon"])
def test_an_action_on_no_node_is_not_found(action: str) -> None:
    assert bearer().post(f"/api/v1/nodes/n-00000001/{action}").status_code == 404


def test_a_field_that_nobody_knows_changes_nothing() -> None:
    rows.node("n-00000001")
    response = bearer().post("/api/v1/nodes/n-00000001/cordon", {"cordoned": False}, format="json")
    assert rules(response) == {"cordoned": "unknown"}
    assert not Node.objects.get().cordoned


def test_a_node_is_checked_alone_and_with_others() -> None:
    found = {"request": "r1", "began_at": 1.0, "results": [{"check": "memory", "ok": True, "found": "fine"}]}
    rows.node("n-00000001", report={"telemetry": {"checks": found}})
    rows.node("n-00000002")
    answer = bearer().post(
        "/api/v1/nodes/n-00000001/check", {"why": "new", "with_nodes": ["n-00000002"]}, format="json"
    )
    assert answer.status_code == 200, answer.content
    assert answer.json()["checks"] == found
    assert Node.objects.filter(check_request__isnull=False).count() == 2
    refused = bearer().post("/api/v1/nodes/n-00000001/check", {"with_nodes": ["n-9"]}, format="json")
    assert refused.status_code in (400, 422)
    assert "there is no node 'n-9'" in refused.content.decode()
