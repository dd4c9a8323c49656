"""The certificate that a leader serves its cell's channel with: made by its agent at every start, for that start alone.

Nobody checks its name or dates: what makes it the leader's is that both sides sign it in the cell's handshake
(`engine_agent.engines.cell.tls`).
"""

from dataclasses import replace
from datetime import UTC, datetime

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, Launch, follower_count
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.states import MemberRole

_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""A node's clock may be wrong, and a cell may serve for years."""


def with_certificate(launch: Launch, assignment: Assignment) -> Launch:
    """The launch of an engine, with a certificate of its own if followers are to meet it."""
    if assignment.role is not MemberRole.LEADER or follower_count(assignment) == 0:
        return launch
    return replace(launch, env={**launch.env, CELL_CERTIFICATE_VARIABLE: throwaway_certificate()})


def throwaway_certificate() -> str:
    """A new certificate that signs itself, and its key (EC P-256): PEM, in this order."""
    # Takes 13 MB, which an agent without such a leader does not need.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

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
