"""Keys, certificates and TLS connections of agents: both names are checked, revoked certificates rejected, renewed ones
used immediately."""

import os
import ssl
import stat
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, Launch
from engine_agent.engines.handshake import leader_certificate
from engine_agent.node import identity as identities
from engine_agent.node.accounts import Account
from engine_agent.node.identity import BadCertificate, Identity, IdentityCopy, peer_name, with_certificate
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import REVOKED_SERIALS_FILE, IdentityFiles, IdentityKind
from tests.engine_agent.authority import FLEET, FleetOfTests
from tests.engine_agent.engines.contexts import peer
from tests.engine_agent.orders import assignment

NODE, INGRESS = IdentityKind.NODE, IdentityKind.INGRESS
CELL_NAME = f"n-1.node.{FLEET}"


def meet(server: ssl.SSLContext, client: ssl.SSLContext, server_name: str = CELL_NAME) -> tuple[str, str]:
    """A handshake in memory; returns the client's name as the server saw it, and the server's name. Raises the error of
    either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=server_name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return str(peer_name(ends[1])), str(peer_name(ends[0]))


def refusal(server: ssl.SSLContext, client: ssl.SSLContext, server_name: str = CELL_NAME) -> str:
    with pytest.raises(ssl.SSLError) as error:
        meet(server, client, server_name)
    return str(error.value)


@pytest.fixture
def cell(authority: FleetOfTests, tmp_path: Path) -> Identity:
    return authority.certify(tmp_path / "cell", NODE, "n-1")


@pytest.fixture
def ingress(authority: FleetOfTests, tmp_path: Path) -> Identity:
    return authority.certify(tmp_path / "ingress", INGRESS, "i-1")


def test_both_sides_know_each_others_name(cell: Identity, ingress: Identity) -> None:
    listener = cell.server_context()
    assert meet(listener, ingress.client_context()) == ("ingress i-1", "node n-1")


def test_another_cell_than_the_one_that_was_meant_is_not_believed(cell: Identity, ingress: Identity) -> None:
    listener = cell.server_context()
    assert "Hostname mismatch" in refusal(listener, ingress.client_context(), f"n-2.node.{FLEET}")


def test_who_has_no_certificate_of_the_fleet_is_refused(
    authority: FleetOfTests, cell: Identity, tmp_path: Path
) -> None:
    stranger = Identity(tmp_path / "stranger")
    stranger.store_trust(bundle=authority.bundle, revoked="")
    other_fleet = FleetOfTests().certify(tmp_path / "other", INGRESS, "i-1")
    other_fleet.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    listener = cell.server_context()
    assert "peer did not return a certificate" in refusal(listener, stranger.client_context())
    assert "unable to get local issuer certificate" in refusal(listener, other_fleet.client_context())


def test_a_revoked_certificate_is_refused_without_a_restart(
    authority: FleetOfTests, cell: Identity, ingress: Identity
) -> None:
    listener = cell.server_context()
    meet(listener, ingress.client_context())
    serial = authority.renew(ingress, INGRESS, "i-1")
    authority.revoke(serial, cell)
    assert "revoked" in refusal(listener, ingress.client_context())
    authority.renew(ingress, INGRESS, "i-1")
    assert meet(listener, ingress.client_context())[0] == "ingress i-1"


def test_a_client_refuses_a_revoked_server(authority: FleetOfTests, cell: Identity, ingress: Identity) -> None:
    serial = authority.renew(cell, NODE, "n-1")
    authority.revoke(serial, ingress)
    listener = cell.server_context()
    assert "revoked" in refusal(listener, ingress.client_context())


def test_a_certificate_that_ended_is_refused(authority: FleetOfTests, cell: Identity, ingress: Identity) -> None:
    authority.renew(ingress, INGRESS, "i-1", now=datetime.now(UTC) - timedelta(hours=25))
    listener = cell.server_context()
    assert "expired" in refusal(listener, ingress.client_context())


def test_a_listener_serves_renewed_certificates_and_believes_a_new_authority_without_a_restart(
    authority: FleetOfTests, cell: Identity, ingress: Identity
) -> None:
    listener = cell.server_context()
    meet(listener, ingress.client_context())
    first = list(authority.authorities)
    authority.authorities = [*first, *FleetOfTests().authorities]
    cell.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    authority.renew(ingress, INGRESS, "i-1")
    assert meet(listener, ingress.client_context())[0] == "ingress i-1"
    authority.renew(cell, NODE, "n-1")
    authority.authorities = authority.authorities[1:]
    for identity in (cell, ingress):
        identity.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    assert meet(listener, ingress.client_context())[0] == "ingress i-1"


def test_half_of_a_renewal_disturbs_no_connection(cell: Identity, ingress: Identity) -> None:
    listener = cell.server_context()
    cell.combined_file.write_text("torn", encoding="ascii")
    assert meet(listener, ingress.client_context())[0] == "ingress i-1"


def test_the_key_is_made_once_and_is_its_owners_alone(authority: FleetOfTests, tmp_path: Path) -> None:
    identity = authority.certify(tmp_path, NODE, "n-1")
    key = identity.key_file.read_bytes()
    authority.certify(tmp_path, NODE, "n-1")
    assert identity.key_file.read_bytes() == key
    assert [path.stat().st_mode & 0o777 for path in (identity.key_file, identity.combined_file)] == [0o600, 0o600]


def test_a_certificate_for_another_key_is_not_stored(
    authority: FleetOfTests, cell: Identity, ingress: Identity
) -> None:
    kept = cell.certificate_file.read_text()
    foreign = ingress.certificate_file.read_text()
    with pytest.raises(BadCertificate, match="is for a different key"):
        cell.store(chain=foreign, bundle=authority.bundle, revoked=authority.revoked)
    assert cell.certificate_file.read_text() == kept


@pytest.mark.parametrize(("bundle", "revoked"), [("no PEM", ""), ("", ""), (None, "no PEM")])
def test_what_is_no_bundle_is_not_stored(
    authority: FleetOfTests, cell: Identity, bundle: str | None, revoked: str
) -> None:
    with pytest.raises(BadCertificate):
        cell.store_trust(bundle=authority.bundle if bundle is None else bundle, revoked=revoked)
    assert cell.bundle_file.read_text() == authority.bundle


def test_renewal_is_due_after_half_of_a_certificates_life(authority: FleetOfTests, tmp_path: Path) -> None:
    validity = authority.certify(tmp_path, NODE, "n-1").validity()
    assert validity is not None
    assert validity.name == authority.name(NODE, "n-1")
    age = validity.not_after - validity.not_before
    assert validity.renew_after(0.0) == validity.not_before + age / 2
    assert validity.renew_after(1.0) <= validity.not_before + age * 0.61


def test_without_a_certificate_there_is_no_listener(authority: FleetOfTests, tmp_path: Path) -> None:
    identity = Identity(tmp_path)
    assert identity.validity() is None
    identity.store_trust(bundle=authority.bundle, revoked="")
    with pytest.raises(FileNotFoundError):
        identity.server_context()


def test_a_disk_that_fills_up_during_a_renewal_hides_no_certificate(
    authority: FleetOfTests, cell: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = datetime.now(UTC) - timedelta(hours=25)
    authority.renew(cell, NODE, "n-1", now=old)
    written: list[Path] = []

    def write(path: Path, content: bytes, *, mode: int) -> None:
        if written:
            raise OSError("No space left on device")
        written.append(path)
        write_durably(path, content, mode=mode)

    monkeypatch.setattr(identities, "write_durably", write)
    signed = authority.sign(NODE, "n-1", cell.signing_request())
    with pytest.raises(OSError, match="No space"):
        cell.store(chain=signed.pem, bundle=authority.bundle, revoked=cell.revoked_file.read_text())
    monkeypatch.undo()
    validity = cell.validity()
    assert validity is not None
    shown = x509.load_pem_x509_certificate(cell.combined_file.read_bytes())
    assert validity.not_after == shown.not_valid_after_utc, "renewals go by what connections show"


PAIR = (peer(0), peer(1))
LAUNCH = Launch(("python",), {"A": "1"})


def test_a_leader_of_followers_has_another_certificate_at_every_start() -> None:
    starts = [with_certificate(LAUNCH, assignment(peers=PAIR)) for _ in range(2)]
    bindings = {leader_certificate(start.env[CELL_CERTIFICATE_VARIABLE]).binding for start in starts}
    assert len(bindings) == 2
    assert all((start.argv, start.env["A"]) == (("python",), "1") for start in starts)


@pytest.mark.parametrize(("rank", "peers"), [(1, PAIR), (0, (peer(0),))], ids=["a follower", "a cell of one node"])
def test_who_meets_no_followers_has_none(rank: int, peers: tuple[object, ...]) -> None:
    assert with_certificate(LAUNCH, assignment(rank=rank, peers=peers)) == LAUNCH  # type: ignore[arg-type]


def test_there_is_nothing_to_hand_over_before_the_first_certificate(authority: FleetOfTests, tmp_path: Path) -> None:
    copy = IdentityCopy(tmp_path, None)
    assert not copy.can_update()
    copy.update()
    assert not copy.home.exists()
    authority.certify(tmp_path, IdentityKind.NODE, "n-1")
    assert copy.can_update()


def test_the_account_may_read_what_is_copy_over_and_nothing_else(authority: FleetOfTests, tmp_path: Path) -> None:
    own = authority.certify(tmp_path, IdentityKind.NODE, "n-1")
    copy = IdentityCopy(tmp_path, Account("proxy", os.getuid(), os.getgid()))
    copy.update()
    files = IdentityFiles(copy.home)
    names = {path.name for path in files.folder.iterdir()}
    assert names == {"combined.pem", "ca.pem", "crl.pem", REVOKED_SERIALS_FILE}, "the key lies in no file of its own"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (copy.home, files.folder)} == {0o750}
    assert files.combined_file.read_bytes() == own.combined_file.read_bytes()
    files.server_context()


def test_what_was_renewed_or_revoked_is_copy_over_anew(authority: FleetOfTests, tmp_path: Path) -> None:
    own = authority.certify(tmp_path / "node", IdentityKind.NODE, "n-1")
    copy = IdentityCopy(tmp_path / "node", None)
    copy.update()
    files = IdentityFiles(copy.home)
    before = files.stamp()
    copy.update()
    assert files.stamp() == before, "nothing is written that has not changed"
    serial = authority.renew(Identity(tmp_path / "ingress"), IdentityKind.INGRESS, "i-1")
    authority.revoke(serial, own)
    authority.renew(own, IdentityKind.NODE, "n-1")
    copy.update()
    assert files.combined_file.read_bytes() == own.combined_file.read_bytes()
    assert int((files.folder / REVOKED_SERIALS_FILE).read_text(), 16) == int(serial, 16)
