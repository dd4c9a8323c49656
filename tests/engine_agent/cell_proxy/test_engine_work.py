"""What the engine computed is read from its own metrics, beside the time for which its cell was busy."""

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.engine_work import EngineTotals, GuessWindow, WorkReader, read_guesses, read_totals
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.protocol.messages import SpeculationLoad
from tests.engine_agent.cell_proxy.engine import Engine, json_answer, running_engine
from tests.engine_agent.cell_proxy.test_token_check import cell_of

pytestmark = pytest.mark.asyncio
PAGE = """# TYPE vllm:prompt_tokens_total counter
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


def says(engine: Engine, steps: int, prompt: int, completion: int) -> None:
    page = PAGE.format(steps=steps, prompt=prompt, completion=completion).encode()
    engine.ledger = {"/metrics": json_answer(page)}


async def read(cell: Cell, reader: WorkReader) -> tuple[int, ...] | None:
    await reader.read()
    work = cell.work
    return None if work is None else (work.steps, work.prompt_tokens, work.cached_tokens, work.completion_tokens)


async def test_counters_of_all_engines_are_added_and_no_others_taken_for_them() -> None:
    page = PAGE.format(steps=5, prompt=24, completion=7).encode()
    assert read_totals(page) == EngineTotals(5, 1024, 40, 7)
    assert read_totals(b"vllm:prompt_tokens_total 5\n") is None, "an engine that counts no steps"


async def test_totals_begin_with_the_first_look_and_an_idle_engine_is_asked_nothing() -> None:
    async with running_engine() as engine:
        cell = cell_of(engine)
        reader, request = WorkReader(cell), Request()
        says(engine, 100, 500, 100)
        assert await read(cell, reader) == (0, 0, 0, 0)
        says(engine, 999, 999, 999)
        assert await read(cell, reader) == (0, 0, 0, 0), "nothing was in flight since"
        cell.enter(request)
        cell.enter(other := Request())
        says(engine, 150, 700, 130)
        assert await read(cell, reader) == (50, 200, 0, 30)
        cell.leave(request)
        cell.leave(request)
        assert cell.busy_s() > 0.0
        cell.leave(other)
        busy_s = cell.busy_s()
        assert cell.busy_s() == busy_s
        says(engine, 10, 20, 10)
        assert await read(cell, reader) == (0, 0, 0, 0), "the engine counts anew"
        assert cell.status().load.work == cell.work
        cell.pool.close()


GUESSES = b"""vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 480.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 240.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
"""


async def test_guesses_are_read_without_those_by_position() -> None:
    assert read_guesses(GUESSES) == (120, 480, 240)
    assert read_guesses(b"vllm:prompt_tokens_total 5\n") is None


async def test_guesses_are_counted_over_an_hour_and_anew_for_a_new_engine() -> None:
    window = GuessWindow()
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
