"""A failure that a request causes in a cell harms that request only: cells stay in service, and two dropped connections
in any regions end it. Bodies without a model cost the ingress little."""

import asyncio
import contextlib
import csv
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, RunningIngress, pool
from tests.engine_agent.ingress.test_large_bodies import LONG, MIDDLE, body_of
from tests.engine_agent.ingress.test_spill import until_spill_is
from tests.engine_agent.ingress.traffic import BODY

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
SHORT = 100
SIZES = (SHORT, pytest.param(MIDDLE, marks=pytest.mark.long), LONG)
MANY = 12
"""Consecutive bad requests: more than any limit of failures that would take a cell out of service."""


PATIENT_MS = 20_000
"""The interval also limits the connection of a check. Here, busy cores must not take a cell down."""


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "home", check_interval_ms=PATIENT_MS).running() as running:
        yield running


async def times_down(ingress: RunningIngress) -> dict[str, int]:
    """How often each cell was down for HAProxy since it started."""
    rows = csv.DictReader((await ingress.haproxy.admin.send("show stat -1 4 -1")).lstrip("# ").splitlines())
    return {
        f"{row['pxname']}/{row['svname']}": int(row["chkdown"] or 0)
        for row in rows
        if row["pxname"].startswith("pool.")
    }


def delivered(cells: Iterable[FakeCell]) -> int:
    return sum(len(cell.requests) for cell in cells)


async def keep_connections(ingress: RunningIngress, cells: Iterable[FakeCell], size: int) -> None:
    """HAProxy fails differently on a connection that it has used before."""
    for _ in range(MANY):
        assert (await ingress.post(body_of(size))).status_code == 200
    for cell in cells:
        cell.requests.clear()


@pytest.mark.parametrize("size", SIZES)
async def test_a_request_that_every_cell_drops_reaches_two_of_them_and_none_goes_down(
    ingress: RunningIngress, size: int
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell().running()) for _ in range(4)]
        await ingress.route(pool(*cells))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        await keep_connections(ingress, cells, size)
        for cell in cells:
            cell.drops = True
        for number in range(1, MANY + 1):
            answer = await ingress.post(body_of(size))
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_cell_answer")
            assert delivered(cells) == 2 * number
        for cell in cells:
            cell.drops = False
        assert (await ingress.post(body_of(size))).status_code == 200
        assert not any((await times_down(ingress)).values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("here", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
async def test_two_dropped_connections_end_a_request_whichever_regions_they_are_in(
    ingress: RunningIngress, tmp_path: Path, size: int, here: float
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        away = await stack.enter_async_context(
            RunningIngress(tmp_path / "away", AWAY, check_interval_ms=PATIENT_MS).running()
        )
        cells = [await stack.enter_async_context(FakeCell().running()) for _ in range(4)]
        await away.route(pool(*cells[2:], spill=[ingress]))
        await away.sees(**{cell.name: "up" for cell in cells[2:]})
        await ingress.route(pool(*cells[:2], spill=[away], fractions={HOME: here, AWAY: 1.0 - here}))
        await ingress.sees(**{cell.name: "up" for cell in cells[:2]})
        await until_spill_is(True, ingress)
        await keep_connections(ingress, cells, size)
        for cell in cells:
            cell.drops = True
        for number in range(1, MANY + 1):
            answer = await ingress.post(body_of(size))
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_cell_answer")
            assert delivered(cells) == 2 * number
        assert delivered(cells[:2] if here else cells[2:]) == 2 * MANY
        assert not any((await times_down(ingress)).values())
        assert not any((await times_down(away)).values())


async def test_a_request_that_one_cell_drops_is_answered_by_another_one(ingress: RunningIngress) -> None:
    async with FakeCell().running() as drops, FakeCell().running() as serves:
        drops.drops = True
        await ingress.route(pool(drops, serves))
        await ingress.sees(**{drops.name: "up", serves.name: "up"})
        for size in (SHORT, MIDDLE, LONG):
            drops.requests.clear()
            while not drops.requests:
                answer = await ingress.post(body_of(size))
                assert (answer.status_code, answer.headers["x-switchyard-cell"]) == (200, serves.name)


async def test_answers_of_500_take_no_cell_out_of_service(ingress: RunningIngress) -> None:
    async with FakeCell().running() as good, FakeCell().running() as fails:
        fails.fails = True
        await ingress.route(pool(good, fails))
        await ingress.sees(**{good.name: "up", fails.name: "up"})
        for size in (SHORT, MIDDLE, LONG):
            statuses = [(await ingress.post(body_of(size))).status_code for _ in range(4 * MANY)]
            assert statuses.count(500) >= MANY
        fails.fails = False
        assert not any((await times_down(ingress)).values())
        assert set(ingress.cells.values()) == {"up"}


async def test_a_refused_connection_brings_the_next_check_forward(tmp_path: Path) -> None:
    """Otherwise the cell would be down after its next check, in a minute."""
    rare = RunningIngress(tmp_path / "home", check_interval_ms=60_000)
    async with rare.running(), FakeCell().running() as dies, FakeCell().running() as lives:
        await rare.route(pool(dies, lives))
        await rare.sees(**{dies.name: "up", lives.name: "up"})
        await dies.die()
        sent = [asyncio.create_task(rare.post(body_of(SHORT))) for _ in range(4)]
        await eventually(lambda: rare.cells[dies.name] == "down")
        assert {answer.headers["x-switchyard-cell"] for answer in await asyncio.gather(*sent)} == {lives.name}


LONG_WITHOUT_MODEL = b'{"a":[' + b"1," * 14_000 + b"1]}"
LARGE = b'{"a":"' + b"x" * 60_000 + b'"}'


async def statuses(ingress: RunningIngress, body: bytes, count: int) -> list[int]:
    return [(await ingress.post(body)).status_code for _ in range(count)]


@pytest.mark.parametrize(("body", "read"), [(LONG_WITHOUT_MODEL, 5), (LARGE, 9)])
async def test_a_source_that_sends_many_is_answered_unread_and_its_good_requests_go_on(
    ingress: RunningIngress, body: bytes, read: int
) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        answers = await statuses(ingress, body, 12)
        assert answers[0] == 400
        assert 400 not in answers[read:], answers
        assert await statuses(ingress, b"{}", 1) == [429]
        refused = await ingress.post(body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert await statuses(ingress, BODY, 3) == [200] * 3, "what names its model where it is found is not asked"
        assert await statuses(ingress, b'{"model":"nobody"}', 1) == [404]


async def test_a_client_with_a_mistake_is_told_what_is_wrong_many_times(ingress: RunningIngress) -> None:
    await ingress.route()
    assert await statuses(ingress, b'{"modell":"demo"}', 60) == [400] * 60


async def test_many_sources_together_have_one_budget(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        deep = b'{"a":' + b"[" * 30 + b"]" * 30 + b',"b":"' + b"x" * 30_000 + b'","model":"demo"}'
        answers = await asyncio.gather(*(ingress.post(deep) for _ in range(80)))
        assert {answer.status_code for answer in answers} == {200, 429}, "good ones are read within the same budget"
        assert await statuses(ingress, BODY, 3) == [200] * 3
