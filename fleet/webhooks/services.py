"""Keeps webhooks, writes their messages in the transaction of the change, and sends them. Each change of a webhook has
an event without its secret. A sender claims a delivery first, so that a crash loses nothing; receivers recognise
repeated messages by their number. It resolves the name, rejects addresses that are not public, connects to the checked
address, follows no redirect, and limits time and response size."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import CharField, F, Func, Min, Q, QuerySet, Value
from django.db.models.functions import Cast, Coalesce

from accounts.models import Approval
from fleet.webhooks.models import Webhook, WebhookDelivery, new_secret
from fleet.webhooks.planner import (
    DeliveryState,
    WebhookEvent,
    WebhookFormat,
    WebhookSettings,
    is_subscribed,
    json_message,
    retry_after_s,
    signature,
    slack_message,
    standard_headers,
    standard_message,
)
from kernel import clock, live
from kernel.events import event_record
from kernel.lease_loop import LeaseLoop, in_thread
from kernel.metrics import WEBHOOK_ATTEMPTS
from kernel.outbound import RefusedUrl, Target, choose_address, parse_networks, parse_url, without_path
from kernel.outside_transaction import run_outside_transaction
from kernel.refusals import Conflict
from kernel.sanitize import json_without_nul
from kernel.tones import Tone


def webhooks_notify(*, event: str, body: dict[str, Any], now: datetime) -> None:
    """Queues a message for every enabled webhook that subscribes to this event."""
    subscribed = [hook for hook in Webhook.objects.filter(enabled=True) if is_subscribed(hook.events, event)]
    for hook in subscribed:
        delivery_create(webhook=hook, event=event, body=body, now=now)


def approval_notify(approval: Approval) -> None:
    """Announces a request for approval, in the transaction that creates it."""
    body = {
        "waiting": "approval",
        "id": approval.pk,
        "summary": approval.summary,
        "reason": approval.why,
        "deployment": approval.deployment,
        "region": approval.region,
        "actor": approval.requested_by,
        "since": approval.requested_at.isoformat(),
        "until": approval.expires_at.isoformat(),
    }
    webhooks_notify(event=WebhookEvent.DECISION_NEEDED, body=body, now=approval.requested_at)


def delivery_create(*, webhook: Webhook, event: str, body: dict[str, Any], now: datetime) -> WebhookDelivery:
    return WebhookDelivery.objects.create(webhook=webhook, event=event, body=body, created_at=now, due_at=now)


def delivery_create_to(
    *,
    url: str,
    secret: str,
    event: str,
    body: dict[str, Any],
    now: datetime,
    is_standard: bool = False,
    origin: str = "",
) -> WebhookDelivery:
    """Queues one message for one URL: claimed, signed, sent and retried like those of webhooks."""
    return WebhookDelivery.objects.create(
        own_url=url,
        own_secret=secret,
        event=event,
        body=body,
        created_at=now,
        due_at=now,
        is_standard=is_standard,
        origin=origin,
    )


def deliveries_give_up(rows: "QuerySet[WebhookDelivery]", *, now: datetime, why: str) -> int:
    """Ends pending deliveries without another attempt. Returns how many."""
    ended = {"state": DeliveryState.FAILED.value, "ended_at": now, "reason": why}
    return rows.filter(state=DeliveryState.PENDING.value).update(**ended)


def webhook_create(*, actor: str, now: datetime, **columns: Any) -> Webhook:
    """Adds a webhook, by default with a random secret. Raises Conflict if the name is taken."""
    with transaction.atomic():
        name = columns.pop("name")
        hook, created = Webhook.objects.get_or_create(name=name, defaults={**columns, "created_at": now})
        if not created:
            raise Conflict(f"webhook {name} exists already; change it, or choose another name")
        _webhook_event(hook, "created", actor, now)
    return hook


def webhook_change(*, name: str, actor: str, now: datetime, **columns: Any) -> Webhook:
    with transaction.atomic():
        hook = Webhook.objects.select_for_update().get(name=name)
        for column, value in columns.items():
            setattr(hook, column, value)
        hook.save(update_fields=list(columns))
        if columns:
            _webhook_event(hook, f"changed ({', '.join(sorted(columns))})", actor, now)
    return hook


def webhook_secret_rotate(*, name: str, actor: str, now: datetime) -> Webhook:
    """Replaces the secret by a random one. It signs every later attempt, also of messages that wait. Receivers that
    reject it meanwhile lose nothing within the time of the retries."""
    return webhook_change(name=name, actor=actor, now=now, secret=new_secret())


def webhook_delete(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a webhook and its undelivered messages."""
    with transaction.atomic():
        hook = Webhook.objects.select_for_update().get(name=name)
        _webhook_event(hook, "deleted", actor, now)
        hook.delete()


