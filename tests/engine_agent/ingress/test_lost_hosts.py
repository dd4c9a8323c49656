"""What waits at a server whose host is gone ends, and nothing else does."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from engine_agent.ingress.lost_hosts import LostHosts, is_silent
from engine_agent.ingress.running import RunningServer
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool, read_stream

AFTER_S = 3.0
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
    hosts = LostHosts(AFTER_S)
    assert [hosts.note([GONE], now_s) for now_s in (0.0, 1.0, 2.0, 2.9)] == [()] * 4
    assert hosts.note([GONE], 3.0) == (KEY,)
    assert hosts.note([replace(GONE, in_flight=0)], 3.25) == ()
    assert hosts.note([GONE], 3.5) == (KEY,)


def test_a_sign_of_life_begins_the_wait_anew() -> None:
    hosts = LostHosts(AFTER_S)
    for now_s in (0.0, 1.0, 2.0):
        hosts.note([GONE], now_s)
    assert hosts.note([replace(GONE, usable=True)], 2.5) == ()
    assert [hosts.note([GONE], now_s) for now_s in (3.0, 4.0, 5.0)] == [()] * 3
    assert hosts.note([GONE], 6.0) == (KEY,)


def test_an_agent_that_slept_has_seen_nothing_meanwhile() -> None:
    hosts = LostHosts(AFTER_S)
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
