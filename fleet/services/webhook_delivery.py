"""Sends the messages of the outbox to webhooks and to addresses that tenants named. A delivery is claimed first, so a
process that dies loses nothing. Receivers recognise a repeated message by its number."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import CharField, F, Func, Min, Q, QuerySet, Value
from django.db.models.functions import Cast, Coalesce

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, WebhookSettings, parse_networks, retry_after_s, signature
from fleet.planning.webhooks.messages import WebhookFormat, json_message, slack_message
from fleet.planning.webhooks.standard import standard_headers, standard_message
from fleet.services.webhook_http import AttemptResult, post
from kernel import clock, live
from kernel.lease_loop import LeaseLoop, in_thread
from kernel.metrics import WEBHOOK_ATTEMPTS
from kernel.sanitize import json_without_nul

KEPT = timedelta(days=30)
RECEIVER_KEY = Coalesce(
    Cast("webhook", CharField()),
    Func(F("own_url"), Value("/"), Value(3), function="split_part", output_field=CharField()),
)
"""`WebhookDelivery.receiver_key`"""

log = logging.getLogger(__name__)


def webhook_settings() -> WebhookSettings:
    """The defaults, and the networks that this installation allows."""
    return replace(WebhookSettings(), allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))


class WebhookSender(LeaseLoop[WebhookDelivery]):
    name = "fleet.send_webhooks"

    def __init__(self, settings: WebhookSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or webhook_settings()
        super().__init__(self._settings, now)

    def is_open(self, now: datetime) -> bool:
        return _due(now).exists()

    def claim(self, now: datetime) -> list[WebhookDelivery]:
        """Claim what is due, the receivers that wait longest first."""
        busy = Counter(delivery.receiver_key for delivery in list(self.running))
        due = _due(now).annotate(key=RECEIVER_KEY)
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
        _ours(leased).update(due_at=now)

    async def work(self, leased: WebhookDelivery) -> None:
        result = await _send(leased, int(self._now().timestamp()), self._settings)
        await in_thread(partial(_settle, leased, result, self._settings, self._now()))


def deliveries_trim(*, now: datetime) -> int:
    """Delete deliveries that ended long ago. Returns how many."""
    return WebhookDelivery.objects.filter(ended_at__lt=now - KEPT).delete()[0]


def _due(now: datetime) -> "QuerySet[WebhookDelivery]":
    may_be_sent = Q(webhook__enabled=True) | Q(webhook=None)
    return WebhookDelivery.objects.filter(may_be_sent, state=DeliveryState.PENDING.value, due_at__lte=now)


def _ours(delivery: WebhookDelivery) -> "QuerySet[WebhookDelivery]":
    """Its row, unless another process has claimed it since."""
    rows = WebhookDelivery.objects.filter(pk=delivery.pk, state=DeliveryState.PENDING.value)
    return rows.filter(attempts=delivery.attempts)


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
    """Record the result of an attempt, unless another process has claimed the delivery since."""
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
        _ours(delivery).update(**changes)
        live.push("webhooks")
