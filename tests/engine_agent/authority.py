"""A fleet's authority for tests: signs certificates with the real code, and stores revoked ones."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import CONTROL_ID, IdentityKind, IdentityName
from kernel.authority import CERTIFICATE_VALID, Authority, Issued, authority_make, certificate_sign, revocations_sign

FLEET = "f-0123abcd"


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class FleetOfTests:
    """One fleet with its authority. `bundle` and `revoked` are the current ones."""

    fleet: str = FLEET
    authorities: list[Authority] = field(default_factory=list)
    revoked_serials: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authorities = self.authorities or [authority_make(self.fleet, _now())]

    @property
    def bundle(self) -> str:
        return "".join(authority.certificate_pem for authority in self.authorities)

    @property
    def revoked(self) -> str:
        gone = [(serial, _now()) for serial in self.revoked_serials]
        return "".join(revocations_sign(each, gone, 1) for each in self.authorities)

    def name(self, kind: IdentityKind, subject: str) -> IdentityName:
        return IdentityName(self.fleet, kind, subject)

    def certify(
        self,
        home: Path,
        kind: IdentityKind,
        subject: str,
        *,
        valid: timedelta = CERTIFICATE_VALID,
        now: datetime | None = None,
    ) -> Identity:
        """Gives the identity in `home` a new certificate for this name, with the trust."""
        identity = Identity(home)
        self.renew(identity, kind, subject, valid=valid, now=now)
        return identity

    def renew(
        self,
        identity: Identity,
        kind: IdentityKind,
        subject: str = CONTROL_ID,
        *,
        valid: timedelta = CERTIFICATE_VALID,
        now: datetime | None = None,
    ) -> str:
        """The same for an existing identity. Returns the certificate's serial number."""
        issued = self.sign(kind, subject, identity.signing_request(), valid=valid, now=now)
        identity.store(chain=issued.pem, bundle=self.bundle, revoked=self.revoked)
        return issued.serial

    def sign(
        self,
        kind: IdentityKind,
        subject: str,
        request: str,
        *,
        valid: timedelta = CERTIFICATE_VALID,
        now: datetime | None = None,
    ) -> Issued:
        return certificate_sign(self.authorities[-1], self.name(kind, subject), request, now or _now(), valid)

    def revoke(self, serial: str, *identities: Identity) -> None:
        """Revokes this certificate, and updates these identities."""
        self.revoked_serials.append(serial)
        for identity in identities:
            identity.store_trust(bundle=self.bundle, revoked=self.revoked)
