"""A cell of two nodes with real processes: it starts, outlives its agents, reports faults, drains and stops."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from engine_agent.node import procfs
from engine_agent.node.accounts import Service, service_account
from engine_agent.node.planning.node import ProcessKind
from engine_agent.node.record import JOURNAL_FILE
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import Phase
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.node.agents import MODEL, Cell, running_cell
from tests.engine_agent.process_status import status_of

pytestmark = pytest.mark.processes


@pytest.fixture
def plane() -> FakeControlPlane:
    return FakeControlPlane()


@pytest_asyncio.fixture
async def cell(plane: FakeControlPlane, tmp_path: Path) -> AsyncIterator[Cell]:
    """A serving cell in generation 1."""
    async with plane.running(), running_cell(plane, tmp_path) as cell:
        await cell.order(1)
        await cell.say("ready", 1)
        yield cell


async def complete(cell: Cell, client: httpx.AsyncClient) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return await client.post(f"{cell.url}/v1/chat/completions", json=body)


def engines(cell: Cell) -> list[int | None]:
    return [node.observed.engine_pid for node in cell.nodes]


@pytest.mark.asyncio
async def test_a_cell_is_what_it_should_be_also_after_its_proxy_died(cell: Cell, subtests: pytest.Subtests) -> None:
    """One cell for all checks, because its agents, engines and proxy take a second of a processor to start."""
    for check in (
        it_serves_and_says_so_with_health_load_and_what_it_is,
        a_node_that_owns_a_part_of_its_machine_serves_on_it,
        engines_and_proxies_run_under_accounts_of_their_own_if_the_agent_is_root,
        a_dead_proxy_is_back_beside_the_same_engine,
    ):
        with subtests.test(check.__name__):
            await check(cell)


async def it_serves_and_says_so_with_health_load_and_what_it_is(cell: Cell) -> None:
    async with httpx.AsyncClient() as client:
        assert (await complete(cell, client)).status_code == 200
    report = await eventually(
        lambda: next((it for it in cell.leader.reports if it.load and it.load.requests_total), None)
    )
    assert report is not None
    assert report.health is not None
    assert report.health.ok
    assert (report.telemetry.engine_rss_bytes or 0) > 0
    hello = cell.plane.by_agent[cell.leader.id][0]
    assert hello.topology == ("a", "b")  # type: ignore[union-attr]
    assert hello.fingerprint.keys() >= {"kernel", "agent", "sim.engine", "sim.python"}  # type: ignore[union-attr]


async def a_node_that_owns_a_part_of_its_machine_serves_on_it(cell: Cell) -> None:
    owns = cell.follower.owns
    whole, part = engines(cell)
    assert owns is not None
    assert whole is not None
    assert part is not None
    assert procfs.environment(part)["SWITCHYARD_DEVICES"] == "cpu 1"
    assert "SWITCHYARD_DEVICES" not in procfs.environment(whole)
    assert os.sched_getaffinity(part) == set(owns.cpus)
    hello = cell.plane.by_agent[cell.follower.id][0]
    assert isinstance(hello, Hello)
    assert hello.inventory is not None
    assert (hello.inventory.cores, hello.inventory.memory_bytes) == (1, 2**30)


async def engines_and_proxies_run_under_accounts_of_their_own_if_the_agent_is_root(cell: Cell) -> None:
    kinds = {ProcessKind.ENGINE: service_account(Service.ENGINE), ProcessKind.PROXY: service_account(Service.PROXY)}
    for process in cell.leader.left():
        account = kinds[ProcessKind(procfs.environment(process.pid)[procfs.PROCESS_KIND_VARIABLE])]
        status = status_of(process.pid)
        assert status["Uid"] == str(account.uid if account else os.geteuid())
        if account:
            assert (status["NoNewPrivs"], int(status["CapPrm"], 16), int(status["CapAmb"], 16)) == ("1", 0, 0)
    private = [path for path in cell.leader.home.iterdir() if path.is_file()]
    assert {path.name for path in private} >= {"credential", "journal.json", "agent.lock"}
    readable = [path.name for path in private if path.stat().st_mode & 0o077 and path.name != "agent.log"]
    assert readable == [], "agent.log is the test's own"


async def a_dead_proxy_is_back_beside_the_same_engine(cell: Cell) -> None:
    before = engines(cell)
    (proxy,) = (found.pid for found in cell.leader.left() if found.pid != before[0])
    os.kill(proxy, 9)
    await cell.leader.says("starting", 1)
    await cell.leader.says("ready", 1)
    assert engines(cell) == before
    async with httpx.AsyncClient() as client:
        assert (await complete(cell, client)).status_code == 200


@pytest.mark.asyncio
async def test_agents_that_end_and_come_back_find_the_same_engines_and_no_request_fails(cell: Cell) -> None:
    before = engines(cell)
    proxies = [found.pid for found in cell.leader.left()]
    statuses: list[int] = []

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while True:
            statuses.append((await complete(cell, client)).status_code)

    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(keep_asking(client))
        cell.leader.kill_agent()
        await asyncio.to_thread(cell.follower.terminate_agent)
        heard = [len(node.reports) for node in cell.nodes]
        await eventually(lambda: len(statuses) >= 5)
        for node in cell.nodes:
            node.start_agent()
        for node, seen in zip(cell.nodes, heard, strict=True):
            await eventually(lambda node=node, seen=seen: len(node.reports) > seen, 30.0)  # type: ignore[misc]
            assert {report.observed.state.value for report in node.reports[seen:]} == {"ready"}, node.log()
        asked = len(statuses)
        await eventually(lambda: len(statuses) > asked)
        asking.cancel()
    assert engines(cell) == before
    assert [found.pid for found in cell.leader.left()] == proxies
    assert set(statuses) == {200}


@pytest.mark.long
@pytest.mark.asyncio
async def test_engines_that_serve_outlive_a_torn_and_a_lost_journal(cell: Cell) -> None:
    before, proxies = engines(cell), [found.pid for found in cell.leader.left()]
    torn, lost = (node.home / JOURNAL_FILE for node in cell.nodes)
    for node in cell.nodes:
        node.kill_agent()
    torn.write_bytes(torn.read_bytes()[:100])
    lost.unlink()
    seen = [len(node.reports) for node in cell.nodes]
    for node in cell.nodes:
        node.start_agent()
    for node, first in zip(cell.nodes, seen, strict=True):
        await eventually(lambda node=node, first=first: len(node.reports) > first, 30.0)  # type: ignore[misc]
        await node.says("ready", 1)
    assert engines(cell) == before
    assert [found.pid for found in cell.leader.left()] == proxies
    async with httpx.AsyncClient() as client:
        assert (await complete(cell, client)).status_code == 200


@pytest.mark.asyncio
async def test_a_dead_follower_is_told_by_both_nodes_and_a_new_generation_heals_the_cell(cell: Cell) -> None:
    old = engines(cell)
    cell.follower.kill_engine()
    follower = await cell.follower.says("failed", 1)
    leader = await cell.leader.says("failed", 1)
    assert follower.reason == "the engine was killed by SIGKILL"
    assert "follower" in leader.reason, leader.reason
    (fault,) = cell.follower.faults
    assert (fault.signature, fault.evidence["exit_code"], fault.evidence["rank"]) == ("engine_ended", -9, 1)
    assert fault.evidence["last_log_lines"]
    await cell.order(2)
    await cell.say("ready", 2)
    assert not set(old) & set(engines(cell))


@pytest.mark.asyncio
async def test_a_new_generation_replaces_a_healthy_one_whole_and_the_old_order_is_refused(cell: Cell) -> None:
    old = {found.pid for node in cell.nodes for found in node.left()}
    stale = cell.plane.orders[cell.leader.id]
    await cell.order(2)
    await cell.say("ready", 2)
    new = {found.pid for node in cell.nodes for found in node.left()}
    assert len(new) == 3
    assert not new & old
    await cell.plane.order(stale)
    await eventually(lambda: cell.leader.reports[-1].telemetry.refused_order)
    assert cell.leader.observed.generation == 2


@pytest.mark.asyncio
async def test_draining_finishes_what_runs_takes_nothing_new_and_keeps_the_engine_until_told_to_stop(
    cell: Cell,
) -> None:
    before = engines(cell)
    body = {"model": MODEL, "prompt": "long", "max_tokens": 100, "stream": True}
    url = f"{cell.url}/v1/completions"
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await cell.order(1, Phase.DRAIN)
        await cell.say("draining", 1)
        await is_refused(cell, client)
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert not any("error" in json.loads(line[6:]) for line in rest[:-1])
    assert engines(cell) == before
    await cell.order(1, Phase.STOP)
    await cell.say("idle", 1)
    assert [node.left() for node in cell.nodes] == [[], []]
    await cell.release()
    await cell.say("idle", 0)


async def is_refused(cell: Cell, client: httpx.AsyncClient) -> None:
    """Requests until one is rejected: the proxy gets the drain a moment after the node reports it."""
    async with asyncio.timeout(60):
        while (await complete(cell, client)).status_code != 503:
            pass


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_hardware_error_in_the_log_of_an_engine_that_died_is_a_fault_of_its_own(cell: Cell) -> None:
    with (cell.leader.home / "engine.log").open("a") as log:
        log.write("RuntimeError: nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE (1201)\n")
    cell.leader.kill_engine()
    await cell.leader.says("failed", 1)
    await eventually(lambda: "neuron_hbm_uncorrectable" in [fault.signature for fault in cell.leader.faults])
    assert "engine_ended" in [fault.signature for fault in cell.leader.faults]
