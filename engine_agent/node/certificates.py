"""Keys, requests and certificates as an agent's home holds them: made, read and checked, in memory.

Apart from `identity`, which imports it only where one is made or read: it takes 13 MB, and cell proxies need none.
"""

from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engine_agent.protocol.identity import BadName, IdentityName, is_fleet_name, name_of_uri

ORGANIZATION = x509.NameOID.ORGANIZATION_NAME


class BadCertificate(ValueError):
    """What was to be stored is no certificate for this key, or no bundle; the text says which."""


@dataclass(frozen=True, slots=True)
class Validity:
    """Since when and until when a certificate counts, and for whom; its serial number in hexadecimal."""

    name: IdentityName
    serial: str
    not_before: datetime
    not_after: datetime

    def renew_after(self, draw: float) -> datetime:
        """When to ask for the next: after half of its life, up to a tenth of it later; `draw` is uniform in [0, 1)."""
        return self.not_before + (self.not_after - self.not_before) * (0.5 + 0.1 * draw)


def key_make() -> ec.EllipticCurvePrivateKey:
    """A new key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_read(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    """The key in a file of ours; None if there is none."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def request_make(key: ec.EllipticCurvePrivateKey) -> str:
    """A request for a certificate of this key, as PEM. It names nobody: who signs knows for whom."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def validity_of(chain: str, key: ec.EllipticCurvePrivateKey) -> Validity:
    """What the first certificate of a chain (PEM) says, which must be for this key.

    Raises:
        BadCertificate: it is for another key, has no name of a fleet, or is no PEM.
    """
    leaf = require_certificates(chain, "the chain")[0]
    if leaf.public_key() != key.public_key():
        raise BadCertificate(f"the certificate of {_subject(leaf)} is for another key than this home's")
    return _validity(leaf)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def require_certificates(pem: str, what: str) -> list[x509.Certificate]:
    """The certificates of a PEM.

    Raises:
        BadCertificate: there is none, or one is none.
    """
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise BadCertificate(f"{what} is no PEM of certificates: {error}") from error


def fleet_of(bundle: str) -> str:
    """Whose authorities a bundle (PEM) holds: the organization in their names.

    Raises:
        BadCertificate: it has no authority of a fleet, or of two.
    """
    certificates = require_certificates(bundle, "the bundle of authorities")
    names = [name.value for each in certificates for name in each.subject.get_attributes_for_oid(ORGANIZATION)]
    fleet = str(names[0]) if len(set(names)) == 1 else ""
    if not is_fleet_name(fleet):
        raise BadCertificate("the bundle of authorities is not of one fleet")
    return fleet


def require_revocation_lists(pem: str) -> None:
    """Check that a PEM holds revocation lists, one or more.

    Raises:
        BadCertificate: it does not.
    """
    if not _revocation_lists(pem):
        raise BadCertificate("the revocation lists are no PEM: there is none")


def revoked_serials(pem: str) -> list[int]:
    """The serial numbers on these revocation lists.

    Raises:
        BadCertificate: they are none.
    """
    return [entry.serial_number for revoked in _revocation_lists(pem) for entry in revoked]


def _revocation_lists(pem: str) -> list[x509.CertificateRevocationList]:
    end = "-----END X509 CRL-----"
    try:
        return [x509.load_pem_x509_crl((text.strip() + "\n" + end).encode()) for text in pem.split(end)[:-1]]
    except ValueError as error:
        raise BadCertificate(f"the revocation lists are no PEM: {error}") from error


def _validity(leaf: x509.Certificate) -> Validity:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        name = name_of_uri(uris[0] if len(uris) == 1 else "")
    except (x509.ExtensionNotFound, BadName, ValueError) as error:
        raise BadCertificate(f"the certificate of {_subject(leaf)} has no name of a fleet: {error}") from error
    return Validity(name, f"{leaf.serial_number:x}", leaf.not_valid_before_utc, leaf.not_valid_after_utc)


def _subject(leaf: x509.Certificate) -> str:
    return leaf.subject.rfc4514_string() or "nobody"
