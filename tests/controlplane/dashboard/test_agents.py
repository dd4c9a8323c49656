"""Agents' releases on the page of nodes: the skew, an upgrade with its rings, and who may begin one."""

import pytest
from django.test import Client

from fleet.models import AgentMove, AgentRelease, AgentRollout
from fleet.services import agent_rollouts
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

OLD, NEW = "0" * 16, "1" * 16


@pytest.fixture(autouse=True)
def _releases() -> None:
    for name, current in ((OLD, True), (NEW, False)):
        AgentRelease.objects.create(id=name, version="0.1.0", protocol=2, is_current=current, created_at=NOW)
    rows.node("n-0", report={"agent_version": f"0.1.0+{OLD}"})
    rows.node("n-1", report={"agent_version": f"0.1.0+{NEW}"})
    rows.node("n-2", report={"agent_version": "0.1.0"})


def test_it_shows_who_runs_what_and_how_many_are_behind() -> None:
    text = fragment(signed_in(), "/nodes/", "agents")
    assert "2 agents run another release than the current one." in text
    assert "n-2 runs no release: from a checkout" in text
    assert text.index(OLD) < text.index(NEW)


def test_an_upgrade_is_begun_shown_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rollouts, "archives_note", lambda row: None)
    client = signed_in()
    assert client.post("/nodes/agents/upgrade/", {"release": NEW, "soak_s": "5", "why": "fix"}).status_code == 302
    rollout = AgentRollout.objects.get()
    assert (rollout.target_id, rollout.soak_s, rollout.why) == (NEW, 5.0, "fix")
    AgentMove.objects.filter(agent="n-0").update(trouble="no capacity")
    text = fragment(client, "/nodes/", "agents")
    assert "Ring 1" in text
    assert "n-0 (no capacity)" in text
    assert "Upgrade agents</summary>" not in text
    assert client.post("/nodes/agents/upgrade/", {"release": NEW, "soak_s": "5"}).status_code == 409
    assert client.post("/nodes/agents/cancel/", {"why": "not today"}).status_code == 302
    assert "Cancelled by" in fragment(client, "/nodes/", "agents")


def test_a_viewer_sees_and_does_nothing() -> None:
    client = Client()
    client.force_login(make_user("viewer"))
    text = fragment(client, "/nodes/", "agents")
    assert OLD in text
    assert "Upgrade agents" not in text
    assert client.post("/nodes/agents/upgrade/", {"release": NEW}).status_code == 403
    assert not AgentRollout.objects.exists()
