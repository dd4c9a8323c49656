"""Streams of adapters, and of cells that decode only, continue like others: at an engine with the adapter, and without
the prefill engine that read the prompt."""

import asyncio
from typing import Any

from engine_agent.protocol.continuation import REFUSED_TYPE
from engine_agent.relay.dialects import dialect_of
from engine_agent.relay.marked_stream import MarkedStream, groups_of
from tests.engine_agent.engines.sim.in_process import ADAPTER, MODEL, Application, application
from tests.engine_agent.engines.sim.test_continuing import ON, body_of, without_times
from tests.engine_agent.engines.sim.test_handover import CHAT, LONG, pair, prefilled

BODY: dict[str, Any] = {"messages": LONG, "max_tokens": 12, "stream_options": {"include_usage": True}}
CUT = 5


async def continued(first: Application, other: Application, model: str, **handed_over: Any) -> tuple[bytes, bytes]:
    """The answer to a client whose stream continues after `CUT` events, and the undisturbed one."""
    dialect = dialect_of(CHAT.encode())
    assert dialect is not None
    body = {**BODY, "model": model}
    _, whole = await first.send(CHAT, body_of({**body, **handed_over}), sent=ON)
    events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
    undisturbed, run = MarkedStream(dialect), MarkedStream(dialect)
    shown = run.add(b"".join(events[:CUT]))
    repeat = {"prompt": run.prompt.decode(), "groups": groups_of(bytes(run.marks))}
    status, rest = await other.send(CHAT, body_of(body, repeat), sent=ON)
    assert status == 200, rest
    shown += MarkedStream(dialect, run.events, bytes(run.marks), run.shown).add(rest)
    return without_times(shown), without_times(undisturbed.add(whole))


def test_a_stream_of_an_adapter_continues_with_its_adapter() -> None:
    async def scenario() -> None:
        async with application() as first, application() as other:
            got, wanted = await continued(first, other, ADAPTER)
            assert got == wanted
            _, plain = await continued(first, other, MODEL)
            assert got != plain

    asyncio.run(scenario())


def test_an_engine_without_the_adapter_does_not_continue_its_stream() -> None:
    async def scenario() -> None:
        async with application() as running:
            _, whole = await running.send(CHAT, body_of({**BODY, "model": ADAPTER}), sent=ON)
            run = MarkedStream(dialect_of(CHAT.encode()))  # type: ignore[arg-type]
            run.add(whole)
            repeat = {"prompt": run.prompt.decode(), "groups": groups_of(bytes(run.marks))}
            status, answer = await running.send(CHAT, body_of(BODY, repeat), sent=ON)
            assert (status, REFUSED_TYPE.encode() in answer) == (409, True)

    asyncio.run(scenario())


def test_a_stream_of_a_decode_engine_continues_without_the_prefill_engine() -> None:
    async def scenario() -> None:
        async with pair() as (reads, answers), application() as other:
            params = (await prefilled(reads))["kv_transfer_params"]
            got, wanted = await continued(answers, other, MODEL, kv_transfer_params=params)
            assert answers.meters.external_hits > 0
            assert got.partition(b'"usage":')[0] == wanted.partition(b'"usage":')[0]

    asyncio.run(scenario())
