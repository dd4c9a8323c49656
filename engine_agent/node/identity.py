"""The key, certificate and authorities of an agent's home, in its folder `tls`: created, checked and stored here. The
key is created here and never leaves the home. Renewals store certificates here, and TLS contexts notice. An engine's
leader also gets a throwaway certificate for the channel of its cell at every start, and a cell proxy a copy of its
node's identity."""

import hashlib
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, Launch, follower_count
from engine_agent.node.accounts import Account
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import (
    BUNDLE_FILE,
    COMBINED_FILE,
    REVOKED_FILE,
    REVOKED_SERIALS_FILE,
    TLS_FOLDER,
    BadName,
    IdentityFiles,
    IdentityName,
    is_fleet_name,
    name_of_uri,
    peer_name,
    renewed_server_context,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.states import MemberRole

ORGANIZATION = x509.NameOID.ORGANIZATION_NAME


class BadCertificate(ValueError):
    """Not a certificate for this key, or not a bundle; the text says which."""


@dataclass(frozen=True, slots=True)
class Validity:
    """Owner and validity of a certificate, with its serial number in hexadecimal."""

    name: IdentityName
    serial: str
    not_before: datetime
    not_after: datetime

    def renew_after(self, draw: float) -> datetime:
        """When to request the next: after half of its life, up to a tenth of it later; `draw` is uniform in [0, 1)."""
        return self.not_before + (self.not_after - self.not_before) * (0.5 + 0.1 * draw)


def key_read(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def request_make(key: ec.EllipticCurvePrivateKey) -> str:
    """Returns a request for a certificate of this key, as PEM. It contains no name: the signer knows the owner."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def validity_of(chain: str, key: ec.EllipticCurvePrivateKey) -> Validity:
    """The validity of the first certificate of a chain (PEM). Raises BadCertificate if it is for another key, has no
    name of a fleet, or is not PEM."""
    leaf = require_certificates(chain, "the chain")[0]
    if leaf.public_key() != key.public_key():
        raise BadCertificate(f"the certificate of {_subject_of(leaf)} is for a different key than this home's")
    return _validity(leaf)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def require_certificates(pem: str, what: str) -> list[x509.Certificate]:
    """Parses the certificates in a PEM. Raises BadCertificate if there is none, or one is invalid."""
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise BadCertificate(f"{what} is not a PEM of certificates: {error}") from error


def fleet_of(bundle: str) -> str:
    """The fleet of the authorities in a bundle (PEM): the organization in their names. Raises BadCertificate if it has
    no authority of a fleet, or authorities of two."""
    certificates = require_certificates(bundle, "the bundle of authorities")
    names = [name.value for each in certificates for name in each.subject.get_attributes_for_oid(ORGANIZATION)]
    fleet = str(names[0]) if len(set(names)) == 1 else ""
    if not is_fleet_name(fleet):
        raise BadCertificate("the bundle of authorities is not of one fleet")
    return fleet


def require_revocation_lists(pem: str) -> None:
    """Checks that a PEM contains at least one revocation list. Raises BadCertificate if it does not."""
    if not _revocation_lists(pem):
        raise BadCertificate("the revocation lists are not PEM: there is none")


def revoked_serials(pem: str) -> list[int]:
    """The serial numbers on these revocation lists. Raises BadCertificate if they are invalid."""
    return [entry.serial_number for revoked in _revocation_lists(pem) for entry in revoked]


def _revocation_lists(pem: str) -> list[x509.CertificateRevocationList]:
    end = "-----END X509 CRL-----"
    try:
        return [x509.load_pem_x509_crl((text.strip() + "\n" + end).encode()) for text in pem.split(end)[:-1]]
    except ValueError as error:
        raise BadCertificate(f"the revocation lists are not PEM: {error}") from error


def _validity(leaf: x509.Certificate) -> Validity:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        name = name_of_uri(uris[0] if len(uris) == 1 else "")
    except (x509.ExtensionNotFound, BadName, ValueError) as error:
        raise BadCertificate(f"the certificate of {_subject_of(leaf)} has no name of a fleet: {error}") from error
    return Validity(name, f"{leaf.serial_number:x}", leaf.not_valid_before_utc, leaf.not_valid_after_utc)


def _subject_of(leaf: x509.Certificate) -> str:
    return leaf.subject.rfc4514_string() or "no subject"


__all__ = [
    "BUNDLE_FILE",
    "COMBINED_FILE",
    "REVOKED_FILE",
    "TLS_FOLDER",
    "Identity",
    "peer_name",
    "renewed_server_context",
]


class Identity(IdentityFiles):
    """The files of a home, with its key, requests for certificates, and storage of the answers."""

    _fleet: "tuple[object, str] | None" = None
    """With the stamp of the files that it was read from."""

    def fleet(self) -> str:
        """The fleet of the authorities in the bundle. Raises BadCertificate if it is not a bundle of one fleet. Raises
        FileNotFoundError if there is none."""
        if not self.has_bundle:
            raise FileNotFoundError(
                f"{self.bundle_file} is missing: without the fleet's authorities no server can be verified"
            )
        stamp = self.stamp()
        if self._fleet is None or self._fleet[0] != stamp:
            self._fleet = (stamp, fleet_of(self.bundle_file.read_text(encoding="ascii")))
        return self._fleet[1]

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        key = key_read(self.key_file.read_bytes()) if self.key_file.exists() else None
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            write_durably(self.key_file, key_pem(key), mode=0o600)
        return key

    def signing_request(self) -> str:
        """A request for a certificate of this home's key, as PEM; creates the key if there is none. Raises OSError if
        the home could not store the key."""
        return request_make(self._key)

    def store(self, *, chain: str, bundle: str, revoked: str) -> Validity:
        """Stores a certificate (PEM, leaf first), the valid authorities, and their revocation lists. Raises
        BadCertificate if it is not for this home's key, has no name of a fleet, or a part is not PEM. Raises OSError if
        the home could not store a file; each file is completely old or completely new."""
        validity = validity_of(chain, self._key)
        self.store_trust(bundle=bundle, revoked=revoked)
        combined = chain.rstrip("\n").encode() + b"\n" + key_pem(self._key)
        # First the file that connections and renewals use: a full disk in between must not lose the certificate.
        write_durably(self.combined_file, combined, mode=0o600)
        write_durably(self.certificate_file, chain.encode(), mode=0o644)
        return validity

    def drop_certificate(self) -> None:
        """Shows none until another is stored. The authorities stay."""
        self.combined_file.unlink(missing_ok=True)
        self.certificate_file.unlink(missing_ok=True)

    def store_trust(self, *, bundle: str, revoked: str) -> None:
        """Stores the valid authorities and their revocation lists; an empty list changes nothing about revocation.
        Raises BadCertificate if a part is not PEM. Raises OSError if the home could not store a file."""
        require_certificates(bundle, "the bundle of authorities")
        if revoked:
            require_revocation_lists(revoked)
            _write_changed(self.revoked_file, revoked)
        _write_changed(self.bundle_file, bundle)

    def bundle_digest(self) -> str:
        """The SHA-256 of the bundle, in hexadecimal, for the control plane; empty if there is none."""
        try:
            return hashlib.sha256(self.bundle_file.read_bytes()).hexdigest()
        except OSError:
            return ""

    def validity(self) -> Validity | None:
        """Of the stored certificate; None if it is missing, unreadable or not for the stored key."""
        try:
            return validity_of(self.combined_file.read_text(encoding="ascii"), self._key)
        except (OSError, UnicodeDecodeError, BadCertificate):
            return None


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode():
        write_durably(path, text.encode(), mode=0o644)


PROXY_IDENTITY = "proxy-identity"
"""The copy of the identity in a node's home: a home with only `tls` in it."""


class IdentityCopy:
    """Copies a node's identity for its cell proxy, whose account may not read the agent's home. The copies belong to
    the account (None: the agent's own), in a folder in which it cannot create files. The proxy notices new ones."""

    def __init__(self, home: Path, account: Account | None) -> None:
        self.home = home / PROXY_IDENTITY
        self._own = IdentityFiles(home)
        self._copy = IdentityFiles(self.home)
        self._account = account
        self._copied: object = None

    def can_update(self) -> bool:
        return self._own.has_certificate and self._own.has_bundle and self._own.revoked_file.exists()

    def update(self) -> None:
        """Copies changed files. Raises OSError if a file cannot be read or written."""
        stamp = self._own.stamp()
        if stamp == self._copied or not self.can_update():
            return
        for folder in (self.home, self._copy.folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            if self._account is not None:
                os.chown(folder, -1, self._account.gid)
                folder.chmod(0o750)
        revoked = self._own.revoked_file.read_text(encoding="ascii")
        serials = "".join(f"{serial:x}\n" for serial in revoked_serials(revoked))
        self._write_if_changed(self._copy.folder / REVOKED_SERIALS_FILE, serials.encode())
        # Authorities first, then the certificate, as in the agent's own folder.
        self._write_if_changed(self._copy.revoked_file, revoked.encode())
        self._write_if_changed(self._copy.bundle_file, self._own.bundle_file.read_bytes())
        self._write_if_changed(self._copy.combined_file, self._own.combined_file.read_bytes())
        self._copied = stamp

    def _write_if_changed(self, path: Path, content: bytes) -> None:
        if path.exists() and path.read_bytes() == content:
            return
        temporary = path.with_name(f".{path.name}")
        write_durably(temporary, content)
        if self._account is not None:
            os.chown(temporary, self._account.uid, self._account.gid)
        os.replace(temporary, path)


_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""A node's clock may be wrong, and a cell may serve for years."""


def with_certificate(launch: Launch, assignment: Assignment) -> Launch:
    """The launch of an engine, with a throwaway certificate if followers connect to it. Its name and dates are not
    checked: both sides sign it in the cell's handshake (`engine_agent.engines.cell.tls`)."""
    if assignment.role is not MemberRole.LEADER or follower_count(assignment) == 0:
        return launch
    return replace(launch, env={**launch.env, CELL_CERTIFICATE_VARIABLE: throwaway_certificate()})


def throwaway_certificate() -> str:
    """A new self-signed certificate and its key (EC P-256): PEM, in this order."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cell leader")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (certificate + private).decode()
