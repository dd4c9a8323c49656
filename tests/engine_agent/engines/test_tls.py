"""TLS between members: 1.3 or nothing, with a certificate of one start that never lies on a disk."""

import contextlib
import hashlib
import os
import socket
import ssl
from threading import Thread

import pytest

from engine_agent.engines.handshake import BadCertificate, binding_of, follower_context, leader_certificate
from engine_agent.node.identity import throwaway_certificate
from tests.engine_agent.engines.between import old_tls


def certificate_part(pem: str) -> str:
    return pem[: pem.index("-----BEGIN PRIVATE KEY-----")]


def shaken(client: ssl.SSLContext) -> ssl.SSLSocket:
    """A client's end of a connection to a leader that has shaken hands."""
    ours, theirs = socket.socketpair()
    leader = leader_certificate(throwaway_certificate())

    def serve() -> None:
        try:
            leader.context.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    serving = Thread(target=serve, daemon=True)
    serving.start()
    try:
        return client.wrap_socket(ours)
    finally:
        serving.join()


def test_members_speak_tls_1_3() -> None:
    with shaken(follower_context()) as connection:
        assert connection.version() == "TLSv1.3"


def test_older_tls_is_refused() -> None:
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|protocol version"):
        shaken(old_tls())


def test_what_is_signed_is_the_digest_of_the_certificate_that_the_follower_sees() -> None:
    pem = throwaway_certificate()
    der = ssl.PEM_cert_to_DER_cert(certificate_part(pem))
    assert leader_certificate(pem).binding == binding_of(der) == hashlib.sha256(der).digest()


def test_every_start_has_a_certificate_of_its_own() -> None:
    assert leader_certificate(throwaway_certificate()).binding != leader_certificate(throwaway_certificate()).binding


def open_files() -> set[str]:
    """Number and path of each, in memory or on a disk; threads of other tests may open and close connections."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that with which they were listed, or one that was closed since
            path = os.readlink(f"/proc/self/fd/{number}")
            found |= {f"{number} {path}"} if path.startswith("/") else set()
    return found


def test_the_key_is_in_no_open_file_and_in_no_text() -> None:
    before = open_files()
    held = leader_certificate(throwaway_certificate())
    assert open_files() <= before
    assert "context" not in repr(held)


@pytest.mark.parametrize(
    "given", ["", "no PEM", certificate_part(throwaway_certificate())], ids=["none", "text", "keyless"]
)
def test_what_is_no_certificate_with_its_key_is_refused(given: str) -> None:
    with pytest.raises(BadCertificate, match="holds no certificate and its key as PEM"):
        leader_certificate(given)


def test_the_key_of_another_certificate_is_refused() -> None:
    one, other = throwaway_certificate(), throwaway_certificate()
    with pytest.raises(BadCertificate, match="KEY_VALUES_MISMATCH"):
        leader_certificate(certificate_part(one) + other[len(certificate_part(other)) :])
