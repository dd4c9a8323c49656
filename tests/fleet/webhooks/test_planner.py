"""Signatures and retries; chat messages have a sentence, the main facts and a link, and names cannot
become mentions."""

import hashlib
import hmac
from typing import Any

import pytest

from fleet.webhooks.planner import (
    LONGEST_TEXT,
    WebhookSettings,
    is_subscribed,
    json_message,
    retry_after_s,
    signature,
    slack_message,
)

SETTINGS = WebhookSettings()


def test_waits_double_up_to_an_hour_and_end() -> None:
    waits = [retry_after_s(attempts, SETTINGS) for attempts in range(1, 12)]
    assert waits == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, None, None]


def test_a_signature_covers_time_and_body() -> None:
    expected = hmac.new(b"secret", b'1700000000.{"a":1}', hashlib.sha256).hexdigest()
    assert signature("secret", 1700000000, b'{"a":1}') == f"sha256={expected}"
    assert signature("secret", 1700000001, b'{"a":1}') != f"sha256={expected}"


def test_an_empty_list_of_events_is_all_and_a_test_is_always_told() -> None:
    assert is_subscribed([], "incident.opened")
    assert is_subscribed(["incident.opened"], "incident.opened")
    assert not is_subscribed(["incident.opened"], "rollout.changed")
    assert is_subscribed(["incident.opened"], "test")


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


@pytest.mark.parametrize(
    ("kind", "path"), [("rollout", "/rollouts/3/"), ("approval", "/settings/approvals/"), ("?", "/")]
)
def test_a_needed_decision_leads_to_the_page_with_its_buttons(kind: str, path: str) -> None:
    content = rendered("decision.needed", waiting=kind, id=3, summary="scale d to 0", reason="night")
    assert content["title"].endswith(f"{kind.capitalize()} 3 waits for a person: scale d to 0")
    assert (content["text"], content["title_link"]) == ("night", f"https://sw.example{path}")


def test_a_test_and_an_endless_text_are_fine_too() -> None:
    assert "reach this channel" in rendered("test", asked_by="ada")["title"]
    assert len(rendered("incident.opened", **{**INCIDENT, "summary": 9000 * "x"})["text"]) == LONGEST_TEXT


def test_programs_get_everything() -> None:
    message = json_message(delivery=1, event="incident.opened", at="2026-11-21T12:00:00+00:00", data=INCIDENT)
    assert message["data"] == INCIDENT
