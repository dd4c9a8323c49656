"""Agents' releases on the page of nodes: releases in use, a rollout with its rings, and permissions."""

import pytest
from django.test import Client

from fleet.reconcile.planning.states import AgentRolloutState
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.pages import NAMES_SHOWN, agent_list
from fleet.releases.services import releases as agent_rollouts
from fleet.releases.services.archive import checkout_release
from kernel import clock
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, opened_in, signed_in
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
    text = fragment(signed_in(), "/machines/", "agents")
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
    text = fragment(client, "/machines/", "agents")
    assert "Ring 1" in text
    assert "n-0 (no capacity)" in text
    assert "Upgrade agents</summary>" not in text
    assert client.post("/nodes/agents/upgrade/", {"release": NEW, "soak_s": "5"}).status_code == 409
    assert client.post("/nodes/agents/cancel/", {"why": "not today"}).status_code == 302
    assert "Cancelled by" in fragment(client, "/machines/", "agents")


def test_an_upgrade_that_another_tab_started_meanwhile_is_not_followed_by_another_one_unseen() -> None:
    client = signed_in()
    typed = {"release": NEW, "soak_s": "5", "opened": opened_in(fragment(client, "/machines/", "agents"))}
    upgraded(2, AgentRolloutState.ROLLED_BACK)
    AgentRollout.objects.update(created_at=clock.now())
    refused = client.post("/nodes/agents/upgrade/", typed)
    assert refused.status_code == 409
    assert f"to {NEW} was started by ada while this form was open" in refused.text
    assert f"you sent {NEW}, watched for 5 s" in refused.text
    typed["opened"] = opened_in(fragment(client, "/machines/", "agents"))
    assert client.post("/nodes/agents/upgrade/", typed).status_code == 302


def upgraded(agents: int, state: AgentRolloutState) -> AgentRollout:
    rollout = AgentRollout.objects.create(
        source_id=OLD, target_id=NEW, state=state, rings=1, soak_s=15, actor="ada", created_at=NOW, ring_since=NOW
    )
    AgentMove.objects.bulk_create(
        AgentMove(agent=f"n-{number:03}", rollout=rollout, release=NEW, moved_at=NOW, settled_at=NOW)
        for number in range(agents)
    )
    AgentMove.objects.filter(agent=f"n-{agents - 1:03}").update(settled_at=None)
    AgentMove.objects.filter(agent=f"n-{agents - 2:03}").update(trouble="no capacity")
    return rollout


def test_a_ring_names_a_few_those_with_trouble_and_those_that_are_awaited_first() -> None:
    upgraded(100, AgentRolloutState.RUNNING)
    [ring] = agent_list().rings
    assert (ring.count, ring.settled, ring.more) == (100, 99, 100 - NAMES_SHOWN)
    assert [move.agent for move in ring.moves][:3] == ["n-098", "n-099", "n-000"]
    text = fragment(signed_in(), "/machines/", "agents")
    assert "99 of 100 healthy" in text
    assert f"and {100 - NAMES_SHOWN} more" in text
    assert "n-050" not in text


def test_of_an_upgrade_that_has_ended_only_agents_with_trouble_are_named() -> None:
    upgraded(5, AgentRolloutState.SUCCEEDED)
    text = fragment(signed_in(), "/machines/", "agents")
    assert "n-003 (no capacity)" in text
    assert "n-000" not in text
    AgentMove.objects.update(trouble="")
    assert "Ring 1" not in fragment(signed_in(), "/machines/", "agents")


def test_it_says_in_words_what_is_offered() -> None:
    text = " ".join(fragment(signed_in(), "/machines/", "agents").split())
    own = checkout_release()
    assert f"own ({own.version}+{own.id})</option>" in text
    assert "not current" in text
    assert "the upgrade is rolled back automatically" in text


def test_a_viewer_sees_and_does_nothing() -> None:
    client = Client()
    client.force_login(make_user("viewer"))
    text = fragment(client, "/machines/", "agents")
    assert OLD in text
    assert "Upgrade agents" not in text
    assert client.post("/nodes/agents/upgrade/", {"release": NEW}).status_code == 403
    assert not AgentRollout.objects.exists()
