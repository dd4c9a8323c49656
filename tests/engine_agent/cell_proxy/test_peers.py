"""A cell proxy over TLS: ingresses of its fleet get through and nobody else, new certificates break no stream, and what
was revoked is cut."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import REVOKED_SERIALS_FILE, IdentityKind
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.cell_proxy.engine import EVENTS, STREAM_HEAD, Engine, Script, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.http_stream import Message, read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

NODE, INGRESS = IdentityKind.NODE, IdentityKind.INGRESS
ASKED = request("/v1/completions", b"{}", x_switchyard_server="c-test-g3")


class Cell:
    """A proxy with a certificate of a fleet, and how to reach it."""

    def __init__(self, fleet: FleetOfTests, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.node = fleet.certify(folder / "node", NODE, "n-0a1b2c3d")
        self.proxy: ProxyProcess

    @contextlib.asynccontextmanager
    async def running(self, engine: Engine) -> AsyncIterator["Cell"]:
        async with running_proxy(engine, "--identity", str(self.folder / "node")) as self.proxy:
            yield self

    def identity(self, kind: IdentityKind, subject: str) -> Identity:
        return self.fleet.certify(self.folder / f"{kind}-{subject}", kind, subject)

    async def open(self, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = self.fleet.name(NODE, "n-0a1b2c3d").dns
        return await asyncio.open_connection("127.0.0.1", self.proxy.port, ssl=context, server_hostname=name)

    async def ask(self, identity: Identity, raw: bytes = ASKED) -> Message:
        reader, writer = await self.open(identity.client_context())
        try:
            writer.write(raw)
            return await read_message(reader)
        finally:
            writer.transport.abort()


async def is_refused(cell: Cell, context: ssl.SSLContext) -> bool:
    """Whether a connection ends without a word."""
    try:
        reader, writer = await cell.open(context)
    except (ssl.SSLError, ConnectionError):
        return True
    try:
        writer.write(ASKED)
        return not await reader.read(1)
    except (ssl.SSLError, ConnectionError):
        return True
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_only_ingresses_of_the_fleet_are_served(authority: FleetOfTests, tmp_path: Path) -> None:
    stranger = FleetOfTests().certify(tmp_path / "stranger", INGRESS, "i-1")
    stranger.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    nobody = Identity(tmp_path / "nobody")
    nobody.store_trust(bundle=authority.bundle, revoked=authority.revoked)
    async with running_engine() as engine, Cell(authority, tmp_path).running(engine) as cell:
        assert (await cell.ask(cell.identity(INGRESS, "i-1"))).status == 200
        for other in (stranger, nobody, cell.identity(NODE, "n-2"), cell.identity(IdentityKind.CONTROL, "control")):
            assert await is_refused(cell, other.client_context())
        reader, writer = await asyncio.open_connection("127.0.0.1", cell.proxy.port)
        writer.write(ASKED)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"HTTP/"), "plain HTTP is no TLS"
        writer.close()
        assert len(engine.requests) == 1
        await until(lambda: bool(cell.proxy.log_lines("connection_refused")), "it says who was refused")


async def test_a_renewed_certificate_is_shown_at_once_and_breaks_no_stream(
    authority: FleetOfTests, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    async with running_engine(_held(go_on)) as engine, Cell(authority, tmp_path).running(engine) as cell:
        ingress = cell.identity(INGRESS, "i-1")
        reader, writer = await cell.open(ingress.client_context())
        writer.write(ASKED)
        await read_head(reader)
        assert await read_chunk(reader) == EVENTS[0]
        serial = authority.renew(cell.node, NODE, "n-0a1b2c3d")
        _, other = await cell.open(ingress.client_context())
        shown = other.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        assert int(shown, 16) == int(serial, 16)
        go_on.set()
        assert await read_chunk(reader) == EVENTS[1]
        writer.close()
        other.close()


async def test_a_revoked_ingress_is_cut_and_another_goes_on(authority: FleetOfTests, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with running_engine(_held(go_on)) as engine, Cell(authority, tmp_path).running(engine) as cell:
        bad, good = cell.identity(INGRESS, "i-1"), cell.identity(INGRESS, "i-2")
        serial = authority.renew(bad, INGRESS, "i-1")
        streams = [await cell.open(each.client_context()) for each in (bad, good)]
        for reader, writer in streams:
            writer.write(ASKED)
            await read_head(reader)
            assert await read_chunk(reader) == EVENTS[0]
        (cell.node.folder / REVOKED_SERIALS_FILE).write_text(f"{int(serial, 16):x}\n")
        authority.revoke(serial, cell.node)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(read_chunk(streams[0][0]), 60)
        assert await is_refused(cell, bad.client_context())
        go_on.set()
        assert await read_chunk(streams[1][0]) == EVENTS[1]
        for _, writer in streams:
            writer.transport.abort()


def _held(go_on: asyncio.Event) -> Script:
    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENTS[0]))
        await go_on.wait()
        await turn.send(chunk(EVENTS[1]) + b"0\r\n\r\n")

    return script
