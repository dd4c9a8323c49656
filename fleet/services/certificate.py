"""Certificates of agents and of the control plane: signed for exactly one name, recorded, and revoked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from engine_agent.protocol.identity import BadName, IdentityKind, IdentityName
from fleet.models import AgentCredential, FleetAuthority, IssuedCertificate, JoinToken
from fleet.planning.authority import AuthorityState
from fleet.selectors.trust import Trust, counting_certificates
from fleet.services.authority import authority_ensure, authority_open, revocation_lists_sign
from kernel.authority import BadRequest, certificate_sign

_BELIEVED = re.compile(r"(?:[0-9a-f]{64})?")


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
    """Sign each of these, in their order; where one is not signed, the exception that says why: `BadRequest` or
    `BadName`.

    Raises:
        SealedAway: the key of the authority that signs cannot be opened.
    """
    trust = authority_ensure(now)
    row = FleetAuthority.objects.get(state=AuthorityState.CURRENT)
    authority = authority_open(row)
    outcomes: list[SignedCertificate | Exception] = []
    issued: list[IssuedCertificate] = []
    for order in orders:
        try:
            if not _BELIEVED.fullmatch(order.believed):
                raise BadRequest("`believed` must be 64 hexadecimal digits, the SHA-256 of a bundle, or empty")
            signed = certificate_sign(
                authority, IdentityName(trust.fleet, order.kind, order.subject), order.request, now
            )
        except (BadRequest, BadName) as error:
            outcomes.append(error)
            continue
        outcomes.append(SignedCertificate(signed.pem, trust))
        issued.append(
            IssuedCertificate(
                authority=row,
                serial=signed.serial,
                kind=order.kind,
                subject=order.subject,
                key_pin=signed.key_pin,
                believed=order.believed,
                created_at=now,
                not_after=signed.not_after,
            )
        )
    IssuedCertificate.objects.bulk_create(issued)
    return outcomes


def certificate_issue(order: CertificateOrder, *, now: datetime) -> SignedCertificate:
    """Sign one.

    Raises:
        BadRequest: the request is none that is signed.
        BadName: nobody of this name may have a certificate.
        SealedAway: the key of the authority that signs cannot be opened.
    """
    (outcome,) = certificates_issue([order], now=now)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def agent_trust_end(*, kind: str, subject: str, now: datetime) -> None:
    """Revoke an agent's credentials and certificates and forget its join tokens, in the transaction of what ends it.
    Its socket is cut within 5 s; the others hear of it at once and refuse it at their next connection."""
    with transaction.atomic():
        JoinToken.objects.filter(kind=kind, subject=subject).delete()
        credentials = AgentCredential.objects.filter(kind=kind, subject=subject, revoked_at__isnull=True)
        # Locked first: a statement sees no row that was committed while it waited, and whoever signs renews under it.
        list(credentials.select_for_update().order_by("pk").values_list("pk"))
        credentials.update(revoked_at=now)
        if counting_certificates(now).filter(kind=kind, subject=subject).update(revoked_at=now):
            revocation_lists_sign(now)