def webhook_test(*, name: str, actor: str, now: datetime) -> WebhookDelivery:
    """Queues a test message. Raises Conflict if the webhook is disabled."""
    with transaction.atomic():
        hook = Webhook.objects.get(name=name)
        if not hook.enabled:
            raise Conflict(f"webhook {name} is disabled; enable it first")
        _webhook_event(hook, "tested", actor, now)
        return delivery_create(webhook=hook, event=WebhookEvent.TEST, body={"asked_by": actor}, now=now)


def _webhook_event(hook: Webhook, what: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"webhook.{what.split(' ', maxsplit=1)[0]}",
        message=f"webhook {hook.name} {what} by {actor}",
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        detail={
            "webhook": hook.name,
            "url": hook.shown_url,
            "format": hook.format,
            "events": hook.events,
            "enabled": hook.enabled,
        },
    )


STATUS_LINE_PARTS = 2
REASON_LETTERS = 200
"""Characters of a response's body in a reason."""
BODY_LIMIT_S = 0.5
"""For each part of a body, which only explains the known status."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Result of an attempt. `status` None: no response; `reason`: why it failed, or ""."""

    status: int | None
    reason: str

    @property
    def delivered(self) -> bool:
        return not self.reason


async def post(url: str, body: bytes, headers: Mapping[str, str], settings: WebhookSettings) -> AttemptResult:
    """Makes one attempt. Never raises for faults of the receiver."""
    try:
        async with asyncio.timeout(settings.limit_s):
            target = parse_url(url)
            address = choose_address(target, await _resolve(target), settings.allowed)
            return await _exchange(target, address, body, headers, settings)
    except RefusedUrl as refusal:
        return AttemptResult(None, f"refused: {refusal}")
    except TimeoutError:
        return AttemptResult(None, f"no complete response within {settings.limit_s:g} s")
    except ssl.SSLError as error:
        return AttemptResult(None, f"TLS: {error.reason or error}")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        return AttemptResult(None, str(error) or type(error).__name__)


async def _resolve(target: Target) -> list[str]:
    """In its own daemon thread: name servers without an answer must neither fill the loop's thread pool nor delay the
    exit."""
    loop = asyncio.get_running_loop()
    resolved: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: OSError | None) -> None:
        if resolved.done():
            return
        if error is None:
            resolved.set_result(addresses)
        else:
            resolved.set_exception(RefusedUrl(f"{target.host} has no address: {error.strerror}"))

    def look_up() -> None:
        addresses, error = list[str](), None
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except OSError as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, addresses, error)

    threading.Thread(target=look_up, name="resolve", daemon=True).start()
    return await resolved


@cache
def _tls() -> ssl.SSLContext:
    """Cached: loading the authorities takes tens of milliseconds."""
    return ssl.create_default_context()


async def _exchange(
    target: Target, address: str, body: bytes, headers: Mapping[str, str], settings: WebhookSettings
) -> AttemptResult:
    is_tls = target.scheme == "https"
    reader, writer = await asyncio.open_connection(
        address,
        target.port,
        ssl=_tls() if is_tls else None,
        server_hostname=target.host if is_tls else None,
        limit=settings.response_bytes,
    )
    try:
        writer.write(_request(target, body, headers))
        await writer.drain()
        result = _result_of(await _read_bounded(reader, settings.response_bytes))
        return replace(result, reason=without_path(result.reason, target))
    finally:
        writer.transport.abort()


