"""Streams that can continue at another cell, in the cell's proxy: who may request marks, how a stream tells that its
cell failed or leaves, and what each cell counts."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

import pytest

from engine_agent.cell_proxy import refusal
from engine_agent.protocol.states import Phase
from tests.engine_agent.cell_proxy.engine import DONE, STREAM_HEAD, Turn, chunk
from tests.engine_agent.cell_proxy.http_stream import Message, read_chunk, read_head, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of
from tests.engine_agent.fake_control_plane import eventually

pytestmark = pytest.mark.asyncio

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x", "stream": True}
ON = {"x_switchyard_continuation": "on", "x_switchyard_tenant": "acme"}
CONTINUATION = {"prompt": "7:0", "groups": [[0], [1]]}
REPEATED = {**BODY, "switchyard_continuation": CONTINUATION}
REPLAYED = {"x_switchyard_replayed": "2", **ON}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'


def event(number: int) -> bytes:
    return b': tokens %d\ndata: {"choices":[{"text":"%d"}]}\n\n' % (number, number)


OPENING = b": prompt 7 0123\n" + event(0)


async def ask(proxy: LocalProxy, given: Mapping[str, Any] | None = None, /, **headers: str) -> Message:
    reader, writer = await proxy.send(request(PATH, json.dumps(given or BODY).encode(), **headers))
    message = await read_message(reader)
    writer.close()
    return message


async def counted(proxy: LocalProxy) -> tuple[int, int]:
    await eventually(lambda: not proxy.cell.in_flight and not proxy.cell.settlements)
    meters = proxy.cell.meter.classes.values()
    return sum(each.prompt_tokens_total for each in meters), sum(each.completion_tokens_total for each in meters)


async def failures(proxy: LocalProxy) -> dict[str, int]:
    """Failures of the cell, those that the relay counts if it must, and those that the tenant saw."""
    await counted(proxy)
    meter = proxy.cell.meter
    seen = sum(row.errors_total for row in meter.usage.rows())
    return {"failed": meter.errors_total, "passed on": meter.passed_on_total, "seen": seen}


async def breaks(turn: Turn) -> None:
    await turn.send(STREAM_HEAD + chunk(OPENING) + chunk(event(1) + b': tokens 2\ndata: {"ch'))
    turn.die()


async def finishes(turn: Turn) -> None:
    await turn.send_stream([OPENING, *map(event, range(1, 5)), USAGE, DONE])


async def test_a_broken_stream_says_so_to_the_relay_before_it_does_to_the_client() -> None:
    async with proxy_of(breaks, replays=True) as proxy:
        answer = await ask(proxy, **ON)
        shown, mark, rest = answer.body.partition(b": broken engine_died\n")
        assert shown == OPENING + event(1) + b"\n\n"
        assert mark
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "engine_died"
        assert await counted(proxy) == (7, 2), "whole events count: another cell generates the rest again"
        assert await failures(proxy) == {"failed": 1, "passed on": 1, "seen": 0}


async def test_without_a_relay_a_broken_stream_ends_with_an_error() -> None:
    async with proxy_of(breaks, replays=True) as proxy:
        assert b": broken" not in (await ask(proxy)).body
        assert "x-switchyard-continuation" not in proxy.engine.requests[-1].headers
        assert await failures(proxy) == {"failed": 1, "passed on": 0, "seen": 1}


async def test_a_continued_stream_counts_what_no_other_cell_has_counted() -> None:
    async with proxy_of(finishes, replays=True) as proxy:
        await ask(proxy, REPEATED, **REPLAYED, x_switchyard_replay_counted="2")
        assert await counted(proxy) == (0, 3)
        assert proxy.cell.meter.tokens_total == 3
        assert (proxy.cell.meter.replayed_total, proxy.cell.meter.recounted_total) == (9, 0)
        assert sum(row.requests_total for row in proxy.cell.meter.usage.rows()) == 0, "the first cell counted it"
        assert (proxy.cell.meter.requests_total, proxy.cell.meter.continued_total) == (1, 1)
        assert not proxy.cell.meter.all_counts("ttft"), "its client has had its first token"
        sent = proxy.engine.requests[-1]
        assert sent.headers["x-switchyard-continuation"] == "on"
        assert not {"x-switchyard-replayed", "x-switchyard-replay-counted"} & sent.headers.keys()
        assert sent.json()["switchyard_continuation"] == CONTINUATION


async def test_a_continued_stream_that_breaks_again_counts_its_own_part() -> None:
    async def again(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(OPENING + event(1)) + chunk(event(2)) + chunk(event(3)))
        turn.die()

    async with proxy_of(again, replays=True) as proxy:
        await ask(proxy, REPEATED, **REPLAYED, x_switchyard_replay_counted="2")
        assert await counted(proxy) == (0, 2)
        assert await failures(proxy) == {"failed": 1, "passed on": 1, "seen": 0}


async def test_a_continued_stream_that_fails_before_its_first_event_is_passed_on_and_not_handed_back() -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    async with proxy_of(dies, replays=True) as proxy:
        await ask(proxy, REPEATED, **REPLAYED)
        assert await failures(proxy) == {"failed": 1, "passed on": 1, "seen": 0}
        assert proxy.cell.meter.handed_back_total == 0


@pytest.mark.parametrize(("before", "tokens"), [({}, (7, 5)), ({"x_switchyard_replay_counted": "1"}, (0, 4))])
async def test_a_continued_stream_counts_what_a_cell_without_power_could_not(
    before: dict[str, str], tokens: tuple[int, int]
) -> None:
    async with proxy_of(finishes, replays=True) as proxy:
        await ask(proxy, REPEATED, **REPLAYED, **before)
        assert await counted(proxy) == tokens
        assert proxy.cell.meter.recounted_total == tokens[1] - 3, "the engine generated 3"
        assert proxy.cell.meter.replayed_total == 2 + 7 - tokens[0]


@pytest.mark.parametrize("headers", [{}, ON, {"x_switchyard_replayed": "2"}])
async def test_clients_cannot_repeat_tokens(headers: dict[str, str]) -> None:
    async with proxy_of(finishes, replays=True) as proxy:
        answer = await ask(proxy, {**BODY, "switchyard_continuation": CONTINUATION}, **headers)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "switchyard_continuation")
        assert not proxy.engine.requests


async def test_an_engine_without_replay_is_neither_asked_for_marks_nor_for_a_replay() -> None:
    async with proxy_of(finishes) as proxy:
        await ask(proxy, **ON)
        assert "x-switchyard-continuation" not in proxy.engine.requests[-1].headers
        answer = await ask(proxy, x_switchyard_replayed="2", **ON)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "continuation_refused")


@pytest.mark.parametrize("error", [b'data: {"error": {"message": "dead", "code": 500}}\n\n'])
async def test_an_engine_that_says_that_it_failed_is_left(error: bytes) -> None:
    async def fails(turn: Turn) -> None:
        await turn.send_stream([OPENING, error, DONE])

    async with proxy_of(fails, replays=True) as proxy:
        assert b": broken engine_error\ndata: {" in (await ask(proxy, **ON)).body
        assert await failures(proxy) == {"failed": 1, "passed on": 1, "seen": 0}
        assert b": broken" not in (await ask(proxy)).body
        assert proxy.cell.meter.passed_on_total == 1


async def test_an_error_that_the_request_causes_is_not_passed_on() -> None:
    async def refuses(turn: Turn) -> None:
        await turn.send_stream([OPENING, b'data: {"error": {"message": "no", "code": 400}}\n\n', DONE])

    async with proxy_of(refuses, replays=True) as proxy:
        assert b": broken" not in (await ask(proxy, **ON)).body
        assert (await failures(proxy))["passed on"] == 0


async def test_a_cell_that_drains_lets_its_streams_leave_and_counts_up_to_there() -> None:
    async def endless(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(OPENING))
        number = 1
        while not turn.gone.is_set():
            await turn.send(chunk(event(number)))
            number += 1
            await asyncio.sleep(0.002)

    async with proxy_of(endless, replays=True) as proxy:
        reader, writer = await proxy.send(request(PATH, json.dumps(BODY).encode(), **ON))
        await read_head(reader)
        got = await read_chunk(reader)
        proxy.cell.enter_phase(Phase.DRAIN)
        while not got.endswith(b": leaving\n\n"):
            got += await read_chunk(reader)
        writer.close()
        assert await counted(proxy) == (7, got.count(b": tokens"))
        assert not any(row.cancelled_total for row in proxy.cell.meter.usage.rows())


async def test_at_the_drain_deadline_a_stream_that_did_not_leave_breaks_for_the_relay() -> None:
    async def endless(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(OPENING))
        await turn.gone.wait()

    async with proxy_of(endless, replays=True) as proxy:
        reader, writer = await proxy.send(request(PATH, json.dumps(BODY).encode(), **ON))
        await read_head(reader)
        await read_chunk(reader)
        for each in tuple(proxy.cell.in_flight):
            each.cut(refusal.stopping())
        assert (await read_chunk(reader)).startswith(b"\n\n: broken ")
        writer.close()
        assert await counted(proxy) == (7, 1)


async def test_a_silent_stream_is_left_by_a_proxy_that_works_and_counts_up_to_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_agent.cell_proxy.exchange.LEAVES_SILENCE_AFTER_S", 0.02)
    monkeypatch.setattr("engine_agent.cell_proxy.exchange.LEAVES_WITHIN_S", 0.02)

    async def hangs(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(OPENING))
        await left.wait()
        await turn.send(chunk(event(1) + event(2)))
        await turn.gone.wait()

    left = asyncio.Event()
    async with proxy_of(hangs, replays=True) as proxy:
        reader, writer = await proxy.send(request(PATH, json.dumps(BODY).encode(), **ON))
        await read_head(reader)
        got = await read_chunk(reader)
        while not got.endswith(b": leaving engine_silent\n\n"):
            for each in tuple(proxy.cell.in_flight):
                each.check(monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    got += await read_chunk(reader)
        left.set()
        while not got.endswith(event(2)):
            got += await read_chunk(reader)
        writer.close()
        assert await counted(proxy) == (7, 1), "the relay continues from where it was told to leave"


async def test_a_stream_that_stays_resumes_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_agent.cell_proxy.exchange.LEAVES_WITHIN_S", 0.02)
    drained = asyncio.Event()

    async def waits(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(OPENING))
        await drained.wait()
        await turn.send(chunk(event(1) + USAGE + DONE) + b"0\r\n\r\n")

    async with proxy_of(waits, replays=True) as proxy:
        reader, writer = await proxy.send(request(PATH, json.dumps(BODY).encode(), **ON))
        await read_head(reader)
        await read_chunk(reader)
        proxy.cell.enter_phase(Phase.DRAIN)
        drained.set()
        rest = b""
        while piece := await read_chunk(reader):
            rest += piece
        writer.close()
        assert rest == b": leaving\n\n" + event(1) + DONE
        assert await counted(proxy) == (7, 5)


async def test_a_continued_stream_is_read_by_its_own_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill cell reads prompts, and the repeated tokens are none."""
    async with proxy_of(finishes, replays=True) as proxy:
        monkeypatch.setattr(proxy.cell.handovers, "begin", lambda *_: pytest.fail("handed over"))
        answer = await ask(proxy, {**BODY, "switchyard_continuation": CONTINUATION}, x_switchyard_replayed="2", **ON)
        assert answer.status == 200
