"""The fleet's certificate authorities: made at the first start, opened to sign, rotated, and their revocation lists
signed anew. A private key is plain text only in a process that signs.

Certificates of agents and of the control plane: signed for exactly one name, recorded, and revoked.
"""

import base64
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.fernet import Fernet, InvalidToken
from django.db import IntegrityError, connection, transaction
from django.utils.crypto import salted_hmac

from engine_agent.protocol.identity import BadName, IdentityKind, IdentityName
from fleet.agents.models import FleetAuthority, IssuedCertificate
from fleet.agents.planner import AuthorityState, Drop, Promote, plan_rotation
from fleet.agents.selectors import (
    Trust,
    authority_views,
    counting_certificates,
    revoked_serials,
    trust_now,
    unaware_holders,
)
from fleet.nodes.models import AgentCredential, JoinToken
from kernel import live
from kernel.authority import Authority, BadRequest, authority_load, authority_make, certificate_sign, revocations_sign
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone

_LOCK = 0x53595F4341
"""Of everything that changes authorities or revocation lists ("SY_CA"), so that no host overwrites another's list."""


CERTIFICATES_KEPT = timedelta(days=7)
"""After they ended, so that who had one can still be seen."""

log = logging.getLogger(__name__)


class SealedAway(Exception):
    """An authority's key cannot be opened with this SECRET_KEY."""


_opened: dict[str, Authority] = {}


def authority_ensure(now: datetime) -> Trust:
    """What the fleet believes; its first authority is made if there is none. Any number of hosts may call it."""
    trust = trust_now()
    if trust is None:
        with transaction.atomic():
            _lock()
            if not FleetAuthority.objects.exists():
                _create(f"f-{secrets.token_hex(4)}", AuthorityState.CURRENT, now)
        trust = trust_now()
    if trust is None:
        raise IntegrityError("the fleet's authority was made and is not there")
    return trust


def authority_open(row: FleetAuthority) -> Authority:
    """The authority of a row, with its key.

    Raises:
        SealedAway: it was sealed under another SECRET_KEY.
    """
    if row.identifier not in _opened:
        try:
            key_pem = _box().decrypt(row.sealed_secret.encode())
        except InvalidToken:
            raise SealedAway(
                f"the key of {row} was sealed under another SWITCHYARD_SECRET_KEY: set that one again, or make a new"
                " authority with `manage.py ca_rotate`"
            ) from None
        _opened[row.identifier] = authority_load(row.certificate, key_pem)
    return _opened[row.identifier]


def authority_rotate(*, actor: str, now: datetime) -> FleetAuthority:
    """Make the next authority. Everybody is told of it at once; it signs nothing until all believe it.

    Raises:
        Conflict: there is one already.
    """
    with transaction.atomic():
        _lock()
        there = FleetAuthority.objects.filter(state=AuthorityState.NEXT).first()
        if there is not None:
            raise Conflict(f"{there} is on its way already, since {there.state_since:%Y-%m-%d %H:%M:%S} UTC")
        current = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
        row = _create(current.fleet, AuthorityState.NEXT, now)
        event_record(
            kind="authority.made", message=f"{row} was made by {actor}; agents hear of it", now=now, tone=Tone.MOVING
        )
        live.push_trust()
    return row


@dataclass(frozen=True, slots=True)
class RotationStep:
    """What an advance did: each step as a sentence; and who does not believe the next authority yet."""

    done: tuple[str, ...]
    unaware: tuple[str, ...]


def authority_advance(*, now: datetime, force: bool = False) -> RotationStep:
    """Take the steps of a rotation that are due. `force`: the next authority signs though not all believe it; who does
    not must join anew."""
    with transaction.atomic():
        _lock()
        trust = trust_now()
        if trust is None:
            return RotationStep((), ())
        unaware = tuple(unaware_holders(trust.bundle_digest, now))
        steps = plan_rotation(authority_views(now), () if force else unaware, now)
        for step in steps:
            _apply(step, now)
        done = tuple(f"authority {step.id}: {step.reason}" for step in steps)
    return RotationStep(done, unaware)


