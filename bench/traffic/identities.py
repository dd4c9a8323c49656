"""Certificates of a fleet of its own for what a bench starts, made by the real authority's code and known to nobody
else."""

from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.runtime.identity import Identity
from kernel.authority import Authority, authority_make, certificate_sign, revocations_sign

FLEET = "f-be0c4be0"


class BenchFleet:
    """One authority and whom it gave a certificate."""

    @cached_property
    def _authority(self) -> Authority:
        return authority_make(FLEET, datetime.now(UTC))

    def certify_ingress(self, home: Path) -> None:
        self._certify(home, IdentityName(FLEET, IdentityKind.INGRESS, "i-bench"))

    def certify_node(self, home: Path, node: str) -> None:
        self._certify(home, IdentityName(FLEET, IdentityKind.NODE, node))

    def _certify(self, home: Path, name: IdentityName) -> None:
        identity, now = Identity(home), datetime.now(UTC)
        issued = certificate_sign(self._authority, name, identity.signing_request(), now)
        revoked = revocations_sign(self._authority, (), 1)
        identity.store(chain=issued.pem, bundle=self._authority.certificate_pem, revoked=revoked)
