"""The log survives the exit of its reader."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from engine_agent.cell_proxy.log import MAX_WAITING_BYTES, LineLog
from tests.engine_agent.cell_proxy.engine import Engine, running_engine
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log = LineLog(writer, requests=True)
    log.event(event="phase")
    log.flush()
    assert log.dropped == 1
    os.close(writer)


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_without_requests_only_events_are_written() -> None:
    reader, writer = os.pipe()
    log = LineLog(writer, requests=False)
    log.request(event="request")
    log.event(event="phase")
    log.flush()
    assert os.read(reader, 4096).count(b"\n") == 1
    os.close(reader)
    os.close(writer)


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@asynccontextmanager
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ProxyProcess, Engine, Engine]]:
    """A proxy, its engine, and its collector."""
    async with running_engine() as engine, running_engine() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
        async with running_proxy(engine) as proxy:
            yield proxy, engine, collector


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_request_of_a_trace_becomes_a_span_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as (proxy, engine, collector):
        await proxy.complete(traceparent=f"00-{TRACE}-00f067aa0ba902b7-01", x_switchyard_tenant="acme")
        passed_on = engine.requests[0].headers["traceparent"].split("-")
        assert passed_on[1] == TRACE
        assert passed_on[2] != "00f067aa0ba902b7"
        proxy.terminate()
        assert await proxy.process.wait() == 0
        (export,) = collector.exports
        assert " /v1/traces " in export.first_line
        (resource,) = json.loads(export.body)["resourceSpans"]
        (span,) = resource["scopeSpans"][0]["spans"]
        assert (span["traceId"], span["spanId"], span["parentSpanId"]) == (TRACE, passed_on[2], "00f067aa0ba902b7")
        said = {each["key"]: each["value"] for each in span["attributes"]}
        assert said["http.response.status_code"] == {"intValue": "200"}
        assert said["switchyard.tenant"] == {"stringValue": "acme"}
        assert said["gen_ai.usage.output_tokens"] == {"intValue": "1"}


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_collector_that_is_away_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as (proxy, _, collector):
        await collector.die()
        assert (await proxy.complete()).status == 200
        proxy.terminate()
        assert await proxy.process.wait() == 0


@pytest.mark.processes
@pytest.mark.asyncio
async def test_without_a_collector_the_context_passes_as_it_is() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        given = f"00-{TRACE}-00f067aa0ba902b7-01"
        await proxy.complete(traceparent=given, tracestate="a=b")
        assert (engine.requests[0].headers["traceparent"], engine.requests[0].headers["tracestate"]) == (given, "a=b")


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_wrong_setting_costs_the_spans_and_not_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318")
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await until(proxy.is_healthy, "the proxy serves")
        assert (await proxy.complete()).status == 200
