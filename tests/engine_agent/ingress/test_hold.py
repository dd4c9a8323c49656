"""Requests for a pool without cells wait for its first one, in limited number and time."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from time import time

import httpx
import msgspec
import pytest

from engine_agent.ingress.hold_socket import HOLD_SOCKET, HoldSocket
from engine_agent.ingress.settings import HoldLimits, IngressSettings
from engine_agent.protocol.ingress_messages import Hold, Pool, Withheld
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOP_SECRET, RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed

KIB = 1024
SIZES = (100, 100 * KIB, 300 * KIB)
FOR_S, COLD_START_S = 600, 90


def body_of(size: int = 100, model: str = "demo") -> bytes:
    text = '{"model": "%m", "prompt": "%s"}'.replace("%m", model)
    return text.replace("%s", "x" * (size - len(text) + 2)).encode()


def holding(
    *cells: FakeCell,
    for_s: int = FOR_S,
    ready_at: int = 0,
    withheld: Withheld = Withheld.NOTHING,
    **changes: object,
) -> Pool:
    hold = Hold(for_s, COLD_START_S, ready_at, withheld)
    return msgspec.structs.replace(pool(*cells, **changes), hold=hold)  # type: ignore[arg-type]


def held(ingress: RunningIngress) -> int:
    pools = ingress.reports[-1].telemetry.pools
    return sum(each.held for each in pools.values())


@contextlib.asynccontextmanager
async def asking(
    ingress: RunningIngress, count: int = 1, size: int = 100, headers: dict[str, str] | None = None
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """So many requests, one after the other, all on hold."""
    before, tasks = held(ingress), []
    for number in range(count):
        tasks.append(asyncio.create_task(ingress.post(body_of(size), **(headers or {}))))
        await eventually(lambda number=number: held(ingress) == before + number + 1)  # type: ignore[misc]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("secrets", [(), (HOP_SECRET,)], ids=["alone", "with other regions"])
@pytest.mark.processes
@pytest.mark.asyncio
async def test_requests_without_a_cell_are_answered_by_the_first_one(
    ingress: RunningIngress, secrets: tuple[str, ...]
) -> None:
    ingress.hop_secrets = secrets
    await ingress.route(holding())
    async with contextlib.AsyncExitStack() as stack:
        answers = {size: (await stack.enter_async_context(asking(ingress, size=size)))[0] for size in SIZES}
        cell = await stack.enter_async_context(FakeCell("first").running())
        await ingress.route(holding(cell))
        for answer in answers.values():
            response = await answer
            assert (response.status_code, response.headers["x-switchyard-cell"]) == (200, "first")
        assert {request.body for request in cell.requests} == {body_of(size) for size in SIZES}
    await eventually(lambda: held(ingress) == 0)
    counts = ingress.reports[-1].telemetry.pools["demo"]
    assert (counts.held_total, counts.released_total, counts.turned_away_total) == (3, 3, 0)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_the_first_that_waits_is_reported_at_once(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    reports = len(ingress.reports)
    async with asking(ingress):
        assert len(ingress.reports) == reports + 1


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_stream_gets_nothing_before_and_all_of_it_then(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    async with asking(ingress), ingress.client() as client:
        stream = asyncio.create_task(
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}], stream=True)
        )
        await eventually(lambda: held(ingress) == 2)
        async with FakeCell("first", chunks=3).running() as cell:
            await ingress.route(holding(cell))
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in await stream]) == "0 1 2 "


@pytest.mark.processes
@pytest.mark.asyncio
async def test_more_than_a_cell_takes_go_as_it_takes_them(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    async with asking(ingress, 6) as answers, FakeCell("first", max_connections=2, step_s=0.02).running() as cell:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(one.queued for one in ingress.reports[-1].telemetry.pools.values()))
                await asyncio.sleep(0.01)

        watcher = asyncio.create_task(watch())
        await ingress.route(holding(cell))
        assert {response.status_code for response in await asyncio.gather(*answers)} == {200}
        watcher.cancel()
        assert most <= 2, "the rest waits where it may for long"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_who_leaves_gives_up_the_place(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    async with asking(ingress, 3) as answers:
        for left, answer in enumerate((answers[1], answers[0]), start=1):
            answer.cancel()
            await eventually(lambda left=left: held(ingress) == 3 - left)  # type: ignore[misc]
        async with FakeCell("first").running() as cell:
            await ingress.route(holding(cell))
            assert (await answers[2]).status_code == 200
            assert len(cell.requests) == 1


def limited(folder: Path, **limits: int) -> RunningIngress:
    """Of 1,000 connections."""
    made = RunningIngress(folder / "limited")
    made.use(replace(made.settings, hold=HoldLimits(**limits)))
    return made


@pytest.mark.processes
@pytest.mark.asyncio
async def test_too_many_are_turned_away_with_the_time_that_is_left(tmp_path: Path) -> None:
    limits = {"connections_per_request": 500, "connections_per_long_request": 1000}
    async with limited(tmp_path, **limits).running() as ingress:
        await ingress.route(holding(ready_at=int(time()) + 400))
        async with asking(ingress, 2), asking(ingress, size=100 * KIB):
            for size in (100, 100 * KIB):
                answer = await ingress.post(body_of(size))
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_held")
                assert 300 <= int(answer.headers["retry-after"]) <= 400


@pytest.mark.processes
@pytest.mark.asyncio
async def test_one_tenant_does_not_take_every_place(tmp_path: Path) -> None:
    one, other = keyed(), keyed("4d5e6f70", tenant="dora")
    async with limited(tmp_path, connections_per_request=250).running() as ingress:
        await ingress.route(holding(), keys=(one.entry, other.entry), keys_required=True)
        async with asking(ingress, headers=one.headers):
            answer = await ingress.post(body_of(), **one.headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_held")
            async with asking(ingress, headers=other.headers):
                pass


@pytest.mark.processes
@pytest.mark.asyncio
async def test_too_late_is_a_503_in_either_form(ingress: RunningIngress) -> None:
    await ingress.route(holding(for_s=1))
    answer = await ingress.post(body_of())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_cell_in_time")
    assert answer.headers["retry-after"] == str(COLD_START_S)
    messages = await ingress.http.post("/v1/messages", content=body_of())
    assert (messages.status_code, messages.json()["type"]) == (503, "error")
    assert messages.json()["error"]["type"] == "overloaded_error"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_retry_after_is_what_is_left_of_the_start(ingress: RunningIngress) -> None:
    await ingress.route(holding(for_s=1, ready_at=int(time()) + 400))
    assert 300 <= int((await ingress.post(body_of())).headers["retry-after"]) <= 400
    await ingress.route(holding(for_s=1, ready_at=int(time()) - 40))
    assert int((await ingress.post(body_of())).headers["retry-after"]) == 5


@pytest.mark.processes
@pytest.mark.asyncio
async def test_who_cannot_wait_so_long_is_told_at_once(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    short = await ingress.post(body_of(), **{"X-Switchyard-Deadline-Ms": "20000"})
    assert (short.status_code, short.json()["error"]["code"]) == (503, "deadline_before_cell")
    async with asking(ingress, headers={"X-Switchyard-Deadline-Ms": "200000"}):
        pass


@pytest.mark.parametrize(
    ("by", "told"), [(Withheld.QUOTA, "quota of its team"), (Withheld.MACHINES, "higher priority")]
)
@pytest.mark.processes
@pytest.mark.asyncio
async def test_who_would_wait_for_a_cell_that_may_have_no_machines_is_told_at_once(
    ingress: RunningIngress, by: Withheld, told: str
) -> None:
    await ingress.route(holding())
    worker = ingress.worker_pid
    async with asking(ingress, 3) as waiting:
        await ingress.route(holding(withheld=by))
        for answer in [*(await asyncio.gather(*waiting)), await ingress.post(body_of())]:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cell_withheld")
            assert told in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == str(COLD_START_S)
    await ingress.route(holding())
    async with asking(ingress), FakeCell("first").running() as cell:
        await ingress.route(holding(cell))
    assert ingress.worker_pid == worker, "maps change without a reload"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_cell_that_is_there_serves_whatever_is_withheld(ingress: RunningIngress) -> None:
    async with FakeCell("first").running() as cell:
        await ingress.route(holding(cell, withheld=Withheld.QUOTA))
        assert (await ingress.post(body_of())).status_code == 200


@pytest.mark.processes
@pytest.mark.asyncio
async def test_batch_does_not_wait(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    answer = await ingress.post(body_of(), **{"X-Switchyard-Class": "batch"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_cell")


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_reload_loses_nobody(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    async with asking(ingress, 3) as answers:
        worker = ingress.worker_pid
        await ingress.route(holding(), pool(name="other", models=("other",)))
        await eventually(lambda: ingress.worker_pid != worker and held(ingress) == 3)
        async with FakeCell("first").running() as cell:
            await ingress.route(holding(cell), pool(name="other", models=("other",)))
            got = await asyncio.gather(*answers)
            assert {response.status_code for response in got} == {200}, [one.text for one in got]


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_agent_that_is_started_again_finds_them(ingress: RunningIngress) -> None:
    await ingress.route(holding())
    async with asking(ingress, 2) as answers:
        await ingress.die()
        later = RunningIngress(ingress.settings.state_dir)
        later.use(ingress.settings)
        async with FakeCell("first").running() as cell, later.running():
            later.revision = ingress.revision
            await eventually(lambda: held(later) == 2)
            await later.route(holding(cell))
            assert {response.status_code for response in await asyncio.gather(*answers)} == {200}


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_pool_that_does_not_hold_refuses_as_ever(ingress: RunningIngress) -> None:
    await ingress.route(holding(), pool(name="other", models=("other",)))
    answer = await ingress.post(body_of(model="other"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_cell")


@pytest.mark.processes
@pytest.mark.asyncio
async def test_what_another_region_can_serve_goes_there_and_is_held_only_where_it_came_in(tmp_path: Path) -> None:
    home, away = RunningIngress(tmp_path / "home"), RunningIngress(tmp_path / "away", AWAY)
    async with home.running(), away.running(), FakeCell("far").running() as far:
        await away.route(holding())
        await home.route(holding())
        async with asking(home) as (answer,):
            await away.route(holding(far))
            await home.route(holding(spill=[away]))
            assert (await answer).headers["x-switchyard-cell"] == "far"
        assert (await home.post(body_of())).headers["x-switchyard-region"] == AWAY


@pytest.mark.asyncio
async def test_rings_are_heard_and_one_at_the_end_leaves_nothing_open(tmp_path: Path) -> None:
    heard: list[None] = []
    bell = HoldSocket(IngressSettings("i-1", "us-east-1", tmp_path, port=1), lambda: heard.append(None))
    path = tmp_path / HOLD_SOCKET
    for turns in range(8):
        heard.clear()
        listening = asyncio.create_task(bell.listen())
        await eventually(lambda: path.exists() and path.stat().st_mode & 0o777 == 0o600)
        await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as last:
            first.connect(str(path))
            await eventually(lambda: heard)
            last.connect(str(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            assert first.recv(1) == b""
            path.unlink()
    gc.collect()  # pytest warns of open sockets, which fails the test
