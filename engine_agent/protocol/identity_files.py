"""What lies in the folder `tls` of a home, and TLS contexts made of it, for whoever may read it: an agent, or the cell
proxy to which its agent hands a copy. It writes nothing; `engine_agent.node.identity` does."""

import os
import ssl
from pathlib import Path

from engine_agent.protocol.identity import IdentityName, name_of_peer

TLS_FOLDER = "tls"
KEY_FILE = "key.pem"
CERTIFICATE_FILE = "cert.pem"
BUNDLE_FILE = "ca.pem"
REVOKED_FILE = "crl.pem"
COMBINED_FILE = "combined.pem"
REVOKED_SERIALS_FILE = "revoked"
"""In what is handed to a cell proxy: serial numbers in hexadecimal, one a line. Who reads lists needs 13 MB more."""
MINIMUM_VERSION = ssl.TLSVersion.TLSv1_3
"""Of links between parts of a fleet, which are all ours. It has no renegotiation, and we give no tickets: a session
that is resumed would show no certificate."""


class IdentityFiles:
    """What one home holds. Everything is read when it is used, so that two processes may share a home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / TLS_FOLDER
        self._clients: dict[bool, tuple[object, ssl.SSLContext]] = {}

    @property
    def key_file(self) -> Path:
        return self.folder / KEY_FILE

    @property
    def certificate_file(self) -> Path:
        return self.folder / CERTIFICATE_FILE

    @property
    def bundle_file(self) -> Path:
        return self.folder / BUNDLE_FILE

    @property
    def revoked_file(self) -> Path:
        """The revocation lists of these authorities."""
        return self.folder / REVOKED_FILE

    @property
    def combined_file(self) -> Path:
        """Certificate and key in one file, as HAProxy reads them."""
        return self.folder / COMBINED_FILE

    @property
    def has_bundle(self) -> bool:
        """There is an authority to check the control plane by."""
        return self.bundle_file.exists()

    @property
    def has_certificate(self) -> bool:
        """There is a certificate, which may have ended."""
        return self.combined_file.exists()

    def client_context(self, *, shows_certificate: bool = True) -> ssl.SSLContext:
        """For connections to the fleet: checks the other's chain, revocation, and that its name is the one given as
        `server_hostname`; shows the own certificate if there is one and it may. Ask for it for each connection: it is
        made again only when a file has changed.

        Raises:
            FileNotFoundError: there is no bundle.
            ssl.SSLError: a file is none of its kind.
        """
        stamp = self.stamp()
        known = self._clients.get(shows_certificate)
        if known is None or known[0] != stamp:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._load(context, with_certificate=shows_certificate and self.has_certificate)
            known = self._clients[shows_certificate] = (stamp, context)
        return known[1]

    def server_context(self) -> ssl.SSLContext:
        """For a listener that lets only the fleet's certificates in. One context for the listener's whole life: a
        connection that begins after a file has changed is served by the new ones.

        Raises:
            FileNotFoundError: there is no certificate or bundle.
            ssl.SSLError: a file is none of its kind.
        """
        return renewed_server_context(self, client_certificate=ssl.CERT_REQUIRED)

    def _load(self, context: ssl.SSLContext, *, with_certificate: bool) -> None:
        context.minimum_version = MINIMUM_VERSION
        context.load_verify_locations(self.bundle_file)
        if self.revoked_file.exists():
            context.load_verify_locations(self.revoked_file)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        if with_certificate:
            context.load_cert_chain(self.combined_file)

    def stamp(self) -> object:
        """Another value whenever one of the files is another."""
        return tuple(_stamp_of(path) for path in (self.combined_file, self.bundle_file, self.revoked_file))


def renewed_server_context(identity: IdentityFiles, *, client_certificate: ssl.VerifyMode) -> ssl.SSLContext:
    """A server's context that follows the files of `identity`.

    Raises:
        FileNotFoundError: there is no certificate or bundle.
        ssl.SSLError: a file is none of its kind.
    """

    def made() -> ssl.SSLContext:
        if not identity.has_certificate:
            raise FileNotFoundError(f"there is no certificate at {identity.combined_file}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        identity._load(context, with_certificate=True)
        context.verify_mode = client_certificate
        context.num_tickets = 0
        return context

    current = (identity.stamp(), made())

    def renew(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        nonlocal current
        stamp = identity.stamp()
        if current[0] != stamp:
            try:
                current = (stamp, made())
            except (OSError, ssl.SSLError):
                # Half of the new files is there: the earlier ones serve this connection, the next one looks again.
                return
        connection.context = current[1]

    first = made()
    first.sni_callback = renew
    return first


def peer_name(connection: ssl.SSLObject | ssl.SSLSocket) -> IdentityName:
    """Who is at the other end of a TLS connection whose handshake is over.

    Raises:
        BadName: it showed no certificate of a fleet.
    """
    return name_of_peer(connection.getpeercert())


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
