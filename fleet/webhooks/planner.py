"""Decides which messages webhooks get, in which form and with which signature, which addresses may be called, and when
a failed message is retried. Pure: resolves no name and opens no connection. A message is JSON with all facts, or, for
chats that support Slack's incoming webhooks, a sentence with the main facts and a link. Messages to tenants' URLs
follow Standard Webhooks (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md),
which OpenAI's client verifies (`client.webhooks.unwrap`): the signature covers ID, time and body, so that a message
cannot be replayed as another."""

import base64
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kernel.outbound import Network
from kernel.tones import Tone


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


DELIVERY_TONE: dict[DeliveryState, Tone] = {
    DeliveryState.PENDING: Tone.MOVING,
    DeliveryState.DELIVERED: Tone.OK,
    DeliveryState.FAILED: Tone.BAD,
}


class WebhookEvent(StrEnum):
    INCIDENT_OPENED = "incident.opened"
    INCIDENT_CLOSED = "incident.closed"
    ROLLOUT_CHANGED = "rollout.changed"
    DECISION_NEEDED = "decision.needed"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Seconds unless the name says otherwise. `allowed`: networks that may be called although they are not public, also
    by plain http."""

    allowed: tuple[Network, ...] = ()
    attempts: int = 10
    first_retry_s: float = 10.0
    longest_retry_s: float = 3600.0
    """10 s, 20 s, 40 s … 1 h: ten attempts take two and a half hours, longer than most outages of a receiver."""
    limit_s: float = 10.0
    """Total for lookup, connection, request and response."""
    response_bytes: int = 16 * 1024
    """Read from a response, to explain errors."""
    claim_s: float = 60.0
    """Six times the limit of an attempt, so claims need no renewal."""
    renew_every_s: float = 3600.0
    per_receiver: int = 20
    """Concurrent attempts, so that a slow receiver delays no other."""
    receivers_at_once: int = 32
    poll_s: float = 0.5
    quiet_poll_s: float = 1.0
    quiet_after_s: float = 60.0


def is_subscribed(events: Sequence[str], event: str) -> bool:
    """Whether a webhook with these events gets this one. Tests are always sent."""
    return not events or event in events or event == WebhookEvent.TEST


def retry_after_s(attempts: int, settings: WebhookSettings) -> float | None:
    """Seconds until the next attempt; None after the last one."""
    if attempts >= settings.attempts:
        return None
    return float(min(settings.first_retry_s * 2.0 ** (attempts - 1), settings.longest_retry_s))


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Returns `X-Switchyard-Signature`: HMAC-SHA256 over `<timestamp>.<body>`, so that an old message cannot be
    replayed as a new one."""
    return "sha256=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, "sha256").hexdigest()


LONGEST_TEXT = 2900
"""Slack truncates a section at 3000 characters."""
COLOURS = {Tone.OK: "#2e7d32", Tone.MOVING: "#1565c0", Tone.WARN: "#ef6c00", Tone.BAD: "#c62828", Tone.IDLE: "#757575"}
FIELDS = ("region", "deployment", "cell", "node", "stage", "actor")
ROLLOUT_TONES = {
    "succeeded": Tone.OK,
    "paused": Tone.WARN,
    "rolling_back": Tone.WARN,
    "rolled_back": Tone.BAD,
    "failed": Tone.BAD,
}
BATCH_TONES: dict[str, Tone] = {
    WebhookEvent.BATCH_COMPLETED: Tone.OK,
    WebhookEvent.BATCH_FAILED: Tone.BAD,
    WebhookEvent.BATCH_EXPIRED: Tone.WARN,
    WebhookEvent.BATCH_CANCELLED: Tone.IDLE,
}


DECISION_PAGES = {"approval": "/settings/approvals/", "rollout": "/rollouts/{id}/"}
"""Page of each kind of object that waits for a person."""


class WebhookFormat(StrEnum):
    JSON = "json"
    SLACK = "slack"


def json_message(*, delivery: int, event: str, at: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all facts, for programs; the same at every attempt."""
    return {"delivery": delivery, "event": event, "at": at, "data": data}


def slack_message(*, event: str, data: Mapping[str, Any], console_url: str) -> dict[str, Any]:
    """Returns a message for a chat. `console_url`: address of the dashboard."""
    title, text, tone, path = _message_parts(event, data)
    facts = [
        {"title": name, "value": _plain_message(str(data[name])), "short": True} for name in FIELDS if data.get(name)
    ]
    attachment = {
        "color": COLOURS.get(tone, COLOURS[Tone.IDLE]),
        "title": _plain_message(title),
        "title_link": f"{console_url.rstrip('/')}{path}",
        "text": _plain_message(text)[:LONGEST_TEXT],
        "fallback": _plain_message(f"{title}: {text}")[:LONGEST_TEXT],
        "fields": facts,
    }
    return {"text": _plain_message(title), "attachments": [attachment]}


def _message_parts(event: str, data: Mapping[str, Any]) -> tuple[str, str, Tone, str]:
    match event:
        case WebhookEvent.INCIDENT_OPENED:
            title = f"Incident: {data.get('kind')} {data.get('subject')}"
            return title, str(data.get("summary", "")), Tone.BAD, f"/incidents/{data.get('id')}/"
        case WebhookEvent.INCIDENT_CLOSED:
            title = f"Closed: {data.get('kind')} {data.get('subject')}"
            return title, str(data.get("resolution", "")), Tone.OK, f"/incidents/{data.get('id')}/"
        case WebhookEvent.ROLLOUT_CHANGED:
            state = str(data.get("state", ""))
            title = f"Rollout of {data.get('deployment')} to {data.get('to_version')}: {state.replace('_', ' ')}"
            text = str(data.get("reason") or data.get("verdict") or "")
            return title, text, ROLLOUT_TONES.get(state, Tone.MOVING), f"/rollouts/{data.get('id')}/"
        case WebhookEvent.DECISION_NEEDED:
            kind = str(data.get("waiting", ""))
            path = DECISION_PAGES.get(kind, "/").format(id=data.get("id"))
            title = f"{kind.capitalize()} {data.get('id')} waits for a person: {data.get('summary')}"
            return title[:LONGEST_TEXT], str(data.get("reason", "")), Tone.WARN, path
        case _ if event in BATCH_TONES:
            title = f"Batch {data.get('id')} of {data.get('tenant') or 'no tenant'}: {event.partition('.')[2]}"
            text = f"{data.get('completed')} of {data.get('lines')} lines answered, {data.get('failed')} failed"
            return title, text, BATCH_TONES[event], f"/batches/{data.get('id')}/"
    return (
        "Switchyard can reach this channel",
        f"test message requested by {data.get('asked_by', 'an operator')}",
        Tone.IDLE,
        "/",
    )


def _plain_message(text: str) -> str:
    """Slack's three escapes, so that a name cannot become a mention or a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


SECRET_PREFIX = "whsec_"  # noqa: S105 - the part that is no secret


def standard_headers(message_id: str, timestamp: int, body: bytes, secrets: Iterable[str]) -> dict[str, str]:
    """Returns headers with one signature for each secret (`whsec_` and base64); receivers accept any of them."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(_secret_key(secret), signed, "sha256")).decode() for secret in secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }


def standard_message(message_id: str, created_at: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event in OpenAI's form with `type` and `data`; the same at every attempt."""
    return {"id": message_id, "object": "event", "created_at": created_at, **body}


def _secret_key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
