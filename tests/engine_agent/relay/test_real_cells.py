"""Streams of two real cells of the simulator, one of which fails or leaves: each is complete at the other one, with the
text and the usage of an undisturbed one, and every token is counted once."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.sim.cells import CHAT, MODEL, Cell, Member, until
from tests.engine_agent.relay.real_cells import CellEngine, RealCells, behind_an_ingress, text_of
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(300)]

AFTER = 10
BODY: dict[str, Any] = {
    "messages": CHAT["messages"],
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
SLOW = ("--decode-step-ms", "20")
Act = Callable[[RealCells, dict[str, Member], str], Awaitable[None]]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[dict[str, Member]]:
    """The engines of two cells that do whole requests."""
    with ExitStack() as stack:
        yield {name: started(stack, tmp_path / name) for name in ("a", "b")}


def started(stack: ExitStack, folder: Path, *options: str) -> Member:
    folder.mkdir()
    cell = Cell(folder, followers=0)
    stack.callback(cell.stop)
    member = cell.start(0, *SLOW, *options)
    until(lambda: member.health()[0] == 200, member.output)
    return member


async def kill_engine(_cells: RealCells, members: dict[str, Member], cell: str) -> None:
    members[cell].process.kill()


async def hang_engine(_cells: RealCells, members: dict[str, Member], cell: str) -> None:
    members[cell].process.send_signal(signal.SIGSTOP)


async def kill_proxy(cells: RealCells, _members: dict[str, Member], cell: str) -> None:
    cells.proxies[cell].process.kill()


async def drain(cells: RealCells, _members: dict[str, Member], cell: str) -> None:
    assert (await cells.proxies[cell].admin("/phase", b'{"phase": "drain"}')).status == 200


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        pytest.param(kill_engine, "engine_died", id="engine dies"),
        pytest.param(hang_engine, "engine_silent", id="engine hangs"),
        pytest.param(kill_proxy, "connection_lost", id="proxy dies"),
        pytest.param(drain, "leaving", id="drain"),
    ],
)
def test_a_stream_continues_at_the_other_cell(
    act: Act, reason: str, members: dict[str, Member], tmp_path: Path
) -> None:
    async def scenario() -> None:
        expected = members["a"].chat({**CHAT, **BODY, "stream_options": None}).json()
        engines = {cell: CellEngine(member.url) for cell, member in members.items()}
        async with behind_an_ingress(tmp_path / "path", engines, MODEL) as cells:
            events = await cells.stream(BODY, AFTER, lambda cell: act(cells, members, cell))
            assert text_of(events) == expected["choices"][0]["message"]["content"]
            used = events[-1]["usage"]
            assert used == expected["usage"]
            assert await cells.continued() == {reason: 1}
            await cells.counts(used)

    asyncio.run(scenario())


def test_at_the_end_of_a_drain_a_stream_breaks_and_continues_at_a_cell_that_comes_later(
    members: dict[str, Member], tmp_path: Path
) -> None:
    """Until then there is none that could take it."""

    async def scenario() -> None:
        engines = {cell: CellEngine(member.url) for cell, member in members.items()}
        expected = members["a"].chat({**CHAT, **BODY, "stream_options": None}).json()
        async with behind_an_ingress(tmp_path / "path", engines, MODEL, "--grace-s", "0.5") as cells:
            await cells.route("a")

            async def stop_and_add(cell: str) -> None:
                cells.proxies[cell].terminate()
                assert await cells.proxies[cell].process.wait() == 0
                await cells.route("a", "b")

            events = await cells.stream(BODY, AFTER, stop_and_add)
            assert text_of(events) == expected["choices"][0]["message"]["content"]
            assert events[-1]["usage"] == expected["usage"]
            assert await cells.continued() == {"cell_stopping": 1}
            _, completion = await cells.counted()
            assert 0 < completion < expected["usage"]["completion_tokens"], "the first cell counted the beginning"

    asyncio.run(scenario())


def test_a_stream_whose_prompt_a_prefill_cell_read_continues_at_another_decode_cell(tmp_path: Path) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "Tell me about the weather in the mountains. " * 20}]}

    async def scenario(members: dict[str, Member], kv_port: int) -> None:
        expected = members["b"].chat({"model": MODEL, **body, "stream_options": None}).json()
        roles = {"p": CellRole.PREFILL, "a": CellRole.DECODE, "b": CellRole.DECODE}
        engines = {cell: CellEngine(members[cell].url, role, kv_port) for cell, role in roles.items()}
        async with behind_an_ingress(tmp_path / "path", engines, MODEL) as cells:
            killed: list[str] = []

            async def kill(cell: str) -> None:
                killed.append(cell)
                members[cell].process.kill()

            events = await cells.stream(body, AFTER, kill)
            assert text_of(events) == expected["choices"][0]["message"]["content"]
            used, wanted = (
                {**usage, "prompt_tokens_details": None} for usage in (events[-1]["usage"], expected["usage"])
            )
            assert used == wanted
            assert await cells.continued() == {"engine_died": 1}
            first, other = [await cells.handovers(cell) for cell in sorted("ab", key=lambda cell: cell not in killed)]
            assert (first.handovers_total, first.fallbacks, other.handovers_total) == (1, {}, 0)
            await cells.counts(used)

    with ExitStack() as stack:
        port = free_port()
        reads = ("--cell-role", "prefill", "--kv-endpoint", f"127.0.0.1:{port}")
        members = {"p": started(stack, tmp_path / "p", *reads)}
        members |= {name: started(stack, tmp_path / name, "--cell-role", "decode") for name in "ab"}
        asyncio.run(scenario(members, port))
