"""Keeps webhooks: each change with its event. The secret never appears in the timeline."""

from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import Webhook, WebhookDelivery
from fleet.planning.webhooks.delivery import WebhookEvent
from fleet.services.webhook_outbox import delivery_create
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone


def webhook_create(*, actor: str, now: datetime, **columns: Any) -> Webhook:
    """Add a webhook. Without a secret it gets a random one.

    Raises:
        Conflict: the name is taken.
    """
    with transaction.atomic():
        name = columns.pop("name")
        hook, created = Webhook.objects.get_or_create(name=name, defaults={**columns, "created_at": now})
        if not created:
            raise Conflict(f"there is a webhook {name} already; change it, or choose another name")
        _event(hook, "created", actor, now)
    return hook


def webhook_change(*, name: str, actor: str, now: datetime, **columns: Any) -> Webhook:
    with transaction.atomic():
        hook = Webhook.objects.select_for_update().get(name=name)
        for column, value in columns.items():
            setattr(hook, column, value)
        hook.save(update_fields=list(columns))
        if columns:
            _event(hook, f"changed ({', '.join(sorted(columns))})", actor, now)
    return hook


def webhook_delete(*, name: str, actor: str, now: datetime) -> None:
    """Remove a webhook and its undelivered messages."""
    with transaction.atomic():
        hook = Webhook.objects.select_for_update().get(name=name)
        _event(hook, "deleted", actor, now)
        hook.delete()


def webhook_test(*, name: str, actor: str, now: datetime) -> WebhookDelivery:
    """Send a test message.

    Raises:
        Conflict: the webhook is disabled.
    """
    with transaction.atomic():
        hook = Webhook.objects.get(name=name)
        if not hook.enabled:
            raise Conflict(f"webhook {name} is disabled; enable it first")
        _event(hook, "tested", actor, now)
        return delivery_create(webhook=hook, event=WebhookEvent.TEST, body={"asked_by": actor}, now=now)


def _event(hook: Webhook, what: str, actor: str, now: datetime) -> None:
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
