"""Sets and removes the OpenID provider of logins, and maps its groups to tenants. The environment's provider wins as a
whole: were single values combined, an admin could send the environment's secret to another issuer.

The client's secret is encrypted for its issuer and client. Another issuer needs a new secret, so that the
stored one stays with its issuer. Passwords work whatever the provider is."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cryptography.fernet import InvalidToken
from django.conf import settings
from django.db import connection, transaction

from accounts.models import IdentityProvider
from kernel.events import event_record
from kernel.outbound import RefusedUrl, check_url, parse_networks, parse_url
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_box
from kernel.tones import Tone

COLUMNS = ("issuer", "client_id", "title", "scopes", "groups_claim", "admit_all", "tenants")
MAX_TENANT_GROUPS = 500
MAX_CLAIM = 256
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PURPOSE = "accounts.identity_provider"
_LOCK = 0x5357_0026
"""Advisory lock of this database: there is at most one provider."""


class SealedSecret(str):
    """A client secret that was encrypted at the time of the request."""


def seal_secret(secret: str, issuer: str, client_id: str) -> str:
    return secret_box(_PURPOSE).encrypt(json.dumps([issuer, client_id, secret]).encode()).decode() if secret else ""


def unseal_secret(row: IdentityProvider) -> str:
    """Returns the client's secret, or "" if it was encrypted for another issuer or client, or with another key."""
    try:
        issuer, client_id, secret = json.loads(secret_box(_PURPOSE).decrypt(row.sealed_secret.encode()))
    except (InvalidToken, ValueError, TypeError):
        return ""
    return str(secret) if (issuer, client_id) == (row.issuer, row.client_id) else ""


def provider_row() -> IdentityProvider:
    """Returns the stored provider, or an unsaved one with the defaults."""
    return IdentityProvider.objects.order_by("pk").first() or IdentityProvider()


@transaction.atomic
def provider_set(*, actor: str, now: datetime, client_secret: str | None = None, **columns: Any) -> IdentityProvider:
    """Sets the given fields, and the client's secret: None keeps it, "" removes it. Raises InvalidInput for an issuer
    that may not be called, a mapping to something else than a tenant, or another issuer or client without a new
    secret."""
    row = _locked_row()
    before = (row.issuer, row.client_id)
    for column, value in columns.items():
        setattr(row, column, value)
    _check_provider(row)
    if client_secret is not None:
        sealed = client_secret if isinstance(client_secret, SealedSecret) else ""
        row.sealed_secret = sealed or seal_secret(client_secret, row.issuer, row.client_id)
    elif row.sealed_secret and before != (row.issuer, row.client_id):
        message = "enter it again: the stored secret belongs to the former issuer and client"
        raise InvalidInput(field="client_secret", rule="required", message=message)
    row.actor, row.changed_at = actor[:64], now
    row.save()
    changed = [*sorted(columns), *(["client_secret"] if client_secret is not None else [])]
    _provider_event(row, f"changed ({', '.join(changed)})", actor, now)
    return row


@transaction.atomic
def provider_remove(*, actor: str, now: datetime) -> IdentityProvider:
    """Removes the provider with its secret and mapping. Its users keep their accounts. Raises Conflict if there is
    none."""
    row = _locked_row()
    if row.pk is None:
        raise Conflict("no identity provider is set here")
    _provider_event(row, "removed", actor, now)
    row.delete()
    return row


def tenants_of_groups(groups: frozenset[str]) -> dict[str, str]:
    """Group at the provider -> tenant, for those of the groups that an admin has mapped."""
    return {group: tenant for group, tenant in _mapping().items() if group in groups}


def _mapping() -> Mapping[str, str]:
    found = IdentityProvider.objects.order_by("pk").values_list("tenants", flat=True).first()
    return found or {}


def _locked_row() -> IdentityProvider:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    return provider_row()


def _check_provider(row: IdentityProvider) -> None:
    if row.issuer:
        try:
            allowed = parse_networks(settings.WEBHOOK_NETWORKS)
            check_url(row.issuer, allowed)
            if parse_url(row.issuer).scheme != "https" and not allowed:
                raise RefusedUrl("must be https; http needs SWITCHYARD_WEBHOOK_NETWORKS")
        except RefusedUrl as refusal:
            raise InvalidInput(field="issuer", rule="url", message=str(refusal)) from None
        for field in ("client_id", "groups_claim"):
            if not getattr(row, field):
                raise InvalidInput(field=field, rule="required", message="is required with an issuer")
        if "openid" not in row.scopes.split():
            raise InvalidInput(field="scopes", rule="openid", message="must include openid")
    if len(row.tenants) > MAX_TENANT_GROUPS:
        raise InvalidInput(field="tenants", rule="most", message=f"at most {MAX_TENANT_GROUPS} groups")
    for group, tenant in row.tenants.items():
        if not 0 < len(group.strip()) <= MAX_CLAIM:
            message = f"a group has 1 to {MAX_CLAIM} characters; {group[:40]!r} has not"
            raise InvalidInput(field="tenants", rule="group", message=message)
        if not TENANT_NAME.fullmatch(tenant):
            message = f"{tenant[:80]!r} cannot be a tenant: 1 to 64 letters, digits, ., - and _"
            raise InvalidInput(field="tenants", rule="tenant", message=message)


def _provider_event(row: IdentityProvider, what: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"identity_provider.{what.partition(' ')[0]}",
        message=f"identity provider {row} {what} by {actor}",
        tone=Tone.WARN,
        now=now,
        actor=actor[:64],
        detail={column: getattr(row, column) for column in COLUMNS} | {"has_secret": bool(row.sealed_secret)},
    )
