"""Ingresses of a region share a cell by the load that it reports: with a running HAProxy."""

from pathlib import Path

import openai  # noqa: F401 - loading it later would block the loop of the cells, whose checks would time out
import pytest
from msgspec.structs import replace

from engine_agent.ingress.running import RunningServer
from engine_agent.protocol.ingress_messages import Affinity
from engine_agent.protocol.proxy_messages import LOAD_VERSION, CellLoad
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOME, RunningIngress, ask, pool

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.asyncio]
BOTH = (f"i-{HOME}", f"i-{HOME}-b")
FULL = CellLoad(LOAD_VERSION, "c-a-g1", own=5, in_flight=16)


def server(ingress: RunningIngress, name: str = "c-a-g1") -> RunningServer:
    running = ingress.ingress.serving.running
    assert running is not None
    return next(each for each in running.servers if each.name == name)


async def until_limit_is(ingress: RunningIngress, limit: int) -> None:
    await eventually(lambda: server(ingress).max_connections == limit, what=f"limit {limit}")


async def test_a_full_cell_takes_no_more_requests_and_a_silent_one_keeps_its_limit(tmp_path: Path) -> None:
    async with FakeCell("c-a").running() as cell, RunningIngress(tmp_path / "home").running() as ingress:
        cell.load = FULL
        await ingress.route(pool(cell))
        await ingress.sees(c_a="up")
        assert server(ingress).max_connections == 16, "a single ingress counts for itself"
        await ingress.route(pool(cell), ingresses=BOTH)
        await until_limit_is(ingress, 5)
        seen = ingress.ingress.loads.reports_total
        cell.load = None
        await eventually(lambda: ingress.ingress.loads.reports_total == seen)
        worker = ingress.worker_pid
        await ingress.route(pool(cell, affinity=Affinity()), ingresses=BOTH)
        await eventually(lambda: ingress.worker_pid != worker, what="a new worker")
        await until_limit_is(ingress, 5)
        cell.load = replace(FULL, server="c-a-g2", in_flight=0)
        async with ingress.client() as client:
            assert await ask(client) == "c-a"
        assert server(ingress).max_connections == 5, "the load of another start does not count"
        cell.load = replace(FULL, own=0, in_flight=0)
        await until_limit_is(ingress, 16)
        cell.load = FULL
        await until_limit_is(ingress, 5)
        await eventually(lambda: "11 other requests" in ingress.reports[-1].cells["c-a"].why)
        await ingress.route(pool(cell))
        await until_limit_is(ingress, 16)


async def test_a_request_with_a_key_passes_its_cell_while_others_have_its_places(tmp_path: Path) -> None:
    async with (
        FakeCell("c-a").running() as full,
        FakeCell("c-b").running() as free,
        RunningIngress(tmp_path / "home").running() as ingress,
    ):
        full.load, free.load = replace(FULL, own=0), replace(FULL, server="c-b-g1", own=0, in_flight=0)
        await ingress.route(pool(full, free, affinity=Affinity()), ingresses=BOTH)
        await ingress.sees(c_a="up", c_b="up")
        await until_limit_is(ingress, 1)
        full.release.clear()
        free.release.clear()
        async with ingress.client() as client:
            streams = [
                await client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "hi"}], stream=True, user="one"
                )
                for _ in range(4)
            ]
            assert (full.in_flight, free.in_flight) in {(1, 3), (0, 4)}
            full.release.set()
            free.release.set()
            for stream in streams:
                await stream.close()
