"""To which hosts callbacks of a tenant's requests may go: none, until an admin names one. Each change with its event.

Which addresses a host may have is judged at every attempt, as for webhooks (fleet.planning.webhooks.delivery).
"""

from datetime import datetime

from django.db import transaction

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, RefusedUrl, host_of, parse_url
from fleet.services.webhook_outbox import deliveries_give_up
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import AsyncRequest, CallbackHost, TenantWebhook

WITHDRAWN = "refused: the host was taken off the tenant's list"


@transaction.atomic
def callback_host_allow(*, tenant: str, host: str, actor: str, now: datetime) -> CallbackHost:
    """Let callbacks of this tenant go to a host, by https on its usual port or on the one that is named.

    Raises:
        InvalidInput: no name of a host.
        Conflict: they may already.
    """
    row, created = CallbackHost.objects.get_or_create(
        tenant=tenant, host=_checked(host), defaults={"actor": actor[:64], "created_at": now}
    )
    if not created:
        raise Conflict(f"callbacks may go to {row} already")
    _event("added", f"callbacks may go to {row}, by {actor}", Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def callback_host_withdraw(*, host_id: int, actor: str, now: datetime) -> None:
    """Take a host off a tenant's list. What waits to be sent there for it is given up."""
    row = CallbackHost.objects.select_for_update().get(pk=host_id)
    row.delete()
    mine = AsyncRequest.objects.filter(tenant=row.tenant).exclude(callback_secret="").values("callback_secret")
    waiting = WebhookDelivery.objects.filter(state=DeliveryState.PENDING.value, webhook=None, own_secret__in=mine)
    gone = [delivery.pk for delivery in waiting if host_of(parse_url(delivery.own_url)) == row.host]
    hooks = TenantWebhook.objects.filter(tenant=row.tenant)
    origins = [hook.origin for hook in hooks if host_of(parse_url(hook.url)) == row.host]
    of_webhooks = WebhookDelivery.objects.filter(origin__in=origins)
    for rows in (WebhookDelivery.objects.filter(pk__in=gone), of_webhooks):
        deliveries_give_up(rows, now=now, why=WITHDRAWN)
    _event("withdrawn", f"callbacks may no longer go to {row}, by {actor}", Tone.OK, row, actor, now)


def callback_refusal(tenant: str, url: str) -> str:
    """Why callbacks of this tenant may not go to an address; empty: they may.

    Raises:
        RefusedUrl: no address.
    """
    host = host_of(parse_url(url))
    if CallbackHost.objects.filter(tenant=tenant, host=host).exists():
        return ""
    whose = f"tenant {tenant}" if tenant else "requests without a key"
    return f"{host[:200]} is not among the hosts that callbacks of {whose} may go to; an admin can add it"


def _checked(host: str) -> str:
    try:
        target = parse_url(f"https://{host}")
    except RefusedUrl as refusal:
        raise InvalidInput(field="host", rule="host", message=f"{host!r} is no host: {refusal}") from refusal
    if target.path != "/" or target.authority != host or host.endswith((":", "/", ".")):
        message = f"{host!r} must be a host, app.example.com, or a host and its port, app.example.com:8443"
        raise InvalidInput(field="host", rule="host", message=message)
    return host_of(target)


def _event(what: str, message: str, tone: Tone, row: CallbackHost, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "host": row.host}
    event_record(kind=f"callback_host.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
