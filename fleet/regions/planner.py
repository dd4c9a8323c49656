"""Checks a certificate with chain and private key (PEM) that an operator uploads for applications. Pure. Errors are one
sentence and never contain a part of the key."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CHAIN_LENGTH_MAX, KEY_LENGTH_MAX = 16 * 1024, 4 * 1024
"""Characters of PEM. Both fit into one HAProxy command (`engine_agent.ingress.certificates.MAX_FILE_BYTES`)."""
CERTIFICATES_MAX = 8
NAMES_MAX = 100
HOST_LENGTH_MAX = 253
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 4096
"""Handshakes with longer keys take milliseconds of an ingress's CPU."""
CURVES = {"secp256r1": "P-256", "secp384r1": "P-384"}
CLOCK_SKEW_ALLOWED = timedelta(minutes=5)
ISSUER_LENGTH_MAX = 300

CERTIFICATE, PRIVATE_KEY = "certificate", "private_key"
KEY_ENDING = "PRIVATE KEY"
_BEGIN = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----")
_HOST = re.compile(r"(?:\*\.)?[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63}){0,30}")
_UNREADABLE = (
    *(ValueError, TypeError, KeyError, OverflowError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)


class BadCertificate(ValueError):
    """It cannot be used. `field`: `certificate` or `private_key`; `rule`: a short name of the reason."""

    def __init__(self, field: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.rule = rule


@dataclass(frozen=True, slots=True)
class ReadCertificate:
    """A valid certificate. `chain`: PEM, certificate first; `names`: hosts and addresses; `fingerprint`: SHA-256, in
    hexadecimal."""

    chain: str
    private_key: str = field(repr=False)
    names: tuple[str, ...]
    issuer: str
    key_kind: str
    fingerprint: str
    not_before: datetime
    not_after: datetime


def certificate_read(certificate: str, private_key: str, now: datetime) -> ReadCertificate:
    """Parses and checks both texts. Raises BadCertificate if a part is missing, superfluous, inconsistent or
    expired."""
    key, key_kind = _read_key(private_key)
    chain = _read_chain(certificate)
    server = chain[0]
    _require_order(chain)
    if _public_bytes(server.public_key()) != _public_bytes(key.public_key()):
        is_later = any(_public_bytes(each.public_key()) == _public_bytes(key.public_key()) for each in chain[1:])
        why = "the certificate of the key must come first" if is_later else "the key belongs to another certificate"
        raise BadCertificate(PRIVATE_KEY, "fits", f"the key does not fit the first certificate: {why}")
    _require_time(chain, now)
    _require_use(chain)
    return ReadCertificate(
        chain="".join(each.public_bytes(serialization.Encoding.PEM).decode() for each in chain),
        private_key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        names=_host_names(server),
        issuer=server.issuer.rfc4514_string()[:ISSUER_LENGTH_MAX],
        key_kind=key_kind,
        fingerprint=server.fingerprint(hashes.SHA256()).hex(),
        not_before=server.not_valid_before_utc,
        not_after=server.not_valid_after_utc,
    )


def _pem_blocks(field: str, text: str, longest: int) -> Iterator[tuple[str, str]]:
    """Yields kind and text of each PEM block; other text is a comment."""
    if len(text) > longest:
        raise BadCertificate(field, "length", f"it has {len(text)} characters; the limit is {longest}")
    if not text.isascii():
        raise BadCertificate(field, "pem", "it is not PEM, which has only ASCII characters")
    kind, lines = "", list[str]()
    for line in map(str.strip, text.splitlines()):
        begin = _BEGIN.fullmatch(line)
        if begin and kind:
            raise BadCertificate(field, "pem", f"a {kind} has no end")
        if begin:
            kind, lines = begin[1], []
        if kind:
            lines.append(line)
        if kind and line == f"-----END {kind}-----":
            yield kind, "\n".join(lines) + "\n"
            kind = ""
    if kind:
        raise BadCertificate(field, "pem", f"a {kind} has no end")


def _read_key(text: str) -> tuple[Any, str]:
    blocks = [block for block in _pem_blocks(PRIVATE_KEY, text, KEY_LENGTH_MAX) if block[0] != "EC PARAMETERS"]
    kinds = [kind for kind, _ in blocks]
    if len(blocks) != 1 or not kinds[0].endswith(KEY_ENDING):
        there = ", ".join(kinds) or "none"
        raise BadCertificate(PRIVATE_KEY, "pem", f"it must be one private key as PEM; found: {there}")
    if kinds[0].startswith("ENCRYPTED") or "ENCRYPTED" in blocks[0][1].splitlines()[1]:
        message = "the key has a passphrase: remove it"
        raise BadCertificate(PRIVATE_KEY, "passphrase", message)
    try:
        key = serialization.load_pem_private_key(blocks[0][1].encode(), password=None)
    except _UNREADABLE:
        raise BadCertificate(
            PRIVATE_KEY, "pem", "the key cannot be read: it is damaged or of an unknown kind"
        ) from None
    if isinstance(key, rsa.RSAPrivateKey) and RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        return key, f"RSA {key.key_size}"
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in CURVES:
        return key, CURVES[key.curve.name]
    size = f" of {key.key_size} bits" if isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) else ""
    message = (
        f"{type(key).__name__.removesuffix('PrivateKey')}{size} is not served:"
        f" the key must be RSA of {RSA_BITS_MIN} to {RSA_BITS_MAX} bits, or on the curve P-256 or P-384"
    )
    raise BadCertificate(PRIVATE_KEY, "kind", message)


def _read_chain(text: str) -> list[x509.Certificate]:
    blocks = list(_pem_blocks(CERTIFICATE, text, CHAIN_LENGTH_MAX))
    if any(kind.endswith(KEY_ENDING) for kind, _ in blocks):
        raise BadCertificate(CERTIFICATE, "pem", "the certificates contain a private key: send it as the key")
    if wrong := next((kind for kind, _ in blocks if kind != "CERTIFICATE"), None):
        raise BadCertificate(CERTIFICATE, "pem", f"the certificates contain a {wrong}")
    if not 0 < len(blocks) <= CERTIFICATES_MAX:
        message = f"it must be 1 to {CERTIFICATES_MAX} certificates as PEM; found: {len(blocks)}"
        raise BadCertificate(CERTIFICATE, "pem", message)
    chain = []
    for number, (_, block) in enumerate(blocks, 1):
        try:
            each = x509.load_pem_x509_certificate(block.encode())
            _ = each.extensions, each.public_key(), each.issuer, each.subject
        except _UNREADABLE as error:
            raise BadCertificate(CERTIFICATE, "pem", f"certificate {number} cannot be read: {error}") from None
        if each in chain:
            raise BadCertificate(CERTIFICATE, "twice", f"certificate {number} is repeated")
        chain.append(each)
    return chain


def _require_order(chain: list[x509.Certificate]) -> None:
    for number, (each, signer) in enumerate(pairwise(chain), 1):
        try:
            each.verify_directly_issued_by(signer)
        except (*_UNREADABLE, InvalidSignature):
            message = f"certificate {number} is not signed by certificate {number + 1}: each must be signed by the next"
            raise BadCertificate(CERTIFICATE, "order", message) from None


def _require_time(chain: list[x509.Certificate], now: datetime) -> None:
    for number, each in enumerate(chain, 1):
        if each.not_valid_after_utc <= now:
            message = f"certificate {number} expired at {each.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
            raise BadCertificate(CERTIFICATE, "time", message)
        if each.not_valid_before_utc > now + CLOCK_SKEW_ALLOWED:
            message = f"certificate {number} is valid from {each.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC only"
            raise BadCertificate(CERTIFICATE, "time", message)


def _require_use(chain: list[x509.Certificate]) -> None:
    """For servers, and with a secure digest. Self-signed certificates are trusted by name."""
    for number, each in enumerate(chain, 1):
        digest = each.signature_hash_algorithm
        if each.issuer != each.subject and isinstance(digest, hashes.SHA1 | hashes.MD5):
            message = f"certificate {number} is signed with {digest.name.upper()}, which clients reject"
            raise BadCertificate(CERTIFICATE, "digest", message)
    try:
        usage = chain[0].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(usage):
        raise BadCertificate(CERTIFICATE, "usage", "the certificate is not for servers (extended key usage)")


def _host_names(server: x509.Certificate) -> tuple[str, ...]:
    try:
        stated = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        stated = x509.SubjectAlternativeName([])
    hosts = [name.lower() for name in stated.get_values_for_type(x509.DNSName)]
    names = (*hosts, *map(str, stated.get_values_for_type(x509.IPAddress)))
    if not 0 < len(names) <= NAMES_MAX:
        message = f"the certificate must name 1 to {NAMES_MAX} hosts (subjectAltName); found: {len(names)}"
        raise BadCertificate(CERTIFICATE, "names", message)
    for host in hosts:
        if len(host) > HOST_LENGTH_MAX or not _HOST.fullmatch(host):
            raise BadCertificate(CERTIFICATE, "names", f"{host[:80]!r} is not a host name")
    return tuple(dict.fromkeys((*names, *_common_names(server))))


def _common_names(server: x509.Certificate) -> tuple[str, ...]:
    """HAProxy also selects certificates by common name; clients ignore it."""
    stated = (str(each.value).lower() for each in server.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
    return tuple(name for name in stated if len(name) <= HOST_LENGTH_MAX and _HOST.fullmatch(name))


def _public_bytes(key: Any) -> bytes:
    info: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return info


ENDS_SOON, ENDS_NOW = "certificate-ends-soon", "certificate-ends-now"
"""Incident kinds: 14 days before the end, and from one day before it."""
SOON, NOW = timedelta(days=14), timedelta(days=1)


def ending(not_after: datetime, now: datetime) -> str | None:
    """Returns the kind of incident for a certificate with this end, or None."""
    left = not_after - now
    return ENDS_NOW if left <= NOW else ENDS_SOON if left <= SOON else None
