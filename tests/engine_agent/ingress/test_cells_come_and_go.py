"""Cells die, drain, come and go under traffic, and no request that could be served fails."""

import asyncio
import contextlib
import random

import openai
import pytest

from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool, read_stream, waits
from tests.engine_agent.ingress.traffic import SteadyTraffic


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_dies_under_steady_traffic_and_no_request_fails(ingress: RunningIngress) -> None:
    async with FakeCell(step_s=0.02).running() as lives, FakeCell(step_s=0.02).running() as dies:
        await ingress.route(pool(lives, dies))
        await ingress.sees(**{lives.name: "up", dies.name: "up"})
        async with SteadyTraffic(ingress.url, per_s=50).flowing() as traffic:
            await traffic.until_sent(25)
            reports = len(ingress.reports)
            await dies.die()
            await ingress.sees(**{dies.name: "down"})
            assert len(ingress.reports) - reports <= 2, "the change was reported at once"
            await traffic.until_sent(25)
            await dies.start()
            await ingress.sees(**{dies.name: "up"})
            await traffic.until_sent(10)
    assert traffic.failures == []
    assert min(traffic.served.values()) >= 10


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_that_refuses_is_tried_elsewhere_and_a_sick_one_is_left_alone(ingress: RunningIngress) -> None:
    async with FakeCell().running() as good, FakeCell().running() as refuses, FakeCell().running() as sick:
        refuses.refuses = True
        sick.healthy = False
        await ingress.route(pool(good, refuses, sick))
        await ingress.sees(**{good.name: "up", refuses.name: "up", sick.name: "down"})
        async with ingress.client() as client:
            assert {await ask(client) for _ in range(10)} == {good.name}
        assert refuses.requests
        assert not sick.requests
        sick.healthy = True
        good.healthy = False
        await ingress.sees(**{good.name: "down", sick.name: "up"})
        async with ingress.client() as client:
            assert await ask(client) == sick.name


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_draining_cell_finishes_its_streams_and_gets_no_new_request(ingress: RunningIngress) -> None:
    async with FakeCell(chunks=5).running() as drains, FakeCell().running() as stays, ingress.client() as client:
        drains.release.clear()
        await ingress.route(pool(drains))
        await ingress.sees(**{drains.name: "up"})
        stream = asyncio.create_task(read_stream(client))
        await eventually(lambda: drains.in_flight == 1)
        await ingress.route(pool(drains, stays, draining=[drains]))
        await ingress.sees(**{drains.name: "drain", stays.name: "up"})
        assert {await ask(client) for _ in range(10)} == {stays.name}
        await ingress.route(pool(stays))
        assert not stream.done()
        drains.release.set()
        assert await stream == "0 1 2 3 4 "
        await eventually(lambda: len(ingress.running_servers) == 1, what="the drained server is removed when idle")


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_that_drains_itself_comes_back_when_it_says_so(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        cell.drains = True
        await ingress.sees(**{cell.name: "drain"})
        cell.drains = False
        await ingress.sees(**{cell.name: "up"})
        assert await ask(client) == cell.name


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_cell_that_the_table_drains_is_not_woken_by_its_health_check(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, FakeCell().running() as other:
        await ingress.route(pool(cell, other, draining=[cell]))
        await ingress.sees(**{cell.name: "drain", other.name: "up"})
        async with ingress.client() as client:
            assert {await ask(client) for _ in range(20)} == {other.name}
        await ingress.route(pool(cell, other))
        await ingress.sees(**{cell.name: "up"})


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_hundred_changes_of_cells_under_streams_break_none(ingress: RunningIngress) -> None:
    order = random.Random(5)
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell(chunks=40, step_s=0.02).running()) for _ in range(12)]
        client = await stack.enter_async_context(ingress.client())
        await ingress.route(pool(*cells[:6]))
        await ingress.sees(**{cell.name: "up" for cell in cells[:6]})
        worker = ingress.worker_pid
        routed, draining = cells[:6], list[FakeCell]()
        streams: list[asyncio.Task[str]] = []
        for _ in range(25):  # each changes four cells: adds one, removes one, starts or ends a drain, changes a limit
            routed.append(come := order.choice([cell for cell in cells if cell not in routed]))
            routed.remove(order.choice([cell for cell in routed if cell is not come]))
            draining = [order.choice(routed)]
            order.choice(routed).max_connections = order.choice([8, 16, 32])
            await ingress.route(pool(*routed, draining=draining))
            streams += [asyncio.create_task(read_stream(client)) for _ in range(4)]
        whole = "".join(f"{number} " for number in range(40))
        assert set(await asyncio.gather(*streams)) == {whole}
        assert ingress.worker_pid == worker, "servers changed without a reload"
        assert ingress.reports[-1].changes.reloads_total == 1, "the one that brought the pool"
        assert ingress.reports[-1].changes.applied_total >= 75
        await eventually(lambda: len(ingress.running_servers) == len(routed))
        assert sum(bool(cell.requests) for cell in cells) > 5


