"""Writes, verifies, trims and exports audit records, and finds the actor of a request or command.

A record is added in the last step of a transaction: the row of the chain is locked from then to the commit, so records
are in the order of commits and writers cannot deadlock."""

import getpass
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user
from django.db import connection, transaction
from django.db.models import Max
from django.http import HttpRequest
from psycopg import sql

from audit.models import ONLY_CHAIN, AuditChain, AuditExport, AuditRecord, Outcome, Proof
from audit.record_format import COVERED, ChainBreak, as_json, clean, first_break, instant, record_digest
from audit.selectors import audit_chain
from audit.sinks import BadTarget, ExportFailed, FileSink, Sink, sink_of
from kernel.leases import lease_release, lease_take, this_holder
from kernel.metrics import AUDIT_RECORDS
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_prefix
from kernel.tracing import request_id

LONGEST_ABOUT = 50
DENIALS_RECORDED = 3
DENIALS_WITHIN = timedelta(minutes=1)
"""Per actor and action. Enough to see the attempts, even of a program that repeats them in a loop."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, from which address, and with which proof."""

    name: str
    proof: Proof
    address: str = ""
    token_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """One change or refusal. `object` and `about` are `noun/key`."""

    action: str
    outcome: Outcome = Outcome.DONE
    object: str = ""
    about: Sequence[str] = ()
    reason: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


def denial_record(*, actor: Actor, act: Act, now: datetime) -> AuditRecord | None:
    """Add the record of a refusal. Returns None if equal ones of the actor were recorded often enough in the last
    minute, so that refused callers can neither block the chain's only writer nor fill the table."""
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


ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the chain. A copy that is stored elsewhere proves later that no record up to `number` has changed."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`checked` records are intact. `first_break` is the first one that is not."""

    checked: int
    head: Head
    first_break: ChainBreak | None


def parse_head(text: str) -> Head:
    """Parses a head that `audit_verify` printed. Raises ValueError unless it has the form NUMBER:DIGEST."""
    number, _, digest = text.strip().partition(":")
    if not number.isdecimal() or len(digest) != 64:
        raise ValueError(f"a head has the form NUMBER:DIGEST, as audit_verify prints it; not {text[:80]!r}")
    return Head(int(number), digest)


def audit_verify(earlier: Head | None = None) -> Verdict:
    """Check all records in one snapshot, also against `earlier`, a head that was stored elsewhere."""
    with transaction.atomic():
        if not connection.savepoint_ids:  # else the snapshot is the caller's
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        chain = audit_chain()
        records = AuditRecord.objects.order_by("number").iterator(ROWS_AT_ONCE)
        broken, number, digest = first_break(records, after=chain.base_number, digest=chain.base_digest)
        head = Head(chain.head_number, chain.head_digest)
        if broken is None:
            broken = _break_at_head(head, number, digest) or _break_at_earlier_head(earlier, chain.base_number, head)
    return Verdict(number - chain.base_number, head, broken)


def _break_at_head(head: Head, number: int, digest: str) -> ChainBreak | None:
    if number < head.number:
        return ChainBreak(number + 1, f"it and all records up to {head.number}, the end of the chain, are missing")
    if (number, digest) != (head.number, head.digest):
        return ChainBreak(number, f"the chain's own head is {head}, the last record's {number}:{digest}")
    return None


def _break_at_earlier_head(earlier: Head | None, base_number: int, head: Head) -> ChainBreak | None:
    if earlier is None or earlier.number <= base_number:
        return None
    if earlier.number > head.number:
        return ChainBreak(head.number + 1, f"it is missing: the stored head names record {earlier.number}")
    digest = AuditRecord.objects.filter(number=earlier.number).values_list("digest", flat=True).first()
    if earlier.number > 0 and digest != earlier.digest:
        return ChainBreak(earlier.number, f"its digest is {digest}, but the stored head has {earlier.digest}")
    return None


def audit_trim(*, before: datetime, unexported_too: bool) -> int:
    """Remove the records older than `before`, and return how many. Raises Conflict if a record is broken or was not
    exported."""
    with transaction.atomic():
        chain = AuditChain.objects.select_for_update().filter(pk=ONLY_CHAIN).first()
        first_kept = AuditRecord.objects.filter(at__gte=before).order_by("number").values_list("number", flat=True)
        if chain is None or not (old := _up_to(chain, first_kept.first())):
            return 0
        _check_exported(old, unexported_too)
        records = AuditRecord.objects.filter(number__lte=old).order_by("number").iterator(ROWS_AT_ONCE)
        broken, number, digest = first_break(records, after=chain.base_number, digest=chain.base_digest)
        if broken is not None:
            raise Conflict(f"record {broken.number} is broken ({broken.why}); nothing was removed")
        removed = number - chain.base_number
        chain.base_number, chain.base_digest = number, digest
        chain.save(update_fields=["base_number", "base_digest"])
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('switchyard.audit_retention', 'on', true)")
            cursor.execute("DELETE FROM audit_auditrecord WHERE number <= %s", [number])
            cursor.execute("SELECT set_config('switchyard.audit_retention', 'off', true)")
    return removed


def _up_to(chain: AuditChain, first_kept: int | None) -> int:
    """Returns the number of the last record to remove, or 0."""
    last = chain.head_number if first_kept is None else first_kept - 1
    return last if last > chain.base_number else 0


