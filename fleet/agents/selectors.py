"""Reads the trusted authorities, their revocations, and the certificate holders that have not confirmed them. Never
writes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Max, OuterRef, Q, QuerySet, Subquery

from engine_agent.protocol.identity import IdentityKind
from fleet.agents.models import FleetAuthority, IssuedCertificate
from fleet.agents.planner import AuthorityState, AuthorityView
from fleet.cells.models import CellMember
from fleet.nodes.models import AgentCredential, JoinToken, Node
from fleet.reconcile.planning.states import CellState, NodeState
from models_registry.compile_caches.selectors import CachePlace

CLOCKS_BEHIND = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Trust:
    """`bundle` and `revoked` as PEM; `version` changes with either."""

    fleet: str
    bundle: str
    revoked: str

    @property
    def bundle_digest(self) -> str:
        """The digest by which agents confirm this bundle."""
        return hashlib.sha256(self.bundle.encode()).hexdigest()

    @property
    def version(self) -> str:
        return hashlib.sha256(f"{self.bundle}{self.revoked}".encode()).hexdigest()


def trust_now() -> Trust | None:
    """Returns the trusted authorities; None before the first one exists. One query of a few rows."""
    authorities = list(FleetAuthority.objects.only("fleet", "certificate", "revoked"))
    if not authorities:
        return None
    return Trust(
        fleet=authorities[0].fleet,
        bundle="".join(authority.certificate for authority in authorities),
        revoked="".join(authority.revoked for authority in authorities),
    )


def counting_certificates(now: datetime) -> "QuerySet[IssuedCertificate]":
    """Certificates that are neither revoked nor expired."""
    return IssuedCertificate.objects.filter(revoked_at__isnull=True, not_after__gt=now)


def is_trusted(kind: str, subject: str, now: datetime) -> bool:
    """Whether an agent has a valid credential or certificate, or may still enrol."""
    own = {"kind": kind, "subject": subject}
    return (
        AgentCredential.objects.filter(**own, revoked_at__isnull=True).exists()
        or JoinToken.objects.filter(**own).exists()
        or counting_certificates(now).filter(**own).exists()
    )


def authority_views(now: datetime) -> tuple[AuthorityView, ...]:
    counts = Q(certificates__revoked_at__isnull=True, certificates__not_after__gt=now)
    rows = FleetAuthority.objects.annotate(until=Max("certificates__not_after", filter=counts))
    return tuple(AuthorityView(row.pk, AuthorityState(row.state), row.until) for row in rows)


def unaware_holders(bundle_digest: str, now: datetime) -> list[str]:
    """Returns holders of valid certificates that may still connect and have not confirmed this bundle."""
    newest = IssuedCertificate.objects.filter(kind=OuterRef("kind"), subject=OuterRef("subject")).order_by("-pk")
    holders = counting_certificates(now).annotate(newest=Subquery(newest.values("pk")[:1])).values("newest")
    rows = IssuedCertificate.objects.filter(pk__in=holders).exclude(believed=bundle_digest)
    agents = AgentCredential.objects.filter(revoked_at__isnull=True).values_list("kind", "subject")
    known = set(agents)
    return sorted(f"{row.kind} {row.subject}" for row in rows if (row.kind, row.subject) in known)


def control_pins(now: datetime) -> tuple[str, ...]:
    """Returns the SHA-256 (Base64) of the keys of control hosts, for clients without authorities."""
    rows = counting_certificates(now).filter(kind=IdentityKind.CONTROL).exclude(key_pin="")
    return tuple(sorted(set(rows.values_list("key_pin", flat=True))))


def server_pin(now: datetime) -> str:
    """Returns the pins of the agents' listeners in curl's form; "" for plain links. Clients that connect by a pin
    receive the fleet's authorities (`trust_now`) for `tls/ca.pem` and need no pin afterwards."""
    pins = () if settings.PLAIN_LINKS else control_pins(now)
    return ";".join(f"sha256//{pin}" for pin in pins)


def revoked_serials(authority_id: int, now: datetime) -> Sequence[tuple[str, datetime]]:
    """Returns the certificates for an authority's revocation list. Expired ones stay an hour, for hosts with late
    clocks."""
    rows = IssuedCertificate.objects.filter(authority_id=authority_id, revoked_at__isnull=False)
    listed = rows.filter(not_after__gt=now - CLOCKS_BEHIND).values_list("serial", "revoked_at")
    return [(serial, revoked_at) for serial, revoked_at in listed if revoked_at is not None]


def cache_place(node_id: str) -> CachePlace | None:
    """Where a node's compile cache belongs; None if it is in no cell."""
    member = CellMember.objects.select_related("cell", "node").filter(node=node_id).first()
    if member is None:
        return None
    cell = member.cell
    return CachePlace(
        node=node_id,
        cell=cell.id,
        version=cell.model_version_id,
        instance_type=cell.instance_type_id,
        rank=member.rank,
        is_serving=cell.state == CellState.READY.value and member.node.state == NodeState.READY.value,
    )


def is_under_suspicion(node_id: str) -> bool:
    """Whether what this node made must not reach other nodes. Nodes that left or were removed are not."""
    states = [NodeState.SUSPECT.value, NodeState.FAULTY.value]
    return Node.objects.filter(id=node_id, state__in=states).exists()
