"""Sends what is due in the outbox. A delivery is claimed for a while first, so that a worker that dies in the middle
loses nothing and two workers send nothing twice at once; receivers recognise repetitions by the delivery's number."""

import asyncio
import json
import logging
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import F, Q

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, WebhookSettings, parse_networks, retry_after_s, signature
from fleet.planning.webhooks.messages import WebhookFormat, json_message, slack_message
from fleet.services.webhook_http import AttemptResult, post
from kernel import live
from kernel.metrics import WEBHOOK_ATTEMPTS
from kernel.sanitize import json_without_nul

BATCH = 20
CLAIM_S = 60.0
"""Six times the limit of one attempt."""
KEPT = timedelta(days=30)

log = logging.getLogger(__name__)


def webhook_settings() -> WebhookSettings:
    """The defaults, and the networks that this installation allows."""
    return replace(WebhookSettings(), allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))


def deliveries_send(*, now: datetime, settings: WebhookSettings | None = None) -> int:
    """Send what is due, at most `BATCH` at once. Returns how many were tried."""
    chosen = settings or webhook_settings()
    claimed = _claim(now)
    if not claimed:
        return 0
    results = asyncio.run(_send_all(claimed, int(now.timestamp()), chosen))
    for delivery, result in zip(claimed, results, strict=True):
        _settle(delivery, result, chosen, now)
    return len(claimed)


def deliveries_trim(*, now: datetime) -> int:
    """Forget what ended long ago. Returns how many."""
    return WebhookDelivery.objects.filter(ended_at__lt=now - KEPT).delete()[0]


def _claim(now: datetime) -> list[WebhookDelivery]:
    with transaction.atomic():
        due = (
            WebhookDelivery.objects.select_for_update(skip_locked=True, of=("self",))
            .filter(Q(webhook__enabled=True) | Q(webhook=None), state=DeliveryState.PENDING.value, due_at__lte=now)
            .select_related("webhook")
            .order_by("due_at", "id")[:BATCH]
        )
        claimed = list(due)
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
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "switchyard-webhook",
        "X-Switchyard-Event": delivery.event,
        "X-Switchyard-Delivery": str(delivery.pk),
        "X-Switchyard-Timestamp": str(timestamp),
        "X-Switchyard-Signature": signature(delivery.secret, timestamp, body),
    }
    return await post(delivery.url, body, headers, settings)


def message(delivery: WebhookDelivery) -> dict[str, Any]:
    """What is sent: the same at every attempt."""
    if delivery.webhook and delivery.webhook.format == WebhookFormat.SLACK:
        return slack_message(event=delivery.event, data=delivery.body, console_url=django_settings.SWITCHYARD_URL)
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
