"""The content of a message to a webhook: our own JSON, or what chats take that understand Slack's incoming webhooks.

Pure; a chat gets a sentence, the facts that matter at once and a link, never the whole evidence.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fleet.planning.webhooks.delivery import WebhookEvent
from kernel.tones import Tone

LONGEST_TEXT = 2900
"""Slack cuts a section at 3000 letters."""
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


class WebhookFormat(StrEnum):
    """The format of a webhook's messages."""

    JSON = "json"
    SLACK = "slack"


def json_message(*, delivery: int, event: str, at: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """All that is known, for programs. The same at every attempt."""
    return {"delivery": delivery, "event": event, "at": at, "data": data}


def slack_message(*, event: str, data: Mapping[str, Any], console_url: str) -> dict[str, Any]:
    """A message for a chat; `console_url` is the address of the dashboard."""
    title, text, tone, path = _content(event, data)
    facts = [{"title": name, "value": _plain(str(data[name])), "short": True} for name in FIELDS if data.get(name)]
    attachment = {
        "color": COLOURS.get(tone, COLOURS[Tone.IDLE]),
        "title": _plain(title),
        "title_link": f"{console_url.rstrip('/')}{path}",
        "text": _plain(text)[:LONGEST_TEXT],
        "fallback": _plain(f"{title}: {text}")[:LONGEST_TEXT],
        "fields": facts,
    }
    return {"text": _plain(title), "attachments": [attachment]}


def _content(event: str, data: Mapping[str, Any]) -> tuple[str, str, Tone, str]:
    """Title, text, tone, and the page."""
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
        case _ if event in BATCH_TONES:
            title = f"Batch {data.get('id')} of {data.get('tenant') or 'nobody'}: {event.partition('.')[2]}"
            text = f"{data.get('completed')} of {data.get('lines')} lines answered, {data.get('failed')} failed"
            return title, text, BATCH_TONES[event], f"/batches/{data.get('id')}/"
    return (
        "Switchyard can reach this channel",
        f"test message requested by {data.get('asked_by', 'an operator')}",
        Tone.IDLE,
        "/",
    )


def _plain(text: str) -> str:
    """Slack's three escapes, so that no name becomes a mention or a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
