"""What no cell can take is said in words, to who was on the way, too; and cells that die together cost no request."""

import asyncio

import pytest

from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool, waits

BODY = b'{"model": "demo"}'
pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


async def refused(ingress: RunningIngress) -> tuple[int, str]:
    """Status and code of an answer that says when to come back."""
    answer = await ingress.post(BODY)
    assert waits(answer.headers), answer.headers
    return answer.status_code, answer.json()["error"]["code"] if answer.content else "the cell's own"


async def test_a_pool_whose_last_cell_refuses_everything_answers_every_request(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        assert [(await ingress.post(BODY)).status_code for _ in range(3)] == [200] * 3
        cell.refuses = True
        assert {await refused(ingress) for _ in range(30)} == {(503, "the cell's own")}
        assert ingress.cells[cell.name] == "up", "its health check decides, and no refusal"


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


async def test_two_cells_that_die_together_cost_no_request_while_a_third_lives(ingress: RunningIngress) -> None:
    async with FakeCell().running() as one, FakeCell().running() as two, FakeCell().running() as third:
        await ingress.route(pool(one, two, third))
        await ingress.sees(**{cell.name: "up" for cell in (one, two, third)})
        third.release.clear()
        busy: list[asyncio.Task[object]] = []
        while third.in_flight < 1:  # so that it is the last that is chosen
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