ATTEMPTS = 600


async def ask_if_known(client: openai.AsyncOpenAI, model: str) -> str | None:
    """The cell that responds; None while the model is unknown."""
    try:
        return await ask(client, model)
    except openai.NotFoundError:
        return None


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_pool_more_or_less_reloads_and_no_stream_breaks(ingress: RunningIngress) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cell = await stack.enter_async_context(FakeCell(chunks=20, step_s=0.02).running())
        other = await stack.enter_async_context(FakeCell().running())
        client = await stack.enter_async_context(ingress.client())
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        worker = ingress.worker_pid
        streams = [asyncio.create_task(read_stream(client)) for _ in range(10)]
        await eventually(lambda: cell.in_flight == 10)
        await ingress.route(pool(cell), pool(other, name="other", models=("other",)))
        await ingress.sees(**{other.name: "up"})
        name = None
        for _ in range(ATTEMPTS):  # the old worker answers the connections that it has accepted
            if (name := await ask_if_known(client, "other")) is not None:
                break
            await asyncio.sleep(0.1)
        assert name == other.name
        await ingress.route(pool(cell))
        assert ingress.worker_pid != worker
        assert set(await asyncio.gather(*streams)) == {"".join(f"{number} " for number in range(20))}


@pytest.mark.asyncio
@pytest.mark.processes
async def test_an_ingress_that_was_not_told_sends_nothing_to_a_cell_that_started_again(ingress: RunningIngress) -> None:
    async with FakeCell().running() as stale, FakeCell().running() as other, ingress.client() as client:
        await ingress.route(pool(stale, other))
        await ingress.sees(**{stale.name: "up", other.name: "up"})
        stale.generation = 2
        assert {await ask(client) for _ in range(10)} == {other.name}, "refused requests go elsewhere"
        await ingress.sees(**{stale.name: "down"})
        await ingress.route(pool(stale, other))
        await ingress.sees(**{stale.name: "up"})


@pytest.mark.asyncio
@pytest.mark.processes
async def test_a_generation_replaces_another_under_the_same_name(ingress: RunningIngress) -> None:
    async with FakeCell("a").running() as old, FakeCell("a").running() as new, ingress.client() as client:
        new.generation = 2
        await ingress.route(pool(old))
        await ingress.sees(a="up")
        await ingress.route(pool(new))
        await ingress.sees(a="up")
        await ask(client)
        assert (len(old.requests), len(new.requests)) == (0, 1)


BODY = b'{"model": "demo"}'


async def refused(ingress: RunningIngress) -> tuple[int, str]:
    """Status and code of an answer with Retry-After."""
    answer = await ingress.post(BODY)
    assert waits(answer.headers), answer.headers
    return answer.status_code, answer.json()["error"]["code"] if answer.content else "the cell's own"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_pool_whose_last_cell_refuses_everything_answers_every_request(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        assert [(await ingress.post(BODY)).status_code for _ in range(3)] == [200] * 3
        cell.refuses = True
        assert {await refused(ingress) for _ in range(30)} == {(503, "the cell's own")}
        assert ingress.cells[cell.name] == "up", "its health check decides, and no refusal"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_requests_in_flight_at_a_last_cell_that_dies_are_answered(ingress: RunningIngress) -> None:
    async with FakeCell(max_connections=8).running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        await asyncio.gather(*(ingress.post(BODY) for _ in range(8)))  # from now on connections are reused
        cell.release.clear()
        sent = [asyncio.create_task(refused(ingress)) for _ in range(8)]
        await eventually(lambda: cell.in_flight == 8)
        await cell.die()
        assert {status for status, _ in await asyncio.gather(*sent)} == {503}


@pytest.mark.processes
@pytest.mark.asyncio
async def test_two_cells_that_die_together_cost_no_request_while_a_third_lives(ingress: RunningIngress) -> None:
    async with FakeCell().running() as one, FakeCell().running() as two, FakeCell().running() as third:
        await ingress.route(pool(one, two, third))
        await ingress.sees(**{cell.name: "up" for cell in (one, two, third)})
        third.release.clear()
        busy: list[asyncio.Task[object]] = []
        while third.in_flight < 1:  # so that it is chosen last
            before = third.in_flight
            busy.append(asyncio.create_task(ingress.post(BODY)))
            await eventually(lambda: busy[-1].done() or third.in_flight > before)  # noqa: B023
        await one.die()
        await two.die()
        last = asyncio.create_task(ingress.post(BODY))
        await eventually(lambda: third.in_flight == 2)
        third.release.set()
        assert (await last).headers["x-switchyard-cell"] == third.name
        await asyncio.gather(*busy)
