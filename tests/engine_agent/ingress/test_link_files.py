"""Files of links in a HAProxy that runs: each is used without waiting for another, and a reload takes long ones."""

from pathlib import Path
from typing import Any, cast

import pytest

from engine_agent.ingress import links
from engine_agent.ingress.command_socket import CommandRefused, CommandSocket
from engine_agent.ingress.links import AUTHORITIES, CERTIFICATE, MAX_FILE_BYTES, RELOAD_EVERY_S, REVOKED, LinkFiles
from engine_agent.protocol.identity import IdentityKind
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = pytest.mark.asyncio
NODE, INGRESS = IdentityKind.NODE, IdentityKind.INGRESS


class Admin:
    """A HAProxy that takes what is set, but refuses a file."""

    def __init__(self) -> None:
        self.set: list[str] = []
        self.refuses = "nothing"

    async def send(self, command: str) -> str:
        words = command.split()
        if words[0] == "set" and words[3] == self.refuses:
            return "Can't load"
        if words[0] == "commit":
            self.set.append(words[3])
        return "Transaction created, Success!"


@pytest.fixture
def admin() -> Any:
    return Admin()


def long_list(authority: FleetOfTests) -> None:
    authority.revoked_serials += [f"{number:040x}" for number in range(1 << 120, (1 << 120) + 1000)]


async def test_a_list_that_is_too_long_keeps_neither_authorities_nor_the_certificate(
    authority: FleetOfTests, tmp_path: Path, admin: Admin
) -> None:
    long_list(authority)
    files = LinkFiles(identity := authority.certify(tmp_path, INGRESS, "i-1"))
    assert identity.revoked_file.stat().st_size > MAX_FILE_BYTES
    socket = cast(CommandSocket, admin)
    assert await files.load("life", socket)
    assert admin.set == [AUTHORITIES, CERTIFICATE]
    assert files.needs_reload(100.0)
    assert not files.needs_reload(101.0), "it may have failed: that is tried again later"
    assert files.needs_reload(100.0 + RELOAD_EVERY_S)
    files.reloaded()
    assert await files.load("next life", socket), "the new worker is shown all that commands hold"
    assert not files.needs_reload(1000.0)
    authority.revoke("ab12", identity)
    assert not await files.load("next life", socket)
    assert files.needs_reload(1000.0)


async def test_a_file_that_is_refused_or_missing_keeps_no_other_one_out(
    authority: FleetOfTests, tmp_path: Path, admin: Admin
) -> None:
    files = LinkFiles(identity := authority.certify(tmp_path, INGRESS, "i-1"))
    admin.refuses = AUTHORITIES
    socket = cast(CommandSocket, admin)
    with pytest.raises(CommandRefused, match="ca-file"):
        await files.load("life", socket)
    identity.revoked_file.unlink()
    authority.authorities += FleetOfTests().authorities
    identity.bundle_file.write_text(authority.bundle, encoding="ascii")
    admin.refuses = "nothing"
    with pytest.raises(CommandRefused, match="No such file"):
        await files.load("life", socket)
    assert admin.set == [REVOKED, CERTIFICATE, AUTHORITIES]


@pytest.mark.processes
async def test_who_is_in_a_long_list_gets_nothing_more(
    ingress: RunningIngress, authority: FleetOfTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RELOAD_EVERY_S", 0.0)
    own = authority.certify(ingress.settings.state_dir, INGRESS, ingress.settings.ingress_id)
    node = authority.certify(tmp_path / "a", NODE, "n-a")
    async with FakeCell("a", identity=node).running() as cell:
        cell.node = "n-a"
        serial = authority.renew(node, NODE, "n-a")
        await ingress.route(pool(cell))
        await ingress.sees(a="up")
        reloads = ingress.ingress.serving.reloads_total
        long_list(authority)
        authority.revoke(serial, own)
        await ingress.sees(a="down")
        assert ingress.ingress.serving.reloads_total == reloads + 1
        authority.renew(node, NODE, "n-a")
        await ingress.sees(a="up")
        await eventually(lambda: not ingress.reports[-1].observed.reason)
