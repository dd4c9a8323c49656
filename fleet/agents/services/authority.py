"""Creates, opens and rotates the fleet's certificate authorities, issues certificates of agents and of the control
plane for exactly one name each, and signs revocation lists. A private key is plain text only in a process that signs.
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
"""Taken by every change of authorities or revocation lists ("SY_CA"), so that no host overwrites another's list."""


CERTIFICATES_KEPT = timedelta(days=7)
"""After expiry, to show who had one."""

log = logging.getLogger(__name__)


class SealedAway(Exception):
    """This SECRET_KEY cannot decrypt an authority's key."""


_opened: dict[str, Authority] = {}


def authority_ensure(now: datetime) -> Trust:
    """Returns the trusted authorities; creates the first one if needed. Hosts may call it concurrently."""
    trust = trust_now()
    if trust is None:
        with transaction.atomic():
            _lock_authorities()
            if not FleetAuthority.objects.exists():
                _authority_create(f"f-{secrets.token_hex(4)}", AuthorityState.CURRENT, now)
        trust = trust_now()
    if trust is None:
        raise IntegrityError("the fleet's authority was created but does not exist")
    return trust


def authority_open(row: FleetAuthority) -> Authority:
    """Returns the authority of a row, with its key. Raises SealedAway if it was encrypted with another SECRET_KEY."""
    if row.identifier not in _opened:
        try:
            key_pem = _key_cipher().decrypt(row.sealed_secret.encode())
        except InvalidToken:
            raise SealedAway(
                f"the key of {row} was encrypted with another SWITCHYARD_SECRET_KEY: set that one again, or create "
                "an authority with `manage.py ca_rotate`"
            ) from None
        _opened[row.identifier] = authority_load(row.certificate, key_pem)
    return _opened[row.identifier]


def authority_rotate(*, actor: str, now: datetime) -> FleetAuthority:
    """Creates the next authority. All agents receive it immediately; it signs nothing until all trust it. Raises
    Conflict if one exists already."""
    with transaction.atomic():
        _lock_authorities()
        there = FleetAuthority.objects.filter(state=AuthorityState.NEXT).first()
        if there is not None:
            raise Conflict(f"{there} is in rotation already, since {there.state_since:%Y-%m-%d %H:%M:%S} UTC")
        current = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
        row = _authority_create(current.fleet, AuthorityState.NEXT, now)
        event_record(
            kind="authority.made",
            message=f"{row} was created by {actor}; agents receive it now",
            now=now,
            tone=Tone.MOVING,
        )
        live.push_trust()
    return row


@dataclass(frozen=True, slots=True)
class RotationStep:
    """Steps taken, as sentences, and the agents that do not trust the next authority yet."""

    done: tuple[str, ...]
    unaware: tuple[str, ...]


def authority_advance(*, now: datetime, force: bool = False) -> RotationStep:
    """Takes the due steps of a rotation. `force`: the next authority signs although some agents do not trust it; those
    must join again."""
    with transaction.atomic():
        _lock_authorities()
        trust = trust_now()
        if trust is None:
            return RotationStep((), ())
        unaware = tuple(unaware_holders(trust.bundle_digest, now))
        steps = plan_rotation(authority_views(now), () if force else unaware, now)
        for step in steps:
            _apply_rotation(step, now)
        done = tuple(f"authority {step.id}: {step.reason}" for step in steps)
    return RotationStep(done, unaware)


def rotation_states() -> list[AuthorityState]:
    return [AuthorityState(state) for state in FleetAuthority.objects.values_list("state", flat=True)]


def _apply_rotation(step: Promote | Drop, now: datetime) -> None:
    row = FleetAuthority.objects.get(pk=step.id)
    if isinstance(step, Promote):
        FleetAuthority.objects.filter(state=AuthorityState.CURRENT).update(
            state=AuthorityState.PREVIOUS, state_since=now
        )
        FleetAuthority.objects.filter(pk=step.id).update(state=AuthorityState.CURRENT, state_since=now)
        message = f"{row} signs from now on: {step.reason}"
    else:
        row.delete()
        message = f"{row} is no longer trusted: {step.reason}"
    event_record(kind="authority.rotated", message=message, now=now, tone=Tone.OK)
    live.push_trust()


def revocation_lists_sign(now: datetime) -> None:
    """Signs the revocation list of every authority, in the transaction that changes its content. A list whose key
    cannot be decrypted stays unchanged and is logged, because the rest of the transaction must not wait for it."""
    _lock_authorities()
    for row in FleetAuthority.objects.all():
        try:
            authority = authority_open(row)
        except SealedAway as error:
            log.error("a revocation is missing in the list: %s", error)
            continue
        row.revoked_number += 1
        row.revoked = revocations_sign(authority, revoked_serials(row.pk, now), row.revoked_number)
        row.save(update_fields=["revoked", "revoked_number"])
    live.push_trust()


def certificates_trim(*, now: datetime) -> int:
    """Deletes certificates that expired long ago. Returns how many."""
    return IssuedCertificate.objects.filter(not_after__lt=now - CERTIFICATES_KEPT).delete()[0]


