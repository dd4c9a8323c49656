"""Checks hosts and places in S3 against the grants of a tenant, which has none at first (I15)."""

from fleet.planning.webhooks.delivery import host_of, parse_url
from traffic.models import TenantGrant
from traffic.models.tenant_access import GrantUse
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.object_uri import ObjectUri


def callback_refusal(tenant: str, url: str) -> str:
    """Why callbacks of this tenant may not go to an address; empty if they may.

    Raises:
        RefusedUrl: the address is malformed.
    """
    host = host_of(parse_url(url))
    if TenantGrant.objects.filter(tenant=tenant, use=GrantUse.CALLBACK.value, target=host).exists():
        return ""
    whose = f"tenant {tenant}" if tenant else "requests without a key"
    return f"{host[:200]} is not among the hosts that callbacks of {whose} may go to; an admin can add it"


def place_grant_for(tenant: str, wanted: ObjectUri, use: GrantUse) -> TenantGrant | None:
    """A grant of the tenant's that covers an object or a place in S3."""
    grants = TenantGrant.objects.filter(tenant=tenant, use=use.value).order_by("id")
    return next((grant for grant in grants if grant.place.covers(wanted)), None)


def place_refusal(tenant: str, wanted: ObjectUri, use: GrantUse) -> str:
    """Why batches of this tenant may not use a place; empty if they may."""
    if place_grant_for(tenant, wanted, use) is not None:
        return ""
    whose = f"tenant {tenant}" if tenant else "nobody's key"
    return f"{wanted} is in no place that batches of {whose} may {use}; an admin can grant one"


def place_check(tenant: str, wanted: ObjectUri, use: GrantUse, member: str) -> None:
    """
    Raises:
        ApplicationRefused: batches of this tenant may not use it.
    """
    if refusal := place_refusal(tenant, wanted, use):
        raise ApplicationRefused(403, "place_not_allowed", refusal, f"switchyard.{member}")
