"""The real proxy's health report, as the agent and HAProxy read it, and the life of its process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.engine_agent.cell_proxy.engine import json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import request
from tests.engine_agent.cell_proxy.proxy_process import ROOT, running_proxy, until
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


async def test_a_healthy_cell_is_up_everywhere() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        assert await proxy.health_check() == (200, "")
        assert (await proxy.ask(request("/healthz"))).status == 200
        status = await proxy.status()
        assert status["health"]["ok"] is True
        assert status["phase"] == "serve"
        assert status["in_flight"] == 0
        assert engine.token_probes == 1


async def test_an_engine_without_a_token_is_not_ready() -> None:
    async with running_engine() as engine:
        engine.token = json_answer(b'{"reason":"model not loaded"}', b"500 Internal Server Error")
        async with running_proxy(engine, wait=False) as proxy:
            await until(lambda: engine.token_probes > 0, "a token is asked for")

            async def says_why() -> bool:
                _, why = await proxy.health_check()
                return why.endswith("not healthy: token probe: the engine answers 500: model not loaded")

            await until(says_why, "the reason is known")
            assert (await proxy.complete()).json()["error"]["code"] == "engine_unhealthy"
            engine.token = json_answer(b"{}")
            await until(proxy.is_healthy, "the engine gives a token")


async def test_the_reason_of_an_unhealthy_engine_reaches_the_health_check() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        engine.health = json_answer(b'{"reason":"follower 1 lost"}', b"503 Service Unavailable")
        await until(proxy.is_unhealthy, "the probe sees it")
        status, why = await proxy.health_check()
        assert status == 503
        assert why.endswith("engine /health answers 503: follower 1 lost")
        assert proxy.process.returncode is None


async def test_a_dead_engine_is_seen_without_any_request() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await engine.die()
        await until(proxy.is_unhealthy, "the probe sees it")
        status, why = await proxy.health_check()
        assert status == 503
        assert "engine unreachable" in why


async def test_an_engine_that_is_stopped_is_unhealthy_after_two_slow_probes() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        engine.read_bodies.clear()
        await until(proxy.is_unhealthy, "two probes were slow")
        assert "did not answer 2 times in a row" in (await proxy.status())["health"]["reason"]


async def test_the_process_outlives_its_parent_and_names_its_node() -> None:
    async with running_engine() as engine:
        ports = [str(free_port()), str(free_port())]
        command = [
            sys.executable, "-m", "engine_agent.cell_proxy", "--node-id", "n-0a1b2c3d", "--cell", "c-test",
            "--generation", "1", "--port", ports[0], "--admin-port", ports[1],
            "--engine", f"http://127.0.0.1:{engine.port}", "--model", "tiny", "--max-concurrency", "1",
        ]  # fmt: skip
        parent = f"import subprocess; print(subprocess.Popen({command!r}, stdout=subprocess.PIPE).pid, flush=True)"
        shell = await asyncio.create_subprocess_exec(
            sys.executable, "-c", parent, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        output, _ = await shell.communicate()
        pid = int(output)
        try:
            from tests.engine_agent.cell_proxy.http_stream import ask

            async def serves() -> bool:
                try:
                    return (await ask(int(ports[0]), request("/v1/completions", b"{}"))).status == 200
                except OSError:
                    return False

            await until(serves, "the orphan serves")
            os.kill(pid, signal.SIGHUP)
            assert await serves()
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as arguments:  # noqa: ASYNC230
                assert "n-0a1b2c3d" in arguments.read().split("\0")
        finally:
            os.kill(pid, signal.SIGKILL)
