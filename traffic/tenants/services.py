"""Grants and withdraws callback hosts and S3 prefixes of tenants, and manages their batch webhooks, each change with
its event. A webhook's secret is returned once. Its host needs a callback grant, which is checked again for every
message; the host's addresses are checked at every attempt (`fleet.webhooks.planner`). It never calls a host."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings as django_settings
from django.db import transaction

from fleet.clouds.aws.objects import bucket_region
from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.planner import DeliveryState, is_subscribed
from fleet.webhooks.services import deliveries_give_up, delivery_create_to
from kernel import live
from kernel.events import event_record
from kernel.outbound import RefusedUrl, check_url, host_of, parse_networks, parse_url
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.async_requests.models import AsyncRequest
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook, new_signing_secret
from traffic.tenants.planner import BadObjectUri, BatchEvent, batch_event_json, parse_object_uri, secrets_in_force
from traffic.tenants.selectors import callback_refusal

REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}")
WITHDRAWN = "refused: the tenant's grant for the host was withdrawn"


@transaction.atomic
def tenant_grant_create(
    *, tenant: str, use: GrantUse, target: str, actor: str, now: datetime, region: str = ""
) -> TenantGrant:
    """Grants a tenant's callbacks an HTTPS host, or its batches everything below `s3://bucket/prefix`. An empty
    `region` means that of the environment. Raises InvalidInput for an invalid host or address, or a prefix that has
    files of the installation. Raises Conflict if it is granted already."""
    if use is GrantUse.CALLBACK:
        if region:
            raise InvalidInput(field="region", rule="region", message="a host has no region; omit it")
        target = _checked_host(target)
    else:
        if region and not REGION.fullmatch(region):
            raise InvalidInput(field="region", rule="region", message=f"{region!r} is not a region, such as us-east-1")
        target, region = _checked_place(target), region or bucket_region()
    columns = {"region": region, "actor": actor[:64], "created_at": now}
    row, created = TenantGrant.objects.get_or_create(tenant=tenant, use=use.value, target=target, defaults=columns)
    if not created:
        raise Conflict(f"already granted: {row}")
    _grant_event("created", f"{row}, by {actor}", Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def tenant_grant_withdraw(*, grant_id: int, actor: str, now: datetime) -> None:
    """Withdraws a grant and cancels pending callbacks to its host. A batch that has read its input continues; its
    results then stay in the installation's store."""
    row = TenantGrant.objects.select_for_update().get(pk=grant_id)
    row.delete()
    if row.use == GrantUse.CALLBACK:
        _give_up_callbacks(row, now)
    _grant_event("withdrawn", f"withdrawn: {row}, by {actor}", Tone.OK, row, actor, now)


def _give_up_callbacks(row: TenantGrant, now: datetime) -> None:
    mine = AsyncRequest.objects.filter(tenant=row.tenant).exclude(callback_secret="").values("callback_secret")
    waiting = WebhookDelivery.objects.filter(state=DeliveryState.PENDING.value, webhook=None, own_secret__in=mine)
    gone = [delivery.pk for delivery in waiting if host_of(parse_url(delivery.own_url)) == row.target]
    hooks = TenantWebhook.objects.filter(tenant=row.tenant)
    origins = [hook.origin for hook in hooks if host_of(parse_url(hook.url)) == row.target]
    of_webhooks = WebhookDelivery.objects.filter(origin__in=origins)
    for rows in (WebhookDelivery.objects.filter(pk__in=gone), of_webhooks):
        deliveries_give_up(rows, now=now, why=WITHDRAWN)


def _checked_host(host: str) -> str:
    try:
        target = parse_url(f"https://{host}")
    except RefusedUrl as refusal:
        message = f"{host[:200]!r} is not a host: {refusal}"
        raise InvalidInput(field="target", rule="host", message=message) from refusal
    if target.path != "/" or target.authority != host or host.endswith((":", "/", ".")):
        message = f"{host[:200]!r} must be a host, app.example.com, or a host and its port, app.example.com:8443"
        raise InvalidInput(field="target", rule="host", message=message)
    return host_of(target)


def _checked_place(uri: str) -> str:
    try:
        place = parse_object_uri(uri)
    except BadObjectUri as bad:
        raise InvalidInput(field="target", rule="uri", message=f"{uri[:200]!r} {bad}") from bad
    ours = {"SWITCHYARD_FILES": django_settings.FILES, "SWITCHYARD_USAGE_EXPORT": django_settings.USAGE_EXPORT}
    for name, kept in ours.items():
        try:
            is_ours = parse_object_uri(kept).overlaps(place)
        except BadObjectUri:  # a folder, or a bucket with dots, which no grant has
            continue
        if is_ours:
            message = f"{place} contains files of all tenants ({name}); use another bucket or prefix"
            raise InvalidInput(field="target", rule="ours", message=message)
    return str(place)


