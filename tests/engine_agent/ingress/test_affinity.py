"""Requests of one conversation go to the same cell, as long as it has room."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.haproxy import LOG_FILE
from engine_agent.ingress.routing_maps import cells_entry
from engine_agent.protocol.ingress_messages import Affinity, Pool
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = pytest.mark.processes


@contextlib.asynccontextmanager
async def cells_of_pool(ingress: RunningIngress, count: int, **options: Any) -> AsyncIterator[list[FakeCell]]:
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell(f"c-{at}", **options).running()) for at in range(count)]
        await routed(ingress, cells)
        yield cells


async def routed(ingress: RunningIngress, cells: list[FakeCell]) -> None:
    await ingress.route(pool(*cells, affinity=Affinity()))
    await ingress.sees(**{cell.name: "up" for cell in cells})


async def ask(ingress: RunningIngress, headers: dict[str, str] | None = None, **body: Any) -> str:
    answer = await ingress.post(json.dumps({"model": "demo", **body}).encode(), **(headers or {}))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-switchyard-cell"]


async def hands_over_its_table(ingress: RunningIngress) -> None:
    """Waits until the worker hands its table to the next one: 10 s after the first start."""
    async with asyncio.timeout(60):
        while "resync_timeout=<PAST>" not in await ingress.haproxy.admin.send("show peers"):  # noqa: ASYNC110 - nothing says so
            await asyncio.sleep(0.1)


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.asyncio
async def test_a_conversation_is_known_by_what_it_says_of_itself_or_how_it_begins(ingress: RunningIngress) -> None:
    first, answer, more = said("user", "why?"), said("assistant", "because"), said("user", "and?")
    system = said("system", "Be brief.")
    parts = said("user", [{"type": "text", "text": "a picture"}])
    same: list[list[dict[str, Any]]] = [
        [{"prompt_cache_key": "k", "user": "x"}, {"prompt_cache_key": "k", "user": "y", "messages": [first]}],
        [{"user": "u"}, {"user": "u", "messages": [first]}],
        [{"messages": [first]}, {"messages": [first, answer, more]}],
        [{"messages": [system, first]}, {"messages": [system, first, answer, more]}],
        [{"messages": [parts]}, {"messages": [parts, answer, more]}],
        [{"prompt": "once " * 600}, {"prompt": "once " * 600 + "more"}],
        [{"input": "hello"}, {"input": "hello", "stream": False}],
        [{"prompt": "x" * 100_000}, {"prompt": "x" * 100_000 + "longer"}],
        [{"prompt": "x" * 300_000}, {"prompt": "x" * 300_000 + "long"}],
    ]
    async with cells_of_pool(ingress, 8):
        for turns in same:
            assert len({await ask(ingress, **turn) for turn in turns * 2}) == 1, turns
        assert len({await ask(ingress, {"X-Session-Id": "s"}, messages=[said("user", str(n))]) for n in range(6)}) == 1
        assert len({await ask(ingress, messages=[system, said("user", str(n))]) for n in range(20)}) > 3
        assert len({await ask(ingress, prompt_cache_key=str(n)) for n in range(20)}) > 3


@pytest.mark.asyncio
async def test_a_new_cell_takes_new_keys_alone_and_a_lost_one_gives_only_its_own(ingress: RunningIngress) -> None:
    async def sticky_cells() -> list[str]:
        return [await ask(ingress, prompt_cache_key=str(number)) for number in range(60)]

    async with cells_of_pool(ingress, 4) as cells, FakeCell("c-new").running() as new:
        before = await sticky_cells()
        assert max(Counter(before).values()) < 30
        worker = ingress.worker_pid
        await routed(ingress, [*cells, new])
        assert await sticky_cells() == before
        assert "c-new" in {await ask(ingress, prompt_cache_key=f"new {number}") for number in range(10)}
        await ingress.route(pool(*cells, new, draining=[cells[0]], affinity=Affinity()))
        await ingress.sees(**{"c-0": "drain"})
        drained = await sticky_cells()
        assert all(later == earlier for earlier, later in zip(before, drained, strict=True) if earlier != "c-0")
        assert "c-0" not in drained
        await routed(ingress, [*cells, new])
        cells[1].drains = True
        await ingress.sees(**{"c-1": "drain"})
        assert "c-1" not in await sticky_cells()
        assert ingress.worker_pid == worker, "cells change without a reload"


@pytest.mark.asyncio
async def test_a_reload_keeps_every_key_at_home(ingress: RunningIngress) -> None:
    async with cells_of_pool(ingress, 4) as cells:
        before = {key: await ask(ingress, prompt_cache_key=key) for key in map(str, range(20))}
        worker = ingress.worker_pid
        await hands_over_its_table(ingress)
        await ingress.route(pool(*cells, affinity=Affinity()), pool(name="more", models=("more",)))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        assert ingress.worker_pid != worker
        assert "Aborted" not in (ingress.settings.state_dir / LOG_FILE).read_text()
        # backwards: keys without a cell get cells in turn, which could be the same ones forwards
        assert {key: await ask(ingress, prompt_cache_key=key) for key in reversed(before)} == before


@pytest.mark.asyncio
async def test_a_crowded_cell_gives_its_key_to_the_next_and_the_pool_has_one_queue(ingress: RunningIngress) -> None:
    async with cells_of_pool(ingress, 3, max_connections=4) as cells, asyncio.TaskGroup() as group:
        for cell in cells:
            cell.release.clear()
        for number in range(12):
            group.create_task(ask(ingress, prompt_cache_key="one"))
            await eventually(lambda number=number: sum(cell.in_flight for cell in cells) == number + 1)  # type: ignore[misc]
            if number == 1:
                assert sorted(cell.in_flight for cell in cells) == [0, 1, 1], "2 would be above 1.25 of the mean"
        assert [cell.in_flight for cell in cells] == [4, 4, 4]
        group.create_task(ask(ingress, prompt_cache_key="one"))
        running = ingress.ingress.serving.running
        assert running is not None
        await eventually(lambda: [b.queued for b in ingress.ingress.serving.running.backends if b.queued] == [1])  # type: ignore[union-attr]
        assert all(server.queued == 0 for server in ingress.ingress.serving.running.servers)  # type: ignore[union-attr]
        cells[2].release.set()
        await eventually(lambda: len(cells[2].requests) == 5, what="whichever cell is free takes from the queue")
        for cell in cells:
            cell.release.set()


@pytest.mark.asyncio
async def test_a_lightly_loaded_cell_keeps_its_key_whatever_the_mean(ingress: RunningIngress) -> None:
    async with cells_of_pool(ingress, 3, max_connections=16) as cells, asyncio.TaskGroup() as group:
        for cell in cells:
            cell.release.clear()
        for number in range(4):
            group.create_task(ask(ingress, prompt_cache_key="one"))
            await eventually(lambda number=number: sum(cell.in_flight for cell in cells) == number + 1)  # type: ignore[misc]
        assert sorted(cell.in_flight for cell in cells) == [0, 0, 4]
        for cell in cells:
            cell.release.set()


@pytest.mark.asyncio
async def test_the_cell_of_a_key_refuses_or_dies_and_another_answers(ingress: RunningIngress) -> None:
    async with cells_of_pool(ingress, 3) as cells:
        sticky = await ask(ingress, prompt_cache_key="one")
        cell = next(cell for cell in cells if cell.name == sticky)
        cell.refuses = True
        assert await ask(ingress, prompt_cache_key="one") != sticky
        cell.refuses = False
        await cell.die()
        assert await ask(ingress, prompt_cache_key="one") != sticky


@pytest.mark.parametrize("bound", [0.9, float("inf"), float("nan")])
def test_a_bound_that_cannot_be_kept_is_refused(bound: float) -> None:
    with pytest.raises(BadTable, match="load_bound of pool chat must be 1 or more"):
        cells_entry(Pool("chat", ("chat",), "realtime", (), (), {}, Affinity(bound)), ())
