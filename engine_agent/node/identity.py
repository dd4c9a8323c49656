"""An agent's key, certificate and the authorities that it believes, in the folder `tls` of its home; and the contexts
of its TLS connections, made of them.

The key is made here once and never leaves the home. It asks nobody for anything: who renews certificates stores them
here, and contexts notice. Every side of a link needs a certificate of the fleet and checks the name of the other.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import (
    BUNDLE_FILE,
    COMBINED_FILE,
    REVOKED_FILE,
    TLS_FOLDER,
    IdentityFiles,
    peer_name,
    renewed_server_context,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from engine_agent.node.certificates import Validity
import os

from engine_agent.node.accounts import Account
from engine_agent.node.certificates import revoked_serials
from engine_agent.protocol.identity import REVOKED_SERIALS_FILE

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
    """The same, and the key, requests for certificates, and what is stored of the answers."""

    _fleet: "tuple[object, str] | None" = None
    """With the stamp of the files that it was read from."""

    def fleet(self) -> str:
        """The fleet of the authorities in the bundle.

        Raises:
            BadCertificate: it is no bundle of one fleet.
            FileNotFoundError: there is none.
        """
        from engine_agent.node.certificates import fleet_of

        if not self.has_bundle:
            raise FileNotFoundError(
                f"{self.bundle_file} is missing: without the fleet's authorities nobody at its address is believed"
            )
        stamp = self.stamp()
        if self._fleet is None or self._fleet[0] != stamp:
            self._fleet = (stamp, fleet_of(self.bundle_file.read_text(encoding="ascii")))
        return self._fleet[1]

    @cached_property
    def _key(self) -> "ec.EllipticCurvePrivateKey":
        from engine_agent.node.certificates import key_make, key_pem, key_read

        key = key_read(self.key_file.read_bytes()) if self.key_file.exists() else None
        if key is None:
            key = key_make()
            write_durably(self.key_file, key_pem(key), mode=0o600)
        return key

    def signing_request(self) -> str:
        """A request for a certificate of this home's key, as PEM; the key is made if there is none.

        Raises:
            OSError: the home refused the key.
        """
        from engine_agent.node.certificates import request_make

        return request_make(self._key)

    def store(self, *, chain: str, bundle: str, revoked: str) -> "Validity":
        """Keep a certificate (PEM, leaf first), the authorities that count, and their revocation lists.

        Raises:
            BadCertificate: it is not for this home's key, has no name of a fleet, or a part is no PEM.
            OSError: the home refused a file; each file is the old or the new one whole.
        """
        from engine_agent.node.certificates import key_pem, validity_of

        validity = validity_of(chain, self._key)
        self.store_trust(bundle=bundle, revoked=revoked)
        combined = chain.rstrip("\n").encode() + b"\n" + key_pem(self._key)
        # First what connections use and renewals go by: a disk that fills up in between costs nobody his certificate.
        write_durably(self.combined_file, combined, mode=0o600)
        write_durably(self.certificate_file, chain.encode(), mode=0o644)
        return validity

    def drop_certificate(self) -> None:
        """Show none from now on, until another is stored. Whom to believe stays."""
        self.combined_file.unlink(missing_ok=True)
        self.certificate_file.unlink(missing_ok=True)

    def store_trust(self, *, bundle: str, revoked: str) -> None:
        """Keep the authorities that count and their revocation lists; an empty list says nothing of revocation.

        Raises:
            BadCertificate: a part is no PEM.
            OSError: the home refused a file.
        """
        from engine_agent.node.certificates import require_certificates, require_revocation_lists

        require_certificates(bundle, "the bundle of authorities")
        if revoked:
            require_revocation_lists(revoked)
            _write_changed(self.revoked_file, revoked)
        _write_changed(self.bundle_file, bundle)

    def bundle_digest(self) -> str:
        """The SHA-256 of the bundle, in hexadecimal, as the control plane knows it; empty if there is none."""
        try:
            return hashlib.sha256(self.bundle_file.read_bytes()).hexdigest()
        except OSError:
            return ""

    def validity(self) -> "Validity | None":
        """Of the stored certificate; None if there is none that can be read, or it is not for the stored key."""
        from engine_agent.node.certificates import BadCertificate, validity_of

        try:
            return validity_of(self.combined_file.read_text(encoding="ascii"), self._key)
        except (OSError, UnicodeDecodeError, BadCertificate):
            return None


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode():
        write_durably(path, text.encode(), mode=0o644)


# Hands a node's identity to its cell proxy, whose account may not read the agent's home: copies for the account
# alone, in a folder in which it can make nothing. The proxy notices by itself when they are others.

PROXY_IDENTITY = "proxy-identity"
"""The folder in a node's home: a home with nothing but `tls` in it."""


class HandOver:
    """The copies of one identity for one account; None: the agent's own."""

    def __init__(self, home: Path, account: Account | None) -> None:
        self.home = home / PROXY_IDENTITY
        self._own = IdentityFiles(home)
        self._copy = IdentityFiles(self.home)
        self._account = account
        self._handed: object = None

    def is_possible(self) -> bool:
        """Whether there is a whole identity to hand over."""
        return self._own.has_certificate and self._own.has_bundle and self._own.revoked_file.exists()

    def renew(self) -> None:
        """Hand over what has changed.

        Raises:
            OSError: a file cannot be read or written.
        """
        stamp = self._own.stamp()
        if stamp == self._handed or not self.is_possible():
            return
        for folder in (self.home, self._copy.folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            if self._account is not None:
                os.chown(folder, -1, self._account.gid)
                folder.chmod(0o750)
        revoked = self._own.revoked_file.read_text(encoding="ascii")
        serials = "".join(f"{serial:x}\n" for serial in revoked_serials(revoked))
        self._put(self._copy.folder / REVOKED_SERIALS_FILE, serials.encode())
        # What is believed comes before what is shown, as in the agent's own folder.
        self._put(self._copy.revoked_file, revoked.encode())
        self._put(self._copy.bundle_file, self._own.bundle_file.read_bytes())
        self._put(self._copy.combined_file, self._own.combined_file.read_bytes())
        self._handed = stamp

    def _put(self, path: Path, content: bytes) -> None:
        if path.exists() and path.read_bytes() == content:
            return
        beside = path.with_name(f".{path.name}")
        write_durably(beside, content)
        if self._account is not None:
            os.chown(beside, self._account.uid, self._account.gid)
        os.replace(beside, path)
