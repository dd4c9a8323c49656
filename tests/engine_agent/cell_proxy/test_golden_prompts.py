"""The real proxy asks its engine the version's golden prompts before it calls it healthy."""

import asyncio
import os

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.probes import Prober
from engine_agent.cell_proxy.settings import ProbeTimes, ProxySettings
from engine_agent.protocol.messages import GoldenPrompt
from tests.engine_agent.cell_proxy.engine import json_answer, running_engine
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

GOLDEN = '[{"prompt": "The capital of France is", "expect": "Paris"}]'


def says(text: str) -> bytes:
    return json_answer(b'{"choices":[{"text":"%b"}],"usage":{"completion_tokens":2}}' % text.encode())


async def test_an_engine_that_answers_as_it_must_is_healthy() -> None:
    async with running_engine() as engine:
        engine.token = says(" Paris, of course")
        async with running_proxy(engine, "--golden", GOLDEN) as proxy:
            assert (await proxy.status())["health"]["wrong"] is False
            assert engine.token_probes == 1


async def test_an_engine_that_answers_wrong_twice_is_never_routed_and_says_what_it_said() -> None:
    async with running_engine() as engine:
        engine.token = says(" London")
        async with running_proxy(engine, "--golden", GOLDEN, wait=False) as proxy:
            await until(lambda: engine.token_probes == 2, "it is asked twice")

            async def is_condemned() -> bool:
                return bool((await proxy.status())["health"]["wrong"])

            await until(is_condemned, "the wrong answers condemn it")
            said = (await proxy.status())["health"]["reason"]
            assert said == "golden prompt 'The capital of France is' is answered ' London' without 'Paris'"
            assert await proxy.health_check() == (503, f"the cell's engine is not healthy: {said}")
            assert (await proxy.complete()).status == 503
            assert engine.token_probes == 2


async def test_an_engine_that_fails_on_a_golden_prompt_is_asked_again() -> None:
    async with running_engine() as engine:
        engine.token = json_answer(b'{"reason":"warming up"}', b"500 Internal Server Error")
        async with running_proxy(engine, "--golden", GOLDEN, wait=False) as proxy:
            await until(lambda: engine.token_probes > 0, "it is asked")
            engine.token = says(" Paris")
            await until(proxy.is_healthy, "it answers")


async def test_its_answer_may_take_longer_than_one_token() -> None:
    """An engine that shares its cores takes 19 s for what takes one otherwise: slow, and right."""
    golden = (GoldenPrompt(prompt="The capital of France is", expect="Paris"),)
    times = ProbeTimes(token_timeout_s=0.0, token_interval_s=1000.0)
    null = os.open(os.devnull, os.O_WRONLY)
    async with running_engine() as engine:
        engine.token = says(" Paris")
        address = ("127.0.0.1", engine.port, "tiny", 4)
        settings = ProxySettings("n-1", "c-1", 1, "127.0.0.1", 0, 0, *address, golden=golden, probes=times)
        cell = Cell(settings, LineLog(null, requests=False))
        probing = asyncio.create_task(Prober(cell).run())
        await until(lambda: cell.judge.ok, "it is healthy")
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        cell.pool.close()
    os.close(null)
