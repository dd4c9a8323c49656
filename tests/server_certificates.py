"""Certificates as a public authority issues them: a root, an intermediate and servers'."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Signed:
    certificate: x509.Certificate
    key: Any

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        return pem_of(self.key)


def pem_of(key: Any, password: bytes | None = None) -> str:
    form = serialization.PrivateFormat.PKCS8
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    text: bytes = key.private_bytes(serialization.Encoding.PEM, form, lock)
    return text.decode()


def signed(
    name: str,
    by: Signed | None = None,
    *,
    names: Sequence[str] = (),
    key: Any = None,
    starts: datetime | None = None,
    valid: timedelta = 90 * DAY,
    is_authority: bool = False,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.SERVER_AUTH,
) -> Signed:
    """Returns a certificate of `name`, self-signed or signed by another one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    starts = starts or datetime.now(UTC) - DAY
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(starts + valid)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
    if not is_authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return Signed(builder.sign(by.key if by else key, hashes.SHA256()), key)


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class PublicAuthority:
    """A root, and what it signed to sign servers' certificates with."""

    def __init__(self) -> None:
        self.root = signed("a root", is_authority=True, valid=3650 * DAY)
        self.between = signed("between", self.root, is_authority=True, valid=365 * DAY)

    def server(self, *names: str, **more: Any) -> Signed:
        return signed(names[0] if names else "nobody", self.between, names=names, **more)

    def chain(self, server: Signed) -> str:
        return server.pem + self.between.pem
