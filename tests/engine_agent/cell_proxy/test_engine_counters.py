"""The engine's token counters are compared with the proxy's while both are idle."""

import json

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.engine_counters import (
    COMPARED_S,
    EngineTotals,
    SpeculationWindow,
    TokenChecker,
    TokenTotals,
    WorkReader,
    read_counters,
    read_engine_load,
    read_speculation,
    read_totals,
)
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.protocol.load_messages import EngineLoad, SpeculationLoad, TokenCheck
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
    """A client's request that has ended."""
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


LLAMA_CPP_PAGE = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 40
llamacpp:prompt_tokens_cached_total 24
llamacpp:tokens_predicted_total 7
llamacpp:n_decode_total 9
llamacpp:predicted_tokens_seconds 60.5
"""


async def test_llama_cpps_counters_are_read_under_its_own_names() -> None:
    """It counts cached tokens of prompts apart from the others."""
    assert read_counters(LLAMA_CPP_PAGE) == TokenTotals(64, 7)
    assert read_totals(LLAMA_CPP_PAGE) == EngineTotals(9, 64, 24, 7)


TRITON_PAGE = b"""# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="llm",version="1"} 2
# HELP switchyard_prompt_tokens_total Prompt tokens that the model has read, with cached ones.
# TYPE switchyard_prompt_tokens_total counter
switchyard_prompt_tokens_total{model="llm"} 10
switchyard_cached_tokens_total{model="llm"} 4
switchyard_completion_tokens_total{model="llm"} 7
switchyard_steps_total{model="llm"} 9
nv_inference_pending_request_count{model="llm",version="1"} 0
nv_cpu_utilization 0.9949748743718593
"""


async def test_the_counters_of_tritons_model_are_read_from_tritons_page() -> None:
    assert read_counters(TRITON_PAGE) == TokenTotals(10, 7)
    assert read_totals(TRITON_PAGE) == EngineTotals(9, 10, 4, 7)


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
        cell.meter.unreported_total += 1
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


STEPS_PAGE = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="a"}} {prompt:.1f}
vllm:prompt_tokens_total{{engine="1",model_name="a"}} 1e+03
vllm:prompt_tokens_cached_total{{engine="0"}} 7.0
vllm:generation_tokens_total{{engine="0",model_name="a"}} {completion:.1f}
vllm:prefix_cache_hits_total{{engine="0"}} 40.0
vllm:iteration_tokens_total_bucket{{engine="0",le="8.0"}} 3.0
vllm:iteration_tokens_total_sum{{engine="0"}} 9e9
vllm:iteration_tokens_total_count{{engine="0"}} {steps:.1f}
"""


class Request:
    def check(self, now: float) -> None: ...

    def cut(self, refusal: Refusal) -> None: ...

    @property
    def is_leaving(self) -> bool:
        return False

    def leave(self) -> None: ...


def reports_steps(engine: Engine, steps: int, prompt: int, completion: int) -> None:
    page = STEPS_PAGE.format(steps=steps, prompt=prompt, completion=completion).encode()
    engine.ledger = {"/metrics": json_answer(page)}


async def read(cell: Cell, reader: WorkReader) -> tuple[int, ...] | None:
    await reader.read()
    work = cell.work
    return None if work is None else (work.steps, work.prompt_tokens, work.cached_tokens, work.completion_tokens)


async def test_steps_of_all_engines_are_added_and_no_others_taken_for_them() -> None:
    page = STEPS_PAGE.format(steps=5, prompt=24, completion=7).encode()
    assert read_totals(page) == EngineTotals(5, 1024, 40, 7)
    assert read_totals(b"vllm:prompt_tokens_total 5\n") is None, "an engine that counts no steps"


async def test_totals_begin_with_the_first_look_and_an_idle_engine_is_asked_nothing() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        reader, request = WorkReader(cell), Request()
        reports_steps(engine, 100, 500, 100)
        assert await read(cell, reader) == (0, 0, 0, 0)
        reports_steps(engine, 999, 999, 999)
        assert await read(cell, reader) == (0, 0, 0, 0), "nothing was in flight since"
        cell.enter(request)
        cell.enter(other := Request())
        reports_steps(engine, 150, 700, 130)
        assert await read(cell, reader) == (50, 200, 0, 30)
        cell.leave(request)
        cell.leave(request)
        assert cell.busy_s() > 0.0
        cell.leave(other)
        busy_s = cell.busy_s()
        assert cell.busy_s() == busy_s
        reports_steps(engine, 10, 20, 10)
        assert await read(cell, reader) == (0, 0, 0, 0), "the engine counts anew"
        assert cell.status().load.work == cell.work
        cell.pool.close()


BATCH_PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 5.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 2.5e-01
vllm:num_preemptions_total{engine="0",model_name="a"} 7.0
vllm:request_num_preemptions_sum{engine="0"} 99.0
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (BATCH_PAGE, EngineLoad(8, 2, 37.5, 7)),
        (b'sglang:num_running_reqs{a="b"} 4.0\nsglang:token_usage{a="b"} 0.81\n', EngineLoad(4, 0, 81.0)),
        (b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n", EngineLoad(1, 2, None)),
        (TRITON_PAGE, None),
    ],
)
async def test_a_batch_is_summed_over_engines_and_unknown_without_one(page: bytes, load: EngineLoad | None) -> None:
    assert read_engine_load(page) == load


async def test_the_batch_of_an_idle_cell_is_empty() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        cell.enter(request := Request())
        engine.ledger = {"/metrics": json_answer(BATCH_PAGE)}
        await WorkReader(cell).read()
        assert cell.status().load.engine == EngineLoad(8, 2, 37.5, 7)
        cell.leave(request)
        assert cell.status().load.engine == EngineLoad(0, 0, 0.0, 7)
        cell.pool.close()


GUESSES = b"""vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 480.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 240.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
"""


async def test_guesses_are_read_without_those_by_position() -> None:
    assert read_speculation(GUESSES) == (120, 480, 240)
    assert read_speculation(b"vllm:prompt_tokens_total 5\n") is None


async def test_guesses_are_counted_over_an_hour_and_anew_for_a_new_engine() -> None:
    window = SpeculationWindow()
    assert window.note(0.0, (100, 400, 200)) is None, "nothing was guessed since"
    assert window.note(30.0, (110, 440, 220)) == SpeculationLoad(30.0, 10, 40, 20)
    for minute in range(1, 61):
        window.note(60.0 * minute, (100 + minute, 400, 200))
    assert window.note(3660.0, (200, 800, 400)) == SpeculationLoad(3600.0, 99, 400, 200)
    assert window.note(3700.0, (5, 20, 10)) is None


async def test_a_cell_reports_what_its_engine_guessed() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        reader = WorkReader(cell)
        for drafts in (100, 150):
            cell.enter(request := Request())
            engine.ledger = {"/metrics": json_answer(GUESSES.replace(b"100.0", b"%d" % drafts))}
            await reader.read()
            cell.leave(request)
        reported = cell.status().load.speculation
        assert reported is not None
        assert reported.drafts == 50
        cell.pool.close()
