"""Certificates are accepted only if every client would trust them; errors name the reason."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from fleet.regions.planner import (
    CERTIFICATE,
    CHAIN_LENGTH_MAX,
    ENDS_NOW,
    ENDS_SOON,
    KEY_LENGTH_MAX,
    PRIVATE_KEY,
    BadCertificate,
    certificate_read,
    ending,
)
from tests.server_certificates import DAY, PublicAuthority, Signed, pem_of, signed

NOW = datetime.now(UTC)
AUTHORITY = PublicAuthority()
SERVER = AUTHORITY.server("api.example.test", "*.models.example.test", "192.0.2.7")
CHAIN = AUTHORITY.chain(SERVER)
RSA_2048 = rsa.generate_private_key(65537, 2048)

Given = tuple[str, str]


def test_a_chain_with_its_key_is_read_whole() -> None:
    read = certificate_read(CHAIN, SERVER.key_pem, NOW)
    assert (read.chain, read.private_key) == (CHAIN, SERVER.key_pem)
    assert read.names == ("api.example.test", "*.models.example.test", "192.0.2.7")
    assert (read.issuer, read.key_kind) == ("CN=between", "P-256")
    assert read.fingerprint == SERVER.certificate.fingerprint(hashes.SHA256()).hex()
    assert SERVER.key_pem.splitlines()[1] not in repr(read)


@pytest.mark.parametrize(
    ("key", "kind"),
    [(RSA_2048, "RSA 2048"), (ec.generate_private_key(ec.SECP384R1()), "P-384")],
    ids=["rsa", "p-384"],
)
def test_other_kinds_of_keys_and_forms_of_pem_are_read_too(key: Any, kind: str) -> None:
    server = AUTHORITY.server("a.test", key=key)
    old_form = serialization.PrivateFormat.TraditionalOpenSSL
    text = key.private_bytes(serialization.Encoding.PEM, old_form, serialization.NoEncryption()).decode()
    parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    said = f"subject=CN = a.test\r\n\r\n{AUTHORITY.chain(server)}".replace("\n", "\r\n")
    read = certificate_read(said, parameters + text, NOW)
    assert (read.key_kind, read.chain, read.private_key) == (kind, AUTHORITY.chain(server), pem_of(key))


def test_a_certificate_that_signed_itself_is_taken_and_so_is_the_root_at_the_end() -> None:
    alone = signed("a.test", names=["a.test"])
    assert certificate_read(alone.pem, alone.key_pem, NOW).names == ("a.test",)
    certificate_read(CHAIN + AUTHORITY.root.pem, SERVER.key_pem, NOW)


def of(server: Signed) -> Given:
    return AUTHORITY.chain(server), server.key_pem


BAD: dict[str, tuple[Callable[[], Given], str, str]] = {
    "another key": (lambda: (CHAIN, signed("x").key_pem), PRIVATE_KEY, "the key belongs to another certificate"),
    "wrong order": (
        lambda: (AUTHORITY.between.pem + AUTHORITY.root.pem, SERVER.key_pem),
        PRIVATE_KEY,
        "the key belongs to another certificate",
    ),
    "leaf last": (
        lambda: (AUTHORITY.between.pem + SERVER.pem, SERVER.key_pem),
        CERTIFICATE,
        "certificate 1 is not signed by certificate 2: each must be signed by the next",
    ),
    "a gap": (
        lambda: (SERVER.pem + AUTHORITY.root.pem, SERVER.key_pem),
        CERTIFICATE,
        "certificate 1 is not signed by certificate 2",
    ),
    "key of the issuer": (
        lambda: (CHAIN, AUTHORITY.between.key_pem),
        PRIVATE_KEY,
        "the certificate of the key must come first",
    ),
    "ended": (lambda: of(AUTHORITY.server("a.test", valid=DAY / 2)), CERTIFICATE, "certificate 1 expired at 20"),
    "not yet": (
        lambda: of(AUTHORITY.server("a.test", starts=NOW + DAY)),
        CERTIFICATE,
        "certificate 1 is valid from 20",
    ),
    "no names": (lambda: of(AUTHORITY.server()), CERTIFICATE, "must name 1 to 100 hosts .*; found: 0"),
    "too many names": (
        lambda: of(AUTHORITY.server(*(f"h{number}.test" for number in range(101)))),
        CERTIFICATE,
        "found: 101",
    ),
    "a name of no host": (lambda: of(AUTHORITY.server("a b.test")), CERTIFICATE, "'a b.test' is not a host name"),
    "for clients": (
        lambda: of(AUTHORITY.server("a.test", usage=ExtendedKeyUsageOID.CLIENT_AUTH)),
        CERTIFICATE,
        "not for servers",
    ),
    "short RSA": (
        lambda: (CHAIN, pem_of(rsa.generate_private_key(65537, 1024))),  # noqa: S505 - that is what is refused
        PRIVATE_KEY,
        "RSA of 1024 bits is not served: the key must be RSA of 2048 to 4096 bits, or on the curve P-256 or P-384",
    ),
    "another curve": (
        lambda: (CHAIN, pem_of(ec.generate_private_key(ec.SECP521R1()))),
        PRIVATE_KEY,
        "EC of 521 bits is not served",
    ),
    "Ed25519": (
        lambda: (CHAIN, pem_of(ed25519.Ed25519PrivateKey.generate())),
        PRIVATE_KEY,
        "Ed25519 is not served",
    ),
    "a passphrase": (lambda: (CHAIN, pem_of(SERVER.key, b"secret")), PRIVATE_KEY, "the key has a passphrase"),
    "a passphrase, old form": (
        lambda: (
            CHAIN,
            "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMHc=\n-----END EC PRIVATE KEY-----\n",
        ),
        PRIVATE_KEY,
        "the key has a passphrase",
    ),
    "a certificate twice": (lambda: (CHAIN + AUTHORITY.between.pem, SERVER.key_pem), CERTIFICATE, "3 is repeated"),
    "two keys": (lambda: (CHAIN, 2 * SERVER.key_pem), PRIVATE_KEY, "found: PRIVATE KEY, PRIVATE KEY"),
    "no key": (lambda: (CHAIN, ""), PRIVATE_KEY, "found: none"),
    "a certificate as the key": (lambda: (CHAIN, SERVER.pem), PRIVATE_KEY, "found: CERTIFICATE"),
    "the key among them": (lambda: (CHAIN + SERVER.key_pem, SERVER.key_pem), CERTIFICATE, "contain a private key"),
    "something else among them": (
        lambda: (CHAIN + "-----BEGIN X509 CRL-----\n-----END X509 CRL-----", SERVER.key_pem),
        CERTIFICATE,
        "the certificates contain a X509 CRL",
    ),
    "no certificate": (lambda: ("hello", SERVER.key_pem), CERTIFICATE, "1 to 8 certificates as PEM; found: 0"),
    "too many": (lambda: (9 * SERVER.pem, SERVER.key_pem), CERTIFICATE, "found: 9"),
    "damaged": (lambda: (SERVER.pem.replace("MI", "AA"), SERVER.key_pem), CERTIFICATE, "certificate 1 cannot be read"),
    "a damaged key": (lambda: (CHAIN, SERVER.key_pem.replace("MI", "AA")), PRIVATE_KEY, "the key cannot be read"),
    "cut": (lambda: (CHAIN[:-40], SERVER.key_pem), CERTIFICATE, "a CERTIFICATE has no end"),
    "one in another": (
        lambda: ("-----BEGIN CERTIFICATE-----\n" + CHAIN, SERVER.key_pem),
        CERTIFICATE,
        "a CERTIFICATE has no end",
    ),
    "not plain": (lambda: (CHAIN + "é", SERVER.key_pem), CERTIFICATE, "only ASCII"),
    "long": (lambda: (CHAIN + CHAIN_LENGTH_MAX * " ", SERVER.key_pem), CERTIFICATE, "characters; the limit is 16384"),
    "a long key": (
        lambda: (CHAIN, SERVER.key_pem + KEY_LENGTH_MAX * " "),
        PRIVATE_KEY,
        "characters; the limit is 4096",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_a_sentence_without_the_key(name: str) -> None:
    make, field, sentence = BAD[name]
    certificate, private_key = make()
    with pytest.raises(BadCertificate, match=sentence) as refused:
        certificate_read(certificate, private_key, NOW)
    assert refused.value.field == field
    assert not any(line in str(refused.value) for line in private_key.splitlines()[1:-1] if len(line) > 20)


@given(st.data())
def test_whatever_is_done_to_a_text_it_is_taken_as_it_was_or_refused(data: st.DataObject) -> None:
    texts = [CHAIN, SERVER.key_pem]
    which = data.draw(st.sampled_from([0, 1]))
    at = data.draw(st.integers(0, len(texts[which])))
    cut = data.draw(st.integers(0, 80))
    put = data.draw(st.text(max_size=40))
    texts[which] = texts[which][:at] + put + texts[which][at + cut :]
    try:
        read = certificate_read(texts[0], texts[1], NOW)
    except BadCertificate:
        return
    assert read.fingerprint == SERVER.certificate.fingerprint(hashes.SHA256()).hex()
    assert read.private_key == SERVER.key_pem


@given(st.lists(st.sampled_from([SERVER.pem, AUTHORITY.between.pem, AUTHORITY.root.pem]), max_size=5))
def test_only_chains_in_order_are_taken(parts: list[str]) -> None:
    wanted = [SERVER.pem, AUTHORITY.between.pem, AUTHORITY.root.pem]
    try:
        certificate_read("".join(parts), SERVER.key_pem, NOW)
    except BadCertificate:
        assert parts != wanted[: len(parts)] or not parts
    else:
        assert parts == wanted[: len(parts)]


@pytest.mark.parametrize(
    ("left", "kind"),
    [
        (timedelta(days=15), None),
        (timedelta(days=14), ENDS_SOON),
        (timedelta(days=1, seconds=1), ENDS_SOON),
        (timedelta(days=1), ENDS_NOW),
        (timedelta(days=-3), ENDS_NOW),
    ],
)
def test_an_end_is_announced_fourteen_days_and_a_day_before(left: timedelta, kind: str | None) -> None:
    assert ending(NOW + left, NOW) == kind


def test_a_common_name_that_is_a_host_counts_because_haproxy_shows_the_certificate_for_it() -> None:
    common = signed("Old.example.test", AUTHORITY.between, names=["new.example.test"])
    assert certificate_read(AUTHORITY.chain(common), common.key_pem, NOW).names == (
        "new.example.test",
        "old.example.test",
    )
    spoken = signed("Example Ltd", AUTHORITY.between, names=["new.example.test"])
    assert certificate_read(AUTHORITY.chain(spoken), spoken.key_pem, NOW).names == ("new.example.test",)