def _request(target: Target, body: bytes, headers: Mapping[str, str]) -> bytes:
    fixed = {"Host": target.authority, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**headers, **fixed}.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read_bounded(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Reads the response up to the limit, or what arrives soon after the headers on an open connection."""
    response = b""
    with contextlib.suppress(TimeoutError):
        while len(response) < limit:
            has_headers = b"\r\n\r\n" in response
            async with asyncio.timeout(BODY_LIMIT_S if has_headers else None):
                piece = await reader.read(limit - len(response))
            if not piece:
                break
            response += piece
    return response


def _result_of(response: bytes) -> AttemptResult:
    head, _, body = response.partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(parts) < STATUS_LINE_PARTS or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        return AttemptResult(None, "the response is not HTTP")
    status = int(parts[1])
    if 200 <= status < 300:
        return AttemptResult(status, "")
    if 300 <= status < 400:
        return AttemptResult(status, f"answered {status}; redirects are not followed")
    quoted = body[:REASON_LETTERS].decode("utf-8", "replace").replace("\x00", "").strip()
    return AttemptResult(status, f"answered {status}" + (f": {quoted}" if quoted else ""))


def webhook_try(*, url: str, kind: WebhookFormat, secret: str, actor: str, now: datetime) -> AttemptResult:
    """Sends one test message now, and returns what the receiver said. It follows the rules of all messages, and is
    neither retried nor stored. The event is recorded, because the message leaves this installation."""
    hook = Webhook(name="test", url=url, secret=secret, format=kind)
    delivery = WebhookDelivery(pk=0, webhook=hook, event=WebhookEvent.TEST, body={"asked_by": actor}, created_at=now)
    key = ("webhook", url, kind, secret)
    attempt = partial(_send, delivery, int(now.timestamp()), webhook_settings())
    result = run_outside_transaction(key, async_to_sync(attempt))
    _webhook_event(hook, "tested", actor, now)
    return result


KEPT = timedelta(days=30)
RECEIVER_KEY = Coalesce(
    Cast("webhook", CharField()),
    Func(F("own_url"), Value("/"), Value(3), function="split_part", output_field=CharField()),
)

log = logging.getLogger(__name__)


def webhook_settings() -> WebhookSettings:
    """Returns the defaults with this installation's allowed networks."""
    return replace(WebhookSettings(), allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))