def _authority_create(fleet: str, state: AuthorityState, now: datetime) -> FleetAuthority:
    made = authority_make(fleet, now)
    return FleetAuthority.objects.create(
        fleet=fleet,
        state=state,
        identifier=made.identifier,
        certificate=made.certificate_pem,
        sealed_secret=_key_cipher().encrypt(made.key_pem).decode(),
        revoked=revocations_sign(made, (), 1),
        created_at=now,
        state_since=now,
    )


def _lock_authorities() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _key_cipher() -> Fernet:
    return Fernet(base64.urlsafe_b64encode(salted_hmac("fleet.authority", "", algorithm="sha256").digest()))


_BELIEVED = re.compile(r"(?:[0-9a-f]{64})?")
MOST_AT_ONCE = 4
"""Valid certificates of one agent. A healthy one has two, and a few more after a new home or new authorities."""
FURTHER_AFTER = timedelta(hours=1)
"""Limits revocation lists, which all agents receive: each valid certificate becomes a line once its owner is
revoked."""


class TooManyCertificates(Exception):
    """The limit is reached; the text says when another is issued."""


@dataclass(frozen=True, slots=True)
class CertificateOrder:
    """A request of an authenticated agent for a certificate. `believed`: digest of its bundle, 64 hexadecimal digits,
    or "" if it has none."""

    kind: IdentityKind
    subject: str
    request: str
    believed: str = ""


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    chain: str
    trust: Trust


def certificates_issue(orders: Sequence[CertificateOrder], *, now: datetime) -> list[SignedCertificate | Exception]:
    """Signs the requests. Returns, in order, certificates or the exception for each: `BadRequest`, `BadName` or
    `TooManyCertificates`. Raises SealedAway if the key of the current authority cannot be decrypted."""
    trust = authority_ensure(now)
    row = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
    authority = authority_open(row)
    outcomes: list[SignedCertificate | Exception] = []
    issued: list[IssuedCertificate] = []
    counting = _unexpired_certificates(orders, now)
    for order in orders:
        try:
            if not _BELIEVED.fullmatch(order.believed):
                raise BadRequest("`believed` must be 64 hexadecimal digits, the SHA-256 of a bundle, or empty")
            _check_certificate_limit(order, counting[order.kind, order.subject], trust.bundle_digest, now)
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
    """Signs one request. Raises BadRequest if the request is invalid. Raises BadName if this name may not have a
    certificate. Raises TooManyCertificates if the limit is reached. Raises SealedAway if the key of the current
    authority cannot be decrypted."""
    (outcome,) = certificates_issue([order], now=now)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _unexpired_certificates(
    orders: Sequence[CertificateOrder], now: datetime
) -> dict[tuple[str, str], list[IssuedCertificate]]:
    """Unexpired certificates by (kind, subject). Revoked ones count, because each is a line of the list until it
    expires."""
    found: dict[tuple[str, str], list[IssuedCertificate]] = defaultdict(list)
    subjects = {order.subject for order in orders if order.kind is not IdentityKind.CONTROL}
    for row in IssuedCertificate.objects.filter(not_after__gt=now, subject__in=subjects):
        found[row.kind, row.subject].append(row)
    return found


def _check_certificate_limit(
    order: CertificateOrder, counting: Sequence[IssuedCertificate], bundle: str, now: datetime
) -> None:
    """An agent with `MOST_AT_ONCE` gets another after an hour, or as the first with which it confirms today's
    authorities, because a rotation waits for that."""
    if order.kind is IdentityKind.CONTROL or len(counting) < MOST_AT_ONCE:
        return
    again_at = max(row.created_at for row in counting) + FURTHER_AFTER
    is_first_of_bundle = order.believed == bundle and all(row.believed != bundle for row in counting)
    if now < again_at and not is_first_of_bundle:
        raise TooManyCertificates(
            f"{order.kind} {order.subject} has {len(counting)} valid certificates; it gets another at "
            f"{again_at:%H:%M:%S} UTC, or when the fleet trusts another authority"
        )


def agent_trust_end(*, kind: str, subject: str, now: datetime) -> None:
    """Revokes an agent's credentials and certificates and deletes its join tokens, in the caller's transaction. Its
    socket is cut within 5 s; other hosts receive the revocation and reject its next connection."""
    with transaction.atomic():
        JoinToken.objects.filter(kind=kind, subject=subject).delete()
        credentials_revoke(kind=kind, subject=subject, now=now)


def credentials_revoke(*, kind: str, subject: str, now: datetime) -> None:
    """Revokes an agent's credentials and certificates, in the caller's transaction."""
    credentials = AgentCredential.objects.filter(kind=kind, subject=subject, revoked_at__isnull=True)
    # Locked first: a statement does not see rows committed while it waited, and signing renews under this lock.
    list(credentials.select_for_update().order_by("pk").values_list("pk"))
    credentials.update(revoked_at=now)
    if counting_certificates(now).filter(kind=kind, subject=subject).update(revoked_at=now):
        revocation_lists_sign(now)
