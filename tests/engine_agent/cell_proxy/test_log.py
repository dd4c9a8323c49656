"""The log outlives whoever reads it."""

import asyncio
import os

import msgspec
import pytest

from engine_agent.cell_proxy.log import MAX_WAITING_BYTES, LineLog

pytestmark = pytest.mark.asyncio


async def test_lines_are_json_objects_with_their_time() -> None:
    reader, writer = os.pipe()
    log = LineLog(writer, requests=True)
    log.event(event="phase", phase="drain")
    log.request(event="request", status=200)
    log.flush()
    lines = [msgspec.json.decode(line) for line in os.read(reader, 4096).splitlines()]
    assert [line["event"] for line in lines] == ["phase", "request"]
    assert all(line["at"] > 0 for line in lines)
    os.close(reader)
    os.close(writer)


async def test_a_reader_that_is_stuck_costs_lines_and_never_blocks() -> None:
    reader, writer = os.pipe()
    log = LineLog(writer, requests=True)
    line = "x" * 10_000
    for _ in range(3 * MAX_WAITING_BYTES // len(line)):
        log.event(text=line)
        log.flush()
    assert log.dropped > 0
    os.close(reader)
    os.close(writer)


async def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log = LineLog(writer, requests=True)
    log.event(event="phase")
    log.flush()
    assert log.dropped == 1
    os.close(writer)


async def test_exceptions_in_a_row_are_one_bounded_line_that_counts_the_rest() -> None:
    reader, writer = os.pipe()
    log = LineLog(writer, requests=True)
    loop = asyncio.get_running_loop()
    for _ in range(100):
        log.crash(loop, {"message": "Exchange.feed", "exception": ValueError("x" * 100_000)})
    log.flush()
    (line,) = os.read(reader, 65_536).splitlines()
    seen = msgspec.json.decode(line)
    assert (seen["event"], seen["place"], seen["unlogged_before"]) == ("crash", "Exchange.feed", 0)
    assert len(line) < 4096
    assert log.crashes_unlogged == 99
    os.close(reader)
    os.close(writer)


async def test_without_requests_only_events_are_written() -> None:
    reader, writer = os.pipe()
    log = LineLog(writer, requests=False)
    log.request(event="request")
    log.event(event="phase")
    log.flush()
    assert os.read(reader, 4096).count(b"\n") == 1
    os.close(reader)
    os.close(writer)
