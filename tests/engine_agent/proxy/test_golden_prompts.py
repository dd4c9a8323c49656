"""The real proxy asks its engine the version's golden prompts before it calls it healthy."""

import pytest

from tests.engine_agent.proxy.engine import json_answer, running_engine
from tests.engine_agent.proxy.proxy_process import running_proxy, until

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
            assert await proxy.agent_check() == f"down #{said}\n"
            assert (await proxy.complete()).status == 503
            assert engine.token_probes == 2


async def test_an_engine_that_fails_on_a_golden_prompt_is_asked_again() -> None:
    async with running_engine() as engine:
        engine.token = json_answer(b'{"reason":"warming up"}', b"500 Internal Server Error")
        async with running_proxy(engine, "--golden", GOLDEN, wait=False) as proxy:
            await until(lambda: engine.token_probes > 0, "it is asked")
            engine.token = says(" Paris")
            await until(proxy.is_healthy, "it answers")
