"""Decides what is sent to webhooks and where, how a message is signed, and when one that failed is tried again.

It resolves no name and opens no connection.

The content of a message to a webhook: our own JSON, or what chats take that understand Slack's incoming webhooks.

Pure; a chat gets a sentence, the facts that matter at once and a link, never the whole evidence.

Messages as Standard Webhooks have them, which OpenAI's client verifies (`client.webhooks.unwrap`): three headers, of
which one signs the message's id, its time and its body, so that none can be sent again as another. Pure.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

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
"""IPv4 addresses as a translator reaches them, RFC 6052."""
SHORTEST_SECRET = 8
"""Letters of a part of a path that may be one."""


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
    """What webhooks can subscribe to."""

    INCIDENT_OPENED = "incident.opened"
    INCIDENT_CLOSED = "incident.closed"
    ROLLOUT_CHANGED = "rollout.changed"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    TEST = "test"


class RefusedUrl(ValueError):
    """An address that is not called; the text says why, and what would be."""


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Seconds unless the name says otherwise. `allowed` lists networks that may be called though they are not public,
    and by plain http."""

    allowed: tuple[Network, ...] = ()
    attempts: int = 10
    first_retry_s: float = 10.0
    longest_retry_s: float = 3600.0
    """10 s, 20 s, 40 s … 1 h: ten attempts take two hours and a half, longer than most outages of a receiver."""
    limit_s: float = 10.0
    """For resolving, connecting, sending and being answered, together."""
    response_bytes: int = 16 * 1024
    """Of a response that are read at most: enough to see what went wrong."""
    claim_s: float = 60.0
    """Six times the limit of one attempt, so that no claim is renewed."""
    renew_every_s: float = 3600.0
    per_receiver: int = 20
    """Attempts at a time, so that a slow receiver delays no other."""
    receivers_at_once: int = 32
    poll_s: float = 0.5
    quiet_poll_s: float = 1.0
    quiet_after_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """An address taken apart. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str
    authority: str = field(default="")


def parse_url(url: str) -> Target:
    """Take an address apart.

    Raises:
        RefusedUrl: not an http or https address with a host, or one that carries a user, a fragment or odd characters.
    """
    if any(ord(letter) <= 0x20 or ord(letter) >= 0x7F for letter in url):
        raise RefusedUrl("an address must be plain ASCII without blanks; write other letters percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RefusedUrl(f"not an address: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise RefusedUrl("must read https://host/path")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise RefusedUrl("must carry no user, password or fragment")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path, parts.netloc)


def host_of(target: Target) -> str:
    """The host as lists of hosts name it: with its port, unless that is the usual one."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    is_usual = target.port == (443 if target.scheme == "https" else 80)
    return host if is_usual else f"{host}:{target.port}"


def shown_url(url: str) -> str:
    """An address as anybody may be shown it: receivers take who knows the path for one of theirs."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "…"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"


def without_path(text: str, target: Target) -> str:
    """A receiver's words without the path that it was asked for, which error pages like to repeat."""
    for part in sorted({target.path, unquote(target.path), *target.path.replace("?", "/").split("/")}, key=len)[::-1]:
        if len(part) >= SHORTEST_SECRET:
            text = text.replace(part, "…")
    return text


def check_url(url: str, settings: WebhookSettings) -> None:
    """Refuse what could never be called. Names are resolved, and their addresses judged, at every attempt.

    Raises:
        RefusedUrl: see `parse_url`; or it names an address itself, and one that is not called.
    """
    target = parse_url(url)
    try:
        ip_address(target.host)
    except ValueError:
        return
    choose_address(target, [target.host], settings)


def choose_address(target: Target, resolved: Iterable[str], settings: WebhookSettings) -> str:
    """The address to connect to.

    Every address that the name has must be fit to call: else it depends on luck whether a private one is reached.

    Raises:
        RefusedUrl: the name has none; or one is neither public nor allowed, or public and would be called by http.
    """
    addresses = [_plain(ip_address(text.partition("%")[0])) for text in resolved]
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
    """Whether an address belongs to the public internet. Private, loopback, link-local (with the metadata services of
    clouds), shared, multicast, reserved and unspecified ones do not."""
    return address.is_global and not address.is_multicast and not address.is_reserved


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks as settings state them, such as `127.0.0.0/8` or `10.1.2.3`.

    Raises:
        ValueError: one of them is none.
    """
    return tuple(ip_network(text.strip()) for text in texts if text.strip())


def is_subscribed(events: Sequence[str], event: str) -> bool:
    """Whether a webhook subscribed to `events` gets this one. A test is always sent."""
    return not events or event in events or event == WebhookEvent.TEST


def retry_after_s(attempts: int, settings: WebhookSettings) -> float | None:
    """Seconds until the next attempt after so many; None: it was the last."""
    if attempts >= settings.attempts:
        return None
    return float(min(settings.first_retry_s * 2.0 ** (attempts - 1), settings.longest_retry_s))


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """The value of `X-Switchyard-Signature`: HMAC-SHA256 over `<timestamp>.<body>`, so that an old message cannot be
    sent again as a new one."""
    return "sha256=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, "sha256").hexdigest()


def _plain(address: Address) -> Address:
    """An IPv4 address that is dressed as an IPv6 one is judged as what it is."""
    if isinstance(address, IPv6Address):
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        return inner or address
    return address


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


def _plain_message(text: str) -> str:
    """Slack's three escapes, so that no name becomes a mention or a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


SECRET_PREFIX = "whsec_"  # noqa: S105 - the part that is no secret


def standard_headers(message_id: str, timestamp: int, body: bytes, secrets: Iterable[str]) -> dict[str, str]:
    """One signature for each secret, `whsec_` and base64: a receiver needs one of them."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode() for secret in secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }


def standard_message(message_id: str, created_at: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """An event in OpenAI's form around its `type` and `data`; the same at every attempt."""
    return {"id": message_id, "object": "event", "created_at": created_at, **body}


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
