"""An ingress and the other hosts of its fleet: both ends check names, and new certificates are used without a
reload."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio

from engine_agent.ingress import certificates
from engine_agent.ingress.certificates import (
    AUTHORITIES,
    CERTIFICATE,
    MAX_FILE_BYTES,
    RELOAD_EVERY_S,
    REVOKED,
    LinkFiles,
)
from engine_agent.ingress.command_socket import CommandRefused, CommandSocket
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ports import hop_port
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, HOP_SECRET, RunningIngress, ask, pool, read_stream
from tests.engine_agent.ingress.marks import marked
from tests.engine_agent.tls import fleet_of_rigs, identity_of

BODY = b'{"model": "demo"}'
NODE, INGRESS = IdentityKind.NODE, IdentityKind.INGRESS


@pytest_asyncio.fixture
async def away(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "away", AWAY).running() as running:
        yield running


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_that_shows_another_name_gets_nothing(ingress: RunningIngress, tmp_path: Path) -> None:
    other_node = FakeCell("b", identity=identity_of(NODE, "n-0b0b0b0b"))
    machine = FakeCell("c", identity=identity_of(IdentityKind.MACHINE, "n-0c0c0c0c"))
    other_fleet = FakeCell("d", identity=FleetOfTests().certify(tmp_path, NODE, "n-0c0c0c0c"))
    cells = (FakeCell("a"), other_node, machine, other_fleet)
    async with cells[0].running(), other_node.running(), machine.running(), other_fleet.running():
        await ingress.route(pool(*cells))
        await ingress.sees(a="up", b="down", c="down", d="down")
        async with ingress.client() as client:
            assert {await ask(client) for _ in range(10)} == {"a"}
        reason = ingress.reports[-1].cells["b"].reason
        assert "certificate" in reason or "L6" in reason, reason
    assert not [request for cell in cells[1:] for request in cell.requests]


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_without_a_node_costs_itself_alone(ingress: RunningIngress) -> None:
    async with FakeCell("a").running() as cell, FakeCell("b").running() as other:
        cell.node = ""
        await ingress.route(pool(cell, other))
        await ingress.sees(b="up")
        assert "a" not in ingress.cells
        wanted = "left out: the cell a names no node whose certificate could be checked"
        assert wanted in ingress.reports[-1].observed.reason
        async with ingress.client() as client:
            assert {await ask(client) for _ in range(3)} == {"b"}


@pytest.mark.asyncio
@pytest.mark.processes
async def test_only_ingresses_of_the_fleet_and_its_control_plane_come_in_where_regions_meet(
    ingress: RunningIngress, tmp_path: Path
) -> None:
    async with FakeCell("a").running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(a="up")
        assert (await ingress.post_hop(BODY, **marked(HOP_SECRET))).status_code == 200
        assert cell.requests[-1].headers["x-switchyard-hop"].startswith(AWAY)
        stranger = FleetOfTests().certify(tmp_path / "stranger", INGRESS, "i-elsewhere")
        stranger.store_trust(bundle=fleet_of_rigs().bundle, revoked=fleet_of_rigs().revoked)
        for sender in (identity_of(NODE, "n-0c0c0c0c"), identity_of(IdentityKind.MACHINE, "m-0c0c0c0c"), stranger):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await ingress.post_hop(BODY, sender, **marked(HOP_SECRET))
        nobody = ssl.create_default_context(cafile=str(ingress.identity.bundle_file))
        nobody.check_hostname = False
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            async with httpx.AsyncClient(verify=nobody) as client:
                await client.get(f"https://127.0.0.1:{hop_port(ingress.settings.port)}/healthz")
        assert (await ingress.post(BODY, **marked(HOP_SECRET))).status_code == 200
        assert "x-switchyard-hop" not in cell.requests[-1].headers, "it is an application's word, however well signed"
        assert (await ingress.post_hop(BODY, identity_of(IdentityKind.CONTROL, "control"))).status_code == 200
        assert len(cell.requests) == 3


@pytest.mark.asyncio
@pytest.mark.processes
async def test_another_regions_ingress_must_be_the_one_that_the_table_names(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("far").running() as far:
        await away.route(pool(far))
        await ingress.route(pool(spill=[away], fractions={AWAY: 1.0}))
        await eventually(lambda: _spill_states(ingress) == {f"{AWAY}:i-{AWAY}": True})
        fleet_of_rigs().certify(away.settings.state_dir, INGRESS, "i-other")
        await eventually(lambda: _spill_states(ingress) == {f"{AWAY}:i-{AWAY}": False}, what="its new name is seen")


@pytest.mark.asyncio
@pytest.mark.processes
async def test_no_session_is_resumed_so_every_connection_shows_its_certificate(ingress: RunningIngress) -> None:
    async with FakeCell("a").running() as cell:
        await ingress.route(pool(cell))
        context = identity_of(INGRESS, "i-elsewhere").client_context()
        assert not await asyncio.to_thread(_is_resumed, context, ingress)


def _is_resumed(context: ssl.SSLContext, ingress: RunningIngress) -> bool:
    address = ("127.0.0.1", hop_port(ingress.settings.port))
    name = fleet_of_rigs().name(INGRESS, ingress.settings.ingress_id).dns
    session, resumed = None, None
    for _ in range(2):
        plain = socket.create_connection(address)
        with context.wrap_socket(plain, server_hostname=name, session=session) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            session, resumed = connection.session, connection.session_reused
    return bool(resumed)


@pytest.mark.asyncio
@pytest.mark.processes
async def test_every_ingress_of_another_region_takes_its_part(
    ingress: RunningIngress, away: RunningIngress, tmp_path: Path
) -> None:
    async with (
        FakeCell("far").running() as far,
        FakeCell("also-far").running() as also_far,
        RunningIngress(tmp_path / "also", AWAY, "i-also").running() as also,
    ):
        await away.route(pool(far))
        await also.route(pool(also_far))
        await ingress.route(pool(spill=[away, also], fractions={HOME: 0.0, AWAY: 1.0}))
        await eventually(lambda: _spill_states(ingress) == {f"{AWAY}:i-{AWAY}": True, f"{AWAY}:i-also": True})
        assert [(await ingress.post(BODY)).status_code for _ in range(20)] == [200] * 20
        assert (len(far.requests), len(also_far.requests)) == (10, 10)
        await eventually(lambda: _spilled(ingress) == {AWAY: 20})


def _spill_states(ingress: RunningIngress) -> dict[str, bool]:
    running = ingress.ingress.serving.running
    servers = running.servers if running else ()
    return {server.name: server.usable for server in servers if server.backend == "spill.demo"}


def _spilled(ingress: RunningIngress) -> dict[str, int]:
    return ingress.reports[-1].telemetry.pools["demo"].spilled_to


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_node_that_was_revoked_gets_nothing_more_and_nothing_is_reloaded(
    ingress: RunningIngress, authority: FleetOfTests, tmp_path: Path
) -> None:
    own = authority.certify(ingress.settings.state_dir, INGRESS, ingress.settings.ingress_id)
    revoked, good = authority.certify(tmp_path / "a", NODE, "n-a"), authority.certify(tmp_path / "b", NODE, "n-b")
    async with FakeCell("a", identity=revoked).running() as cell, FakeCell("b", identity=good).running() as other:
        cell.node, other.node = "n-a", "n-b"
        serial = authority.renew(revoked, NODE, "n-a")
        await ingress.route(pool(cell, other))
        await ingress.sees(a="up", b="up")
        worker = ingress.worker_pid
        authority.revoke(serial, own)
        await ingress.sees(a="down", b="up")
        async with ingress.client() as client:
            assert {await ask(client) for _ in range(10)} == {"b"}
        assert ingress.worker_pid == worker


@pytest.mark.asyncio
@pytest.mark.processes
async def test_new_certificates_and_authorities_break_no_stream_and_need_no_reload(
    ingress: RunningIngress, authority: FleetOfTests, tmp_path: Path
) -> None:
    own = authority.certify(ingress.settings.state_dir, INGRESS, ingress.settings.ingress_id)
    node = authority.certify(tmp_path / "a", NODE, "n-a")
    async with FakeCell("a", chunks=40, step_s=0.02, identity=node).running() as cell, ingress.client() as client:
        cell.node = "n-a"
        await ingress.route(pool(cell))
        await ingress.sees(a="up")
        worker, streams = ingress.worker_pid, list[asyncio.Task[str]]()
        for turn in range(5):
            if turn == 2:  # both are valid once all hosts know the new one, and then it signs
                authority.authorities += FleetOfTests().authorities
                for identity in (own, node):
                    identity.store_trust(bundle=authority.bundle, revoked=authority.revoked)
                await _until_shown(ingress, "show ssl crl-file tls/crl.pem", "Certificate Revocation List", 2)
                await _until_shown(ingress, f"show ssl ca-file {AUTHORITIES}", "Subject:", 2)
            if turn == 4:  # only the next one counts
                del authority.authorities[0]
            streams += [asyncio.create_task(read_stream(client)) for _ in range(3)]
            serial = int(authority.renew(own, INGRESS, ingress.settings.ingress_id), 16)
            authority.renew(node, NODE, "n-a")
            await _until_shown(ingress, "show ssl cert tls/combined.pem", f"{serial:X}", 1)
            assert await ask(client) == "a"
        assert set(await asyncio.gather(*streams)) == {"".join(f"{number} " for number in range(40))}
        assert ingress.worker_pid == worker
        assert ingress.cells == {"a": "up"}


async def _until_shown(ingress: RunningIngress, command: str, text: str, times: int) -> None:
    async with asyncio.timeout(60):
        while (await ingress.haproxy.admin.send(command)).count(text) != times:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)  # HAProxy announces nothing, so it is polled


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_table_waits_for_the_first_certificate(tmp_path: Path) -> None:
    running = RunningIngress(tmp_path / "home")
    kept = running.identity.combined_file.rename(tmp_path / "kept.pem")
    async with running.running() as ingress, FakeCell("a").running() as cell:
        routed = asyncio.create_task(ingress.route(pool(cell)))
        assert (await ingress.post(BODY)).json()["error"]["code"] == "no_routing_table"
        kept.rename(running.identity.combined_file)
        await routed
        await ingress.sees(a="up")


class Admin:
    """A HAProxy that accepts settings, but refuses a file."""

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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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
@pytest.mark.asyncio
async def test_who_is_in_a_long_list_gets_nothing_more(
    ingress: RunningIngress, authority: FleetOfTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "RELOAD_EVERY_S", 0.0)
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
