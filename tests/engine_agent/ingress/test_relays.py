"""Relays behind a real HAProxy: which requests pass one, where a stream continues, and what its death costs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine_agent.ingress.haproxy import HaproxyProcess
from engine_agent.ingress.relay_processes import read_counts
from engine_agent.protocol.ingress_messages import Affinity, PoolAdapter, cell_server_name
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, RunningIngress, pool
from tests.engine_agent.ingress.test_spill import until_spill_is
from tests.engine_agent.relay.rig import words_of

pytestmark = [pytest.mark.processes, pytest.mark.asyncio, pytest.mark.long]

TOKENS = 6
WHOLE = [f"{number} " for number in range(TOKENS)]
STREAM: dict[str, Any] = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def cells(*versions: str, **settings: Any) -> AsyncIterator[list[FakeCell]]:
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(FakeCell(chunks=TOKENS, **settings).running()) for _ in versions]
        for cell, version in zip(running, versions, strict=True):
            cell.version = version
        yield running


async def has_relay(ingress: RunningIngress) -> Path:
    socket = ingress.settings.state_dir / "relay" / "1.sock"
    await eventually(socket.exists, what="a relay")

    for haproxy in (ingress.haproxy, *(parser.process for parser in ingress.ingress.body_parsers)):

        async def is_up(haproxy: HaproxyProcess = haproxy) -> bool:
            page = await haproxy.admin.send("show servers state relayed")
            return any(line.split()[3:6:2] == ["relay1", "2"] for line in page.splitlines() if " relay1 " in line)

        await until(is_up, "each HAProxy sees the relay")
    return socket


async def continued(socket: Path) -> int:
    return (await read_counts(socket)).pools["demo"].continued_total["connection_lost"]


async def stream(ingress: RunningIngress, text: str = "hi", **headers: str) -> httpx.Response:
    body = {**STREAM, "messages": [{"role": "user", "content": text}]}
    return await ingress.http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("size", [10, 40_000])
async def test_a_stream_continues_at_a_cell_of_its_version(ingress: RunningIngress, size: int) -> None:
    async with cells("1", "1", "2") as (first, second, other):
        await ingress.route(pool(first, second, other, continues=True, affinity=Affinity()))
        socket = await has_relay(ingress)
        first.dies_after = 3
        for number in range(9):
            answer = await stream(ingress, f"{number}" * size)
            assert words_of(answer.content) == WHOLE
            assert not {"x-switchyard-version", "x-switchyard-from"} & answer.headers.keys()
        replays = {each: [r for r in each.requests if "x-switchyard-replayed" in r.headers] for each in (second, other)}
        assert not replays[other]
        assert {r.headers["x-switchyard-replayed"] for r in replays[second]} == {"3"}
        assert (await continued(socket)) == len(replays[second]) == len(first.requests)


async def test_a_stream_of_a_host_without_power_continues_once_its_health_checks_time_out(tmp_path: Path) -> None:
    """Long before it counts as stalled."""
    ingress = RunningIngress(tmp_path / "home")
    ingress.use(replace(ingress.settings, times=replace(ingress.settings.times, continuing_host_gone_s=1.0)))
    async with ingress.running(), cells("1", "1") as (first, other):
        first.release.clear()
        await ingress.route(pool(first, continues=True))
        await ingress.sees(**{first.name: "up"})
        socket = await has_relay(ingress)
        answer = asyncio.create_task(stream(ingress))
        await eventually(lambda: first.in_flight == 1)
        with first.power_off():
            await ingress.route(pool(first, other, continues=True))
            assert words_of((await answer).content) == WHOLE
        assert (await read_counts(socket)).pools["demo"].continued_total == {"connection_lost": 1}


async def test_a_stream_of_an_adapter_continues_only_where_the_adapter_is(ingress: RunningIngress) -> None:
    async with cells("1", "1", "1") as (first, second, without):
        starts = tuple(cell_server_name(each.name, each.generation) for each in (first, second))
        served = pool(first, second, without, continues=True, affinity=Affinity())
        await ingress.route(msgspec.structs.replace(served, adapters=(PoolAdapter("tuned", "demo", starts),)))
        await has_relay(ingress)
        first.dies_after = 3
        for number in range(6):
            answer = await ingress.http.post("/v1/chat/completions", json={**STREAM, "model": "tuned", "seed": number})
            assert words_of(answer.content) == WHOLE
        assert first.requests
        assert not without.requests
        replays = [each for each in second.requests if "x-switchyard-replayed" in each.headers]
        assert {each.headers["x-switchyard-adapter"] for each in replays} == {"tuned"}


async def test_without_another_cell_of_its_version_a_stream_ends_with_an_error(ingress: RunningIngress) -> None:
    async with cells("1", "2") as (first, other):
        await ingress.route(pool(first, other, continues=True))
        await has_relay(ingress)
        first.dies_after = 3
        answer = await stream(ingress)
        while not first.requests:
            answer = await stream(ingress)
        assert words_of(answer.content) == WHOLE[:3]
        assert b'"error"' in answer.content
        assert not any("x-switchyard-replayed" in each.headers for each in other.requests)


CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"r1"}}\n\n'
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m1"}}\n\n'


@pytest.mark.parametrize(
    ("path", "begun", "last"),
    [
        ("/v1/responses", CREATED, b'event: response.failed\ndata: {"type":"response.failed","sequence_number":1,'),
        ("/v1/messages", STARTED, b'event: error\ndata: {"type":"error","error":{'),
    ],
)
async def test_a_host_that_fails_ends_the_stream_with_the_failure_event_of_its_dialect(
    ingress: RunningIngress, path: str, begun: bytes, last: bytes
) -> None:
    """Only with a relay: HAProxy alone closes the connection, because it cannot write into an answer."""
    async with cells("1") as (cell,):
        cell.broken_stream = begun + b"event: half"
        await ingress.route(pool(cell, continues=True))
        await has_relay(ingress)
        answer = await ingress.http.post(path, json={"model": "demo", "stream": True})
        assert answer.content.startswith(begun + last)
        assert answer.content.endswith(b"\n\n")
        await ingress.route(pool(cell))
        await eventually(lambda: ingress.ingress.relays.processes[0].pid is None, what="no relay")
        with pytest.raises(httpx.RemoteProtocolError):
            await ingress.http.post(path, json={"model": "demo", "stream": True})


async def test_clients_set_none_of_the_headers(ingress: RunningIngress) -> None:
    async with cells("1") as (cell,):
        await ingress.route(pool(cell, continues=True))
        await has_relay(ingress)
        names = ("replayed", "avoided", "version", "continuation")
        answer = await stream(ingress, **{f"x-switchyard-{name}": "1" for name in names})
        assert words_of(answer.content) == WHOLE
        assert {name for name in names if f"x-switchyard-{name}" in cell.requests[-1].headers} == {"continuation"}
        assert cell.requests[-1].headers["x-switchyard-continuation"] == "on"


async def test_deployments_without_continuation_pass_no_relay(ingress: RunningIngress) -> None:
    async with cells("1", "1") as (cell, other):
        await ingress.route(pool(cell, continues=True), pool(other, name="other", models=("other",)))
        socket = await has_relay(ingress)
        answer = await ingress.http.post("/v1/chat/completions", json={**STREAM, "model": "other"})
        assert words_of(answer.content) == WHOLE
        assert "x-switchyard-continuation" not in other.requests[-1].headers
        assert (await read_counts(socket)).requests == 0
        await ingress.route(pool(cell))
        await eventually(lambda: ingress.ingress.relays.processes[0].pid is None, what="no relay")
        assert words_of((await stream(ingress)).content) == WHOLE


async def test_a_relay_that_dies_cuts_its_streams_and_nothing_else(ingress: RunningIngress) -> None:
    async with cells("1") as (cell,):
        await ingress.route(pool(cell, continues=True))
        await has_relay(ingress)
        relay = ingress.ingress.relays.processes[0]
        assert relay.pid is not None
        cell.release.clear()
        async with ingress.http.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            await anext(lines)  # before its first byte the request would be repeated
            os.kill(relay.pid, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        cell.release.set()
        assert words_of((await stream(ingress)).content) == WHOLE
        await eventually(lambda: ingress.ingress.relays.exits == 1, what="the death is counted")
        await has_relay(ingress)


async def test_relays_survive_their_agent(ingress: RunningIngress, tmp_path: Path) -> None:
    """The later agent is another object: the first one reaps the processes that it has started."""
    async with cells("1") as (cell,):
        await ingress.route(pool(cell, continues=True))
        await has_relay(ingress)
        pid = ingress.ingress.relays.processes[0].pid
        cell.release.clear()
        running = asyncio.create_task(stream(ingress))
        await eventually(lambda: cell.in_flight == 1)
        await ingress.die()
        later = RunningIngress(tmp_path / "unused")
        later.use(ingress.settings)
        async with later.running():
            await eventually(lambda: later.ingress.relays.processes[0].pid == pid, what="the same relay")
            cell.release.set()
            assert words_of((await running).content) == WHOLE


async def test_a_stream_continues_in_another_region_and_from_one_cell_there_to_the_next(
    ingress: RunningIngress, tmp_path: Path
) -> None:
    async with (
        cells("1", "1", "1") as (near, far, farther),
        RunningIngress(tmp_path / "away", AWAY).running() as away,
    ):
        await away.route(pool(far, farther, spill=[ingress], continues=True))
        await ingress.route(pool(near, spill=[away], fractions={HOME: 1.0}, continues=True))
        socket = await has_relay(ingress)
        await until_spill_is(True, ingress)
        near.dies_after, far.dies_after, farther.dies_after = 2, 4, None
        while not (near.requests and far.requests):
            answer = await stream(ingress)
            assert words_of(answer.content) == WHOLE
        assert (await continued(socket)) >= 2
        crossed = next(each for each in far.requests if "x-switchyard-replayed" in each.headers)
        assert crossed.headers["x-switchyard-hop"].startswith(f"{HOME}~|")
        relay_there = away.settings.state_dir / "relay" / "1.sock"
        assert (await read_counts(relay_there)).requests == 0, "the relay here continues it"
