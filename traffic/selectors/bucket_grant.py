"""Which places in S3 the batches of a tenant may use. Without a grant: none (I15)."""

from enum import StrEnum

from traffic.models import BucketGrant
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.object_uri import ObjectUri


class BucketUse(StrEnum):
    READ = "read"
    WRITE = "write"


def bucket_grant_for(tenant: str, wanted: ObjectUri, use: BucketUse) -> BucketGrant | None:
    """A grant of the tenant's that covers an object or a place."""
    grants = BucketGrant.objects.filter(tenant=tenant, bucket=wanted.bucket, **{f"may_{use}": True})
    return next((grant for grant in grants.order_by("id") if grant.place.covers(wanted)), None)


def grant_refusal(tenant: str, wanted: ObjectUri, use: BucketUse) -> str:
    """Why batches of this tenant may not use a place; empty: they may."""
    if bucket_grant_for(tenant, wanted, use) is not None:
        return ""
    whose = f"tenant {tenant}" if tenant else "nobody's key"
    return f"{wanted} is in no place that batches of {whose} may {use}; an admin can grant one"


def bucket_check(tenant: str, wanted: ObjectUri, use: BucketUse, member: str) -> None:
    """
    Raises:
        ApplicationRefused: batches of this tenant may not use it.
    """
    if refusal := grant_refusal(tenant, wanted, use):
        raise ApplicationRefused(403, "place_not_allowed", refusal, f"switchyard.{member}")
