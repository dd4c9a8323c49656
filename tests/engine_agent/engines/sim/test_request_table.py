"""The simulator refuses what vLLM refuses, and accepts what it accepts: `request_table`."""

import json

import pytest

from tests.engine_agent.cell_proxy.engine import Turn, json_answer
from tests.engine_agent.cell_proxy.local_proxy import proxy_of
from tests.engine_agent.engines.request_table import CONTEXT_TOKENS, MODEL, TABLE, outcome_of
from tests.engine_agent.engines.sim.in_process import application


@pytest.mark.slow
@pytest.mark.asyncio
async def test_every_request_has_the_outcome_that_it_has_with_vllm() -> None:
    async with application(model=MODEL, max_model_len=CONTEXT_TOKENS) as served:

        async def script(turn: Turn) -> None:
            path = turn.message.first_line.split()[1]
            status, body = await served.send(path, turn.message.body)
            await turn.send(json_answer(body, b"%d X" % status))

        async with proxy_of(script) as proxy:
            found = [(row, await outcome_of(proxy.port, row)) for row in TABLE]
    assert [(row, got) for row, got in found if got != tuple(row[2:])] == []


def test_the_table_has_each_request_once_and_covers_every_dialect() -> None:
    assert len({json.dumps(row) for row in TABLE}) == len(TABLE)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        statuses = [row[2] for row in TABLE if row[0] == path]
        assert statuses.count(200) >= 15
        assert statuses.count(400) >= 20
