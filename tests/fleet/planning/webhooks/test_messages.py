"""What a chat is told: a sentence, the facts that matter, a link; nobody's name becomes a mention."""

from typing import Any

import pytest

from fleet.planning.webhooks.messages import LONGEST_TEXT, json_message, slack_message

INCIDENT = {"id": 7, "kind": "node-slow", "subject": "n-1", "summary": "slower than <!channel> & all", "region": "eu"}


def rendered(event: str, **data: Any) -> dict[str, Any]:
    message = slack_message(event=event, data=data, console_url="https://sw.example/")
    assert message["text"] == message["attachments"][0]["title"]
    return dict(message["attachments"][0])


def test_an_incident_leads_to_its_page_and_mentions_nobody() -> None:
    content = rendered("incident.opened", **INCIDENT)
    assert content["title"] == "Incident: node-slow n-1"
    assert content["title_link"] == "https://sw.example/incidents/7/"
    assert content["text"] == "slower than &lt;!channel&gt; &amp; all"
    assert content["fields"] == [{"title": "region", "value": "eu", "short": True}]


def test_its_end_looks_well() -> None:
    opened, closed = (
        rendered("incident.opened", **INCIDENT),
        rendered("incident.closed", **INCIDENT, resolution="replaced"),
    )
    assert closed["text"] == "replaced"
    assert closed["color"] != opened["color"]


@pytest.mark.parametrize("state", ["running", "paused", "succeeded", "rolled_back"])
def test_a_rollout_says_its_state_and_why(state: str) -> None:
    content = rendered("rollout.changed", id=3, deployment="d", to_version="m@2", state=state, reason="asked")
    assert content["title"] == f"Rollout of d to m@2: {state.replace('_', ' ')}"
    assert content["text"] == "asked"


def test_a_test_and_an_endless_text_are_fine_too() -> None:
    assert "reach this channel" in rendered("test", asked_by="ada")["title"]
    assert len(rendered("incident.opened", **{**INCIDENT, "summary": 9000 * "x"})["text"]) == LONGEST_TEXT


def test_programs_get_everything() -> None:
    message = json_message(delivery=1, event="incident.opened", at="2026-11-21T12:00:00+00:00", data=INCIDENT)
    assert message["data"] == INCIDENT
