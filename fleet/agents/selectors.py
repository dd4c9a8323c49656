"""Whom the fleet believes: its authorities and what they revoked, as everybody is told."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Max, OuterRef, Q, QuerySet, Subquery

from engine_agent.protocol.identity import IdentityKind
from fleet.agents.models import FleetAuthority, IssuedCertificate
from fleet.agents.planner import AuthorityState, AuthorityView
from fleet.nodes.models import AgentCredential, JoinToken

CLOCKS_BEHIND = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Trust:
    """`bundle` and `revoked` as PEM; `version` changes with either."""

    fleet: str
    bundle: str
    revoked: str

    @property
    def bundle_digest(self) -> str:
        """What an agent states that believes this bundle."""
        return hashlib.sha256(self.bundle.encode()).hexdigest()

    @property
    def version(self) -> str:
        return hashlib.sha256(f"{self.bundle}{self.revoked}".encode()).hexdigest()


def trust_now() -> Trust | None:
    """What counts now; None: the fleet has no authority yet. One query of a few rows."""
    authorities = list(FleetAuthority.objects.only("fleet", "certificate", "revoked"))
    if not authorities:
        return None
    return Trust(
        fleet=authorities[0].fleet,
        bundle="".join(authority.certificate for authority in authorities),
        revoked="".join(authority.revoked for authority in authorities),
    )


def counting_certificates(now: datetime) -> "QuerySet[IssuedCertificate]":
    """Those that are neither revoked nor over."""
    return IssuedCertificate.objects.filter(revoked_at__isnull=True, not_after__gt=now)


def is_trusted(kind: str, subject: str, now: datetime) -> bool:
    """Whether an agent has a credential or a certificate that counts, or may still enrol."""
    own = {"kind": kind, "subject": subject}
    return (
        AgentCredential.objects.filter(**own, revoked_at__isnull=True).exists()
        or JoinToken.objects.filter(**own).exists()
        or counting_certificates(now).filter(**own).exists()
    )


def authority_views(now: datetime) -> tuple[AuthorityView, ...]:
    """The authorities as the planner takes them."""
    counts = Q(certificates__revoked_at__isnull=True, certificates__not_after__gt=now)
    rows = FleetAuthority.objects.annotate(until=Max("certificates__not_after", filter=counts))
    return tuple(AuthorityView(row.pk, AuthorityState(row.state), row.until) for row in rows)


def unaware_holders(bundle_digest: str, now: datetime) -> list[str]:
    """Who holds a certificate that counts, may still connect, and has not said that it believes this bundle."""
    newest = IssuedCertificate.objects.filter(kind=OuterRef("kind"), subject=OuterRef("subject")).order_by("-pk")
    holders = counting_certificates(now).annotate(newest=Subquery(newest.values("pk")[:1])).values("newest")
    rows = IssuedCertificate.objects.filter(pk__in=holders).exclude(believed=bundle_digest)
    agents = AgentCredential.objects.filter(revoked_at__isnull=True).values_list("kind", "subject")
    known = set(agents)
    return sorted(f"{row.kind} {row.subject}" for row in rows if (row.kind, row.subject) in known)


def control_pins(now: datetime) -> tuple[str, ...]:
    """The keys by which the hosts of the control plane are known to who has no authorities yet: SHA-256, Base64."""
    rows = counting_certificates(now).filter(kind=IdentityKind.CONTROL).exclude(key_pin="")
    return tuple(sorted(set(rows.values_list("key_pin", flat=True))))


def server_pin(now: datetime) -> str:
    """The keys of the listeners for agents, as curl takes them; "" where links are plain. Who came in by them gets the
    fleet's authorities (`trust_now`), for `tls/ca.pem` of its home, and needs no pin any more."""
    pins = () if settings.PLAIN_LINKS else control_pins(now)
    return ";".join(f"sha256//{pin}" for pin in pins)


def revoked_serials(authority_id: int, now: datetime) -> Sequence[tuple[str, datetime]]:
    """What an authority's revocation list must name: certificates that would count otherwise. Those that have ended
    stay for an hour, for hosts whose clocks are behind."""
    rows = IssuedCertificate.objects.filter(authority_id=authority_id, revoked_at__isnull=False)
    listed = rows.filter(not_after__gt=now - CLOCKS_BEHIND).values_list("serial", "revoked_at")
    return [(serial, revoked_at) for serial, revoked_at in listed if revoked_at is not None]
