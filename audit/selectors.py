"""Reads audit records, newest first and filtered, their actions, and the ends of the chain."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from audit.models import ONLY_CHAIN, AuditChain, AuditRecord

ACTIONS_FROM_LAST = 2000
"""The filter offers the actions of this many newest records. Reading all records would scan the table."""


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """A filter of records. Empty texts and None select all. `object` is `noun/key`, as in `about`."""

    actor: str = ""
    action: str = ""
    object: str = ""
    outcome: str = ""
    request_id: str = ""
    token_prefix: str = ""
    since: datetime | None = None
    until: datetime | None = None
    before: int | None = None


def audit_records(query: AuditQuery) -> "QuerySet[AuditRecord]":
    records = AuditRecord.objects.order_by("-number")
    for column in ("actor", "action", "outcome", "request_id", "token_prefix"):
        if wanted := getattr(query, column):
            records = records.filter(**{column: wanted})
    if query.object:
        records = records.filter(about__contains=[query.object])
    if query.since is not None:
        records = records.filter(at__gte=query.since)
    if query.until is not None:
        records = records.filter(at__lt=query.until)
    return records if query.before is None else records.filter(number__lt=query.before)


def audit_actions() -> list[str]:
    newest = AuditRecord.objects.order_by("-number").values("action")[:ACTIONS_FROM_LAST]
    return sorted({row["action"] for row in newest})


def audit_chain() -> AuditChain:
    """Returns both ends of the chain, an empty one before the first record."""
    return AuditChain.objects.filter(pk=ONLY_CHAIN).first() or AuditChain(pk=ONLY_CHAIN)
