"""Requests go to another region by the table's shares, or when no cell here can serve, and never return."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, HOP_SECRET, RunningIngress, ask, pool
from tests.engine_agent.ingress.marks import marked

pytestmark = pytest.mark.processes

BODY = b'{"model": "demo"}'


@pytest_asyncio.fixture
async def away(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "away", AWAY).running() as running:
        yield running


async def until_spill_is(state: bool, ingress: RunningIngress) -> None:
    """Waits until this ingress sees that another region can (not) take requests."""

    def servers() -> set[bool]:
        running = ingress.ingress.serving.running
        return {server.usable for server in running.servers if server.backend == "spill.demo"} if running else set()

    await eventually(lambda: servers() == {state}, what=f"spill usable: {state}")


@pytest.mark.asyncio
async def test_without_a_usable_cell_here_another_region_serves_and_takes_over_again(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near").running() as near, FakeCell("far").running() as far, ingress.client() as client:
        await away.route(pool(far, spill=[ingress]))
        await ingress.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await ingress.sees(near="up")
        await until_spill_is(True, ingress)
        assert {await ask(client) for _ in range(10)} == {"near"}
        await near.die()
        await ingress.sees(near="down")
        assert await ask(client) == "far"
        assert far.requests[-1].headers["x-switchyard-hop"].startswith(f"{HOME}~|")
        crossed = await ingress.post(BODY)
        assert crossed.headers["x-switchyard-ingress"] == away.settings.ingress_id, "who chose the cell"
        await near.start()
        await ingress.sees(near="up")
        assert await ask(client) == "near"


@pytest.mark.asyncio
async def test_the_share_of_another_region_leaves_and_a_marked_request_stays(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near").running() as near, FakeCell("far").running() as far, ingress.client() as client:
        await away.route(pool(far))
        await ingress.route(pool(near, spill=[away], fractions={HOME: 0.5, AWAY: 0.5}))
        await ingress.sees(near="up")
        await until_spill_is(True, ingress)
        served = [await ask(client) for _ in range(100)]
        assert 20 < served.count("far") < 80  # 100 throws of a coin: outside once in 10^9
        stay = [await ingress.post_hop(BODY, **marked(HOP_SECRET)) for _ in range(20)]
        assert {answer.headers["x-switchyard-cell"] for answer in stay} == {"near"}
        worker = ingress.worker_pid
        await ingress.route(pool(near, spill=[away], fractions={HOME: 0.0, AWAY: 1.0}))
        assert {await ask(client) for _ in range(10)} == {"far"}
        assert ingress.worker_pid == worker, "shares change without a reload"
        await far.die()
        await until_spill_is(False, ingress)
        assert await ask(client) == "near", "with nobody else to serve, the cells here do"


@pytest.mark.asyncio
async def test_two_regions_without_cells_refuse_and_do_not_bounce(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near").running() as near, ingress.client() as client:
        await away.route(pool(spill=[ingress]))
        await ingress.route(pool(near, spill=[away]))
        await ingress.sees(near="up")
        await until_spill_is(True, away)
        refused = await away.post_hop(BODY, **marked(HOP_SECRET, HOME))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_cell")
        assert not near.requests
        await near.die()
        await ingress.sees(near="down")
        await until_spill_is(False, away)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        assert (await away.post(BODY)).status_code == 503


@pytest.mark.asyncio
async def test_a_region_dies_at_once_and_a_client_that_retries_sees_no_failure(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        near = await stack.enter_async_context(FakeCell("near").running())
        far = await stack.enter_async_context(FakeCell("far").running())
        client = await stack.enter_async_context(ingress.client(max_retries=2))
        await away.route(pool(far))
        await ingress.route(pool(near, spill=[away]), retry_after_s=1)
        await ingress.sees(near="up")
        await until_spill_is(True, ingress)
        await near.die()
        assert await ask(client) == "far"


@pytest.mark.asyncio
async def test_a_long_request_spills_once_like_a_short_one(ingress: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("far").running() as far:
        await away.route(pool(far))
        await ingress.route(pool(spill=[away]))
        await until_spill_is(True, ingress)
        for size in (100, 300 * 1024, 4 * 1024 * 1024):
            body = BODY.replace(b"hi", b"x" * (size - len(BODY) + 2))
            answer = await ingress.post(body)
            assert (answer.status_code, answer.headers["x-switchyard-cell"]) == (200, "far")
            assert far.requests[-1].body == body
            assert far.requests[-1].headers["x-switchyard-hop"].startswith(f"{HOME}~|")
            refused = await ingress.post_hop(body, **marked(HOP_SECRET, AWAY, body=body))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_cell")


@pytest.mark.asyncio
async def test_without_a_secret_no_request_leaves_its_region(ingress: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("far").running() as far:
        ingress.hop_secrets = ()
        await away.route(pool(far))
        await ingress.route(pool(spill=[away], fractions={AWAY: 1.0}))
        assert (await ingress.post(BODY)).json()["error"]["code"] == "no_ready_cell"
        assert not far.requests


@pytest.mark.asyncio
async def test_requests_in_flight_at_a_last_cell_that_dies_are_served_by_another_region(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near", max_connections=8).running() as near, FakeCell("far").running() as far:
        await away.route(pool(far, spill=[ingress]))
        await ingress.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await ingress.sees(near="up")
        await until_spill_is(True, ingress)
        near.release.clear()
        sent = [asyncio.create_task(ingress.post(body)) for body in (BODY,) * 6]
        await eventually(lambda: near.in_flight == 6)
        await near.die()
        answers = await asyncio.gather(*sent)
        assert [answer.status_code for answer in answers] == [200] * 6
        assert {answer.headers["x-switchyard-cell"] for answer in answers} == {"far"}
        assert {answer.headers["x-switchyard-region"] for answer in answers} == {AWAY}
        assert "x-switchyard-unserved" not in answers[0].headers


@pytest.mark.asyncio
async def test_a_last_cell_that_dies_while_the_other_region_refuses_is_503_and_asked_once(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near").running() as near, FakeCell("far").running() as far:
        await away.route(pool(far, spill=[ingress]))
        await ingress.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await ingress.sees(near="up")
        await until_spill_is(True, ingress)
        far.refuses = True
        near.release.clear()
        sent = asyncio.create_task(ingress.post(BODY))
        await eventually(lambda: near.in_flight == 1)
        await near.die()
        answer = await sent
        assert (answer.status_code, answer.headers["x-switchyard-cell"]) == (503, "far")
        assert "x-switchyard-unserved" not in answer.headers
