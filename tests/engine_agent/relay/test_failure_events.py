"""How a stream ends that no other cell continues: with the failure event of its dialect, after whole events."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.protocol.continuation import broken_mark
from engine_agent.relay import continuable
from engine_agent.relay.dialects import dialect_of
from engine_agent.relay.marked_stream import MOST_EVENT_BYTES, MarkedStream
from tests.engine_agent.engines.sim.in_process import application
from tests.engine_agent.engines.sim.test_continuing import BODIES, body_of
from tests.engine_agent.relay.rig import Cell, Request, Rig, chunked, head, relaying

REFUSAL = Refusal(502, "no_cell", "no other cell")
STREAMS = {"response": "/v1/responses", "message": "/v1/messages", "chat": "/v1/chat/completions"}


async def events_of(name: str) -> list[bytes]:
    async with application() as running:
        answer = (await running.send(BODIES[name][0], body_of(BODIES[name][1])))[1]
    return [event + b"\n\n" for event in answer.split(b"\n\n")[:-1]]


def data_of(event: bytes) -> dict[str, Any]:
    found = re.search(rb"^data: (.*)$", event, re.MULTILINE)
    assert found is not None, event
    data: dict[str, Any] = json.loads(found[1])
    return data


def dying(events: list[bytes], *, rest: bytes = b"") -> Cell:
    """Writes these events and a part of the next one, and closes the connection."""

    async def answer(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(b"".join(events) + rest))
        await writer.drain()
        writer.close()

    return answer


def play(folder: Path, cell: Cell, then: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with relaying(folder, cell) as rig:
            await then(rig)

    asyncio.run(run())


async def ask(rig: Rig, path: str) -> httpx.Response:
    return await rig.http.post(path, json={"model": "demo", "stream": True})


@pytest.mark.parametrize("name", STREAMS)
def test_a_cell_that_dies_ends_its_stream_in_the_form_of_its_dialect(tmp_path: Path, name: str) -> None:
    events = asyncio.run(events_of(name))

    async def check(rig: Rig) -> None:
        content = (await ask(rig, STREAMS[name])).content
        assert content.startswith(b"".join(events[:4]))
        *_, last = content.removesuffix(b"\n\n").split(b"\n\n")
        data = data_of(last)
        if name == "response":
            assert last.startswith(b"event: response.failed\n")
            assert (data["sequence_number"], data["response"]["status"]) == (4, "failed")
            assert data["response"]["id"] == data_of(events[0])["response"]["id"]
        elif name == "message":
            assert last.startswith(b"event: error\n")
            assert (data["type"], data["error"]["type"]) == ("error", "api_error")
        else:
            assert data["error"]["code"] == "no_marks"
        assert rig.counts["cut:no_marks"] == 1

    play(tmp_path, dying(events[:4], rest=events[4][:20]), check)


@pytest.mark.parametrize("name", STREAMS)
def test_a_cell_that_dies_after_the_last_event_costs_nothing(tmp_path: Path, name: str) -> None:
    events = asyncio.run(events_of(name))

    async def check(rig: Rig) -> None:
        assert (await ask(rig, STREAMS[name])).content == b"".join(events)
        assert not any(each.startswith("cut") for each in rig.counts)

    play(tmp_path, dying(events), check)


def test_a_cell_that_dies_before_the_first_event_gets_an_error_answer(tmp_path: Path) -> None:
    async def check(rig: Rig) -> None:
        answer = await ask(rig, STREAMS["message"])
        assert (answer.status_code, answer.json()["type"]) == (502, "error")
        assert (answer.json()["error"]["type"], rig.counts["cut:no_marks"]) == ("api_error", 1)

    async def breaks(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head("a") + chunked(broken_mark("engine_died") + b"\n") + b"0\r\n\r\n")

    play(tmp_path, breaks, check)


@pytest.mark.parametrize("size", [1000, 65_536])
def test_a_long_event_passes_without_marks_and_is_ended_before_the_failure(size: int) -> None:
    dialect = dialect_of(b"/v1/responses")
    assert dialect is not None
    run = MarkedStream(dialect)
    opening = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
    sent = opening + b": tokens 1\ndata: " + b"x" * (MOST_EVENT_BYTES + 10) + b"\n\n: tokens 2\ndata: y\n\n: tokens 3\n"
    sent += b"data: " + b"z" * (MOST_EVENT_BYTES + 10)
    shown = b"".join(run.add(sent[at : at + size]) for at in range(0, len(sent), size))
    assert shown.startswith(re.sub(rb": tokens .\n", b"", sent[: sent.index(b": tokens 3")]))
    assert b": tokens" not in shown
    assert (run.events, run.is_whole, run.at_boundary) == (3, False, False)
    farewell = dialect.failure(REFUSAL, opening, run.events, at_boundary=run.at_boundary)
    assert farewell.startswith(b"\n\nevent: response.failed\n")
    assert data_of(farewell)["sequence_number"] == 3


def test_every_row_of_the_table_has_its_own_code() -> None:
    codes = [limit.code for limit in continuable.LIMITS]
    assert len(codes) == len(set(codes))
