"""Spans of the real proxy arrive at a collector, and the engine's work belongs to them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.engine_agent.cell_proxy.engine import Engine, running_engine
from tests.engine_agent.cell_proxy.proxy_process import ProxyProcess, running_proxy, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


@asynccontextmanager
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ProxyProcess, Engine, Engine]]:
    """A proxy, its engine, and the collector that it was told of."""
    async with running_engine() as engine, running_engine() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
        async with running_proxy(engine) as proxy:
            yield proxy, engine, collector


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


async def test_a_collector_that_is_away_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as (proxy, _, collector):
        await collector.die()
        assert (await proxy.complete()).status == 200
        proxy.terminate()
        assert await proxy.process.wait() == 0


async def test_without_a_collector_the_context_passes_as_it_is() -> None:
    async with running_engine() as engine, running_proxy(engine) as proxy:
        given = f"00-{TRACE}-00f067aa0ba902b7-01"
        await proxy.complete(traceparent=given, tracestate="a=b")
        assert (engine.requests[0].headers["traceparent"], engine.requests[0].headers["tracestate"]) == (given, "a=b")


async def test_a_wrong_setting_costs_the_spans_and_not_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318")
    async with running_engine() as engine, running_proxy(engine) as proxy:
        await until(proxy.is_healthy, "the proxy serves")
        assert (await proxy.complete()).status == 200
