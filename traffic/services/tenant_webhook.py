"""Addresses of tenants that are told of their batches, each change with its event. A secret is returned where it is
made, and shown nowhere else.

An address must be at a host that callbacks of the tenant may go to. That is asked again for every message, and which
addresses a host may have at every attempt (fleet.planning.webhooks.delivery).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings as django_settings
from django.db import transaction

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import (
    RefusedUrl,
    WebhookSettings,
    check_url,
    is_subscribed,
    parse_networks,
    parse_url,
)
from fleet.services.webhook_outbox import deliveries_give_up, delivery_create_to
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import TenantWebhook
from traffic.models.tenant_access import new_signing_secret
from traffic.planning.batch_event import BatchEvent, batch_event_json, secrets_in_force
from traffic.selectors.tenant_grant import callback_refusal

MOST_OF_A_TENANT = 16
FORMER_KEPT = timedelta(hours=24)
"""How long messages are signed by the former secret, too."""
REMOVED = "refused: the tenant's webhook was removed"


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A webhook and its secret, which cannot be read again."""

    webhook: TenantWebhook
    text: str


@transaction.atomic
def tenant_webhook_create(*, tenant: str, url: str, actor: str, now: datetime, events: Iterable[str] = ()) -> NewSecret:
    """Tell an address of a tenant's batches; without `events` of all that there are.

    Raises:
        InvalidInput: no address that may be called for this tenant.
        Conflict: it is told already, or the tenant has as many as it may have.
    """
    _check(tenant, url)
    if TenantWebhook.objects.filter(tenant=tenant).count() >= MOST_OF_A_TENANT:
        raise Conflict(f"{MOST_OF_A_TENANT} addresses of this tenant are told already; remove one first")
    columns = {"events": sorted(set(events)), "actor": actor[:64], "created_at": now}
    row, created = TenantWebhook.objects.get_or_create(tenant=tenant, url=url, defaults=columns)
    if not created:
        raise Conflict(f"{row} is told already")
    _event("added", f"{row} is told of batches, by {actor}", Tone.WARN, row, actor, now)
    return NewSecret(row, row.secret)


@transaction.atomic
def tenant_webhook_rotate(*, webhook_id: int, actor: str, now: datetime, at_once: bool = False) -> NewSecret:
    """A new secret. For a day messages are signed by the former one, too, unless it counts no longer `at_once`."""
    row = TenantWebhook.objects.select_for_update().get(pk=webhook_id)
    row.former_secret, row.former_until = ("", None) if at_once else (row.secret, now + FORMER_KEPT)
    row.secret = new_signing_secret()
    row.save(update_fields=["secret", "former_secret", "former_until"])
    if at_once:
        waiting = WebhookDelivery.objects.filter(origin=row.origin, ended_at=None)
        waiting.update(own_secret=row.secret)
    _event("rotated", f"the secret of {row} was changed by {actor}", Tone.MOVING, row, actor, now)
    return NewSecret(row, row.secret)


@transaction.atomic
def tenant_webhook_remove(*, webhook_id: int, actor: str, now: datetime) -> None:
    """Tell an address no more. What waits to be sent there is given up."""
    row = TenantWebhook.objects.select_for_update().get(pk=webhook_id)
    deliveries_give_up(WebhookDelivery.objects.filter(origin=row.origin), now=now, why=REMOVED)
    _event("removed", f"{row} is told of batches no more, by {actor}", Tone.OK, row, actor, now)
    row.delete()


def tenant_webhooks_notify(*, tenant: str, event: BatchEvent, batch_id: str, now: datetime) -> int:
    """Put a message into the outbox for each address of a tenant that wants it. Returns how many. To be called in the
    transaction of what it tells of."""
    subscribed = [hook for hook in TenantWebhook.objects.filter(tenant=tenant) if is_subscribed(hook.events, event)]
    told = [hook for hook in subscribed if not callback_refusal(tenant, hook.url)]
    for hook in told:
        delivery_create_to(
            url=hook.url,
            secret=" ".join(secrets_in_force(hook.secret, hook.former_secret, hook.former_until, now)),
            event=event.value,
            body=batch_event_json(event, batch_id),
            now=now,
            is_standard=True,
            origin=hook.origin,
        )
    return len(told)


def _check(tenant: str, url: str) -> None:
    settings = WebhookSettings(allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))
    try:
        check_url(url, settings)
        if parse_url(url).scheme != "https" and not settings.allowed:
            raise RefusedUrl("must be https")
        if refusal := callback_refusal(tenant, url):
            raise RefusedUrl(refusal)
    except RefusedUrl as refused:
        raise InvalidInput(field="url", rule="url", message=str(refused)) from refused


def _event(what: str, message: str, tone: Tone, row: TenantWebhook, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "url": row.shown_url, "events": row.events}
    event_record(kind=f"tenant_webhook.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