def _check_exported(number: int, unexported_too: bool) -> None:
    exported = AuditExport.objects.aggregate(far=Max("number"))["far"] or 0
    if exported < number and not unexported_too:
        message = f"records {exported + 1} to {number} were never exported; export them or pass --unexported-too"
        raise Conflict(message)


BATCH = 500
BATCHES_A_PASS = 20
LEASE = "audit-export"
LEASE_TTL_S = 120.0

log = logging.getLogger(__name__)


def record_json(record: AuditRecord) -> dict[str, Any]:
    """Returns the exported form of a record: the values that its digest covers, and both digests."""
    covered = {name: getattr(record, name) for name in COVERED}
    return {**covered, "at": instant(record.at), "previous": record.previous, "digest": record.digest}


def audit_export(*, target: str, after: int) -> int:
    """Export all records after a number, and return how many. Raises BadTarget if it is not a valid target. Raises
    ExportFailed if the target rejected a batch; earlier batches are stored."""
    sink, exported = sink_of(target), 0
    while batch := _batch(after):
        _send(sink, batch)
        after, exported = batch[-1].number, exported + len(batch)
    return exported


def exported_head(target: str) -> Head | None:
    """Returns the last record in an export file: a head that the database's owner cannot rewrite with the chain.
    Returns None for other targets and for an empty file. Raises BadTarget if it is not a valid target, or its last line
    is not a record."""
    sink = sink_of(target) if target else None
    line = sink.last_line() if isinstance(sink, FileSink) else ""
    if not line:
        return None
    try:
        record = json.loads(line)
        return parse_head(f"{record['number']}:{record['digest']}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadTarget(f"the last line of {target} is not an audit record: {error}") from error


def audit_export_on(*, target: str, now: datetime) -> int:
    """Export the next records to the configured target, and return how many. One process at a time does."""
    if not target or lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_TTL_S, now=now) is None:
        return 0
    try:
        return _export_next(target, now)
    except (BadTarget, ExportFailed) as error:
        log.warning("audit records are not exported: %s", error)
        return 0
    finally:
        lease_release(name=LEASE, holder=this_holder(), now=now)


def _export_next(target: str, now: datetime) -> int:
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


_KNOWN = """
SELECT rolsuper, pg_has_role(rolname, relowner, 'MEMBER')
FROM pg_roles, pg_class WHERE rolname = %s AND pg_class.oid = 'audit_auditrecord'::regclass
"""
_GRANTS = (
    "GRANT USAGE ON SCHEMA public TO {role}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
    "GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {role}",
    "REVOKE ALL ON audit_auditrecord, audit_auditchain, django_migrations FROM {role}",
    "GRANT SELECT, INSERT ON audit_auditrecord, audit_auditchain TO {role}",
    "GRANT UPDATE (head_number, head_digest) ON audit_auditchain TO {role}",
    "GRANT SELECT ON django_migrations TO {role}",
)


@transaction.atomic
def application_role_grant(*, role: str) -> None:
    """Grant an existing role the minimum that the application needs. Run it again after each migration. Raises
    InvalidInput if there is no such role. Raises Conflict for a superuser, or an owner of the tables, whom grants do
    not restrict."""
    with connection.cursor() as cursor:
        cursor.execute(_KNOWN, [role])
        found = cursor.fetchone()
        if found is None:
            message = f"there is no role {role!r} in PostgreSQL; make it first: CREATE ROLE {role} LOGIN"
            raise InvalidInput(field="role", rule="exists", message=message)
        if any(found):
            raise Conflict(f"{role} is a superuser or owns the tables, so grants do not restrict it; name another role")
        for grant in _GRANTS:
            cursor.execute(sql.SQL(grant).format(role=sql.Identifier(role)))


# --- who acts ---


def request_actor(request: HttpRequest) -> Actor | None:
    """Returns who sent a request, or None for an anonymous one."""
    address = str(request.META.get("REMOTE_ADDR") or "")
    prefix = _token_prefix(request)
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        proof = Proof.TOKEN if getattr(request, "auth", None) is not None else Proof.SESSION
        return Actor(user.get_username(), proof, address, prefix if proof is Proof.TOKEN else "")
    if prefix:
        return _token_owner(prefix, address)
    # To the API a session without its CSRF token is anonymous, but the record is of its user.
    user = get_user(request) if hasattr(request, "session") else None
    return Actor(user.get_username(), Proof.SESSION, address) if user is not None and user.is_authenticated else None


def command_actor() -> Actor:
    """Returns the account that runs this process, with the name of the machine."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        account = f"uid {os.getuid()}"
    return Actor(account, Proof.COMMAND, os.uname().nodename)


def _token_owner(prefix: str, address: str) -> Actor | None:
    token = apps.get_model("accounts", "ApiToken").objects.select_related("user").filter(prefix=prefix).first()
    if token is not None:
        return Actor(token.user.get_username(), Proof.TOKEN, address, prefix)
    for model in ("JoinToken", "AgentCredential"):
        known = apps.get_model("fleet", model).objects.filter(prefix=prefix).first()
        if known is not None:
            return Actor(known.subject, Proof.JOIN_TOKEN, address, prefix)
    if apps.get_model("fleet", "Invitation").objects.filter(prefix=prefix).exists():
        return Actor(f"invitation-{prefix}", Proof.JOIN_TOKEN, address, prefix)
    return None


def _token_prefix(request: HttpRequest) -> str:
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    prefix = secret_prefix(text.strip()) if scheme.casefold() == "bearer" else None
    return (prefix or "").replace("\x00", "")[:16]
