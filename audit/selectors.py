"""Reads records for people and programs: filtered, newest first, and what they do most. It changes nothing."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from audit.models import ONLY_CHAIN, AuditChain, AuditRecord

ACTIONS_FROM_LAST = 2000
"""The filter offers the actions among this many of the last records; reading all of them would scan the table."""


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which records to read. Empty texts and None narrow nothing. `object` is `noun/key`, as in `about`."""

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
    lately = AuditRecord.objects.order_by("-number").values("action")[:ACTIONS_FROM_LAST]
    return sorted({row["action"] for row in lately})


def audit_chain() -> AuditChain:
    """Both ends of the chain; an empty one if nothing was recorded yet."""
    return AuditChain.objects.filter(pk=ONLY_CHAIN).first() or AuditChain(pk=ONLY_CHAIN)
