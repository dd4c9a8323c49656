"""Decides which messages webhooks get, in which form and with which signature, which addresses may be called, and when
a failed message is retried. Pure: resolves no name and opens no connection. A message is JSON with all facts, or, for
chats that support Slack's incoming webhooks, a sentence with the main facts and a link. Messages to tenants' URLs
follow Standard Webhooks (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md),
which OpenAI's client verifies (`client.webhooks.unwrap`): the signature covers ID, time and body, so that a message
cannot be replayed as another."""

import base64
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import unquote, urlsplit

from kernel.tones import Tone

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
NAT64 = IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a translator, RFC 6052."""
SHORTEST_SECRET = 8
"""Minimum characters of a path segment that counts as secret."""


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


class RefusedUrl(ValueError):
    """The URL may not be called; the text says why and what is allowed."""


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


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str
    authority: str = field(default="")


def parse_url(url: str) -> Target:
    """Parses a URL. Raises RefusedUrl if it is not an http or https URL with a host, or with user, fragment or unusual
    characters."""
    if any(ord(letter) <= 0x20 or ord(letter) >= 0x7F for letter in url):
        raise RefusedUrl("a URL must be ASCII without spaces; percent-encode other characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RefusedUrl(f"not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise RefusedUrl("must read https://host/path")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise RefusedUrl("must have no user, password or fragment")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path, parts.netloc)


def host_of(target: Target) -> str:
    """Returns the host, with its port unless that is the default."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    is_usual = target.port == (443 if target.scheme == "https" else 80)
    return host if is_usual else f"{host}:{target.port}"


def shown_url(url: str) -> str:
    """Returns a URL for display, without its path, which may be the receiver's secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "…"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"


def without_path(text: str, target: Target) -> str:
    """Returns a receiver's text without the requested path, which error pages often repeat."""
    for part in sorted({target.path, unquote(target.path), *target.path.replace("?", "/").split("/")}, key=len)[::-1]:
        if len(part) >= SHORTEST_SECRET:
            text = text.replace(part, "…")
    return text


def check_url(url: str, settings: WebhookSettings) -> None:
    """Rejects URLs that can never be called. Names are resolved and checked at every attempt. Raises RefusedUrl as
    `parse_url` does, or if its address is not allowed."""
    target = parse_url(url)
    try:
        ip_address(target.host)
    except ValueError:
        return
    choose_address(target, [target.host], settings)


def choose_address(target: Target, resolved: Iterable[str], settings: WebhookSettings) -> str:
    """Returns the address to connect to. All addresses of the name must be allowed, because the choice among them is
    arbitrary. Raises RefusedUrl if the name has no address, or one is neither public nor allowed, or is public and the
    URL is http."""
    addresses = [_unwrap_ipv4(ip_address(text.partition("%")[0])) for text in resolved]
    if not addresses:
        raise RefusedUrl(f"{target.host} has no address")
    for address in addresses:
        if any(address.version == network.version and address in network for network in settings.allowed):
            continue
        if not is_public(address):
            raise RefusedUrl(f"{target.host} is {address}, which is not a public address and not allowed")
        if target.scheme != "https":
            raise RefusedUrl(f"{target.host} is {address}: only https is allowed there")
    return str(addresses[0])


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet: not private, loopback, link-local (metadata services of clouds),
    shared, multicast, reserved or unspecified."""
    return address.is_global and not address.is_multicast and not address.is_reserved


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parses networks such as `127.0.0.0/8` or `10.1.2.3`. Raises ValueError if one is invalid."""
    return tuple(ip_network(text.strip()) for text in texts if text.strip())


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


def _unwrap_ipv4(address: Address) -> Address:
    """An IPv4 address inside an IPv6 address is checked as IPv4."""
    if isinstance(address, IPv6Address):
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        return inner or address
    return address


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
