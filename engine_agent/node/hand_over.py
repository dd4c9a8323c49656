"""Hands a node's identity to its cell proxy, whose account may not read the agent's home: copies for the account
alone, in a folder in which it can make nothing. The proxy notices by itself when they are others."""

import os
from pathlib import Path

from engine_agent.node.accounts import Account
from engine_agent.node.certificates import revoked_serials
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity_files import REVOKED_SERIALS_FILE, IdentityFiles

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
