"""Which places in S3 a tenant's batches may read from and write to: none, until an admin grants one. Each change with
its event."""

import re
from datetime import datetime

from django.conf import settings as django_settings
from django.db import transaction

from fleet.providers.aws.objects import bucket_region
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import BucketGrant
from traffic.planning.object_uri import BadObjectUri, ObjectUri, parse_object_uri

REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}")


@transaction.atomic
def bucket_grant_create(
    *,
    tenant: str,
    uri: str,
    actor: str,
    now: datetime,
    may_read: bool = True,
    may_write: bool = False,
    region: str = "",
) -> BucketGrant:
    """Let batches of a tenant use what is below `s3://bucket/prefix`. `region` of the bucket; empty: that of the
    environment.

    Raises:
        InvalidInput: no such place, one of our own, or nothing that may be done there.
        Conflict: there is a grant of it already.
    """
    place = _checked(uri)
    if not may_read and not may_write:
        raise InvalidInput(field="may_read", rule="grant", message="a place may be read, written, or both")
    if region and not REGION.fullmatch(region):
        raise InvalidInput(field="region", rule="region", message=f"{region!r} is no region, such as us-east-1")
    columns = {"may_read": may_read, "may_write": may_write, "actor": actor[:64], "created_at": now}
    columns["region"] = region or bucket_region()
    named = {"tenant": tenant, "bucket": place.bucket, "prefix": place.key}
    row, created = BucketGrant.objects.get_or_create(**named, defaults=columns)
    if not created:
        raise Conflict(f"there is a grant of {row}; withdraw it first")
    what = " and ".join(word for word, may in (("read", may_read), ("written", may_write)) if may)
    _event("created", f"{row} may be {what}, by {actor}", Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def bucket_grant_withdraw(*, grant_id: int, actor: str, now: datetime) -> None:
    """Take a place from a tenant. A batch that has its input goes on; its results are then with us alone."""
    row = BucketGrant.objects.select_for_update().get(pk=grant_id)
    row.delete()
    _event("withdrawn", f"{row} may no longer be used, by {actor}", Tone.OK, row, actor, now)


def _checked(uri: str) -> ObjectUri:
    try:
        place = parse_object_uri(uri)
    except BadObjectUri as bad:
        raise InvalidInput(field="uri", rule="uri", message=f"{uri[:200]!r} {bad}") from bad
    ours = {"SWITCHYARD_FILES": django_settings.FILES, "SWITCHYARD_USAGE_EXPORT": django_settings.USAGE_EXPORT}
    for name, kept in ours.items():
        if _overlap(kept, place):
            message = f"{place} has what {name} keeps there for all tenants; use another bucket or prefix"
            raise InvalidInput(field="uri", rule="ours", message=message)
    return place


def _overlap(ours: str, place: ObjectUri) -> bool:
    try:
        return parse_object_uri(ours).overlaps(place)
    except BadObjectUri:  # a folder, or a bucket with dots, which no grant has
        return False


def _event(what: str, message: str, tone: Tone, row: BucketGrant, actor: str, now: datetime) -> None:
    detail = {"tenant": row.tenant, "place": str(row.place), "may_read": row.may_read, "may_write": row.may_write}
    event_record(kind=f"bucket_grant.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
