"""Grants and withdraws what a tenant may reach: hosts of callbacks, and places in S3. Each change with its event.

The addresses of a host are checked at every attempt, as for webhooks (fleet.planning.webhooks.delivery).
"""

import re
from datetime import datetime

from django.conf import settings as django_settings
from django.db import transaction

from fleet.models import WebhookDelivery
from fleet.planning.webhooks.delivery import DeliveryState, RefusedUrl, host_of, parse_url
from fleet.providers.aws.objects import bucket_region
from fleet.services.webhook_outbox import deliveries_give_up
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import AsyncRequest, TenantGrant, TenantWebhook
from traffic.models.tenant_access import GrantUse
from traffic.planning.object_uri import BadObjectUri, parse_object_uri

REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}")
WITHDRAWN = "refused: the host was taken off the tenant's list"


@transaction.atomic
def tenant_grant_create(
    *, tenant: str, use: GrantUse, target: str, actor: str, now: datetime, region: str = ""
) -> TenantGrant:
    """Let callbacks of a tenant go to a host by https, or its batches use what is below `s3://bucket/prefix`. `region`
    of the bucket; empty: that of the environment.

    Raises:
        InvalidInput: no such host or place, or a place that has files of the installation.
        Conflict: it is granted already.
    """
    if use is GrantUse.CALLBACK:
        if region:
            raise InvalidInput(field="region", rule="region", message="a host has no region: leave it out")
        target = _checked_host(target)
    else:
        if region and not REGION.fullmatch(region):
            raise InvalidInput(field="region", rule="region", message=f"{region!r} is no region, such as us-east-1")
        target, region = _checked_place(target), region or bucket_region()
    columns = {"region": region, "actor": actor[:64], "created_at": now}
    row, created = TenantGrant.objects.get_or_create(tenant=tenant, use=use.value, target=target, defaults=columns)
    if not created:
        raise Conflict(f"there is a grant already: {row}")
    _event("created", f"{row}, by {actor}", Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def tenant_grant_withdraw(*, grant_id: int, actor: str, now: datetime) -> None:
    """Withdraw a grant. Callbacks that wait for a host are given up. A batch that has read its input continues; its
    results are then kept here alone."""
    row = TenantGrant.objects.select_for_update().get(pk=grant_id)
    row.delete()
    if row.use == GrantUse.CALLBACK:
        _give_up_callbacks(row, now)
    _event("withdrawn", f"no longer: {row}, by {actor}", Tone.OK, row, actor, now)


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
        message = f"{host[:200]!r} is no host: {refusal}"
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
            message = f"{place} has what {name} keeps there for all tenants; use another bucket or prefix"
            raise InvalidInput(field="target", rule="ours", message=message)
    return str(place)


def _event(what: str, message: str, tone: Tone, row: TenantGrant, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "use": row.use, "target": row.target}
    event_record(kind=f"tenant_grant.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