def rotation_states() -> list[AuthorityState]:
    """The states of the authorities that there are."""
    return [AuthorityState(state) for state in FleetAuthority.objects.values_list("state", flat=True)]


def _apply(step: Promote | Drop, now: datetime) -> None:
    row = FleetAuthority.objects.get(pk=step.id)
    if isinstance(step, Promote):
        FleetAuthority.objects.filter(state=AuthorityState.CURRENT).update(
            state=AuthorityState.PREVIOUS, state_since=now
        )
        FleetAuthority.objects.filter(pk=step.id).update(state=AuthorityState.CURRENT, state_since=now)
        message = f"{row} signs from now on: {step.reason}"
    else:
        row.delete()
        message = f"{row} is believed no longer: {step.reason}"
    event_record(kind="authority.rotated", message=message, now=now, tone=Tone.OK)
    live.push_trust()


def revocation_lists_sign(now: datetime) -> None:
    """Sign the revocation list of every authority anew, in the transaction that changed what they must name. One whose
    key is sealed away keeps its list, and that is logged: what else the transaction does must not wait for it."""
    _lock()
    for row in FleetAuthority.objects.all():
        try:
            authority = authority_open(row)
        except SealedAway as error:
            log.error("a revocation is in no list: %s", error)
            continue
        row.revoked_number += 1
        row.revoked = revocations_sign(authority, revoked_serials(row.pk, now), row.revoked_number)
        row.save(update_fields=["revoked", "revoked_number"])
    live.push_trust()


def certificates_trim(*, now: datetime) -> int:
    """Forget certificates that ended long ago. Returns how many."""
    return IssuedCertificate.objects.filter(not_after__lt=now - CERTIFICATES_KEPT).delete()[0]


def _create(fleet: str, state: AuthorityState, now: datetime) -> FleetAuthority:
    made = authority_make(fleet, now)
    return FleetAuthority.objects.create(
        fleet=fleet,
        state=state,
        identifier=made.identifier,
        certificate=made.certificate_pem,
        sealed_secret=_box().encrypt(made.key_pem).decode(),
        revoked=revocations_sign(made, (), 1),
        created_at=now,
        state_since=now,
    )


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _box() -> Fernet:
    return Fernet(base64.urlsafe_b64encode(salted_hmac("fleet.authority", "", algorithm="sha256").digest()))


_BELIEVED = re.compile(r"(?:[0-9a-f]{64})?")
MOST_AT_ONCE = 4
"""Certificates of one agent that count. An honest one has two, and some more after a new home or other authorities."""
FURTHER_AFTER = timedelta(hours=1)
"""Each certificate that counts is a line of the revocation list once its owner is revoked, and all agents get the list:
nobody may make it long."""


class TooManyCertificates(Exception):
    """One has as many as it may have; the text says since when, and when it may have another."""


@dataclass(frozen=True, slots=True)
class CertificateOrder:
    """A certificate that somebody wants. Who that is, is known; `believed`: the digest of the bundle that it has, 64
    hexadecimal digits, or "" of who has none."""

    kind: IdentityKind
    subject: str
    request: str
    believed: str = ""


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """A certificate as PEM, and what its owner must believe."""

    chain: str
    trust: Trust


