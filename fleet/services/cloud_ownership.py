"""Holds the install's clouds, by writing its object in the bucket again and again: see `fleet.planning.ownership`."""

import json
import logging
import secrets
from datetime import datetime
from typing import Any

from engine_agent.protocol.strict_json import strict_loads
from fleet.models import CloudRegion, Install
from fleet.planning.ownership import Verdict, judge_beat
from fleet.planning.states import CloudRegionState
from fleet.providers.aws import calls
from fleet.providers.aws.install import install_ensure
from fleet.services.incident import incident_open, incidents_close
from kernel import clock
from kernel.refusals import Conflict

KEY = "control/owner.json"
READ_ONLY = "cloud-read-only"
ABSENT = frozenset({"NoSuchKey", "404"})
CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
OBJECT_MOST = 4096

log = logging.getLogger(__name__)


def cloud_beat(cloud: CloudRegion, now: datetime) -> None:
    """Write the object once more, if this is the region by which the install does so: the first one with a bucket."""
    holder = _holder()
    if holder is None or holder.pk != cloud.pk:
        return
    install = install_ensure(now)
    if install.read_only:
        return
    if not install.beat_nonce:
        install.beat_nonce = secrets.token_hex(16)
        install.save(update_fields=["beat_nonce"])
    etag, was_written = _write(holder, install, now)
    there = _read(holder) if was_written is False else None
    verdict = judge_beat(
        was_written=was_written, nonce_there=there[1] if there else None, nonce_tried=install.beat_nonce
    )
    if verdict is Verdict.OWNER:
        new_etag = etag or (there[0] if there else "")
        Install.objects.filter(pk=install.pk).update(beat_etag=new_etag, beat_nonce="", beat_at=clock.now())
    elif verdict is Verdict.LOST:
        _lose(install, holder, now)


def _holder() -> CloudRegion | None:
    ready = CloudRegion.objects.filter(state=CloudRegionState.READY).order_by("region__position", "pk")
    return next((row for row in ready if row.stated_base().bucket), None)


def _write(holder: CloudRegion, install: Install, now: datetime) -> tuple[str, bool | None]:
    """The object's new version and True; False: another version is there; None: nobody knows."""
    body = json.dumps({"install": install.pk, "nonce": install.beat_nonce, "at": now.isoformat()}).encode()
    condition: dict[str, Any] = {"IfMatch": install.beat_etag} if install.beat_etag else {"IfNoneMatch": "*"}
    bucket = holder.stated_base().bucket
    try:
        answer = calls.call("s3", "PutObject", holder.aws_region, Bucket=bucket, Key=KEY, Body=body, **condition)
    except calls.Refused as error:
        if error.code in CHANGED or error.http_status == 412:
            return "", False
        log.warning("the owner's object in %s was not written: %s", bucket, error)
        return "", None
    except calls.Unanswered as error:
        log.warning("whether the owner's object in %s was written is not known: %s", bucket, error)
        return "", None
    return str(answer["ETag"]), True


def _read(holder: CloudRegion) -> tuple[str, str] | None:
    """Version and nonce of what is there; None: it could not be read."""
    bucket = holder.stated_base().bucket
    try:
        answer = calls.call("s3", "GetObject", holder.aws_region, Bucket=bucket, Key=KEY)
        said = strict_loads(answer["Body"].read(OBJECT_MOST))
        return str(answer["ETag"]), str(said["nonce"])
    except (calls.CallFailed, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the owner's object in %s could not be read: %s", bucket, error)
        return None


def _lose(install: Install, holder: CloudRegion, now: datetime) -> None:
    bucket = holder.stated_base().bucket
    reason = f"another control plane wrote s3://{bucket}/{KEY}; `manage.py aws_claim --confirm {install.pk}` takes over"
    Install.objects.filter(pk=install.pk).update(read_only=reason, beat_nonce="")
    log.error("clouds are read-only: %s", reason)
    incident_open(kind=READ_ONLY, subject=install.pk, summary=f"Clouds are read-only: {reason}", evidence={}, now=now)


def cloud_claim(*, confirm: str, now: datetime) -> Install:
    """Take the clouds over, whoever wrote the object last: that one becomes read-only with its next beat.

    Raises:
        Conflict: the name is not this install's, or the object cannot be read.
    """
    install, holder = install_ensure(now), _holder()
    if confirm != install.pk:
        raise Conflict(f"this install is {install.pk}, not {confirm!r}; nothing was changed")
    if holder is None:
        raise Conflict("no region of a cloud has a bucket; there is nothing to take over")
    there = _read(holder)
    if there is None:
        raise Conflict(f"s3://{holder.stated_base().bucket}/{KEY} cannot be read; nothing was changed")
    columns = {"read_only": "", "beat_etag": there[0], "beat_nonce": "", "beat_at": now}
    Install.objects.filter(pk=install.pk).update(**columns)
    incidents_close(kind=READ_ONLY, resolution="an operator took the clouds over", now=now)
    return install_ensure(now)
