"""Output of HAProxy 2.8, parsed into values and reports; and servers whose host is gone."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from msgspec import structs

from engine_agent.ingress.desired import desired_from
from engine_agent.ingress.report import cell_traffic, cell_views, telemetry
from engine_agent.ingress.routing_maps import LISTING_MAP
from engine_agent.ingress.running import (
    CellView,
    LostHosts,
    RunningBackend,
    RunningHaproxy,
    RunningServer,
    UnexpectedOutput,
    is_silent,
    read_running,
    was_idle,
)
from engine_agent.ingress.steering import Steered
from engine_agent.protocol.ingress_messages import CellTraffic, IngressTelemetry, PoolTraffic
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool, read_stream
from tests.engine_agent.ingress.test_desired import TABLE

INFO = "Name: HAProxy\nPid: 14196\ndescription: 1c87e1a239a763dc\nTotal: a: b\n\n"
STATS = (
    "# pxname,svname,qcur,scur,slim,stot,econ,eresp,wretr,hrsp_5xx,check_status,last_chk,last_agt,\n"
    "pool.chat,c-1-g3,1,3,8,20,2,1,4,5,L7OK,,via agent : up,\n"
    "pool.chat,BACKEND,2,3,200,25,2,1,4,6,,,,\n"
    "spill.chat,north.standby,0,0,,7,0,0,0,0,L4CON,Connection refused,,\n"
    "spill.chat,BACKEND,0,1,200,7,0,0,0,0,,,,\n\n"
)
STATES = (
    "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_port\n"
    "3 pool.chat 1 c-1-g3 127.0.0.1 {operation} {admin} 100 9000\n"
    "4 spill.chat 1 north.standby ::1 0 0 256 8080\n\n"
)
OVERFLOW = """# table: overflow, type: string, size:4096, used:1
0x7f9eac0f8b20: key=chat use=0 exp=86399718 shard=0 http_req_cnt=4 http_fail_rate(1000)=0
"""
MAPS = {LISTING_MAP: '0x7f0 all {"a": "b c"}\n\n', "models.map": "\n"}


def read(admin: int = 0, operation: int = 2) -> RunningHaproxy:
    return read_running(INFO, STATS, STATES.format(admin=admin, operation=operation), MAPS, OVERFLOW)


def test_a_worker_is_read_whole() -> None:
    running = read()
    assert (running.structure, running.worker_pid) == ("1c87e1a239a763dc", 14196)
    assert running.maps == {LISTING_MAP: {"all": '{"a": "b c"}'}, "models.map": {}}
    assert running.overflow == {"chat": 4}
    assert read_running(INFO, STATS, STATES.format(admin=0, operation=2), MAPS, "No such table\n").overflow == {}
    assert running.backends == (RunningBackend("pool.chat", 3, 3, 25, 6), RunningBackend("spill.chat", 1, 0, 7, 0))
    cell, other_region = running.servers
    assert (cell.address, cell.port, cell.weight) == ("127.0.0.1", 9000, 100)
    assert (cell.max_connections, cell.in_flight, cell.queued, cell.errors_total) == (8, 3, 1, 3)
    assert not cell.drains_itself
    assert other_region.max_connections == 0
    assert (other_region.view, other_region.reason) == (CellView.DOWN, "L4CON Connection refused")


@pytest.mark.parametrize(
    ("requests", "seconds_ago", "rested"), [("0", "-1", True), ("9", "0", False), ("9", "4", False), ("9", "5", True)]
)
def test_a_server_rests_from_some_time_after_its_last_request(requests: str, seconds_ago: str, rested: bool) -> None:
    stats = f"# pxname,svname,stot,lastsess,\npool.chat,c-1-g3,{requests},{seconds_ago},\n\n"
    cell, _ = read_running(INFO, stats, STATES.format(admin=8, operation=2), MAPS).servers
    assert cell.rested is rested


@pytest.mark.parametrize(
    ("admin", "draining", "maintenance", "view"),
    [
        (0x00, False, False, CellView.UP),
        (0x01, False, True, CellView.DRAIN),
        (0x04, False, False, CellView.UP),  # `disabled` in the file, ended by a command
        (0x05, False, True, CellView.DRAIN),
        (0x08, True, False, CellView.DRAIN),
    ],
)
def test_admin_states_are_told_apart(admin: int, draining: bool, maintenance: bool, view: CellView) -> None:
    cell = read(admin).servers[0]
    assert (cell.draining, cell.maintenance, cell.view) == (draining, maintenance, view)


def test_a_cell_whose_health_check_wants_nothing_new_drains_itself() -> None:
    cell = read(operation=3).servers[0]
    assert (cell.draining, cell.drains_itself, cell.view) == (False, True, CellView.DRAIN)


@pytest.mark.parametrize(
    ("info", "states"),
    [
        ("", STATES.format(admin=0, operation=2)),
        (INFO, "2\n# be_name\n"),
        (INFO, ""),
        (INFO, "1\n# be_name srv_name\npool.chat x\n"),
    ],
)
def test_an_answer_of_another_format_is_refused(info: str, states: str) -> None:
    with pytest.raises(UnexpectedOutput):
        read_running(info, STATS, states, {})


def cell(requests_total: int, in_flight: int = 0, queued: int = 0) -> RunningServer:
    return RunningServer(
        "pool.a", "c-1", "::1", 1, 1, 8, False, False, True, in_flight, queued, requests_total
    )  # fmt: skip


def worker(*servers: RunningServer, queued: int = 0, requests: int = 0, pid: int = 1) -> RunningHaproxy:
    return RunningHaproxy("", pid, servers, (RunningBackend("pool.a", queued, queued, requests, 0),), {})


@pytest.mark.parametrize(
    ("before", "after", "idle"),
    [
        (worker(), worker(), True),
        (worker(requests=5), worker(requests=6), True),
        (worker(cell(5)), worker(cell(5)), True),
        (worker(cell(5, in_flight=1)), worker(cell(5)), True),
        (worker(cell(5)), worker(cell(6)), False),
        (worker(cell(5, in_flight=1)), worker(cell(5, in_flight=1)), False),
        (worker(cell(5)), worker(cell(5, queued=1)), False),
        (worker(cell(5)), worker(cell(5), queued=1), False),
        (worker(), worker(cell(0)), False),
        (worker(pid=1), worker(pid=2), False),
    ],
)
def test_an_ingress_is_idle_that_had_nothing_to_do(before: RunningHaproxy, after: RunningHaproxy, idle: bool) -> None:
    assert was_idle(before, after) is idle


def test_a_report_names_every_cell_of_the_table_even_one_that_is_not_there_yet() -> None:
    desired = desired_from(TABLE)
    assert cell_views(read(), desired) == {"c-1": "up"}
    assert cell_views(None, desired) == {"c-1": "unknown"}


def test_telemetry_counts_by_pool_and_cell() -> None:
    said = telemetry(read(), desired_from(TABLE), None)
    assert said.pools == {
        "chat": PoolTraffic(
            in_flight=3,
            queued=3,
            requests_total=21,  # four of 25 were overflow
            errors_total=6,
            spilled_in_flight=1,
            spilled_total=7,
            spilled_to={"north": 7},
        )
    }
    assert telemetry(None, desired_from(TABLE), None) == IngressTelemetry()


def test_every_cell_has_its_counters() -> None:
    counted = CellTraffic(3, 1, requests_total=20, errors_total=3, failures_total=5, retries_total=4, reason="L7OK")
    counted = structs.replace(counted, weight=100, max_connections=8)
    desired = desired_from(TABLE)
    assert cell_traffic(read(), desired, {}) == {"c-1": counted}
    assert cell_traffic(None, desired, {}) == {}
    steered = {("pool.chat", "c-1-g3"): Steered(100, 8, "it is full")}
    assert cell_traffic(read(), desired, steered) == {"c-1": structs.replace(counted, why="it is full")}


AFTER_S, CONTINUING_AFTER_S = 3.0, 1.0
GONE = RunningServer(
    "pool.a", "c-0", "127.0.0.1", 1, 100, 8, False, False, usable=False, in_flight=1, reason="L4TOUT"
)  # fmt: skip
KEY = ("pool.a", "c-0")


@pytest.mark.parametrize(
    ("reason", "silent"),
    [
        ("L4TOUT", True),
        ("L4TOUT at initial connection step of tcp-check", True),
        ("L4CON No route to host", True),
        ("L4CON Connection refused", False),
        ("L6TOUT", False),
        ("L7TOUT", False),
        ("L7STS Service Unavailable", False),
        ("", False),
    ],
)
def test_only_a_host_that_gives_no_sign_is_silent(reason: str, silent: bool) -> None:
    assert is_silent(replace(GONE, reason=reason)) is silent
    assert not is_silent(replace(GONE, reason=reason, usable=True)), "one failed check is none"


def test_requests_end_after_a_while_of_silence_as_long_as_there_are_any() -> None:
    hosts = LostHosts(AFTER_S, CONTINUING_AFTER_S)
    assert [hosts.note([GONE], now_s) for now_s in (0.0, 1.0, 2.0, 2.9)] == [()] * 4
    assert hosts.note([GONE], 3.0) == (KEY,)
    assert hosts.note([replace(GONE, in_flight=0)], 3.25) == ()
    assert hosts.note([GONE], 3.5) == (KEY,)


def test_a_sign_of_life_begins_the_wait_anew() -> None:
    hosts = LostHosts(AFTER_S, CONTINUING_AFTER_S)
    for now_s in (0.0, 1.0, 2.0):
        hosts.note([GONE], now_s)
    assert hosts.note([replace(GONE, usable=True)], 2.5) == ()
    assert [hosts.note([GONE], now_s) for now_s in (3.0, 4.0, 5.0)] == [()] * 3
    assert hosts.note([GONE], 6.0) == (KEY,)


def test_where_streams_continue_requests_are_taken_back_earlier() -> None:
    hosts = LostHosts(AFTER_S, CONTINUING_AFTER_S)
    asked: list[str] = []

    def continues(backend: str) -> bool:
        asked.append(backend)
        return True

    assert hosts.note([replace(GONE, usable=True)], 0.0, continues) == ()
    assert asked == [], "it costs nothing while all hosts answer"
    assert [hosts.note([GONE], now_s, continues) for now_s in (0.0, 0.9)] == [()] * 2
    assert hosts.note([GONE], 1.0, continues) == (KEY,)
    assert asked[0] == GONE.backend


def test_an_agent_that_slept_has_seen_nothing_meanwhile() -> None:
    hosts = LostHosts(AFTER_S, CONTINUING_AFTER_S)
    hosts.note([GONE], 0.0)
    assert hosts.note([GONE], 60.0) == ()
    assert hosts.note([GONE], 60.1) == (KEY,)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_requests_at_a_host_that_lost_its_power_are_tried_elsewhere_and_streams_end(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home")
    ingress.use(replace(ingress.settings, times=replace(ingress.settings.times, host_gone_s=2.0)))
    async with (
        ingress.running(),
        ingress.client() as client,
        FakeCell(chunks=2).running() as cell,
        FakeCell().running() as other,
    ):
        cell.release.clear()
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        stream = asyncio.create_task(read_stream(client))
        answer = asyncio.create_task(ask(client))
        await eventually(lambda: cell.in_flight == 2)
        with cell.power_off():
            await ingress.route(pool(cell, other))
            await ingress.sees(**{cell.name: "down", other.name: "up"})
            assert await answer == other.name
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
                await stream
