"""A request goes to the cell that has its text in its cache, otherwise to its sticky cell."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine_agent.cell_proxy.prefix_index import read_prefixes
from engine_agent.ingress.cache_feed import CellPrefixes
from engine_agent.protocol.ingress_messages import Affinity, Pool
from engine_agent.protocol.proxy_messages import (
    MAX_PREFIXES,
    BadChanges,
    BlockChanges,
    BlocksRemoved,
    BlocksStored,
    PrefixChanges,
    packed,
)
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell, Request
from tests.engine_agent.ingress.ingresses import AWAY, HOME, RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.test_spill import until_spill_is

PREFIXES, MATCHED = "x-switchyard-cache-prefixes", "x-switchyard-cache-matched"
SCOPE = "x-switchyard-cache-scope"
LONG = "It was a dark and stormy night. " * 200
processes = pytest.mark.processes
_keys = (f"key {number}" for number in itertools.count())


def by_cache(*cells: FakeCell, **more: Any) -> Pool:
    return replace(pool(*cells, affinity=Affinity(), **more), by_cache=True)


@contextlib.asynccontextmanager
async def cells_by_cache(ingress: RunningIngress, count: int = 4, **more: Any) -> AsyncIterator[list[FakeCell]]:
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell(f"c-{at}", **more).running()) for at in range(count)]
        for cell in cells:
            cell.cache.apply(BlockChanges("engine", 0, True, 16, ()))
        await ingress.route(by_cache(*cells))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        await eventually(lambda: len(ingress.ingress.caches.counts()) == count)
        yield cells


async def ask(ingress: RunningIngress, text: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """Sends a request with a new key each time, so that it has no sticky cell."""
    request = {"model": "demo", "prompt_cache_key": next(_keys), **body}
    request["messages"] = [{"role": "user", "content": text}]
    answer = await ingress.post(json.dumps(request).encode(), **(headers or {}))
    assert answer.status_code == 200, answer.text
    return answer


def last(cells: list[FakeCell]) -> tuple[FakeCell, Request]:
    """The cell and the only request since the last call."""
    ((cell, request),) = [(cell, request) for cell in cells for request in cell.requests]
    cell.requests.clear()
    return cell, request


def compute(cell: FakeCell, request: Request, number: int) -> tuple[int, ...]:
    """The engine reads it: a block for every 16 bytes of text."""
    known = read_prefixes(request.headers[PREFIXES].encode())
    assert known is not None
    blocks = tuple(number * 1000 + at for at in range(1, 1 + known.text_bytes // 16))
    cell.cache.begin(f"x-{number}", known)
    cell.cache.count(f"x-{number}", 16 * len(blocks))
    cell.cache.apply(BlockChanges("engine", number, False, 16, (BlocksStored(0, blocks, f"x-{number}"),)))
    return blocks


async def found(ingress: RunningIngress, cells: list[FakeCell], text: str, **body: Any) -> tuple[FakeCell, int]:
    """Sends the text until the ingress knows a cell that has it. Returns that cell and the matched bytes."""
    async with asyncio.timeout(60):
        while True:
            await ask(ingress, text, **body)
            cell, request = last(cells)
            if matched := int(request.headers.get(MATCHED, 0)):
                return cell, matched
            await asyncio.sleep(0.01)


@processes
@pytest.mark.asyncio
async def test_the_cell_that_has_most_of_a_text_gets_it_whatever_its_key(ingress: RunningIngress) -> None:
    async with cells_by_cache(ingress) as cells:
        await ask(ingress, LONG)
        first, request = last(cells)
        blocks = compute(first, request, 1)
        cell, matched = await found(ingress, cells, LONG + "And then?")
        assert cell is first
        assert len(LONG) / 2 < matched <= len(LONG) + 100
        cell, matched = await found(ingress, cells, LONG * 30)
        assert cell is first, "a body parser names the beginnings of what is longer"
        assert matched <= len(LONG) * 1.1
        first.cache.apply(BlockChanges("engine", 2, False, 16, (BlocksRemoved(blocks[len(blocks) // 2 :]),)))
        less = matched
        async with asyncio.timeout(60):
            while less >= matched:
                _, less = await found(ingress, cells, LONG)
        assert matched / 3 < less < matched * 2 / 3


@processes
@pytest.mark.asyncio
async def test_what_may_leave_the_region_goes_by_caches_too_and_brings_no_names_of_its_own(
    ingress: RunningIngress, tmp_path: Path
) -> None:
    forged = {"X-Switchyard-Cache-Prefixes": "9999:256:0123456789ab"}
    async with (
        RunningIngress(tmp_path / "away", AWAY).running() as away,
        FakeCell("c-away").running() as far,
        cells_by_cache(ingress) as cells,
    ):
        await away.route(pool(far))
        await ingress.route(by_cache(*cells, spill=[away], fractions={HOME: 1.0}))
        await until_spill_is(True, ingress)
        await ask(ingress, LONG, forged)
        first, request = last(cells)
        assert "0123456789ab" not in request.headers[PREFIXES]
        compute(first, request, 1)
        assert (await found(ingress, cells, LONG))[0] is first


@processes
@pytest.mark.asyncio
async def test_what_stands_before_the_text_makes_it_another_one(ingress: RunningIngress) -> None:
    """Tools, anywhere in the body, and the salt of a client."""
    async with cells_by_cache(ingress) as cells:
        await ask(ingress, LONG, tools=[{"type": "function", "function": {"name": "a"}}])
        first, request = last(cells)
        compute(first, request, 1)
        assert (await found(ingress, cells, LONG, tools=[{"type": "function", "function": {"name": "a"}}]))[0] is first
        for other in ({}, {"tools": [{"type": "function", "function": {"name": "b"}}]}, {"cache_salt": "x"}):
            await ask(ingress, LONG, **other)
            assert int(last(cells)[1].headers.get(MATCHED, 0)) == 0, other


@processes
@pytest.mark.asyncio
async def test_a_crowded_cell_is_passed_over(ingress: RunningIngress) -> None:
    async with cells_by_cache(ingress, 2, max_connections=2) as cells, asyncio.TaskGroup() as group:
        await ask(ingress, LONG)
        first, request = last(cells)
        compute(first, request, 1)
        assert (await found(ingress, cells, LONG))[0] is first
        for cell in cells:
            cell.release.clear()
        for number in range(4):
            # One after the other: of requests in the same instant, none counts yet when the others are placed.
            group.create_task(ask(ingress, LONG))
            await eventually(lambda wanted=number + 1: sum(cell.in_flight for cell in cells) == wanted)  # type: ignore[misc]
        assert [cell.in_flight for cell in cells] == [2, 2]
        for cell in cells:
            cell.release.set()


@processes
@pytest.mark.asyncio
async def test_cells_that_do_not_tell_are_found_by_their_keys(ingress: RunningIngress) -> None:
    async with cells_by_cache(ingress) as cells:
        await ask(ingress, LONG)
        first, request = last(cells)
        compute(first, request, 1)
        assert (await found(ingress, cells, LONG))[0] is first
        first.cache.lose()
        await eventually(lambda: len(ingress.ingress.caches.counts()) == len(cells) - 1)
        names = set()
        for turn in range(6):
            await ask(ingress, LONG + str(turn), prompt_cache_key="one")
            names.add(last(cells)[0].name)
        assert len(names) == 1


@processes
@pytest.mark.asyncio
async def test_tenants_find_their_own_prompts_only_and_nobody_sends_the_headers_himself(
    ingress: RunningIngress,
) -> None:
    forged = {"X-Switchyard-Cache-Prefixes": "9999:256:0123456789ab", "X-Switchyard-Cache-Scope": "tenant:umbrella"}
    key = keyed()
    async with cells_by_cache(ingress) as cells:
        await ask(ingress, LONG, forged)
        _, request = last(cells)
        assert "0123456789ab" not in request.headers[PREFIXES]
        assert request.headers[SCOPE] == "tenant:"
        nobodys = request.headers[PREFIXES]
        await ingress.route(by_cache(*cells), keys=(key.entry,))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        await ask(ingress, LONG, {**forged, **key.headers})
        _, request = last(cells)
        assert request.headers[SCOPE] == "tenant:rufus"
        assert request.headers[PREFIXES].rpartition(":")[2] != nobodys.rpartition(":")[2]
        shared = replace(by_cache(*cells), shares_caches=True)
        await ingress.route(shared, keys=(key.entry,))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        await ask(ingress, LONG, {**forged, **key.headers})
        _, request = last(cells)
        assert SCOPE not in request.headers


def test_a_list_becomes_lines_and_one_that_is_lost_is_gone() -> None:
    cell = CellPrefixes()
    assert list(cell.apply("s", PrefixChanges("L", 1, True, False, b"", b""))) == []
    assert cell.query == "?life=L&after=1"
    with pytest.raises(BadChanges, match="changes of an unknown list"):
        list(cell.apply("s", PrefixChanges("L", 2, False, True, b"", b"")))
    assert list(cell.apply("s", PrefixChanges("L", 3, True, True, packed([1, 2]), b""))) == [
        "whole s\n",
        "add s 000000000001000000000002\n",
    ]
    lines = list(cell.apply("s", PrefixChanges("L", 4, False, True, packed([3]), packed([1]))))
    assert lines == ["del s 000000000001\n", "add s 000000000003\n"]
    assert cell.known == {2, 3}
    assert list(cell.lose("s")) == ["gone s\n"]
    assert list(cell.lose("s")) == []


def test_a_cell_cannot_make_its_list_longer_than_any() -> None:
    cell = CellPrefixes()
    list(cell.apply("s", PrefixChanges("L", 1, True, True, packed(list(range(MAX_PREFIXES))), b"")))
    with pytest.raises(BadChanges, match="lists 32768 at most"):
        list(cell.apply("s", PrefixChanges("L", 2, False, True, packed([2**40]), b"")))
