"""HAProxy outlives its agent, is restarted when it exits, and keeps the last valid table."""

import asyncio
import errno
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from engine_agent.ingress import agent
from engine_agent.node import procfs
from engine_agent.protocol.ingress_messages import RoutingTable
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import HOME, RunningIngress, ask, pool, read_stream
from tests.engine_agent.node.test_processes import MAY_GO_FIRST, nice_of_session

pytestmark = pytest.mark.processes


@pytest.mark.asyncio
async def test_a_killed_haproxy_is_back_with_the_same_table(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell))
        for victim in ("master", "worker"):
            await ingress.sees(**{cell.name: "up"})
            pid = ingress.haproxy.pid
            assert pid is not None
            os.kill(pid if victim == "master" else ingress.worker_pid, signal.SIGKILL)
            await eventually(lambda pid=pid: ingress.reports[-1].observed.haproxy_pid not in (None, pid))  # type: ignore[misc]
            await ingress.sees(**{cell.name: "up"})
            assert await ask(client) == cell.name
        assert ingress.revision_in_force == 1


@pytest.mark.asyncio
async def test_a_haproxy_that_answers_nothing_is_replaced(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home")
    ingress.use(replace(ingress.settings, times=replace(ingress.settings.times, silent_after_s=0.5)))
    async with ingress.running():
        pid = ingress.haproxy.pid
        os.kill(ingress.worker_pid, signal.SIGSTOP)
        await eventually(lambda: ingress.reports[-1].observed.haproxy_pid not in (None, pid))


@pytest.mark.asyncio
async def test_a_new_agent_adopts_the_running_haproxy_and_its_streams(tmp_path: Path) -> None:
    async with FakeCell(chunks=3).running() as cell:
        earlier = RunningIngress(tmp_path / "home")
        async with earlier.running(), earlier.client() as client:
            await earlier.route(pool(cell))
            await earlier.sees(**{cell.name: "up"})
            cell.release.clear()
            stream = asyncio.create_task(read_stream(client))
            await eventually(lambda: cell.in_flight == 1)
            await earlier.die()
            later = RunningIngress(tmp_path / "home")
            later.use(earlier.settings)
            async with later.running():
                await later.sees(**{cell.name: "up"})
                assert later.revision_in_force == 1
                assert later.haproxy.pid == earlier.haproxy.pid
                assert earlier.haproxy.pid is not None
                assert nice_of_session(earlier.haproxy.pid) == (procfs.FIRST_NICE if MAY_GO_FIRST else 0)
                assert later.worker_pid == earlier.worker_pid
                cell.release.set()
                assert await stream == "0 1 2 "


@pytest.mark.asyncio
async def test_without_a_running_haproxy_the_journal_is_served_at_once(tmp_path: Path) -> None:
    async with FakeCell().running() as cell:
        earlier = RunningIngress(tmp_path / "home")
        async with earlier.running():
            await earlier.route(pool(cell))
        later = RunningIngress(tmp_path / "home")
        async with later.running(), later.client() as client:
            await later.sees(**{cell.name: "up"})
            assert await ask(client) == cell.name
            assert later.revision_in_force == 1


@pytest.mark.asyncio
async def test_a_damaged_journal_is_said_and_leaves_a_running_haproxy_alone(tmp_path: Path) -> None:
    async with FakeCell().running() as cell:
        earlier = RunningIngress(tmp_path / "home")
        async with earlier.running():
            await earlier.route(pool(cell))
            await earlier.die()
            (tmp_path / "home" / "journal.json").write_text("{")
            later = RunningIngress(tmp_path / "home")
            later.use(earlier.settings)
            async with later.running(), later.client() as client:
                assert "damaged" in later.reports[-1].observed.reason
                assert await ask(client) == cell.name
                await later.route(pool(cell))
                assert later.reports[-1].observed.reason == ""


@pytest.mark.asyncio
async def test_a_table_that_could_not_be_written_is_in_force_once_it_can(
    ingress: RunningIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = ingress.ingress._journal
    save, full = journal.save, [OSError(errno.ENOSPC, "No space left on device")] * 2

    def save_if_there_is_room(table: RoutingTable) -> None:
        if full:
            raise full.pop()
        save(table)

    monkeypatch.setattr(journal, "save", save_if_there_is_room)
    monkeypatch.setattr(agent, "WRITE_AGAIN_S", 0.05)
    ingress.ingress.receive(RoutingTable(1, HOME, ()))
    await eventually(lambda: any("No space left" in report.observed.reason for report in ingress.reports))
    await eventually(lambda: ingress.revision_in_force == 1, what="the table that was sent once is in force")
    assert ingress.reports[-1].observed.reason == ""


@pytest.mark.asyncio
async def test_a_table_that_cannot_be_carried_out_is_refused_by_name(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        refused = [
            (RoutingTable(2, HOME, (pool(cell, fractions={HOME: 0.7}),)), "sum to 0.7, not to 1"),
            (RoutingTable(3, "mars", ()), "the table is for region 'mars'"),
            (RoutingTable(4, HOME, (pool(cell),), max_body_bytes=10**12), "tune.bufsize"),
        ]
        for table, said in refused:
            ingress.ingress.receive(table)
            await eventually(lambda said=said: said in ingress.reports[-1].observed.reason)  # type: ignore[misc]
            assert ingress.reports[-1].observed.reason.startswith(f"revision {table.revision} refused")
            assert ingress.revision_in_force == 1
        assert await ask(client) == cell.name
        ingress.revision = 4
        await ingress.route(pool(cell))
        assert ingress.reports[-1].observed.reason == ""


@pytest.mark.asyncio
async def test_a_taken_port_is_named_until_it_is_free(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home")
    with socket.create_server(("127.0.0.1", ingress.settings.port)):
        task = asyncio.create_task(ingress.ingress.run(ingress.reports.append, ingress.windows.append))
        await eventually(lambda: ingress.reports and "Address already in use" in ingress.reports[-1].observed.reason)
    await eventually(lambda: ingress.reports[-1].observed.reason == "")
    assert ingress.haproxy.pid
    task.cancel()
    await ingress.ingress.stop(grace_s=0.0)


@pytest.mark.asyncio
async def test_a_stop_lets_streams_finish_and_ends_what_takes_too_long(tmp_path: Path) -> None:
    async with FakeCell(chunks=10, step_s=0.02).running() as cell, FakeCell().running() as endless:
        ingress = RunningIngress(tmp_path / "home")
        async with ingress.running(), ingress.client() as client:
            await ingress.route(pool(cell), pool(endless, name="endless", models=("endless",)))
            await ingress.sees(**{cell.name: "up", endless.name: "up"})
            stream = asyncio.create_task(read_stream(client))
            endless.release.clear()
            hangs = asyncio.create_task(read_stream(client, "endless"))
            await eventually(lambda: cell.in_flight == endless.in_flight == 1)
            await ingress.die()
            await ingress.ingress.stop(grace_s=1.0)
            assert await stream == "".join(f"{number} " for number in range(10))
            assert not ingress.haproxy.is_alive()
            assert len(await asyncio.gather(hangs, return_exceptions=True)) == 1
