"""Exports records as JSON lines: once from a number on, or continuously to the configured place from where it stopped.
No transaction is open while a place is waited for; a batch whose outcome was lost is sent again."""

import json
import logging
from datetime import datetime
from typing import Any

from audit.chain import COVERED, instant
from audit.models import AuditExport, AuditRecord
from audit.services.chain import Head, parse_head
from audit.sinks import BadTarget, ExportFailed, FileSink, Sink, sink_of
from kernel.leases import lease_release, lease_take, this_holder

BATCH = 500
BATCHES_A_PASS = 20
LEASE = "audit-export"
LEASE_TTL_S = 120.0

log = logging.getLogger(__name__)


def record_json(record: AuditRecord) -> dict[str, Any]:
    """A record as it is exported: all that its digest covers, spelt as the digest has it, and the digests."""
    covered = {name: getattr(record, name) for name in COVERED}
    return {**covered, "at": instant(record.at), "previous": record.previous, "digest": record.digest}


def audit_export(*, target: str, after: int) -> int:
    """Export all records after a number, and return how many.

    Raises:
        BadTarget: the target is none.
        ExportFailed: it did not take them; those of whole batches before are there.
    """
    sink, exported = sink_of(target), 0
    while batch := _batch(after):
        _send(sink, batch)
        after, exported = batch[-1].number, exported + len(batch)
    return exported


def exported_head(target: str) -> Head | None:
    """The last record that a file of exported ones holds: a head that the database's owner cannot rewrite with the
    chain. None for other places, and for a file that holds none.

    Raises:
        BadTarget: the target is none, or its last line is no record.
    """
    sink = sink_of(target) if target else None
    line = sink.last_line() if isinstance(sink, FileSink) else ""
    if not line:
        return None
    try:
        record = json.loads(line)
        return parse_head(f"{record['number']}:{record['digest']}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadTarget(f"the last line of {target} is no audit record: {error}") from error


def audit_export_on(*, target: str, now: datetime) -> int:
    """Go on exporting to the configured place, and return how many records went. One process at a time does."""
    if not target or lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_TTL_S, now=now) is None:
        return 0
    try:
        return _go_on(target, now)
    except (BadTarget, ExportFailed) as error:
        log.warning("audit records are not exported: %s", error)
        return 0
    finally:
        lease_release(name=LEASE, holder=this_holder(), now=now)


def _go_on(target: str, now: datetime) -> int:
    sink, exported = sink_of(target), 0
    cursor, _ = AuditExport.objects.get_or_create(target=target[:500], defaults={"at": now})
    for _ in range(BATCHES_A_PASS):
        if not (batch := _batch(cursor.number)):
            break
        _send(sink, batch)
        cursor.number, cursor.at = batch[-1].number, now
        cursor.save(update_fields=["number", "at"])
        exported += len(batch)
    return exported


def _batch(after: int) -> list[AuditRecord]:
    return list(AuditRecord.objects.filter(number__gt=after).order_by("number")[:BATCH])


def _send(sink: Sink, batch: list[AuditRecord]) -> None:
    lines = [json.dumps(record_json(record), ensure_ascii=False, separators=(",", ":")) for record in batch]
    sink.take(lines, batch[0].number, batch[-1].number)
