"""A fleet's certificate authority, as keys and certificates without a database: creates it, and signs certificates and
revocation lists.

Of a certificate request only the key is used; the caller gives the name."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine_agent.protocol.identity import IdentityName

AUTHORITY_VALID = timedelta(days=3650)
"""Long, because an operator rotates it: an authority that expires unnoticed would stop the fleet."""
CERTIFICATE_VALID = timedelta(hours=24)
CLOCK_SKEW_ALLOWED = timedelta(minutes=5)
"""A host whose clock is behind by at most this accepts a new certificate."""
REQUEST_LENGTH_MAX = 16 * 1024
RSA_BITS_MIN, RSA_BITS_MAX = 3072, 8192


class BadRequest(ValueError):
    """A rejected certificate request; the text has the requirement."""


@dataclass(frozen=True, slots=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def identifier(self) -> str:
        """Identifies the authority among the fleet's: 16 hexadecimal digits of its key's digest."""
        return _short(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()))

    @property
    def certificate_pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate as PEM, its serial number in hexadecimal, and its expiry. `key_pin`: Base64 of the SHA-256 of its
    public key (SubjectPublicKeyInfo), as in curl and RFC 7469."""

    pem: str
    serial: str
    key_pin: str
    not_after: datetime


def authority_make(fleet: str, now: datetime) -> Authority:
    """Creates an authority with a unique name, to distinguish the authorities of a fleet. Agents read the fleet from
    its organization name (`engine_agent.node.identity.fleet_of`)."""
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    parts = {NameOID.ORGANIZATION_NAME: fleet, NameOID.COMMON_NAME: f"Switchyard authority {_short(identifier)}"}
    name = x509.Name([x509.NameAttribute(oid, text) for oid, text in parts.items()])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW_ALLOWED)
        .not_valid_after(now + AUTHORITY_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def authority_load(certificate_pem: str, key_pem: bytes) -> Authority:
    """Loads a stored authority. Raises ValueError if the key or the certificate is not one of an authority."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the authority is not on an elliptic curve")
    return Authority(key, x509.load_pem_x509_certificate(certificate_pem.encode()))


def certificate_sign(
    authority: Authority, name: IdentityName, request_pem: str, now: datetime, valid: timedelta = CERTIFICATE_VALID
) -> Issued:
    """Signs a certificate for `name` and the key of the request, for servers and clients. It is valid from
    `CLOCK_SKEW_ALLOWED` ago. Raises BadRequest if it is not a certificate request, not signed by its own key, or an
    unsupported key."""
    key = _requested_key(request_pem)
    serial = x509.random_serial_number()
    signer = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    not_after = min((now + valid).replace(microsecond=0), authority.certificate.not_valid_after_utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name.dns)]))
        .issuer_name(authority.certificate.subject)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(now - CLOCK_SKEW_ALLOWED)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri), x509.DNSName(name.dns)]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(certificate.public_bytes(serialization.Encoding.PEM).decode(), f"{serial:x}", _pin(key), not_after)


def revocations_sign(authority: Authority, revoked: Iterable[tuple[str, datetime]], number: int) -> str:
    """Signs the authority's revocation list as PEM: serial numbers in hexadecimal with times. It is valid as long as
    the authority, so agents without a connection keep the last list, and a host whose clock is behind accepts the
    newest. A newer list has a greater `number`."""
    signer = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(authority.certificate.not_valid_before_utc)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, since in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(since).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _pin(key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey) -> str:
    info = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(info).digest()).decode()


def _short(identifier: x509.SubjectKeyIdentifier) -> str:
    return identifier.digest.hex()[:16]


def _requested_key(request_pem: str) -> ec.EllipticCurvePublicKey | rsa.RSAPublicKey:
    if len(request_pem) > REQUEST_LENGTH_MAX:
        raise BadRequest(f"a request for a certificate has {REQUEST_LENGTH_MAX} characters at most")
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise BadRequest(f"not a certificate request (PKCS #10 as PEM): {error}") from error
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        allowed: ec.EllipticCurvePublicKey | rsa.RSAPublicKey = key
    elif isinstance(key, rsa.RSAPublicKey) and RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        allowed = key
    else:
        raise BadRequest(f"a certificate is for a key on P-256 or of RSA with {RSA_BITS_MIN} to {RSA_BITS_MAX} bits")
    if not is_signed:
        raise BadRequest("the request is not signed by its own key")
    return allowed


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
