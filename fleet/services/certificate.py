"""Certificates of agents and of the control plane: signed for exactly one name, recorded, and revoked."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from engine_agent.protocol.identity import BadName, IdentityKind, IdentityName
from fleet.models import AgentCredential, FleetAuthority, IssuedCertificate, JoinToken
from fleet.planning.authority import AuthorityState
from fleet.selectors.trust import Trust, counting_certificates
from fleet.services.authority import authority_ensure, authority_open, revocation_lists_sign
from kernel.authority import BadRequest, certificate_sign

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
