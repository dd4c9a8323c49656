"""Adds records to the chain. Only the last step of a transaction may call it: the chain's one row is locked from here
to the commit, so that records stand in the order in which their changes were committed and no two writers wait for each
other in a circle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from audit.chain import record_digest
from audit.models import ONLY_CHAIN, AuditChain, AuditRecord, Outcome, Proof
from audit.redaction import as_json, clean
from kernel.metrics import AUDIT_RECORDS
from kernel.tracing import request_id

LONGEST_ABOUT = 50
DENIALS_RECORDED = 3
DENIALS_WITHIN = timedelta(minutes=1)
"""Of one actor and action: enough to see who tries what, whatever program tries it in a loop."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, from where, and how he proved it."""

    name: str
    proof: Proof
    address: str = ""
    token_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """What is recorded of one change or refusal. `object` and `about` are `noun/key`."""

    action: str
    outcome: Outcome = Outcome.DONE
    object: str = ""
    about: Sequence[str] = ()
    reason: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


def denial_record(*, actor: Actor, act: Act, now: datetime) -> AuditRecord | None:
    """Add the record of a refusal; None where the actor was refused the same often enough in the last minute. The
    chain has one writer at a time and keeps everything for ever: whoever is refused decides about neither."""
    if _is_recorded_enough(actor, act, now):
        return None
    with transaction.atomic():
        AuditChain.objects.select_for_update().get_or_create(pk=ONLY_CHAIN)
        if _is_recorded_enough(actor, act, now):  # by those who came first to the lock
            return None
        return audit_record(actor=actor, act=act, now=now)


def _is_recorded_enough(actor: Actor, act: Act, now: datetime) -> bool:
    lately = AuditRecord.objects.filter(
        actor=clean(actor.name)[:150],
        action=clean(act.action)[:96],
        outcome=Outcome.DENIED,
        at__gt=now - DENIALS_WITHIN,
    )
    numbers = lately.order_by("-number").values_list("number", flat=True)
    return len(numbers[:DENIALS_RECORDED]) >= DENIALS_RECORDED


@transaction.atomic
def audit_record(*, actor: Actor, act: Act, now: datetime) -> AuditRecord:
    """Add one record, in the transaction of the change that it speaks of and as the last step of it."""
    about = list(dict.fromkeys(clean(name)[:250] for name in (act.object, *act.about) if name))[:LONGEST_ABOUT]
    chain, _ = AuditChain.objects.select_for_update().get_or_create(pk=ONLY_CHAIN)
    record = AuditRecord(
        number=chain.head_number + 1,
        at=now,
        outcome=act.outcome.value,
        actor=clean(actor.name)[:150],
        proof=actor.proof.value,
        address=clean(actor.address)[:64],
        token_prefix=clean(actor.token_prefix)[:16],
        action=clean(act.action)[:96],
        object=clean(act.object)[:250],
        about=about,
        reason=clean(act.reason),
        request_id=request_id(),
        changes=as_json(act.changes),
        previous=chain.head_digest,
    )
    record.digest = record_digest(record)
    record.save(force_insert=True)
    chain.head_number, chain.head_digest = record.number, record.digest
    chain.save(update_fields=["head_number", "head_digest"])
    transaction.on_commit(AUDIT_RECORDS.labels(record.outcome).inc)
    return record