def _grant_event(what: str, message: str, tone: Tone, row: TenantGrant, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "use": row.use, "target": row.target}
    event_record(kind=f"tenant_grant.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")


MOST_OF_A_TENANT = 16
FORMER_KEPT = timedelta(hours=24)
"""Messages are also signed with the former secret for this time."""
REMOVED = "refused: the tenant's webhook was removed"


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A webhook with its secret, which cannot be read again."""

    webhook: TenantWebhook
    text: str


@transaction.atomic
def tenant_webhook_create(*, tenant: str, url: str, actor: str, now: datetime, events: Iterable[str] = ()) -> NewSecret:
    """Creates a webhook for a tenant's batches; without `events`, for all of them. Raises InvalidInput if the URL may
    not be called for this tenant. Raises Conflict if it exists already, or the tenant has the maximum number."""
    _check_callback_url(tenant, url)
    if TenantWebhook.objects.filter(tenant=tenant).count() >= MOST_OF_A_TENANT:
        raise Conflict(f"{MOST_OF_A_TENANT} webhooks exist for this tenant already; remove one first")
    columns = {"events": sorted(set(events)), "actor": actor[:64], "created_at": now}
    row, created = TenantWebhook.objects.get_or_create(tenant=tenant, url=url, defaults=columns)
    if not created:
        raise Conflict(f"the webhook {row} exists already")
    _webhook_event("added", f"added the webhook {row}, by {actor}", Tone.WARN, row, actor, now)
    return NewSecret(row, row.secret)


@transaction.atomic
def tenant_webhook_rotate(*, webhook_id: int, actor: str, now: datetime, at_once: bool = False) -> NewSecret:
    """Replaces the secret. Messages are also signed with the former one for a day, unless `at_once`."""
    row = TenantWebhook.objects.select_for_update().get(pk=webhook_id)
    row.former_secret, row.former_until = ("", None) if at_once else (row.secret, now + FORMER_KEPT)
    row.secret = new_signing_secret()
    row.save(update_fields=["secret", "former_secret", "former_until"])
    if at_once:
        waiting = WebhookDelivery.objects.filter(origin=row.origin, ended_at=None)
        waiting.update(own_secret=row.secret)
    _webhook_event("rotated", f"the secret of {row} was changed by {actor}", Tone.MOVING, row, actor, now)
    return NewSecret(row, row.secret)


@transaction.atomic
def tenant_webhook_remove(*, webhook_id: int, actor: str, now: datetime) -> None:
    """Deletes a webhook and cancels its pending messages."""
    row = TenantWebhook.objects.select_for_update().get(pk=webhook_id)
    deliveries_give_up(WebhookDelivery.objects.filter(origin=row.origin), now=now, why=REMOVED)
    _webhook_event("removed", f"removed the webhook {row}, by {actor}", Tone.OK, row, actor, now)
    row.delete()


def tenant_webhooks_notify(*, tenant: str, event: BatchEvent, batch_id: str, now: datetime) -> int:
    """Puts a message into the outbox for each webhook of the tenant that wants the event. Returns their number. Call it
    in the transaction of the change."""
    subscribed = [hook for hook in TenantWebhook.objects.filter(tenant=tenant) if is_subscribed(hook.events, event)]
    recipients = [hook for hook in subscribed if not callback_refusal(tenant, hook.url)]
    for hook in recipients:
        delivery_create_to(
            url=hook.url,
            secret=" ".join(secrets_in_force(hook.secret, hook.former_secret, hook.former_until, now)),
            event=event.value,
            body=batch_event_json(event, batch_id),
            now=now,
            is_standard=True,
            origin=hook.origin,
        )
    return len(recipients)


def _check_callback_url(tenant: str, url: str) -> None:
    allowed = parse_networks(django_settings.WEBHOOK_NETWORKS)
    try:
        check_url(url, allowed)
        if parse_url(url).scheme != "https" and not allowed:
            raise RefusedUrl("must be https")
        if refusal := callback_refusal(tenant, url):
            raise RefusedUrl(refusal)
    except RefusedUrl as refused:
        raise InvalidInput(field="url", rule="url", message=str(refused)) from refused


def _webhook_event(what: str, message: str, tone: Tone, row: TenantWebhook, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "url": row.shown_url, "events": row.events}
    event_record(kind=f"tenant_webhook.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
