"""Sends what is due in the outbox. A delivery is claimed for a while first, so that a process that dies in the middle
loses nothing and two send nothing twice at once; receivers recognise repetitions by the delivery's number.

Webhooks of operators are a control loop, each webhook in a thread of its own: one that is slow holds up no other. The
callbacks of tenants are housekeeping.
"""

import asyncio
import json
import logging
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import connection, transaction
from django.db.models import F, Q, QuerySet

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, WebhookSettings, parse_networks, retry_after_s, signature
from fleet.planning.webhooks.messages import WebhookFormat, json_message, slack_message
from fleet.planning.webhooks.standard import standard_headers, standard_message
from fleet.services.webhook_http import AttemptResult, post
from kernel import clock, live
from kernel.metrics import WEBHOOK_ATTEMPTS
from kernel.sanitize import json_without_nul

BATCH = 20
WEBHOOKS_AT_ONCE = 32
CLAIM_S = 60.0
"""Six times the limit of one attempt."""
KEPT = timedelta(days=30)

log = logging.getLogger(__name__)


def webhook_settings() -> WebhookSettings:
    """The defaults, and the networks that this installation allows."""
    return replace(WebhookSettings(), allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))


class WebhookSender:
    """The webhooks that this process sends to. Passes are made by one thread."""

    def __init__(self) -> None:
        self._running: dict[int, threading.Thread] = {}

    def run_pass(self) -> bool:
        """Begin to send to each webhook that something is due for, unless that is under way."""
        self._running = {webhook: thread for webhook, thread in self._running.items() if thread.is_alive()}
        webhooks = _due(clock.now()).filter(webhook__isnull=False).exclude(webhook__in=list(self._running))
        for webhook in webhooks.order_by().values_list("webhook", flat=True).distinct():
            if len(self._running) < WEBHOOKS_AT_ONCE:
                self._begin(webhook)
        return True

    def _begin(self, webhook: int) -> None:
        # A daemon: a receiver's name that is not resolved must not keep a process that was told to end.
        name = f"webhook {webhook}"
        thread = threading.Thread(target=_send_to, args=(webhook,), name=name, daemon=True)
        self._running[webhook] = thread
        thread.start()


def _send_to(webhook: int) -> None:
    try:
        while deliveries_send(now=clock.now(), to=Q(webhook=webhook)) == BATCH:
            pass
    except Exception:
        log.exception("deliveries to a webhook could not be noted; they are tried again")
    finally:
        connection.close()


def callbacks_send(*, now: datetime) -> int:
    """Send what is due to addresses that tenants named."""
    return deliveries_send(now=now, to=Q(webhook=None))


def deliveries_send(*, now: datetime, settings: WebhookSettings | None = None, to: Q | None = None) -> int:
    """Send what is due, at most `BATCH` at once; `to`: some receivers only. Returns how many were tried."""
    chosen = settings or webhook_settings()
    claimed = _claim(now, to or Q())
    if not claimed:
        return 0
    results = asyncio.run(_send_all(claimed, int(now.timestamp()), chosen))
    for delivery, result in zip(claimed, results, strict=True):
        _settle(delivery, result, chosen, now)
    return len(claimed)


def deliveries_trim(*, now: datetime) -> int:
    """Forget what ended long ago. Returns how many."""
    return WebhookDelivery.objects.filter(ended_at__lt=now - KEPT).delete()[0]


def _due(now: datetime) -> "QuerySet[WebhookDelivery]":
    may_be_sent = Q(webhook__enabled=True) | Q(webhook=None)
    return WebhookDelivery.objects.filter(may_be_sent, state=DeliveryState.PENDING.value, due_at__lte=now)


def _claim(now: datetime, to: Q) -> list[WebhookDelivery]:
    with transaction.atomic():
        due = _due(now).filter(to).select_for_update(skip_locked=True, of=("self",)).select_related("webhook")
        claimed = list(due.order_by("due_at", "id")[:BATCH])
        ids = [delivery.pk for delivery in claimed]
        until = now + timedelta(seconds=CLAIM_S)
        WebhookDelivery.objects.filter(pk__in=ids).update(attempts=F("attempts") + 1, due_at=until)
    for delivery in claimed:
        delivery.attempts += 1
    return claimed


async def _send_all(
    deliveries: list[WebhookDelivery], timestamp: int, settings: WebhookSettings
) -> list[AttemptResult]:
    return await asyncio.gather(*(_send(delivery, timestamp, settings) for delivery in deliveries))


async def _send(delivery: WebhookDelivery, timestamp: int, settings: WebhookSettings) -> AttemptResult:
    body = json.dumps(message(delivery), separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "switchyard-webhook"}
    return await post(delivery.url, body, headers | _signed(delivery, timestamp, body), settings)


def _signed(delivery: WebhookDelivery, timestamp: int, body: bytes) -> dict[str, str]:
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
    """What is sent: the same at every attempt."""
    if delivery.webhook and delivery.webhook.format == WebhookFormat.SLACK:
        return slack_message(event=delivery.event, data=delivery.body, console_url=django_settings.SWITCHYARD_URL)
    if delivery.is_standard:
        return standard_message(_standard_id(delivery), int(delivery.created_at.timestamp()), delivery.body)
    at = delivery.created_at.isoformat()
    return json_message(delivery=delivery.pk, event=delivery.event, at=at, data=delivery.body)


def _settle(delivery: WebhookDelivery, result: AttemptResult, settings: WebhookSettings, now: datetime) -> None:
    """Note how the attempt ended. One that outlived its claim has been taken over, and notes nothing."""
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
        rows = WebhookDelivery.objects.filter(pk=delivery.pk, state=DeliveryState.PENDING.value)
        rows.filter(attempts=delivery.attempts).update(**changes)
        live.push("webhooks")