class WebhookSender(LeaseLoop[WebhookDelivery]):
    name = "fleet.send_webhooks"

    def __init__(self, settings: WebhookSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or webhook_settings()
        super().__init__(self._settings, now)

    def is_open(self, now: datetime) -> bool:
        return _due_deliveries(now).exists()

    def claim(self, now: datetime) -> list[WebhookDelivery]:
        """Claims due deliveries, longest waiting receivers first."""
        busy = Counter(delivery.receiver_key for delivery in list(self.running))
        due = _due_deliveries(now).annotate(key=RECEIVER_KEY)
        waiting = due.order_by().values("key").annotate(since=Min("due_at")).order_by("since")
        started = waiting.filter(key__in=[key for key, count in busy.items() if count < self._settings.per_receiver])
        free = max(0, self._settings.receivers_at_once - len(busy))
        keys = [row["key"] for row in [*started, *waiting.exclude(key__in=list(busy))[:free]]]
        claims = [self._claim_for(due.filter(key=key), busy[key], now) for key in keys]
        return [delivery for claim in claims for delivery in claim]

    def _claim_for(self, due: "QuerySet[WebhookDelivery]", busy: int, now: datetime) -> list[WebhookDelivery]:
        with transaction.atomic():
            rows = due.select_for_update(skip_locked=True, of=("self",)).select_related("webhook")
            claimed = list(rows.order_by("due_at", "id")[: self._settings.per_receiver - busy])
            until = now + timedelta(seconds=self._settings.claim_s)
            ids = [delivery.pk for delivery in claimed]
            WebhookDelivery.objects.filter(pk__in=ids).update(attempts=F("attempts") + 1, due_at=until)
        for delivery in claimed:
            delivery.attempts += 1
        return claimed

    def release(self, leased: WebhookDelivery, now: datetime) -> None:
        _claimed_row(leased).update(due_at=now)

    async def work(self, leased: WebhookDelivery) -> None:
        result = await _send(leased, int(self._now().timestamp()), self._settings)
        await in_thread(partial(_store_result, leased, result, self._settings, self._now()))


def deliveries_trim(*, now: datetime) -> int:
    """Deletes deliveries that ended long ago. Returns how many."""
    return WebhookDelivery.objects.filter(ended_at__lt=now - KEPT).delete()[0]


def _due_deliveries(now: datetime) -> "QuerySet[WebhookDelivery]":
    may_be_sent = Q(webhook__enabled=True) | Q(webhook=None)
    return WebhookDelivery.objects.filter(may_be_sent, state=DeliveryState.PENDING.value, due_at__lte=now)


def _claimed_row(delivery: WebhookDelivery) -> "QuerySet[WebhookDelivery]":
    """Its row, unless another process has claimed it."""
    rows = WebhookDelivery.objects.filter(pk=delivery.pk, state=DeliveryState.PENDING.value)
    return rows.filter(attempts=delivery.attempts)


async def _send(delivery: WebhookDelivery, timestamp: int, settings: WebhookSettings) -> AttemptResult:
    body = json.dumps(message(delivery), separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "switchyard-webhook"}
    return await post(delivery.url, body, headers | _signed_headers(delivery, timestamp, body), settings)


def _signed_headers(delivery: WebhookDelivery, timestamp: int, body: bytes) -> dict[str, str]:
    if delivery.is_standard:
        return standard_headers(_standard_id(delivery), timestamp, body, delivery.secret.split())
    return {
        "X-Switchyard-Event": delivery.event,
        "X-Switchyard-Delivery": str(delivery.pk),
        "X-Switchyard-Timestamp": str(timestamp),
        "X-Switchyard-Signature": signature(delivery.secret, timestamp, body),
    }


def _standard_id(delivery: WebhookDelivery) -> str:
    return f"evt_{delivery.pk}"


def message(delivery: WebhookDelivery) -> dict[str, Any]:
    """Returns the content, the same at every attempt."""
    if delivery.webhook and delivery.webhook.format == WebhookFormat.SLACK:
        return slack_message(event=delivery.event, data=delivery.body, console_url=django_settings.SWITCHYARD_URL)
    if delivery.is_standard:
        return standard_message(_standard_id(delivery), int(delivery.created_at.timestamp()), delivery.body)
    at = delivery.created_at.isoformat()
    return json_message(delivery=delivery.pk, event=delivery.event, at=at, data=delivery.body)


def _store_result(delivery: WebhookDelivery, result: AttemptResult, settings: WebhookSettings, now: datetime) -> None:
    """Stores the result of an attempt, unless another process has claimed the delivery."""
    changes: dict[str, Any] = {
        "status": result.status,
        "reason": json.loads(json_without_nul(json.dumps(result.reason).encode())),
    }
    WEBHOOK_ATTEMPTS.labels("delivered" if result.delivered else "failed").inc()
    wait_s = retry_after_s(delivery.attempts, settings)
    if result.delivered:
        changes |= {"state": DeliveryState.DELIVERED.value, "ended_at": now}
    elif wait_s is None:
        changes |= {"state": DeliveryState.FAILED.value, "ended_at": now}
        log.warning("gave up on delivery %d to %s: %s", delivery.pk, delivery.receiver, result.reason)
    else:
        changes |= {"due_at": now + timedelta(seconds=wait_s)}
    with transaction.atomic():
        _claimed_row(delivery).update(**changes)
        live.push("webhooks")
