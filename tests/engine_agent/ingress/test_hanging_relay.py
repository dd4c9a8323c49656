"""A relay that accepts connections and never answers is killed; one that answers is not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine_agent.ingress import relay_processes
from engine_agent.ingress.command_socket import short_path
from engine_agent.ingress.relay_processes import RelayProcesses
from engine_agent.ingress.settings import IngressSettings, Times
from engine_agent.relay.meter import RelayMeter
from tests.engine_agent.fake_control_plane import eventually

pytestmark = pytest.mark.asyncio

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
COUNTS = b"HTTP/1.1 200 OK\r\n\r\n" + msgspec.json.encode(RelayMeter().counts())


@pytest.fixture
def relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RelayProcesses:
    for name, seconds in {"READ_EVERY_S": 0.01, "AGAIN_EVERY_S": 0.01, "READ_WITHIN_S": 0.02}.items():
        monkeypatch.setattr(relay_processes, name, seconds)
    home = tmp_path / ("x" * 100)  # no socket can be reached by such a path
    settings = IngressSettings("i-1", "us-east-1", home, port=1, relays=1)
    made = RelayProcesses(replace(settings, times=Times(silent_after_s=0.05)))
    made.folder.mkdir(parents=True)
    made.processes[0].pid = 1
    return made


@pytest.fixture
def killed(relays: RelayProcesses, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(relays.processes[0], "kill", seen.append)
    return seen


async def _hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(COUNTS)


@contextlib.asynccontextmanager
async def _reading(relays: RelayProcesses, handler: Handler) -> AsyncIterator[None]:
    connected: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.add(writer)
        await handler(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        connected.remove(writer)

    with short_path(relays.folder / "1.sock") as path:
        server = await asyncio.start_unix_server(handle, path)
    async with server:
        task = asyncio.create_task(relays.read())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: not connected, what="every connection is closed")


async def test_a_relay_that_never_answers_is_killed(relays: RelayProcesses, killed: list[str]) -> None:
    async with _reading(relays, _hang):
        await eventually(lambda: killed, what="it is killed")


async def test_a_relay_that_answers_is_not_killed(relays: RelayProcesses, killed: list[str]) -> None:
    readings: list[object] = []
    relays._note = readings.append
    async with _reading(relays, _answer):
        await eventually(lambda: len(readings) > 10, what="it is read often")
    assert not killed


@pytest.mark.parametrize("folder", ["relay", "a" * 100])
async def test_a_relay_is_read_in_a_folder_of_any_length(
    relays: RelayProcesses, killed: list[str], tmp_path: Path, folder: str
) -> None:
    relays.folder = tmp_path / folder
    relays.folder.mkdir(exist_ok=True)
    async with _reading(relays, _answer):
        await eventually(lambda: relays.counts, what="its counts are read")
    assert not killed


async def test_a_relay_that_could_not_be_asked_is_not_killed(
    relays: RelayProcesses, killed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (relays.folder / "1.sock").mkdir()
    task = asyncio.create_task(relays.read())
    await eventually(lambda: len(caplog.records) > 10, what="it is tried often")
    task.cancel()
    assert not killed
    assert "relay 1: its counts cannot be read" in caplog.text
