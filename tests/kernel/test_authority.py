"""What the fleet's authority signs: one name, its own idea of everything, and only keys that are worth it."""

import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from engine_agent.protocol.identity import IdentityKind, IdentityName
from kernel.authority import (
    CERTIFICATE_VALID,
    CLOCK_SKEW_ALLOWED,
    Authority,
    BadRequest,
    authority_load,
    authority_make,
    certificate_sign,
    revocations_sign,
)

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
FLEET = "f-0123abcd"
NAME = IdentityName(FLEET, IdentityKind.NODE, "n-1")
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


@pytest.fixture(scope="module")
def authority() -> Authority:
    return authority_make(FLEET, NOW)


def request(key: Key, *names: str, ca: bool = False) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "control.control.f-0123abcd")])
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    if ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, digest).public_bytes(serialization.Encoding.PEM).decode()


def test_a_request_gets_the_callers_name_and_nothing_that_it_asks_for(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issued = certificate_sign(authority, NAME, request(key, "control.control.f-0123abcd", ca=True), NOW)
    leaf = x509.load_pem_x509_certificate(issued.pem.encode())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names == x509.SubjectAlternativeName([x509.UniformResourceIdentifier(NAME.uri), x509.DNSName(NAME.dns)])
    assert leaf.subject.rfc4514_string() == f"CN={NAME.dns}"
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert leaf.public_key() == key.public_key()
    assert (leaf.not_valid_before_utc, leaf.not_valid_after_utc) == (NOW - CLOCK_SKEW_ALLOWED, NOW + CERTIFICATE_VALID)
    assert (issued.serial, issued.not_after) == (f"{leaf.serial_number:x}", NOW + CERTIFICATE_VALID)
    leaf.verify_directly_issued_by(authority.certificate)


def test_no_certificate_outlives_its_authority(authority: Authority) -> None:
    end = authority.certificate.not_valid_after_utc
    key = ec.generate_private_key(ec.SECP256R1())
    assert certificate_sign(authority, NAME, request(key), end - timedelta(hours=1)).not_after == end


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["P-384", "RSA 2048", "Ed25519"],
)
def test_other_keys_are_refused(authority: Authority, key: Key) -> None:
    with pytest.raises(BadRequest, match="a certificate is for a key on P-256 or of RSA with 3072 to 8192 bits"):
        certificate_sign(authority, NAME, request(key), NOW)


def test_a_long_rsa_key_is_signed(authority: Authority) -> None:
    assert certificate_sign(authority, NAME, request(rsa.generate_private_key(65537, 3072)), NOW).serial


@pytest.mark.parametrize(
    "text", ["", "no PEM", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----"]
)
def test_what_is_no_request_is_refused(authority: Authority, text: str) -> None:
    with pytest.raises(BadRequest, match="not a certificate request"):
        certificate_sign(authority, NAME, text, NOW)


def test_a_huge_request_is_refused_before_it_is_parsed(authority: Authority) -> None:
    with pytest.raises(BadRequest, match="16384 characters at most"):
        certificate_sign(authority, NAME, "x" * 20_000, NOW)


def _point(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def test_a_request_for_a_key_of_somebody_else_is_refused(authority: Authority) -> None:
    own, stolen = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    honest = x509.load_pem_x509_csr(request(own).encode()).public_bytes(serialization.Encoding.DER)
    forged = x509.load_der_x509_csr(honest.replace(_point(own), _point(stolen))).public_bytes(
        serialization.Encoding.PEM
    )
    with pytest.raises(BadRequest, match="not signed by its own key"):
        certificate_sign(authority, NAME, forged.decode(), NOW)


def test_the_pin_is_of_the_public_key_as_curl_has_it(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    first, second = (certificate_sign(authority, NAME, request(key), NOW) for _ in range(2))
    info = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert base64.b64decode(first.key_pin) == hashlib.sha256(info).digest()
    assert first.key_pin == second.key_pin


def test_an_authority_that_was_kept_signs_as_before(authority: Authority) -> None:
    kept = authority_load(authority.certificate_pem, authority.key_pem)
    issued = certificate_sign(kept, NAME, request(ec.generate_private_key(ec.SECP256R1())), NOW)
    x509.load_pem_x509_certificate(issued.pem.encode()).verify_directly_issued_by(authority.certificate)


def test_the_revocation_list_names_what_was_revoked_and_counts_as_long_as_the_authority(authority: Authority) -> None:
    listed = x509.load_pem_x509_crl(revocations_sign(authority, [("ab12", NOW)], 7).encode())
    assert listed.is_signature_valid(authority.key.public_key())
    assert [entry.serial_number for entry in listed] == [0xAB12]
    assert listed.next_update_utc == authority.certificate.not_valid_after_utc


def test_a_revocation_list_counts_on_hosts_whose_clocks_are_behind(authority: Authority) -> None:
    listed = x509.load_pem_x509_crl(revocations_sign(authority, [("ab12", NOW + timedelta(days=30))], 8).encode())
    assert listed.last_update_utc == authority.certificate.not_valid_before_utc
    assert listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 8
