"""Overflow of a region's cells is tried once in another region with room, and only then refused."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from engine_agent.ingress.config import OVERFLOW_REFUSALS_PER_S, REGION_RETRIES
from engine_agent.ingress.settings import QUEUES
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, HOP_SECRET, RunningIngress, pool, waits
from tests.engine_agent.ingress.marks import marked
from tests.engine_agent.ingress.test_spill import until_spill_is

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

KIB = 1024
SIZES = (100, 100 * KIB, 300 * KIB)
"""Body sizes for the serving HAProxy, and for the parsers of medium and large bodies."""
FARTHER = "eu-west-1"
PATIENCE_S = 110
WAITING_PER_CELL = 0
"""One request can wait: HAProxy refuses the next."""


def body_of(size: int) -> bytes:
    text = '{"model": "demo", "prompt": "%s"}'
    return text.replace("%s", "x" * (size - len(text) + 2)).encode()


def without_queue(folder: Path, region: str, wait_s: int = PATIENCE_S) -> RunningIngress:
    made = RunningIngress(folder / region, region)
    queues = {
        each: replace(limits, wait_s=wait_s, waiting_per_cell=WAITING_PER_CELL) for each, limits in QUEUES.items()
    }
    made.use(replace(made.settings, queues=queues))
    return made


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with without_queue(tmp_path, HOME).running() as running:
        yield running


@pytest_asyncio.fixture
async def away(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with without_queue(tmp_path, AWAY).running() as running:
        yield running


class Busy:
    """Takes all places of a cell until the block ends, with one request in the queue."""

    def __init__(self, ingress: RunningIngress, cell: FakeCell) -> None:
        self._ingress, self._cell = ingress, cell
        self.answers: list[asyncio.Task[httpx.Response]] = []

    async def take(self, count: int, *, waiting: int = 0) -> None:
        self._cell.release.clear()
        for number in range(count):
            self.answers.append(asyncio.create_task(self._ingress.post(body_of(100))))
            await eventually(lambda number=number: self._cell.in_flight == number + 1)  # type: ignore[misc]
        for number in range(waiting):
            self.answers.append(asyncio.create_task(self._ingress.post(body_of(100))))
            await eventually(lambda number=number: queued(self._ingress) == number + 1)  # type: ignore[misc]

    async def end(self) -> None:
        self._cell.release.set()
        for answer in await asyncio.gather(*self.answers):
            assert answer.status_code == 200


@contextlib.asynccontextmanager
async def full(ingress: RunningIngress, cell: FakeCell) -> AsyncIterator[Busy]:
    """The cell is full, and so is its queue."""
    busy = Busy(ingress, cell)
    await busy.take(cell.max_connections, waiting=1)
    yield busy
    await busy.end()


def queued(ingress: RunningIngress) -> int:
    running = ingress.ingress.serving.running
    return sum(backend.queued for backend in running.backends) if running else 0


def sent_to(ingress: RunningIngress, region: str) -> int:
    """How many requests this ingress has sent to that region."""
    return ingress.reports[-1].telemetry.pools["demo"].spilled_to.get(region, 0)


async def test_what_a_full_pool_cannot_take_is_served_by_another_region(
    home: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near", max_connections=1).running() as near, FakeCell("far").running() as far:
        await away.route(pool(far, spill=[home]))
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await until_spill_is(True, home)
        async with full(home, near):
            for size, urgency in itertools.product(SIZES, ServingClass):
                answer = await home.post(body_of(size), **{"X-Switchyard-Class": urgency})
                assert (answer.status_code, answer.headers.get("x-switchyard-cell")) == (200, "far"), answer.text
                assert far.requests[-1].body == body_of(size)
                assert far.requests[-1].headers["x-switchyard-class"] == urgency
                assert far.requests[-1].headers["x-switchyard-hop"].startswith(f"{HOME}~|")
        assert len(near.requests) == 2
        await eventually(lambda: sent_to(home, AWAY) == len(SIZES) * len(ServingClass))
        assert home.reports[-1].telemetry.pools["demo"].requests_total == 2, "each request arrived once"


async def test_where_no_region_has_room_the_refusal_says_so_and_nobody_waits_elsewhere(
    home: RunningIngress, away: RunningIngress
) -> None:
    async with (
        FakeCell("near", max_connections=1).running() as near,
        FakeCell("far", max_connections=1).running() as far,
    ):
        await away.route(pool(far, spill=[home]))
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, home)
        async with full(home, near):
            busy = Busy(away, far)
            await busy.take(1)  # and no request waits there
            for size in SIZES:
                answer = await home.post(body_of(size))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
                assert waits(answer.headers)
                assert queued(away) == 0
            await busy.end()


async def test_a_full_region_does_not_hide_one_that_has_room(
    home: RunningIngress, away: RunningIngress, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        third = await stack.enter_async_context(without_queue(tmp_path, FARTHER).running())
        near, far, farther = [
            await stack.enter_async_context(FakeCell(name, max_connections=1).running())
            for name in ("near", "far", "farther")
        ]
        await away.route(pool(far))
        await third.route(pool(farther))
        await home.route(pool(near, spill=[away, third], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, home)
        async with full(home, near):
            busy = Busy(away, far)
            await busy.take(1)
            for size in SIZES * 4:
                answer = await home.post(body_of(size))
                assert (answer.status_code, answer.headers.get("x-switchyard-cell")) == (200, "farther"), answer.text
            await busy.end()


async def test_when_every_cell_here_refuses_another_region_serves(home: RunningIngress, away: RunningIngress) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell().running()) for _ in range(8)]
        far = await stack.enter_async_context(FakeCell("far").running())
        await away.route(pool(far, spill=[home]))
        await home.route(pool(*cells, spill=[away], fractions={HOME: 1.0}))
        await home.sees(**{cell.name: "up" for cell in cells})
        await until_spill_is(True, home)
        for cell in cells:
            cell.refuses = True
        for size in SIZES * 4:
            answer = await home.post(body_of(size))
            assert (answer.status_code, answer.headers.get("x-switchyard-cell")) == (200, "far"), answer.text
        assert sum(len(cell.requests) for cell in cells) <= len(SIZES) * 4 * 12, (
            "and its own cells were tried before, in bounds"
        )


async def test_a_wait_that_ends_without_a_cell_ends_in_another_region(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(without_queue(tmp_path, HOME, wait_s=1).running())
        away = await stack.enter_async_context(without_queue(tmp_path, AWAY).running())
        near = await stack.enter_async_context(FakeCell("near", max_connections=1).running())
        far = await stack.enter_async_context(FakeCell("far").running())
        await away.route(pool(far, spill=[home]))
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await until_spill_is(True, home)
        busy = Busy(home, near)
        await busy.take(1)
        for size in SIZES:
            answer = await home.post(body_of(size))
            assert (answer.status_code, answer.headers.get("x-switchyard-cell")) == (200, "far"), answer.text
        await busy.end()


async def test_a_share_that_its_region_refuses_is_served_at_home(home: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("near").running() as near, FakeCell("far", max_connections=1).running() as far:
        await away.route(pool(far))
        await home.route(pool(near, spill=[away], fractions={HOME: 0.0, AWAY: 1.0}))
        await home.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, home)
        async with full(away, far):
            for size in SIZES:
                answer = await home.post(body_of(size))
                assert (answer.status_code, answer.headers.get("x-switchyard-cell")) == (200, "near"), answer.text


async def test_a_pool_that_may_go_nowhere_stays(home: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("near", max_connections=1).running() as near, FakeCell("far").running() as far:
        await away.route(pool(far))
        await home.route(pool(near, fractions={HOME: 1.0}))
        await home.sees(near="up")
        async with full(home, near):
            for size in SIZES:
                answer = await home.post(body_of(size))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
                assert waits(answer.headers)
        near.refuses = True
        assert [(await home.post(body_of(size))).status_code for size in SIZES] == [503] * len(SIZES)
        assert not far.requests


async def test_a_marked_request_that_is_refused_goes_no_further(home: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("near").running() as near, FakeCell("far", max_connections=1).running() as far:
        await home.route(pool(near))
        await away.route(pool(far, spill=[home], fractions={AWAY: 1.0}))
        await away.sees(far="up")
        await until_spill_is(True, away)
        bodies = [body_of(size) for size in SIZES]
        async with full(away, far):
            for body in bodies:
                refused = await away.post_hop(body, **marked(HOP_SECRET, HOME, body=body))
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        far.refuses = True
        for body in bodies:
            assert (await away.post_hop(body, **marked(HOP_SECRET, HOME, body=body))).status_code == 503
        assert not near.requests


async def test_the_less_urgent_the_more_must_be_free_elsewhere(home: RunningIngress, away: RunningIngress) -> None:
    async with (
        FakeCell("near", max_connections=1).running() as near,
        FakeCell("far", max_connections=20).running() as far,
    ):
        await away.route(pool(far))
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, home)

        async def is_taken(urgency: ServingClass) -> bool:
            """By the other region, where it stays until the end."""
            before = far.in_flight
            sent = asyncio.create_task(home.post(body_of(100), **{"X-Switchyard-Class": urgency}))
            await eventually(lambda: sent.done() or far.in_flight > before)
            if far.in_flight > before:
                busy.answers.append(sent)
                return True
            assert sent.result().json()["error"]["code"] == "queue_full"
            return False

        async with full(home, near):
            busy = Busy(away, far)
            await busy.take(9)
            assert await is_taken(ServingClass.BATCH)
            assert not await is_taken(ServingClass.BATCH), "10 of 20 are in use"
            for _ in range(5):
                assert await is_taken(ServingClass.NEAR_REALTIME)
            assert not await is_taken(ServingClass.NEAR_REALTIME), "15 of 20 are in use"
            for _ in range(3):
                assert await is_taken(ServingClass.REALTIME)
            assert not await is_taken(ServingClass.REALTIME), "18 of 20 are in use: the last are for its own"
            own = asyncio.create_task(away.post(body_of(100)))
            await eventually(lambda: far.in_flight == 19)
            busy.answers.append(own)
            await busy.end()


async def test_a_fleet_without_room_is_offered_little(home: RunningIngress, away: RunningIngress) -> None:
    async with (
        FakeCell("near", max_connections=1).running() as near,
        FakeCell("far", max_connections=1).running() as far,
    ):
        await away.route(pool(far))
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, home)
        async with full(home, near):
            busy = Busy(away, far)
            await busy.take(1)
            began_s = asyncio.get_running_loop().time()
            for _ in range(100):
                answer = await home.post(body_of(100))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
            lasted_s = asyncio.get_running_loop().time() - began_s
            await eventually(lambda: sent_to(home, AWAY) > 0)
            tries = REGION_RETRIES + 1
            assert sent_to(home, AWAY) <= tries * (OVERFLOW_REFUSALS_PER_S + 1) * (lasted_s + 1)
            await busy.end()


async def test_applications_cannot_say_what_ingresses_say(home: RunningIngress, away: RunningIngress) -> None:
    async with FakeCell("near", max_connections=1).running() as near:
        await home.route(pool(near, spill=[away], fractions={HOME: 1.0}))
        await home.sees(near="up")
        said = {"X-Switchyard-Overflow": "1", "X-Switchyard-Attempt": "short-1", "X-Switchyard-Pool": "pool.other"}
        for size in SIZES:
            for _ in range(3):
                answer = await home.post(body_of(size), **said)
                assert answer.status_code == 200
                assert not {"x-switchyard-overflow", "x-switchyard-attempt"} & near.requests[-1].headers.keys()
                internal = {"x-switchyard-unserved", "x-switchyard-trail", "x-switchyard-model"}
                assert not internal & answer.headers.keys()
