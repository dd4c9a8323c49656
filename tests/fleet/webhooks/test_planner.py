"""Allowed URLs, signatures and retries; chat messages have a sentence, the main facts and a link, and names cannot
become mentions."""

import hashlib
import hmac
from typing import Any

import pytest

from fleet.webhooks.planner import (
    LONGEST_TEXT,
    RefusedUrl,
    WebhookSettings,
    choose_address,
    is_subscribed,
    json_message,
    parse_networks,
    parse_url,
    retry_after_s,
    shown_url,
    signature,
    slack_message,
    without_path,
)

SETTINGS = WebhookSettings()
HTTPS = parse_url("https://hooks.example.com/a?b=c")
PUBLIC = "93.184.216.34"


def test_an_address_is_taken_apart() -> None:
    assert (HTTPS.scheme, HTTPS.host, HTTPS.port, HTTPS.path) == ("https", "hooks.example.com", 443, "/a?b=c")
    assert parse_url("http://[::1]:8080").port == 8080


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.com",
        "https://",
        "https://user:pw@example.com/",
        "https://example.com/#part",
        "https://example.com/a b",
        "https://example.com/\r\nX: y",
        "https://example.com:99999/",
        "//example.com",
        "https://exämple.com/",
    ],
)
def test_what_is_no_plain_address_is_refused(url: str) -> None:
    with pytest.raises(RefusedUrl):
        parse_url(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",  # noqa: S104
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "ff02::1",
    ],
)
def test_what_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(RefusedUrl, match="not a public address"):
        choose_address(HTTPS, [address], SETTINGS)


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    assert choose_address(HTTPS, [PUBLIC], SETTINGS) == PUBLIC
    with pytest.raises(RefusedUrl):
        choose_address(HTTPS, [PUBLIC, "10.0.0.1"], SETTINGS)
    with pytest.raises(RefusedUrl, match="no address"):
        choose_address(HTTPS, [], SETTINGS)


def test_plain_http_is_for_allowed_networks_only() -> None:
    plain = parse_url("http://hooks.example.com/")
    with pytest.raises(RefusedUrl, match="only https"):
        choose_address(plain, [PUBLIC], SETTINGS)
    allowed = WebhookSettings(allowed=parse_networks(["10.0.0.0/8", ""]))
    assert choose_address(plain, ["10.1.2.3"], allowed) == "10.1.2.3"
    with pytest.raises(RefusedUrl):
        choose_address(plain, ["10.1.2.3", "127.0.0.1"], allowed)


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.slack.com/services/T0/B0/XXXX", "https://hooks.slack.com/…"),
        ("https://pager.example:8443/x?key=1", "https://pager.example:8443/…"),
        ("https://me:pw@pager.example/x", "https://pager.example/…"),
        ("https://pager.example", "https://pager.example/…"),
        ("http://[::1", "…"),
    ],
)
def test_of_an_address_only_the_host_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_what_a_receiver_says_is_kept_without_the_path_that_it_was_asked_for() -> None:
    target = parse_url("https://pager.example/hook/se%63ret-token-1?key=other-secret")
    said = (
        "no /hook/secret-token-1?key=other-secret here; se%63ret-token-1 is gone, key=other-secret too; a hook is not"
    )
    assert without_path(said, target) == "no … here; … is gone, … too; a hook is not"


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
