"""TLS of the channel between the members of a cell: 1.3 only, with a certificate that the leader's agent made for this
start and that no authority knows.

So TLS alone says nothing of who is at the other end: followers believe any certificate, and the handshake that both
sides then sign covers it (`tls-server-end-point` of RFC 5929). Whoever stands between has a certificate of their own,
and what was signed for it is nothing to the leader. Only the standard library, as engines bring their own.
"""

import hashlib
import os
import ssl
from dataclasses import dataclass, field

_END_OF_CERTIFICATE = "-----END CERTIFICATE-----"


class BadCertificate(ValueError):
    """What the leader was given to serve TLS with is none; the text says why."""


@dataclass(frozen=True)
class LeaderCertificate:
    """What a leader serves TLS with; `binding` is what the handshake signs of it."""

    context: ssl.SSLContext = field(repr=False)
    binding: bytes


def leader_certificate(pem: str) -> LeaderCertificate:
    """From certificate and key as PEM, in this order.

    Raises:
        BadCertificate: it is not that.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes: a member that is gone ends the cell
    certificate, end, _ = pem.partition(_END_OF_CERTIFICATE)
    try:
        _load(context, pem)
        return LeaderCertificate(context, binding_of(ssl.PEM_cert_to_DER_cert(certificate + end)))
    except (OSError, ValueError) as error:
        raise BadCertificate(f"holds no certificate and its key as PEM: {error}") from error


def follower_context() -> ssl.SSLContext:
    """Encrypts to whoever answers; the handshake says who that was."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def binding_of(certificate: bytes | None) -> bytes:
    """What binds a handshake to the server's certificate, given as DER: its SHA-256, by RFC 5929, section 4.1."""
    return hashlib.sha256(certificate or b"").digest()


def without_tls(error: ssl.SSLError) -> str:
    """Why no TLS connection came about, in words."""
    why = (error.reason or error.strerror or str(error)).lower().replace("_", " ")
    return f"what answers there does not speak TLS 1.3 ({why})"


def _load(context: ssl.SSLContext, pem: str) -> None:
    """`ssl` reads keys from files only; this one is in memory, and nobody else can open it."""
    descriptor = os.memfd_create("cell-certificate")
    try:
        os.write(descriptor, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
