"""What a cell proxy's account gets of a node's identity."""

import os
import stat
from pathlib import Path

from engine_agent.node.accounts import Account
from engine_agent.node.identity import HandOver, Identity
from engine_agent.protocol.identity import REVOKED_SERIALS_FILE, IdentityFiles, IdentityKind
from tests.engine_agent.authority import FleetOfTests


def test_there_is_nothing_to_hand_over_before_the_first_certificate(authority: FleetOfTests, tmp_path: Path) -> None:
    handed = HandOver(tmp_path, None)
    assert not handed.is_possible()
    handed.renew()
    assert not handed.home.exists()
    authority.certify(tmp_path, IdentityKind.NODE, "n-1")
    assert handed.is_possible()


def test_the_account_may_read_what_is_handed_over_and_nothing_else(authority: FleetOfTests, tmp_path: Path) -> None:
    own = authority.certify(tmp_path, IdentityKind.NODE, "n-1")
    handed = HandOver(tmp_path, Account("proxy", os.getuid(), os.getgid()))
    handed.renew()
    files = IdentityFiles(handed.home)
    names = {path.name for path in files.folder.iterdir()}
    assert names == {"combined.pem", "ca.pem", "crl.pem", REVOKED_SERIALS_FILE}, "the key lies in no file of its own"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (handed.home, files.folder)} == {0o750}
    assert files.combined_file.read_bytes() == own.combined_file.read_bytes()
    files.server_context()


def test_what_was_renewed_or_revoked_is_handed_over_anew(authority: FleetOfTests, tmp_path: Path) -> None:
    own = authority.certify(tmp_path / "node", IdentityKind.NODE, "n-1")
    handed = HandOver(tmp_path / "node", None)
    handed.renew()
    files = IdentityFiles(handed.home)
    before = files.stamp()
    handed.renew()
    assert files.stamp() == before, "nothing is written that has not changed"
    serial = authority.renew(Identity(tmp_path / "ingress"), IdentityKind.INGRESS, "i-1")
    authority.revoke(serial, own)
    authority.renew(own, IdentityKind.NODE, "n-1")
    handed.renew()
    assert files.combined_file.read_bytes() == own.combined_file.read_bytes()
    assert int((files.folder / REVOKED_SERIALS_FILE).read_text(), 16) == int(serial, 16)
