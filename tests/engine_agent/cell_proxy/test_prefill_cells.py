"""A decode proxy and the answers of prefill cells, over a plain link in the test's loop."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.handovers import Handovers
from engine_agent.cell_proxy.meter import Meter
from engine_agent.cell_proxy.wire import RequestHead
from engine_agent.protocol.messages import PrefillCell
from engine_agent.protocol.proxy_messages import Pairs
from engine_agent.protocol.states import CellRole
from tests.engine_agent.cell_proxy.engine import Engine, Script, Turn, json_answer, running_engine
from tests.engine_agent.cell_proxy.test_prefill import PARAMS

pytestmark = pytest.mark.asyncio
HEAD = RequestHead(b"POST", b"/v1/completions", [], True, True, 0, False, False, b"r-1")
BODY = msgspec.json.encode({"model": "m", "prompt": "a long prompt of many words " * 100})


def answers(in_flight: int, **params: object) -> Script:
    """A prefill proxy with this answer."""

    async def script(turn: Turn) -> None:
        said = {**PARAMS, "remote_host": "127.0.0.1", **params}
        whole = json_answer(msgspec.json.encode({"kv_transfer_params": said, "prompt_tokens": 40}))
        await turn.send(whole.replace(b"\r\n", b"\r\nX-Switchyard-In-Flight: %d\r\n" % in_flight, 1))

    return script


@asynccontextmanager
async def paired(*scripts: Script) -> AsyncIterator[tuple[Handovers, list[Engine]]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_engine(script)) for script in scripts]
        cells = (
            PrefillCell(f"p-{n}", 1, f"n-{n}", "127.0.0.1", engine.port, 9401, "a", 4)
            for n, engine in enumerate(engines)
        )
        handovers = Handovers(CellRole.DECODE, "a", Meter(0.0), None, transfers_max=2, limit_s=60.0)
        handovers.pair(Pairs("x", tuple(cells)))
        stack.callback(handovers.close)
        yield handovers, engines


async def read(handovers: Handovers, tenant: str) -> bytes | None:
    """The handover of one request; None if there is none."""
    handover = handovers.begin(HEAD, BODY, RequestMetadata(tenant=tenant))
    if handover is None:
        return None
    try:
        return await handover.read()
    finally:
        handover.close()


async def test_a_cell_that_says_it_is_full_gets_nothing_for_a_moment() -> None:
    async with paired(answers(4, remote_engine_id="e-0"), answers(0, remote_engine_id="e-1")) as (handovers, engines):
        assert all([await read(handovers, tenant) for tenant in "abc"])
        assert [len(engine.requests) for engine in engines] == [1, 2]


async def test_a_cell_that_takes_the_name_of_anothers_engine_is_not_believed() -> None:
    same = "e-0"
    async with paired(answers(4, remote_engine_id=same), answers(0, remote_engine_id=same)) as (handovers, _):
        assert await read(handovers, "a")
        assert await read(handovers, "b") == b""
        assert handovers.counts.fallbacks == {"bad_params": 1}


async def test_a_cell_that_names_another_place_is_not_believed_and_rests() -> None:
    async with paired(answers(0, remote_port=22)) as (handovers, engines):
        assert await read(handovers, "a") == b""
        assert await read(handovers, "b") is None
        assert (handovers.counts.fallbacks, handovers.counts.alone) == ({"bad_params": 1}, {"no_cell": 1})
        assert len(engines[0].requests) == 1


async def test_a_prompt_that_a_cell_cannot_read_does_not_keep_others_from_it() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(json_answer(b"{}", b"502 Bad Gateway"))

    async with paired(script) as (handovers, engines):
        assert [await read(handovers, tenant) for tenant in "ab"] == [b"", b""]
        assert len(engines[0].requests) == 2


async def test_handovers_under_way_have_a_limit() -> None:
    async with paired(answers(0)) as (handovers, _):
        begun = [handovers.begin(HEAD, BODY, RequestMetadata(tenant=tenant)) for tenant in "abc"]
        assert [each is not None for each in begun] == [True, True, False]
        assert handovers.counts.alone == {"transfers_full": 1}
        for each in filter(None, begun):
            each.close()
            each.close()
        assert handovers.counts.in_flight == 0


async def test_what_was_here_a_moment_ago_is_read_here_again() -> None:
    async with paired(answers(0)) as (handovers, engines):
        assert await read(handovers, "a")
        assert await read(handovers, "a") is None
        assert handovers.counts.alone == {"cached": 1}
        assert len(engines[0].requests) == 1


async def test_what_the_prefill_proxy_hears_names_nobody() -> None:
    async with paired(answers(0)) as (handovers, engines):
        metadata = RequestMetadata(tenant="acme", key="0a1b", is_routed=True, adapter="acme/tuned")
        handover = handovers.begin(HEAD, BODY, metadata)
        assert handover is not None
        await handover.read()
        headers = engines[0].requests[0].headers
        assert not {"x-switchyard-tenant", "x-switchyard-key"} & headers.keys()
        assert (headers["x-switchyard-adapter"], headers["x-request-id"]) == ("acme/tuned", "r-1")
        assert engines[0].requests[0].body == BODY