def certificates_issue(orders: Sequence[CertificateOrder], *, now: datetime) -> list[SignedCertificate | Exception]:
    """Sign each of these, in their order; where one is not signed, the exception that says why: `BadRequest`,
    `BadName` or `TooManyCertificates`.

    Raises:
        SealedAway: the key of the authority that signs cannot be opened.
    """
    trust = authority_ensure(now)
    row = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
    authority = authority_open(row)
    outcomes: list[SignedCertificate | Exception] = []
    issued: list[IssuedCertificate] = []
    counting = _counting(orders, now)
    for order in orders:
        try:
            if not _BELIEVED.fullmatch(order.believed):
                raise BadRequest("`believed` must be 64 hexadecimal digits, the SHA-256 of a bundle, or empty")
            _require_few(order, counting[order.kind, order.subject], trust.bundle_digest, now)
            signed = certificate_sign(
                authority, IdentityName(trust.fleet, order.kind, order.subject), order.request, now
            )
        except (BadRequest, BadName, TooManyCertificates) as error:
            outcomes.append(error)
            continue
        outcomes.append(SignedCertificate(signed.pem, trust))
        made = IssuedCertificate(
            authority=row,
            serial=signed.serial,
            kind=order.kind,
            subject=order.subject,
            key_pin=signed.key_pin,
            believed=order.believed,
            created_at=now,
            not_after=signed.not_after,
        )
        issued.append(made)
        counting[order.kind, order.subject].append(made)
    IssuedCertificate.objects.bulk_create(issued)
    return outcomes


def certificate_issue(order: CertificateOrder, *, now: datetime) -> SignedCertificate:
    """Sign one.

    Raises:
        BadRequest: the request is none that is signed.
        BadName: nobody of this name may have a certificate.
        TooManyCertificates: it has enough that count.
        SealedAway: the key of the authority that signs cannot be opened.
    """
    (outcome,) = certificates_issue([order], now=now)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _counting(orders: Sequence[CertificateOrder], now: datetime) -> dict[tuple[str, str], list[IssuedCertificate]]:
    """The certificates that have not ended, of each (kind, subject) that orders one. Revoked ones are among them: who
    enrols anew has its own revoked, and each is a line of the list until it ends."""
    found: dict[tuple[str, str], list[IssuedCertificate]] = defaultdict(list)
    subjects = {order.subject for order in orders if order.kind is not IdentityKind.CONTROL}
    for row in IssuedCertificate.objects.filter(not_after__gt=now, subject__in=subjects):
        found[row.kind, row.subject].append(row)
    return found


def _require_few(order: CertificateOrder, counting: Sequence[IssuedCertificate], bundle: str, now: datetime) -> None:
    """Whoever has `MOST_AT_ONCE` gets another only an hour after the last, or as the first with which it states that it
    believes today's authorities: a rotation waits for that."""
    if order.kind is IdentityKind.CONTROL or len(counting) < MOST_AT_ONCE:
        return
    again_at = max(row.created_at for row in counting) + FURTHER_AFTER
    is_first_of_bundle = order.believed == bundle and all(row.believed != bundle for row in counting)
    if now < again_at and not is_first_of_bundle:
        raise TooManyCertificates(
            f"{order.kind} {order.subject} has {len(counting)} certificates that count; it gets another at"
            f" {again_at:%H:%M:%S} UTC, or when the fleet believes another authority"
        )


def agent_trust_end(*, kind: str, subject: str, now: datetime) -> None:
    """Revoke an agent's credentials and certificates and forget its join tokens, in the transaction of what ends it.
    Its socket is cut within 5 s; the others hear of it at once and refuse it at their next connection."""
    with transaction.atomic():
        JoinToken.objects.filter(kind=kind, subject=subject).delete()
        credentials_revoke(kind=kind, subject=subject, now=now)


def credentials_revoke(*, kind: str, subject: str, now: datetime) -> None:
    """Revoke an agent's credentials and certificates, in the caller's transaction."""
    credentials = AgentCredential.objects.filter(kind=kind, subject=subject, revoked_at__isnull=True)
    # Locked first: a statement sees no row that was committed while it waited, and whoever signs renews under it.
    list(credentials.select_for_update().order_by("pk").values_list("pk"))
    credentials.update(revoked_at=now)
    if counting_certificates(now).filter(kind=kind, subject=subject).update(revoked_at=now):
        revocation_lists_sign(now)
