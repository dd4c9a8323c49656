"""What the engine counts is compared with what the proxy counts, while neither counts."""

import json

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.cell_proxy.token_check import COMPARED_S, TokenChecker, TokenTotals, read_counters
from engine_agent.protocol.messages import TokenCheck
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.cell_proxy.engine import Engine, json_answer, running_engine

pytestmark = pytest.mark.asyncio
PAGE = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="a"}} {prompt:.1f}
vllm:prompt_tokens_total{{engine="1",model_name="a"}} 1e+03
vllm:prompt_tokens_created{{engine="0",model_name="a"}} 1.7e+09
vllm:prompt_tokens_cached_total{{engine="0"}} 7.0
vllm:generation_tokens_total{{engine="0",model_name="a"}} {completion:.1f}
"""


def page(prompt: int, completion: int) -> bytes:
    return PAGE.format(prompt=prompt, completion=completion).encode()


def says(engine: Engine, prompt: int, completion: int, *, again: int = 0) -> None:
    apart = json.dumps({"prompt_tokens": again, "completion_tokens": 0}).encode()
    engine.ledger = {
        "/metrics": json_answer(page(prompt, completion)),
        "/switchyard/counted-apart": json_answer(apart),
    }


def cell_of(engine: Engine) -> Cell:
    return Cell(
        ProxySettings("n", "c", 1, "127.0.0.1", 1, 2, "127.0.0.1", engine.port, "m", 4), LineLog(2, requests=False)
    )


def counts(cell: Cell, prompt: int, completion: int) -> None:
    """A request of a client came, and is over."""
    meter = cell.meter.of(ServingClass.REALTIME)
    meter.requests_total += 1
    meter.prompt_tokens_total += prompt
    meter.completion_tokens_total += completion


async def checked(cell: Cell, checker: TokenChecker) -> tuple[int, ...] | None:
    await checker.check()
    found = cell.token_check
    if found is None:
        return None
    engine = (found.engine_prompt_total, found.engine_completion_total)
    return (*engine, found.counted_prompt_total, found.counted_completion_total)


async def test_counters_of_all_engines_are_added_and_no_others_taken_for_them() -> None:
    assert read_counters(page(24, 7)) == TokenTotals(1024, 7)
    assert read_counters(b"# nothing\nother:prompt_tokens_total 5\n") is None


async def test_growth_is_compared_from_the_first_idle_moment_on() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        checker = TokenChecker(cell)
        says(engine, 500, 100)
        assert await checked(cell, checker) == (0, 0, 0, 0)
        counts(cell, 12, 3)
        says(engine, 512, 103)
        assert await checked(cell, checker) == (12, 3, 12, 3)
        counts(cell, 10, 5)
        says(engine, 525, 108)
        assert await checked(cell, checker) == (25, 8, 22, 8)
        cell.pool.close()


async def test_own_probes_and_prompts_read_again_are_no_drift() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        checker = TokenChecker(cell)
        says(engine, 0, 0)
        await checker.check()
        counts(cell, 10, 6)
        cell.meter.probes.begun += 1
        cell.meter.probes.prompt_tokens += 4
        cell.meter.probes.completion_tokens += 1
        says(engine, 34, 7, again=20)
        assert await checked(cell, checker) == (10, 6, 10, 6)
        cell.pool.close()


async def test_nothing_is_compared_while_anything_runs_or_after_what_is_not_known() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        checker = TokenChecker(cell)
        says(engine, 0, 0)
        await checker.check()
        counts(cell, 10, 6)
        says(engine, 10, 6)
        cell.meter.probes.running = 1
        assert await checked(cell, checker) == (0, 0, 0, 0)
        cell.meter.probes.running = 0
        assert await checked(cell, checker) == (10, 6, 10, 6)
        cell.meter.probes.begun += 1
        cell.meter.probes.unknown += 1
        assert await checked(cell, checker) == (0, 0, 0, 0), "begins anew"
        counts(cell, 1, 1)
        says(engine, 11, 7)
        assert await checked(cell, checker) == (1, 1, 1, 1)
        counts(cell, 1, 1)
        says(engine, 3, 2)
        assert await checked(cell, checker) == (0, 0, 0, 0), "the engine counts from 0 again"
        cell.pool.close()


async def test_a_request_of_which_no_engine_said_what_it_used_cannot_be_compared() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        checker = TokenChecker(cell)
        says(engine, 0, 0)
        await checker.check()
        counts(cell, 10, 6)
        cell.meter.untold_total += 1
        says(engine, 400, 300)
        assert await checked(cell, checker) == (0, 0, 0, 0), "begins anew"
        counts(cell, 5, 5)
        says(engine, 405, 305)
        assert await checked(cell, checker) == (5, 5, 5, 5)
        cell.pool.close()


async def test_what_differed_once_is_over_half_an_hour_later() -> None:
    now_s = 0.0
    async with running_engine() as engine:
        cell = cell_of(engine)
        checker = TokenChecker(cell, lambda: now_s)
        says(engine, 0, 0)
        await checker.check()
        prompt = 500
        for minute in range(1, 40):
            now_s = 60.0 * minute
            counts(cell, 10, 0)
            prompt += 10
            says(engine, prompt, 0)
            found = await checked(cell, checker)
            assert found is not None
            apart = found[0] - found[2]
            if minute <= COMPARED_S / 60:
                assert apart == 500
            if minute >= 1.5 * COMPARED_S / 60:
                assert apart == 0
                assert 150 <= found[0] <= 230
        cell.pool.close()


async def test_an_engine_without_counters_is_not_compared() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        assert await checked(cell, TokenChecker(cell)) is None
        cell.pool.close()


async def test_what_is_compared_is_reported() -> None:
    cell = Cell(ProxySettings("n", "c", 1, "127.0.0.1", 1, 2, "127.0.0.1", 3, "m", 4), LineLog(2, requests=False))
    cell.token_check = TokenCheck(1.5, 2, 3, 4, 5)
    assert cell.status().load.token_check == TokenCheck(1.5, 2, 3, 4, 5)
