"""Writes messages for webhooks in the transaction of the change itself, so that none is sent of what did not happen and
none is lost of what did. It sends nothing."""

from datetime import datetime
from typing import Any

from django.db.models import QuerySet

from fleet.models import Webhook, WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, is_subscribed


def webhooks_notify(*, event: str, body: dict[str, Any], now: datetime) -> None:
    """Queue a message for every enabled webhook that subscribes to this event."""
    subscribed = [hook for hook in Webhook.objects.filter(enabled=True) if is_subscribed(hook.events, event)]
    for hook in subscribed:
        delivery_create(webhook=hook, event=event, body=body, now=now)


def delivery_create(*, webhook: Webhook, event: str, body: dict[str, Any], now: datetime) -> WebhookDelivery:
    """Put one message for one webhook into the outbox."""
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
    """Put one message for one address into the outbox: claimed, signed, sent and tried again as those of webhooks."""
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
    """End those of the rows that wait, without another attempt. Returns how many."""
    ended = {"state": DeliveryState.FAILED.value, "ended_at": now, "reason": why}
    return rows.filter(state=DeliveryState.PENDING.value).update(**ended)
